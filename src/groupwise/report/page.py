"""The page: one HTML file that needs nothing else, runs no script but its own, and talks to nobody.

Data in it is compressed text: zlib, then base64, whose letters cannot end a script block.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from array import array
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from groupwise.tracking.files import finite

__all__ = [
    "GENERATOR",
    "SCRIPTS",
    "STYLES",
    "content_policy",
    "pack",
    "pack_columns",
    "pack_json",
    "render_page",
    "script",
    "script_json",
    "style",
]

LEVEL = 6


def pack(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, LEVEL)).decode("ascii")


def pack_json(value: object) -> str:
    """``value`` must hold finite numbers and strings without lone surrogates only."""
    return pack(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode("utf-8"))


def pack_columns(columns: Sequence[array[Any]]) -> str:
    """Columns one after the other, little-endian; the page knows their types and lengths."""
    assert all(column.itemsize in (1, 4) for column in columns), "columns are int32, float32 or bytes"
    return pack(b"".join(as_little_endian(column) for column in columns))


def as_little_endian(column: array[Any]) -> bytes:
    import sys

    if sys.byteorder == "big":
        column = array(column.typecode, column)
        column.byteswap()
    return column.tobytes()


def script_json(value: object) -> str:
    """JSON for a ``<script type="application/json">``: with no ``<``, ``>`` or ``&`` nothing in it can end the block, open a comment
    or look like markup. Values that are not finite become null."""
    text = json.dumps(finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


GENERATOR = "groupwise report"
STYLES = ("page.css",)
SCRIPTS = ("core.js", "chart.js", "curves.js", "tables.js", "diff.js", "completions.js", "group.js", "beforeafter.js", "main.js")
"""In this order they are one script, inside one function."""


def asset(name: str) -> str:
    return (files("groupwise.report") / "assets" / name).read_text(encoding="utf-8")


def script() -> str:
    return "(() => {\n'use strict';\n" + "\n".join(asset(name) for name in SCRIPTS) + "\n})();\n"


def style() -> str:
    return "\n".join(asset(name) for name in STYLES)


def content_policy(script_text: str, style_text: str) -> str:
    """A policy that lets nothing be loaded, sent or run but this very script and style, known by their hashes: no script in a model's
    words could run, were they ever taken for markup."""
    rules = (
        "default-src 'none'", f"script-src '{digest(script_text)}'", f"style-src '{digest(style_text)}'", "base-uri 'none'",
        "form-action 'none'", "require-trusted-types-for 'script'", "trusted-types 'none'",
    )  # fmt: skip
    return "; ".join(rules)


def digest(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def render_page(payload: Mapping[str, object], blocks: Mapping[str, str], title: str) -> str:
    """The whole file. ``blocks`` are packed texts by id; base64 needs no escaping, and everything else is escaped here."""
    code, look = script(), style()
    held = "\n".join(f'<script type="text/plain" id="{escape(name)}">{text}</script>' for name, text in blocks.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{escape(content_policy(code, look))}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="generator" content="{GENERATOR}">
<title>{escape(title)}</title>
<style>{look}</style>
</head>
<body>
<noscript><p>This report draws itself with the script inside it; please allow scripts for this file.</p></noscript>
<div id="page"></div>
<script type="application/json" id="data">{script_json(payload)}</script>
{held}
<script>{code}</script>
</body>
</html>
"""
