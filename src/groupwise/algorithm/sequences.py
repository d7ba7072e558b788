"""Sums over completions of unequal length, without padding. ``sequence_T`` says which completion each token belongs to."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["at_least_fp32", "lengths_of", "segment_mean", "segment_sum"]


def at_least_fp32(x: Tensor) -> Tensor:
    """bf16 and fp16 become fp32; fp32 and fp64 stay: the objective is never computed in half precision."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def lengths_of(sequence_T: Tensor, completions: int) -> Tensor:
    """``lengths_N`` (long): how many tokens each of the ``completions`` has here, 0 included."""
    return torch.bincount(sequence_T, minlength=completions)


def segment_sum(values_T: Tensor, sequence_T: Tensor, completions: int) -> Tensor:
    """``sums_N``: the sum of ``values_T`` over each completion's tokens."""
    return values_T.new_zeros(completions).index_add(0, sequence_T, values_T)


def segment_mean(values_T: Tensor, sequence_T: Tensor, completions: int) -> Tensor:
    """``means_N``: the mean over each completion's tokens; 0 for a completion without any."""
    lengths_N = lengths_of(sequence_T, completions).clamp(min=1)
    return segment_sum(values_T, sequence_T, completions) / lengths_N.to(values_T.dtype)
