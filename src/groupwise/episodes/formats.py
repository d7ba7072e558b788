"""How a model writes calls of tools in its text, and how they are read: by the model's own format, or by tags for tiny models.

A call that cannot be read is a call all the same: the policy is told what is wrong with it, and it is counted.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from groupwise.errors import ConfigError

__all__ = ["FORMATS", "Asked", "CallFormat", "Hermes", "after_thoughts", "format_of_template"]

DEEPEST = 50
"""How deep arguments may be nested: rewards and records get a call by ``asdict``, which fails at a few hundred levels."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One call as the policy wrote it."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """By name."""
    positions: tuple[Any, ...] = ()
    """By position."""
    text: str | None = None
    """The arguments as they were written, in a format in which they may also be one piece of text: ``12 * 3``."""
    problem: str | None = None
    """Why it cannot be read."""


class CallFormat(Protocol):
    """One way to write calls."""

    native: bool
    """Whether the model's chat template describes the tools; else the system prompt does."""

    @property
    def openings(self) -> tuple[str, ...]:
        """What every call begins with, or the whole turn of calls does: one of these, mostly the first."""

    def read(self, text: str) -> list[Asked]:
        """Every call in a turn's text, in order; empty where it has none, and so is an answer."""

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of one call."""

    def beside(self, text: str) -> str:
        """What a turn says beside its calls."""


def after_thoughts(text: str, opening: str) -> str:
    """What follows a model's thoughts, in which calls are only drafted; nothing where they never end.

    Where the chat template has written ``<think>``, the text has their end alone. A ``</think>`` in an argument of a call, which begins
    with the tag ``opening``, ends no thoughts.
    """
    _, ended, rest = text.partition("</think>")
    if text.lstrip().startswith("<think>"):
        return rest
    begin, end = rest.find(opening), rest.find(opening.replace("<", "</"))
    return rest if ended and (end == -1 or -1 < begin < end) else text


class Tags:
    """``<call>calculator(12 * 3)</call>``, for models without a format of their own. Arguments are Python's literals, by position or by
    name; a tool of one argument that is text also takes it without quotes."""

    native, openings = False, ("<call>",)
    _CALL = re.compile(r"<call>(.*?)(</call>|\Z)", re.DOTALL)
    _PARTS = re.compile(r"\s*([\w.-]+)\s*\((.*)\)\s*", re.DOTALL)

    def read(self, text: str) -> list[Asked]:
        return [self._one(found[1], bool(found[2])) for found in self._CALL.finditer(after_thoughts(text, self.openings[0]))]

    def _one(self, inside: str, closed: bool) -> Asked:
        parts = self._PARTS.fullmatch(inside)
        name = parts[1] if parts else inside.strip()[:40]
        if not closed:
            return Asked(name, problem="a call ends with </call>")
        if parts is None:
            return Asked(name, problem="a call has the form <call>name(arguments)</call>")
        try:
            call = ast.parse(f"f({parts[2]})", mode="eval").body
            assert isinstance(call, ast.Call)
            named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords if keyword.arg is not None}
            positions = tuple(map(ast.literal_eval, call.args))
            json.dumps([named, positions])  # sets, bytes and numbers of thousands of digits are no arguments
            if len(named) == len(call.keywords):
                return Asked(name, named, positions, parts[2].strip())
        except (SyntaxError, ValueError, TypeError, AssertionError, MemoryError, RecursionError):
            pass
        return Asked(name, text=parts[2].strip())

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        if len(arguments) == 1 and isinstance(text := next(iter(arguments.values())), str) and self._survives(name, text):
            return f"<call>{name}({text})</call>"
        return f"<call>{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})</call>"

    def beside(self, text: str) -> str:
        said = after_thoughts(text, self.openings[0])
        return (text[: len(text) - len(said)] + self._CALL.sub("", said)).strip()

    def _survives(self, name: str, text: str) -> bool:
        """Whether the bare text is read back as itself."""
        read = self.read(f"<call>{name}({text})</call>")
        return (
            len(read) == 1
            and read[0].text == text
            and not read[0].arguments
            and not any(isinstance(p, str) for p in read[0].positions)
        )


class Hermes:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Qwen, Hermes and others.

    ``closed``: a call without its end cannot be read.
    """

    native, openings = True, ("<tool_call>",)
    _CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

    def __init__(self, closed: bool = False) -> None:
        self._closed = closed

    def read(self, text: str) -> list[Asked]:
        found = []
        for match in self._CALL.finditer(after_thoughts(text, self.openings[0])):
            if self._closed and not match[2]:
                found.append(Asked("", problem="a call ends with </tool_call>"))
                continue
            try:
                found.append(_of_json(json.loads(match[1])))
            except (ValueError, RecursionError):
                found.append(Asked("", problem="what stands in <tool_call></tool_call> is no JSON object"))
        return found

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        inside = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        return f"<tool_call>\n{inside}\n</tool_call>"

    def beside(self, text: str) -> str:
        said = after_thoughts(text, self.openings[0])
        return (text[: len(text) - len(said)] + self._CALL.sub("", said)).strip()


