"""The update: from scored groups to new weights. mu optimiser steps on one batch, each the sum of its micro-batches.

Axes: N completions and T tokens of a micro-batch, as in ``algorithm``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.algorithm import BatchCounts, Objective, kl_in_reward, kl_penalty, policy_loss
from groupwise.batching import Part, cut_batch
from groupwise.config.schema import Config
from groupwise.metrics import Max, Mean, Metric, Sum, merge
from groupwise.models.scorer import Scorer, copy_weights, make_reference
from groupwise.training.optimizer import MasterAdamW, learning_rate_at
from groupwise.types import Group

__all__ = ["Advantages", "Learner", "MicroBatch", "Share"]

Advantages = list[list[float]]
_DETAILS = ("clip_low", "clip_high", "clip_low_least", "clip_high_most", "kl_corrected")


@dataclass(frozen=True, slots=True)
class Share:
    """Completions that are swept together, by (group, completion), and the counts that their weights in the loss are made of.

    Usually one share is the whole batch. Several divide a batch among several optimiser steps, or add up several denominators in one.
    """

    members: Sequence[tuple[int, int]]
    counts: BatchCounts


@dataclass
class MicroBatch:
    """Some completions, packed, with everything the loss needs to know about them."""

    parts: list[Part]
    packed: Any
    sampled_T: Tensor
    weights_T: Tensor
    advantages_N: Tensor | None = None
    advantages_T: Tensor | None = None
    reference_T: Tensor | None = None
    old_T: Tensor | None = None
    """The policy's own logprobs at the first update, by which later ones are measured; None on-policy."""


