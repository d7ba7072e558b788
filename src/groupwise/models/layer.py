"""One transformer layer over packed rows, forward and backward.

With blocked attention the whole layer is one operation whose gradient is written out. What a layer keeps for its backward pass is
most of the memory that learning needs; here it is the layer's input, the rotated queries, keys and values, the attention's output,
the middle residual and the gate and up projections. Norms and activations are cheap and are computed again.

Axes: R packed rows, D model width, H query heads, K key-value heads, E head width, F feed-forward width.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear

from groupwise.models.attention import AttentionPlan, attend_by_library
from groupwise.models.blocked_attention import BlockedPlan, Statistics, attend, attend_backward
from groupwise.models.ops import (
    gated,
    gated_backward,
    head_norm,
    head_norm_backward,
    normalise,
    normalise_backward,
    product,
    rms_norm,
    rotate_heads,
)  # fmt: skip
from groupwise.models.varlen_attention import attend_by_flash
from groupwise.threads import adapt_threads

if TYPE_CHECKING:
    from groupwise.models.merging import MergedLayer

__all__ = [
    "Block", "Blocks", "Kept", "Layer", "Shape", "blocked_backward", "blocked_forward", "copy_filled", "hollow",
    "layer_forward",
]  # fmt: skip

Collect = Callable[[Tensor, Tensor, str, str | None], dict[str, Tensor]]
"""From a projection's output gradient, its input, its name and its bias's: the gradients of its weight and bias that are wanted."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer's tensors; biases and norms that its family does not have are ``None``."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor | None = None
    """Norm of what attention adds to the residual stream (Gemma); ``post_norm`` is that of what the feed-forward part reads."""
    feed_forward_norm: Tensor | None = None
    """Norm of what the feed-forward part adds."""

    def tensors(self) -> list[Tensor | None]:
        return [getattr(self, name) for name in self.__slots__]

    def forward(self, x: Tensor, plan: AttentionPlan, shape: Shape, recompute: bool) -> tuple[Tensor, Tensor]:
        """``layer_forward`` of this layer."""
        return layer_forward(self, x, plan, shape, recompute)

    def product(self, name: str, x: Tensor) -> Tensor:
        """``x`` times the projection ``name``: ``qkv``, ``output``, ``gate_up`` or ``down``."""
        return linear(x, getattr(self, name), getattr(self, f"{name}_bias", None))

    def blocked(self, x: Tensor, plan: AttentionPlan, shape: Shape, recompute: bool) -> tuple[Tensor, Tensor]:
        """The layer with blocked attention, differentiable; as ``layer_forward``."""
        return _BlockedLayer.apply(x, plan, shape, recompute, *self.tensors())


@dataclass(frozen=True, slots=True)
class Shape:
    """What the layers of a model have in common."""

    heads: int
    kv_heads: int
    head_width: int
    epsilon: float
    norm_offset: float = 0.0
    """Added to the weights of norms."""
    query_scale: float | None = None
    """By default 1 / sqrt(head_width)."""
    activation: str = "silu"

    @property
    def norm(self) -> tuple[float, float]:
        """Epsilon and offset of every norm."""
        return self.epsilon, self.norm_offset


def layer_forward(
    layer: Layer | MergedLayer, x: Tensor, plan: AttentionPlan, shape: Shape, recompute: bool
) -> tuple[Tensor, Tensor]:
    """The layer's output ``[R, D]``, differentiable, and its rotated keys and values ``[R, 2K, E]``, detached.

    With ``recompute`` the backward pass keeps the input alone and computes the layer again (gradient checkpointing).
    """
    if plan.blocked is not None:
        if torch.is_grad_enabled():
            return layer.blocked(x, plan, shape, recompute)
        out, kept = blocked_forward(layer, x, plan, shape)
        return out, kept.rotated[: len(x), shape.heads :]
    if recompute and torch.is_grad_enabled():
        return torch.utils.checkpoint.checkpoint(_by_library, layer, x, plan, shape, use_reentrant=False)
    return _by_library(layer, x, plan, shape)


