"""A griffe extension for mkdocs.yml: examples in docstrings (``>>>``) become code blocks of the page."""

from __future__ import annotations

from typing import Any

import griffe

__all__ = ["ExamplesAsCode"]


class ExamplesAsCode(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = with_code_blocks(obj.docstring.value)


def with_code_blocks(docstring: str) -> str:
    """Fences around each run of lines that begins with ``>>>`` and ends before a blank line."""
    out: list[str] = []
    inside = False
    for line in docstring.splitlines():
        if not inside and line.startswith(">>>"):
            out.append("```pycon")
            inside = True
        elif inside and not line.strip():
            out.append("```")
            inside = False
        out.append(line)
    return "\n".join([*out, "```"] if inside else out)
