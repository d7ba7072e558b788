"""From problems to scored groups: sample G completions for each prompt, and score them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from groupwise.config.schema import RolloutConfig
from groupwise.data.answers import AnswerStyle, grade
from groupwise.distributed import World
from groupwise.engines.base import Engine, SamplingSettings
from groupwise.engines.builtin.draw import seed_key
from groupwise.engines.wrappers import check_same, for_all, sampling_costs
from groupwise.metrics import Max, Mean, Metric, Sum, merge
from groupwise.rewards.functions import is_well_formed
from groupwise.rewards.suite import RewardFailure, RewardSuite, Scoring
from groupwise.types import Completion, Group, Problem, Prompt

__all__ = ["Rollout", "Sampled", "assign_prompts", "collect", "rollout_scope", "rollout_settings", "score"]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What this process sampled of a step: indices of prompts, and the completions of each."""

    pairs: list[tuple[int, tuple[Completion, ...]]]
    seconds: float

    @property
    def tokens(self) -> int:
        return sum(c.sampled_tokens for _, completions in self.pairs for c in completions)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One step's batch: whole groups, scored, and those that could not be."""

    groups: list[Group]
    failures: list[RewardFailure]
    sampling_s: float
    scoring_s: float
    replaced: tuple[Group, ...] = ()
    """Groups that were sampled for this step too, and gave way to others that have variance."""
    scoring_metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Metrics of the scoring itself: failed calls, clipping, running statistics, right answers."""
    sampled_tokens: int = 0
    """All that ``sampling_s`` went into: those of groups that could not be scored too."""

    @property
    def informative(self) -> int:
        """Number of groups with variance."""
        return sum(group.has_variance for group in self.groups)

    def refilled(self, more: Rollout, size: int) -> Rollout:
        """Add the groups of ``more``: those with variance come first, and of the others only as many stay as ``size`` has room for."""
        groups = sorted([*self.groups, *more.groups], key=lambda group: not group.has_variance)  # stable
        return Rollout(
            groups[:size],
            [*self.failures, *more.failures],
            self.sampling_s + more.sampling_s,
            self.scoring_s + more.scoring_s,
            (*self.replaced, *groups[size:]),
            merge([self.scoring_metrics, more.scoring_metrics]),
            self.sampled_tokens + more.sampled_tokens,
        )

    def metrics(self, style: AnswerStyle) -> dict[str, Metric]:
        """What the completions and their scores look like, replaced ones included; names as in ``tracking.metric_table``."""
        groups = [*self.groups, *self.replaced]
        completions = [c for group in groups for c in group.completions]
        lengths = [len(c.token_ids) for c in completions]
        metrics: dict[str, Metric] = {
            "reward/mean": Mean.of(r for g in groups for r in g.rewards),
            "reward/std": Mean.of(statistics.stdev(g.rewards) for g in groups),
            "groups/zero_variance": Mean.of(not g.has_variance for g in groups),
            "groups/failed": Sum(len(self.failures)),
            "completions/tokens_mean": Mean.of(lengths),
            "completions/tokens_max": Max(max(lengths, default=0)),
            "completions/truncated": Mean.of(not c.stopped for c in completions),
            "completions/stop_rate": Mean.of(c.stopped for c in completions),
            "time/sample_s": Sum(self.sampling_s),
            "time/score_s": Sum(self.scoring_s),
            "speed/sampled_tokens_per_s": Mean(self.sampled_tokens, self.sampling_s),
        }
        if style == "xml":
            metrics["accuracy/format"] = Mean.of(is_well_formed(c.answer, style) for c in completions)
        metrics |= _of_episodes(completions)
        names = groups[0].components if groups else ()
        for name in names:
            metrics[f"reward/{name}"] = Mean.of(s for g in groups for s in g.components[name] if s is not None)
        return metrics | dict(self.scoring_metrics)


def _of_episodes(completions: Sequence[Completion]) -> dict[str, Metric]:
    """What went on between turns; nothing where the run has no tools."""
    if not any(c.turns for c in completions):
        return {}
    calls = [call for c in completions for call in c.calls]
    return {
        "episodes/turns": Mean.of(sum(turn.sampled for turn in c.turns) for c in completions),
        "episodes/calls": Mean.of(len(c.calls) for c in completions),
        "episodes/invalid_calls": Mean.of(call.failure == "invalid" for call in calls),
        "episodes/failed_calls": Mean.of(call.failure in ("raised", "timed_out") for call in calls),
        "episodes/given_tokens": Mean.of(len(c.token_ids) - c.sampled_tokens for c in completions),
        "episodes/max_turns": Mean.of(c.finish_reason == "max_turns" for c in completions),
        "episodes/context_full": Mean.of(c.finish_reason == "context_full" for c in completions),
    }


def rollout_settings(config: RolloutConfig) -> SamplingSettings:
    return SamplingSettings(
        max_tokens=config.max_completion_tokens, temperature=config.temperature, top_k=config.top_k, top_p=config.top_p,
        in_8_bits=config.quantization == "8bit",
    )  # fmt: skip


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
    world: World | None = None,
) -> Rollout:
    """Sample ``completions_per_prompt`` completions for each prompt and score every group.

    The processes of ``world`` divide both, and each returns the whole.

    ``refill``: which round of further problems this is; 0 for the step's own. It is part of the samples' names, since a problem may
    come up again.

    Raises RewardError where a reward function fails and the config says to stop.
    """
    world = world or World()
    started = time.perf_counter()
    settings = rollout_settings(config)
    own = assign_prompts(prompts, config, world)
    sampled = engine.sample(
        [prompts[i] for i in own],
        config.completions_per_prompt,
        settings,
        seed=seed,
        scope=rollout_scope(step, refill),
        on_progress=for_all(on_progress, len(prompts), len(own)),
    )
    own_share = Sampled(list(zip(own, sampled, strict=True)), time.perf_counter() - started)
    return score(prompts, own_share, rewards, world, seed=seed, step=step, refill=refill)


def assign_prompts(prompts: Sequence[Prompt], config: RolloutConfig, world: World) -> list[int]:
    """Indices of the prompts assigned to this process. A collective call. Raises TrainingError where processes have different ones."""
    check_same(prompts, world)
    return world.assigned(sampling_costs(prompts, config.completions_per_prompt, rollout_settings(config)))


def rollout_scope(step: int, refill: int = 0) -> str:
    """The part of the samples' names that says for which step, and which round of further problems, they were drawn."""
    return f"rollout/step={step}" + (f"/refill={refill}" if refill else "")


