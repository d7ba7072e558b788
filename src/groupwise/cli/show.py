"""How commands print: tables for people, JSON for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from groupwise.streams import give_stdout_back
from groupwise.tracking.console import own_width
from groupwise.tracking.files import json_text
from groupwise.tracking.text import harmless, visible_character

__all__ = ["console", "print_json", "print_notes", "table"]


def console(stderr: bool = False, quiet: bool = False) -> Console:
    return Console(stderr=stderr, highlight=False, soft_wrap=False, quiet=quiet, width=own_width())


def print_json(value: object) -> None:
    """``value`` on standard output as indented JSON, and nothing else; what a terminal would obey is escaped."""
    give_stdout_back()
    print("".join(c if visible_character(c) == c else _in_json(c) for c in json_text(value, indent=2)))


def _in_json(character: str) -> str:
    units = character.encode("utf-16-be", errors="surrogatepass")
    return "".join(f"\\u{units[i]:02x}{units[i + 1]:02x}" for i in range(0, len(units), 2))


def print_notes(notes: Iterable[str], to: Console) -> None:
    for note in notes:
        to.print(harmless(f"note: {note}", "yellow"), soft_wrap=True)


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> Table:
    """A plain table. Cells are shown letter by letter: nothing that a data set wrote is taken for markup."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title=title or None, title_justify="left")
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(harmless(_cell(value)) for value in row))
    return made


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={inner}" for key, inner in value.items())
    return str(value)
