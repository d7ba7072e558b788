"""Advantages: how much better a completion did than expected. Computed once a step, on whole groups, before anything is cut.

An advantage is a function ``AdvantageInputs -> AdvantageOutputs`` with its settings as keywords. Axes: P problems, N completions
(flattened over groups), T tokens (flattened over completions, ragged), K steps of process supervision.

The standard deviation is the sample one (ddof = 1), as ``torch.std`` computes it, and with it TRL and the from-scratch tutorials.
DeepSeekMath does not say which it means; the population form would make advantages sqrt(G / (G - 1)) times larger.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from groupwise.algorithm.aggregate import segment_sum
from groupwise.algorithm.values import explained_variance, value_advantages
from groupwise.errors import RewardError
from groupwise.limits import LARGEST_REWARD
from groupwise.metrics import Mean, Metric

__all__ = [
    "ADVANTAGES", "STD_DDOF", "Advantage", "AdvantageInputs", "AdvantageOutputs", "FunctionScores", "StepRewards", "gae_advantage",
    "gdpo_advantage", "group_advantage", "group_advantages", "maxrl_advantage", "process_advantages", "to_go", "token_advantages",
]  # fmt: skip

STD_DDOF = 1
"""Degrees of freedom taken off in every standard deviation of rewards: 1, the sample standard deviation."""

Rewards = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class FunctionScores:
    """What one reward function gave."""

    weight: float
    scores_N: Tensor
    """After its clip and normalising; NaN where it does not apply."""


@dataclass(frozen=True, slots=True)
class StepRewards:
    """What one reward function gave to steps of completions, in the order of completions."""

    sequence_K: Tensor
    """The completion of each step."""
    end_K: Tensor
    """Index of its last token among all T."""
    rewards_K: Tensor
    weight_N: Tensor
    """The function's weight at each completion; 0 where it gave none to the group."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The whole step, all processes together: float64, on the CPU. Groups are whole, completions in the order of their groups."""

    rewards_N: Tensor
    """For whole completions, less their KL where that is part of the reward."""
    group_N: Tensor
    """0 to P - 1, not decreasing."""
    lengths_N: Tensor
    """Tokens of each completion."""
    functions: Mapping[str, FunctionScores] = field(default_factory=dict)
    """Each reward function's own scores for whole completions, by name."""
    steps: Mapping[str, StepRewards] = field(default_factory=dict)
    """Rewards of steps (process supervision), by function."""
    penalties_T: Tensor | None = None
    """beta x KL of each token, where it is the token's own negative reward."""
    values_T: Tensor | None = None
    """The critic's value of the state before each token, for advantages that need it."""
    taking_part_N: Tensor | None = None
    """False for completions that the config leaves out of the loss (``mask_truncated``); None: all take part."""

    @property
    def sequence_T(self) -> Tensor:
        """The completion of each token."""
        return torch.repeat_interleave(torch.arange(len(self.lengths_N)), self.lengths_N)

    def by_group(self, numbers_N: Tensor) -> list[list[float]]:
        """One number per completion, as ``[p][g]``."""
        return [piece.tolist() for piece in numbers_N.split(torch.bincount(self.group_N).tolist())]


@dataclass(frozen=True, slots=True)
class AdvantageOutputs:
    """One advantage per completion, or one per token."""

    advantages_N: Tensor | None = None
    advantages_T: Tensor | None = None
    returns_T: Tensor | None = None
    """What the values should have been."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    def per_token(self, inputs: AdvantageInputs) -> Tensor:
        """``[T]``, float64."""
        if self.advantages_T is not None:
            return self.advantages_T
        assert self.advantages_N is not None, "an advantage returns advantages_N or advantages_T"
        return self.advantages_N[inputs.sequence_T]

    def per_completion(self, inputs: AdvantageInputs) -> Tensor:
        """``[N]``, float64: the mean over each completion's tokens where they differ."""
        if self.advantages_T is None:
            assert self.advantages_N is not None, "an advantage returns advantages_N or advantages_T"
            return self.advantages_N
        return segment_sum(self.advantages_T, inputs.sequence_T, len(inputs.lengths_N)) / inputs.lengths_N.clamp(min=1)


class Advantage(Protocol):
    """A function of the step's rewards, its settings bound or at their defaults. An attribute ``needs`` (a set of "values", see
    ``groupwise.algorithm.needs``) asks for a critic."""

    def __call__(self, inputs: AdvantageInputs, /) -> AdvantageOutputs: ...


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


def _for_each(number: float, rewards: Rewards) -> list[list[float]]:
    return [[number] * len(group) for group in rewards]


