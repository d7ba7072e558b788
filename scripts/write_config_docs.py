"""Writes docs/reference/configuration.md from the schema: ``python scripts/write_config_docs.py``. A test says when that is due."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from groupwise.config import FieldDoc, explain
from groupwise.config.fields import kinds_of, sections

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "configuration.md"
INTRODUCTION = """\
<!-- Written by scripts/write_config_docs.py from the docstrings in src/groupwise/config/: change them there, then run it. -->

# Settings

A run is a YAML file with the sections below. Each line has a setting with its default, what else it may be, and what it does.
On the command line write `section.name=value`, or `name=value` where the name is unique: `groupwise train quickstart training.steps=10`.
Values are read as YAML; `null` unsets. `groupwise config NAME` prints a part of this page.

Unset fields of `algorithm` follow `algorithm.preset` ([presets](algorithms.md#presets)); defaults here are those of `grpo`.
Where a section has types, a setting "of" some of them belongs to these alone.
"""


def render() -> str:
    """The page as Markdown."""
    by_section: dict[str, list[FieldDoc]] = {}
    for doc in explain():
        by_section.setdefault(_section(doc), []).append(doc)
    pieces = [INTRODUCTION]
    for section, fields in by_section.items():
        pieces += [f"## {section}\n", *filter(None, [_about(section)])]
        pieces += [*map(_row, fields), ""]
    return "\n".join(pieces).rstrip() + "\n"


def _section(doc: FieldDoc) -> str:
    return doc.path.rpartition(".")[0].removesuffix("[]")


def _about(section: str) -> str:
    """The section class's own sentence; empty for one inside a list, which has no place of its own in ``Config``."""
    if section == "rewards.functions":
        return "Entries of the list; a name alone stands for `{function: NAME}`.\n"
    models = sections().get(section, ())
    if len(models) == 1:
        return " ".join((models[0].__doc__ or "").split()) + "\n"
    return ""


def _types_of(section: str) -> str:
    """A line for each type that a section comes in, below its `type`."""
    lines = [
        f"    - `{', '.join(kinds_of(model)) or 'FILE.py:FUNCTION'}`: {' '.join((model.__doc__ or '').split())}"
        for model in sections().get(section, ())
    ]
    return "\n".join(lines)


def _row(doc: FieldDoc) -> str:
    """A setting as it stands in YAML with its default, what else it may be where that does not say so, and what it does."""
    value = "" if doc.default == "(required)" else f" {dump(doc.default)}"
    head = f"- `{doc.leaf}:{value}`{_types(doc)}"
    if doc.leaf == "type":
        return f"{head}: {doc.description.partition('.')[0]}:\n{_types_of(_section(doc))}"
    kind = doc.type.replace("whole number", "integer").replace("False", "false")
    if doc.default is None:
        kind = kind.replace(" or null", "")
    elif isinstance(doc.default, int | float):
        kind = re.sub(r"^(integer|number) ?", "", kind)
    if " | " in kind and not kind.startswith("list"):
        others = [one for one in kind.split(" | ") if one != dump(doc.default)]
        kind = "" if all(f"`{one}`" in doc.description for one in others) else ", ".join(others)
    kind = re.sub(r" ?\((>=?.*)\)", r" \1", kind).strip()
    kind = re.sub(r">= (\S+) and <= (\S+)", r"\1 to \2", kind).replace(" and ", ", ")
    plain = kind in ("", "text", "true or false", "mapping", "settings")
    return f"{head}{'' if plain else f' ({_outside_code(kind)})'}: {_outside_code(doc.description)}"


def _types(doc: FieldDoc) -> str:
    return f" of {', '.join(doc.of)}" if doc.of else ""


def dump(value: Any) -> str:
    """A default as YAML has it on one line."""
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:g}"
    return json.dumps(value).replace('"', "")


def _outside_code(text: str) -> str:
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(text.split("`")))


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
