"""Taking a run's records back to a step, so that a run which carries on from there writes nothing twice."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from groupwise.tracking.files import write_bytes
from groupwise.tracking.run_folder import RunFolder

__all__ = ["cut_back"]


def cut_back(folder: RunFolder, step: int | None) -> None:
    """Leave what the run had written when ``step`` steps were done; None where it begins again, from before its first evaluation.

    Lines of later steps go, as does a line that a kill left half; so do evaluations of later stages, the summary and the final model.
    """
    done = step or 0
    for path in (folder.metrics, folder.completions):
        if path.is_file():
            cut_lines(path, done)
    for path in folder.evaluations.glob("*.jsonl"):
        found = re.match(r"step-(\d+)-", path.name)
        if path.name.startswith("final-") or (found and int(found[1]) > done) or step is None:
            path.unlink()
    folder.summary.unlink(missing_ok=True)
    shutil.rmtree(folder.final_model, ignore_errors=True)


def cut_lines(path: Path, step: int) -> None:
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n") and step_of(line) <= step]
    write_bytes(path, b"".join(kept))


def step_of(line: bytes) -> float:
    """The step of a record; infinity for what is no record."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
