"""The run as a person sees it: bars and numbers that redraw in a terminal or notebook, plain lines in a log."""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from groupwise.tracking.base import EvaluationResult, TokenAdvantages
from groupwise.tracking.numbers import averaged, clock, fields, headline, interval, percent, sections, sparkline
from groupwise.tracking.tables import (
    STAGES,
    before_and_after,
    episode_line,
    next_command,
    stage_label,
    summary_lines,
    summary_table,
    transcript,
)
from groupwise.tracking.text import hide_secrets_in_text, visible
from groupwise.types import Group

__all__ = ["ConsoleTracker", "LiveDisplay", "NotebookDisplay", "Phase", "own_width"]

ASCII = str.maketrans({"±": "+-", "→": "->", "▁": " "})


def own_width() -> int | None:
    """The width of a console where ``COLUMNS`` is 0, as some terminals and CI systems set it: rich would print nothing. None leaves it to
    rich."""
    columns = os.environ.get("COLUMNS", "")
    return shutil.get_terminal_size().columns if columns and not columns.strip("0") else None


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
        self.console = console or Console(width=own_width())
        self.show, self.judged = show, judged
        self.display = LiveDisplay(self.console, self.text)
        redraws = self.display.notebook is not None or (self.console.is_terminal and not self.console.is_dumb_terminal)
        self.live = redraws if live is None else live
        self.every_s = every_s
        self.phases: list[Phase] = []
        self.last_line_s = time.monotonic()
        self.stepped: tuple[Phase, float] | None = None
        """The phase whose units have a line of their own, and how many had one."""
        self.seen: dict[tuple[str, str], EvaluationResult | None] = {}
        """Of evaluations in mid-run, which the summary does not show, that they were there alone."""

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
        self.last_line_s = time.monotonic()
        if self.console.quiet and self.display.notebook is None:
            return
        one_line = isinstance(content, str) and not wrap
        renderable = self.text(content, style) if isinstance(content, str) else content
        if self.display.notebook is not None:
            self.display.notebook.print(renderable, soft_wrap=one_line)
        else:
            self.console.print(renderable, soft_wrap=one_line, highlight=False)

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
        """Completions go to the run's folder; on the terminal they would hide the numbers."""

    def evaluation(self, result: EvaluationResult) -> None:
        """Print one line of figures, then ``show`` examples for the first mode of the stage."""
        first = not any(stage == result.stage for stage, _ in self.seen)
        self.seen[result.stage, result.mode] = result if result.stage in STAGES else None
        row = result.to_summary()
        self.print(
            f"{self.label(result.stage)}, {result.mode}: strict {interval(row['strict_accuracy'], row['strict_interval'])}, "
            f"lenient {interval(row['lenient_accuracy'], row['lenient_interval'])}, format {percent(row['format_rate'])}, "
            f"stopped {percent(row['stop_rate'])}, {row['n']} problems",
            "bold",
            wrap=self.live,
        )
        if played := episode_line(row):
            self.print(f"  {played}", wrap=self.live)
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
    first: dict[str, Mapping[str, Any]] = {}
    for record in records:
        if record["problem"] not in first and len(first) == count:
            break
        first.setdefault(record["problem"], record)
    return list(first.values())[:count]


def phrases(numbers: Mapping[str, float]) -> list[str]:
    return [f"{name} {value}" for name, value in fields(numbers)]


TREND_WIDTHS = (8, 16)
"""Blocks of a sparkline in a narrow and in a wide terminal."""
FEWEST_POINTS = 4
"""Steps below which there is no sparkline: two would look like a rise or a fall, whatever they are."""
MOST_COLUMNS = 7
LONGEST_LABEL = 30
TRENDS = {"rewards": "reward/mean", "answers": "accuracy/strict"}
"""Rows that end with the course of a metric over the run so far, and which."""


