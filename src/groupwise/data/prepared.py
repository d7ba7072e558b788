"""Prepared problem sets on disk: checked and split once, then read without looking for columns or answers again.

A folder of three UTF-8 files. ``train.jsonl`` and ``held_out.jsonl`` hold one object a line: ``id``, ``question`` (text, or a
list of ``{role, content}``), ``answer``, ``columns`` (an object), and where further answers are right too ``also``, a list of them.
``metadata.json`` holds ``format`` (``groupwise-problems``), ``version``, ``counts``, ``answer_style``, ``description``, ``dropped`` and
``fingerprint``.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from groupwise.data.answers import AnswerStyle
from groupwise.data.named import canonical_name
from groupwise.errors import DataError
from groupwise.types import Problem

__all__ = ["Part", "answer_style", "is_prepared", "load_part", "write"]

Part = Literal["train", "held_out"]
FORMAT = "groupwise-problems"
VERSION = 1


def is_prepared(source: str) -> bool:
    """Whether ``source`` is a folder that ``groupwise data prepare`` wrote."""
    return canonical_name(source) is None and _metadata(Path(source).expanduser()) is not None


def answer_style(source: str) -> AnswerStyle | None:
    found = (_metadata(Path(source).expanduser()) or {}).get("answer_style") if canonical_name(source) is None else None
    return found if found in ("xml", "boxed", "plain") else None


def _metadata(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None


def load_part(source: str, part: Part) -> list[Problem]:
    """One side of a prepared folder. Raises DataError where the file is damaged or its length is not the recorded one."""
    folder = Path(source).expanduser()
    metadata = _metadata(folder) or {}
    if metadata.get("version") != VERSION:
        raise DataError(f"{source!r} is a prepared set of version {metadata.get('version')}, not {VERSION}: prepare it again")
    file = folder / f"{part}.jsonl"
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        problems = [_problem(json.loads(line)) for line in lines if line]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{str(file)!r} is damaged ({type(error).__name__}: {error}): prepare the set again") from error
    expected = metadata.get("counts", {}).get(part)
    if expected != len(problems):
        raise DataError(f"{str(file)!r} has {len(problems)} problems, but its metadata says {expected}: prepare the set again")
    return problems


def _problem(row: Mapping[str, Any]) -> Problem:
    question = row["question"] if isinstance(row["question"], str) else tuple(row["question"])
    return Problem(row["id"], question, row["answer"], row["columns"], tuple(row.get("also", ())))


def write(folder: str, parts: Mapping[Part, Sequence[Problem]], facts: Mapping[str, Any]) -> None:
    """Write beside ``folder`` and rename into place. An older prepared set there is replaced; anything else is left alone."""
    target = Path(folder).expanduser()
    if target.exists() and not (target.is_dir() and (is_prepared(str(target)) or not any(target.iterdir()))):
        raise DataError(f"{folder!r} exists and is not a prepared problem set: choose another folder")
    metadata = {"format": FORMAT, "version": VERSION, "counts": {name: len(part) for name, part in parts.items()}, **facts}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        try:
            unfinished.chmod(0o755)  # mkdtemp makes it private
            for name, part in parts.items():
                text = "".join(json.dumps(_row(p), ensure_ascii=False, default=str) + "\n" for p in part)
                (unfinished / f"{name}.jsonl").write_text(text, encoding="utf-8")
            (unfinished / "metadata.json").write_text(json.dumps(metadata, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            if target.exists():
                shutil.rmtree(target)
            os.replace(unfinished, target)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{folder!r} cannot be written ({error.strerror or error}): check the path and its permissions"
        ) from error


def _row(problem: Problem) -> dict[str, Any]:
    question = problem.question if isinstance(problem.question, str) else list(problem.question)
    row = {"id": problem.id, "question": question, "answer": problem.answer, "columns": dict(problem.columns)}
    return {**row, "also": list(problem.also)} if problem.also else row
