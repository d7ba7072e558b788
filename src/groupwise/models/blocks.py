"""A decoder's tensors as modules, one for each layer: for machinery that gathers and lets go of weights a module at a time.

While such machinery divides the weights among processes, the transformers module that they came from is hollow: its parameters keep
their shapes and hold nothing. A copy with weights is made when they are saved.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from groupwise.models.attention import AttentionPlan
from groupwise.models.layer import Layer, Shape, layer_forward

if TYPE_CHECKING:
    from groupwise.models.merging import MergedLayer

__all__ = ["Block", "Blocks", "copy_filled", "hollow"]

Views = Mapping[str, Sequence[nn.Parameter]]
"""Of each of a decoder's tensors, by name, the transformers module's own parameters that are its rows, in order."""


class Block(nn.Module):
    """One layer. Its tensors are attributes, as in ``Layer``, whatever stands behind them at the time."""

    def __init__(self, layer: Layer, merged: MergedLayer | None = None) -> None:
        """``merged``: what computes the layer, from these tensors and an adapter's, which are not the block's; by itself they are all."""
        super().__init__()
        self.merged = merged
        for name, tensor in zip(Layer.__slots__, layer.tensors(), strict=True):
            self.register_parameter(name, None if tensor is None else _parameter(tensor))

    def forward(self, x: Tensor, plan: AttentionPlan, shape: Shape, recompute: bool) -> tuple[Tensor, Tensor]:
        """As ``Layer.forward``, on the tensors as they are now."""
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
    """A copy of a hollow ``module`` with ``weights`` in it: by name, in the decoder's layout, on the CPU."""
    filled: dict[int, Any] = {}
    for name, parameters in views.items():
        rows = weights[name].split([len(p) for p in parameters])
        filled |= {id(p): nn.Parameter(part, requires_grad=False) for p, part in zip(parameters, rows, strict=True)}
    for buffer in module.buffers():
        filled[id(buffer)] = buffer.detach().to("cpu", copy=True)
    return copy.deepcopy(module, filled)
