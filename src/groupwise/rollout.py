"""From problems to scored groups: sample G completions for each prompt, and score them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from groupwise.config.schema import RolloutConfig
from groupwise.data.answers import AnswerStyle, grade
from groupwise.engines.base import Engine, SamplingSettings
from groupwise.metrics import Max, Mean, Metric, Sum, merge
from groupwise.rewards.compose import RewardFailure, RewardSuite
from groupwise.rewards.functions.format import strict_xml
from groupwise.types import Completion, Group, Prompt

__all__ = ["Rollout", "collect", "rollout_settings"]


@dataclass(frozen=True, slots=True)
class Rollout:
    """One step's batch: whole groups, scored, and those that could not be."""

    groups: list[Group]
    failures: list[RewardFailure]
    sampling_s: float
    scoring_s: float
    replaced: tuple[Group, ...] = ()
    """Groups that were sampled for this step too, and gave way to others that have variance."""
    of_scoring: Mapping[str, Metric] = field(default_factory=dict)
    """What the scoring says of itself: failed calls, clipping, running statistics."""

    @property
    def informative(self) -> int:
        """Groups that there is something to learn from."""
        return sum(group.has_variance for group in self.groups)

    def refilled(self, more: Rollout, size: int) -> Rollout:
        """With the groups of ``more``: those with variance come first, and of the others only as many stay as ``size`` has room for."""
        groups = sorted([*self.groups, *more.groups], key=lambda group: not group.has_variance)  # stable
        return Rollout(
            groups[:size],
            [*self.failures, *more.failures],
            self.sampling_s + more.sampling_s,
            self.scoring_s + more.scoring_s,
            (*self.replaced, *groups[size:]),
            merge([self.of_scoring, more.of_scoring]),
        )

    def metrics(self, style: AnswerStyle) -> dict[str, Metric]:
        """What the completions and their scores look like, replaced ones included; names as in ``tracking.metric_table``."""
        groups = [*self.groups, *self.replaced]
        completions = [c for group in groups for c in group.completions]
        lengths = [len(c.token_ids) for c in completions]
        found: dict[str, Metric] = {
            "reward/mean": Mean.of(r for g in groups for r in g.rewards),
            "reward/std": Mean.of(statistics.stdev(g.rewards) for g in groups),
            "groups/zero_variance": Mean.of(not g.has_variance for g in groups),
            "groups/failed": Sum(len(self.failures)),
            "completions/tokens_mean": Mean.of(lengths),
            "completions/tokens_max": Max(max(lengths, default=0)),
            "completions/truncated": Mean.of(not c.stopped for c in completions),
            "completions/stop_rate": Mean.of(c.stopped for c in completions),
            "accuracy/strict": Mean.of(
                grade(c.text, g.prompt.problem.answer, style).strict for g in groups for c in g.completions
            ),
            "time/sample_s": Sum(self.sampling_s),
            "time/score_s": Sum(self.scoring_s),
            "speed/sampled_tokens_per_s": Mean(sum(lengths), self.sampling_s),
        }
        if style == "xml":
            found["accuracy/format"] = Mean.of(s or 0.0 for s in strict_xml([c.text for c in completions], score=1.0))
        names = groups[0].components if groups else ()
        for name in names:
            found[f"reward/{name}"] = Mean.of(s for g in groups for s in g.components[name] if s is not None)
        return found | dict(self.of_scoring)


def rollout_settings(config: RolloutConfig) -> SamplingSettings:
    return SamplingSettings(
        max_tokens=config.max_completion_tokens, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p
    )


def collect(
    engine: Engine,
    prompts: Sequence[Prompt],
    rewards: RewardSuite,
    config: RolloutConfig,
    *,
    seed: int,
    step: int,
    refill: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Rollout:
    """Sample ``completions_per_prompt`` completions for each prompt and score every group.

    ``refill``: which round of further problems this is; 0 for the step's own. It is part of the samples' names, since a problem may
    come up again.

    Raises RewardError where a reward function fails and the config says to stop.
    """
    started = time.perf_counter()
    sampled: list[tuple[Completion, ...]] = engine.sample(
        prompts,
        config.completions_per_prompt,
        rollout_settings(config),
        seed=seed,
        scope=f"rollout/step={step}" + (f"/refill={refill}" if refill else ""),
        on_progress=on_progress,
    )
    done = time.perf_counter()
    scoring = rewards.score_all(zip(prompts, sampled, strict=True))
    return Rollout(
        scoring.groups,
        scoring.failures,
        sampling_s=done - started,
        scoring_s=time.perf_counter() - done,
        of_scoring=scoring.metrics,
    )