def _by_library(layer: Layer | MergedLayer, x: Tensor, plan: AttentionPlan, shape: Shape) -> tuple[Tensor, Tensor]:
    heads, kv_heads, norm = shape.heads, shape.kv_heads, shape.norm
    qkv = layer.product("qkv", rms_norm(x, layer.input_norm, *norm)).view(len(x), -1, shape.head_width)
    if layer.q_norm is not None and layer.k_norm is not None:
        qkv = head_norm(qkv, layer.q_norm, layer.k_norm, heads, kv_heads, *norm)
    if plan.runs is not None:
        attended, rotated = attend_by_flash(qkv, plan.cos, plan.sin, plan.runs, heads, kv_heads, shape.query_scale)
    else:
        assert plan.rectangles is not None
        attended, rotated = attend_by_library(qkv, plan.cos, plan.sin, plan.rectangles, heads, kv_heads, shape.query_scale)
    added = layer.product("output", attended.reshape(len(x), -1))
    x = x + (added if layer.attention_norm is None else rms_norm(added, layer.attention_norm, *norm))
    added = layer.product("down", gated(layer.product("gate_up", rms_norm(x, layer.post_norm, *norm)), shape.activation))
    x = x + (added if layer.feed_forward_norm is None else rms_norm(added, layer.feed_forward_norm, *norm))
    return x, rotated[:, heads:]


@dataclass(frozen=True, slots=True)
class Kept:
    """What the backward pass of a layer starts from."""

    qkv: Tensor
    """Before the head norms, ``[R, H + 2K, E]``; where there are none, nothing (an empty tensor)."""
    rotated: Tensor
    """``[R + 1, H + 2K, E]``, the last row zero."""
    attended: Tensor
    """``[R + 1, H, E]``."""
    top: Tensor
    total: Tensor
    middle: Tensor
    """The residual stream between attention and feed-forward, ``[R, D]``."""
    gate_up: Tensor
    attention_added: Tensor
    """What attention and feed-forward add, before the norms of it, ``[R, D]``; where there are none, nothing."""
    feed_forward_added: Tensor

    def tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.__slots__]


def _blocks(plan: AttentionPlan) -> BlockedPlan:
    assert plan.blocked is not None
    return plan.blocked


def blocked_forward(layer: Layer | MergedLayer, x: Tensor, plan: AttentionPlan, shape: Shape) -> tuple[Tensor, Kept]:
    """The output ``[R, D]``, and what the backward pass starts from. Each weight is asked for once."""
    rows, turned, norm = len(x), shape.heads + shape.kv_heads, shape.norm
    normal, _ = normalise(x, layer.input_norm, *norm)
    qkv = raw = product(normal, layer.qkv.t(), layer.qkv_bias).view(rows, turned + shape.kv_heads, shape.head_width)
    if layer.q_norm is not None and layer.k_norm is not None:
        qkv = head_norm(raw, layer.q_norm, layer.k_norm, shape.heads, shape.kv_heads, *norm)
    rotated = qkv.new_empty(rows + 1, *qkv.shape[1:])
    rotate_heads(qkv, plan.cos, plan.sin, rotated[:rows], turned)
    rotated[rows] = 0
    attended, statistics = attend(rotated, _blocks(plan), shape.heads, shape.kv_heads, shape.query_scale)
    nothing = x.new_empty(0)
    attention_added = feed_forward_added = nothing
    middle = product(attended[:rows].view(rows, -1), layer.output.t(), layer.output_bias)
    if layer.attention_norm is not None:
        attention_added, middle = middle, normalise(middle, layer.attention_norm, *norm)[0]
    middle = middle.add_(x)
    gate_up = product(normalise(middle, layer.post_norm, *norm)[0], layer.gate_up.t())
    out = product(gated(gate_up, shape.activation), layer.down.t())
    if layer.feed_forward_norm is not None:
        feed_forward_added, out = out, normalise(out, layer.feed_forward_norm, *norm)[0]
    out = out.add_(middle)
    kept = raw if layer.q_norm is not None else nothing
    return out, Kept(
        kept, rotated, attended, statistics.top, statistics.total, middle, gate_up, attention_added, feed_forward_added
    )