class Llama3:
    """``{"name": ..., "parameters": {...}}`` as the whole turn, several one after the other: Llama 3.1 and later."""

    native, openings = True, ("{",)
    _TAG = "<|python_tag|>"

    def read(self, text: str) -> list[Asked]:
        rest = text.strip().removeprefix(self._TAG).strip()
        found: list[Asked] = []
        if not rest.startswith("{"):
            return []
        while rest:
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):
                meant = bool(found) or re.match(r'\{\s*"name"\s*:', rest) is not None
                return [*found, Asked("", problem="the call is no JSON object")] if meant else []
            if not found and not (
                isinstance(value, dict) and "name" in value and ("parameters" in value or "arguments" in value)
            ):
                return []  # an answer that is JSON
            found.append(_of_json(value))
            rest = rest[end:].lstrip(" \n\t;,")
        return found

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps({"name": name, "parameters": dict(arguments)}, ensure_ascii=False)

    def beside(self, text: str) -> str:
        return "" if self.read(text) else text.strip()


class WholeTurn:
    """``{"name": ..., "arguments": {...}}`` as the whole turn, bare or in a Markdown fence: what Qwen2.5-Coder writes where its template
    asks for ``<tool_call>``. Text before it, or another key, make it an answer that shows JSON."""

    native, openings = True, ("{", "```")
    _OBJECT = re.compile(r"\s*(?:```(?:json)?\s*(\{.*\})\s*```|(\{.*))\s*", re.DOTALL)
    _MEANT = re.compile(r'\{\s*"name"\s*:\s*"[\w.-]*"\s*,\s*"arguments"\s*:')

    def read(self, text: str) -> list[Asked]:
        if (whole := self._OBJECT.fullmatch(text)) is None:
            return []
        inside = whole[1] or whole[2]
        try:
            value = json.loads(inside)
        except (ValueError, RecursionError) as error:
            why = f"a call is one JSON object, and nothing beside it ({error})"
            return [Asked("", problem=why)] if self._MEANT.match(inside) else []
        named = value.keys() == {"name", "arguments"} and isinstance(value["name"], str)
        return [_of_json(value)] if named and isinstance(value["arguments"], dict) else []

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        return json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)

    def beside(self, text: str) -> str:
        return "" if self.read(text) else text.strip()


def _of_json(value: object) -> Asked:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Asked("", problem='a call is a JSON object with "name" and "arguments"')
    arguments = value.get("arguments", value.get("parameters"))
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return Asked(value["name"], problem="its arguments are no JSON object")
    if _is_deep(arguments):
        return Asked(value["name"], problem=f"its arguments are nested more than {DEEPEST} deep")
    return Asked(value["name"], arguments)


def _is_deep(value: object) -> bool:
    """Whether lists and objects stand more than ``DEEPEST`` deep in each other."""
    level = [value]
    for _ in range(DEEPEST):
        containers = [one for one in level if isinstance(one, (list, dict))]
        level = [one for outer in containers for one in (outer.values() if isinstance(outer, dict) else outer)]
    return any(isinstance(one, (list, dict)) for one in level)


FORMATS: dict[str, CallFormat] = {"tags": Tags(), "hermes": Hermes(), "llama3": Llama3(), "json": WholeTurn()}


_UNREAD = ("<function=", "<arg_key>")
"""In templates whose calls have a form that no format here reads: Qwen3-Coder's and Qwen3.5's, GLM's."""


def format_of_template(template: str | Mapping[str, str] | None) -> str:
    """The name of the format that a chat template speaks of; ``tags`` where it knows no tools. Of templates by name that of ``tool_use``
    counts, which describes the tools, else the ``default``.

    Raises ConfigError for a template that speaks of calls in a form that is not read here.
    """
    if isinstance(template, Mapping):
        template = template.get("tool_use", template.get("default"))
    if template and (unread := next((mark for mark in _UNREAD if mark in template), None)):
        raise ConfigError(
            f"the chat template wants calls with {unread!r}, a form that is not read here: set rollout.call_format=tags, or take "
            "a model that writes calls as JSON (Qwen 2.5, Qwen 3, Llama 3.1)"
        )
    if template and "<tool_call>" in template:
        return "hermes"
    if template and "ipython" in template and "parameters" in template:
        return "llama3"
    return "tags"
