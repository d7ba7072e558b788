"""From every function's scores of one group to its rewards: shaped, weighted and added, steps apart from whole completions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from groupwise.metrics import Mean, Metric
from groupwise.rewards.load import LoadedReward
from groupwise.rewards.results import RewardFailure
from groupwise.rewards.shaping import Shaper
from groupwise.types import Completion, Group, Prompt, StepScores

__all__ = ["Components", "Judged", "Sums", "add_up", "numbers_of", "step_metrics"]

Judged = float | None | tuple[tuple[int, float], ...]
"""What one function says of one completion: a number, nothing, or its steps' (index of the last token, reward)."""
Components = Mapping[str, Sequence[Judged]]


def numbers_of(judged: Judged) -> list[float]:
    """Every reward in it."""
    if judged is None:
        return []
    return [r for _, r in judged] if isinstance(judged, tuple) else [judged]


def _has_steps(judged: Sequence[Judged]) -> bool:
    return any(isinstance(one, tuple) for one in judged)


@dataclass(frozen=True, slots=True)
class Sums:
    """A group's weighted sums, before the sum itself is normalised and clipped."""

    outcomes: list[float] | None
    """Of the scores for whole completions; None where there are only steps."""
    process: dict[str, StepScores]
    weights: dict[str, float]

    def group(self, prompt: Prompt, completions: Sequence[Completion], components: Components, total: Shaper) -> Group:
        scores = {name: tuple(_sum(one) for one in judged) for name, judged in components.items()}
        outcomes = tuple(0.0 if self.outcomes is None else total(self.outcomes[i]) for i in range(len(completions)))
        if not self.process:
            return Group(prompt, tuple(completions), outcomes, scores, weights=self.weights)
        of_steps = [
            math.fsum(s.weight * r for s in self.process.values() for _, r in s.steps[i]) for i in range(len(completions))
        ]
        rewards = tuple(a + b for a, b in zip(outcomes, of_steps, strict=True))
        return Group(prompt, tuple(completions), rewards, scores, self.process, outcomes, self.weights)


def add_up(
    rewards: Sequence[LoadedReward], prompt: Prompt, completions: Sequence[Completion], components: Components
) -> Sums | RewardFailure:
    """Functions of weight 0 judge nothing. A completion to which no other applies makes the group a failure."""
    judges = [reward for reward in rewards if reward.weight != 0]
    process = {r.name: _steps(r, completions, components[r.name]) for r in judges if _has_steps(components[r.name])}
    whole = [reward for reward in judges if reward.name not in process]
    sums = []
    for i in range(len(completions)):
        if all(components[reward.name][i] is None for reward in judges):
            names, problem_id = ", ".join(reward.name for reward in judges), prompt.problem.id
            message = f"no reward function applies to completion {i} of problem {problem_id!r}: {names} returned None for it"
            return RewardFailure(names, problem_id, "not_a_number", message)
        sums.append(math.fsum(r.weight * r.shaper(x) for r in whole for x in numbers_of(components[r.name][i])))
    return Sums(sums if whole else None, process, {reward.name: reward.weight for reward in judges})


def _steps(reward: LoadedReward, completions: Sequence[Completion], judged: Sequence[Judged]) -> StepScores:
    """A number among steps is one step, which ends with the completion."""
    steps = []
    for one, completion in zip(judged, completions, strict=True):
        last = len(completion.token_ids) - 1
        placed = one if isinstance(one, tuple) else tuple((last, r) for r in numbers_of(one) if last >= 0)
        steps.append(tuple((end, reward.shaper(r)) for end, r in placed))
    return StepScores(reward.weight, tuple(steps))


def _sum(judged: Judged) -> float | None:
    return None if judged is None else math.fsum(numbers_of(judged))


def step_metrics(name: str, judged: Sequence[Judged]) -> dict[str, Metric]:
    """How many steps a completion has, and what a step earns; nothing where the function gave none."""
    if not _has_steps(judged):
        return {}
    counts = [len(one) for one in judged if isinstance(one, tuple)]
    rewards = [r for one in judged if isinstance(one, tuple) for r in numbers_of(one)]
    found: dict[str, Metric] = {f"steps/count_{name}": Mean.of(counts)}
    return found | ({f"steps/reward_{name}": Mean.of(rewards)} if rewards else {})
