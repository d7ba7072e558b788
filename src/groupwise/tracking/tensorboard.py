"""TensorBoard: scalars in the run's folder, ``tensorboard/``, by torch's own writer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.config.schema import Config
from groupwise.tracking.base import EvaluationResult, TokenAdvantages
from groupwise.tracking.numbers import evaluation_numbers, evaluation_step
from groupwise.tracking.run_folder import RunFolder
from groupwise.types import Group

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker:
    """Writes each step's numbers and flushes them. A run that is carried on takes back what stood there of later steps."""

    def __init__(self, config: Config, folder: RunFolder, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.last_step = done
        self.writer: Any = SummaryWriter(str(folder.path / "tensorboard"), purge_step=done + 1)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.last_step = step
        self._add(step, metrics)

    def completions(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[float]] | None = None,
        token_advantages: TokenAdvantages | None = None,
    ) -> None:
        """Texts stay in the run's folder."""

    def evaluation(self, result: EvaluationResult) -> None:
        self._add(evaluation_step(result.stage, self.last_step), evaluation_numbers(result.to_summary()))

    def close(self) -> None:
        self.writer.close()

    def _add(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            if value is not None and math.isfinite(value):
                self.writer.add_scalar(name, value, step, new_style=False)
        self.writer.flush()
