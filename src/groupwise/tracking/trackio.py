"""trackio: a dashboard on this machine, which ``trackio show`` opens."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from groupwise.config.schema import Config
from groupwise.tracking.numeric import NumericTracker
from groupwise.tracking.run_folder import RunFolder
from groupwise.tracking.secrets import hide_secrets

__all__ = ["TrackioTracker"]


class TrackioTracker(NumericTracker):
    """Logs each step into trackio's own data base (``TRACKIO_DIR`` says where)."""

    def __init__(self, config: Config, folder: RunFolder, done: int) -> None:
        import trackio

        super().__init__(done)
        with _aside():
            self.run: Any = trackio.init(
                project=config.output.project or "groupwise",
                name=folder.path.absolute().name,
                resume="allow",
                config=hide_secrets(config.model_dump(mode="json")),
                embed=False,
                auto_log_cpu=False,
                auto_log_gpu=False,
            )
        with suppress(AttributeError):  # else it finishes the run once more when the process ends, aloud
            trackio.context_vars.current_run.set(None)

    def send(self, step: int, numbers: Mapping[str, float]) -> None:
        self.run.log(dict(numbers), step=step)

    def close(self) -> None:
        with _aside():
            self.run.finish()


_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@contextmanager
def _aside() -> Iterator[None]:
    """What it prints (where to look) goes to standard error: `--json` keeps the output for itself. Without colours in a log."""
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            yield
    finally:
        sys.stderr.write(said.getvalue() if sys.stderr.isatty() else _COLOURS.sub("", said.getvalue()))
