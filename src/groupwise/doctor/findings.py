"""What the doctor says, and what its rules say it with: findings, evidence, examples, and means over the beginning and the end of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

from groupwise.data import sources
from groupwise.tracking.reading import CompletionRecord, RunRecord
from groupwise.types import CUT_SHORT

__all__ = [
    "SEVERITIES",
    "Evidence",
    "Example",
    "Finding",
    "Series",
    "Severity",
    "accuracy_of",
    "completions_between",
    "flat_in_batch",
    "groups_of",
    "has_answers",
    "mean",
    "series",
    "show",
    "shown",
    "three",
    "worst_stretch",
]

Severity = Literal["critical", "warning", "note", "normal"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "note", "normal")
"""``critical``: the run cannot learn, or learns something else. ``warning``: likely to go wrong. ``note``: worth knowing.
``normal``: looks odd and is right."""


@dataclass(frozen=True, slots=True)
class Example:
    """A completion, problem or row that shows the fault."""

    where: str
    """Such as ``step 12, problem gsm8k:train:7, sample 3``."""
    text: str
    remark: str = ""
    """Such as ``reward 2.8, wrong``."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a rule found. ``summary`` is one sentence with the numbers in it."""

    summary: str
    steps: tuple[int, int] | None = None
    """First and last step that it was seen at."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    """At most three."""
    severity: Severity | None = None
    """Where it differs from the rule's own."""
    remedy: str | None = None
    """Where it differs from the rule's own."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of a diagnosis: the rule's words and what it found here."""

    rule: str
    title: str
    severity: Severity
    summary: str
    meaning: str
    remedy: str
    steps: tuple[int, int] | None
    numbers: Mapping[str, float]
    examples: tuple[Example, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


MOST = 3
LONGEST_TEXT = 1500


def shown(text: str) -> str:
    """Beginning and end: how a completion ends is half of what there is to see."""
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def show(record: CompletionRecord, remark: str = "") -> Example:
    verdict = {True: "right", False: "wrong", None: "not judged"}[record.strict]
    reward = "no reward" if record.reward is None else f"reward {record.reward:g}"
    words = [reward, verdict, *filter(None, [CUT_SHORT.get(record.finish_reason)]), *([remark] if remark else [])]
    where = f"step {record.step}, problem {record.problem}, sample {record.sample}"
    return Example(where, shown(record.transcript), ", ".join(words))


def completions_between(run: RunRecord, steps: tuple[int, int]) -> list[CompletionRecord]:
    return [record for record in run.completions if steps[0] <= record.step <= steps[1]]


def groups_of(records: Iterable[CompletionRecord]) -> list[list[CompletionRecord]]:
    by_group: dict[tuple[int, str, int], list[CompletionRecord]] = {}
    for record in records:
        by_group.setdefault((record.step, record.problem, record.occurrence), []).append(record)
    return list(by_group.values())


def three(
    records: Iterable[CompletionRecord],
    *,
    where: Callable[[CompletionRecord], bool] = lambda record: True,
    remark: Callable[[CompletionRecord], str] = lambda record: "",
) -> tuple[Example, ...]:
    """The first three that fit, of different problems as far as there are that many."""
    fitting = [record for record in records if where(record)]
    firsts: dict[str, CompletionRecord] = {}
    for record in fitting:
        firsts.setdefault(record.problem, record)
    chosen: Sequence[CompletionRecord] = list(firsts.values())[:MOST]
    others = [record for record in fitting if not any(record is one for one in chosen)]
    return tuple(show(record, remark(record)) for record in [*chosen, *others][:MOST])


SHORTEST, LONGEST, SHARE = 5, 50, 0.2
"""A window is a fifth of the steps, at least 5 of them and at most 50."""
FIRST = 3
"""Steps that a run's very beginning has."""


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


@dataclass(frozen=True)
class Series:
    """One metric over the steps at which it was logged and finite."""

    points: Sequence[tuple[int, float]]

    def __len__(self) -> int:
        return len(self.points)

    @cached_property
    def steps(self) -> list[int]:
        return [step for step, _ in self.points]

    @cached_property
    def values(self) -> list[float]:
        return [value for _, value in self.points]

    @property
    def window(self) -> int:
        """How many steps a window has; never more than half of them, so that the two do not overlap."""
        return max(1, min(len(self) // 2, max(SHORTEST, min(LONGEST, round(len(self) * SHARE)))))

    @cached_property
    def early(self) -> float:
        return mean(self.values[: self.window])

    @cached_property
    def late(self) -> float:
        return mean(self.values[-self.window :])

    @property
    def late_steps(self) -> tuple[int, int]:
        return self.steps[-self.window], self.steps[-1]

    @property
    def noise(self) -> float:
        """Standard error of a window's mean, from how much neighbouring steps differ: a trend does not count as noise."""
        jumps = [(b - a) ** 2 for a, b in pairwise(self.values)]
        return math.sqrt(mean(jumps) / 2 / self.window) if jumps else 0.0

    @property
    def rise(self) -> float:
        return self.late - self.early

    @cached_property
    def first(self) -> float:
        """Mean over the first three steps: what changes fast is over within the early window."""
        return mean(self.values[:FIRST])

    def changed_from_first(self, by: float) -> bool:
        """Whether the late window is ``by`` (or more, or with a minus sign less) away from the first steps, and beyond the noise."""
        apart = math.copysign(1.0, by) * (self.late - self.first)
        single = self.noise * math.sqrt(self.window)
        return len(self) >= 2 * FIRST and apart > max(abs(by), 2 * single * math.sqrt(1 / FIRST + 1 / self.window))

    def rises(self, by: float = 0.0) -> bool:
        """Higher at the end than at the beginning, by more than ``by`` and more than twice the noise of the difference."""
        return self.rise > max(by, 2 * math.sqrt(2) * self.noise)

    def falls(self, by: float = 0.0, errors: float = 2.0) -> bool:
        """Lower at the end, by more than ``by`` and more than ``errors`` times the noise of the difference."""
        return -self.rise > max(by, errors * math.sqrt(2) * self.noise)


def series(run: RunRecord, name: str) -> Series:
    return Series(run.series(name))


def accuracy_of(run: RunRecord) -> Series:
    """Share of right answers in training; empty where nothing judges answers."""
    return series(run, "accuracy/strict") if has_answers(run) else Series(())


OF_ANSWERS = {"accuracy", "correctness", "correctness_and_format"}


def has_answers(run: RunRecord) -> bool:
    """Whether answers say how good the policy is: not where prompts have none, nor where an environment alone judges episodes, whose last
    turn answers nothing."""
    config = run.config
    if config is None or not sources.has_answers(config.data):
        return config is None
    return config.rollout.environment is None or any(one.function in OF_ANSWERS for one in config.rewards.functions)


def flat_in_batch(run: RunRecord) -> Series:
    """Share of the groups of a step's batch that have no variance, after others were sampled in their place."""
    flat, config = series(run, "groups/zero_variance"), run.config
    if config is None or not config.rollout.refill_rounds:
        return flat
    sampled, failed = (dict(run.series(f"groups/{name}")) for name in ("sampled", "failed"))
    wanted = config.rollout.prompts_per_step

    def left(step: int, share: float) -> float | None:
        scored = sampled.get(step, wanted) - failed.get(step, 0.0)
        batch = min(wanted, scored)  # a batch that failures left short is no flat one
        return max(0.0, 1.0 - (1.0 - share) * scored / batch) if batch > 0 else None

    found = [(step, left(step, share)) for step, share in flat.points]
    return Series([(step, share) for step, share in found if share is not None])


def worst_stretch(metric: Series, length: int) -> tuple[float, tuple[int, int]] | None:
    """The highest mean over ``length`` steps in a row, and the first and last of them; ``None`` for too few steps."""
    if len(metric) < length:
        return None
    running = math.fsum(metric.values[:length])
    best, at = running, 0
    for end in range(length, len(metric)):
        running += metric.values[end] - metric.values[end - length]
        if running > best:
            best, at = running, end - length + 1
    return best / length, (metric.steps[at], metric.steps[at + length - 1])
