"""Tables and sentences about evaluations: what a run ends with, and what ``groupwise eval`` shows."""

from __future__ import annotations

import shlex
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from groupwise.tracking.numbers import clock, interval, number, percent
from groupwise.types import CUT_SHORT

__all__ = [
    "STAGES",
    "before_and_after",
    "changes",
    "comparison_lines",
    "condition_line",
    "condition_lines",
    "episode_line",
    "judged_tables",
    "legend",
    "next_command",
    "stage_label",
    "summary_lines",
    "summary_table",
    "transcript",
]

Rows = Sequence[tuple[str, Mapping[str, Any]]]
"""A model's name and one of its evaluations, as ``Evaluation.to_summary`` has it."""
MakeText = Callable[..., Text]
"""Makes text that is safe and printable on the terminal at hand: ``text(string, style="")``."""
PLACES = {"xml": "<answer>", "boxed": "\\boxed{}", "plain": "####"}
VERDICTS = (("success", "success"), ("strict", "strict"), ("lenient", "lenient"), ("latex", "LaTeX"))
FIELD = (("field_strict", "field: strict"), ("field_flexible", "field: flexible"))
EPISODES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("sampled_tokens", "  tokens sampled", number),
    ("given_tokens", "  tokens given", number),
    ("turns", "turns", number),
    ("calls", "calls", number),
    ("invalid_calls", "  invalid calls", percent),
    ("failed_calls", "  failed calls", percent),
    ("reward", "environment's reward", number),
    ("environment_failed", "environment failed", percent),
)
"""Figures of episodes: each with its name in a table, and how it is written."""
SIDE_BY_SIDE = 3
"""Models in one table: so many fit 80 columns."""


def judged_tables(rows: Rows, text: MakeText) -> Iterable[Table]:
    """A table per mode with a column per model: shares with 95% intervals, what several samples say, stopping and length."""
    for mode in dict.fromkeys(row["mode"] for _, row in rows):
        judged = [(model, row) for model, row in rows if row["mode"] == mode]
        for start in range(0, len(judged), SIDE_BY_SIDE):
            yield judged_table(judged[start : start + SIDE_BY_SIDE], text)


def judged_table(rows: Rows, text: MakeText) -> Table:
    """One mode's figures; a dash where a figure was not taken."""
    title = text(f"Held-out problems, {rows[0][1]['mode']}, in % with 95% intervals", "bold")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), title=title, title_justify="left")
    table.add_column("", no_wrap=True)
    for model, _ in rows:
        table.add_column(text(short_name(model)), justify="right", no_wrap=True)
    for name, cells in figure_lines(rows):
        table.add_row(text(name), *map(text, cells))
    return table


def figure_lines(rows: Rows) -> Iterable[tuple[str, list[str]]]:
    figures = [row["figures"] for _, row in rows]
    for key, name in (*VERDICTS, *field_verdicts(rows)):
        if any(key in one for one in figures):
            yield name, [with_interval(one.get(key)) for one in figures]
    for key, name in (("pass_at", "pass@{}"), ("majority_at", "majority@{}")):
        for k in sorted({int(k) for one in figures for k in one.get(key, {})} - {1}):
            yield name.format(k), [with_interval(one.get(key, {}).get(str(k))) for one in figures]
    yield "in the format", [percent(row["format_rate"]) for _, row in rows]
    if any("unchecked" in one for one in figures):
        yield "not checked, left out", [str(one.get("unchecked", 0)) for one in figures]
    yield "stopped", [percent(row["stop_rate"]) for _, row in rows]
    yield "tokens, mean", [f"{row['mean_tokens']:.0f}" for _, row in rows]
    for key, name, write in EPISODES:
        if any(key in one.get("episodes", ()) for one in figures):
            yield name, [_played(one, key, write) if key in one.get("episodes", ()) else "-" for one in figures]


def _played(figures: Mapping[str, Any], key: str, write: Callable[[float], str]) -> str:
    """A figure of episodes, with its 95% interval where it has one."""
    ends = figures.get(f"{key}_interval")
    return write(figures["episodes"][key]) + (f" [{', '.join(map(write, ends))}]" if ends else "")


def with_interval(estimate: Sequence[float] | None) -> str:
    return "-" if estimate is None else interval(estimate[0], estimate[1:])


def short_name(model: str) -> str:
    """The last part of a path or Hub name, or that before where the last says nothing; in lines as wide as a figure."""
    parts = [part for part in model.replace("\\", "/").split("/") if part]
    meaning = [part for part in parts if part != "final_model"] or parts or [model]
    return "\n".join(textwrap.wrap(meaning[-1], 20))


def field_verdicts(rows: Rows) -> tuple[tuple[str, str], ...]:
    """The field's rules are GSM8K's own; beside other data they would only mislead."""
    return FIELD if all("gsm8k" in str(row["conditions"].get("data")).lower() for _, row in rows) else ()


def condition_line(row: Mapping[str, Any]) -> str:
    """How the score was taken, in one sentence: data, prompt format, shots, temperature, token limit, n and seed."""
    asked = row["conditions"]
    size = f"{row['n']:,} problems"
    if asked.get("available") and asked["available"] > row["n"]:
        size = f"{row['n']:,} of the {asked['available']:,} problems"
    shots = asked.get("shots") or 0
    sampled = "an unrecorded temperature" if row["temperature"] is None else f"temperature {row['temperature']:g}"
    how = "greedy (temperature 0)" if row["mode"] == "greedy" else sampled
    place = PLACES.get(str(asked.get("style")), "an unrecorded place")
    return (
        f"{how}, {row['samples']} sample{'s' * (row['samples'] > 1)} of each of {size} from {asked.get('data', 'unrecorded data')}; "
        f"{asked.get('prompt_format', 'an unrecorded prompt')}, answer in {place}, {shots} shot{'s' * (shots != 1)}; "
        f"at most {row['max_tokens']} tokens; seed {asked.get('seed')}"
    )


