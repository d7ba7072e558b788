"""Problems to learn from and problems to be judged by, from any source: columns found, rows read as problems, and a split that is the
same every time.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from decimal import Decimal
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from groupwise.config.inert import chosen
from groupwise.config.schema import DataConfig
from groupwise.data.answers import AnswerFormat, AnswerStyle, extract_reference
from groupwise.data.arithmetic import generate
from groupwise.data.named import (
    NAMED,
    canonical_name,
    check_named_folder,
    is_prepared,
    load_prepared,
    local_copy,
    named_folder,
    write_prepared,
)
from groupwise.data.prompts import default_style
from groupwise.data.readers import Row, Table, place_of, read_table, read_whole
from groupwise.errors import AnswerError, DataError
from groupwise.types import Message, Problem

__all__ = [
    "ANSWER_NAMES",
    "PROMPT_NAMES",
    "ColumnMap",
    "ProblemSet",
    "default_eval_split",
    "find_columns",
    "has_answers",
    "held_out_from",
    "load_held_out",
    "load_problems",
    "order_key",
    "question_key",
    "refuse_inert",
    "save_prepared",
    "to_problem",
]

log = logging.getLogger(__name__)

DEFAULT_EVAL_SPLIT = "test"
"""Split of ``data.eval_source`` where ``data.eval_split`` is not set and its name does not say more."""


@dataclass(frozen=True)
class ProblemSet:
    """What ``load_problems`` returns. No question stands on both sides."""

    train: tuple[Problem, ...]
    held_out: tuple[Problem, ...]
    """In a seeded order, so that its first n are a fair sample even where the file is sorted by difficulty."""
    answer_style: AnswerStyle
    """Where completions for this data usually put their answer; a system prompt may ask for another place."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Rows that are in neither part, counted by reason."""
    description: str = ""

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits over every id, question and answer of both parts: equal data, equal fingerprint."""
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.train, self.held_out):
            for p in part:
                digest.update(json.dumps([p.id, order_key(p), *p.accepted]).encode())
            digest.update(b"|")
        return digest.hexdigest()

    @cached_property
    def columns_fingerprint(self) -> str:
        """The same over the other columns, which reward functions and environments see."""
        digest = hashlib.blake2b(digest_size=8)
        for p in (*self.train, *self.held_out):
            columns = sorted(p.columns.items(), key=lambda column: str(column[0]))
            digest.update(json.dumps(columns, skipkeys=True, default=_plain).encode())
        return digest.hexdigest()


def _plain(value: Any) -> Any:
    """What JSON has no form for, in one that every process gives it. Of an object only its type: its text may hold its address."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return str(value) if isinstance(value, (bytes, date, Decimal)) else type(value).__name__


def default_eval_split(source: str) -> str:
    name = canonical_name(source)
    return NAMED[name].eval_split if name else DEFAULT_EVAL_SPLIT


def held_out_from(data: DataConfig, problems: int | None = None) -> str:
    """Where the held-out problems come from, for a person: the source, its split, and the copy or Hub repository that was read.

    ``problems``: how many it has; a copy of a named data set with another number than the original is told apart from it.
    """
    source = data.eval_source or data.source
    if source == "arithmetic":
        return "arithmetic (generated, held out)"
    if data.eval_source is None and data.eval_split is None:
        return f"{source}, held out"
    split = data.eval_split or default_eval_split(source)
    name = canonical_name(source)
    if name is None:
        return source if Path(source).expanduser().is_file() else f"{source}:{split}"
    copy = local_copy(name, split, named_folder(data.folder))
    where = f"the Hub's {NAMED[name].hub}" if copy is None else f"the copy {copy.parent.name}/{copy.name}"
    original = NAMED[name].rows if split == NAMED[name].eval_split else None
    if copy is not None and problems is not None and original not in (problems, None):
        where += f", which has {problems:,} problems where the original has {original:,}"
    return f"{name}:{split} ({where})"


def question_key(problem: Problem) -> str:
    """Equal for questions that are the same but for white space and capitals. A conversation that is one turn of the user is its text."""
    question = problem.question
    alone = not isinstance(question, str) and len(question) == 1 and question[0]["role"] == "user"
    return order_key(replace(problem, question=question[0]["content"]) if alone else problem)  # type: ignore[index]


def order_key(problem: Problem) -> str:
    """What orders and fingerprints are made of: ``question_key``, but that a conversation has its roles in any case. Another key would
    move the split of every run so far."""
    question = problem.question
    text = question if isinstance(question, str) else "\n".join(f"{m['role']}: {m['content']}" for m in question)
    return " ".join(text.split()).lower()


