"""What sinks that take numbers only have in common: steps and evaluations under one axis, no texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from groupwise.tracking.base import EvaluationResult, TokenAdvantages
from groupwise.tracking.numbers import evaluation_numbers, evaluation_step
from groupwise.types import Group

__all__ = ["NumericTracker"]


class NumericTracker:
    """A sink says how numbers of a step are sent (``send``) and how it ends (``close``). ``done`` steps are there already."""

    def __init__(self, done: int) -> None:
        self.last_step = done

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.last_step = step
        self.send(step, metrics)

    def completions(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[float]] | None = None,
        token_advantages: TokenAdvantages | None = None,
    ) -> None:
        """Texts stay in the run's folder: what a model or a data set says is not sent to anybody."""

    def evaluation(self, result: EvaluationResult) -> None:
        self.send(evaluation_step(result.stage, self.last_step), evaluation_numbers(result.to_summary()))
