"""Data sets by name: where they lie on the Hugging Face Hub, how a copy in a local folder is found instead, and prepared sets on disk.

A prepared set was checked and split once, and is read without looking for columns or answers again. It is a folder of three UTF-8 files.
``train.jsonl`` and ``held_out.jsonl`` hold one object a line: ``id``, ``question`` (text, or a list of ``{role, content}``), ``answer``,
``columns`` (an object), and where further answers are right too ``also``, a list of them. ``metadata.json`` holds ``format``
(``groupwise-problems``), ``version``, ``counts``, ``answer_style``, ``description``, ``dropped`` and ``fingerprint``.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from groupwise.data.answers import AnswerStyle
from groupwise.errors import DataError
from groupwise.types import Problem

__all__ = [
    "FOLDER_VARIABLE",
    "NAMED",
    "NamedSource",
    "Part",
    "canonical_name",
    "check_named_folder",
    "is_prepared",
    "listing",
    "load_prepared",
    "local_copy",
    "named_folder",
    "prepared_style",
    "write_prepared",
]

FOLDER_VARIABLE = "GROUPWISE_DATA"
"""Environment variable with the folder to look in where ``data.folder`` is not set."""


@dataclass(frozen=True, slots=True)
class NamedSource:
    """What a short name stands for."""

    hub: str
    """Repository on the Hub."""
    subset: str | None
    """The repository's configuration."""
    eval_split: str
    """The split that is judged where none is named."""
    style: Literal["xml", "boxed"]
    """Where completions are asked to put their answer."""
    rows: int
    """Problems in ``eval_split`` on the Hub."""
    about: str


NAMED: Mapping[str, NamedSource] = {
    "gsm8k": NamedSource("openai/gsm8k", "main", "test", "xml", 1319, "grade-school word problems; also a train split of 7,473"),
    "svamp": NamedSource("ChilleD/SVAMP", None, "test", "xml", 300, "one-step word problems; also a train split of 700"),
    "math500": NamedSource("HuggingFaceH4/MATH-500", None, "test", "boxed", 500, "competition problems, answers in LaTeX"),
    "aime24": NamedSource("HuggingFaceH4/aime_2024", None, "train", "boxed", 30, "AIME 2024, I and II"),
    "aime25": NamedSource("math-ai/aime25", None, "test", "boxed", 30, "AIME 2025, I and II"),
    "amc23": NamedSource(
        "AI-MO/aimo-validation-amc",
        None,
        "train",
        "boxed",
        83,
        "AMC 12 of 2022 and 2023, integer answers; some figures published as AMC23 are of 40 problems",
    ),
    "polaris": NamedSource(
        "POLARIS-Project/Polaris-Dataset-53K", None, "train", "boxed", 53291, "competition problems to train on"
    ),
}
ALIASES = {"aime2024": "aime24", "aime2025": "aime25", "amc2023": "amc23"}
SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet")


def canonical_name(source: str) -> str | None:
    """``"MATH-500"`` and ``"math500"`` are one name; ``None`` where ``source`` is none of the names known."""
    plain = source.lower().replace("-", "").replace("_", "")
    name = ALIASES.get(plain, plain)
    return name if name in NAMED else None


def named_folder(setting: str | None) -> Path | None:
    """The folder in which named data sets are looked for before the Hub: ``data.folder``, or else ``$GROUPWISE_DATA``."""
    chosen = setting or os.environ.get(FOLDER_VARIABLE)
    return Path(chosen).expanduser() if chosen else None


def check_named_folder(setting: str | None, sources: Sequence[str]) -> None:
    """Raise DataError for a ``data.folder`` that is no folder, or where none of ``sources`` is looked for there."""
    if setting is None:
        return
    if not any(canonical_name(source) for source in sources):
        raise DataError(
            f"data.folder is {setting!r}, but {sources[0]!r} is not a data set known by name ({', '.join(NAMED)}), and no other is looked "
            "for there: leave it out"
        )
    if not Path(setting).expanduser().is_dir():
        raise DataError(f"data.folder is {setting!r}, which is no folder: correct it, or leave it out")


def local_copy(name: str, split: str, folder: Path | None) -> Path | None:
    """The file or folder in ``folder``, or one level below it, that holds the data set ``name``; ``None`` where there is none.

    A folder ``gsm8k/`` (with a file per split), or a file ``aime24.parquet`` or ``math500_test.jsonl``. A file that bears a
    split's name must bear that of ``split``; one that bears none stands for the data set as a whole, whatever the split.
    """
    if folder is None or not folder.is_dir():
        return None
    candidates = listing(folder)
    files = [path for path in sorted(candidates) if path.suffix.lower() in SUFFIXES and os.path.isfile(path)]
    by_split = _first(path for path in files if canonical_name(path.stem) is None and _names(path.stem, name, split))
    whole_folder = _first(path for path in candidates if path.name == name and os.path.isdir(path))
    whole_file = _first(path for path in files if canonical_name(path.stem) == name)
    return by_split or (whole_file if whole_file is not None else whole_folder)


