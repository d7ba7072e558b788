"""What a client may ask for, read from the body of a chat completion. What cannot be honoured is refused in words, never ignored."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.engines.base import COLDEST, SamplingSettings
from groupwise.episodes.tools import Tool

__all__ = ["Ask", "Refused", "fits", "read_ask", "unread_keyword"]

MOST_CHOICES = 128
MOST_STOPS = 16
LONGEST_STOP = 1000

_NO_MATTER = frozenset(
    ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
)
"""Says nothing about the answer."""
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "top_logprobs": (0,), "modalities": (["text"],),
    "response_format": ({"type": "text"},), "parallel_tool_calls": (True,), "tool_choice": ("auto", "none", "required"),
}  # fmt: skip
"""Values that say what is done anyway; no other can be honoured."""
_KNOWN = frozenset(
    (
        "model", "messages", "tools", "temperature", "top_p", "max_tokens", "max_completion_tokens", "n", "stop", "seed", "logprobs",
        "stream", "stream_options",
    )
)  # fmt: skip


class Refused(Exception):
    """An error for the client: its HTTP status and words, the parameter that is meant, and OpenAI's code."""

    def __init__(self, words: str, param: str | None = None, *, status: int = 400, code: str | None = None) -> None:
        super().__init__(words)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "server_error" if self.status >= 500 else "rate_limit_error" if self.status == 429 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True)
class Ask:
    """A chat completion as it is asked for."""

    model: str
    messages: tuple[Mapping[str, Any], ...]
    """As chat templates take them: texts as content, arguments of calls as objects, no role but theirs."""
    tools: tuple[Tool, ...]
    """Those that the model may call; they run at the client's."""
    must_call: bool
    """Whether the turn is to begin as a call does."""
    limit: int | None
    """Tokens of an answer at most; None where the client names none."""
    settings: SamplingSettings
    """``max_tokens`` is for whoever answers to set, by ``limit`` and the room that there is."""
    choices: int
    stop: tuple[str, ...]
    seed: int | None
    logprobs: bool
    stream: bool
    stream_usage: bool


def read_ask(body: object) -> Ask:
    """Raises Refused."""
    try:
        return _read(body)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:  # of a type that nobody looked for
        raise Refused(f"the request cannot be read ({type(error).__name__}: {error!s:.200})") from error


def _read(body: object) -> Ask:
    if not isinstance(body, dict):
        raise Refused("the body must be a JSON object")
    values = {name: value for name, value in body.items() if value is not None}
    for name, allowed in _ONLY.items():
        if name in values and (isinstance(values[name], bool), values[name]) not in [(isinstance(v, bool), v) for v in allowed]:
            shown = " or ".join(json.dumps(value) for value in allowed)
            raise Refused(f"{name} is {_shown(values[name])}, but only {shown} can be honoured here: leave it out", name)
    unknown = sorted(set(values) - _KNOWN - _NO_MATTER - set(_ONLY))
    if unknown:
        raise Refused(f"{unknown[0]} cannot be honoured here: leave it out", unknown[0], code="unsupported_parameter")
    temperature = _number(values, "temperature", 1.0, 0.0, 100.0)
    stream, options = _flag(values, "stream"), values.get("stream_options", {})
    if not isinstance(options, dict) or set(options) - {"include_usage"} or (options and not stream):
        raise Refused(
            'stream_options may hold "include_usage" alone, and only where "stream" is true: leave it out', "stream_options"
        )
    limit = _max_tokens(values)
    settings = SamplingSettings(
        max_tokens=limit or 1, temperature=1.0 if temperature < COLDEST else temperature, greedy=temperature < COLDEST,
        top_p=_number(values, "top_p", 1.0, 1e-6, 1.0),
    )  # fmt: skip
    tools = _tools(values.get("tools", []))
    if values.get("tool_choice") == "required" and not tools:
        raise Refused('tool_choice is "required", but there are no tools', "tool_choice")
    return Ask(
        model=_text(values, "model"), messages=_messages(values.get("messages")),
        tools=() if values.get("tool_choice") == "none" else tools,
        must_call=values.get("tool_choice") == "required", limit=limit, settings=settings,
        choices=_whole(values, "n", 1, 1, MOST_CHOICES), stop=_stops(values.get("stop", ())),
        seed=_whole(values, "seed", 0, -(2**63), 2**63 - 1) if "seed" in values else None, logprobs=_flag(values, "logprobs"),
        stream=stream, stream_usage=_flag(options, "include_usage"),
    )  # fmt: skip