BASELINES: dict[str, Callable[[Rewards, Sequence[float]], list[list[float]]]] = {
    "group_mean": lambda rewards, returns: [[mean(group)] * len(group) for group in rewards],
    "leave_one_out": lambda rewards, returns: [[_mean_of_others(group, i) for i in range(len(group))] for group in rewards],
    "batch_mean": lambda rewards, returns: _for_each(mean(returns), rewards),
    "none": lambda rewards, returns: _for_each(0.0, rewards),
}
"""Functions of (rewards by group, returns over the batch) -> one number per completion. The returns are the rewards again, or
every token's return where tokens have rewards of their own."""

SCALES: dict[str, Callable[[Rewards, Sequence[float], Sequence[float], float], list[float]]] = {
    "group_std": lambda rewards, returns, centred, epsilon: [_std(group) + epsilon for group in rewards],
    "batch_std": lambda rewards, returns, centred, epsilon: [_std(returns) + epsilon] * len(rewards),
    "centred_std": lambda rewards, returns, centred, epsilon: [_std(centred) + epsilon] * len(rewards),
    "none": lambda rewards, returns, centred, epsilon: [1.0] * len(rewards),
}
"""Functions of (rewards by group, returns over the batch, the same less their baselines, epsilon) -> one divisor per group."""


def check_finite(rewards: Rewards) -> None:
    """Raise ``RewardError`` for a reward that is not a finite number, or whose square leaves what floating point holds."""
    for index, group in enumerate(rewards):
        for r in group:
            if not abs(r) <= LARGEST_REWARD:
                what = f"of at most {LARGEST_REWARD:g} in size" if math.isfinite(r) else "finite"
                raise RewardError(f"group {index} has a reward of {r}, but rewards must be {what}; fix the reward function")


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
    penalties_T: Tensor,
    lengths_N: Tensor,
    baseline: str = "batch_mean",
    scale: str = "batch_std",
    epsilon: float = 1e-4,
) -> Tensor:
    """An advantage for each token when the KL is each token's own (negative) reward: REINFORCE++, arXiv 2501.03262.

    The return of token t is its completion's reward less the penalties from t to the end. ``penalties_T`` is beta times the KL estimate
    of each token (see ``kl.kl_penalty``). ``batch_mean``, ``batch_std`` and ``centred_std`` are over the returns of all tokens of the
    batch; group choices are over the completions' rewards, as in ``group_advantages``. Returns ``[T]`` in float64.
    """
    check_finite(rewards)
    rewards_N = torch.tensor([r for group in rewards for r in group], dtype=torch.float64)
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths_N)), lengths_N)
    returns_T = rewards_N[sequence_T] - to_go(penalties_T.double(), lengths_N)
    tokens = returns_T.tolist()
    baselines = BASELINES[baseline](rewards, tokens)
    centred_T = returns_T - torch.tensor([b for group in baselines for b in group], dtype=torch.float64)[sequence_T]
    divisors = SCALES[scale](rewards, tokens, centred_T.tolist(), epsilon)
    sizes = torch.tensor([len(group) for group in rewards])
    return centred_T / torch.tensor(divisors, dtype=torch.float64).repeat_interleave(sizes)[sequence_T]


def to_go(numbers_T: Tensor, lengths_N: Tensor) -> Tensor:
    """The sum from each token to the end of its completion, ``[T]``."""
    pieces = numbers_T.split(lengths_N.tolist())
    return torch.cat([piece.flip(0).cumsum(0).flip(0) for piece in pieces]) if pieces else numbers_T


def process_advantages(
    steps: StepRewards, group_N: Tensor, lengths_N: Tensor, baseline: str = "group_mean", scale: str = "group_std",
    epsilon: float = 1e-4, discount: float = 1.0,
) -> Tensor:  # fmt: skip
    """DeepSeekMath's process supervision (arXiv 2402.03300, section 4.1.3), ``[T]`` in float64.

    All step rewards of a group are normalised together, (r - mean(R)) / (std(R) + epsilon), and a token's advantage is the sum of the
    normalised rewards of the steps that end with it or after it. With one step at the last token of every completion, this is
    ``group_advantages`` of the steps' rewards, at every token.

    The other choices mean the same as there, of steps instead of completions: ``leave_one_out`` is the mean over the steps of the
    other completions; ``batch_mean``, ``batch_std`` and ``centred_std`` are over all steps of the batch. A group whose steps all have one
    reward gets exactly 0 under a group baseline, also where completions have different numbers of them. Raises ``RewardError`` for a reward
    that is not finite.

    ``discount``: what each step counts for the one before it, 1 in the paper. At 0 a step is judged by its own reward alone.
    """
    groups = int(group_N[-1]) + 1 if len(group_N) else 0
    group_K = group_N[steps.sequence_K]
    pools = [steps.rewards_K[group_K == g].tolist() for g in range(groups)]
    check_finite(pools)
    everything = [r for pool in pools for r in pool]
    centred_K = steps.rewards_K - _step_baselines(baseline, steps, group_K, pools, everything)
    divisors = torch.tensor(SCALES[scale](pools, everything, centred_K.tolist(), epsilon), dtype=torch.float64)
    at_T = torch.zeros(int(lengths_N.sum()), dtype=torch.float64)
    at_T.index_add_(0, steps.end_K, _discounted(centred_K / divisors[group_K], steps, discount))
    return to_go(at_T, lengths_N)


