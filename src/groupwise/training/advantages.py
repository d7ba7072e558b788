"""What the advantages of a step are computed from: the rewards of all its groups, and what the passes said about their tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.algorithm import (
    AdvantageInputs,
    AdvantageOutputs,
    FunctionScores,
    Objective,
    StepRewards,
    kl_in_reward,
    kl_penalty,
)
from groupwise.batch import Batch, tokens_of
from groupwise.distributed import World
from groupwise.types import Group

__all__ = ["Advantages", "advantage_inputs", "by_group", "teaching"]

Advantages = list[list[float]]
"""One number per completion, ``[p][g]``."""
_SMALLEST = 1e-9
"""An advantage below it moves nothing."""


def advantage_inputs(
    groups: Sequence[Group],
    objective: Objective,
    *,
    taking_part: Sequence[bool] | None = None,
    batch: Batch | None = None,
    beta: float = 0.0,
    world: World | None = None,
) -> AdvantageInputs:
    """The whole step, with what the passes over this process's ``batch`` found, which all processes of ``world`` put together."""
    world = world or World()
    flat = [(group, i) for group in groups for i in range(len(group.completions))]
    rewards_N = torch.tensor([group.outcomes[i] for group, i in flat], dtype=torch.float64)
    length_N = torch.tensor([group.completions[i].sampled_tokens for group, i in flat], dtype=torch.long)
    penalties_T = values_T = None
    if batch is not None:
        places, tokens = tokens_of(groups, batch.members), int(length_N.sum())
        if objective.kl_in_reward:
            rewards_N = rewards_N - _kl_of_completions(groups, objective, batch, beta, world)
        if objective.kl_in_token_reward:
            assert batch.reference_T is not None
            assert objective.kl is not None
            taken_T = kl_penalty(batch.own_T, batch.reference_T, beta=beta, estimator=objective.kl.estimator)
            penalties_T = world.assemble(taken_T, places, tokens)
        if objective.needs_values:
            assert batch.values_T is not None
            values_T = world.assemble(batch.values_T, places, tokens)
    return AdvantageInputs(
        rewards_N=rewards_N,
        group_N=torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(g.completions) for g in groups])),
        length_N=length_N,
        functions=_functions(groups),
        steps=_steps(groups, length_N),
        penalties_T=penalties_T,
        values_T=values_T,
        taking_part_N=None if taking_part is None else torch.tensor(list(taking_part), dtype=torch.bool),
    )


def _kl_of_completions(groups: Sequence[Group], objective: Objective, batch: Batch, beta: float, world: World) -> Tensor:
    """beta x KL of each completion, ``[N]`` over the whole step."""
    assert batch.reference_T is not None
    assert objective.kl is not None
    taken_N = kl_in_reward(
        batch.own_T, batch.reference_T, batch.sequence_T, len(batch), beta=beta, estimator=objective.kl.estimator
    )
    first = [0, *torch.tensor([len(group.completions) for group in groups]).cumsum(0).tolist()]
    places = torch.tensor([first[g] + m for g, m in batch.members], dtype=torch.long)
    return world.assemble(taken_N, places, first[-1])


def _functions(groups: Sequence[Group]) -> dict[str, FunctionScores]:
    """Functions with a weight that judged whole completions; a group without a function has no scores of it."""
    found = {}
    for name, weight in {name: weight for group in groups for name, weight in group.weights.items()}.items():
        judged = [
            group.components[name] if name in group.components and name not in group.process else (None,) * len(group.completions)
            for group in groups
        ]
        scores = [math.nan if score is None else score for group in judged for score in group]
        found[name] = FunctionScores(weight, torch.tensor(scores, dtype=torch.float64))
    return found


def _steps(groups: Sequence[Group], length_N: Tensor) -> dict[str, StepRewards]:
    """Rewards of steps by function; each step by the place of its last sampled token among all of the step's.

    One that ends within what the policy was given rewards what it had sampled before."""
    start = (length_N.cumsum(0) - length_N).tolist()
    found = {}
    for name in dict.fromkeys(name for group in groups for name in group.process):
        sequence: list[int] = []
        ends: list[int] = []
        rewards: list[float] = []
        weights: list[float] = []
        for group in groups:
            scores = group.process.get(name)
            for i in range(len(group.completions)):
                n, sampled = len(weights), group.completions[i].sampled
                weights.append(0.0 if scores is None else scores.weight)
                for end, reward in scores.steps[i] if scores is not None and scores.steps else ():
                    assert 0 <= end < len(sampled), "a step ends with one of the completion's tokens"
                    sequence.append(n)
                    ends.append(start[n] + max(0, sum(sampled[: end + 1]) - 1))
                    rewards.append(reward)
        found[name] = StepRewards(
            torch.tensor(sequence, dtype=torch.long),
            torch.tensor(ends, dtype=torch.long),
            torch.tensor(rewards, dtype=torch.float64),
            torch.tensor(weights, dtype=torch.float64),
        )
    return found


def teaching(inputs: AdvantageInputs, outputs: AdvantageOutputs) -> list[bool]:
    """Whether any advantage of each group is large enough to move a weight."""
    moves_T = outputs.per_token(inputs).abs() > _SMALLEST
    groups = int(inputs.group_N[-1]) + 1 if len(inputs.group_N) else 0
    moving = torch.zeros(groups, dtype=torch.long).index_add_(0, inputs.group_N[inputs.sequence_T], moves_T.long())
    return [count > 0 for count in moving.tolist()]


def by_group(inputs: AdvantageInputs, outputs: AdvantageOutputs) -> Advantages:
    """Each completion's advantage, the mean over its tokens where they differ, by group."""
    return inputs.by_group(outputs.per_completion(inputs))
