"""From rewards to every micro-batch's advantages: where the KL is part of the reward, or a value is learned, they need the passes
that came before. Whole groups of the whole batch are looked at, before anything is left out.

Rewards of steps are judged apart from those of whole completions, and the two advantages are added: each has its own mean, so that many
small step rewards are not measured by one large outcome.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from groupwise.algorithm import Objective, explained_variance, kl_in_reward, kl_penalty
from groupwise.distributed import World
from groupwise.metrics import Mean, Metric
from groupwise.training.microbatches import MicroBatch, members_of
from groupwise.types import Group, StepScores

__all__ = ["Advantages", "advantages_by_token", "assign_advantages", "step_advantages", "steps_teach", "teaches"]

Advantages = list[list[float]]
PerToken = list[list[list[float]]]


def assign_advantages(
    micro_batches: Sequence[MicroBatch],
    groups: Sequence[Group],
    objective: Objective,
    beta: float,
    world: World | None = None,
    judged: Sequence[MicroBatch] = (),
) -> tuple[Advantages, dict[str, Metric]]:
    """Give every micro-batch its completions' (or tokens') advantages. Returns them by group, averaged over tokens, and metrics.

    ``micro_batches`` are this process's, ``groups`` the whole batch; what the passes of others found is asked of ``world``.
    ``judged``: completions that the loss leaves out, and whose KL is still part of what the others are compared with.
    """
    rewards, world = [list(group.outcomes) for group in groups], world or World()
    everything = [*micro_batches, *judged]
    if objective.kl_in_reward:
        _take_off_kl(everything, rewards, objective, beta, world)
    if objective.needs_values:
        return _by_value(micro_batches, rewards, _step_rewards(groups), objective, beta, world)
    of_steps = step_advantages(groups, objective)
    if objective.kl_in_token_reward:
        by_token = objective.token_advantages(rewards, _penalties(everything, rewards, objective, beta, world))
        if of_steps is not None:
            by_token = _added(by_token, of_steps)
        _give_tokens(micro_batches, by_token)
        return _means(by_token), {}
    advantages = objective.advantages(rewards)
    if of_steps is not None:
        everywhere = [
            [[a] * len(tokens) for a, tokens in zip(*pair, strict=True)] for pair in zip(advantages, of_steps, strict=True)
        ]
        by_token = _added(everywhere, of_steps)
        _give_tokens(micro_batches, by_token)
        return _means(by_token), {}
    for micro_batch in micro_batches:
        chosen = [advantages[g][m] for g, m in members_of(micro_batch)]
        micro_batch.advantages_N = torch.tensor(chosen, device=micro_batch.sampled_T.device)
    return advantages, {}


def step_advantages(groups: Sequence[Group], objective: Objective) -> PerToken | None:
    """What the rewards of steps add to every token's advantage, ``[p][g][t]``; None where no function gave any.

    Each function's steps are normalised by themselves, and its weight comes afterwards: inside, a normalisation would take it away.
    """
    lengths = [[len(c.token_ids) for c in group.completions] for group in groups]
    total: PerToken | None = None
    for name in dict.fromkeys(name for group in groups for name in group.process):
        none = StepScores(0.0, ())
        scores = [group.process.get(name, none) for group in groups]
        steps = [s.steps or ((),) * len(group.completions) for s, group in zip(scores, groups, strict=True)]
        found = objective.process_advantages(steps, lengths)
        weighted = [[[s.weight * a for a in tokens] for tokens in group] for s, group in zip(scores, found, strict=True)]
        total = weighted if total is None else _added(total, weighted)
    return total


def _step_rewards(groups: Sequence[Group]) -> PerToken | None:
    """The weighted rewards of steps as rewards of tokens, which is what a learned value sums up; None where there are none."""
    if not any(group.process for group in groups):
        return None
    at: PerToken = [[[0.0] * len(c.token_ids) for c in group.completions] for group in groups]
    for group, tokens in zip(groups, at, strict=True):
        for scores in group.process.values():
            for completion, steps in zip(tokens, scores.steps, strict=True):
                for end, reward in steps:
                    completion[end] += scores.weight * reward
    return at


def _added(one: PerToken, other: PerToken) -> PerToken:
    """Token by token; a completion without numbers in ``one`` (it takes no part) stays without."""
    return [
        [[a + b for a, b in zip(x, y, strict=True)] if x else [] for x, y in zip(*pair, strict=True)]
        for pair in zip(one, other, strict=True)
    ]


def _take_off_kl(
    micro_batches: Sequence[MicroBatch], rewards: list[list[float]], objective: Objective, beta: float, world: World
) -> None:
    own: list[tuple[tuple[int, int], float]] = []
    for micro_batch in micro_batches:
        assert micro_batch.reference_T is not None
        taken = kl_in_reward(
            micro_batch.own_T, micro_batch.reference_T, micro_batch.packed.sequence_T, len(micro_batch.packed.lengths_N),
            beta=beta, estimator=objective.kl_estimator,
        )  # fmt: skip
        own += zip(members_of(micro_batch), taken.tolist(), strict=True)
    for (group, member), penalty in (pair for part in world.gather(own) for pair in part):
        rewards[group][member] -= penalty


def _penalties(
    micro_batches: Sequence[MicroBatch], rewards: list[list[float]], objective: Objective, beta: float, world: World
) -> PerToken:
    own: list[tuple[tuple[int, int], list[float]]] = []
    for micro_batch in micro_batches:
        assert micro_batch.reference_T is not None
        taken = kl_penalty(micro_batch.own_T, micro_batch.reference_T, beta=beta, estimator=objective.kl_estimator)
        own += micro_batch.by_member(taken)
    return _everywhere(own, rewards, world)


def _everywhere(own: list[tuple[tuple[int, int], list[float]]], rewards: list[list[float]], world: World) -> PerToken:
    """Numbers per token of the whole batch, from those of this process's completions; none for completions that take no part."""
    out: PerToken = [[[] for _ in group] for group in rewards]
    for (group, member), numbers in (pair for part in world.gather(own) for pair in part):
        out[group][member] = numbers
    return out


