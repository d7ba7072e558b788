"""What a run has come to, by its records; and taking them back to a step, so that a run which resumes writes nothing twice."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from groupwise.config.load import plain_yaml
from groupwise.tracking.files import write_bytes
from groupwise.tracking.run_folder import RunFolder

__all__ = ["Ending", "cut_back", "ending_of", "set_ending_aside"]


@dataclass(frozen=True)
class Ending:
    """A run that came to its end."""

    steps: int
    """That it made."""
    asked: int
    """More than ``steps`` where a callback ended it early."""
    summary: dict[str, Any]


def ending_of(folder: RunFolder) -> Ending | None:
    """What the run came to; None where it has not come to its end."""
    try:
        summary = json.loads(folder.summary.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(summary, dict):
        return None
    made = summary.get("steps")
    steps = made if isinstance(made, int) else last_step(folder.metrics)
    asked = summary.get("steps_asked")
    return Ending(steps, max(steps, asked if isinstance(asked, int) else steps_in_settings(folder.config)), summary)


def set_ending_aside(folder: RunFolder, steps: int) -> None:
    """For a run that goes on beyond an end after so many steps: its summary and its last evaluations stay, under that step's name.

    Its model stays in its place until the next one is whole.
    """
    for path in folder.evaluations.glob("final-*.jsonl"):
        os.replace(path, path.with_name(f"step-{steps}-{path.name.removeprefix('final-')}"))
    os.replace(folder.summary, folder.earlier_summary(steps))


def cut_back(folder: RunFolder, step: int | None) -> None:
    """Leave what the run had written when ``step`` steps were done; None where it begins again, from before its first evaluation.

    Lines of later steps go, as does a line that a kill left half, and evaluations of later stages. What belongs to an end that the
    run came to before stays (`set_ending_aside`), and so does every model.
    """
    done = step or 0
    for path in (folder.metrics, folder.completions):
        if path.is_file():
            cut_lines(path, done)
    for path in folder.evaluations.glob("*.jsonl"):
        found = re.match(r"step-(\d+)-", path.name)
        if found and folder.earlier_summary(int(found[1])).is_file():
            continue
        if path.name.startswith("final-") or (found and int(found[1]) > done) or step is None:
            path.unlink()


def cut_lines(path: Path, step: int) -> None:
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n") and step_of(line) <= step]
    write_bytes(path, b"".join(kept))


def step_of(line: bytes) -> float:
    """The step of a record; infinity for what is no record."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")


def last_step(metrics: Path) -> int:
    """Of the newest whole line; 0 without one."""
    lines = metrics.read_bytes().splitlines() if metrics.is_file() else []
    return int(max((step for line in lines if (step := step_of(line)) < float("inf")), default=0))


def steps_in_settings(config: Path) -> int:
    """That were asked for when the run began; 0 where that cannot be read."""
    try:
        return int(plain_yaml(config.read_text(encoding="utf-8"))["training"]["steps"])
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return 0
