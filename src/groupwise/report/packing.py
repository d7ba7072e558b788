"""Data as compressed text that an HTML page can carry: zlib, then base64, whose letters cannot end a script block."""

from __future__ import annotations

import base64
import json
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

from groupwise.tracking.files import finite

__all__ = ["pack", "pack_columns", "pack_json", "script_json"]

LEVEL = 6


def pack(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content, LEVEL)).decode("ascii")


def pack_json(value: Any) -> str:
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


def script_json(value: Any) -> str:
    """JSON for a ``<script type="application/json">``: with no ``<``, ``>`` or ``&`` nothing in it can end the block, open a comment
    or look like markup. Values that are not finite become null."""
    text = json.dumps(finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
