"""What is left on the terminal: transcripts, and the table that a run ends with."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from groupwise.tracking.judged import changes, condition_line
from groupwise.tracking.numbers import clock, interval, percent

__all__ = ["before_and_after", "next_command", "stage_label", "summary_lines", "summary_table", "transcript"]

STAGES = {"base": "base", "warm_start": "after warm start", "final": "after GRPO", "eval": "this model"}
LONGEST_LINES, LONGEST_CHARACTERS = 16, 1200

MakeText = Callable[..., Text]
"""Makes text that is safe and printable on the terminal at hand: ``text(string, style="")``."""


def stage_label(stage: str) -> str:
    return STAGES.get(stage, stage.replace("_", " "))


def summary_table(summary: Mapping[str, Any], text: MakeText) -> Table:
    """Held-out accuracy stage by stage: the headline mode, and under each stage the other mode. Fits 80 columns."""
    headline = summary.get("evaluations", [])
    how = f"{mode_label(headline[0])}, " if headline else ""
    title = text(f"Held-out problems, {how}with 95% intervals", "bold")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for name in ("strict", "lenient", "format", "stopped"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in headline:
        if row["mode"] != headline[0]["mode"]:  # `groupwise eval` lists all modes of its one stage together
            table.add_row(text(f"  {mode_label(row)}", "dim"), *figures(row, text, "dim"))
            continue
        table.add_row(text(stage_label(row["stage"]), "bold"), *figures(row, text, "bold"))
        for mode in ("sampled", "greedy"):
            for other in summary.get(f"{mode}_evaluations", ()):
                if other["stage"] == row["stage"] and mode != row["mode"]:
                    table.add_row(text(f"  {mode_label(other)}", "dim"), *figures(other, text, "dim"))
    return table


def mode_label(row: Mapping[str, Any]) -> str:
    return "greedy" if row["mode"] == "greedy" else f"temperature {row['temperature']:g}"


def figures(row: Mapping[str, Any], text: MakeText, style: str) -> list[Text]:
    return [
        text(interval(row["strict_accuracy"], row["strict_interval"]), style),
        text(interval(row["lenient_accuracy"], row["lenient_interval"]), style),
        text(percent(row["format_rate"]), style),
        text(percent(row["stop_rate"]), style),
    ]


def summary_lines(summary: Mapping[str, Any]) -> Iterable[str]:
    """Sentences under the table: how many problems, what changed problem by problem, and the time it took."""
    sizes = sorted({row["n"] for row in summary.get("evaluations", ())})
    if sizes:
        yield (
            f"{' or '.join(str(n) for n in sizes)} held-out problems. strict: the answer stands where the format "
            "asks for it; lenient: it is found anywhere; stopped: the model ended by itself."
        )
    for way in dict.fromkeys(condition_line(row) for row in summary.get("evaluations", ()) if row.get("conditions")):
        yield f"Asked: {way}."
    paired = summary.get("comparison")
    if paired:
        told = changes(paired).replace(" problems", "", 1)
        test = paired.get("test", "exact McNemar test")
        yield (
            f"Problem by problem, {stage_label(paired['before'])} -> {stage_label(paired['after'])}: {told} ({test}, "
            f"p = {paired['p_value']:.2g})."
        )
    if summary.get("seconds") is not None:
        yield f"The whole run took {clock(summary['seconds'])}."


def next_command(name: str, target: str | Path) -> str:
    """A command about a run or its model, as it can be typed here."""
    here = Path(sys.executable).parent / "groupwise"
    command = "groupwise"
    if here.exists():
        command = str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else str(here)
    return f"{shlex.quote(command)} {name} {shlex.quote(str(target))}"


def shortened(response: str) -> str:
    lines = response[:LONGEST_CHARACTERS].split("\n")
    short = "\n".join(lines[:LONGEST_LINES])
    return short if short == response else f"{short}\n[... {len(response) - len(short):,} more characters]"


def verdict(record: Mapping[str, Any]) -> tuple[str, str]:
    if record["strict"]:
        return "right", "green"
    if record["strict"] is None:
        return "not checked: math-verify gave no verdict", "yellow"
    return ("right, but not in the form asked for", "yellow") if record["lenient"] else ("wrong", "red")


def answer_text(record: Mapping[str, Any], text: MakeText) -> Text:
    word, colour = verdict(record)
    found = "nothing" if record.get("extracted") is None else f"{record['extracted']!s:.80}"
    ended = "" if record.get("finish_reason") == "stop" else ", cut at the token limit"
    return (
        text(shortened(str(record["response"]))) + text(f"\n{word}", f"bold {colour}") + text(f" (found {found}{ended})", "dim")
    )


def transcript(record: Mapping[str, Any], title: str, text: MakeText) -> RenderableType:
    """One problem with what the model said and how it was judged."""
    body = (
        text("question  ", "dim") + text(shortened(str(record["question"]))) + text(f"\nexpected  {record['expected']}\n", "dim")
    )
    body += answer_text(record, text)
    return Panel(body, title=text(title, "bold"), title_align="left", box=box.ROUNDED, border_style="dim")


def before_and_after(
    before: Mapping[str, Any], after: Mapping[str, Any], titles: tuple[str, str], text: MakeText
) -> RenderableType:
    """One problem as it was answered at two stages, side by side."""
    table = Table(box=box.ROUNDED, border_style="dim", title=text(shortened(str(before["question"])), "italic"), show_lines=True)
    for title in titles:
        table.add_column(text(title, "bold"), ratio=1, overflow="fold")
    table.add_row(answer_text(before, text), answer_text(after, text))
    return table