class _BlockedLayer(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: AttentionPlan, shape: Shape, recompute: bool, *tensors: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        layer = Layer(*tensors)  # type: ignore[arg-type]
        out, kept = blocked_forward(layer, x, plan, shape)
        ctx.save_for_backward(x, *(() if recompute else kept.tensors()))
        ctx.rest = (layer, plan, shape)
        keys_values = kept.rotated[: len(x), shape.heads :]
        ctx.mark_non_differentiable(keys_values)
        return out, keys_values

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        layer, plan, shape = ctx.rest
        x, *saved = ctx.saved_tensors
        kept = Kept(*saved) if saved else blocked_forward(layer, x, plan, shape)[1]
        needed = dict(zip(Layer.__slots__, ctx.needs_input_grad[4:], strict=True))
        grad_x, grads = blocked_backward(grad, x, kept, layer, plan, shape, partial(_product_gradients, needed))
        return grad_x, None, None, None, *(grads.get(name) for name in Layer.__slots__)


def _product_gradients(needed: dict[str, bool], grad: Tensor, read: Tensor, name: str, bias: str | None) -> dict[str, Tensor]:
    """Gradients of a projection's weight and bias, where asked for, from its output's gradient and its input."""
    gradients = {name: product(grad.t(), read)} if needed[name] else {}
    if bias and needed[bias]:
        gradients[bias] = grad.sum(0, dtype=torch.float32).to(grad.dtype)
    return gradients


def blocked_backward(
    grad: Tensor, x: Tensor, kept: Kept, layer: Layer, plan: AttentionPlan, shape: Shape, collect: Collect
) -> tuple[Tensor, dict[str, Tensor]]:
    """Gradients of the layer's input and, by name, of its norms and of what ``collect`` gives for each projection."""
    adapt_threads()
    grads: dict[str, Tensor] = {}

    def through_norm(grad: Tensor, read: Tensor, name: str, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The gradient of a norm's input, whose weight's gradient goes to ``grads``, and the norm's output once more."""
        weight = getattr(layer, name)
        normal, scale = normalise(read, weight, *shape.norm)
        back, grads[name] = normalise_backward(grad, read, scale, weight, residual, shape.norm_offset)
        return back, normal

    added = grad if layer.feed_forward_norm is None else through_norm(grad, kept.feed_forward_added, "feed_forward_norm")[0]
    grad_gate_up, activated = gated_backward(product(added, layer.down), kept.gate_up, shape.activation)
    grads |= collect(added, activated, "down", None)
    del activated
    grad_middle, normal = through_norm(product(grad_gate_up, layer.gate_up), kept.middle, "post_norm", grad)
    grads |= collect(grad_gate_up, normal, "gate_up", None)
    del grad_gate_up, normal
    added = grad_middle
    if layer.attention_norm is not None:
        added = through_norm(grad_middle, kept.attention_added, "attention_norm")[0]
    grads |= collect(added, kept.attended[: len(x)].flatten(1), "output", "output_bias")
    grad_qkv = _attention_backward(product(added, layer.output), kept, plan, shape)
    if layer.q_norm is not None and layer.k_norm is not None:
        grad_qkv, grads["q_norm"], grads["k_norm"] = head_norm_backward(
            grad_qkv, kept.qkv, layer.q_norm, layer.k_norm, shape.heads, shape.kv_heads, *shape.norm
        )
    grad_qkv = grad_qkv.flatten(1)
    grad_x, normal = through_norm(product(grad_qkv, layer.qkv), x, "input_norm", grad_middle)
    grads |= collect(grad_qkv, normal, "qkv", "qkv_bias")
    return grad_x, grads


def _attention_backward(grad: Tensor, kept: Kept, plan: AttentionPlan, shape: Shape) -> Tensor:
    """The way back from the gradient of the attention's output ``[R, H * E]`` to that of ``qkv`` before the rotary embedding."""
    rows, turned = len(grad), shape.heads + shape.kv_heads
    grad_out = torch.zeros_like(kept.attended)
    grad_out[:rows] = grad.view(rows, shape.heads, shape.head_width)
    statistics = Statistics(kept.top, kept.total)
    grad_rotated = attend_backward(
        grad_out, kept.rotated, kept.attended, statistics, _blocks(plan), shape.heads, shape.kv_heads, shape.query_scale
    )[:rows]
    grad_qkv = torch.empty_like(grad_rotated)
    rotate_heads(grad_rotated, plan.cos, plan.sin, grad_qkv, turned, inverse=True)
    return grad_qkv


Views = Mapping[str, Sequence[nn.Parameter]]
"""For each of a decoder's tensors, by name, the transformers module's parameters that are its rows, in order."""


class Block(nn.Module):
    """One layer. Its tensors are attributes, as in ``Layer``, whatever stands behind them at the time."""

    def __init__(self, layer: Layer, merged: MergedLayer | None = None) -> None:
        """``merged``: what computes the layer, from these tensors and an adapter's, which are not the block's; by itself they are all."""
        super().__init__()
        self.merged = merged
        for name, tensor in zip(Layer.__slots__, layer.tensors(), strict=True):
            self.register_parameter(name, None if tensor is None else _parameter(tensor))

    def forward(self, x: Tensor, plan: AttentionPlan, shape: Shape, recompute: bool) -> tuple[Tensor, Tensor]:
        """Like ``Layer.forward``, on the tensors as they are now."""
        return layer_forward(self.merged or self.now(), x, plan, shape, recompute)

    def now(self) -> Layer:
        """The tensors as they are now."""
        return Layer(*(getattr(self, name) for name in Layer.__slots__))


class Blocks(nn.Module):
    """All tensors of a decoder, under its names: the layers' in modules of their own, what is before and after them here.

    Calling it runs a computation that reads them, as the part of this module's forward pass that it is.
    """

    def __init__(self, embedding: Tensor, layers: Sequence[Layer | Block], final_norm: Tensor, head: Tensor | None) -> None:
        """``head``: None where the embedding is the output head too."""
        super().__init__()
        self.embedding, self.final_norm = _parameter(embedding), _parameter(final_norm)
        self.head = None if head is None else _parameter(head)
        self.layers = nn.ModuleList(layer if isinstance(layer, Block) else Block(layer) for layer in layers)

    def forward(self, compute: Callable[..., Any], *arguments: Any) -> Any:
        return compute(*arguments)

    def without_weights(self, dtype: torch.dtype) -> Blocks:
        """The same shapes, frozen, on the meta device."""

        def empty(tensor: Tensor | None) -> Tensor | None:
            like = None if tensor is None else torch.empty(tensor.shape, dtype=dtype, device="meta")
            return None if like is None else nn.Parameter(like, requires_grad=False)

        embedding, final_norm = empty(self.embedding), empty(self.final_norm)
        assert embedding is not None
        assert final_norm is not None
        layers = [Layer(*(empty(getattr(block, name)) for name in Layer.__slots__)) for block in self.layers]  # type: ignore[arg-type]
        return Blocks(embedding, layers, final_norm, empty(self.head))


def _parameter(tensor: Tensor) -> nn.Parameter:
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor)


def hollow(views: Views, device: torch.device) -> None:
    """Let the module's own parameters hold nothing, in their old shapes, on ``device``."""
    for parameters in views.values():
        for parameter in parameters:
            nothing = torch.zeros(1, dtype=parameter.dtype, device=device).expand(parameter.shape)
            if parameter.is_meta:  # it takes no data of another kind of device, so the object becomes another one
                torch.utils.swap_tensors(parameter, nn.Parameter(nothing, requires_grad=parameter.requires_grad))
            else:
                parameter.data = nothing


def copy_filled(module: Any, views: Views, weights: Mapping[str, Tensor]) -> Any:
    """A copy of a hollow ``module`` with ``weights`` in it: by name, in the decoder's layout, on the CPU, and so is all else of it."""
    filled: dict[int, Any] = {}
    for name, parameters in views.items():
        rows = weights[name].split([len(p) for p in parameters])
        filled |= {id(p): nn.Parameter(part, requires_grad=False) for p, part in zip(parameters, rows, strict=True)}
    for buffer in module.buffers():
        filled[id(buffer)] = buffer.detach().to("cpu", copy=True)
    for parameter in module.parameters():  # an adapter's, which lie where it learns
        if id(parameter) not in filled:
            filled[id(parameter)] = nn.Parameter(parameter.detach().to("cpu", copy=True), parameter.requires_grad)
    return copy.deepcopy(module, filled)
