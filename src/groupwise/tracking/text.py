"""Text that may be shown and written: without secrets, and without characters that a terminal would obey.

What is named or shaped like a credential is written nowhere: settings, the command, and records are searched on their way to a file. By
name (``api_key``, ``WANDB_API_KEY``, ``Authorization``), by shape (``hf_...``, ``Bearer ...``), by place (a login or ``?token=`` in a
URL), and by what environment variables with such names hold. Patterns find what they know: a key should still come from the
environment, where a function reads it by itself, and not from the settings.
"""

from __future__ import annotations

import functools
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from rich.text import Text

from groupwise.config.load import HIDDEN

__all__ = [
    "HIDDEN",
    "environment_secrets",
    "harmless",
    "hide_secrets",
    "hide_secrets_in_command",
    "hide_secrets_in_message",
    "hide_secrets_in_text",
    "hide_shaped_secrets",
    "message",
    "visible",
    "visible_character",
    "without",
]

_OWNERS = (
    "api|access|secret|private|auth|account|subscription|service|master|signing|ssh|encryption|"
    "openai|anthropic|azure|gemini|google|mistral|cohere|together|groq|deepseek|openrouter|fireworks|replicate|wandb|hf|huggingface"
)
_NAME = (
    rf"(?:(?:{_OWNERS})[_-]?keys?|auth|authorization|bearer|token|(?:api|auth|access|hf|hub)[_-]?tokens|secrets?|passwords?|passwd|"
    r"pwd|pat|jwt|dsn|passphrase|credentials?|cookies?|webhook(?:[_-]?url)?|connection[_-]?string|"
    r"database[_-]?url|session[_-]?id|otp|access[_-]?key[_-]?id)(?:[_-]?(?:\d+|value))?"
)
SECRET_NAME = re.compile(rf"(?i)(?:^|[._-]|(?<=[a-z])(?-i:(?=[A-Z]))){_NAME}$|(?:^|\.)key$")
"""A credential's name, whole or as the last words of one: ``api_key``, ``rewards.functions.0.arguments.password``, ``judgeApiKey``. A
``key`` alone is one too, and ``answer_key`` is none."""
NO_SECRET = re.compile(r"(?i)(?:^|[._-])(?:stop|eos|bos|pad|unk|sep|cls|mask|start|end|think|image|special)[_-]?token$")
"""Tokens of a vocabulary."""
_LONGEST_NAME = 120
_NO_SECRETS = ("PWD", "OLDPWD")
"""Environment variables that look like a password's and hold the working directory."""

# Each pattern takes time in proportion to the text, whatever stands in it: a completion may hold anything. So no part may be tried twice
# over the same characters: a part ends where the next one begins (`++`, `*+`: what was taken is not given back), or has a longest length.
SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|[prs]k_(?:live|test)_[A-Za-z0-9]{10,}|npm_[A-Za-z0-9]{16,}|ya29\.[\w-]{16,}|"
    r"pypi-[\w-]{16,}|dckr_pat_[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|A[KS]IA[A-Z0-9]{16}|"
    r"hvs\.[\w-]{16,}|SG\.[\w-]{16,}|whsec_[A-Za-z0-9]{16,}|dop_v1_[a-f0-9]{16,}|shp(?:at|ss|ca|pa)_[A-Fa-f0-9]{16,}|xapp-[\w-]{10,}|"
    r"AIza[\w-]{30,}|xox[abeoprs]-[\w-]{10,}|(?:gsk|r8)_[A-Za-z0-9]{16,}|nvapi-[\w-]{16,}|pplx-[\w-]{16,})"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|$)",
    re.DOTALL,
)
JWT = re.compile(r"(?<![\w-])(?=[\w-]*+\.eyJ[\w-]{4,}+\.[\w-])([\w-]*?\b)eyJ[\w-]{8,}+\.eyJ[\w-]++\.[\w-]++")
AUTHORIZATION = re.compile(r"(?i)\b(bearer|basic)\s{1,20}+([\w.~+/=-]{8,})")
INNER_CAPITAL = re.compile(r"[a-z][A-Z]")
URL_LOGIN = re.compile(r"(?<=://)[^/\s@]+@")
URL_SECRET = re.compile(
    r"(?i)([?&](?=[^?=&#\s]*+=[^&#\s\"'\]},])[^?=&#\s]*?(?:key|token|secret|passw|signature|\bsig\b|auth|credential)[^?=&#\s]*+=)"
    r"[^&#\s\"'\]},]++"
)
HOOK = re.compile(r"(https://hooks\.[\w.-]+/)\S+")
PAIR_NAME = re.compile(r"""(?<![\w.-])([\w.-]++)(["']?\s*+[:=])\s*+""")
PAIR_VALUE = re.compile(r""""[^"]*"|'[^']*'|[^\s,}\]"']+""")
"""``abc`` of ``api_key: abc`` in a sentence."""
WHOLE_VALUE = re.compile(r""""[^"]*"|'[^']*'|[^,}\]"'\n]+""")
"""The same inside a word of the command, as in YAML, where it may have blanks."""
OPTION = re.compile(r"(?<![^\s\"'\[,])(--?([\w-]{1,60}+)(?:=|\s{1,5}+))(?![-\s])([^\s\"'\]},]++)")
"""``--api-key abc`` inside a text, such as an agent's command."""


