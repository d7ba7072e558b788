"""Score groups of completions with several weighted reward functions.

A reward is a number that some function really returned. A function that raises, hangs or returns nonsense stops the run or
leaves the group out (``rewards.on_error``), and is never scored 0: a false 0 would teach the model that its answer was wrong.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from groupwise.config.schema import RewardFunctionConfig, RewardsConfig
from groupwise.errors import RewardError
from groupwise.rewards.calls import CallRaised, CallTimedOut, call_with_limit
from groupwise.rewards.load import LoadedReward, RewardFunction, load_reward
from groupwise.types import Completion, Group, Problem, Prompt

__all__ = ["RewardDescription", "RewardFailure", "RewardSuite"]

FailureKind = Literal["raised", "timed_out", "wrong_length", "not_a_number"]


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A group that could not be scored and is left out of the update. The caller counts it and shows ``message``."""

    function: str
    problem_id: str
    kind: FailureKind
    message: str


@dataclass(frozen=True, slots=True)
class RewardDescription:
    """One row of what a dry run shows about the rewards."""

    name: str
    weight: float
    source: str
    summary: str
    arguments: Mapping[str, Any]


class _Failed(Exception):
    """Carries a failure, and the exception behind it as ``__cause__``, to where ``on_error`` is decided."""

    def __init__(self, failure: RewardFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class RewardSuite:
    """The reward functions of a run. Scoring is thread-safe as far as the functions themselves are."""

    def __init__(
        self,
        rewards: Sequence[LoadedReward],
        answer_style: str,
        on_error: Literal["stop", "skip"] = "stop",
        timeout_s: float | None = 60.0,
    ) -> None:
        _require_useful_weights(rewards)
        self.rewards = _with_unique_names(rewards)
        self.answer_style = answer_style
        self.on_error = on_error
        self.timeout_s = timeout_s

    @classmethod
    def from_config(
        cls, config: RewardsConfig, answer_style: str, extra: Mapping[str, RewardFunction] | None = None
    ) -> RewardSuite:
        """Load and check every function. Raises ``RewardError``; loads no weights.

        ``extra`` holds functions from Python by name. A config entry may name one to set its weight and arguments; those that
        no entry names are added with weight 1. An extra function goes before a built-in one of the same name.
        """
        extra = dict(extra or {})
        named = {entry.function.strip() for entry in config.functions}
        entries = [*config.functions, *(RewardFunctionConfig(function=name) for name in extra if name not in named)]
        loaded = [load_reward(entry, extra) for entry in entries]
        return cls(loaded, answer_style, config.on_error, config.timeout_s)

    @property
    def names(self) -> tuple[str, ...]:
        """Component names, in config order."""
        return tuple(reward.name for reward in self.rewards)

    def describe(self) -> list[RewardDescription]:
        """What a dry run shows: one row for each function."""
        return [RewardDescription(r.name, r.weight, r.source, _summary(r.function), r.arguments) for r in self.rewards]

    def notes(self) -> list[str]:
        """Settings that are legal but have little effect in this run."""
        notes = []
        for reward in self.rewards:
            if reward.built_in and (advice := _style_advice(reward.function.__name__, self.answer_style)):
                notes.append(f"reward {reward.name!r} {advice}")
            if reward.weight == 0:
                notes.append(f"reward {reward.name!r} has weight 0: it is logged, but nothing is learnt from it")
        return notes

    def require_columns(self, problem: Problem) -> None:
        """Raise ``RewardError`` where a function needs a column that this problem lacks. Cheap: call it before the run."""
        for reward in self.rewards:
            _require_columns(reward, self._offered(Prompt(problem, "", ()), ()))

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Group | RewardFailure:
        """Rewards for one group: the weighted sum, per completion, over the functions whose score is not ``None``.

        A completion to which no function applies (all ``None``) is a failure of kind ``not_a_number``: 0 would be a judgement
        that nobody made, and leaving out one completion would break up its group. A result of the wrong length always raises
        ``RewardError``, since it is a bug of the function whatever the data; other failures follow ``on_error``.
        """
        if not completions:
            raise RewardError(f"problem {prompt.problem.id!r} has no completions to score: sample at least one")
        try:
            components = {reward.name: self._scores(reward, prompt, completions) for reward in self.rewards}
            rewards = self._weighted_sums(prompt, components)
        except _Failed as failed:
            failure = failed.failure
            if self.on_error == "skip" and failure.kind != "wrong_length":
                return failure
            raise RewardError(f"{failure.message}; {_remedy(failure.kind)}") from failed.__cause__
        return Group(prompt, tuple(completions), rewards, components)

    def score_all(
        self,
        pairs: Iterable[tuple[Prompt, Sequence[Completion]]],
        on_progress: Callable[[int], None] | None = None,
    ) -> tuple[list[Group], list[RewardFailure]]:
        """Score several groups, in order. ``on_progress(groups_done)`` is called after each."""
        groups: list[Group] = []
        failures: list[RewardFailure] = []
        for done, (prompt, completions) in enumerate(pairs, start=1):
            scored = self.score(prompt, completions)
            if isinstance(scored, Group):
                groups.append(scored)
            else:
                failures.append(scored)
            if on_progress is not None:
                on_progress(done)
        return groups, failures

    def _offered(self, prompt: Prompt, completions: Sequence[Completion]) -> dict[str, Any]:
        """Everything a function may ask for, as fresh lists: a function that changes them in place disturbs no other.

        Our own keywords win over columns of the same name; so ``answer`` is the extracted reference, whatever the row calls so.
        """
        count = len(completions)
        columns = {name: [value] * count for name, value in prompt.problem.columns.items()}
        return {
            **columns,
            "prompts": [prompt.text if prompt.messages is None else [dict(m) for m in prompt.messages] for _ in completions],
            "completions": [
                c.text if prompt.messages is None else [{"role": "assistant", "content": c.text}] for c in completions
            ],
            "answer": [prompt.problem.answer] * count,
            "answer_style": [self.answer_style] * count,
            "completion_ids": [list(c.token_ids) for c in completions],
            "finish_reason": [c.finish_reason for c in completions],
        }

    def _scores(self, reward: LoadedReward, prompt: Prompt, completions: Sequence[Completion]) -> tuple[float | None, ...]:
        offered = self._offered(prompt, completions)
        _require_columns(reward, offered)
        problem_id = prompt.problem.id
        where = f"reward {reward.name!r} on problem {problem_id!r}"
        # Ours need no limit: they bound their own work, and a group of slow comparisons is no reason to stop a run.
        timeout_s = None if reward.built_in else self.timeout_s
        try:
            result = call_with_limit(reward.function, reward.select(offered), timeout_s)
        except CallRaised as raised:
            raise _Failed(RewardFailure(reward.name, problem_id, "raised", f"{where} raised {raised}")) from raised.__cause__
        except CallTimedOut as late:
            message = f"{where} did not return within rewards.timeout_s = {self.timeout_s:g} seconds"
            raise _Failed(RewardFailure(reward.name, problem_id, "timed_out", message)) from late
        try:
            return _checked(result, len(completions))
        except _BadResult as bad:
            raise _Failed(RewardFailure(reward.name, problem_id, bad.kind, f"{where} returned {bad}")) from None

    def _weighted_sums(self, prompt: Prompt, components: Mapping[str, tuple[float | None, ...]]) -> tuple[float, ...]:
        weights = {reward.name: reward.weight for reward in self.rewards if reward.weight != 0}
        sums = []
        for i, scores in enumerate(zip(*(components[name] for name in weights), strict=True)):
            applicable = [weight * score for weight, score in zip(weights.values(), scores, strict=True) if score is not None]
            if not applicable:
                names, problem_id = ", ".join(weights), prompt.problem.id
                message = f"no reward function applies to completion {i} of problem {problem_id!r}: {names} returned None for it"
                raise _Failed(RewardFailure(names, problem_id, "not_a_number", message))
            sums.append(math.fsum(applicable))
        return tuple(sums)


class _BadResult(Exception):
    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind


def _checked(result: Any, expected: int) -> tuple[float | None, ...]:
    """A function's result as one float or ``None`` per completion. Lists, tuples, numpy arrays and 1-d tensors will do."""
    try:
        scores = None if isinstance(result, (str, bytes, Mapping)) else list(result)
    except TypeError:
        scores = None
    if scores is None:
        kind = "None (is a return statement missing?)" if result is None else f"a {type(result).__name__}"
        raise _BadResult("wrong_length", f"{kind} instead of a list of {expected} scores")
    if len(scores) != expected:
        raise _BadResult("wrong_length", f"{len(scores)} scores for {expected} completions")
    return tuple(_number(score, i) for i, score in enumerate(scores))


def _number(score: Any, index: int) -> float | None:
    if score is None:
        return None
    scalar = score.item() if hasattr(score, "item") and getattr(score, "shape", None) == () else score
    if not isinstance(scalar, numbers.Real):
        raise _BadResult(
            "not_a_number", f"{score!r:.80} ({type(score).__name__}) for completion {index} instead of a number or None"
        )
    number = float(scalar)
    if not math.isfinite(number):
        raise _BadResult("not_a_number", f"{number} for completion {index} instead of a finite number or None")
    return number


def _remedy(kind: FailureKind) -> str:
    if kind == "wrong_length":
        return "it must return one number or None per completion, so correct the function"
    if kind == "timed_out":
        return "make it faster, raise rewards.timeout_s, or set rewards.on_error=skip to leave such groups out"
    return "correct the function, or set rewards.on_error=skip to leave such groups out and count them"


def _require_columns(reward: LoadedReward, offered: Mapping[str, Any]) -> None:
    missing = reward.missing(offered)
    if missing:
        raise RewardError(
            f"reward {reward.name!r} needs {missing[0]!r}, but the data has no such column "
            f"(offered are {', '.join(sorted(offered))}); give the parameter a default, set it under the function's arguments, "
            "or use data with that column"
        )


def _require_useful_weights(rewards: Sequence[LoadedReward]) -> None:
    for reward in rewards:
        if not math.isfinite(reward.weight):
            raise RewardError(f"reward {reward.name!r} has weight {reward.weight}, but a weight must be finite; give it a number")
    if all(reward.weight == 0 for reward in rewards):
        raise RewardError("every reward has weight 0, so there is nothing to learn from; give at least one another weight")


def _with_unique_names(rewards: Sequence[LoadedReward]) -> tuple[LoadedReward, ...]:
    """Two uses of ``length`` become ``length`` and ``length_2``; a function that is really called ``length_2`` keeps its name."""
    taken: set[str] = set()
    own = {reward.name for reward in rewards}
    unique = []
    for reward in rewards:
        name, use = reward.name, 1
        while name in taken or (use > 1 and name in own):
            use += 1
            name = f"{reward.name}_{use}"
        taken.add(name)
        unique.append(replace(reward, name=name))
    return tuple(unique)


def _style_advice(function_name: str, answer_style: str) -> str:
    if answer_style != "xml" and function_name in ("format", "strict_xml", "soft_xml", "correctness_and_format"):
        return f"looks for XML tags, but answers are asked for in the {answer_style!r} style: its tags will hardly ever be there"
    if answer_style != "boxed" and function_name == "boxed_format":
        return f"looks for \\boxed{{}}, but answers are asked for in the {answer_style!r} style: it will hardly ever be there"
    return ""


def _summary(function: RewardFunction) -> str:
    text = inspect.getdoc(function) if inspect.isroutine(function) else inspect.getdoc(type(function))
    return (text or "").partition("\n")[0]
