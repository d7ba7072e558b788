"""What ``algorithm.entropy`` does to a batch: the loss takes only the tokens of most entropy, and a bonus for entropy is taken off it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.batch import Batch
from groupwise.config.algorithm import EntropyConfig
from groupwise.config.schema import Config
from groupwise.distributed import World
from groupwise.metrics import Max, Mean, Metric, Sum
from groupwise.types import Group

__all__ = ["BONUS", "EntropyTerms", "entropy_bonus"]

BONUS = "policy/entropy_bonus"
"""The metric that says which weight the bonus has in a step; 0 above the floor."""
_ROUNDING = 1e-5
"""Tokens behind equal prefixes, such as all first ones of a group, have one entropy, which fp32 rounds by the shape of the pass: those at
the threshold are taken together."""


class EntropyTerms:
    """Which tokens count, and which weight the bonus has: the same however the batch is cut and divided among processes."""

    def __init__(self, config: Config, world: World) -> None:
        self.settings, self.world = config.algorithm.entropy or EntropyConfig(), world
        self._left_out = config.algorithm.mask_truncated
        """Whether completions that were cut count for nothing."""
        self._samples_say = config.samples_are_the_policys
        """Whether the samples' own log-probabilities say how much entropy the policy has."""

    @property
    def chooses_tokens(self) -> bool:
        """Whether a batch is opened with the entropy of each of its tokens."""
        return self.settings.top_share < 1

    @property
    def floor_needs_a_pass(self) -> bool:
        return self.settings.floor is not None and not self._samples_say

    def concerns_all(self, groups: Sequence[Group]) -> bool:
        """Whether groups without variance matter: to a bonus, or to which of the batch's tokens have most entropy."""
        return self.chooses_tokens or self._may_act(groups)

    def choose_tokens(self, batch: Batch) -> dict[str, Metric]:
        """Leave all but the configured share of the step's tokens, those of most entropy, out of the loss. A collective call."""
        if not self.chooses_tokens:
            return {}
        own_T = torch.zeros_like(batch.weights_T) if batch.entropy_T is None else batch.entropy_T
        learnt_T = own_T[batch.tokens(range(batch.learnt))]
        ordered = torch.cat(self.world.all_gather_object(learnt_T.double().cpu())).sort(descending=True).values
        threshold = float(ordered[max(1, math.ceil(self.settings.top_share * len(ordered))) - 1])
        threshold -= _ROUNDING * max(1.0, abs(threshold))
        batch.mask_T, batch.entropy_T = (own_T >= threshold).float(), None
        return {"policy/tokens_kept": Mean(float((ordered >= threshold).sum()), len(ordered))}

    def choose_bonus(self, groups: Sequence[Group], batch: Batch) -> dict[str, Metric]:
        """The weight of the bonus in this batch, by the entropy that its tokens show. A collective call."""
        if self.settings.bonus == 0:
            return {}
        acts, floor = self._may_act(groups), self.settings.floor
        if floor is not None and not self._samples_say:
            own_T = batch.own_T[batch.tokens(range(batch.learnt))]
            acts = self.world.reduce({"own": Mean(-float(own_T.double().sum()), len(own_T))})["own"].value < floor
        return {BONUS: Max(self.settings.bonus if acts else 0.0)}

    def _may_act(self, groups: Sequence[Group]) -> bool:
        """Whether the bonus may act, as far as the samples say. Where their logprobs are not the policy's, the floor is looked at after a
        pass of its own."""
        bonus, floor = self.settings.bonus, self.settings.floor
        if bonus == 0 or floor is None or not self._samples_say:
            return bonus > 0
        everything = [c for group in groups for c in group.completions if c.stopped or not self._left_out]
        surprise = -math.fsum(x for c in everything for x in c.logprobs)  # 0 of tokens that were given
        return Mean(surprise, sum(c.sampled_tokens for c in everything)).value < floor


def entropy_bonus(view: Batch, entropy_T: Tensor, weight: float) -> tuple[Tensor, dict[str, Metric]]:
    """What is taken off the loss of a micro-batch: ``weight`` x the weighted sum of its tokens' entropies; and metrics."""
    weights_T = view.weights_T if view.entropy_weights_T is None else view.entropy_weights_T
    weighted, detached_T = (weights_T * entropy_T).sum(), entropy_T.detach()
    metrics: dict[str, Metric] = {
        "detail/entropy_bonus": Sum(weight * float(weighted.detach())),
        "policy/full_entropy": Mean(float(detached_T.sum()), len(detached_T)),
    }
    if view.mask_T is not None:
        metrics["detail/entropy_kept"] = Mean(float((view.mask_T * detached_T).sum()), float(view.mask_T.sum()))
    return weight * weighted, metrics
