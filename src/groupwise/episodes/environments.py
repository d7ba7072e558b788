"""Environments: objects that an episode is played with, by the protocol of TRL's environments or by that of games.

A class whose instances have ``reset(**row) -> str | None`` is one, and an instance plays one episode. With ``step(text) -> (observation,
reward, done, info)`` it answers every turn of the policy. Without, its other public methods are tools, and an optional ``get_reward()``
says at the end what the episode was worth. An optional ``close()`` is called when an episode is over. A ``seed`` among the arguments of
``reset`` is a function of the problem, so that all members of a group start alike.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from groupwise.episodes.formats import CallFormat
from groupwise.episodes.openenv import OpenEnv
from groupwise.episodes.tools import Tool, Toolbox, as_text, describe, shortened
from groupwise.errors import ConfigError, TrainingError
from groupwise.importing import import_member, in_one_line, shown
from groupwise.rewards.calling import CallRaised, CallTimedOut, call_with_limit, own_copy
from groupwise.types import Completion, FinishReason, Message, Problem, ToolCall

__all__ = ["Environments", "NotBegun", "Partner", "Reply", "ResetFailed", "ToolUse"]


@dataclass(frozen=True, slots=True)
class Reply:
    """How a turn of the policy is answered."""

    given: tuple[str, ...] = ()
    """Messages that the policy is given."""
    ended: FinishReason | None = None
    """Why the episode is over, where it is."""
    calls: tuple[ToolCall, ...] = ()
    reward: float | None = None
    """For this turn."""
    given_ids: tuple[int, ...] = ()
    """The tokens of ``given`` up to the policy's next turn, where they are not as the chat template writes them in the partner's role."""
    rewritten: bool = False
    """Whether ``given_ids`` are a conversation of its own, which the policy's next turn follows in place of all so far."""


class Partner(Protocol):
    """Who answers the policy in one episode."""

    role: str | None
    """That it speaks in; None for that of tools."""

    def reply(self, turn: Completion) -> Reply:
        """The answer to a turn, which the policy has ended. It may wait; it raises nothing."""

    def reward(self, unheard: Completion | None) -> float | None:
        """What the ended episode earned, apart from its turns; lets its environment go. Raises CallRaised or CallTimedOut.

        ``unheard``: its last turn, where a token limit ended it, so that it was not answered."""


@dataclass(slots=True)
class ToolUse:
    """Makes the calls that the policy writes, one after the other. A turn without calls ends the episode.

    ``environment``: whose methods some of the tools are, if any.
    """

    toolbox: Toolbox
    format: CallFormat
    environment: Any = None
    role: str | None = None

    def reply(self, turn: Completion) -> Reply:
        asked = self.format.read(turn.text)
        if not asked:
            return Reply(ended="stop")
        calls = tuple(map(self.toolbox.call, asked))
        return Reply(tuple(call.result for call in calls), calls=calls)

    def reward(self, unheard: Completion | None) -> float | None:
        judge = getattr(self.environment, "get_reward", None)
        try:
            return None if judge is None else _number(call_with_limit(judge, {}, self.toolbox.timeout_s))
        finally:
            let_go(self.environment, self.toolbox.timeout_s)


@dataclass(slots=True)
class Steps:
    """Answers each turn by ``environment.step(text)``."""

    environment: Any
    timeout_s: float | None
    role: str | None = "user"

    def reply(self, turn: Completion) -> Reply:
        step = self.environment.step
        try:
            taken = call_with_limit(partial(step, turn.text), {}, self.timeout_s)
        except CallTimedOut:
            why = f"step did not answer within {self.timeout_s:g} seconds"
            return Reply(ended="timeout", calls=(failed_call("timed_out", why),))
        except CallRaised as raised:
            return Reply(ended="environment_error", calls=(failed_call("raised", str(raised)),))
        try:
            observation, reward, done, _ = taken
            reward = None if reward is None else float(reward)
            if reward is not None and not math.isfinite(reward):
                raise ValueError
            if done:
                return Reply(ended="stop", reward=reward)
            return Reply(("" if observation is None else as_text(observation, "step"),), reward=reward)
        except Exception:  # of any type: a tensor of two numbers, which is no reward, raises RuntimeError
            why = f"step returned {shown(taken)}, but it must return (observation, reward, done, info) with a finite reward"
            return Reply(ended="environment_error", calls=(failed_call("raised", why),))

    def reward(self, unheard: Completion | None) -> float | None:
        let_go(self.environment, self.timeout_s)
        return 0.0  # its turns have theirs; a policy that never finished one earned nothing


