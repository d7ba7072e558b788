"""pydantic's validation errors as sentences: value, rule, remedy, with the schema's own docstring as the hint."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from groupwise.config.fields import REMARKS, field_paths, find_field, kinds_of, schema_path, sections, suggest
from groupwise.config.former import FORMER, former_key
from groupwise.config.inert import INERT
from groupwise.config.section import shown

__all__ = ["UNKNOWN", "explain_failure", "lower_start", "place", "unknown_key"]

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


UNKNOWN = ("extra_forbidden", "former_key")
"""pydantic's types of error for a setting that does not exist."""


def explain_failure(failure: ValidationError, place: str = "", kind: str | None = None) -> str:
    """One sentence for the first problem (unknown keys before bad values), and how many more there are. ``place``: the section that it
    was about, and its type, where it was not a whole config."""
    by_path: dict[tuple[str, str | None], list[ErrorDetails]] = {}
    for error in failure.errors():
        by_path.setdefault(_path(error["loc"], place, kind), []).append(error)
    ordered = sorted(by_path.items(), key=lambda item: item[1][0]["type"] not in UNKNOWN)
    (path, kind), errors = ordered[0]
    sentence = unknown_key(path, kind) if errors[0]["type"] in UNKNOWN else _bad_value(path, kind, errors)
    more = len(ordered) - 1
    return f"{sentence} ({more} more setting{'s are' if more > 1 else ' is'} wrong too)" if more else sentence


def place(section: type[BaseModel]) -> str:
    """Where a section stands in a config, such as ``training``; empty for the whole, and for one that stands in several places."""
    paths = [path for path, kinds in sections().items() if section in kinds]
    return paths[0] if len(paths) == 1 else ""


def unknown_key(path: str, kind: str | None = None) -> str:
    """The sentence for a setting that does not exist, naming the nearest that does. ``kind``: the type of its section, where it comes in
    several."""
    parent, _, leaf = path.rpartition(".")
    if parent in ("", "algorithm") and leaf in FORMER and path not in field_paths():
        return former_key(leaf)
    if parent.startswith("algorithm.") and leaf in FORMER and not any(known.endswith(f".{leaf}") for known in field_paths()):
        return f"{path} is not a setting: write {FORMER[leaf]}"
    if kind is not None and (path in field_paths() or kind not in _built_in(parent)):
        return _of_another_type(path, kind)
    near, remark = suggest(path), REMARKS.get(leaf)
    if near:
        return f"{path} is not a setting: did you mean {_either(near)}?" + (f" ({remark})" if remark else "")
    if remark:
        return f"{path} is not a setting: {remark}; leave it out"
    if parent in sections():
        names = dict.fromkeys(name for model in sections()[parent] for name in model.model_fields)
        return f"{path} is not a setting: the section {parent} has {', '.join(names)}"
    top = [name for name in sections() if "." not in name]
    return f"{path} is not a setting: the sections are {', '.join(top)}, and `groupwise config` lists every field"


def _of_another_type(path: str, kind: str) -> str:
    """The sentence for a setting that other types of its section have."""
    parent, _, leaf = path.rpartition(".")
    if kind not in _built_in(parent):
        return f"{path} is not a setting of a function of your own, whose settings are {parent}.settings: move it there, or leave it out"
    models = [model for model in sections().get(parent, ()) if leaf in model.model_fields]
    having = [one for model in models for one in kinds_of(model) or ("a function of your own",)]
    return f"{path} is not a setting of type {kind}, but of {', '.join(having)}: leave it out, or set {parent}.type"


def _built_in(section: str) -> list[str]:
    """The types that a section comes in, those of one's own apart."""
    return [kind for model in sections().get(section, ()) for kind in kinds_of(model)]


def _bad_value(path: str, kind: str | None, errors: Sequence[ErrorDetails]) -> str:
    error = errors[0]
    if error["type"] == INERT:
        return str(error["ctx"]["sentence"])
    if error["type"] == "value_error":
        message = str(error.get("ctx", {}).get("error", error["msg"]))
        return message if not path or path.split(".")[0] in message else f"{path} is {shown(error['input'])}: {message}"
    if error["type"] == "missing":
        return f"{path} is missing, but must be given{_hint(path, kind)}"
    if path in sections() or not path:
        return f"{path or 'the file'} is {shown(error['input'])}, but must be a section of settings (name: value, one a line)"
    rule = " or ".join(dict.fromkeys(_rule(one) for one in errors))
    return f"{path} is {shown(error['input'])}, but must {rule}{_near_choice(error)}{_hint(path, kind)}"


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


def _hint(path: str, kind: str | None) -> str:
    """The field's docstring, joined to one clause: what the setting is for tells how to fix it."""
    info = find_field(schema_path(path), kind)
    words = " ".join(((info.description if info else "") or "").split()).rstrip(".")
    if not words:
        return ""
    first, *rest = words.split(". ")
    return ": " + "; ".join(lower_start(part) for part in (first, *rest))


def lower_start(text: str) -> str:
    """With a small first letter, unless the first word is a name such as AdamW."""
    return text[0].lower() + text[1:] if text.split(" ")[0][1:].islower() else text


def _path(location: Sequence[int | str], path: str, kind: str | None) -> tuple[str, str | None]:
    """pydantic's location, within ``path``, as our dotted path: list indices in brackets, and without its notes on union members; and the
    type of the section, where it comes in several."""
    known = set(field_paths()) | set(sections())
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif len(sections().get(path, ())) > 1 and kind is None:
            kind = part
        elif path and schema_path(path) in known and path not in sections() and not path.endswith("]"):
            inside = f"{schema_path(path)}."
            if not any(one.startswith(inside) for one in known):
                break
            path += f".{part}"
        else:
            path += f".{part}" if path else part
    return path, kind


def _either(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]