def load_problems(data: DataConfig) -> ProblemSet:
    """Read, check and split the problems of ``data``. The same config and files give the same result, whatever the run's seed.

    Raises DataError (missing, unreadable or empty source, columns) and AnswerError (a reference answer that cannot be
    extracted), each naming the file and row.
    """
    dropped: Counter[str] = Counter()
    dropped_held_out: Counter[str] = Counter()
    refuse_inert(data)
    if data.source == "arithmetic":
        problems = data.arithmetic.problems
        train = generate(data.arithmetic, min(data.limit or problems, problems), data.split_seed, "train")
    else:
        train = _read(data, data.source, data.split, dropped)
    held_out = _named_held_out(data, dropped_held_out)
    if held_out is None:
        train, held_out = _hold_out(train, data, dropped)
    else:
        train, held_out = _keep_apart(train, held_out, data, dropped)
    if not train and held_out:
        raise DataError(
            f"every question of data source {data.source!r} is also among the {len(held_out):,} held-out ones of {held_out_from(data)}, "
            "which are not trained on: name other rows in data.eval_source or data.eval_split, or leave both out for data.holdout"
        )
    if not train:
        raise DataError(
            f"data source {data.source!r} has no training problems left: lower data.holdout or check the dropped rows"
        )
    train = train[: data.limit]
    _say_dropped(dropped, data.source)
    _say_dropped(dropped_held_out, data.eval_source or data.source)
    counted = dict(sorted((dropped + dropped_held_out).items()))
    description = f"{len(train):,} training and {len(held_out):,} held-out problems from {data.source}"
    return ProblemSet(tuple(train), tuple(held_out), default_style(data), counted, description)


def load_held_out(data: DataConfig) -> tuple[Problem, ...]:
    """The held-out problems alone, for judging a model that is not trained here: an evaluation source or split that config names
    is used whole, even where the training source is the same file. The order is that of ``load_problems``.

    Raises what ``load_problems`` raises.
    """
    if data.eval_source is None and data.eval_split is None:
        return load_problems(data).held_out
    refuse_inert(data)
    dropped: Counter[str] = Counter()
    held_out = _named_held_out(data, dropped) or []
    _say_dropped(dropped, data.eval_source or data.source)
    return tuple(sorted(held_out, key=lambda p: _rank(p, data.split_seed)))


def _say_dropped(dropped: Counter[str], source: str) -> None:
    for reason, count in sorted((+dropped).items()):
        log.warning("%d rows of %s were dropped: %s", count, source, reason)


def refuse_inert(data: DataConfig) -> None:
    """Raise DataError for settings that do nothing with these sources. ``config.inert`` has those that need no look at the disk."""
    check_named_folder(data.folder, [data.source, data.eval_source or ""])
    # Of another source (if that is one file, a recipe's `eval_split` may stay and does nothing), or refused when it is read.
    elsewhere = data.eval_source is not None or data.eval_split == data.split
    held_out = data.eval_source
    # A held-out source that is not known by name is read with `subset` too.
    shared = held_out not in (None, "arithmetic") and not (canonical_name(held_out) or read_whole(held_out))
    written = chosen(data, "split", *([] if shared else ["subset"]), *([] if elsewhere else ["eval_split"]))
    whole = read_whole(data.source)
    if written and whole:
        default = "train" if written[0] == "split" else "null"
        raise DataError(
            f"data.{written[0]} is {getattr(data, written[0])!r}, but {data.source!r} is {whole}, which has no such thing: leave it out "
            f"(where a recipe has it: data.{written[0]}={default}); held-out problems come from data.eval_source, or are data.holdout of "
            "its own"
        )
    known = NAMED.get(canonical_name(data.source) or "")
    if chosen(data, "subset") and not shared and data.subset != (known and known.subset) and not is_prepared(data.source):
        place = place_of(data.source, data.split, named_folder(data.folder))
        if place is not None and not (place / str(data.subset)).is_dir():
            raise DataError(
                f"data.subset is {data.subset!r}, but {str(place)!r} has no folder of that name: correct it, or leave it out to read "
                "what is there"
            )


def _read(data: DataConfig, source: str, split: str, dropped: Counter[str]) -> list[Problem]:
    if is_prepared(source):
        return load_prepared(source, "train" if split == "train" else "held_out")
    name = canonical_name(source)
    another = name is not None and name != canonical_name(data.source)
    if another and data.source != "arithmetic":  # which has no columns: those of the settings are not its own
        data = data.model_copy(update=dict.fromkeys(("subset", "prompt_column", "answer_column")) | {"answer_format": "auto"})
    table = read_table(source, split, data.subset, named_folder(data.folder))
    columns = find_columns(table, data)
    problems = []
    for index, row in enumerate(table.rows):
        try:
            problems.append(to_problem(row, columns, data.answer_format, f"{table.label}:{table.split}:{index}"))
        except DataError as error:
            if data.on_bad_answer == "error":
                raise type(error)(f"{source}: {error}") from error
            dropped["bad answer" if isinstance(error, AnswerError) else "bad question"] += 1
    if not problems:
        raise DataError(f"all {len(table.rows)} rows of {source!r} were dropped: check data.answer_column and data.answer_format")
    return problems


