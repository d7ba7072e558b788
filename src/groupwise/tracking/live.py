"""The part of the terminal that redraws itself: a bar for each running phase, and the numbers of the latest step."""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from groupwise.tracking.numbers import averaged, clock, fields, sections, sparkline

__all__ = ["LiveDisplay", "NotebookDisplay", "Phase"]

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

        Within a unit, such as a step, it only falls: to what the units after it take, where this one takes longer than usual.
        """
        passed = self.done - self.begun_at
        if not self.total or passed <= 0:
            return None
        pace, rest = (self.done_s - self.started_s) / passed, self.total - self.done
        since = time.monotonic() - self.done_s
        return max(0.0, pace * (rest - self.last_units), pace * rest - since)

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
        for title, found in sections(self.metrics):
            cells = [self.cell(label, value) for label, value in found]
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
