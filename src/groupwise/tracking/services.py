"""The sinks that other packages provide (TensorBoard, Weights & Biases, trackio): whether they are installed, and starting them.

A service that is slow, hangs or is down never holds up a step: it works on a thread of its own.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import math
import os
import queue
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any

from groupwise.config.schema import Config
from groupwise.errors import ConfigError
from groupwise.tracking.base import EvaluationResult, TokenAdvantages, Tracker
from groupwise.tracking.numbers import evaluation_numbers, evaluation_step
from groupwise.tracking.run_folder import RunFolder
from groupwise.tracking.text import hide_secrets
from groupwise.types import Group

__all__ = ["BackgroundTracker", "check_trackers", "start_services"]

logger = logging.getLogger("groupwise")


SERVICES: dict[str, Callable[[Config, RunFolder, int], Tracker]] = {
    "tensorboard": lambda *run: TensorBoardTracker(*run),
    "wandb": lambda *run: BackgroundTracker(WandbTracker(*run), "wandb"),
    "trackio": lambda *run: BackgroundTracker(TrackioTracker(*run), "trackio"),
}
"""What starts a service from config, folder and steps done, by the name that ``output.trackers``, the package and the extra share."""


def check_trackers(config: Config) -> None:
    """Raises:
    ConfigError: a package that ``output.trackers`` needs is not installed.
    """
    for name in config.output.trackers:
        # A folder wandb/ of earlier runs in the working directory is found too, but as a namespace, which has no origin.
        if name in SERVICES and getattr(importlib.util.find_spec(name), "origin", None) is None:
            raise ConfigError(
                f"output.trackers names {name}, but the package {name} is not installed: pip install 'groupwise[{name}]', or leave it out"
            )


def start_services(config: Config, folder: RunFolder, done: int = 0) -> list[Tracker]:
    """The sinks beside the run's own files, after ``done`` steps. One that cannot start is named in a warning and done without.

    Raises:
        ConfigError: its package is not installed, or nobody is logged in.
    """
    check_trackers(config)
    started: list[Tracker] = []
    for name in dict.fromkeys(config.output.trackers):
        if name not in SERVICES:
            continue
        try:
            started.append(SERVICES[name](config, folder, done))
        except ConfigError:
            raise
        except Exception as error:
            logger.warning(
                "%s cannot be started (%s: %s): the run goes on without it; %s has every number", name, type(error).__name__, error,
                folder.metrics,
            )  # fmt: skip
    return started


Action = Callable[[Tracker], None]


class BackgroundTracker:
    """Passes every call to ``sink`` in order, from another thread. What went wrong there is raised by the next call here.

    ``call_limit_s`` is how long one call may take before the sink counts as down; ``close`` waits at most ``close_limit_s`` for calls
    that are still queued. The thread ends with the process, so a service that hangs cannot keep a finished run alive.
    """

    def __init__(self, sink: Tracker, name: str, *, call_limit_s: float = 120.0, close_limit_s: float = 30.0) -> None:
        self.name = name
        self.call_limit_s = call_limit_s
        self.close_limit_s = close_limit_s
        self.error: Exception | None = None
        self.busy_since: float | None = None
        self.given_up = False
        self.waiting: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, args=(sink,), name=f"groupwise-{name}", daemon=True)
        self.thread.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = dict(metrics)
        self._put(lambda sink: sink.step(step, numbers))

    def completions(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[float]] | None = None,
        token_advantages: TokenAdvantages | None = None,
    ) -> None:
        self._put(lambda sink: sink.completions(step, groups, advantages, token_advantages))

    def evaluation(self, result: EvaluationResult) -> None:
        self._put(lambda sink: sink.evaluation(result))

    def close(self) -> None:
        """Raises:
        TimeoutError: the sink has not taken everything in time.
        """
        if self.given_up:
            return
        self.given_up = True
        self.waiting.put(None)
        self.thread.join(self.close_limit_s)
        if self.error is not None:
            raise self.error
        if self.thread.is_alive():
            raise TimeoutError(f"it had not taken everything after {self.close_limit_s:g} s")

    def _put(self, action: Action) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        since = self.busy_since
        if since is not None and time.monotonic() - since > self.call_limit_s:
            self.given_up = True
            raise TimeoutError(f"it has not answered for {self.call_limit_s:g} s")
        self.waiting.put(action)

    def _work(self, sink: Any) -> None:
        while (action := self.waiting.get()) is not None:
            self.busy_since = time.monotonic()
            try:
                action(sink)
            except Exception as error:
                self.error = error
                with contextlib.suppress(Exception):
                    sink.close()
                return
            self.busy_since = None
        try:
            sink.close()
        except Exception as error:
            self.error = error


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


START_TIMEOUT_S = 60.0


class WandbTracker(NumericTracker):
    """Logs each step under our own axis, so that a run which is resumed draws over what it did again. A run of the caller's in the same
    process is left alone. Raises ConfigError where nobody is logged in."""

    def __init__(self, config: Config, folder: RunFolder, done: int) -> None:
        import wandb

        super().__init__(done)
        # Its metadata would hold the command as it was typed, with whatever keys stand in it; environment.json has it without them.
        settings = wandb.Settings(
            init_timeout=START_TIMEOUT_S,
            console="off",
            silent=True,
            x_disable_stats=True,
            x_disable_meta=True,
            reinit="create_new",
        )
        offline = config.output.offline or os.environ.get("WANDB_MODE") == "offline"
        # `wandb sync` sends each part of a run that was resumed offline as a whole run: by the same id it would replace the ones before.
        part = f"{folder.tracking_id}-from-{done}" if offline and done else folder.tracking_id
        try:
            self.run: Any = wandb.init(
                project=config.output.project or os.environ.get("WANDB_PROJECT") or "groupwise",
                name=folder.path.absolute().name,
                id=part,
                group=folder.tracking_id if offline else None,
                resume=None if offline else "allow",
                dir=str(folder.path),
                mode="offline" if config.output.offline else None,
                config=hide_secrets(config.model_dump(mode="json")),
                settings=settings,
            )
        except wandb.errors.UsageError as error:
            first = str(error).strip().partition("\n")[0]
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


class TrackioTracker(NumericTracker):
    """Logs each step into trackio's own data base (``TRACKIO_DIR`` says where)."""

    def __init__(self, config: Config, folder: RunFolder, done: int) -> None:
        import trackio

        super().__init__(done)
        with _stdout_to_stderr():
            self.run: Any = trackio.init(
                project=config.output.project or "groupwise",
                name=f"{folder.path.absolute().name}-{folder.tracking_id}",  # it knows a run by its name alone
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
        with _stdout_to_stderr():
            self.run.finish()


_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Send what trackio prints (where to look) to standard error, which `--json` leaves free; in a log without colours."""
    said = io.StringIO()
    try:
        with redirect_stdout(said):
            yield
    finally:
        sys.stderr.write(said.getvalue() if sys.stderr.isatty() else _COLOURS.sub("", said.getvalue()))
