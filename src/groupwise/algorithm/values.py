"""What a learned value is good for: advantages by generalised advantage estimation, and the loss that teaches the value.

Axes: N completions, T tokens (flattened over completions, ragged). ``values_T[t]`` is the value of the state in which token t was
chosen: prompt and completion up to, not including, token t. A completion that was cut at the token limit ends
there like any other: its reward was given for the text as it stands, so nothing is bootstrapped.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from groupwise.algorithm.aggregate import at_least_fp32, lengths_of
from groupwise.errors import RewardError
from groupwise.metrics import Mean, Metric, Sum

__all__ = ["explained_variance", "gae", "value_advantages", "value_loss"]

_NO_VARIANCE = 1e-20
"""A variance of less than this share of the numbers' squares is rounding, and nothing is divided by it."""


def gae(rewards_T: Tensor, values_T: Tensor, sequence_T: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, eq. 16) over ragged completions: ``advantages_T, returns_T``.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lambda A_{t+1}, with V and A equal to 0 after a completion's
    last token; returns are A + V. With lambda = gamma = 1 and values 0, every token's advantage is the sum of the rewards from it
    to the end: the outcome return.
    """
    lengths_N = lengths_of(sequence_T, int(sequence_T[-1]) + 1 if len(sequence_T) else 0)
    end_N = lengths_N.cumsum(0)
    advantages_T = torch.zeros_like(values_T)
    running_N, next_value_N = values_T.new_zeros(len(lengths_N)), values_T.new_zeros(len(lengths_N))
    for back in range(int(lengths_N.max()) if len(lengths_N) else 0):  # one step back in all completions at once
        alive = lengths_N > back
        at = end_N[alive] - 1 - back
        delta = rewards_T[at] + gamma * next_value_N[alive] - values_T[at]
        running_N[alive] = delta + gamma * lam * running_N[alive]
        next_value_N[alive] = values_T[at]
        advantages_T[at] = running_N[alive]
    return advantages_T, advantages_T + values_T


def value_advantages(
    rewards_N: Tensor,
    values_T: Tensor,
    lengths_N: Tensor,
    rewards_T: Tensor | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = False,
    epsilon: float = 1e-4,
) -> tuple[Tensor, Tensor]:
    """``advantages_T, returns_T`` of every token of the whole batch in float64: PPO (arXiv 1707.06347).

    A completion's reward arrives with its last token; ``rewards_T`` are rewards of tokens, such as the negative KL of each (arXiv
    1909.08593). ``whiten`` takes the mean over all tokens of the batch off the advantages and divides them by their standard deviation +
    ``epsilon``. Returns, the value's targets, are never whitened. Pass the completions of the whole batch. Raises ``RewardError`` for a
    reward that is not finite.
    """
    if not bool(rewards_N.isfinite().all()):
        raise RewardError(
            f"a reward is {rewards_N[~rewards_N.isfinite()][0].item()}, but rewards must be finite: fix the reward function"
        )
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths_N)), lengths_N)
    values_T = values_T.double()
    at_T = torch.zeros_like(values_T) if rewards_T is None else rewards_T.double().clone()
    assert at_T.shape == values_T.shape, "one reward per token"
    some_N = lengths_N > 0  # of a completion without sampled tokens nothing learns
    at_T.index_add_(0, (lengths_N.cumsum(0) - 1)[some_N], rewards_N.double()[some_N])
    advantages_T, returns_T = gae(at_T, values_T, sequence_T, gamma=gamma, lam=lam)
    return _whitened(advantages_T, epsilon) if whiten else advantages_T, returns_T


def value_loss(
    *, values_T: Tensor, old_values_T: Tensor, returns_T: Tensor, weights_T: Tensor, clip: float | None = None
) -> tuple[Tensor, dict[str, Metric]]:
    """sum_t w_t max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2 of a micro-batch, ready for ``backward``, and metrics.

    The pessimistic maximum is that of PPO's published code (O. Engstrom et al., "Implementation matters", arXiv 2005.12729,
    section 3); the paper itself has the plain square, which ``clip=None`` gives. ``old_values_T`` are those the advantages were made
    from. The gradient flows into ``values_T`` alone; where the clip acts there is none. Half precision is computed in fp32.

    Metrics: ``value_loss`` (Sum), ``value_clipped`` (Mean over tokens: share without gradient), ``value_error`` (Mean of V - R).
    """
    values_T = at_least_fp32(values_T)
    old_values_T, returns_T, weights_T = (x.detach().to(values_T.dtype) for x in (old_values_T, returns_T, weights_T))
    assert values_T.shape == old_values_T.shape == returns_T.shape == weights_T.shape, "one value per token"
    error_T = values_T - returns_T
    squares_T = error_T.square()
    clipped_T = torch.zeros_like(squares_T, dtype=torch.bool)
    if clip is not None:
        near_T = (old_values_T + (values_T - old_values_T).clamp(-clip, clip) - returns_T).square()
        clipped_T = (near_T >= squares_T) & ((values_T - old_values_T).abs() > clip)
        squares_T = torch.maximum(squares_T, near_T)
    loss = (weights_T * squares_T).sum() / 2
    total, clipped, error = torch.stack([loss.detach(), clipped_T.sum().to(loss.dtype), error_T.detach().sum()]).tolist()
    tokens = values_T.numel()
    return loss, {"value_loss": Sum(total), "value_clipped": Mean(clipped, tokens), "value_error": Mean(error, tokens)}


def explained_variance(values_T: Tensor, returns_T: Tensor) -> float:
    """1 - Var(R - V) / Var(R) over all tokens of the batch: 1 for a perfect value, 0 for a constant, below 0 for a harmful one.

    Not a number when the returns do not vary by more than rounding; they are advantages + values, so values round them too.
    """
    if not len(returns_T):
        return math.nan
    values_T, returns_T = values_T.double(), returns_T.double()
    variance, size = float(returns_T.var(correction=0)), float((returns_T.square() + values_T.square()).mean())
    return 1 - float((returns_T - values_T).var(correction=0)) / variance if variance > _NO_VARIANCE * size else math.nan


def _whitened(advantages_T: Tensor, epsilon: float) -> Tensor:
    if len(advantages_T) <= 1:
        return torch.zeros_like(advantages_T)  # it is its own mean
    return (advantages_T - advantages_T.mean()) / (advantages_T.std() + epsilon)
