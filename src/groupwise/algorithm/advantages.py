"""Advantages: how much better a completion did than expected. Computed on whole groups, before anything is filtered or cut.

Axes: N completions (flattened over groups), T tokens (flattened over completions, ragged).

The standard deviation is the sample one (ddof = 1), as ``torch.std`` computes it, and with it TRL and the from-scratch tutorials.
DeepSeekMath does not say which it means; the population form would make advantages sqrt(G / (G - 1)) times larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from groupwise.errors import RewardError

__all__ = ["STD_DDOF", "Rewards", "check_finite", "group_advantages", "mean", "token_advantages"]

STD_DDOF = 1
"""Degrees of freedom taken off in every standard deviation of rewards: 1, the sample standard deviation."""

Rewards = Sequence[Sequence[float]]


def mean(numbers: Sequence[float]) -> float:
    """The mean, held between the smallest and the largest number: of equal numbers it is that number, without rounding."""
    return min(max(math.fsum(numbers) / len(numbers), min(numbers)), max(numbers)) if numbers else 0.0


def _std(numbers: Sequence[float]) -> float:
    """Sample standard deviation; 0 for fewer than two numbers."""
    if len(numbers) <= STD_DDOF:
        return 0.0
    centre = mean(numbers)
    return math.sqrt(math.fsum((x - centre) ** 2 for x in numbers) / (len(numbers) - STD_DDOF))


def _mean_of_others(group: Sequence[float], index: int) -> float:
    """A completion without others is its own baseline: it has nothing to be judged by and teaches nothing."""
    return mean([*group[:index], *group[index + 1 :]]) if len(group) > 1 else group[index]


# Each baseline is a function of (rewards by group, returns over the batch) -> one number per completion; the returns are the
# rewards again, or every token's return where tokens have rewards of their own.


def _group_mean(rewards: Rewards, returns: Sequence[float]) -> list[list[float]]:
    return [[mean(group)] * len(group) for group in rewards]


def _leave_one_out(rewards: Rewards, returns: Sequence[float]) -> list[list[float]]:
    return [[_mean_of_others(group, i) for i in range(len(group))] for group in rewards]


def _batch_mean(rewards: Rewards, returns: Sequence[float]) -> list[list[float]]:
    centre = mean(returns)
    return [[centre] * len(group) for group in rewards]


def _no_baseline(rewards: Rewards, returns: Sequence[float]) -> list[list[float]]:
    return [[0.0] * len(group) for group in rewards]


BASELINES: dict[str, Callable[[Rewards, Sequence[float]], list[list[float]]]] = {
    "group_mean": _group_mean,
    "leave_one_out": _leave_one_out,
    "batch_mean": _batch_mean,
    "none": _no_baseline,
}

# Each scale is a function of (rewards by group, returns over the batch, the same less their baselines, epsilon) -> one divisor per
# group.


def _group_std(rewards: Rewards, returns: Sequence[float], centred: Sequence[float], epsilon: float) -> list[float]:
    return [_std(group) + epsilon for group in rewards]


def _batch_std(rewards: Rewards, returns: Sequence[float], centred: Sequence[float], epsilon: float) -> list[float]:
    return [_std(returns) + epsilon] * len(rewards)


def _centred_std(rewards: Rewards, returns: Sequence[float], centred: Sequence[float], epsilon: float) -> list[float]:
    return [_std(centred) + epsilon] * len(rewards)


def _unit(rewards: Rewards, returns: Sequence[float], centred: Sequence[float], epsilon: float) -> list[float]:
    return [1.0] * len(rewards)


SCALES: dict[str, Callable[[Rewards, Sequence[float], Sequence[float], float], list[float]]] = {
    "group_std": _group_std,
    "batch_std": _batch_std,
    "centred_std": _centred_std,
    "none": _unit,
}


def check_finite(rewards: Rewards) -> None:
    """Raise ``RewardError`` for a reward that is not a finite number."""
    for index, group in enumerate(rewards):
        for r in group:
            if not math.isfinite(r):
                raise RewardError(f"group {index} has a reward of {r}, but rewards must be finite; mend the reward function")


def group_advantages(
    rewards: Rewards, baseline: str = "group_mean", scale: str = "group_std", epsilon: float = 1e-4
) -> list[list[float]]:
    """(reward - baseline) / (std + epsilon) for every completion of every group, in float64; groups may differ in size.

    ``baseline``: ``group_mean`` (GRPO), ``leave_one_out`` (RLOO: the mean of the others), ``batch_mean`` (REINFORCE++), ``none``.
    ``scale``: ``group_std`` (GRPO), ``batch_std`` (the rewards' standard deviation over the whole batch, as in Lite PPO, arXiv
    2508.08221), ``centred_std`` (that of the differences over the whole batch, as in REINFORCE++ with a baseline, arXiv 2501.03262),
    ``none`` (Dr. GRPO). Pass the groups of the whole batch, over all processes: the batch choices need them all.

    A group without variance, or of one completion, gets exactly 0 under a group baseline. The mean and scale of a group are never
    those of its survivors: filter completions afterwards. Raises ``RewardError`` for a reward that is not finite.

    >>> [[round(a, 3) for a in g] for g in group_advantages([[1.0, 0.0, 0.0, 0.0], [2.0, 2.0]])]
    [[1.5, -0.5, -0.5, -0.5], [0.0, 0.0]]
    """
    check_finite(rewards)
    returns = [r for group in rewards for r in group]
    baselines = BASELINES[baseline](rewards, returns)
    centred = [[r - b for r, b in zip(group, bs, strict=True)] for group, bs in zip(rewards, baselines, strict=True)]
    divisors = SCALES[scale](rewards, returns, [x for group in centred for x in group], epsilon)
    return [[x / d for x in group] for group, d in zip(centred, divisors, strict=True)]


def token_advantages(
    rewards: Rewards,
    penalties: Sequence[Sequence[Sequence[float]]],
    baseline: str = "batch_mean",
    scale: str = "batch_std",
    epsilon: float = 1e-4,
) -> list[list[list[float]]]:
    """An advantage for each token when the KL is each token's own (negative) reward: REINFORCE++, arXiv 2501.03262.

    The return of token t is its completion's reward less the penalties from t to the end. ``penalties[p][g][t]`` is beta times
    the KL estimate of that token (see ``kl.kl_penalty``). ``batch_mean``, ``batch_std`` and ``centred_std`` are over the returns
    of all tokens of the batch; group choices are over the completions' rewards, as in ``group_advantages``.
    """
    check_finite(rewards)
    returns = [
        [[r - x for x in _to_go(penalty)] for r, penalty in zip(group, group_penalties, strict=True)]
        for group, group_penalties in zip(rewards, penalties, strict=True)
    ]
    tokens = [x for group in returns for completion in group for x in completion]
    baselines = BASELINES[baseline](rewards, tokens)
    centred = [
        [[x - b for x in completion] for completion, b in zip(group, bs, strict=True)]
        for group, bs in zip(returns, baselines, strict=True)
    ]
    divisors = SCALES[scale](rewards, tokens, [x for group in centred for completion in group for x in completion], epsilon)
    return [[[x / d for x in completion] for completion in group] for group, d in zip(centred, divisors, strict=True)]


def _to_go(penalties: Sequence[float]) -> list[float]:
    """Sum from each token to the end."""
    total, out = 0.0, []
    for penalty in reversed(penalties):
        total += penalty
        out.append(total)
    return out[::-1]
