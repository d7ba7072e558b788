"""Weights that are made when they are asked for: a frozen base, quantised or not, plus what an adapter adds to it.

``W + scaling B A`` is added up in fp32 and rounded to the base's dtype, for one layer at a time. Rounding to the nearest would lose
most of it: the base's numbers lie on the grid of their dtype, a young adapter changes them by less than half a step of that grid, and
then nothing would change at all. So the rounding is dithered: each weight has a fixed threshold, evenly spaced, above which it takes the
next step. On average a merged weight is the exact one, an adapter that adds nothing changes nothing, and the same factors always give
the same weights: those that sample are those that learn. The optimiser's fp32 masters are rounded into weights in the same way.

The frozen weights are those of the model's own layers, or lie fused in a ``Block`` that machinery gathers and lets go of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear

from groupwise.models.attention import AttentionPlan
from groupwise.models.families import Family
from groupwise.models.layer import Block, Kept, Layer, Shape, blocked_backward, blocked_forward, layer_forward
from groupwise.models.native import calls as native
from groupwise.models.ops import product
from groupwise.models.quantised import dense_weight

__all__ = ["Factor", "MergedLayer", "Projection", "added_up", "dithered", "is_adapted_layer", "merged_weight", "round_dithered_"]

_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""Bits of fp32's mantissa, of 23, that a narrower type has no room for."""
_PIECE = 2**22
"""Numbers rounded at a time: bounds the fp32 copies."""
_GOLDEN, _PLASTIC = 0x9E37, 0xC13F
"""Odd multipliers: rows and columns walk through all thresholds evenly (Weyl sequences of the golden ratio and a second one)."""


def is_adapted_layer(layer: Any) -> bool:
    """Whether ``layer`` is peft's: a linear layer with low-rank factors beside it."""
    return hasattr(layer, "lora_A") and hasattr(layer, "base_layer")


