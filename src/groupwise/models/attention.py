"""Choosing how attention over packed rows is computed, and planning it once for all layers of a pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.models.blocked_attention import BlockedPlan, plan_blocks
from groupwise.models.layout import Packed
from groupwise.models.library_attention import AttentionBlock, plan_rectangles

__all__ = ["AttentionPlan", "default_implementation", "plan_attention"]


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one pass have in common: rotary factors ``[R, 1, E / 2]`` and the blocks of one implementation."""

    cos: Tensor
    sin: Tensor
    blocked: BlockedPlan | None
    rectangles: tuple[AttentionBlock, ...] | None


def default_implementation(device: torch.device) -> str:
    """``blocked`` (``models/blocked_attention.py``) on CPUs, ``sdpa`` (``models/library_attention.py``) elsewhere."""
    return "blocked" if device.type == "cpu" else "sdpa"


def plan_attention(packed: Packed, cos: Tensor, sin: Tensor, implementation: str) -> AttentionPlan:
    device = cos.device
    if implementation == "blocked":
        return AttentionPlan(cos, sin, plan_blocks(packed.spans, len(packed.token_ids_R)).to(device), None)
    return AttentionPlan(cos, sin, None, tuple(block.to(device) for block in plan_rectangles(packed.spans)))
