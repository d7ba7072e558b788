"""Choosing how attention over packed rows is computed, and planning it once for all layers of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.models.blocked_attention import BlockedPlan, plan_blocks
from groupwise.models.layout import Packed
from groupwise.models.library_attention import AttentionBlock, plan_rectangles

__all__ = ["AttentionPlan", "default_implementation", "plan_attention"]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one kind have in common in a pass: rotary factors ``[R, 1, E / 2]`` and the blocks of one implementation."""

    cos: Tensor
    sin: Tensor
    blocked: BlockedPlan | None
    rectangles: tuple[AttentionBlock, ...] | None


def default_implementation(device: torch.device) -> str:
    """``blocked`` (``models/blocked_attention.py``) on CPUs, ``sdpa`` (``models/library_attention.py``) elsewhere."""
    return "blocked" if device.type == "cpu" else "sdpa"


def plan_attention(
    packed: Packed, ropes: Sequence[tuple[Tensor, Tensor]], windows: Sequence[int | None], implementation: str
) -> list[AttentionPlan]:
    """One plan for each kind of layer, that is for each window with the rotary factors (cos and sin) of its layers.

    A window that no sequence exceeds is none, so that kinds of layers often share their blocks.
    """
    device = ropes[0][0].device
    needed = [None if window is None or window >= packed.longest else window for window in windows]
    if implementation == "blocked":
        blocked = {w: plan_blocks(packed.spans, len(packed.token_ids_R), w).to(device) for w in set(needed)}
        return [AttentionPlan(cos, sin, blocked[w], None) for (cos, sin), w in zip(ropes, needed, strict=True)]
    library = {w: tuple(block.to(device) for block in plan_rectangles(packed.spans, w)) for w in set(needed)}
    return [AttentionPlan(cos, sin, None, library[w]) for (cos, sin), w in zip(ropes, needed, strict=True)]