def _by_value(
    micro_batches: Sequence[MicroBatch],
    rewards: list[list[float]],
    of_steps: PerToken | None,
    objective: Objective,
    beta: float,
    world: World,
) -> tuple[Advantages, dict[str, Metric]]:
    """Generalised advantage estimation over the completions that take part; others have no values and get advantage 0."""
    own: list[tuple[tuple[int, int], list[float]]] = []
    for micro_batch in micro_batches:
        assert micro_batch.values_T is not None
        own += micro_batch.by_member(micro_batch.values_T)
    values = _everywhere(own, rewards, world)
    penalties = _penalties(micro_batches, rewards, objective, beta, world) if objective.kl_in_token_reward else None
    if of_steps is not None:
        fines = [[[-r for r in tokens] for tokens in group] for group in of_steps]
        penalties = fines if penalties is None else _added(penalties, fines)
    taking_part = [[m for m, tokens in enumerate(group) if tokens] for group in values]

    def chosen(source: Sequence[Sequence[object]]) -> list[list]:  # type: ignore[type-arg]
        return [[source[g][m] for m in members] for g, members in enumerate(taking_part)]

    some_values = chosen(values)
    found = objective.value_advantages(chosen(rewards), some_values, None if penalties is None else chosen(penalties))
    by_token, returns = (_spread(numbers, taking_part, rewards) for numbers in found)
    _give_tokens(micro_batches, by_token)
    for micro_batch in micro_batches:
        flat = [r for g, m in members_of(micro_batch) for r in returns[g][m]]
        micro_batch.returns_T = torch.tensor(flat, dtype=torch.float32, device=micro_batch.sampled_T.device)
    explained = explained_variance(some_values, found[1])
    # Where returns do not vary there is nothing to explain, and no number.
    return _means(by_token), {} if math.isnan(explained) else {"value/explained_variance": Mean(explained, 1)}


def _spread(numbers: PerToken, taking_part: list[list[int]], rewards: list[list[float]]) -> PerToken:
    out: PerToken = [[[] for _ in group] for group in rewards]
    for g, members in enumerate(taking_part):
        for m, tokens in zip(members, numbers[g], strict=True):
            out[g][m] = tokens
    return out


def _give_tokens(micro_batches: Sequence[MicroBatch], by_token: PerToken) -> None:
    for micro_batch in micro_batches:
        flat = [a for g, m in members_of(micro_batch) for a in by_token[g][m]]
        micro_batch.advantages_T = torch.tensor(flat, dtype=torch.float32, device=micro_batch.sampled_T.device)


def advantages_by_token(micro_batches: Sequence[MicroBatch], groups: int) -> dict[tuple[int, int], list[float]]:
    """(group, completion) -> its tokens' advantages, for the first ``groups`` groups; empty where a completion has one advantage."""
    found: dict[tuple[int, int], list[float]] = {}
    for micro_batch in micro_batches:
        if micro_batch.advantages_T is not None and any(part.group < groups for part in micro_batch.parts):
            found |= {member: piece for member, piece in micro_batch.by_member(micro_batch.advantages_T) if member[0] < groups}
    return found


def _means(numbers: PerToken) -> Advantages:
    return [[sum(tokens) / len(tokens) if tokens else 0.0 for tokens in group] for group in numbers]


def teaches(advantages: Sequence[float]) -> bool:
    """Whether any of a group's advantages moves anything."""
    return any(abs(a) > 1e-9 for a in advantages)


def steps_teach(advantages: list[list[list[float]]] | None, group: int) -> bool:
    """Whether the advantages of a group's steps, where rewards were given to steps, move anything."""
    return advantages is not None and any(teaches(tokens) for tokens in advantages[group])
