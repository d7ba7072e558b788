"""Problems to learn from and problems to be judged by, from any source, with a split that is the same every time."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from groupwise.config.schema import DataConfig
from groupwise.data import prepared
from groupwise.data.answers import AnswerStyle
from groupwise.data.arithmetic import generate
from groupwise.data.columns import find_columns, to_problem
from groupwise.data.named import NAMED, canonical_name, local_copy, named_folder
from groupwise.data.prompts import default_style
from groupwise.data.readers import read_table
from groupwise.errors import AnswerError, DataError
from groupwise.types import Problem

__all__ = ["ProblemSet", "default_eval_split", "held_out_from", "load_held_out", "load_problems", "question_key", "save_prepared"]

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

    @property
    def fingerprint(self) -> str:
        """16 hex digits over every id, question and answer of both parts: equal data, equal fingerprint."""
        digest = hashlib.blake2b(digest_size=8)
        for part in (self.train, self.held_out):
            for p in part:
                digest.update(json.dumps([p.id, question_key(p), *p.accepted]).encode())
            digest.update(b"|")
        return digest.hexdigest()


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
    """Equal for questions that are the same but for white space and capitals."""
    question = problem.question
    text = question if isinstance(question, str) else "\n".join(f"{m['role']}: {m['content']}" for m in question)
    return " ".join(text.split()).lower()


def load_problems(data: DataConfig) -> ProblemSet:
    """Read, check and split the problems of ``data``. The same config and files give the same result, whatever the run's seed.

    Raises DataError (missing, unreadable or empty source, columns) and AnswerError (a reference answer that cannot be
    extracted), each naming the file and row.
    """
    dropped: Counter[str] = Counter()
    if data.source == "arithmetic":
        train = generate(data.arithmetic, data.limit or data.arithmetic.problems, data.split_seed, "train")
    else:
        train = _read(data, data.source, data.split, dropped)
    held_out = _named_held_out(data, dropped)
    if held_out is None:
        train, held_out = _hold_out(train, data, dropped)
    else:
        train, held_out = _keep_apart(train, held_out, data, dropped)
    if not train:
        raise DataError(
            f"data source {data.source!r} has no training problems left: lower data.holdout or check the dropped rows"
        )
    train = train[: data.limit]
    counted = {reason: count for reason, count in sorted(dropped.items()) if count}
    for reason, count in counted.items():
        log.warning("%d rows of %s were dropped: %s", count, data.source, reason)
    description = f"{len(train):,} training and {len(held_out):,} held-out problems from {data.source}"
    return ProblemSet(tuple(train), tuple(held_out), default_style(data), counted, description)


def load_held_out(data: DataConfig) -> tuple[Problem, ...]:
    """The held-out problems alone, for judging a model that is not trained here: an evaluation source or split that config names
    is used whole, even where the training source is the same file. The order is that of ``load_problems``.

    Raises what ``load_problems`` raises.
    """
    if data.eval_source is None and data.eval_split is None:
        return load_problems(data).held_out
    dropped: Counter[str] = Counter()
    held_out = _named_held_out(data, dropped) or []
    for reason, count in dropped.items():
        log.warning("%d rows of %s were dropped: %s", count, data.eval_source or data.source, reason)
    return tuple(sorted(held_out, key=lambda p: _rank(p, data.split_seed)))


def _read(data: DataConfig, source: str, split: str, dropped: Counter[str]) -> list[Problem]:
    if prepared.is_prepared(source):
        return prepared.load_part(source, "train" if split == "train" else "held_out")
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
    if data.eval_source == "arithmetic" or (data.source == "arithmetic" and data.eval_source is None):
        return generate(data.arithmetic, data.holdout, data.split_seed, "held_out")
    if data.eval_source is not None:
        return _read(data, data.eval_source, data.eval_split or default_eval_split(data.eval_source), dropped)
    if data.eval_split is not None:
        if data.eval_split == data.split:
            raise DataError(
                f"data.eval_split and data.split are both {data.split!r}: name another split, or use data.holdout alone"
            )
        return _read(data, data.source, data.eval_split, dropped)
    return prepared.load_part(data.source, "held_out") if prepared.is_prepared(data.source) else None


def _rank(problem: Problem, seed: int) -> bytes:
    """Position in the seeded order. It depends on the question alone: adding rows to a file moves no other row across."""
    return hashlib.blake2b(f"{seed}/{question_key(problem)}".encode(), digest_size=16).digest()


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
    if prepared.is_prepared(data.source) and data.eval_source is None:
        return apart, list(held_out)  # already in its order
    ids = {p.id for p in apart}
    renamed = [replace(p, id=f"eval:{p.id}") if p.id in ids else p for p in held_out]
    return apart, sorted(renamed, key=lambda p: _rank(p, data.split_seed))


def save_prepared(problem_set: ProblemSet, folder: str) -> None:
    """Write the set as a folder that ``data.source`` accepts; see ``prepared.py`` for the format. Atomic: all or nothing."""
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
    prepared.write(folder, parts, facts)
