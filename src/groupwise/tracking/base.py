"""What a place for numbers and transcripts offers: a file, a terminal, a dashboard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from groupwise.types import Group

__all__ = ["EvaluationResult", "TokenAdvantages", "Tracker"]

TokenAdvantages = Mapping[tuple[int, int], Sequence[float]]
"""(group, completion) -> an advantage for each token, of completions whose tokens differ in theirs."""


class EvaluationResult(Protocol):
    """What trackers read of an evaluation; ``groupwise.evaluation.Evaluation`` is one."""

    @property
    def stage(self) -> str: ...

    @property
    def mode(self) -> str: ...

    @property
    def records(self) -> tuple[dict[str, Any], ...]: ...

    def to_summary(self) -> dict[str, Any]: ...


class Tracker(Protocol):
    """One sink. Any method may raise; ``Trackers`` then warns once and does without it."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Numbers of one step, under the names of ``metric_table.METRICS``. Steps count from 1."""
        ...

    def completions(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[float]] | None = None,
        token_advantages: TokenAdvantages | None = None,
    ) -> None:
        """A few of the step's groups; ``advantages[p][g]`` belongs to ``groups[p].completions[g]``."""
        ...

    def evaluation(self, result: EvaluationResult) -> None: ...

    def close(self) -> None: ...
