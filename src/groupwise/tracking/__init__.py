"""Where a run's numbers, transcripts and results go. One sink that fails is done without; it never ends the run."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from operator import methodcaller
from typing import Any

from rich.console import Console

from groupwise.config.schema import Config
from groupwise.tracking.base import EvaluationResult, TokenAdvantages, Tracker
from groupwise.tracking.console import ConsoleTracker, Phase
from groupwise.tracking.jsonl import JsonlTracker
from groupwise.tracking.metric_table import EVALUATION_METRICS, METRICS, describe_metric
from groupwise.tracking.reading import answer_style
from groupwise.tracking.run_folder import RunFolder
from groupwise.tracking.services import check_trackers, start_services
from groupwise.types import Group

__all__ = [
    "EVALUATION_METRICS",
    "METRICS",
    "ConsoleTracker",
    "EvaluationResult",
    "JsonlTracker",
    "Phase",
    "RunFolder",
    "Tracker",
    "Trackers",
    "check_trackers",
    "describe_metric",
    "make_trackers",
]

logger = logging.getLogger("groupwise")


def make_trackers(
    config: Config, run_folder: RunFolder | None, console: Console | ConsoleTracker | None = None, done: int = 0
) -> Trackers:
    """The run's sinks: its folder, the services of ``output.trackers``, and the terminal. ``done`` steps are there already.

    Folder or terminal may be ``None``, as on processes other than the first; without a folder there are no services.
    """
    sinks: list[Tracker] = []
    if run_folder is not None:
        sinks.append(JsonlTracker(run_folder, config.output.log_completions, config.output.log_tokens, answer_style(config)))
        sinks += start_services(config, run_folder, done)
    if isinstance(console, Console):
        console = ConsoleTracker(console, show=config.evaluation.show)
    return Trackers(sinks if console is None else [*sinks, console])


class Trackers:
    """Forwards to every sink. One that raises is named in one warning, closed, and left out from then on."""

    def __init__(self, sinks: Sequence[Tracker] = ()) -> None:
        self.sinks = list(sinks)

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.each(lambda sink: sink.step(step, metrics))

    def completions(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[float]] | None = None,
        token_advantages: TokenAdvantages | None = None,
    ) -> None:
        self.each(lambda sink: sink.completions(step, groups, advantages, token_advantages))

    def evaluation(self, result: EvaluationResult) -> None:
        self.each(lambda sink: sink.evaluation(result))

    def say(self, sentence: str, style: str = "") -> None:
        """Show one sentence at the terminal, such as a note on a setting; sinks that are files do without."""
        self.each(lambda sink: sink.print(sentence, style, wrap=True) if isinstance(sink, ConsoleTracker) else None)

    def show_summary(self, summary: Mapping[str, Any]) -> None:
        self.each(lambda sink: sink.show_summary(summary) if isinstance(sink, ConsoleTracker) else None)

    @contextmanager
    def phase(self, name: str, total: float | None, unit: str = "", begun_at: float = 0) -> Iterator[Phase]:
        """Show a stretch of work as ``ConsoleTracker.phase`` does; without a terminal the handle only counts."""
        handle = Phase(name, total, unit, lambda changed: None, begun_at=begun_at)
        shown: list[tuple[ConsoleTracker, Phase]] = []

        def forward(sink: Tracker) -> None:
            if isinstance(sink, ConsoleTracker):
                shown.append((sink, sink.begin_phase(name, total, unit, begun_at)))

        self.each(forward)
        handle.changed = lambda changed: self.copy_phase(changed, shown)
        completed = False
        try:
            yield handle
            completed = True
        finally:
            for console, phase in shown:
                self.guard(console, methodcaller("end_phase", phase, completed))

    def copy_phase(self, source: Phase, shown: Sequence[tuple[ConsoleTracker, Phase]]) -> None:
        for console, phase in shown:
            self.guard(console, partial(follow, source=source, shown=phase))

    def close(self) -> None:
        sinks = contextlib.ExitStack()  # an interrupt of one ends no other
        for sink in reversed(self.sinks):
            sinks.callback(self.guard, sink, methodcaller("close"))
        sinks.__exit__(*sys.exc_info())  # as in ``Run.close``

    def each(self, action: Callable[[Any], None]) -> None:
        for sink in list(self.sinks):
            self.guard(sink, action)

    def guard(self, sink: Any, action: Callable[[Any], None]) -> None:
        if sink not in self.sinks:
            return
        try:
            action(sink)
        except (Exception, SystemExit) as error:  # rich answers a closed pipe by leaving
            self.sinks.remove(sink)
            with contextlib.suppress(Exception):
                sink.close()
            name = getattr(sink, "name", type(sink).__name__)
            kept = "" if isinstance(sink, (JsonlTracker, ConsoleTracker)) else self.kept
            logger.warning("%s failed (%s: %s): the run goes on without it%s", name, type(error).__name__, error, kept)

    @property
    def kept(self) -> str:
        """Where the numbers are that a service did not take."""
        files = [sink.folder.metrics for sink in self.sinks if isinstance(sink, JsonlTracker)]
        return f"; {files[0]} has every number" if files else ""


def follow(sink: ConsoleTracker, source: Phase, shown: Phase) -> None:
    shown.begun_at, shown.most_tokens = source.begun_at, source.most_tokens
    shown.advance(source.done - shown.done, **source.numbers)