def _discounted(normalised_K: Tensor, steps: StepRewards, discount: float) -> Tensor:
    """What stands at each step's end so that the plain sum from there on is the discounted one, A(s) = r(s) + discount A(s + 1)."""
    if discount == 1:
        return normalised_K
    rewards, sequences, ends = normalised_K.tolist(), steps.sequence_K.tolist(), steps.end_K.tolist()
    placed, later, last = [0.0] * len(rewards), 0.0, None
    for s in sorted(range(len(rewards)), key=lambda s: (ends[s], s), reverse=True):
        if sequences[s] != last:
            later, last = 0.0, sequences[s]
        placed[s] = rewards[s] - (1 - discount) * later
        later = rewards[s] + discount * later
    return torch.tensor(placed, dtype=torch.float64)


def _step_baselines(baseline: str, steps: StepRewards, group_K: Tensor, pools: Rewards, everything: Sequence[float]) -> Tensor:
    """What each step is compared with, ``[K]``."""
    if baseline == "group_mean":
        return torch.tensor([mean(pool) for pool in pools], dtype=torch.float64)[group_K]
    if baseline == "batch_mean":
        return torch.full_like(steps.rewards_K, mean(everything))
    if baseline == "none":
        return torch.zeros_like(steps.rewards_K)
    baselines = {}
    for n in set(steps.sequence_K.tolist()):
        own = steps.sequence_K == n
        same = group_K == group_K[own][0]
        others = steps.rewards_K[same & ~own].tolist()
        baselines[n] = mean(
            others or steps.rewards_K[same].tolist()
        )  # without others there is nothing to compare with but its own
    return torch.tensor([baselines[n] for n in steps.sequence_K.tolist()], dtype=torch.float64)


# Advantages by name; keywords are the fields of their settings sections (``config.objective``).


def group_advantage(
    inputs: AdvantageInputs, *, baseline: str = "group_mean", scale: str = "group_std", epsilon: float = 1e-4,
    discount: float = 1.0,
) -> AdvantageOutputs:  # fmt: skip
    """``group_advantages``, or ``token_advantages`` where the KL is part of the tokens' rewards, plus ``process_advantages``.

    Rewards of steps are judged apart from those of whole completions, each with its own mean, so that many small step rewards are not
    measured by one large outcome; a function's weight is applied after its steps are normalised. ``discount``: of later steps.
    """
    rewards = inputs.by_group(inputs.rewards_N)
    if inputs.penalties_T is None:
        out = AdvantageOutputs(_flat(group_advantages(rewards, baseline, scale, epsilon)))
    else:
        out = AdvantageOutputs(
            advantages_T=token_advantages(rewards, inputs.penalties_T, inputs.lengths_N, baseline, scale, epsilon)
        )
    return _with_steps(inputs, out, baseline, scale, epsilon, discount)


def maxrl_advantage(inputs: AdvantageInputs, *, epsilon: float = 1e-4) -> AdvantageOutputs:
    """(r - mean) / (mean + epsilon) of the group: MaxRL (arXiv 2602.02710), for rewards from 0 to 1.

    A group that succeeds in a share p of its completions weighs as 1 / p, which makes the expected gradient approach that of the
    log-likelihood of success. A group without any success gets 0; the paper's formula needs no ``epsilon``, which keeps it from 0 / 0.
    Rewards of steps, which the paper does not have, are normalised by the group's standard deviation, as in ``group_advantage``.

    Raises RewardError for negative rewards.
    """
    groups = inputs.by_group(inputs.rewards_N)
    check_finite(groups)
    advantages = []
    for group in groups:
        if min(group) < 0:
            raise RewardError(
                f"advantage maxrl got a reward of {min(group):g}, but it divides by the group's mean reward: use rewards of 0 and above"
            )
        centre = mean(group)
        advantages.append([(r - centre) / (centre + epsilon) for r in group])
    return _with_steps(inputs, AdvantageOutputs(_flat(advantages)), "group_mean", "group_std", epsilon)


