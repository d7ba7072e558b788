"""A griffe extension for mkdocs.yml: docstrings are plain text with examples, and the site reads them as Markdown."""

from __future__ import annotations

import re
from typing import Any

import griffe

__all__ = ["PlainDocstrings"]

CODE = re.compile(r"(``.*?``|`[^`]*`)")


class PlainDocstrings(griffe.Extension):
    """Examples (``>>>``) become code blocks, and x[p][g] in the text is no link to something called g."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(docstring: str) -> str:
    """A fence around each run of lines that begins with ``>>>`` and ends before a blank line; elsewhere brackets are escaped."""
    out: list[str] = []
    inside = False
    for line in docstring.splitlines():
        if not inside and line.startswith(">>>"):
            out.append("```pycon")
            inside = True
        elif inside and not line.strip():
            out.append("```")
            inside = False
        out.append(line if inside else without_references(line))
    return "\n".join([*out, "```"] if inside else out)


def without_references(line: str) -> str:
    pieces = CODE.split(line)
    return "".join(piece if i % 2 else piece.replace("][", "]\\[") for i, piece in enumerate(pieces))
