"""Recorded completions: a small table of numbers to filter by, and the texts in portions that are unpacked when looked at."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any

from groupwise.report.curves import short
from groupwise.report.packing import pack_columns, pack_json
from groupwise.report.pieces import TokenPieces
from groupwise.tracking.reading import CompletionRecord, RunRecord

__all__ = ["COLUMNS", "Portions", "around_questions", "transcripts"]

PORTION = 150_000
"""Characters of text after which a portion is closed: small enough to unpack in a few milliseconds."""
COLUMNS = ("step", "problem", "sample", "tokens", "group", "reward", "advantage", "flags")
"""int32 up to ``group``, then two float32 (NaN: not known), then a byte of flags."""
RIGHT, WRONG, LENIENT, TRUNCATED = 1, 2, 4, 8

Portions = list[str]


def transcripts(run: RunRecord) -> tuple[dict[str, Any], Portions]:
    """The table (as JSON, columns packed) and the packed portions of text.

    A portion is a list of groups; a group is ``{prompt, expected, problem, step, rows}`` with one row ``{t, c}`` per completion:
    its text and its components' scores in the order of ``components``. Where tokens were recorded there are also ``x`` (what special
    tokens at the end add to the text), ``n`` (the length of each token's text, in UTF-16 units), ``lp`` (log-probabilities in bytes,
    see ``logprob_byte``), and ``ta`` (their own advantages, where tokens of one completion differ in them).
    """
    names = list(dict.fromkeys(name for record in run.completions for name in record.components))
    groups = [list(rows) for _, rows in groupby(run.completions, key=lambda r: (r.step, r.problem, r.occurrence))]
    problems = {name: i for i, name in enumerate(dict.fromkeys(record.problem for record in run.completions))}
    columns = fill_columns(groups, problems)
    starts, portions = fill_portions(groups, names, TokenPieces(run))
    table = {
        "count": len(run.completions),
        "problems": list(problems),
        "components": names,
        "columns": pack_columns(columns),
        "starts": starts,
        "around": [utf16_length(part) for part in around_questions([group[0].prompt for group in groups])],
    }
    return table, portions


def around_questions(prompts: Sequence[str]) -> tuple[str, str]:
    """What all prompts begin and end with: the template, the system prompt, worked examples. Between them stands the question,
    whatever the template. Cut at the ends of lines and at marks, so that words which questions share stay with them.

    >>> around_questions(["<user>\\nWhat is 1 + 1?</user>", "<user>\\nWhat is 2 + 2?</user>"])
    ('<user>\\n', '</user>')
    """
    different = set(prompts)
    if len(different) < 2:
        return "", ""
    before = common_beginning(different)
    after = common_beginning({prompt[::-1] for prompt in different})[::-1]
    before = before[: before.rfind("\n") + 1]
    starts = [at for mark in "<[\n" if (at := after.find(mark)) >= 0]
    return before, after[min(starts) :] if starts else ""


def common_beginning(texts: Collection[str]) -> str:
    """Of all of them: what the first and the last in order share."""
    first, last = min(texts), max(texts)
    return first[: next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))]


def fill_columns(groups: Sequence[Sequence[CompletionRecord]], problems: dict[str, int]) -> list[array[Any]]:
    whole: list[array[int]] = [array("i") for _ in range(5)]
    parts: list[array[float]] = [array("f") for _ in range(2)]
    flags: array[int] = array("B")
    for number, group in enumerate(groups):
        for r in group:
            for column, value in zip(whole, (r.step, problems[r.problem], r.sample, r.tokens, number), strict=True):
                column.append(value)
            for part, known in zip(parts, (r.reward, r.advantage), strict=True):
                part.append(as_float32(known))
            flags.append(flags_of(r))
    return [*whole, *parts, flags]


def as_float32(value: float | None) -> float:
    """NaN for what is not known; larger than a float32 holds becomes the largest that it does."""
    return float("nan") if value is None else max(-3.4e38, min(3.4e38, value))


def flags_of(record: CompletionRecord) -> int:
    return (
        (RIGHT if record.strict else 0)
        | (WRONG if record.strict is False else 0)
        | (LENIENT if record.lenient else 0)
        | (TRUNCATED if record.truncated else 0)
    )


def fill_portions(
    groups: Sequence[Sequence[CompletionRecord]], names: Sequence[str], pieces: TokenPieces
) -> tuple[list[int], Portions]:
    """The number of each portion's first group, and the portions."""
    starts: list[int] = []
    portions: Portions = []
    waiting: list[dict[str, Any]] = []
    size = 0
    for number, group in enumerate(groups):
        if not waiting:
            starts.append(number)
        waiting.append(as_group(group, names, pieces))
        size += sum(len(r.text) for r in group) + len(group[0].prompt)
        if size >= PORTION:
            portions.append(pack_json(waiting))
            waiting, size = [], 0
    if waiting:
        portions.append(pack_json(waiting))
    return starts, portions


def as_group(group: Sequence[CompletionRecord], names: Sequence[str], pieces: TokenPieces) -> dict[str, Any]:
    first = group[0]
    return {
        "prompt": first.prompt,
        "expected": first.expected,
        "problem": first.problem,
        "step": first.step,
        "rows": [as_row(record, names, pieces) for record in group],
    }


def as_row(record: CompletionRecord, names: Sequence[str], pieces: TokenPieces) -> dict[str, Any]:
    row: dict[str, Any] = {"t": record.text, "c": [rounded(record.components.get(name)) for name in names]}
    texts = pieces.of(record)
    whole = "".join(texts)
    if texts and whole.startswith(record.text):
        row["x"] = whole[len(record.text) :]
        row["n"] = [utf16_length(text) for text in texts]
        row["lp"] = base64.b64encode(bytes(map(logprob_byte, record.logprobs))).decode("ascii")
        if record.token_advantages:
            row["ta"] = [0.0 if math.isnan(x) else short(x) for x in record.token_advantages]
    return row


def utf16_length(text: str) -> int:
    """As the page's language counts characters."""
    return len(text.encode("utf-16-le")) // 2


def logprob_byte(logprob: float) -> int:
    """A log-probability in one byte, exact to 0.03 nats at -1 and to 0.0001 near 0: ``-16 (byte / 255)^2``. NaN is the smallest."""
    return 255 if math.isnan(logprob) else round(255 * math.sqrt(min(max(-logprob, 0.0), 16.0) / 16))


def rounded(value: float | None) -> float | None:
    return None if value is None else short(value)
