"""What scores go through before they are weighted and added: normalising by running statistics, and clipping.

The statistics are those of all scores of the run so far, the batch at hand included; where a batch is sampled in rounds, the first of
them, so that all of its scores are divided by the same, and later batches know them all. They are state: a resumed run must go on with
them, so they can be taken out and put back exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from groupwise.config.rewards import Normalising
from groupwise.metrics import Mean, Metric

__all__ = ["RunningStatistics", "Shaper"]

_NO_SPREAD = 1e-8
"""A standard deviation of less than this share of the numbers' size is rounding, and nothing is divided by it."""


@dataclass
class RunningStatistics:
    """Count, mean and sum of squared deviations of a stream of numbers, one batch at a time.

    Batches are merged by the pairwise rule of T. Chan, G. Golub and R. LeVeque (1979), "Updating formulae and a pairwise algorithm for
    computing sample variances": exact up to rounding however the stream is cut, and stable where the mean is large beside the spread.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of (x - mean)^2."""

    def update(self, numbers: Sequence[float]) -> None:
        if not numbers:
            return
        new = len(numbers)
        mean = math.fsum(numbers) / new
        squares = math.fsum((x - mean) ** 2 for x in numbers)
        total, apart = self.count + new, mean - self.mean
        self.squares += squares + apart * apart * self.count * new / total
        self.mean += apart * new / total
        self.count = total

    @property
    def std(self) -> float:
        """Sample standard deviation; 0 for fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


@dataclass
class Shaper:
    """Normalising and clipping of one stream of scores. Without either it hands scores on as they are."""

    normalise: Normalising = "none"
    clip: tuple[float, float] | None = None
    statistics: RunningStatistics = field(default_factory=RunningStatistics)
    """Of everything that was learnt."""
    used: RunningStatistics = field(default_factory=RunningStatistics)
    """As they were after the first round of the batch at hand."""

    def learn(self, scores: Sequence[float], *, more: bool = False) -> None:
        """Take scores into the statistics: a batch's, or ``more`` of the same batch."""
        if self.normalise != "none":
            self.statistics.update(scores)
            if not more:
                self.used = replace(self.statistics)

    def __call__(self, score: float) -> float:
        """(score - mean) / std, or score / std, then clipped. Scores that never varied are not divided.

        As long as nothing has been learnt, as in a trial before the run, a score that is to be normalised stays as it is.
        """
        if self.normalise != "none":
            if self.used.count == 0:
                return score
            if self.normalise == "mean_std":
                score -= self.used.mean
            score /= self._divisor
        return score if self.clip is None else min(max(score, self.clip[0]), self.clip[1])

    def metrics(self, name: str, scores: Sequence[float]) -> dict[str, Metric]:
        """The statistics as they are, and the share of ``scores`` (as they came) that the clip changes."""
        found: dict[str, Metric] = {}
        if self.normalise != "none" and self.used.count:
            found[f"shaping/mean_{name}"] = Mean(self.used.mean, 1)
            found[f"shaping/std_{name}"] = Mean(self.used.std, 1)
        if self.clip is not None and scores:
            inside = Shaper(self.normalise, None, self.statistics, self.used)
            found[f"shaping/clipped_{name}"] = Mean.of(not self.clip[0] <= inside(score) <= self.clip[1] for score in scores)
        return found

    def state(self) -> list[Any]:
        """Count, mean and squares: JSON values that give the same numbers back."""
        return [self.statistics.count, self.statistics.mean, self.statistics.squares]

    def restore(self, state: Sequence[Any]) -> None:
        """Raises ValueError or TypeError for what ``state`` never gave."""
        count, mean, squares = state
        self.statistics = RunningStatistics(int(count), float(mean), float(squares))
        self.used = replace(self.statistics)

    @property
    def _divisor(self) -> float:
        std = self.used.std
        return std if std > _NO_SPREAD * abs(self.used.mean) else 1.0
