"""Settings and environment as flat tables, and where runs differ in them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.tracking.files import finite

__all__ = ["differences", "flat"]

LONGEST = 2000
DEEPEST = 8


def flat(value: Any, path: str = "", depth: int = 0) -> dict[str, str]:
    """Nested mappings as dotted paths -> values as text; lists stay whole, but those of mappings (such as reward functions).

    >>> flat({"a": {"b": 1, "c": [1, 2]}, "d": None})
    {'a.b': '1', 'a.c': '[1, 2]', 'd': 'null'}
    >>> flat({"functions": [{"weight": 2.0}, {"weight": 0.5}]})
    {'functions.0.weight': '2.0', 'functions.1.weight': '0.5'}
    """
    if isinstance(value, Mapping) and value and depth < DEEPEST:
        found: dict[str, str] = {}
        for key, inner in value.items():
            found |= flat(inner, f"{path}.{key}" if path else str(key), depth + 1)
        return found
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value) and depth < DEEPEST:
        return flat({str(i): item for i, item in enumerate(value[:LONGEST])}, path, depth)
    return {path: words(value)}


def words(value: Any) -> str:
    if isinstance(value, str):
        return clean(value[:LONGEST])
    try:
        return clean(json.dumps(finite(value), ensure_ascii=False, default=str)[:LONGEST])
    except (RecursionError, ValueError):
        return "(too deeply nested to show)"


def clean(text: str) -> str:
    return text.encode("utf-8", errors="replace").decode("utf-8")


def differences(tables: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Paths that are not the same in all tables, with each one's value (``None`` where it has no such path). A section that one of them
    leaves out, and so has as null, is one row."""
    absent = [path for path, value in dict.fromkeys(pair for table in tables for pair in table.items()) if value == "null"]
    for section in absent:
        tables = [_in_one_cell(table, section) for table in tables]
    paths = list(dict.fromkeys(path for table in tables for path in table))
    rows = [{"path": path, "values": [table.get(path) for table in tables]} for path in paths]
    return [row for row in rows if len(set(row["values"])) > 1]


def _in_one_cell(table: Mapping[str, str], section: str) -> Mapping[str, str]:
    """The table with what it has inside ``section`` as one text."""
    inside = {path: value for path, value in table.items() if path.startswith(f"{section}.")}
    if not inside:
        return table
    text = ", ".join(f"{path.removeprefix(f'{section}.')}: {value}" for path, value in inside.items())
    return {**{path: value for path, value in table.items() if path not in inside}, section: text}
