"""Metrics that know how they are reduced, so that averages of averages cannot happen.

>>> a, b = Mean.of([1.0, 1.0, 1.0]), Mean.of([5.0])
>>> (a + b).value
2.0
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["Max", "Mean", "Metric", "Min", "Sum", "Z", "merge", "values", "wilson_interval"]

Z = 1.959963984540054
"""Quantile of the normal distribution for a 95% interval."""


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean kept as sum and count; adding two gives the mean over both."""

    total: float
    count: float

    @classmethod
    def of(cls, numbers: Iterable[float]) -> Mean:
        listed = [float(n) for n in numbers]
        return cls(math.fsum(listed), len(listed))

    def __add__(self, other: Mean) -> Mean:
        return Mean(self.total + other.total, self.count + other.count)

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else math.nan


@dataclass(frozen=True, slots=True)
class Sum:
    """A count or a total; adding two gives the total of both."""

    total: float

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.total + other.total)

    @property
    def value(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """The largest number seen; NaN where one was."""

    largest: float

    def __add__(self, other: Max) -> Max:
        return self if math.isnan(self.largest) or self.largest >= other.largest else other

    @property
    def value(self) -> float:
        return self.largest


@dataclass(frozen=True, slots=True)
class Min:
    """The smallest number seen; NaN where one was."""

    smallest: float

    def __add__(self, other: Min) -> Min:
        return self if math.isnan(self.smallest) or self.smallest <= other.smallest else other

    @property
    def value(self) -> float:
        return self.smallest


Metric = Mean | Sum | Max | Min


def merge(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Reduce metrics from several micro-batches, ranks or steps, each by its own rule."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            if name in merged:
                if type(merged[name]) is not type(metric):
                    raise TypeError(
                        f"metric {name!r} is reduced both as {type(merged[name]).__name__} and {type(metric).__name__}"
                    )
                merged[name] = merged[name] + metric  # type: ignore[operator]
            else:
                merged[name] = metric
    return merged


def values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


def wilson_interval(successes: float, trials: float) -> tuple[float, float]:
    """Wilson score interval of 95% for a proportion; honest near 0 and 1, where the normal one is not.

    E. B. Wilson (1927), "Probable inference, the law of succession, and statistical inference".
    """
    if trials == 0:
        return (0.0, 1.0)
    p = successes / trials
    centre = (p + Z * Z / (2 * trials)) / (1 + Z * Z / trials)
    half = Z * math.sqrt(p * (1 - p) / trials + Z * Z / (4 * trials * trials)) / (1 + Z * Z / trials)
    # At 0 and n the bound is 0 and 1 exactly; rounding would leave it a hair beside.
    return (0.0 if successes == 0 else max(0.0, centre - half), 1.0 if successes == trials else min(1.0, centre + half))