def dithered(exact: Tensor, dtype: torch.dtype, start: int = 0, width: int | None = None) -> Tensor:
    """``exact`` in fp32 and contiguous, which is overwritten, rounded to ``dtype`` by a fixed pattern of thresholds over rows and columns.

    What ``dtype`` can hold stays what it is; anything between becomes one of its two neighbours, on average itself (but for numbers of fp16
    below 6.1e-5, which are rounded to the nearest multiple of 6e-8). Of a tensor with rows of ``width``, by default those of ``exact``,
    it is the numbers from ``start`` on: a part is rounded as the whole is.
    """
    bits = _DROPPED_BITS.get(dtype)
    if bits is None:
        return exact.to(dtype)
    width = width or exact.shape[-1]
    whole = exact.view(torch.int32).view(-1)
    if start % width == whole.numel() % width == 0:
        first, whole = start // width, whole.view(-1, width)
        rows = torch.arange(first, first + len(whole), dtype=torch.int32, device=exact.device)[:, None]
        columns = torch.arange(width, dtype=torch.int32, device=exact.device)[None]
    else:
        places = torch.arange(start, start + whole.numel(), device=exact.device)
        rows, columns = (places // width).int(), (places % width).int()
    thresholds = (rows * _GOLDEN + columns * _PLASTIC).bitwise_and_((1 << bits) - 1)
    whole.add_(thresholds).bitwise_and_(-(1 << bits))
    return exact.to(dtype)


def round_dithered_(weights: Tensor, exact: Tensor, start: int = 0, width: int | None = None) -> None:
    """Write ``exact``, which stays what it is, into ``weights`` of the same shape: ``dithered`` where it is fp32 and they are narrower.

    They may be on different devices: from pinned memory to a GPU this returns before it is done.
    """
    soon = weights.device.type != "cpu"
    if exact.dtype != torch.float32 or weights.dtype not in _DROPPED_BITS or not exact.numel():
        weights.copy_(exact, non_blocking=soon)
        return
    if not weights.is_contiguous():
        whole = torch.empty_like(weights, memory_format=torch.contiguous_format)
        round_dithered_(whole, exact, start, width)
        weights.copy_(whole)
        return
    width = width or (exact.shape[-1] if exact.dim() else 1)
    rounded, given = weights.view(-1), exact.contiguous().view(-1)
    in_rows = start % width == given.numel() % width == 0
    if in_rows and given.device == rounded.device and native.fits(rounded):
        native.dither(given, rounded, start // width, width)
        return
    size = max(1, _PIECE // width) * width
    for first in range(0, given.numel(), size):
        own = given[first : first + size].to(rounded.device, copy=True, non_blocking=soon)
        rounded[first : first + size].copy_(dithered(own, weights.dtype, start + first, width))


@dataclass(frozen=True, slots=True)
class Factor:
    """What an adapter adds to some rows of a projection: ``scaling * b @ a``."""

    rows: slice
    a: nn.Parameter
    """``[rank, in]``."""
    b: nn.Parameter
    """``[rows, rank]``."""
    scaling: float

    def gradients(self, grad: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of ``a`` and ``b``, from the gradient ``[R, out]`` of the projection's output and its input ``[R, in]``."""
        own, a, b = grad[:, self.rows], self.a.to(read.dtype), self.b.to(read.dtype)
        grad_a = product(product(own, b).t(), read)
        grad_b = product(own.t(), product(read, a.t()))
        return grad_a.to(self.a.dtype).mul_(self.scaling), grad_b.to(self.b.dtype).mul_(self.scaling)


def _active(layer: Any) -> list[str]:
    """Names of the adapters that act in ``layer`` now."""
    if not is_adapted_layer(layer) or layer.disable_adapters:
        return []
    return [name for name in layer.active_adapters if name in layer.lora_A]


@torch.no_grad()
def merged_weight(
    layer: Any, out: Tensor | None = None, dtype: torch.dtype | None = None, *, frozen: Tensor | None = None
) -> Tensor:
    """The weight ``[out, in]`` of a linear layer with the adapters that act in it, if any; into ``out`` if given.

    ``frozen``: the weight without them, where the layer itself does not have it.
    """
    weight = dense_weight(getattr(layer, "base_layer", layer), dtype) if frozen is None else frozen
    factors = [(layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name]) for name in _active(layer)]
    if factors:
        return added_up(weight, factors, out)
    return weight.detach() if out is None else out.copy_(weight)


def added_up(weight: Tensor, factors: Sequence[tuple[Tensor, Tensor, float]], out: Tensor | None = None) -> Tensor:
    """``weight`` ``[rows, columns]`` plus ``scaling * b @ a`` of each ``(a, b, scaling)``, dithered to its dtype; into ``out`` if given."""
    placed = torch.empty_like(weight) if out is None else out
    by_kernel = len(factors) == 1 and weight.dtype in _DROPPED_BITS and native.fits(weight, weight.shape[1])
    if by_kernel and weight.is_contiguous() and placed.is_contiguous():
        a, b, scaling = factors[0]
        native.merge(weight, a.float().contiguous(), b.float().contiguous(), scaling, placed)
        return placed
    exact = placed.copy_(weight) if placed.dtype == torch.float32 else weight.to(torch.float32, copy=True)
    for a, b, scaling in factors:
        exact.addmm_(b.float(), a.float(), alpha=scaling)
    return exact if exact is placed else placed.copy_(dithered(exact, weight.dtype))


class Projection:
    """Linear layers that read the same input, as one product with ``weight`` ``[out, in]``, made again each time."""

    def __init__(self, name: str, layers: Sequence[Any], dtype: torch.dtype) -> None:
        """``name``: as in ``Layer``."""
        self.name, self.layers, self.dtype = name, list(layers), dtype
        bases = [getattr(layer, "base_layer", layer) for layer in layers]
        self.heights = [base.out_features for base in bases]
        self.width: int = bases[0].in_features
        present = [base.bias for base in bases if base.bias is not None]
        self.own_bias = torch.cat([bias.detach().to(dtype) for bias in present]) if present else None
        self.block: Block | None = None
        """Where the frozen weights are, if no longer in ``layers``."""

    @property
    def bias(self) -> Tensor | None:
        return self.own_bias if self.block is None else getattr(self.block, f"{self.name}_bias", None)

    @property
    def weight(self) -> Tensor:
        """Where no adapter acts on what ``block`` holds, that very tensor."""
        frozen: Tensor | None = None if self.block is None else getattr(self.block, self.name)
        if frozen is not None and not any(map(_active, self.layers)):
            return frozen
        if len(self.layers) == 1:
            return merged_weight(self.layers[0], dtype=self.dtype, frozen=frozen)
        device = self.layers[0].weight.device if frozen is None else frozen.device
        whole = torch.empty(sum(self.heights), self.width, dtype=self.dtype, device=device)
        known = [None] * len(self.layers) if frozen is None else frozen.split(self.heights)
        for layer, part, rows in zip(self.layers, whole.split(self.heights), known, strict=True):
            merged_weight(layer, part, self.dtype, frozen=rows)
        return whole

    def factors(self) -> list[Factor]:
        """The factors of the adapters that are active now."""
        factors, start = [], 0
        for layer, height in zip(self.layers, self.heights, strict=True):
            rows = slice(start, start + height)
            factors += [Factor(rows, layer.lora_A[n].weight, layer.lora_B[n].weight, layer.scaling[n]) for n in _active(layer)]
            start += height
        return factors


_PROJECTIONS = ("qkv", "output", "gate_up", "down")
_KEPT = tuple(name for name in Layer.__slots__ if name not in _PROJECTIONS)
"""What of a layer no adapter changes."""


class MergedLayer:
    """One transformer layer whose tensors have ``Layer``'s names; its projections are merged when they are asked for."""

    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    attention_norm: Tensor | None
    feed_forward_norm: Tensor | None

    def __init__(self, layer: nn.Module, family: Family, dtype: torch.dtype) -> None:
        modules = {name: [layer.get_submodule(place) for place in places] for name, places in family.tensors.items()}
        self.projections = {name: Projection(name, modules[name], dtype) for name in _PROJECTIONS}
        for name in _KEPT:  # norms, and biases
            norm: Any = modules[name][0] if name in modules else None
            setattr(self, name, None if norm is None else norm.weight.detach())
        self.qkv_bias, self.output_bias = self.projections["qkv"].bias, self.projections["output"].bias
        self.block: Block | None = None

    def move_into_block(self, tensors: Layer) -> Block:
        """Move the frozen tensors, fused in ``tensors``, into a block, and read them from there from now on. What they were read from
        before may go."""
        self.block = Block(tensors, self)
        for name in _KEPT:
            delattr(self, name)
        for projection in self.projections.values():
            projection.block, projection.own_bias = self.block, None
        return self.block

    def __getattr__(self, name: str) -> Any:
        """Tensors that are in the block: another object whenever they are gathered."""
        if name in _KEPT and (block := self.__dict__.get("block")) is not None:
            return getattr(block, name)
        raise AttributeError(name)

    def __call__(self, x: Tensor, plan: AttentionPlan, shape: Shape, recompute: bool) -> tuple[Tensor, Tensor]:
        """Run ``forward`` as the forward pass of the block."""
        assert self.block is not None
        return self.block(x, plan, shape, recompute)  # type: ignore[no-any-return]

    @property
    def qkv(self) -> Tensor:
        return self.projections["qkv"].weight

    @property
    def output(self) -> Tensor:
        return self.projections["output"].weight

    @property
    def gate_up(self) -> Tensor:
        return self.projections["gate_up"].weight

    @property
    def down(self) -> Tensor:
        return self.projections["down"].weight

    def forward(self, x: Tensor, plan: AttentionPlan, shape: Shape, recompute: bool) -> tuple[Tensor, Tensor]:
        """``layer_forward`` of this layer."""
        return layer_forward(self, x, plan, shape, recompute)

    def dense(self) -> Layer:
        """All of the layer's tensors, merged now."""
        return Layer(**{name: getattr(self, name) for name in Layer.__slots__})

    @torch.no_grad()
    def taken_out(self) -> Layer:
        """Like ``dense``, with nothing that is the block's: what it holds may be let go of."""
        assert self.block is not None
        pairs = zip(self.dense().tensors(), self.block.now().tensors(), strict=True)
        return Layer(*(ours.clone() if ours is held and ours is not None else ours for ours, held in pairs))  # type: ignore[arg-type]

    def product(self, name: str, x: Tensor) -> Tensor:
        """``x`` times the projection ``name``, differentiable in ``x`` and the factors."""
        projection = self.projections[name]
        if not torch.is_grad_enabled():
            return linear(x, projection.weight, projection.bias)
        factors = projection.factors()
        return _MergedProduct.apply(x, projection, factors, *_tensors(factors))  # type: ignore[no-any-return]

    def blocked(self, x: Tensor, plan: AttentionPlan, shape: Shape, recompute: bool) -> tuple[Tensor, Tensor]:
        """The layer with blocked attention, differentiable in ``x`` and the factors; as ``layer_forward``."""
        named = [(name, factor) for name, projection in self.projections.items() for factor in projection.factors()]
        factors = [factor for _, factor in named]
        return _MergedBlockedLayer.apply(x, plan, shape, recompute, self, named, *_tensors(factors))  # type: ignore[no-any-return]


def _tensors(factors: Sequence[Factor]) -> list[nn.Parameter]:
    return [tensor for factor in factors for tensor in (factor.a, factor.b)]


class _MergedProduct(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, projection: Projection, factors: list[Factor], *_: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.rest = projection, factors
        return linear(x, projection.weight, projection.bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,), (projection, factors) = ctx.saved_tensors, ctx.rest
        grads = [g for factor in factors for g in factor.gradients(grad.flatten(0, -2), x.flatten(0, -2))]
        return grad @ projection.weight, None, None, *grads


class _MergedBlockedLayer(Function):
    """The weights are merged for the forward pass and again for the backward pass, and not kept in between."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, plan: AttentionPlan, shape: Shape, recompute: bool, layer: MergedLayer,
        named: list[tuple[str, Factor]], *_: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out, kept = blocked_forward(layer, x, plan, shape)
        ctx.save_for_backward(x, *(() if recompute else kept.tensors()))
        ctx.rest = (layer, named, plan, shape)
        keys_values = kept.rotated[: len(x), shape.heads :]
        ctx.mark_non_differentiable(keys_values)
        return out, keys_values

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        layer, named, plan, shape = ctx.rest
        x, *saved = ctx.saved_tensors
        dense = layer.dense()
        kept = Kept(*saved) if saved else blocked_forward(dense, x, plan, shape)[1]
        gradients: dict[int, tuple[Tensor, Tensor]] = {}

        def collect(grad: Tensor, read: Tensor, name: str, bias: str | None) -> dict[str, Tensor]:
            gradients.update({id(f): f.gradients(grad, read) for projection, f in named if projection == name})
            return {}

        grad_x = blocked_backward(grad, x, kept, dense, plan, shape, collect)[0]
        return grad_x, None, None, None, None, None, *(g for _, factor in named for g in gradients[id(factor)])