def listing(folder: Path) -> list[Path]:
    """What lies in ``folder``, then one level below. A folder below that may not be listed is passed over, such as a disk's ``lost+found``.

    Raises DataError where ``folder`` itself may not be listed.
    """
    try:
        found = sorted(folder.iterdir())
    except OSError as error:
        raise DataError(f"folder {str(folder)!r} cannot be listed ({error.strerror or error}): check its permissions") from error
    for below in [path for path in found if os.path.isdir(path)]:  # is_dir() raises where the path may not be followed
        with suppress(OSError):
            found += sorted(below.iterdir())
    return found


def _names(stem: str, name: str, split: str) -> bool:
    head, _, tail = stem.replace("-", "_").rpartition("_")
    return tail == split and canonical_name(head) == name


def _first(paths: Iterable[Path]) -> Path | None:
    return next(iter(paths), None)


Part = Literal["train", "held_out"]
FORMAT = "groupwise-problems"
VERSION = 1
FILES = {"train.jsonl", "held_out.jsonl", "metadata.json"}


def is_prepared(source: str) -> bool:
    """Whether ``source`` is a folder that ``groupwise data prepare`` wrote."""
    return canonical_name(source) is None and _metadata(Path(source).expanduser()) is not None


def prepared_style(source: str) -> AnswerStyle | None:
    """The answer style that a prepared folder records; None for any other source."""
    style = (_metadata(Path(source).expanduser()) or {}).get("answer_style") if canonical_name(source) is None else None
    return style if style in ("xml", "boxed", "plain") else None


def _metadata(folder: Path) -> dict[str, Any] | None:
    try:
        metadata = json.loads((folder / "metadata.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return metadata if isinstance(metadata, dict) and metadata.get("format") == FORMAT else None


def load_prepared(source: str, part: Part) -> list[Problem]:
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


def write_prepared(folder: str, parts: Mapping[Part, Sequence[Problem]], facts: Mapping[str, object]) -> None:
    """Write beside ``folder`` and rename into place. An older prepared set there is replaced; anything else is left alone."""
    target = Path(folder).expanduser().resolve()  # `.` is its own parent, and a link to a folder cannot be renamed over
    if target.exists() and not (target.is_dir() and (is_prepared(str(target)) or not any(target.iterdir()))):
        raise DataError(f"{folder!r} exists and is not a prepared problem set: choose another folder")
    if others := sorted({path.name for path in target.iterdir()} - FILES) if target.exists() else []:
        raise DataError(
            f"{folder!r} holds {others[0]!r} beside a prepared set, and would be replaced whole: move it, or choose another folder"
        )
    metadata = {"format": FORMAT, "version": VERSION, "counts": {name: len(part) for name, part in parts.items()}, **facts}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
        former = unfinished.with_name(f"{unfinished.name}-former")
        try:
            unfinished.chmod(0o755)  # mkdtemp makes it private
            for name, part in parts.items():
                text = "".join(map(_line, part))
                (unfinished / f"{name}.jsonl").write_text(text, encoding="utf-8", errors="backslashreplace")  # half a character
            (unfinished / "metadata.json").write_text(json.dumps(metadata, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            if target.exists():
                os.replace(target, former)
            try:
                os.replace(unfinished, target)
            except OSError:
                if former.exists():
                    os.replace(former, target)
                raise
            shutil.rmtree(former, ignore_errors=True)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{folder!r} cannot be written ({error.strerror or error}): check the path and its permissions"
        ) from error


def _line(problem: Problem) -> str:
    """A problem as a line of JSON. Raises DataError naming a column that has no such form."""
    try:
        return json.dumps(_row(problem), ensure_ascii=False, default=_plain) + "\n"
    except TypeError:
        for name, value in problem.columns.items():
            try:
                json.dumps(value, default=_plain)
            except TypeError as error:
                raise DataError(
                    f"problem {problem.id!r}, column {name!r} cannot be written as JSON ({error}): give a file or a "
                    "function whose rows are without it, or make it text, numbers or lists of them"
                ) from error
        raise


def _plain(value: Any) -> Any:
    """What JSON does not know: arrays and other libraries' numbers; dates, times and decimals as text."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (date, time, timedelta, Decimal)):
        return str(value)
    raise TypeError(f"it holds {type(value).__name__}")


def _row(problem: Problem) -> dict[str, object]:
    question = problem.question if isinstance(problem.question, str) else list(problem.question)
    row: dict[str, object] = {"id": problem.id, "question": question, "answer": problem.answer, "columns": dict(problem.columns)}
    return {**row, "also": list(problem.also)} if problem.also else row