def score(
    prompts: Sequence[Prompt], sampled: Sampled, rewards: RewardSuite, world: World, *, seed: int, step: int, refill: int = 0
) -> Rollout:
    """The whole step, scored, from what each process sampled of it. ``seed``, ``step`` and ``refill`` as for ``collect``: what reward
    functions draw at random follows from them and the group, whichever process calls them.

    Raises RewardError where a reward function fails and the config says to stop.
    """
    scope = f"rewards/{rollout_scope(step, refill)}"

    def scored(pairs: Pairs) -> Scoring:
        batch = [(prompts[i], completions) for i, completions in pairs]
        seeds = [seed_key(seed, scope, prompt.problem.id, 0, prompt.occurrence) for prompt, _ in batch]
        scoring = rewards.score_all(batch, more=refill > 0, seeds=seeds)
        # Graded here, where each process has only its share: math-verify may take long, and its budget is a process's.
        return replace(scoring, metrics=merge([scoring.metrics, _accuracy(scoring.groups, rewards.answer_style)]))

    if world.size > 1:
        return _exchange(world, prompts, sampled, rewards, scored)
    started = time.perf_counter()
    scoring = scored(sampled.pairs)
    return Rollout(
        scoring.groups,
        scoring.failures,
        sampling_s=sampled.seconds,
        scoring_s=time.perf_counter() - started,
        scoring_metrics=scoring.metrics,
        sampled_tokens=sampled.tokens,
    )


def _accuracy(groups: Sequence[Group], style: AnswerStyle) -> dict[str, Metric]:
    verdicts = [grade(c.answer, g.prompt.problem.accepted, style).strict for g in groups for c in g.completions]
    return {
        "accuracy/strict": Mean.of(strict for strict in verdicts if strict is not None),
        # Groups that a reward function failed on are not here but counted there; a lenient reward counts its own too.
        "answers/unchecked": Sum(verdicts.count(None)),
    }


Pairs = list[tuple[int, tuple[Completion, ...]]]
"""Places in the step's prompts, which all processes have and which therefore do not travel, and the completions of each."""
Travelling = tuple[list[tuple[int, Group]], list[RewardFailure], dict[str, Metric]]
"""What travels of a scoring: places and groups, which leave their prompts behind; failures; metrics."""


def _exchange(
    world: World, prompts: Sequence[Prompt], sampled: Sampled, rewards: RewardSuite, scored: Callable[[Pairs], Scoring]
) -> Rollout:
    """The whole step, from what each process sampled; each scores its own, unless the rewards look beyond single groups."""

    def timed(pairs: Pairs) -> tuple[Travelling, float]:
        started = time.perf_counter()  # without the wait for those that still sample
        part = _without_prompts(prompts, pairs, scored(pairs))
        return part, time.perf_counter() - started

    if rewards.by_one:
        everything = sorted((pair for part in world.all_gather_object(sampled.pairs) for pair in part), key=lambda pair: pair[0])
        (part, scoring_s), state = world.on_rank0(lambda: (timed(everything), rewards.state_dict()))
        if not world.is_first:  # whose own statistics also know what this step is divided by
            rewards.load_state_dict(state)
        parts = [part]
    else:
        part, scoring_s = timed(sampled.pairs)
        parts = world.all_gather_object(part)
    costs = world.all_gather_object((sampled.seconds, scoring_s, sampled.tokens))
    rows = sorted((row for part in parts for row in part[0]), key=lambda row: row[0])
    return Rollout(
        [replace(group, prompt=prompts[index]) for index, group in rows],
        [failure for part in parts for failure in part[1]],
        sampling_s=max(sampling for sampling, _, _ in costs),  # the processes wait for each other
        scoring_s=max(scoring for _, scoring, _ in costs),
        scoring_metrics=merge(part[2] for part in parts),
        sampled_tokens=sum(tokens for _, _, tokens in costs),
    )


_NO_PROMPT = Prompt(Problem("", "", ""), "", ())


def _without_prompts(prompts: Sequence[Prompt], pairs: Pairs, scoring: Scoring) -> Travelling:
    places, rows = iter(pairs), []
    for group in scoring.groups:  # in the order of ``pairs``, without those that failed
        index = next(i for i, _ in places if prompts[i] is group.prompt)
        rows.append((index, replace(group, prompt=_NO_PROMPT)))
    return rows, scoring.failures, scoring.metrics