def gdpo_advantage(inputs: AdvantageInputs, *, epsilon: float = 1e-4) -> AdvantageOutputs:
    """GDPO (arXiv 2601.05242, eq. 4 to 6): each reward function normalised by itself within the group, the weighted sum over functions,
    and that normalised over the batch.

    Normalising the sum lets different combinations of scores collapse into one advantage. A completion to which a function does not apply
    gets 0 for it. Raises RewardError for rewards of steps, which it has no place for.
    """
    if inputs.steps:
        raise RewardError(
            f"advantage gdpo compares completions as wholes, but {', '.join(inputs.steps)} rewarded steps: give each completion one "
            "number, or set algorithm.advantage.type to group"
        )
    total_N = torch.zeros_like(inputs.rewards_N)
    for function in inputs.functions.values():
        known = [[r for r in group if not math.isnan(r)] for group in inputs.by_group(function.scores_N)]
        normalised = _flat(group_advantages(known, "group_mean", "group_std", epsilon))
        total_N[~function.scores_N.isnan()] += function.weight * normalised
    everything = total_N.tolist()
    return AdvantageOutputs((total_N - mean(everything)) / (_std(everything) + epsilon))


def gae_advantage(
    inputs: AdvantageInputs, *, gamma: float = 1.0, lam: float = 0.95, whiten: bool = True, epsilon: float = 1e-4
) -> AdvantageOutputs:
    """Generalised advantage estimation (arXiv 1506.02438) over the completions that take part; the others get 0 (PPO).

    Rewards of steps, and the KL where it is part of the tokens' rewards, arrive at their tokens, a completion's reward at its last.
    """
    rewards_T = torch.zeros(int(inputs.lengths_N.sum()), dtype=torch.float64)
    if inputs.penalties_T is not None:
        rewards_T -= inputs.penalties_T
    for steps in inputs.steps.values():
        rewards_T.index_add_(0, steps.end_K, steps.weight_N[steps.sequence_K] * steps.rewards_K)
    assert inputs.values_T is not None, "this advantage needs values"
    part_N = torch.ones(len(inputs.lengths_N), dtype=torch.bool) if inputs.taking_part_N is None else inputs.taking_part_N
    part_T = part_N[inputs.sequence_T]
    values_T = inputs.values_T[part_T]
    advantages_T, returns_T = value_advantages(
        inputs.rewards_N[part_N], values_T, inputs.lengths_N[part_N], rewards_T[part_T],
        gamma=gamma, lam=lam, whiten=whiten, epsilon=epsilon,
    )  # fmt: skip
    explained = explained_variance(values_T, returns_T)
    out_T, goals_T = torch.zeros_like(rewards_T), torch.zeros_like(rewards_T)
    out_T[part_T], goals_T[part_T] = advantages_T, returns_T
    # Where returns do not vary there is nothing to explain, and no number.
    metrics = {} if math.isnan(explained) else {"value/explained_variance": Mean(explained, 1)}
    return AdvantageOutputs(advantages_T=out_T, returns_T=goals_T, metrics=metrics)


gae_advantage.needs = frozenset({"values"})  # type: ignore[attr-defined]

ADVANTAGES: dict[str, Advantage] = {
    "group": group_advantage,
    "gae": gae_advantage,
    "maxrl": maxrl_advantage,
    "gdpo": gdpo_advantage,
}
"""By ``algorithm.advantage.type``; ``groupwise.algorithm.register_advantage`` adds to it."""


def _with_steps(
    inputs: AdvantageInputs, outcome: AdvantageOutputs, baseline: str, scale: str, epsilon: float, discount: float = 1.0
) -> AdvantageOutputs:
    if not inputs.steps:
        return outcome
    total_T = outcome.per_token(inputs)
    for steps in inputs.steps.values():
        of_steps_T = process_advantages(steps, inputs.group_N, inputs.lengths_N, baseline, scale, epsilon, discount)
        total_T = total_T + steps.weight_N[inputs.sequence_T] * of_steps_T
    return AdvantageOutputs(advantages_T=total_T)


def _flat(numbers: Rewards) -> Tensor:
    return torch.tensor([x for group in numbers for x in group], dtype=torch.float64)