@dataclass
class Phase:
    """A stretch of work with a known or unknown length; the handle that its owner advances."""

    name: str
    total: float | None
    unit: str
    changed: Callable[[Phase], None]
    done: float = 0
    begun_at: float = 0
    """What was done before, such as the steps of a run that is resumed: it says nothing about the pace."""
    numbers: dict[str, float] = field(default_factory=dict)
    started_s: float = field(default_factory=lambda: time.monotonic())
    done_s: float = field(init=False)
    """When the last unit was done."""
    last_units: float = 1
    """How many units were done together then."""
    most_tokens: int | None = None
    """The longest a unit can become, where units are sampled together: ``numbers`` has the ``tokens`` so far."""

    def __post_init__(self) -> None:
        self.done = max(self.done, self.begun_at)
        self.done_s = self.started_s

    def advance(self, n: float = 1, **numbers: float) -> None:
        """``n`` more units are done; ``numbers`` are shown beside the bar, the latest value of each name."""
        self.done += n
        if n > 0:
            self.done_s, self.last_units = time.monotonic(), n
        self.numbers.update(numbers)
        self.changed(self)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_s

    @property
    def left_s(self) -> float | None:
        """Time left if the rest goes at the mean pace of what is done; ``None`` before anything is done or where no total is known.

        Within a unit, such as a step, it only falls: to what the units after it take, where this one takes longer than usual. Units that
        are sampled together end late, nearly all at once: it is no longer than if all that are not done became as long as they can.
        """
        passed = self.done - self.begun_at
        if not self.total or passed <= 0:
            return None
        pace, rest = (self.done_s - self.started_s) / passed, self.total - self.done
        since = time.monotonic() - self.done_s
        left = max(0.0, pace * (rest - self.last_units), pace * rest - since)
        tokens = self.numbers.get("tokens", 0)
        if self.most_tokens is None or not tokens:
            return left
        sampled = tokens * rest / (self.total - self.begun_at)  # of those that are not done, if they were as long as the others
        return min(left, self.elapsed_s / tokens * max(0.0, rest * self.most_tokens - sampled))

    @property
    def count(self) -> str:
        total = "" if self.total is None else f"/{self.total:,.0f}"
        return f"{self.done:,.0f}{total}" + (f" {self.unit}" if self.unit else "")


class NotebookDisplay:
    """One output of a notebook's cell, written again as things happen: the sentences so far and, under them, what is going on.

    It needs neither ipywidgets nor a terminal's control codes. ``live``: what is going on, and None while nothing is.
    """

    EVERY_S = 0.5

    def __init__(self, width: int) -> None:
        self.width = width
        self.said: list[str] = []
        self.live: RenderableType | None = None
        self.output: Any = None
        self.written_s = -self.EVERY_S

    def print(self, what: RenderableType, *, soft_wrap: bool = False) -> None:
        self.said.append(self.as_html(what, soft_wrap=soft_wrap))
        self.write()

    def refresh(self) -> None:
        """Write again what is going on, unless that was done a moment ago."""
        if time.monotonic() - self.written_s >= self.EVERY_S:
            self.write()

    def write(self) -> None:
        from IPython.display import HTML, display

        self.written_s = time.monotonic()
        now = "" if self.live is None else self.as_html(self.live)
        page = HTML(f'<pre style="line-height: 1.25; white-space: pre-wrap">{"".join(self.said)}{now}</pre>')
        if self.output is None:
            self.output = display(page, display_id=True)
        else:
            self.output.update(page)

    def as_html(self, what: RenderableType, *, soft_wrap: bool = False) -> str:
        paper = Console(
            file=io.StringIO(), record=True, width=self.width, force_jupyter=False, force_terminal=True, color_system="truecolor",
            legacy_windows=False, highlight=False, _environ={},
        )  # fmt: skip
        paper.print(what, soft_wrap=soft_wrap)
        return paper.export_html(inline_styles=True, code_format="{code}")


