"""Losses and advantages by name, and the door for those of the user: registered from Python, or named by place in a config."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from groupwise.algorithm.advantages import ADVANTAGES, Advantage
from groupwise.algorithm.losses import LOSSES, Loss
from groupwise.config.section import REGISTERED
from groupwise.errors import ConfigError
from groupwise.importing import import_member, nearest

__all__ = ["find_advantage", "find_loss", "needs", "needs_of", "register_advantage", "register_loss"]

Function = TypeVar("Function", bound=Callable[..., Any])
Outputs = TypeVar("Outputs")
_NEEDS = {"loss": {"reference", "entropy", "old_logprobs"}, "advantage": {"values"}}
"""What each may ask for."""


def register_loss(name: str, *, formula: str = "", needs: str | Iterable[str] = ()) -> Callable[[Function], Function]:
    """Let ``algorithm.loss.type`` name a function ``loss(inputs: LossInputs, **settings) -> LossOutputs``. ``formula``: what it minimises
    of a token, in letters, as `groupwise.config.formula` shows it; a function named by its place has it as an attribute. ``needs``: as
    the decorator ``needs`` says it. Raises ConfigError for a need that a loss cannot have.

    >>> @register_loss("reinforce_squared", needs="entropy")
    ... def loss(inputs, *, power=2.0):
    ...     return LossOutputs(-inputs.advantages_T * inputs.logprobs_T.exp() ** power - 0.01 * inputs.entropy_T)
    """
    return _register(LOSSES, "loss", name, formula, needs)


def register_advantage(name: str, *, formula: str = "", needs: str | Iterable[str] = ()) -> Callable[[Function], Function]:
    """Let ``algorithm.advantage.type`` name a function ``advantage(inputs: AdvantageInputs, **settings) -> AdvantageOutputs``; the rest as
    in ``register_loss``."""
    return _register(ADVANTAGES, "advantage", name, formula, needs)


def needs(*what: str) -> Callable[[Function], Function]:
    """Declare what a function reads that would otherwise not be computed: a loss "reference" (a copy of the weights) or "entropy", an
    advantage "values" (a critic, which learns from its ``returns_T``). "old_logprobs" may be named too: a loss is given them anyway, since
    they are those of a batch's first passes.

    Raises ConfigError for what nothing may need.
    """
    if unknown := set(what).difference(*_NEEDS.values()):
        raise ConfigError(
            f"needs names {', '.join(sorted(unknown))}, but a loss may need {_listed('loss')}, and an advantage {_listed('advantage')}: "
            "name these"
        )

    def declare(function: Function) -> Function:
        function.needs = frozenset(what)  # type: ignore[attr-defined]
        return function

    return declare


def needs_of(function: object) -> frozenset[str]:
    """What a function declared, also through ``functools.partial``."""
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "needs", frozenset())


def find_loss(name: str, settings: Mapping[str, Any]) -> Loss:
    """The loss of a registered name or a place (``my_loss.py:loss``), with its settings bound.

    Raises ConfigError for one that is not there, and for settings that it does not take.
    """
    return _find(LOSSES, name, settings, "loss")


def find_advantage(name: str, settings: Mapping[str, Any]) -> Advantage:
    """The advantage of a registered name or a place (``my_advantage.py:advantage``), with its settings bound. Raises as ``find_loss``
    does."""
    return _find(ADVANTAGES, name, settings, "advantage")


def _listed(what: str) -> str:
    return " or ".join(sorted(_NEEDS[what]))


def _register(
    table: dict[str, Any], what: str, name: str, formula: str, wanted: str | Iterable[str]
) -> Callable[[Function], Function]:
    asked = {wanted} if isinstance(wanted, str) else set(wanted)
    if unknown := asked - _NEEDS[what]:
        raise ConfigError(
            f"{name!r} needs {', '.join(sorted(unknown))}, but its kind ({what}) may need {_listed(what)}: name these"
        )

    def declare(function: Function) -> Function:
        if asked:
            needs(*asked, *needs_of(function))(function)
        if formula:
            function.formula = formula  # type: ignore[attr-defined]
        table[name] = function
        REGISTERED[what][name] = function
        return function

    return declare


def _find(table: Mapping[str, Callable[..., Outputs]], name: str, settings: Mapping[str, Any], what: str) -> partial[Outputs]:
    function = table[name] if name in table else _imported(table, name, what)
    if unknown := needs_of(function) - _NEEDS[what]:
        raise ConfigError(
            f"{name!r} needs {', '.join(sorted(unknown))}, but a function of algorithm.{what} may need {_listed(what)}: name these"
        )
    parameters = _signature(function).parameters.values()
    taken = [p.name for p in list(parameters)[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for key in settings:
        if key not in taken and not takes_all:
            listed = f"it takes {', '.join(taken)}" if taken else "it takes none"
            raise ConfigError(
                f"algorithm.{what}.settings has {key!r}, but {name!r} takes no such keyword{nearest(key, taken)}: {listed}"
            )
    missing = [p.name for p in list(parameters)[1:] if p.name in taken and p.default is p.empty and p.name not in settings]
    if missing:
        raise ConfigError(f"algorithm.{what}.settings lacks {', '.join(missing)}, which {name!r} cannot do without: set it")
    given = {p.name: p.annotation for p in parameters if p.annotation is not p.empty}
    return partial(function, **{
        key: _checked(f"algorithm.{what}.settings.{key}", value, given[key]) if key in given else value for key, value in settings.items()
    })  # fmt: skip


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except Exception:  # an annotation that names what is not there when the code runs
        return inspect.signature(function)


def _checked(place: str, value: object, annotation: Any) -> Any:
    """``value`` as ``annotation`` has it, such as a whole number as a float; as it is where pydantic does not know the annotation."""
    if isinstance(annotation, str):
        return value
    try:
        return TypeAdapter(annotation).validate_python(value)
    except PydanticUserError:
        return value
    except ValidationError as failure:
        rule = failure.errors()[0]["msg"]
        raise ConfigError(f"{place} is {value!r}, but the function's annotation asks otherwise ({rule}): correct it") from failure


def _imported(table: Mapping[str, object], name: str, what: str) -> Callable[..., Any]:
    if ":" not in name:
        raise ConfigError(
            f"algorithm.{what}.type is {name!r}{nearest(name, table)}, but known are {', '.join(table)}: name one of them, or your own "
            f"as path/to/file.py:function"
        )
    function, _ = import_member(name, what, ConfigError)
    if not callable(function) or isinstance(function, type):
        kind = "class" if isinstance(function, type) else type(function).__name__
        raise ConfigError(f"algorithm.{what}.type is {name!r}, which is a {kind}: name a function")
    return function  # type: ignore[no-any-return]
