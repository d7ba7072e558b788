"""Writing JSON so that a reader never meets half a file, and so that any reader can take it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from groupwise.durable import write_bytes
from groupwise.tracking.text import environment_secrets, hide_shaped_secrets, without

__all__ = ["LineFile", "json_line", "write_json", "write_json_lines", "write_text"]

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""A value that JSON has a word for."""
LINE_BREAKS = {ord(c): f"\\u{ord(c):04x}" for c in "\x85\u2028\u2029"}
"""Characters that ``str.splitlines`` breaks at though JSON allows them inside a string; written as escapes instead."""


def finite(value: object, secrets: Sequence[str] | None = None) -> Json:
    """``value`` without secrets, and with NaN and infinities as ``None``: JSON has no word for them, and most readers refuse Python's.

    ``secrets``: those of the environment, by default as they are now."""
    secrets = environment_secrets() if secrets is None else secrets
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return without(hide_shaped_secrets(value), secrets)
    if isinstance(value, int) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [finite(item, secrets) for item in value]
    if isinstance(value, Mapping):
        return {without(str(key), secrets): finite(item, secrets) for key, item in value.items()}
    number = getattr(value, "item", None)  # numpy and torch scalars, without importing either
    return finite(number(), secrets) if callable(number) and getattr(value, "ndim", 1) == 0 else without(str(value), secrets)


def json_text(value: object, indent: int | None = None) -> str:
    return json.dumps(finite(value), ensure_ascii=False, allow_nan=False, indent=indent).translate(LINE_BREAKS)


def json_line(value: object) -> bytes:
    """One line of a JSONL file, newline included. A lone surrogate becomes its ``\\udXXX`` escape, which is valid JSON."""
    return (json_text(value) + "\n").encode("utf-8", errors="backslashreplace")


class LineFile:
    """A file that lines are appended to. What the disk does not take, as when it is full, waits in memory for the next time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting = b""
        self.descriptor: int | None = None

    def flush(self) -> None:
        """Write what waits. Raises OSError where the disk does not take it all; the rest is kept."""
        if self.descriptor is None and self.waiting:
            self.descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        while self.waiting and self.descriptor is not None:
            self.waiting = self.waiting[os.write(self.descriptor, self.waiting) :]

    def close(self) -> None:
        """Try once more to write what waits, and close. Raises OSError where lines are lost."""
        try:
            self.flush()
        finally:
            if self.descriptor is not None:
                os.close(self.descriptor)
                self.descriptor = None


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8", errors="backslashreplace"))


def write_json(path: Path, value: object) -> None:
    write_text(path, json_text(value, indent=2) + "\n")


def write_json_lines(path: Path, rows: Iterable[object]) -> None:
    write_bytes(path, b"".join(json_line(row) for row in rows))
