"""What a learned value is good for: advantages by generalised advantage estimation, and the loss that teaches the value.

Axes: P problem, G completion in its group, T token (flattened over completions, ragged). ``values[t]`` is the value of the state in
which token t was chosen: prompt and completion up to, not including, token t. A completion that was cut at the token limit ends
there like any other: its reward was given for the text as it stands, so nothing is bootstrapped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.algorithm.advantages import STD_DDOF, Rewards, check_finite
from groupwise.algorithm.sequences import at_least_fp32, lengths_of
from groupwise.metrics import Mean, Metric, Sum

__all__ = ["PerToken", "explained_variance", "gae", "value_advantages", "value_loss"]

PerToken = Sequence[Sequence[Sequence[float]]]
"""One number per token of the batch: ``[p][g][t]``."""


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
    rewards: Rewards,
    values: PerToken,
    penalties: PerToken | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    scale: str = "none",
    epsilon: float = 1e-4,
) -> tuple[list[list[list[float]]], list[list[list[float]]]]:
    """``advantages, returns`` of every token of the whole batch, both as ``[p][g][t]``, in float64: PPO (arXiv 1707.06347).

    A completion's reward arrives with its last token; ``penalties[p][g][t]`` (see ``kl.kl_penalty``) are taken off token by
    token, as in arXiv 1909.08593. ``scale`` is ``none`` or ``batch_std``, which whitens: the mean over all tokens of the batch is
    taken off the advantages and they are divided by their standard deviation + ``epsilon``. Returns, the value's targets, are
    never whitened. Pass the groups of the whole batch. Raises ``RewardError`` for a reward that is not finite.
    """
    check_finite(rewards)
    lengths = [len(tokens) for group in values for tokens in group]
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
    values_T = _flat(values)
    rewards_T = torch.zeros_like(values_T) if penalties is None else -_flat(penalties)
    assert rewards_T.shape == values_T.shape, "one penalty per token"
    last_N = torch.tensor(lengths, dtype=torch.long).cumsum(0) - 1
    rewards_N = torch.tensor([r for group in rewards for r in group], dtype=torch.float64)
    rewards_T.index_add_(0, last_N, rewards_N)
    advantages_T, returns_T = gae(rewards_T, values_T, sequence_T, gamma=gamma, lam=lam)
    if scale == "batch_std":
        advantages_T = _whiten(advantages_T, epsilon)
    return _like(advantages_T, values), _like(returns_T, values)


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
    old_T, returns_T, weights_T = (x.detach().to(values_T.dtype) for x in (old_values_T, returns_T, weights_T))
    assert values_T.shape == old_T.shape == returns_T.shape == weights_T.shape, "one value per token"
    error_T = values_T - returns_T
    squares_T = error_T.square()
    clipped_T = torch.zeros_like(squares_T, dtype=torch.bool)
    if clip is not None:
        near_T = (old_T + (values_T - old_T).clamp(-clip, clip) - returns_T).square()
        clipped_T = (near_T >= squares_T) & ((values_T - old_T).abs() > clip)
        squares_T = torch.maximum(squares_T, near_T)
    loss = (weights_T * squares_T).sum() / 2
    total, clipped, error = torch.stack([loss.detach(), clipped_T.sum().to(loss.dtype), error_T.detach().sum()]).tolist()
    tokens = values_T.numel()
    return loss, {"value_loss": Sum(total), "value_clipped": Mean(clipped, tokens), "value_error": Mean(error, tokens)}


def explained_variance(values: PerToken, returns: PerToken) -> float:
    """1 - Var(R - V) / Var(R) over all tokens of the batch: 1 for a perfect value, 0 for a constant, below 0 for a harmful one.

    Not a number when the returns do not vary.
    """
    values_T, returns_T = _flat(values), _flat(returns)
    variance = float(returns_T.var(correction=0)) if len(returns_T) else 0.0
    return 1 - float((returns_T - values_T).var(correction=0)) / variance if variance > 0 else math.nan


def _whiten(advantages_T: Tensor, epsilon: float) -> Tensor:
    if len(advantages_T) <= STD_DDOF:
        return torch.zeros_like(advantages_T)  # it is its own mean
    return (advantages_T - advantages_T.mean()) / (advantages_T.std(correction=STD_DDOF) + epsilon)


def _flat(nested: PerToken) -> Tensor:
    return torch.tensor([x for group in nested for tokens in group for x in tokens], dtype=torch.float64)


def _like(values_T: Tensor, nested: PerToken) -> list[list[list[float]]]:
    rest = iter(values_T.tolist())
    return [[[next(rest) for _ in tokens] for tokens in group] for group in nested]
