"""What every section of the settings has in common; and what sections that come in several types have."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from pydantic import BaseModel, ConfigDict, ValidationError

from groupwise.errors import ConfigError

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

__all__ = ["OWN", "REGISTERED", "SENTENCES", "Section", "check_own", "explained", "shown", "type_of"]

OWN = "own"
"""Tag of a type that is not built in: a registered name, or a function by its file or import path."""
REGISTERED: dict[str, dict[str, Any]] = {"advantage": {}, "loss": {}}
"""Functions of its own that a program has registered, whose names a config may use like built-in ones."""


class Sentences(Protocol):
    """How a mistake in a section is told, by what knows the whole schema."""

    def place(self, section: type[BaseModel]) -> str: ...

    def unknown_key(self, path: str, kind: str | None) -> str: ...

    def explain_failure(self, failure: ValidationError, place: str = "", kind: str | None = None) -> str: ...


SENTENCES = cast(Sentences, None)
"""Set to ``config.problems`` when the package is imported, which knows the schema that is made of sections."""


class _Explains(ModelMetaclass):
    """Makes a section that is built in Python, such as ``AlgorithmConfig(beta=0)``, answer in one sentence, as YAML does.

    A metaclass, because pydantic calls a section's own ``__init__`` for the sections inside a config too: a mistake there would lose its
    place, and the mistakes beside it.
    """

    if not TYPE_CHECKING:  # what a call takes and returns is the class's to say

        def __call__(cls, *args: Any, **values: Any) -> Any:
            """Raises ConfigError."""
            try:
                return super().__call__(*args, **values)
            except ValidationError as failure:
                kind = cls.model_fields.get("type")
                raise explained(failure, cls, type_of(values) or type_of({"type": kind and kind.default})) from failure


class Section(BaseModel, metaclass=_Explains):
    """Common rules: unknown keys are refused, field docstrings are descriptions, values are checked on assignment too."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_assignment=True)

    def __setattr__(self, name: str, value: Any) -> None:
        """Raises ConfigError for a setting that does not exist, or a value that it cannot have."""
        if name not in type(self).model_fields and name not in self.__private_attributes__:
            raise ConfigError(SENTENCES.unknown_key(f"{SENTENCES.place(type(self))}.{name}".lstrip("."), type_of(self)))
        if name == "type":
            place = SENTENCES.place(type(self))
            raise ConfigError(
                f"{place}.type decides which settings the section has: assign a whole section, such as "
                f"config.{place} = {{'type': {value!r}}}"
            )
        try:
            self._assign(name, value)
        except ValidationError as failure:
            raise explained(failure, type(self), type_of(self)) from failure

    def _assign(self, name: str, value: Any) -> None:
        before = self.model_copy()
        try:
            super().__setattr__(name, value)
        except ValidationError:  # rules of the whole section are asked with the value in it already
            self.__setstate__(before.__getstate__())
            raise


def explained(failure: ValidationError, section: type[BaseModel] | None = None, kind: str | None = None) -> ConfigError:
    """pydantic's failure as a ConfigError in one sentence. ``section``: what it was about, where it was not a whole config; ``kind``: its
    type, where it comes in several."""
    return ConfigError(SENTENCES.explain_failure(failure, SENTENCES.place(section) if section else "", kind))


def shown(value: object) -> str:
    """A value as its author would recognise it in the YAML, cut when long."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def type_of(section: object) -> str | None:
    """The ``type`` of a section, or of the mapping that one is made of; None where it names none."""
    kind = section.get("type") if isinstance(section, Mapping) else getattr(section, "type", None)
    return kind if isinstance(kind, str) else None


def check_own(section: str, given: Any, known: Iterable[str]) -> Any:
    """Refuse a type that is neither built in nor registered nor a function's place, with the nearest name."""
    kind = type_of(given)
    if not isinstance(given, Mapping):
        raise ValueError(
            f"algorithm.{section} is {given!r}, but must be a section of settings, such as {{type: {next(iter(known))}}}"
        )
    if kind is not None and (kind in REGISTERED[section] or all(kind.rpartition(":")[::2])):
        return given
    names = [*known, *sorted(REGISTERED[section])]
    near = difflib.get_close_matches(kind or "", names, n=1)
    meant = f" (did you mean {near[0]}?)" if near else ""
    raise ValueError(
        f"algorithm.{section}.type is {given.get('type')!r}, but must be one of {', '.join(names)}{meant}, or a function of your own, such "
        f"as my_{section}.py:{section}"
    )