def _shown(value: object) -> str:
    return f"{json.dumps(value):.80}"


def _number(values: Mapping[str, Any], name: str, default: float, low: float, high: float) -> float:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not low <= value <= high:
        raise Refused(f"{name} is {_shown(value)}, but it must be a number from {low:g} to {high:g}", name)
    return float(value)


def _whole(values: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = values.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise Refused(f"{name} is {_shown(value)}, but it must be a whole number from {low} to {high}", name)
    return value


def _flag(values: Mapping[str, Any], name: str) -> bool:
    value = values.get(name, False)
    if not isinstance(value, bool):
        raise Refused(f"{name} is {_shown(value)}, but it must be true or false", name)
    return value


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str):
        raise Refused(f"{name} must be given, as text", name)
    return value


def _max_tokens(values: Mapping[str, Any]) -> int | None:
    given = {name: _whole(values, name, 1, 1, 2**31) for name in ("max_completion_tokens", "max_tokens") if name in values}
    if len(set(given.values())) > 1:
        raise Refused("max_tokens and max_completion_tokens are two names of one limit, and differ: give one", "max_tokens")
    return next(iter(given.values()), None)


def _stops(given: object) -> tuple[str, ...]:
    stops = [given] if isinstance(given, str) else given
    if (
        not isinstance(stops, list | tuple)
        or len(stops) > MOST_STOPS
        or not all(isinstance(text, str) and 0 < len(text) <= LONGEST_STOP for text in stops)
    ):
        raise Refused(
            f"stop must be a text of 1 to {LONGEST_STOP} characters, or a list of up to {MOST_STOPS} such texts", "stop"
        )
    return tuple(stops)


def _tools(given: object) -> tuple[Tool, ...]:
    if not isinstance(given, list):
        raise Refused("tools must be a list", "tools")
    tools = tuple(_tool(one, f"tools[{place}]") for place, one in enumerate(given))
    if len({tool.name for tool in tools}) < len(tools):
        raise Refused("tools has two tools of one name: rename one of them", "tools")
    return tools


def _tool(given: object, place: str) -> Tool:
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise Refused(f'{place} must be {{"type": "function", "function": {{"name": ..., "parameters": ...}}}}', "tools")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    properties = parameters.get("properties", {}) if isinstance(parameters, dict) else None
    if not isinstance(properties, dict) or not all(isinstance(one, dict) for one in properties.values()):
        raise Refused(f"the parameters of {place} must be a JSON schema of an object", "tools")
    strict = bool(function.get("strict"))
    if strict and (unread := unread_keyword(parameters)):
        raise Refused(f"{place} is strict, but {unread} in its schema is not checked here: leave strict out", "tools")
    described = {
        "name": name, "description": str(function.get("description") or name), "parameters": {**parameters, "properties": properties}
    }  # fmt: skip
    return Tool(name, _at_the_client_s, {"type": "function", "function": described, **({"strict": True} if strict else {})})


def _at_the_client_s(**arguments: Any) -> Any:
    raise AssertionError("tools of a served model run at the client's")


def _messages(given: object) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(given, list) or not given:
        raise Refused("messages must be a list of at least one message", "messages")
    return tuple(_message(one, f"messages[{place}]") for place, one in enumerate(given))


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_PARTS = frozenset(("role", "content", "name", "tool_calls", "tool_call_id"))


