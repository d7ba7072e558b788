"""Showing text that a model or a data set wrote, in a terminal that would obey it."""

from __future__ import annotations

import unicodedata

from rich.text import Text

from groupwise.tracking.secrets import hide_secrets_in_message, hide_secrets_in_text

__all__ = ["harmless", "message", "visible", "visible_character"]

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
    """``text`` for rich: shown letter by letter, so that ``[bold]`` or ``[link=...]`` in it is no markup; without secrets."""
    return Text(visible(hide_secrets_in_text(text)), style=style)


def message(error: object) -> str:
    """What an exception says, for a terminal: it may quote settings, files and other processes."""
    return visible(hide_secrets_in_message(str(error)))
