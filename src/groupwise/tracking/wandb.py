"""Weights & Biases. Without a network (``output.offline``) the run's folder keeps the records, for ``wandb sync``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from groupwise.config.schema import Config
from groupwise.errors import ConfigError
from groupwise.tracking.numeric import NumericTracker
from groupwise.tracking.run_folder import RunFolder
from groupwise.tracking.secrets import hide_secrets

__all__ = ["WandbTracker"]

START_TIMEOUT_S = 60.0


class WandbTracker(NumericTracker):
    """Logs each step under our own axis, so that a run which is resumed draws over what it did again.

    Raises:
        ConfigError: nobody is logged in.
    """

    def __init__(self, config: Config, folder: RunFolder, done: int) -> None:
        import wandb

        super().__init__(done)
        # Its metadata would hold the command as it was typed, with whatever keys stand in it; environment.json has it without them.
        settings = wandb.Settings(
            init_timeout=START_TIMEOUT_S, console="off", silent=True, x_disable_stats=True, x_disable_meta=True
        )
        try:
            self.run: Any = wandb.init(
                project=config.output.project or os.environ.get("WANDB_PROJECT") or "groupwise",
                name=folder.path.absolute().name,
                id=folder.tracking_id,
                resume="allow",
                dir=str(folder.path),
                mode="offline" if config.output.offline else None,
                config=hide_secrets(config.model_dump(mode="json")),
                settings=settings,
            )
        except wandb.errors.UsageError as error:
            first = str(error).strip().splitlines()[0]
            raise ConfigError(
                f"output.trackers names wandb, which cannot start ({first}): run `wandb login`, or set output.offline to true and send "
                "the records later with `wandb sync`"
            ) from error
        self.run.define_metric("step", hidden=True)
        self.run.define_metric("*", step_metric="step")

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log({**numbers, "step": step})

    def close(self) -> None:
        self.run.finish()
