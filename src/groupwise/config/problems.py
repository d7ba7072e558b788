"""pydantic's validation errors as sentences: value, rule, remedy, with the schema's own docstring as the hint."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from groupwise.config.fields import ITEM, REMARKS, field_paths, find_field, schema_path, sections, suggest

__all__ = ["explain_failure", "shown", "unknown_key"]

_WHOLE, _NUMBER, _TRUTH, _TEXT = "a whole number", "a number", "true or false", "text"
_RULES = {
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_from_float": _WHOLE,
    "int_parsing_size": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "finite_number": "a finite number",
    "bool_type": _TRUTH,
    "bool_parsing": _TRUTH,
    "string_type": _TEXT,
    "list_type": "a list, such as [first, second]",
    "tuple_type": "a list, such as [first, second]",
    "dict_type": "a mapping, such as {name: value}",
    "none_required": "null",
}
_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("greater than", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("less than", "lt"),
}


def explain_failure(failure: ValidationError, place: str = "") -> str:
    """One sentence for the first problem (unknown keys before bad values), and how many more there are. ``place``: the section that it
    was about, where it was not a whole config."""
    by_path: dict[str, list[ErrorDetails]] = {}
    for error in failure.errors():
        by_path.setdefault(_path((*place.split("."), *error["loc"]) if place else error["loc"]), []).append(error)
    ordered = sorted(by_path.items(), key=lambda item: item[1][0]["type"] != "extra_forbidden")
    path, errors = ordered[0]
    sentence = unknown_key(path) if errors[0]["type"] == "extra_forbidden" else _bad_value(path, errors)
    more = len(ordered) - 1
    return f"{sentence} ({more} more setting{'s are' if more > 1 else ' is'} wrong too)" if more else sentence


def unknown_key(path: str) -> str:
    """The sentence for a setting that does not exist, naming the nearest that does."""
    near, remark = suggest(path), REMARKS.get(path.rpartition(".")[2])
    if near:
        return f"{path} is not a setting: did you mean {_either(near)}?" + (f" ({remark})" if remark else "")
    if remark:
        return f"{path} is not a setting: {remark}; leave it out"
    parent = path.rpartition(".")[0]
    if parent in sections():
        return f"{path} is not a setting: the section {parent} has {', '.join(sections()[parent].model_fields)}"
    top = [name for name in sections() if "." not in name]
    return f"{path} is not a setting: the sections are {', '.join(top)}, and `groupwise config` lists every field"


def shown(value: Any) -> str:
    """A value as its author would recognise it in the YAML, cut when long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _bad_value(path: str, errors: Sequence[ErrorDetails]) -> str:
    error = errors[0]
    if error["type"] == "value_error":
        message = str(error.get("ctx", {}).get("error", error["msg"]))
        return message if not path or path.split(".")[0] in message else f"{path} is {shown(error['input'])}: {message}"
    if error["type"] == "missing":
        return f"{path} is missing, but must be given{_hint(path)}"
    if path in sections() or not path:
        return f"{path or 'the file'} is {shown(error['input'])}, but must be a section of settings (name: value, one a line)"
    rule = " or ".join(dict.fromkeys(_rule(one) for one in errors))
    return f"{path} is {shown(error['input'])}, but must {rule}{_near_choice(error)}{_hint(path)}"


def _rule(error: ErrorDetails) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in _BOUNDS:
        words, key = _BOUNDS[kind]
        bound = context[key]
        return f"be {words} {bound if isinstance(bound, int) else format(bound, 'g')}"
    if kind == "literal_error":
        return f"be one of {str(context['expected']).replace(chr(39), '')}"
    if kind in ("too_short", "too_long"):
        few = kind == "too_short"
        count = context["min_length" if few else "max_length"]
        return f"have {'at least' if few else 'at most'} {count} {'entry' if count == 1 else 'entries'}"
    if kind in ("model_type", "model_attributes_type"):
        return "be a mapping of settings, such as {name: value}"
    if kind in _RULES:
        return f"be {_RULES[kind]}"
    message = error["msg"]
    return "satisfy this rule: " + message[0].lower() + message[1:]


def _near_choice(error: ErrorDetails) -> str:
    """ " (did you mean cosine?)" for a misspelt choice."""
    if error["type"] != "literal_error" or not isinstance(error["input"], str):
        return ""
    choices = [choice.strip().strip("'") for choice in str(error["ctx"]["expected"]).replace(" or ", ", ").split(",")]
    near = difflib.get_close_matches(error["input"].lower(), choices, n=1)
    return f" (did you mean {near[0]}?)" if near else ""


def _hint(path: str) -> str:
    """The field's docstring, joined to one clause: what the setting is for tells how to fix it."""
    info = find_field(schema_path(path))
    words = " ".join(((info.description if info else "") or "").split()).rstrip(".")
    if not words:
        return ""
    first, *rest = words.split(". ")
    return ": " + "; ".join(_lower_start(part) for part in (first, *rest))


def _lower_start(text: str) -> str:
    return text[0].lower() + text[1:] if text.split(" ")[0][1:].islower() else text


def _path(location: Sequence[int | str]) -> str:
    """pydantic's location as our dotted path: list indices in brackets, and without its notes on union members."""
    known = set(field_paths()) | set(sections())
    path = ""
    for position, part in enumerate(location):
        if isinstance(part, int):
            path += f"[{part}]"
        elif position and schema_path(path) in known and path not in sections() and not path.endswith("]"):
            inside = f"{schema_path(path)}{ITEM}."  # a section that may be null, such as model.lora
            if not any(one.startswith(inside) for one in known):
                break
            path += f".{part}"
        else:
            path += f".{part}" if path else part
    return path


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]
