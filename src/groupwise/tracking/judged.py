"""How ``groupwise eval`` shows what it found: tables of figures, how the models were asked, and what lies between two of them."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from groupwise.tracking.numbers import interval, percent

__all__ = ["changes", "comparison_lines", "condition_line", "condition_lines", "judged_tables", "legend"]

Rows = Sequence[tuple[str, Mapping[str, Any]]]
"""A model's name and one of its evaluations, as ``Evaluation.to_summary`` has it."""
MakeText = Callable[..., Text]
PLACES = {"xml": "<answer>", "boxed": "\\boxed{}", "plain": "####"}
VERDICTS = (("strict", "strict"), ("lenient", "lenient"), ("latex", "LaTeX"))
FIELD = (("field_strict", "field: strict"), ("field_flexible", "field: flexible"))
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
    found = [row["figures"] for _, row in rows]
    for key, name in (*VERDICTS, *field_verdicts(rows)):
        if any(key in one for one in found):
            yield name, [with_interval(one.get(key)) for one in found]
    for key, name in (("pass_at", "pass@{}"), ("majority_at", "majority@{}")):
        for k in sorted({int(k) for one in found for k in one.get(key, {})} - {1}):
            yield name.format(k), [with_interval(one.get(key, {}).get(str(k))) for one in found]
    yield "in the format", [percent(row["format_rate"]) for _, row in rows]
    if any("unchecked" in one for one in found):
        yield "not checked, left out", [str(one.get("unchecked", 0)) for one in found]
    yield "stopped", [percent(row["stop_rate"]) for _, row in rows]
    yield "tokens, mean", [f"{row['mean_tokens']:.0f}" for _, row in rows]


def with_interval(found: Sequence[float] | None) -> str:
    return "-" if found is None else interval(found[0], found[1:])


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
    known = row["temperature"] is not None
    how = f"temperature {row['temperature']:g}" if known and row["mode"] != "greedy" else "greedy (temperature 0)"
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
        adjusted = f", {row['p_adjusted']:.2g} after Holm" if row.get("p_adjusted", row["p_value"]) != row["p_value"] else ""
        yield (
            f"{row['before']} -> {row['after']}, {row['mode']}: {100 * row['difference']:+.1f} points [{low:+.1f}, {high:+.1f}] strict; "
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
    if field_verdicts(rows):
        words.insert(3, "field: the rules of lm-evaluation-harness, #### and the last number, which know no <answer>")
    text = "; ".join(words)
    return text[0].upper() + text[1:] + "."