class Learner:
    """Holds what learning needs beside the policy: optimiser, reference, and the count of updates."""

    def __init__(self, scorer: Scorer, config: Config, optimizer: Any = None) -> None:
        """``optimizer``: another one than AdamW with masters, with the same methods, over the scorer's parameters."""
        self.scorer, self.config = scorer, config
        self.objective = Objective.from_config(config.algorithm)
        self.optimizer = MasterAdamW(scorer.named_parameters(), config.optimizer) if optimizer is None else optimizer
        self.reference = make_reference(scorer) if self.objective.needs_reference else None
        self.updates = 0
        self.dropped_in_a_row = 0

    def renew_reference(self) -> None:
        """The reference becomes the current policy (an outer iteration of arXiv 2402.03300, algorithm 1)."""
        if self.reference is not None:
            copy_weights(self.scorer, self.reference)

    def learn(self, groups: Sequence[Group]) -> tuple[Advantages, dict[str, Metric]]:
        """``updates_per_batch`` optimiser steps on ``groups``. Returns the advantages, by group, and metrics.

        Advantages and denominators are those of all ``groups``. Groups whose advantages are all 0 (under a group baseline: those
        without variance) then take no part in the passes, unless the config wants their KL. A batch that has nothing to teach
        makes no optimiser step.
        """
        rewards = [list(group.rewards) for group in groups]
        advantages = self.objective.advantages(rewards)
        taught = [i for i, group in enumerate(advantages) if _teaches(group) or self._keeps_all]
        if not taught:
            return advantages, {}
        share = Share([(i, m) for i in taught for m in range(len(groups[i].completions))], self.counts(groups))
        micro_batches = self._cut(groups, share)
        found: list[dict[str, Metric]] = [self._score_reference(micro_batches)]
        advantages = self._assign_advantages(micro_batches, rewards, advantages)
        for update in range(self.config.algorithm.updates_per_batch):
            passes = self.accumulate(micro_batches, first=update == 0)
            passes["policy/loss"] = Mean(passes["policy/loss"].value, 1)  # summed over micro-batches, averaged over updates
            found += [{k: v for k, v in passes.items() if not k.startswith("detail/")}, self.step()]
        return advantages, merge(found) | {"optimizer/learning_rate": found[-1]["optimizer/learning_rate"]}

    def counts(self, groups: Sequence[Group]) -> BatchCounts:
        """Of a whole batch, completions that the passes skip included."""
        everything = [c for group in groups for c in group.completions]
        return BatchCounts(
            completions=len(everything),
            tokens=sum(len(c.token_ids) for c in everything),
            max_tokens=self.config.rollout.max_completion_tokens,
        )

    def prepare(
        self, groups: Sequence[Group], shares: Sequence[Share], advantages: Advantages, *, off_policy: bool
    ) -> list[list[MicroBatch]]:
        """Each share's micro-batches, with advantages and the reference's logprobs: for callers that order the steps themselves.

        ``off_policy``: the weights will have moved before some share's turn, so the policy's logprobs are taken down now, in one
        more pass; otherwise the ratio of a share's first sweep is 1 by definition. The KL must not be part of the reward.
        """
        assert self.objective.kl_in_loss, "a KL in the reward changes advantages: use learn"
        out = [self._cut(groups, share) if share.members else [] for share in shares]
        for micro_batch in (m for micro_batches in out for m in micro_batches):
            chosen = [advantages[g][m] for g, m in _members(micro_batch)]
            micro_batch.advantages_N = torch.tensor(chosen, device=self.scorer.device)
            if off_policy:
                with torch.no_grad():
                    micro_batch.old_T = self.scorer.logprobs(micro_batch.packed, self.config.rollout.temperature)
            self._score_reference([micro_batch])
        return out

    def accumulate(self, micro_batches: Sequence[MicroBatch], *, first: bool, scale: float = 1.0) -> dict[str, Metric]:
        """Add the gradient of some micro-batches, times ``scale``, to what the next ``step`` takes. Their loss is summed, not averaged.

        ``first``: they are swept for the first time, so that the sampler's mismatch can be measured. Without gradients switched on
        (``torch.no_grad``) only the numbers are computed. Names that begin with ``detail/`` are for callers, not for the records.
        """
        started = time.perf_counter()
        found = merge(self._backward(micro_batch, first, scale) for micro_batch in micro_batches)
        return found | {"time/learn_s": Sum(time.perf_counter() - started)}

    @property
    def _keeps_all(self) -> bool:
        """Groups without variance still matter to a KL: always where it is part of the reward, in the loss if the config says so."""
        in_loss = self.objective.kl_in_loss and self.config.algorithm.skip_zero_variance
        return self.objective.needs_reference and not in_loss

    def _cut(self, groups: Sequence[Group], share: Share) -> list[MicroBatch]:
        chosen: dict[int, list[int]] = {}
        for group, member in share.members:
            chosen.setdefault(group, []).append(member)
        listed = list(chosen.items())
        sizes = [
            (len(groups[i].prompt.token_ids), [len(groups[i].completions[m].token_ids) for m in members]) for i, members in listed
        ]
        cuts = cut_batch(sizes, self.config.training.micro_batch_tokens)
        return [
            self._pack(
                groups, [Part(listed[p.group][0], tuple(listed[p.group][1][m] for m in p.members)) for p in parts], share.counts
            )
            for parts in cuts
        ]

    def _pack(self, groups: Sequence[Group], parts: list[Part], counts: BatchCounts) -> MicroBatch:
        chosen = [(groups[p.group].prompt.token_ids, [groups[p.group].completions[m] for m in p.members]) for p in parts]
        packed = self.scorer.prepare([(prompt, [c.token_ids for c in completions]) for prompt, completions in chosen])
        sampled = torch.tensor([x for _, completions in chosen for c in completions for x in c.logprobs])
        weights = self.objective.weights(packed.lengths_N, packed.sequence_T, counts)
        return MicroBatch(parts, packed, sampled.to(self.scorer.device), weights)

    @torch.no_grad()
    def _score_reference(self, micro_batches: Sequence[MicroBatch]) -> dict[str, Metric]:
        if self.reference is None:
            return {}
        started = time.perf_counter()
        for micro_batch in micro_batches:
            micro_batch.reference_T = self.reference.logprobs(micro_batch.packed, self.config.rollout.temperature)
        return {"time/reference_s": Sum(time.perf_counter() - started)}

    def _assign_advantages(
        self, micro_batches: Sequence[MicroBatch], rewards: list[list[float]], advantages: Advantages
    ) -> Advantages:
        """Give every micro-batch its completions' advantages. Where the KL is a penalty on rewards, they change first."""
        token_advantages: list[list[list[float]]] | None = None
        if self.objective.kl_in_reward:
            for micro_batch in micro_batches:
                taken = kl_in_reward(
                    micro_batch.sampled_T, _known(micro_batch.reference_T), micro_batch.packed.sequence_T,
                    len(micro_batch.packed.lengths_N), beta=self.objective.beta, estimator=self.objective.kl_estimator,
                )  # fmt: skip
                for (group, member), penalty in zip(_members(micro_batch), taken.tolist(), strict=True):
                    rewards[group][member] -= penalty
            advantages = self.objective.advantages(rewards)
        elif self.objective.kl_in_token_reward:
            penalties: list[list[list[float]]] = [[[] for _ in group] for group in rewards]
            for micro_batch in micro_batches:
                taken = kl_penalty(
                    micro_batch.sampled_T, _known(micro_batch.reference_T), beta=self.objective.beta,
                    estimator=self.objective.kl_estimator,
                )  # fmt: skip
                pieces = taken.split(micro_batch.packed.lengths_N.tolist())
                for (group, member), piece in zip(_members(micro_batch), pieces, strict=True):
                    penalties[group][member] = piece.tolist()
            token_advantages = self.objective.token_advantages(rewards, penalties)
            advantages = [[sum(tokens) / len(tokens) for tokens in group] for group in token_advantages]
        for micro_batch in micro_batches:
            members, device = _members(micro_batch), self.scorer.device
            if token_advantages is None:
                micro_batch.advantages_N = torch.tensor([advantages[g][m] for g, m in members], device=device)
            else:
                micro_batch.advantages_T = torch.tensor([a for g, m in members for a in token_advantages[g][m]], device=device)
        return advantages

    def _backward(self, micro_batch: MicroBatch, first: bool, scale: float) -> dict[str, Metric]:
        """Add one micro-batch's gradient. The first update is on-policy: its ratio is exactly 1, and no old pass is needed."""
        logprobs = self.scorer.logprobs(micro_batch.packed, self.config.rollout.temperature)
        loss, numbers = policy_loss(
            self.objective,
            logprobs_T=logprobs,
            sequence_T=micro_batch.packed.sequence_T,
            weights_T=micro_batch.weights_T * scale,
            old_logprobs_T=micro_batch.old_T,
            advantages_N=micro_batch.advantages_N,
            advantages_T=micro_batch.advantages_T,
            reference_logprobs_T=micro_batch.reference_T,
        )
        if torch.is_grad_enabled():
            loss.backward()  # type: ignore[no-untyped-call]
        found: dict[str, Metric] = {
            "policy/loss": numbers["loss"],
            "policy/ratio_deviation": numbers["ratio_deviation_max"],
        }
        tokens = len(logprobs)
        found["policy/clip_share"] = Mean(numbers["clip_low"].total + numbers["clip_high"].total, tokens)  # type: ignore[union-attr]
        found |= {f"detail/{name}": numbers[name] for name in _DETAILS if name in numbers}
        if "kl" in numbers:
            found["policy/kl"] = numbers["kl"]
        if first:
            taken = logprobs.detach()
            mismatch = float((taken - micro_batch.sampled_T).abs().sum())
            found["policy/sampler_mismatch"] = Mean(mismatch, tokens)
            found["policy/entropy"] = Mean(-float(taken.sum()), tokens)
            found["speed/learnt_tokens"] = Sum(tokens)
            if self.config.algorithm.updates_per_batch > 1 and micro_batch.old_T is None:
                micro_batch.old_T = taken
        return found

    def step(self, rate: float | None = None) -> dict[str, Metric]:
        """One optimiser step on the gradients that have added up; ``rate``: another learning rate than the config's schedule has."""
        started = time.perf_counter()
        if rate is None:
            rate = learning_rate_at(self.config.optimizer, self.updates, self.config.optimizer_steps)
        norm, made = self.optimizer.step(rate)
        self.updates += 1
        self.dropped_in_a_row = 0 if made else self.dropped_in_a_row + 1
        return {
            "optimizer/grad_norm": Max(norm),
            "optimizer/learning_rate": Max(rate),
            "optimizer/dropped_updates": Sum(not made),
            "time/optimizer_s": Sum(time.perf_counter() - started),
        }


def _teaches(advantages: Sequence[float]) -> bool:
    return any(abs(a) > 1e-9 for a in advantages)


def _members(micro_batch: MicroBatch) -> list[tuple[int, int]]:
    return [(part.group, member) for part in micro_batch.parts for member in part.members]


def _known(reference_T: Tensor | None) -> Tensor:
    assert reference_T is not None, "a KL penalty needs the reference's logprobs"
    return reference_T
