"""Sums over completions of unequal length, and the one owner of the loss's denominator: each token's weight, from the batch's counts.

loss = sum_t weight_t x loss_t over all tokens of the batch, whichever micro-batch or process they fall into. Weights are known
before the first backward pass, so how the batch is cut cannot change the gradient. Nothing downstream divides again (where
data-parallel wrappers average gradients, the step multiplies by the number of processes). There is no padding: ``sequence_T`` says which
completion each token belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["BatchCounts", "at_least_fp32", "lengths_of", "segment_mean", "segment_sum", "token_weights"]


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


@dataclass(frozen=True, slots=True)
class BatchCounts:
    """Counts over one optimiser step's whole batch, all processes together, completions that the backward pass skips included."""

    completions: float
    """N: completions in the batch."""
    tokens: float
    """Sampled tokens in the batch."""
    max_tokens: int
    """``rollout.max_completion_tokens``: the constant length in the ``fixed`` denominator."""

    def __post_init__(self) -> None:
        if min(self.completions, self.tokens, self.max_tokens) <= 0:
            raise ValueError(f"{self} must count at least one completion and one token; an empty batch has no loss")


AGGREGATIONS: dict[str, Callable[[Tensor, BatchCounts], Tensor]] = {
    "sequence_mean": lambda lengths_N, counts: 1 / (lengths_N.clamp(min=1) * counts.completions),
    "token_mean": lambda lengths_N, counts: torch.full_like(lengths_N, 1 / counts.tokens),
    "sequence_sum": lambda lengths_N, counts: torch.full_like(lengths_N, 1 / counts.completions),
    "fixed": lambda lengths_N, counts: torch.full_like(lengths_N, 1 / (counts.completions * counts.max_tokens)),
}
"""Functions of (the completions' whole lengths, counts) -> the weight of each completion's tokens."""


def token_weights(
    lengths_N: Tensor, sequence_T: Tensor, aggregation: str, counts: BatchCounts, dtype: torch.dtype = torch.float32
) -> Tensor:
    """``weights_T`` for the tokens of a micro-batch.

    ``sequence_mean``: 1 / (|o_i| N), GRPO (arXiv 2402.03300, eq. 3). ``token_mean``: 1 / all tokens, DAPO (2503.14476).
    ``sequence_sum``: 1 / N, RLOO (2402.14740). ``fixed``: 1 / (N max_tokens), Dr. GRPO (2503.20783). ``lengths_N`` are the
    completions' whole lengths, ``sequence_T`` the completion (0 to N - 1) of each token.
    """
    return AGGREGATIONS[aggregation](lengths_N.double(), counts)[sequence_T].to(dtype)