def _message(given: object, place: str) -> Mapping[str, Any]:
    if not isinstance(given, dict) or given.get("role") not in _ROLES:
        raise Refused(f"{place} must be an object whose role is {', '.join(_ROLES)}", "messages")
    role = _ROLES[given["role"]]
    other = sorted(name for name, value in given.items() if name not in _PARTS and value not in (None, [], {}, ""))
    if other:
        raise Refused(f"{place} has {other[0]}, which cannot be shown to the model: leave it out", "messages")
    message: dict[str, Any] = {"role": role, "content": _content(given.get("content"), place)}
    if given.get("tool_calls") and role == "assistant":
        message["tool_calls"] = _calls(given["tool_calls"], place)
    elif given.get("content") is None:
        raise Refused(f"{place} has no content: give a text", "messages")
    for name in ("name", "tool_call_id"):
        if isinstance(given.get(name), str):
            message[name] = given[name]
    return message


def _content(given: object, place: str) -> str:
    """One text. Half a surrogate pair, which JSON can hold and no token can, becomes a question mark."""
    parts: list[Any] = given if isinstance(given, list) else [{"type": "text", "text": "" if given is None else given}]
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise Refused(f"the content of {place} must be text: images, sounds and files cannot be read here", "messages")
    return "\n".join(str(part["text"]) for part in parts).encode("utf-8", "replace").decode("utf-8")


def _calls(given: Sequence[Any], place: str) -> list[Mapping[str, Any]]:
    calls: list[Mapping[str, Any]] = []
    listed: list[Any] = given if isinstance(given, list) else [None]
    for one in listed:
        try:
            name, arguments = one["function"]["name"], one["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        except (KeyError, TypeError, ValueError, RecursionError):
            name, arguments = None, None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise Refused(f"each of the tool_calls of {place} must have a function with name and arguments in JSON", "messages")
        calls.append({"type": "function", "id": str(one.get("id", "")), "function": {"name": name, "arguments": arguments}})
    return calls


# Schemas of strict tools, of the keywords that descriptions of functions mostly have.

_READ = frozenset(("type", "properties", "required", "additionalProperties", "items", "enum", "const", "anyOf"))
_SAID = frozenset(("title", "description", "default", "examples", "$schema"))
"""Words for the reader, which rule nothing out."""
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list,), "object": (dict,),
    "null": (type(None),),
}  # fmt: skip


def unread_keyword(schema: object) -> str | None:
    """A keyword that ``fits`` does not know; None where it knows all."""
    return next(_unread(schema), None)


def _unread(schema: object) -> Iterator[str]:
    if not isinstance(schema, dict):
        if not isinstance(schema, bool):
            yield repr(schema)
        return
    yield from sorted(set(schema) - _READ - _SAID)
    yield from (
        f"{name} {schema[name]!r:.40}" for name in ("enum", "anyOf", "required") if not isinstance(schema.get(name, []), list)
    )
    types = schema.get("type", [])
    yield from (str(one) for one in ([types] if isinstance(types, str) else types) if one not in _TYPES)
    for below in (*schema.get("properties", {}).values(), *schema.get("anyOf", ())):
        yield from _unread(below)
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from _unread(schema[name])


def fits(value: Any, schema: Mapping[str, Any] | bool) -> bool:
    """Whether ``value`` is one of those that ``schema`` describes."""
    if isinstance(schema, bool):
        return schema
    types = schema.get("type")
    if types is not None and not any(_is_a(value, one) for one in ([types] if isinstance(types, str) else types)):
        return False
    if ("enum" in schema and value not in schema["enum"]) or ("const" in schema and value != schema["const"]):
        return False
    if "anyOf" in schema and not any(fits(value, one) for one in schema["anyOf"]):
        return False
    if isinstance(value, dict):
        known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
        return all(name in value for name in schema.get("required", ())) and all(
            fits(one, known.get(name, others)) for name, one in value.items()
        )
    return not isinstance(value, list) or all(fits(one, schema.get("items", True)) for one in value)


def _is_a(value: object, wanted: str) -> bool:
    if isinstance(value, bool) and wanted != "boolean":
        return False
    return isinstance(value, _TYPES[wanted]) or (wanted == "integer" and isinstance(value, float) and value.is_integer())
