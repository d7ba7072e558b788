"""Process supervision: rewards for the steps of a completion, and what each token's advantage is then.

Axes: P problem, G completion in its group, T token. A step is (index of its last token, reward).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from groupwise.algorithm.advantages import SCALES, Rewards, check_finite, mean

__all__ = ["Steps", "process_advantages", "to_go"]

Steps = Sequence[Sequence[Sequence[tuple[int, float]]]]
"""``[p][g][j]``: the steps of every completion, (index of the last token, reward)."""


def process_advantages(
    steps: Steps, lengths: Sequence[Sequence[int]], baseline: str = "group_mean", scale: str = "group_std", epsilon: float = 1e-4
) -> list[list[list[float]]]:
    """DeepSeekMath's process supervision (arXiv 2402.03300, section 4.1.3), as ``[p][g][t]``, in float64.

    All step rewards of a group are normalised together, (r - mean(R)) / (std(R) + epsilon), and a token's advantage is the sum of the
    normalised rewards of the steps that end with it or after it. ``lengths[p][g]`` is the completion's number of tokens. With one step
    at the last token of every completion, this is ``group_advantages`` of the steps' rewards, at every token.

    The other choices mean the same as there, of steps instead of completions: ``leave_one_out`` is the mean over the steps of the
    other completions; ``batch_mean``, ``batch_std`` and ``centred_std`` are over all steps of the batch. A group whose steps all have one
    reward gets exactly 0 under a group baseline, also where completions have different numbers of them. Raises ``RewardError`` for a reward
    that is not finite.
    """
    pools = [[r for completion in group for _, r in completion] for group in steps]
    check_finite(pools)
    everything = [r for pool in pools for r in pool]
    baselines = _BASELINES[baseline](steps, pools, everything)
    centred = [
        [[(end, r - base) for end, r in completion] for completion, base in zip(group, bases, strict=True)]
        for group, bases in zip(steps, baselines, strict=True)
    ]
    divisors = SCALES[scale](pools, everything, [r for group in centred for completion in group for _, r in completion], epsilon)
    return [
        [to_go([(end, r / divisor) for end, r in completion], length) for completion, length in zip(group, sizes, strict=True)]
        for group, divisor, sizes in zip(centred, divisors, lengths, strict=True)
    ]


def to_go(steps: Sequence[tuple[int, float]], length: int) -> list[float]:
    """For each of ``length`` tokens the sum over the steps that end with it or after it."""
    at = [0.0] * length
    for end, reward in steps:
        assert 0 <= end < length, "a step ends with one of the completion's tokens"
        at[end] += reward
    total = 0.0
    for t in reversed(range(length)):
        total += at[t]
        at[t] = total
    return at


# Each baseline is a function of (steps, their rewards by group, those of the batch) -> one number per completion.


def _group_mean(steps: Steps, pools: Rewards, everything: Sequence[float]) -> list[list[float]]:
    return [[mean(pool)] * len(group) for group, pool in zip(steps, pools, strict=True)]


def _leave_one_out(steps: Steps, pools: Rewards, everything: Sequence[float]) -> list[list[float]]:
    return [[_of_others(group, i, pool) for i in range(len(group))] for group, pool in zip(steps, pools, strict=True)]


def _of_others(group: Sequence[Sequence[tuple[int, float]]], index: int, pool: Sequence[float]) -> float:
    """Where no other completion has a step there is nothing to be judged by but the own ones."""
    others = [r for i, completion in enumerate(group) if i != index for _, r in completion]
    return mean(others or pool)


def _batch_mean(steps: Steps, pools: Rewards, everything: Sequence[float]) -> list[list[float]]:
    return [[mean(everything)] * len(group) for group in steps]


def _none(steps: Steps, pools: Rewards, everything: Sequence[float]) -> list[list[float]]:
    return [[0.0] * len(group) for group in steps]


_BASELINES: dict[str, Callable[[Steps, Rewards, Sequence[float]], list[list[float]]]] = {
    "group_mean": _group_mean,
    "leave_one_out": _leave_one_out,
    "batch_mean": _batch_mean,
    "none": _none,
}