def condition_lines(rows: Rows) -> Iterable[str]:
    """One sentence for each way in which models were asked, naming the models where they were not all asked alike."""
    ways: dict[str, list[str]] = {}
    for model, row in rows:
        ways.setdefault(condition_line(row), []).append(model)
    everyone = {model for model, _ in rows}
    for way, models in ways.items():
        whom = "" if set(models) == everyone else f" ({', '.join(models)})"
        yield f"Asked{whom}: {way}."


def comparison_lines(comparisons: Sequence[Mapping[str, Any]]) -> Iterable[str]:
    for row in comparisons:
        low, high = (100 * bound for bound in row["difference_interval"])
        points = f"points [{low:+.1f}, {high:+.1f}] {row.get('verdict', 'strict')}"
        adjusted = f", {row['p_adjusted']:.2g} after Holm" if row.get("p_adjusted", row["p_value"]) != row["p_value"] else ""
        yield (
            f"{row['before']} -> {row['after']}, {row['mode']}: {100 * row['difference']:+.1f} {points}; "
            f"{changes(row)} ({row['test']}, p = {row['p_value']:.2g}{adjusted})."
        )


def changes(row: Mapping[str, Any]) -> str:
    """What became of the problems between two evaluations; with several samples each, by their mean."""
    if row.get("samples", 1) > 1:
        return f"{row['better']} of {row['n']} problems better, {row['worse']} worse"
    return (
        f"{row['fixed']} problems fixed, {row['broken']} broken, {row['both_right']} right both times, "
        f"{row['both_wrong']} wrong both times"
    )


def legend(rows: Rows) -> str:
    words = [
        "strict: right in the place that the format asks for",
        "lenient: a right answer stands anywhere",
        "LaTeX: the final answer, wherever it stands, is equal by math-verify",
        "stopped: ended by itself",
    ]
    if any(row["samples"] > 1 for _, row in rows):
        words.insert(3, "with several samples each of these is mean@n, and pass@k and majority@k go by strict")
    if any("episodes" in row["figures"] for _, row in rows):
        words.append("invalid and failed calls: those that could not be made and those in which the tool did wrong")
    if field_verdicts(rows):
        words.insert(3, "field: the rules of lm-evaluation-harness, #### and the last number, which know no <answer>")
    if any("success" in row["figures"] for _, row in rows):
        words.insert(0, "success: the environment gave more than 0")
    text = "; ".join(words)
    return text[0].upper() + text[1:] + "."


STAGES = {"base": "base", "warm_start": "after warm start", "final": "after GRPO", "eval": "this model"}
LONGEST_LINES, LONGEST_CHARACTERS = 16, 1200


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
    for row in summary.get("evaluations", ()):
        if played := episode_line(row):
            yield f"Episodes, {stage_label(row['stage'])}: {played}."
    for way in dict.fromkeys(condition_line(row) for row in summary.get("evaluations", ()) if row.get("conditions")):
        yield f"Asked: {way}."
    paired = summary.get("comparison")
    if paired:
        told = changes(paired).replace(" problems", "", 1)
        test, verdict = paired.get("test", "exact McNemar test"), paired.get("verdict", "strict")
        by = "" if verdict == "strict" else f", by {verdict}"
        yield (
            f"Problem by problem{by}, {stage_label(paired['before'])} -> {stage_label(paired['after'])}: {told} ({test}, "
            f"p = {paired['p_value']:.2g})."
        )
    if summary.get("seconds") is not None:
        yield f"The whole run took {clock(summary['seconds'])}."


def episode_line(row: Mapping[str, Any]) -> str:
    """``success 51.0% [44.1, 57.9], tokens sampled 41.2, turns 2.1 ...`` of an evaluation; empty where it played no episodes."""
    figures = row.get("figures", {})
    played, success = figures.get("episodes", {}), figures.get("success")
    cells = [f"{name.strip()} {_played(figures, key, write)}" for key, name, write in EPISODES if key in played]
    return ", ".join([*([f"success {interval(success[0], success[1:])}"] if success else []), *cells])


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
    """A word and its colour. Where an environment judged, its judgement; else that of the answer."""
    if "success" in record:
        if record["success"] is None:
            return "not judged", "yellow"
        return ("success", "green") if record["success"] else ("no success", "red")
    if record["strict"]:
        return "right", "green"
    if record["strict"] is None:
        return "not checked: math-verify gave no verdict", "yellow"
    if record["lenient"] is None:
        return "wrong in the place asked for, and not checked elsewhere", "red"
    return ("right, but not in the place asked for", "yellow") if record["lenient"] else ("wrong", "red")


def answer_text(record: Mapping[str, Any], text: MakeText) -> Text:
    word, colour = verdict(record)
    if "success" in record:
        judged = "" if record["reward"] is None else f"the environment's reward {record['reward']:.3g}"
    else:
        judged = "found " + ("nothing" if record.get("extracted") is None else f"{record['extracted']!s:.80}")
    said = ", ".join(filter(None, [judged, CUT_SHORT.get(str(record.get("finish_reason")))]))
    return text(shortened(str(record["response"]))) + text(f"\n{word}", f"bold {colour}") + text(f" ({said})", "dim")


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
