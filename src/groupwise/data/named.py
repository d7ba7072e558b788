"""Data sets that are known by name: where they lie on the Hugging Face Hub, and how a copy in a local folder is found instead."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

__all__ = ["FOLDER_VARIABLE", "NAMED", "NamedSource", "canonical_name", "local_copy", "named_folder"]

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


def local_copy(name: str, split: str, folder: Path | None) -> Path | None:
    """The file or folder in ``folder``, or one level below it, that holds the data set ``name``; ``None`` where there is none.

    A folder ``gsm8k/`` (with a file per split), or a file ``aime24.parquet`` or ``math500_test.jsonl``. A file that bears a
    split's name must bear that of ``split``; one that bears none stands for the data set as a whole, whatever the split.
    """
    if folder is None or not folder.is_dir():
        return None
    candidates = [*folder.iterdir(), *(file for below in sorted(folder.iterdir()) if below.is_dir() for file in below.iterdir())]
    files = [path for path in sorted(candidates) if path.suffix.lower() in SUFFIXES and path.is_file()]
    by_split = _first(path for path in files if canonical_name(path.stem) is None and _names(path.stem, name, split))
    whole_folder = folder / name if (folder / name).is_dir() else None
    whole_file = _first(path for path in files if canonical_name(path.stem) == name)
    return by_split or (whole_file if whole_file is not None else whole_folder)


def _names(stem: str, name: str, split: str) -> bool:
    head, _, tail = stem.replace("-", "_").rpartition("_")
    return tail == split and canonical_name(head) == name


def _first(paths: Iterable[Path]) -> Path | None:
    return next(iter(paths), None)