def _named_held_out(data: DataConfig, dropped: Counter[str]) -> list[Problem] | None:
    """Held-out problems from a source or split that config names, or from a prepared folder's own; ``None`` to split them off."""
    if data.generates_held_out:
        return generate(data.arithmetic, data.holdout, data.split_seed, "held_out")
    if data.eval_source is not None:
        return _read(data, data.eval_source, data.eval_split or default_eval_split(data.eval_source), dropped)
    if data.eval_split is not None:
        if data.eval_split == data.split:
            raise DataError(
                f"data.eval_split and data.split are both {data.split!r}: name another split, or use data.holdout alone"
            )
        return _read(data, data.source, data.eval_split, dropped)
    return load_prepared(data.source, "held_out") if is_prepared(data.source) else None


def _rank(problem: Problem, seed: int) -> bytes:
    """Position in the seeded order. It depends on the question alone: adding rows to a file moves no other row across."""
    return hashlib.blake2b(f"{seed}/{order_key(problem)}".encode(), digest_size=16).digest()


def _hold_out(problems: Sequence[Problem], data: DataConfig, dropped: Counter[str]) -> tuple[list[Problem], list[Problem]]:
    first_of: dict[str, Problem] = {}
    for problem in problems:
        first_of.setdefault(question_key(problem), problem)
    if data.holdout >= len(first_of):
        raise DataError(
            f"data.holdout is {data.holdout}, but {data.source!r} has only {len(first_of)} different questions: "
            "lower data.holdout, or name data.eval_source"
        )
    held_out = sorted(first_of.values(), key=lambda p: _rank(p, data.split_seed))[: data.holdout]
    taken = {question_key(p) for p in held_out}
    train = [p for p in problems if question_key(p) not in taken]
    dropped["same question as a held-out one"] += len(problems) - len(train) - len(held_out)
    return train, held_out


def _keep_apart(
    train: Sequence[Problem], held_out: Sequence[Problem], data: DataConfig, dropped: Counter[str]
) -> tuple[list[Problem], list[Problem]]:
    taken = {question_key(p) for p in held_out}
    apart = [p for p in train if question_key(p) not in taken]
    dropped["same question as a held-out one"] += len(train) - len(apart)
    if is_prepared(data.source) and data.eval_source is None:
        return apart, list(held_out)  # already in its order
    ids = {p.id for p in apart}
    renamed = [replace(p, id=f"eval:{p.id}") if p.id in ids else p for p in held_out]
    return apart, sorted(renamed, key=lambda p: _rank(p, data.split_seed))


def save_prepared(problem_set: ProblemSet, folder: str) -> None:
    """Write the set as a folder that ``data.source`` accepts; see ``named.py`` for the format. Atomic: all or nothing."""
    parts: dict[Literal["train", "held_out"], tuple[Problem, ...]] = {
        "train": problem_set.train,
        "held_out": problem_set.held_out,
    }
    facts = {
        "answer_style": problem_set.answer_style,
        "description": problem_set.description,
        "dropped": dict(problem_set.dropped),
        "fingerprint": problem_set.fingerprint,
    }
    write_prepared(folder, parts, facts)


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
    prompt = _named(data.prompt_column, "prompt_column", columns, first) or _found(PROMPT_NAMES, "prompt", columns, table.label)
    answer = _named(data.answer_column, "answer_column", columns, first) or _found_answer(columns, first, prompt, table.label)
    return ColumnMap((prompt,), answer)


def has_answers(data: DataConfig) -> bool:
    """Whether the data are asked for answers: not where the prompt's column is named as the answer's, and stands in for it."""
    asked, prompt = data.answer_column, data.prompt_column
    return asked is None or not (asked == prompt if prompt is not None else asked.lower() in PROMPT_NAMES)


def _named(name: str | None, key: str, columns: Sequence[str], first: Mapping[str, object]) -> str | None:
    if name is None or name in columns or _reach(first, name) is not None:
        return name
    raise DataError(f"data.{key} is {name!r}, but the columns are {_listed(columns)}: set data.{key} to one of them")


