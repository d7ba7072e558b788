"""From a raw row to a problem: which column is the question, which the answer, and what the rest becomes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from groupwise.config.schema import DataConfig
from groupwise.data.answers import AnswerFormat, extract_reference
from groupwise.data.readers import Row, Table
from groupwise.errors import AnswerError, DataError
from groupwise.types import Message, Problem

__all__ = ["ANSWER_NAMES", "PROMPT_NAMES", "ColumnMap", "find_columns", "to_problem"]

PROMPT_NAMES = ("prompt", "question", "problem", "input", "instruction")
ANSWER_NAMES = ("answer", "solution", "output", "response", "completion")
SURE_ANSWER_NAMES = ("answer", "final_answer", "ground_truth", "reward_model.ground_truth")
"""Where one of these exists it is the answer, and a ``solution`` beside it is the worked text. The last is verl's layout."""
SVAMP_COLUMNS = ("Body", "Question", "Answer")


@dataclass(frozen=True, slots=True)
class ColumnMap:
    """Columns by name; a dot reaches into a column of records (``reward_model.ground_truth``)."""

    prompt: tuple[str, ...]
    """Joined by a space: SVAMP keeps story and question apart."""
    answer: str


def find_columns(table: Table, data: DataConfig) -> ColumnMap:
    """The columns that config names, or else those with usual names. Raises DataError where they are missing or ambiguous."""
    columns = table.columns
    if data.prompt_column is None and data.answer_column is None and set(SVAMP_COLUMNS) <= set(columns):
        return ColumnMap(("Body", "Question"), "Answer")
    first = table.rows[0].values
    prompt = _named(data.prompt_column, "prompt_column", columns, first) or _found(PROMPT_NAMES, "prompt", columns)
    answer = _named(data.answer_column, "answer_column", columns, first) or _found_answer(columns, first, prompt)
    return ColumnMap((prompt,), answer)


def _named(name: str | None, key: str, columns: Sequence[str], first: Mapping[str, Any]) -> str | None:
    if name is None or name in columns or _reach(first, name) is not None:
        return name
    raise DataError(f"data.{key} is {name!r}, but the columns are {_listed(columns)}: set data.{key} to one of them")


def _found(names: Sequence[str], what: str, columns: Sequence[str]) -> str:
    found = _candidates(names, columns)
    if len(found) == 1:
        return found[0]
    if not found:
        raise DataError(f"no {what} column was found among {_listed(columns)}: set data.{what}_column to the right one")
    raise DataError(
        f"{' and '.join(map(repr, found))} could each be the {what} column: set data.{what}_column (columns: {_listed(columns)})"
    )


def _found_answer(columns: Sequence[str], first: Mapping[str, Any], prompt: str) -> str:
    nested = [name for name in SURE_ANSWER_NAMES if "." in name and _reach(first, name) is not None]
    sure = [name for name in _candidates(SURE_ANSWER_NAMES, columns) if name != prompt] + nested
    if sure:
        return sure[0]
    return _found(ANSWER_NAMES, "answer", [c for c in columns if c != prompt])


def _candidates(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Columns with one of ``names``, in any case; the exact spelling first where both exist."""
    lowered = {c.lower(): c for c in reversed(columns)} | {c: c for c in columns}
    return list(dict.fromkeys(lowered[name] for name in names if name in lowered))


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(map(repr, columns)) or "none at all"


def _reach(values: Mapping[str, Any], name: str) -> Any:
    if name in values:
        return values[name]
    found: Any = values
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def to_problem(row: Row, columns: ColumnMap, answer_format: AnswerFormat, problem_id: str) -> Problem:
    """The row as a problem. Raises AnswerError (reference answer) or DataError (question), naming the row.

    ``columns["solution"]`` is the worked text: the row's ``solution``, or the answer column where the answer is a part of it.
    """
    question = _question(row, columns.prompt)
    raw = _reach(row.values, columns.answer)
    try:
        texts = _answer_texts(raw)
        answer, *also = dict.fromkeys(extract_reference(text, answer_format) for text in texts)
    except AnswerError as error:
        raise AnswerError(f"{row.name}, column {columns.answer!r}: {error} (or set data.on_bad_answer to drop)") from error
    rest = {name: value for name, value in row.values.items() if name not in (*columns.prompt, columns.answer)}
    if "solution" not in rest and texts[0].strip() != answer:
        rest["solution"] = texts[0]
    return Problem(problem_id, question, answer, rest, tuple(also))


def _answer_texts(value: Any) -> list[str]:
    """One text, or of a list every one: each is an answer that counts as right."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return [_answer_text(value)]
    if not value:
        raise AnswerError("the answer is an empty list: correct the row")
    return [_answer_text(one) for one in value]


def _answer_text(value: Any) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        raise AnswerError("the answer is missing: correct the row")
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else format(Decimal(repr(value)), "f")
    if isinstance(value, (str, int, Decimal)):
        return str(value)
    raise AnswerError(f"the answer is a {type(value).__name__}, not text or a number: set data.answer_column to a plain column")


def _question(row: Row, names: Sequence[str]) -> str | tuple[Message, ...]:
    values = [_reach(row.values, name) for name in names]
    if len(values) == 1 and isinstance(values[0], (list, tuple)):
        return _messages(row, values[0], names[0])
    parts = []
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str) or not value.strip():
            found = "is empty" if value is None or value == "" or isinstance(value, str) else f"holds a {type(value).__name__}"
            raise DataError(
                f"{row.name}, column {name!r} {found}, and a question must be text or a list of messages: correct the row"
            )
        parts.append(value.strip())
    return " ".join(part if part[-1] in ".?!,:" or part is parts[-1] else part + "." for part in parts)


def _messages(row: Row, turns: Sequence[Any], name: str) -> tuple[Message, ...]:
    messages: list[Message] = []
    for turn in turns:
        if not isinstance(turn, Mapping) or not isinstance(turn.get("role"), str) or not isinstance(turn.get("content"), str):
            raise DataError(f"{row.name}, column {name!r} has a turn that is no {{role, content}} pair of texts: correct the row")
        messages.append({"role": turn["role"], "content": turn["content"]})
    if not messages or messages[-1]["role"] != "user":
        last = repr(messages[-1]["role"]) if messages else "missing"
        raise DataError(
            f"{row.name}, column {name!r} is a conversation whose last turn is {last}: it must end with the user's turn"
        )
    return tuple(messages)