@functools.lru_cache(maxsize=4096)  # every record of a run has the same names, and is asked about the same environment
def is_secret(name: str) -> bool:
    """Whether what bears this name is a credential."""
    end = name[-_LONGEST_NAME:]
    return SECRET_NAME.search(end) is not None and NO_SECRET.search(end) is None


def hide_secrets(value: Any, name: str = "") -> Any:
    """``value`` with anything that is named or shaped like a credential replaced by ``<hidden>``, at any depth. Numbers stay."""
    return _hide(value, name, environment_secrets())


def _hide(value: Any, name: str, known: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        inherited = name if is_secret(name) else None
        return {key: _hide(item, inherited or str(key), known) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_hide(item, name, known) for item in value]
    if isinstance(value, str):
        return HIDDEN if is_secret(name) else without(_without_options(hide_shaped_secrets(value)), known)
    return value


def _without_options(text: str) -> str:
    return OPTION.sub(lambda found: f"{found[1]}{HIDDEN}" if is_secret(found[2]) else found[0], text) if "-" in text else text


def hide_secrets_in_text(text: str) -> str:
    """``text`` without what is shaped like a credential, stands where one does in a URL, or is one of the environment's."""
    return without(hide_shaped_secrets(text), environment_secrets())


@functools.lru_cache(maxsize=64)  # the completions of a group have one prompt and one answer
def hide_shaped_secrets(text: str) -> str:
    """``text`` without what is shaped like a credential, or stands where one does in a URL; quick enough for every completion."""
    text = AUTHORIZATION.sub(_authorization, JWT.sub(rf"\1{HIDDEN}", SECRET_VALUE.sub(HIDDEN, text)))
    if "://" not in text:
        return text
    return HOOK.sub(rf"\1{HIDDEN}", URL_SECRET.sub(rf"\1{HIDDEN}", URL_LOGIN.sub(f"{HIDDEN}@", text)))


def _authorization(found: re.Match[str]) -> str:
    """Hide what stands behind ``Basic`` or ``Bearer``, but for words: a basic manicure, a basic 2-bedroom flat, bearer certificates."""
    word = found[2].rstrip(".")
    if found[1].lower() == "bearer":
        is_word = word.isalpha()
    else:
        mixed = any(map(str.isdigit, word)) and any(map(str.isalpha, word))
        is_word = not mixed or re.fullmatch(r"[0-9.]{1,4}-?[a-z]{3,14}", word) is not None
    if is_word and not word.endswith("=") and len(INNER_CAPITAL.findall(word)) < 2:
        return found[0]
    return f"{found[1]} {HIDDEN}"


def environment_secrets() -> list[str]:
    """Values of environment variables that are named like credentials; of fewer than 8 characters, and plain words, are none."""
    values = [os.environ.get(name, "") for name in list(os.environ) if is_secret(name) and name not in _NO_SECRETS]
    return [value for value in values if len(value) >= 8 and not value.isalpha()]


def without(text: str, secrets: Sequence[str]) -> str:
    """``text`` with each of ``secrets`` hidden."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN)
    return text


def hide_secrets_in_command(words: Sequence[str]) -> list[str]:
    """A command line with its secrets hidden: ``key=value``, ``--key=value``, ``--key value``, and pairs inside a word, as in YAML."""
    shown: list[str] = []
    for i, word in enumerate(words):
        name, equals, value = word.partition("=")
        before = words[i - 1] if i else ""
        if equals and "://" not in name:
            shown.append(f"{name}={_without_pairs(hide_secrets(value, name))}")
        elif before.startswith("-") and "=" not in before and not word.startswith("-"):
            shown.append(_without_pairs(hide_secrets(word, before)))
        else:
            shown.append(_without_pairs(hide_secrets(word)))
    return shown


def hide_secrets_in_message(text: str) -> str:
    """A sentence that may quote settings, as in ``{'api_key': 'abc'}`` or ``judge.password=abc``. ``token:`` is a word."""
    return _without_pairs(hide_secrets_in_text(text), quoted=True)


def _without_pairs(word: str, quoted: bool = False) -> str:
    """``word`` with the values of secret pairs hidden. With ``quoted``: only those pairs whose name stands in quotes, or before ``=``;
    but for ``key=value``, as help has it."""
    shown, done = [], 0
    for match in PAIR_NAME.finditer(word):
        meant = match[2][0] in "\"'" or (match[2] == "=" and match[1] != "key") if quoted else True
        value = None
        if meant and match.start() >= done and is_secret(match[1]):
            value = (PAIR_VALUE if quoted else WHOLE_VALUE).match(word, match.end())
        if value and not value[0].startswith(("<", "{", "[")):
            shown += [word[done : match.end()], HIDDEN]
            done = value.end()
    return "".join([*shown, word[done:]])


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