def _found(names: Sequence[str], what: str, columns: Sequence[str], label: str) -> str:
    candidates = _candidates(names, columns)
    if len(candidates) == 1:
        return candidates[0]
    if not candidates:
        raise DataError(
            f"no {what} column was found in {label} among {_listed(columns)}: set data.{what}_column to the right one"
        )
    raise DataError(
        f"{' and '.join(map(repr, candidates))} could each be the {what} column of {label}: set data.{what}_column "
        f"(columns: {_listed(columns)})"
    )


def _found_answer(columns: Sequence[str], first: Mapping[str, object], prompt: str, label: str) -> str:
    nested = [name for name in SURE_ANSWER_NAMES if "." in name and _reach(first, name) is not None]
    sure = [name for name in _candidates(SURE_ANSWER_NAMES, columns) if name != prompt] + nested
    if sure:
        return sure[0]
    return _found(ANSWER_NAMES, "answer", [c for c in columns if c != prompt], label)


def _candidates(names: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Columns with one of ``names``, in any case; the exact spelling first where both exist."""
    lowered = {c.lower(): c for c in reversed(columns)} | {c: c for c in columns}
    return list(dict.fromkeys(lowered[name] for name in names if name in lowered))


def _listed(columns: Sequence[str]) -> str:
    return ", ".join(map(repr, columns)) or "none at all"


def _reach(values: Mapping[str, object], name: str) -> object:
    if name in values:
        return values[name]
    value: object = values
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def to_problem(row: Row, columns: ColumnMap, answer_format: AnswerFormat, problem_id: str) -> Problem:
    """The row as a problem. Raises AnswerError (reference answer) or DataError (question), naming the row.

    ``columns`` has the answer column as it was, by its own name, unless that is ``answer``. ``columns["solution"]`` is the worked text: the
    row's ``solution`` (in any case), or the answer column where the answer is a part of it.
    """
    question = _question(row, columns.prompt)
    asked = [question] if isinstance(question, str) else [str(message["content"]) for message in question]
    without = columns.answer in columns.prompt  # prompts without answers: the question stands in, whatever is in it
    raw = asked[-1] if without else _reach(row.values, columns.answer)
    try:
        texts = _answer_texts(raw)
        answer, *also = dict.fromkeys(extract_reference(text, "plain" if without else answer_format) for text in texts)
    except AnswerError as error:
        raise AnswerError(f"{row.name}, column {columns.answer!r}: {error} (or set data.on_bad_answer to drop)") from error
    if not all(map(_is_whole, [*asked, answer, *also])):
        raise DataError(f"{row.name} holds half a character (a surrogate by itself), which is no text: correct the row")
    rest = {name: value for name, value in row.values.items() if name not in columns.prompt}
    if columns.answer in ("answer", "solution"):  # which mean what was read, and the worked text
        rest.pop(columns.answer, None)
    worked = _candidates(("solution",), [name for name in rest if name != columns.answer])
    if worked and columns.answer != "solution":
        rest["solution"] = rest[worked[0]]
    elif columns.answer.lower() == "solution" or texts[0].strip() != answer:
        rest["solution"] = texts[0]
    return Problem(problem_id, question, answer, rest, tuple(also))


def _is_whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _answer_texts(value: object) -> list[str]:
    """One text, or of a list every one: each is an answer that counts as right."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return [_answer_text(value)]
    if not value:
        raise AnswerError("the answer is an empty list: correct the row")
    return [_answer_text(one) for one in value]


def _answer_text(value: object) -> str:
    if value is None or (isinstance(value, (float, Decimal)) and not Decimal(value).is_finite()):
        raise AnswerError("the answer is missing: correct the row")
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else format(Decimal(repr(value)), "f")
    if isinstance(value, Decimal):  # as text, a zero with eight places is 0E-8, which no answer equals
        return format(value, "f")
    if isinstance(value, (str, int)):
        return str(value)
    raise AnswerError(f"the answer is a {type(value).__name__}, not text or a number: set data.answer_column to a plain column")


def _question(row: Row, names: Sequence[str]) -> str | tuple[Message, ...]:
    values = [_reach(row.values, name) for name in names]
    if len(values) == 1 and isinstance(values[0], (list, tuple)):
        return _messages(row, values[0], names[0])
    parts = []
    for name, value in zip(names, values, strict=True):
        if not isinstance(value, str) or not value.strip():
            wrong = "is empty" if value is None or value == "" or isinstance(value, str) else f"holds a {type(value).__name__}"
            raise DataError(
                f"{row.name}, column {name!r} {wrong}, and a question must be text or a list of messages: correct the row"
            )
        parts.append(value.strip())
    return " ".join(part if part[-1] in ".?!,:" or part is parts[-1] else part + "." for part in parts)


def _messages(row: Row, turns: Sequence[object], name: str) -> tuple[Message, ...]:
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
