"""One batch of the real small model: the quickstart's problems, sampled, scored and packed, for experiments that look inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experiments.runs import settings_of
from groupwise import Config, load_config
from groupwise.algorithm import BatchCounts, Objective
from groupwise.engines import Engine, make_engine
from groupwise.models.load import Policy, load_policy
from groupwise.models.scorer import Scorer, make_scorer
from groupwise.rollout import collect
from groupwise.training.advantages import StepAdvantages
from groupwise.training.optimizer import MasterAdamW
from groupwise.training.setup import Prepared, prepare
from groupwise.types import Group

__all__ = ["PackedBatch", "Workbench", "workbench"]

VARYING_REWARD = "rewards.functions=[{function: length, arguments: {target: 60}}]"
"""A reward in which every group varies, even for the untrained model: how near a completion is to 60 characters."""


@dataclass(frozen=True)
class PackedBatch:
    """A batch ready for the loss. T tokens, N completions."""

    packed: Any
    advantages_N: Tensor
    weights_T: Tensor


@dataclass(frozen=True)
class Workbench:
    """A policy with what it takes to sample from it and to compute its log-probabilities."""

    config: Config
    prepared: Prepared
    policy: Policy
    scorer: Scorer
    engine: Engine

    def groups(self, step: int = 0) -> list[Group]:
        """The groups of ``rollout.prompts_per_step`` problems, scored."""
        count = self.config.rollout.prompts_per_step
        prompts = [self.prepared.train_prompts[step * count + i] for i in range(count)]
        return collect(self.engine, prompts, self.prepared.rewards, self.config.rollout, seed=0, step=step).groups

    def pack(self, groups: list[Group]) -> PackedBatch:
        chosen = Objective.from_config(self.config.algorithm)
        advantages = [number for group in StepAdvantages.of(groups, chosen).by_group for number in group]
        packed = self.scorer.prepare([(g.prompt.token_ids, [c.token_ids for c in g.completions]) for g in groups])
        counts = BatchCounts(len(advantages), len(packed.targets_T), self.config.rollout.max_completion_tokens)
        weights = chosen.weights(packed.lengths_N, packed.sequence_T, counts)
        return PackedBatch(packed, torch.tensor(advantages), weights)

    def optimizer(self) -> MasterAdamW:
        return MasterAdamW(self.scorer.named_parameters(), self.config.optimizer)


def workbench(settings: list[str]) -> Workbench:
    """The quickstart with ``settings``, its model loaded."""
    config = load_config("quickstart", [*settings_of("quickstart"), "training.micro_batch_tokens=100000", *settings])
    prepared = prepare(config)
    policy = load_policy(config.model)
    scorer = make_scorer(policy, config.model)
    return Workbench(config, prepared, policy, scorer, make_engine(policy, config.rollout, scorer))
