"""trackio: a dashboard on this machine, which ``trackio show`` opens."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout, suppress
from typing import Any

from groupwise.config.schema import Config
from groupwise.tracking.base import EvaluationResult, TokenAdvantages
from groupwise.tracking.numbers import evaluation_numbers, evaluation_step
from groupwise.tracking.run_folder import RunFolder
from groupwise.tracking.secrets import hide_secrets
from groupwise.types import Group

__all__ = ["TrackioTracker"]


class TrackioTracker:
    """Logs each step into trackio's own data base (``TRACKIO_DIR`` says where)."""

    def __init__(self, config: Config, folder: RunFolder, done: int) -> None:
        import trackio

        self.last_step = done
        with redirect_stdout(sys.stderr):  # it prints where to look; `--json` keeps the standard output for itself
            self.run: Any = trackio.init(
                project=config.output.project,
                name=folder.path.absolute().name,
                resume="allow",
                config=hide_secrets(config.model_dump(mode="json")),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        with suppress(AttributeError):  # else it finishes the run once more when the process ends, aloud
            trackio.context_vars.current_run.set(None)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.last_step = step
        self.run.log(dict(metrics), step=step)

    def completions(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[float]] | None = None,
        token_advantages: TokenAdvantages | None = None,
    ) -> None:
        """Texts stay in the run's folder."""

    def evaluation(self, result: EvaluationResult) -> None:
        self.run.log(evaluation_numbers(result.to_summary()), step=evaluation_step(result.stage, self.last_step))

    def close(self) -> None:
        with redirect_stdout(sys.stderr):
            self.run.finish()
