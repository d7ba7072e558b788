"""TensorBoard: scalars in the run's folder, ``tensorboard/``, by torch's own writer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from groupwise.config.schema import Config
from groupwise.tracking.numeric import NumericTracker
from groupwise.tracking.run_folder import RunFolder

__all__ = ["TensorBoardTracker"]


class TensorBoardTracker(NumericTracker):
    """Writes each step's numbers and flushes them. A run that is resumed takes back what stood there of later steps."""

    def __init__(self, config: Config, folder: RunFolder, done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(done)
        self.writer: Any = SummaryWriter(str(folder.path / "tensorboard"), purge_step=done + 1)

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            if value is not None and math.isfinite(value):
                self.writer.add_scalar(name, value, step, new_style=False)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()
