"""AdamW with 8-bit moments, by the library bitsandbytes (Dettmers et al., arXiv 2110.02861), which is imported only when asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import ConfigError
from groupwise.models.quiet import quieten_bitsandbytes

__all__ = ["PIECE", "eight_bit_adamw"]

PIECE = 2**20
"""Numbers updated at a time on CPUs. Whole blocks of moments that share a scale, so that the result is that of a single call."""
_BLOCK = 256
"""Of bitsandbytes: moments that share a scale."""


def eight_bit_adamw(groups: list[dict[str, Any]], **settings: Any) -> Any:
    """bitsandbytes' AdamW over fp32 masters, its moments there from the beginning. Tensors of fewer than 4,096 numbers keep fp32 moments.

    On GPUs an update is one kernel. On CPUs bitsandbytes makes five fp32 copies of the tensor that it updates, which is as much as 8-bit
    moments save where one tensor is a fifth of the model, as embeddings are: so it is handed ``PIECE`` numbers at a time there.

    Raises ConfigError where the package is missing or too old for this device.
    """
    quieten_bitsandbytes()
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            "optimizer.precision is masters-8bit, which needs the package bitsandbytes, and it is not installed: "
            "pip install 'groupwise[bitsandbytes]', or use optimizer.precision=masters"
        ) from error

    class PiecewiseAdamW(AdamW8bit):  # type: ignore[misc]
        def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
            kept = self.state[p]
            if p.device.type != "cpu" or kept["state1"].dtype != torch.uint8 or p.numel() <= PIECE or not p.is_contiguous():
                super().update_step(group, p, gindex, pindex)
                return
            for piece, state in _pieces(p, kept):
                self.state[piece] = state
                super().update_step(group, piece, gindex, pindex)
                del self.state[piece]
            kept["step"] += 1

    adamw = PiecewiseAdamW(groups, **settings)
    adamw.check_overrides()
    for group_place, group in enumerate(adamw.param_groups):
        for place, parameter in enumerate(group["params"]):
            adamw.init_state(group, parameter, group_place, place)
    return adamw


def _pieces(p: Tensor, kept: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Runs of ``p`` with their gradients, and the moments and scales that belong to each: views, in which an update is an update of all."""
    assert p.grad is not None
    weights, grads = p.detach().view(-1), p.grad.contiguous().view(-1)
    for start in range(0, p.numel(), PIECE):
        run = slice(start, start + PIECE)
        scales = slice(start // _BLOCK, -(-(start + PIECE) // _BLOCK))
        own = {name: kept[name].view(-1)[run] for name in ("state1", "state2")}
        own |= {name: kept[name][scales] for name in ("absmax1", "absmax2")}
        piece = weights[run]
        piece.grad = grads[run]
        yield piece, {**kept, **own}
