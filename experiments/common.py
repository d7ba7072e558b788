"""What every experiment shares: its command line, its JSON file with the machine's description, and its block in RESULTS.md.

An experiment measures first (``measure() -> numbers``) and shows afterwards, from the numbers alone: a figure, and a piece of
Markdown that stands between two marks in a page. So a figure or a table can be made again without measuring again, and a test
can hold the page to the file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from groupwise.tracking.environment import code_revision, installed_version, processor_name, usable_cpus

__all__ = [
    "FIGURES",
    "PAGE",
    "ROOT",
    "Experiment",
    "describe",
    "earlier",
    "environment",
    "main",
    "markdown_table",
    "read_block",
    "read_numbers",
    "write_block",
]

ROOT = Path(__file__).resolve().parents[1]
FIGURES = ROOT / "docs" / "figures"
PAGE = ROOT / "experiments" / "RESULTS.md"
"""All measured tables; the pages of docs/ say what follows from them."""


@dataclass(frozen=True)
class Experiment:
    """One question's experiment."""

    name: str
    """Of the module, the files it writes and its block in the page."""
    measure: Callable[[], dict[str, Any]]
    """Does the work and returns plain numbers."""
    draw: Callable[[Mapping[str, Any], Path], None]
    """Writes the figure of the numbers to a path."""
    report: Callable[[Mapping[str, Any]], str]
    """The numbers as Markdown, for the page."""
    page: Path = PAGE


def main(experiment: Experiment, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """``python -m experiments.NAME [--out FOLDER] [--redraw]``: measure, write ``NAME.json`` and ``NAME.svg``, and fill in the
    page (only where ``--out`` is the project's own folder of figures). Returns the numbers."""
    options = argparse.ArgumentParser(prog=f"python -m experiments.{experiment.name}")
    options.add_argument("--out", type=Path, default=FIGURES, help="folder of the JSON file and the figure (docs/figures)")
    options.add_argument("--redraw", action="store_true", help="make figure and table from the JSON file that is there already")
    chosen = options.parse_args(arguments)
    begun = environment()  # of the code that measures, should the checkout change meanwhile
    numbers = read_numbers(experiment.name, chosen.out) if chosen.redraw else experiment.measure() | {"environment": begun}
    publish(experiment, numbers, chosen.out)
    return numbers


def publish(experiment: Experiment, numbers: Mapping[str, Any], out: Path = FIGURES) -> None:
    """Write numbers and figure into ``out``, and the report into the page if ``out`` is where the page's figures are."""
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(numbers, indent=1, allow_nan=False)
    (out / f"{experiment.name}.json").write_text(_short_lists(text) + "\n", encoding="utf-8")
    experiment.draw(numbers, out / f"{experiment.name}.svg")
    report = experiment.report(numbers)
    if out.resolve() == FIGURES:
        write_block(experiment.page, experiment.name, report)
    print(report)


def read_numbers(name: str, out: Path = FIGURES) -> dict[str, Any]:
    """What ``NAME.json`` holds."""
    return json.loads((out / f"{name}.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def environment() -> dict[str, Any]:
    """Hardware, versions, code and date of a measurement."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "code": code_revision(),
        "processor": processor_name(),
        "cores": usable_cpus(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "python": platform.python_version(),
        **{name: installed_version(name) for name in ("torch", "transformers")},
    }


def describe(numbers: Mapping[str, Any]) -> str:
    """One line for under a table: when and on what the numbers were measured. The JSON file has the rest.

    ``earlier`` are the environments of runs that were measured before and are kept beside the others.
    """
    places = dict.fromkeys(_place(found) for found in (numbers["environment"], *numbers.get("earlier", ())))
    return f"Measured {'; some of it '.join(places)}."


def _place(found: Mapping[str, Any]) -> str:
    revision = (found["code"] or {}).get("revision", "unknown")[:7]
    return f"{found['date']}, revision {revision}, {found['processor']}, torch {found['torch']}"


def earlier(kept: Mapping[str, Any], found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Environments of the runs that ``kept`` has, without that of ``found``."""
    each = [kept["environment"], *kept.get("earlier", ())]
    return [one for i, one in enumerate(each) if one != found["environment"] and one not in each[:i]]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its cells as they are."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write_block(page: Path, name: str, text: str) -> None:
    """Replace what stands between the marks of ``name`` in ``page``; the rest of the page stays as it is."""
    before, _, after = _parts(page, name)
    page.write_text(f"{before}{_mark(name)}\n{text}\n{_mark('/' + name)}{after}", encoding="utf-8")


def read_block(page: Path, name: str) -> str:
    """What stands between the marks of ``name`` in ``page``."""
    return _parts(page, name)[1].strip("\n")


def _parts(page: Path, name: str) -> tuple[str, str, str]:
    before, opened, rest = page.read_text(encoding="utf-8").partition(_mark(name))
    inside, closed, after = rest.partition(_mark("/" + name))
    if not opened or not closed:
        raise ValueError(f"{page.name} has no block {_mark(name)} ... {_mark('/' + name)}: add the two marks where it belongs")
    return before, inside, after


def _mark(name: str) -> str:
    return f"<!-- {name} -->"


def _short_lists(text: str) -> str:
    """Lists of plain numbers on one line each, so that a file of curves stays readable."""
    import re

    return re.sub(r"\[\s+([^\[\]{}\"]*?)\s+\]", lambda found: "[" + re.sub(r"\s+", " ", found[1]) + "]", text)
