"""Showing text that a model or a data set wrote, in a terminal that would obey it."""

from __future__ import annotations

import unicodedata

from rich.text import Text

__all__ = ["harmless", "visible"]

KEPT_FORMAT_CHARACTERS = "\u200c\u200d"
"""Joiners that some scripts and emoji need; every other invisible character is shown as an escape."""


def visible(text: str) -> str:
    """``text`` with every character that could act on a terminal or hide itself written as an escape; newlines stay.

    Covers the control characters (ANSI sequences, carriage return, bell), bidirectional overrides, tag characters and lone
    surrogates. A tab becomes four spaces.

    >>> visible("a\\x1b[2Jb")
    'a\\\\x1b[2Jb'
    """
    return "".join(visible_character(character) for character in text)


def visible_character(character: str) -> str:
    if character == "\n" or character in KEPT_FORMAT_CHARACTERS:
        return character
    if character == "\t":
        return "    "
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"):
        return character.encode("unicode_escape", errors="backslashreplace").decode("ascii")
    return character


def harmless(text: str, style: str = "") -> Text:
    """``text`` for rich: shown letter by letter, so that ``[bold]`` or ``[link=...]`` in it is no markup."""
    return Text(visible(text), style=style)
