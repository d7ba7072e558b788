"""The run as a person sees it: bars and numbers that redraw in a terminal, plain lines in a log."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, RenderableType
from rich.text import Text

from groupwise.tracking.base import EvaluationResult, TokenAdvantages
from groupwise.tracking.live import LiveDisplay, Phase
from groupwise.tracking.numbers import clock, fields, headline, interval, percent
from groupwise.tracking.secrets import hide_secrets_in_text
from groupwise.tracking.tables import before_and_after, next_command, stage_label, summary_lines, summary_table, transcript
from groupwise.tracking.text import visible
from groupwise.types import Group

__all__ = ["ConsoleTracker"]

ASCII = str.maketrans({"±": "+-", "→": "->", "▁": " "})


class ConsoleTracker:
    """Follows a run on ``console``.

    ``live`` redraws in place; by default only where the output is a terminal that can, or a notebook. Otherwise there is one line a
    step, and one after ``every_s`` seconds without any, without control codes. ``show`` examples follow each evaluation. ``judged``: the
    model that `groupwise eval` judges, where there are several.
    """

    def __init__(
        self,
        console: Console | None = None,
        *,
        show: int = 2,
        live: bool | None = None,
        every_s: float = 60.0,
        judged: str | None = None,
    ) -> None:
        self.console = console or Console()
        self.show, self.judged = show, judged
        self.display = LiveDisplay(self.console, self.text)
        redraws = self.display.notebook is not None or (self.console.is_terminal and not self.console.is_dumb_terminal)
        self.live = redraws if live is None else live
        self.every_s = every_s
        self.phases: list[Phase] = []
        self.last_line_s = time.monotonic()
        self.stepped: tuple[Phase, float] | None = None
        """The phase whose units have a line of their own, and how many had one."""
        self.seen: dict[tuple[str, str], EvaluationResult] = {}

    def label(self, stage: str) -> str:
        """What a stage is called; the one of ``groupwise eval`` by its model, where several are judged."""
        return self.judged if self.judged and stage == "eval" else stage_label(stage)

    def text(self, content: str, style: str = "") -> Text:
        """Text that no terminal obeys and that this terminal's encoding can carry."""
        shown = visible(hide_secrets_in_text(content))
        encoding = self.console.encoding
        if not encoding.startswith("utf"):
            shown = shown.translate(ASCII).encode(encoding, "replace").decode(encoding)
        return Text(shown, style=style)

    def print(self, content: str | RenderableType, style: str = "", *, wrap: bool = False) -> None:
        """A string stays on one line unless ``wrap``: logs are searched by line, and paths and commands are copied."""
        one_line = isinstance(content, str) and not wrap
        renderable = self.text(content, style) if isinstance(content, str) else content
        if self.display.notebook is not None:
            self.display.notebook.print(renderable, soft_wrap=one_line)
        else:
            self.console.print(renderable, soft_wrap=one_line, highlight=False)
        self.last_line_s = time.monotonic()

    @contextmanager
    def phase(self, name: str, total: float | None, unit: str = "", begun_at: float = 0) -> Iterator[Phase]:
        """Show a stretch of work while it lasts.

        >>> with ConsoleTracker().phase("warm start", 30, "steps") as bar:  # doctest: +SKIP
        ...     bar.advance(1, loss=0.3)
        """
        handle = self.begin_phase(name, total, unit, begun_at)
        completed = False
        try:
            yield handle
            completed = True
        finally:
            self.end_phase(handle, completed)

    def begin_phase(self, name: str, total: float | None, unit: str = "", begun_at: float = 0) -> Phase:
        phase = Phase(name, total, unit, self.phase_changed, begun_at=begun_at)
        self.phases.append(phase)
        if self.live:
            self.display.begin(phase)
        else:
            self.print(name + (f": {phase.count}" if total is not None else " ..."))
        return phase

    def end_phase(self, phase: Phase, completed: bool) -> None:
        if phase in self.phases:
            self.phases.remove(phase)
        if self.live:
            self.display.end(phase)
        word = "done" if completed else "stopped"
        self.print(", ".join([f"{phase.name}: {word}, {phase.count} in {clock(phase.elapsed_s)}", *phrases(phase.numbers)]))

    def phase_changed(self, phase: Phase) -> None:
        if self.live:
            self.display.refresh()
        if self.live or time.monotonic() - self.last_line_s < self.every_s:
            return
        if self.stepped is not None and self.stepped[0] is phase and phase.done > self.stepped[1]:
            return  # its line comes in a moment
        left = phase.left_s
        time_left = f"{clock(left)} left" if left is not None else f"{clock(phase.elapsed_s)} elapsed"
        self.print(", ".join([f"{phase.name}: {phase.count}", time_left, *phrases(phase.numbers)]))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.live and self.phases:
            self.display.step(metrics)
            return
        phase = self.phases[-1] if self.phases else None
        self.stepped = None if phase is None else (phase, phase.done)
        label = f"step {step}" if phase is None or phase.total is None else f"step {step}/{phase.total:g}"
        left = [f"{clock(phase.left_s)} left"] if phase and phase.left_s is not None else []
        self.print("  ".join([label, *left, *(f"{name} {value}" for name, value in headline(metrics))]))

    def completions(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[float]] | None = None,
        token_advantages: TokenAdvantages | None = None,
    ) -> None:
        """Completions go to the run's folder; on the terminal they would drown the numbers."""

    def evaluation(self, result: EvaluationResult) -> None:
        """One line of figures, then ``show`` examples for the first mode of the stage."""
        first = not any(stage == result.stage for stage, _ in self.seen)
        self.seen[result.stage, result.mode] = result
        row = result.to_summary()
        self.print(
            f"{self.label(result.stage)}, {result.mode}: strict {interval(row['strict_accuracy'], row['strict_interval'])}, "
            f"lenient {interval(row['lenient_accuracy'], row['lenient_interval'])}, format {percent(row['format_rate'])}, "
            f"stopped {percent(row['stop_rate'])}, {row['n']} problems",
            "bold",
            wrap=self.live,
        )
        for record in first_answers(result.records, self.show) if first else ():
            self.print(transcript(record, f"{self.label(result.stage)}: {record['problem']}", self.text))

    def show_summary(self, summary: Mapping[str, Any]) -> None:
        """The table that a run ends with, one problem before and after, where everything lies, and what to try next."""
        self.print("")
        self.print(summary_table(summary, self.text))
        self.print("")
        for sentence in summary_lines(summary):
            self.print(sentence, wrap=True)
        self.show_change(summary)
        if summary.get("folder"):
            self.print(f"\nEverything lies in  {summary['folder']}")
            self.print(f"A page about it:    {next_command('report', summary['folder'])}")
            self.print(f"What looks wrong:   {next_command('doctor', summary['folder'])}")
        if summary.get("final_model"):
            self.print(f"Talk to the model:  {next_command('generate', summary['final_model'])}", "bold green")

    def show_change(self, summary: Mapping[str, Any]) -> None:
        """The first held-out problem (not a chosen one) as answered by the first and by the last stage."""
        stages = summary.get("evaluations", ())
        if not self.show or len(stages) < 2:
            return
        results = [self.seen.get((row["stage"], row["mode"])) for row in (stages[0], stages[-1])]
        before, after = ((result.records[0] if result and result.records else None) for result in results)
        if before and after and before["problem"] == after["problem"]:
            titles = (stage_label(stages[0]["stage"]), stage_label(stages[-1]["stage"]))
            self.print(before_and_after(before, after, titles, self.text))

    def close(self) -> None:
        self.phases.clear()
        self.display.stop()


def first_answers(records: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """The first answer to each of the first problems, where each was sampled several times."""
    found: dict[str, Mapping[str, Any]] = {}
    for record in records:
        if record["problem"] not in found and len(found) == count:
            break
        found.setdefault(record["problem"], record)
    return list(found.values())[:count]


def phrases(numbers: Mapping[str, float]) -> list[str]:
    return [f"{name} {value}" for name, value in fields(numbers)]