def _number(reward: Any) -> float:
    """Raises ValueError for what is none, also where converting it raises something else, as a tensor of two numbers does."""
    try:
        return float(reward)
    except Exception as error:
        raise ValueError(in_one_line(error)) from error


class ResetFailed(TrainingError):
    """``reset`` raised, or did not answer in time."""

    @property
    def timed_out(self) -> bool:
        return isinstance(self.__cause__, CallTimedOut)


@dataclass(slots=True)
class NotBegun:
    """In place of an environment whose ``reset`` failed: the episode ends where it would be answered."""

    failure: ResetFailed
    role: str | None = None

    def reply(self, turn: Completion) -> Reply:
        late = self.failure.timed_out
        call = failed_call("timed_out" if late else "raised", str(self.failure), "reset")
        return Reply(ended="timeout" if late else "environment_error", calls=(call,))

    def reward(self, unheard: Completion | None) -> float | None:
        if unheard is not None:  # else ``reply`` has said it
            raise (CallTimedOut if self.failure.timed_out else CallRaised)(str(self.failure))
        return None


def failed_call(failure: Any, why: str, called: str = "step") -> ToolCall:
    """What the records of an episode say of a method that failed."""
    return ToolCall(called, {}, shortened(f"error: {why}"), failure)


@dataclass(frozen=True, slots=True)
class Environments:
    """Factories of environments: one for all problems, or by the name in a problem's column ``environment``."""

    factories: Mapping[str | None, Callable[[], Any]]
    timeout_s: float | None
    """Seconds that a call may take; None for any number."""

    @classmethod
    def load(cls, named: str | Mapping[str, str], timeout_s: float) -> Environments:
        """Those that a config names by import path. Raises ConfigError for what is no factory of environments."""
        factories: dict[str | None, Callable[[], Any]] = {}
        for name, path in [(None, named)] if isinstance(named, str) else named.items():
            factory, _ = import_member(path, "environment", ConfigError)
            if not callable(factory):
                raise ConfigError(f"rollout.environment names {path}, which is no class and no function that makes environments")
            factories[name] = factory
        return cls(factories, timeout_s)

    def make(self, problem: Problem) -> Any:
        """A new instance for ``problem``. Raises ConfigError where its column names none, or the instance has no ``reset``."""
        name = None if None in self.factories else problem.columns.get("environment")
        if name not in self.factories:
            raise ConfigError(
                f"problem {problem.id} has the environment {name!r}, but rollout.environment has {', '.join(map(str, self.factories))}: "
                "name one of them in the column environment"
            )
        return self._made(name)

    def _made(self, name: str | None) -> Any:
        """A new instance. Raises ConfigError where there is none to be had, or it has no ``reset``."""
        try:
            made = self.factories[name]()
        except Exception as error:
            raise ConfigError(f"the environment could not be made ({in_one_line(error)}): fix its constructor") from error
        if not callable(getattr(made, "reset", None)):
            raise ConfigError(f"the environment {type(made).__name__} has no reset: define reset(self, **row) -> str | None")
        return made

    def start(self, environment: Any, problem: Problem) -> str | None:
        """Resets it for an episode of ``problem``; returns what the policy is told at the start. Raises ResetFailed where that fails, and
        TrainingError for what is nothing to be told."""
        row = self.row(problem)
        parameters = inspect.signature(environment.reset).parameters
        if "seed" in parameters:
            drawn = int.from_bytes(hashlib.blake2b(problem.id.encode(), digest_size=4).digest(), "big") // 2
            row.setdefault("seed", drawn)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            row = {name: value for name, value in row.items() if name in parameters}
        try:
            said = call_with_limit(environment.reset, row, self.timeout_s)
        except (CallRaised, CallTimedOut) as failure:
            why = str(failure) or f"no answer within {self.timeout_s:g} seconds"
            raise ResetFailed(
                f"reset of the environment {type(environment).__name__} failed on problem {problem.id}: {why}"
            ) from failure
        try:
            if isinstance(said, tuple):  # (observation, info), as games have it
                said = said[0]
            return None if said is None else as_text(said, "reset")
        except (IndexError, TypeError) as error:
            raise TrainingError(
                f"reset of the environment {type(environment).__name__} returned a {type(said).__name__} on problem {problem.id}, but "
                "it must return text or JSON, None, or (observation, info)"
            ) from error

    def row(self, problem: Problem) -> dict[str, Any]:
        """What its ``reset`` is told of a problem, as copies of its own."""
        told = {**problem.columns, "answer": problem.answer, "prompt": problem.question}
        return {name: own_copy(value) for name, value in told.items() if name != "environment"}

    def tools_of(self, environment: Any) -> dict[str, Tool]:
        """Its public methods, where it has no ``step``."""
        return {} if takes_steps(environment) else self.methods_of(environment)

    def methods_of(self, environment: Any) -> dict[str, Tool]:
        """Its public methods but those of the protocol, as tools."""
        methods = inspect.getmembers(type(environment), inspect.isfunction)
        chosen = [name for name, _ in methods if not name.startswith("_") and name not in ("reset", "get_reward", "close")]
        return {name: describe(getattr(environment, name), f"{type(environment).__name__}.{name}") for name in chosen}

    def with_step(self) -> str | None:
        """The class of one that has ``step``, and answers each turn by it; None where all have tools alone."""
        for name in self.factories:
            probe = self._made(name)
            self.done_with(probe)
            if takes_steps(probe):
                return type(probe).__name__
        return None

    def note_on_tools(self) -> str | None:
        """A sentence for a run with tools where an environment has ``step``: the prompt describes them, and nobody reads calls."""
        if (named := self.with_step()) is None:
            return None
        return (
            f"rollout.tools is set, but the environment {named} answers each turn by its step, which reads no calls of tools: "
            "leave rollout.tools out, or make step a tool as a public method of another name"
        )

    def needs_a_row(self) -> bool:
        """Whether ``reset`` must be told more of a problem than its question."""
        probe = self.make(Problem("", "", ""))
        parameters = inspect.signature(probe.reset).parameters.values()
        self.done_with(probe)
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        needed = {p.name for p in parameters if p.default is p.empty and p.kind in named}
        needed.update(probe.columns if isinstance(probe, OpenEnv) else ())
        return not needed <= {"prompt", "seed"}

    def opening(self, problem: Problem) -> tuple[str | None, Sequence[Tool]]:
        """What ``problem`` begins with, and the tools there: from an instance that plays nothing. Where its ``reset`` fails another one is
        tried, since without a prompt the run cannot go on. Raises ResetFailed where that fails, too."""
        try:
            return self._opening(problem)
        except ResetFailed:
            return self._opening(problem)

    def _opening(self, problem: Problem) -> tuple[str | None, Sequence[Tool]]:
        probe = self.make(problem)
        try:
            return self.start(probe, problem), list(self.tools_of(probe).values())
        finally:
            self.done_with(probe)

    def done_with(self, environment: Any) -> None:
        """It plays no more."""
        let_go(environment, self.timeout_s)


def with_observation(question: str | Sequence[Message], said: str) -> str | list[Message]:
    """The question, with what an environment ``said`` at the start at the end of the user's last turn, as TRL has it."""
    if isinstance(question, str):
        return question + said
    *before, last = question
    return [*before, {"role": last["role"], "content": last["content"] + said}]


def let_go(environment: Any, timeout_s: float | None) -> None:
    """Call its ``close``, if it has one; what becomes of that is of no interest any more."""
    close = getattr(environment, "close", None)
    if callable(close):
        with contextlib.suppress(CallRaised, CallTimedOut):
            call_with_limit(close, {}, timeout_s)


def takes_steps(environment: Any) -> bool:
    return callable(getattr(environment, "step", None))
