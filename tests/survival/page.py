"""Tables that commands write into benchmarks/TRIALS.md, between a pair of comments."""

from __future__ import annotations

import platform
import re
import subprocess
import time
from pathlib import Path

__all__ = ["PAGE", "section", "slug", "stamp", "write_section"]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "benchmarks" / "TRIALS.md"


def marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: written by the command above -->", f"<!-- end of {name} -->"


def section(name: str, page: str) -> str:
    """What stands between the comments of ``name``. Raises ValueError where they are not there."""
    first, last = map(re.escape, marks(name))
    found = re.search(f"{first}\n(.*?)\n{last}", page, re.DOTALL)
    if found is None:
        raise ValueError(f"the page has no section {name!r}")
    return found[1]


def write_section(name: str, text: str) -> None:
    page = PAGE.read_text(encoding="utf-8")
    first, last = marks(name)
    PAGE.write_text(page.replace(f"{first}\n{section(name, page)}\n{last}", f"{first}\n{text}\n{last}"), encoding="utf-8")


def slug(name: str) -> str:
    """A name for a folder."""
    return re.sub(r"\W+", "-", name.lower()).strip("-")


def stamp(command: str) -> str:
    """With what a table was made: command, date, commit, versions, machine."""
    import torch
    import transformers

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT).stdout.strip()
    return (
        f"`{command}`, {time.strftime('%Y-%m-%d')}, commit {commit}, Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}, {platform.machine()} CPU, one thread."
    )
