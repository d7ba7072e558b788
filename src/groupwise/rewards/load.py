"""Find the reward functions that a config names, and check that they can be called, before any weights are loaded.

A name is looked up in this order: functions handed over from Python, ``path/to/file.py:function``,
``package.module:function``, the built-in table.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, get_args

from groupwise.config.rewards import Isolation, RewardFunctionConfig, RewardModelConfig, Scope
from groupwise.errors import RewardError
from groupwise.importing import import_member, in_one_line, looks_like_file, nearest
from groupwise.rewards.functions import builtin_rewards, environment, environment_turns
from groupwise.rewards.sandbox import refusal
from groupwise.rewards.scores import Shaper

__all__ = [
    "OFFERED",
    "LoadedReward",
    "OpenModel",
    "RewardFunction",
    "Rewards",
    "layers",
    "load_reward",
    "named_rewards",
    "reward_scope",
]

Function = TypeVar("Function", bound=Callable[..., Any])

RewardFunction = Callable[..., Any]
"""``f(prompts, completions, **columns) -> list[float | StepRewards | None]``, plain or ``async``."""
Rewards = Mapping[str, RewardFunction] | Sequence[RewardFunction] | RewardFunction
"""Reward functions as they are handed over from Python: by name, in a list, or one alone."""
OpenModel = Callable[[RewardModelConfig], RewardFunction]
"""Makes a reward model from its settings, without its weights. Handed in from above: this room needs no torch."""

OFFERED = (
    "prompts",
    "completions",
    "answer",
    "accepted_answers",
    "answer_style",
    "completion_ids",
    "finish_reason",
    "calls",
    "environment_reward",
    "turns",
    "max_completion_tokens",
    "group_index",
)
"""Keywords that every reward function may accept, whatever columns the data has."""


def reward_scope(scope: Scope) -> Callable[[Function], Function]:
    """Declare what one call of a reward function sees: a ``completion``, the completions of one problem (``group``), or those of the
    whole step (``batch``). A config's ``scope`` wins.

    >>> @reward_scope("batch")
    ... def rarest(completions, **columns):
    ...     texts = [str(completion) for completion in completions]
    ...     return [1 / texts.count(text) for text in texts]
    """
    if scope not in get_args(Scope):
        raise RewardError(f"reward_scope is given {scope!r}, but it must be one of {', '.join(get_args(Scope))}")

    def declare(function: Function) -> Function:
        function.reward_scope = scope  # type: ignore[attr-defined]
        return function

    return declare


@dataclass(frozen=True, slots=True)
class LoadedReward:
    """A reward function that was found and can be called."""

    name: str
    """Name in logs and in ``Group.components``; unique within a suite."""
    function: RewardFunction
    weight: float
    source: str
    """Where it came from: ``built-in``, ``reward model``, ``python``, a file's path, or a module's name."""
    arguments: Mapping[str, object] = field(default_factory=dict)
    accepted: frozenset[str] | None = None
    """Keywords that the function takes; ``None`` where it has ``**kwargs`` and takes all."""
    required: tuple[str, ...] = ()
    """Keywords without a default that ``arguments`` does not supply."""
    bound: frozenset[str] = frozenset()
    """Keywords that a `functools.partial` has set: they win over columns, as ``arguments`` do."""
    scope: Scope = "group"
    """What one call sees."""
    timeout_s: float | None = None
    """Seconds that one call may take; None leaves it to the suite."""
    isolate: Isolation = False
    """Whether it is called in a process of its own, and behind walls."""
    entry: Mapping[str, object] = field(default_factory=dict)
    """What another process needs to find it again: fields of ``RewardFunctionConfig``."""
    shaper: Shaper = field(default_factory=Shaper)
    """What its scores go through before they are weighted; holds running statistics."""

    @property
    def built_in(self) -> bool:
        return self.source == "built-in"

    @property
    def is_environment(self) -> bool:
        """Whether it is what an environment gave, or cannot do without that or ``turns``: no completion has them that was not played."""
        return self.function in (environment, environment_turns) or not {"turns", "environment_reward"}.isdisjoint(self.required)

    @property
    def is_model(self) -> bool:
        """Whether it is a reward model, with weights to load before the first call."""
        return bool(getattr(self.function, "is_reward_model", False))

    @property
    def takes_the_run_s_limit(self) -> bool:
        """Whether ``rewards.timeout_s`` holds for it. Ours bound their own work: a group of slow comparisons is no reason to stop a run."""
        return self.timeout_s is None and bool(self.isolate or not (self.built_in or self.is_model))

    def missing(self, available: Iterable[str]) -> list[str]:
        """Required keywords that the data does not supply."""
        return [name for name in self.required if name not in set(available)]

    def takes(self, name: str) -> bool:
        """Whether the data may supply it. Settings of a built-in function come from ``arguments`` alone, whatever columns are called."""
        accepted = name not in self.bound and (self.accepted is None or name in self.accepted)
        return accepted and (name in OFFERED or not self.built_in)

    def select(self, available: Mapping[str, object]) -> dict[str, object]:
        """What to call the function with: of ``available`` only what it takes, and ``arguments``, which win over columns."""
        return {**{name: value for name, value in available.items() if self.takes(name)}, **self.arguments}


def load_reward(
    config: RewardFunctionConfig,
    extra: Mapping[str, RewardFunction] | None = None,
    max_completion_tokens: int | None = None,
    open_model: OpenModel | None = None,
) -> LoadedReward:
    """Resolve one entry of ``rewards.functions``. Raises ``RewardError`` with what is wrong and what to write instead.

    ``max_completion_tokens``: the run's limit, for arguments that must suit it. ``open_model``: what makes reward models.
    """
    extra = extra or {}
    spec = config.called
    if config.model is not None:
        assert open_model is not None, "whoever reads configs with reward models brings open_model"
        name, function, source = spec, open_model(config.model), "reward model"
    elif spec in extra:
        name, function, source = spec, extra[spec], "python"
    elif ":" in spec:
        function, source = import_member(spec, "reward", RewardError)
        name = spec.rpartition(":")[2]
    else:
        name, function, source = spec, _built_in(spec, extra), "built-in"
    _require_function(spec, function)
    if config.isolate == "sandbox" and (refused := refusal()):
        raise RewardError(
            f"reward {spec!r} has isolate=sandbox, but this machine does not allow that: {refused}; run where it is allowed, or "
            "set isolate: process if its code and what it runs can be trusted"
        )
    accepted, required = _read_signature(spec, function, config.arguments, built_in=source == "built-in")
    if source == "built-in":
        _try_arguments(spec, function, config.arguments, max_completion_tokens or 1 << 30)
    return LoadedReward(
        name,
        function,
        config.weight,
        source,
        dict(config.arguments),
        accepted,
        required,
        _bound(function),
        scope=_scope(spec, function, config.scope),
        timeout_s=config.timeout_s,
        isolate=config.isolate,
        entry=_entry(spec, function, source, config.arguments) if config.isolate else {},
        shaper=Shaper(config.normalise, config.clip),
    )


def _built_in(spec: str, extra: Mapping[str, RewardFunction]) -> RewardFunction:
    table = builtin_rewards()
    if spec in table:
        return table[spec]
    if looks_like_file(spec):
        raise RewardError(f"reward {spec!r} names a file but no function in it: write {spec}:function_name")
    known = sorted({*table, *extra})
    raise RewardError(
        f"there is no reward function {spec!r}{nearest(spec, known)}: known are {', '.join(known)}; "
        "name your own as path/to/file.py:function or package.module:function"
    )


def named_rewards(given: Rewards | None) -> dict[str, RewardFunction]:
    """Reward functions from Python by name: of a list, or of one alone, each by its own; lambdas are ``lambda``, ``lambda_2`` ...

    >>> list(named_rewards([len, lambda completions: [0.0], lambda completions: [1.0]]))
    ['len', 'lambda', 'lambda_2']
    """
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    listed: list[Any] = list(given) if isinstance(given, list | tuple) else [given]
    named: dict[str, RewardFunction] = {}
    for function in listed:
        inner = layers(function)[-2]
        own = str(getattr(inner, "__name__", type(inner).__name__)).strip("<>")
        name, use = own, 1
        while name in named:
            use += 1
            name = f"{own}_{use}"
        named[name] = function
    return named


def layers(function: RewardFunction) -> list[Any]:
    """The function, what each `functools.partial` around it holds, and last the ``__call__`` of the innermost."""
    found = [function]
    while isinstance(found[-1], functools.partial):
        found.append(found[-1].func)
    return [*found, getattr(found[-1], "__call__", None)]  # noqa: B004


def _bound(function: Any) -> frozenset[str]:
    """Keywords that partials have set, also those inside of decorators."""
    names: set[str] = set()
    while function is not None:
        if isinstance(function, functools.partial):
            names |= function.keywords.keys()
        function = function.func if isinstance(function, functools.partial) else getattr(function, "__wrapped__", None)
    return frozenset(names)


def _require_function(spec: str, function: object) -> None:
    if hasattr(function, "forward") and hasattr(function, "config"):
        raise RewardError(
            f"reward {spec!r} is a {type(function).__name__} without its tokenizer: hand over groupwise.RewardModel(model, tokenizer)"
        )
    if isinstance(function, str):
        raise RewardError(
            f"reward {spec!r} is a text: name functions in the config's rewards.functions, and hand over functions and RewardModels"
        )
    if inspect.isclass(function):
        raise RewardError(f"reward {spec!r} is a class, not a function: name a function, or an instance with a __call__ method")
    if not callable(function):
        raise RewardError(f"reward {spec!r} is a {type(function).__name__}, not a function: name something that can be called")


def _scope(spec: str, function: RewardFunction, wanted: Scope | None) -> Scope:
    declared: Any = next((one.reward_scope for one in layers(function) if hasattr(one, "reward_scope")), "group")
    if declared not in get_args(Scope):
        raise RewardError(
            f"reward {spec!r} declares reward_scope {declared!r}, but it must be one of {', '.join(get_args(Scope))}"
        )
    return wanted or declared


def _entry(spec: str, function: RewardFunction, source: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """How a new process finds the function. One from Python must be a module's own, and that module none that is being run."""
    if source != "python":
        place, _, member = spec.rpartition(":")
        if looks_like_file(place):  # the process may be in another folder
            spec = f"{Path(place).expanduser().absolute()}:{member}"
        return {"function": spec, "arguments": dict(arguments)}
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    if module == "__main__" or getattr(sys.modules.get(module or ""), name, None) is not function:
        raise RewardError(
            f"reward {spec!r} is isolated, but a new process could not find it: put it into a file and name it as "
            "path/to/file.py:function, or leave isolate out"
        )
    return {"function": f"{module}:{name}", "arguments": dict(arguments)}