class LiveDisplay:
    """Running phases, outermost first, redrawn twice a second while there is one. ``text`` makes text fit the terminal."""

    def __init__(self, console: Console, text: Callable[..., Text]) -> None:
        self.console = console
        self.text = text
        self.phases: list[Phase] = []
        self.metrics: Mapping[str, float] = {}
        self.history: dict[str, list[float]] = {}
        self.live: Live | None = None
        self.notebook = NotebookDisplay(console.width) if console.is_jupyter and not console.quiet else None
        self.fitted_to, self.columns = 0, MOST_COLUMNS

    def begin(self, phase: Phase) -> None:
        self.phases.append(phase)
        if self.notebook is not None:
            self.notebook.live = self
            self.notebook.write()
        elif self.live is None:
            live = Live(self, console=self.console, refresh_per_second=2, transient=True)
            live.start()
            self.live = live

    def end(self, phase: Phase) -> None:
        if phase in self.phases:
            self.phases.remove(phase)
        if not self.phases:
            self.stop()

    def stop(self) -> None:
        live, self.live = self.live, None
        self.phases.clear()
        self.metrics = {}
        self.history.clear()
        if live is not None:
            live.stop()
        if self.notebook is not None and self.notebook.live is not None:
            self.notebook.live = None
            self.notebook.write()

    def refresh(self) -> None:
        """A terminal is redrawn by a thread; a notebook when something happens."""
        if self.notebook is not None and self.notebook.live is not None:
            self.notebook.refresh()

    def step(self, metrics: Mapping[str, float]) -> None:
        self.metrics = metrics
        for name in TRENDS.values():
            if name in metrics:
                self.history.setdefault(name, []).append(metrics[name])
        self.refresh()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.bars()
        numbers = self.phase_numbers()
        if numbers:
            yield numbers
        if self.metrics:
            yield self.watched()

    def bars(self) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(4):
            table.add_column(no_wrap=True)
        for phase in list(self.phases):
            left = phase.left_s
            table.add_row(
                self.text(phase.name, "bold"),
                ProgressBar(total=phase.total, completed=phase.done, width=14 if self.narrow else 30, pulse=not phase.total),
                self.text(phase.count),
                self.text(f"{clock(phase.elapsed_s)} elapsed" if left is None else f"{clock(left)} left", "cyan"),
            )
        return table

    def phase_numbers(self) -> Text:
        """What the innermost phase says of itself, such as the loss of a warm start."""
        innermost = self.phases[-1:]  # one look: the redrawing thread races with the end of a phase
        numbers = dict(innermost[0].numbers) if innermost else {}
        return self.text("  ".join(f"{label} {value}" for label, value in fields(numbers)), "dim")

    @property
    def narrow(self) -> bool:
        return self.console.width < 110

    def watched(self) -> Table:
        """The watched numbers, a row for each subject, in as many columns as there is room for; never more than a moment ago, so that
        nothing jumps to and fro between steps."""
        if self.console.width != self.fitted_to:
            self.fitted_to, self.columns = self.console.width, MOST_COLUMNS
        table = self.in_columns(self.columns)
        while self.columns > 1 and self.natural_width(table) > self.console.width:
            self.columns -= 1
            table = self.in_columns(self.columns)
        return table

    def natural_width(self, table: Table) -> int:
        return self.console.measure(table, options=self.console.options.update(max_width=10_000)).maximum

    def in_columns(self, columns: int) -> Table:
        table = Table.grid(padding=(0, 2, 0, 0))
        for _ in range(columns + 2):
            table.add_column(no_wrap=True)
        for title, labelled in sections(self.metrics):
            cells = [self.cell(label, value) for label, value in labelled]
            for i in range(0, len(cells), columns):
                row = cells[i : i + columns]
                empty = [self.text("")] * (columns - len(row))
                table.add_row(self.text("" if i else title, "cyan"), *row, *empty, *([] if i else self.trend(title)))
        return table

    def cell(self, label: str, value: str) -> Text:
        """A long label is cut, never the value."""
        shown = label if len(label) <= LONGEST_LABEL else label[: LONGEST_LABEL - 2] + ".."
        return Text.assemble(self.text(f"{shown} ", "dim"), self.text(value, "bold"))  # `+` would make all of it dim

    def trend(self, title: str) -> list[Text]:
        """The course of what a row is about over the whole run so far, where it has one: single steps jump too much to say anything."""
        past = averaged(self.history.get(TRENDS.get(title, ""), ()), TREND_WIDTHS[0 if self.narrow else 1])
        return [self.text(sparkline(past), "green")] if len(past) >= FEWEST_POINTS and not self.console.options.ascii_only else []
