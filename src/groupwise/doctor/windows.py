"""Means over the beginning and the end of a run, by which the rules compare one with the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from groupwise.tracking.reading import RunRecord

__all__ = ["Series", "mean", "median", "series", "worst_stretch"]

SHORTEST, LONGEST, SHARE = 5, 50, 0.2
"""A window is a fifth of the steps, at least 5 of them and at most 50."""
FIRST = 3
"""Steps that a run's very beginning has."""


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


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

    def falls(self, by: float = 0.0) -> bool:
        return -self.rise > max(by, 2 * math.sqrt(2) * self.noise)


def series(run: RunRecord, name: str) -> Series:
    return Series(run.series(name))


def worst_stretch(metric: Series, length: int, *, highest: bool = True) -> tuple[float, tuple[int, int]] | None:
    """The highest (or lowest) mean over ``length`` steps in a row, and the first and last of them; ``None`` for too few steps."""
    if len(metric) < length:
        return None
    sign = 1 if highest else -1
    running = math.fsum(metric.values[:length])
    best, at = running, 0
    for end in range(length, len(metric)):
        running += metric.values[end] - metric.values[end - length]
        if sign * running > sign * best:
            best, at = running, end - length + 1
    return best / length, (metric.steps[at], metric.steps[at + length - 1])
