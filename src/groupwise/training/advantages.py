"""The advantages of a step: from the rewards of all its groups, and from what the passes said about their tokens."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

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
from groupwise.algorithm.advantages import check_finite
from groupwise.batch import Batch, Member, everyone
from groupwise.distributed import World
from groupwise.limits import LARGEST_REWARD
from groupwise.types import Group

__all__ = ["Advantages", "StepAdvantages"]

Advantages = list[list[float]]
"""One number per completion, ``[p][g]``."""
_SMALLEST = 1e-9
"""An advantage below it moves nothing."""


@dataclass(frozen=True, slots=True)
class StepAdvantages:
    """Advantages of all completions of a step, of all processes."""

    inputs: AdvantageInputs
    outputs: AdvantageOutputs

    @classmethod
    def of(
        cls, groups: Sequence[Group], objective: Objective, taking_part: Collection[Member] | None = None, *,
        batch: Batch | None = None, beta: float = 0.0, world: World | None = None,
    ) -> StepAdvantages:  # fmt: skip
        """Compare the completions of ``groups``, with what the passes over this process's ``batch`` found, which all processes of
        ``world`` put together. ``taking_part``: those that the loss counts, by default all."""
        members = everyone(groups)
        flat = [(groups[g], m) for g, m in members]
        rewards_N = torch.tensor([group.outcomes[m] for group, m in flat], dtype=torch.float64)
        lengths_N = torch.tensor([group.completions[m].sampled_tokens for group, m in flat], dtype=torch.long)
        part = set(members if taking_part is None else taking_part)
        penalties_T = values_T = None
        if batch is not None:
            world, tokens, kl = world or World(), int(lengths_N.sum()), objective.kl
            # A process without a share of the batch has made no passes, and takes part all the same.
            reference_T, own_values_T = (
                batch.weights_T[:0] if column_T is None else column_T for column_T in (batch.reference_logprobs_T, batch.values_T)
            )
            if kl is not None and objective.kl_in_token_reward:
                taken_T = kl_penalty(batch.own_T, reference_T, beta=beta, estimator=kl.estimator)
                penalties_T = world.assemble(taken_T, batch.place_T, tokens)
            if kl is not None and objective.kl_in_reward:
                check_finite([group.outcomes for group in groups])
                taken_N = kl_in_reward(batch.own_T, reference_T, batch.sequence_T, len(batch), beta=beta, estimator=kl.estimator)
                rewards_N = rewards_N - world.assemble(taken_N, batch.place_N, len(flat))
            if objective.needs_values:
                values_T = world.assemble(own_values_T, batch.place_T, tokens)
        inputs = AdvantageInputs(
            rewards_N=rewards_N,
            group_N=torch.tensor([g for g, _ in members], dtype=torch.long),
            lengths_N=lengths_N,
            functions=_functions(flat),
            steps=_steps(flat, lengths_N),
            penalties_T=penalties_T,
            values_T=values_T,
            taking_part_N=torch.tensor([member in part for member in members], dtype=torch.bool),
        )
        if objective.kl_in_reward and not bool((rewards_N.abs() <= LARGEST_REWARD).all()):
            # The rewards were sound, so the policy ran away from the reference: the update is to be dropped.
            unknown_T = torch.full_like(inputs.sequence_T, math.nan, dtype=torch.float64)
            return cls(inputs, AdvantageOutputs(advantages_T=unknown_T, returns_T=unknown_T if objective.needs_values else None))
        return cls(inputs, objective.advantages(inputs))

    @property
    def per_token(self) -> Tensor:
        """``[T]``, float64."""
        return self.outputs.per_token(self.inputs)

    @property
    def by_group(self) -> Advantages:
        """Each completion's advantage, the mean over its tokens where they differ."""
        return self.inputs.by_group(self.outputs.per_completion(self.inputs))

    @property
    def teaching(self) -> set[int]:
        """The groups that have an advantage large enough to move a weight."""
        return set(self.inputs.group_N[self.inputs.sequence_T][self.per_token.abs() > _SMALLEST].tolist())


def _functions(flat: Sequence[tuple[Group, int]]) -> dict[str, FunctionScores]:
    """Functions with a weight, and their shaped scores of whole completions; a group in which one gave none has no scores of it."""
    by_name = {}
    for name, weight in {name: weight for group, _ in flat for name, weight in group.weights.items()}.items():
        judged = [group.shaped[name][i] if name in group.shaped else None for group, i in flat]
        scores = [math.nan if score is None else score for score in judged]
        by_name[name] = FunctionScores(weight, torch.tensor(scores, dtype=torch.float64))
    return by_name


def _steps(flat: Sequence[tuple[Group, int]], lengths_N: Tensor) -> dict[str, StepRewards]:
    """Rewards of steps by function; each step by the place of its last sampled token among all of the step's.

    One that ends within what the policy was given rewards what it had sampled before."""
    start, by_name = (lengths_N.cumsum(0) - lengths_N).tolist(), {}
    # Up to each token of a completion, how many were sampled.
    sampled = [list(accumulate(group.completions[i].sampled)) if group.process else [] for group, i in flat]
    for name in dict.fromkeys(name for group, _ in flat for name in group.process):
        given = [group.process.get(name) for group, _ in flat]
        rows = [
            (n, end, reward)
            for n, ((_, i), scores) in enumerate(zip(flat, given, strict=True))
            for end, reward in (scores.steps[i] if scores is not None and scores.steps else ())
        ]
        assert all(0 <= end < len(sampled[n]) for n, end, _ in rows), "a step ends with one of the completion's tokens"
        by_name[name] = StepRewards(
            torch.tensor([n for n, _, _ in rows], dtype=torch.long),
            torch.tensor([start[n] + max(0, sampled[n][end] - 1) for n, end, _ in rows], dtype=torch.long),
            torch.tensor([reward for _, _, reward in rows], dtype=torch.float64),
            torch.tensor([0.0 if scores is None else scores.weight for scores in given], dtype=torch.float64),
        )
    return by_name
