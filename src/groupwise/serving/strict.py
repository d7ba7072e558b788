"""Whether the arguments of a call fit a JSON schema, of the keywords that descriptions of functions mostly have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["fits", "unread_keyword"]

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