def _read_signature(
    spec: str, function: RewardFunction, arguments: Mapping[str, object], built_in: bool
) -> tuple[frozenset[str] | None, tuple[str, ...]]:
    """The keywords that a function accepts (``None`` for all of them) and those it cannot do without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise RewardError(
            f"reward {spec!r} has no readable signature: wrap it in a def f(prompts, completions, **columns)"
        ) from error
    form = "reward functions are called by keyword as f(prompts, completions, **columns)"
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty]
    if by_position:
        raise RewardError(
            f"reward {spec!r} takes {by_position[0]!r} by position only, but {form}: remove the '/' from its signature"
        )
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    # Ours have **columns only so that other trainers can call them; a misspelt argument must not vanish in there.
    takes_all = not built_in and any(p.kind is p.VAR_KEYWORD for p in parameters)
    accepted = frozenset(p.name for p in named)
    if not takes_all and not accepted & {"completions", "completion_ids"}:
        raise RewardError(f"reward {spec!r} has no parameter 'completions', but {form}: give it that parameter")
    for name in arguments:
        if name in ("prompts", "completions"):
            raise RewardError(
                f"reward {spec!r} is given an argument {name!r}, which every call already supplies: remove it from arguments"
            )
        if not takes_all and name not in accepted:
            own = accepted - set(OFFERED)
            listed = f"it takes {', '.join(sorted(own))}" if own else "it takes none"
            raise RewardError(f"reward {spec!r} takes no argument {name!r}{nearest(name, own)}: {listed}")
    required = tuple(p.name for p in named if p.default is p.empty and p.name not in arguments)
    return None if takes_all else accepted, required


def _try_arguments(spec: str, function: RewardFunction, arguments: Mapping[str, object], limit: int) -> None:
    """Call one of ours on a toy completion, so that a bad argument is refused now and not after the first rollout."""
    sample = {"prompts": ["?"], "completions": ["1 2"], "completion_ids": [[1, 2]], "answer": ["1"], "answer_style": ["xml"]}
    sample |= {
        "finish_reason": ["stop"],
        "calls": [[]],
        "environment_reward": [None],
        "turns": [[]],
        "max_completion_tokens": [limit],
        "group_index": [0],
    }
    try:
        function(**{**sample, **arguments})
    except RewardError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise RewardError(
            f"reward {spec!r} cannot work with the arguments {dict(arguments)}: {in_one_line(error)}; correct them"
        ) from error
