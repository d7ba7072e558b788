"""Score groups of completions with several weighted reward functions.

A reward is a number that some function really returned. A function that raises, hangs or returns nonsense stops the run or
leaves the group out (``rewards.on_error``), and is never scored 0: a false 0 would teach the model that its answer was wrong.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from groupwise.config.rewards import RewardFunctionConfig, RewardsConfig
from groupwise.data.answers import AnswerStyle
from groupwise.data.latex import latex_failures, renew_budget
from groupwise.errors import RewardError
from groupwise.metrics import Metric, Sum
from groupwise.rewards.calling import Batch, Call, RewardArguments, RewardCaller, is_async, plan_calls, require_columns
from groupwise.rewards.load import LoadedReward, OpenModel, RewardFunction, layers, load_reward
from groupwise.rewards.process_worker import seed_generators
from groupwise.rewards.processes import ProcessPool
from groupwise.rewards.scores import (
    BadResult,
    CallRaised,
    Decode,
    RewardFailure,
    Score,
    Shaper,
    has_steps,
    numbers_of,
    remedy,
    step_metrics,
)
from groupwise.types import Completion, Group, Problem, Prompt, StepScores

__all__ = ["RewardDescription", "RewardFailure", "RewardSuite", "Scoring"]


@dataclass(frozen=True, slots=True)
class RewardDescription:
    """One row of what a dry run shows about the rewards."""

    name: str
    weight: float
    source: str
    summary: str
    arguments: Mapping[str, object]
    called: str
    """What one call sees, and where it is made."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """A scored batch: its groups, those that could not be scored (each in order), and metrics of the scoring itself."""

    groups: list[Group]
    failures: list[RewardFailure]
    metrics: dict[str, Metric] = field(default_factory=dict)


class RewardSuite:
    """The reward functions of a run. Scoring is thread-safe as far as the functions themselves are.

    A part of the learner's state (``training.window.Stateful``) where scores are normalised: the running statistics go into checkpoints.
    """

    def __init__(
        self,
        rewards: Sequence[LoadedReward],
        answer_style: AnswerStyle,
        on_error: Literal["stop", "skip"] = "stop",
        timeout_s: float | None = 60.0,
        *,
        total: Shaper | None = None,
        max_completion_tokens: int | None = None,
        concurrent_calls: int = 16,
        processes: int = 2,
    ) -> None:
        """``total``: normalising and clipping of the weighted sum. ``max_completion_tokens``: the run's limit, which functions are told."""
        _require_useful_weights(rewards)
        self.rewards = _with_unique_names(rewards)
        self.answer_style = answer_style
        self.on_error = on_error
        self.total = total or Shaper()
        self.decode: Decode | None = None
        """Token ids to text, for functions that say in characters where steps end. Set it when there is a tokenizer."""
        self._arguments = RewardArguments(answer_style, max_completion_tokens)
        self._processes = ProcessPool(
            {r.name: r.entry for r in self.rewards if r.isolate},
            processes,
            {r.name for r in self.rewards if r.isolate == "sandbox"},
        )
        self._caller = RewardCaller(self._arguments, timeout_s, concurrent_calls, self._processes)

    @classmethod
    def from_config(
        cls,
        config: RewardsConfig,
        answer_style: AnswerStyle,
        extra: Mapping[str, RewardFunction] | None = None,
        *,
        max_completion_tokens: int | None = None,
        open_model: OpenModel | None = None,
    ) -> RewardSuite:
        """Load and check every function. Raises ``RewardError``, or ``ModelError`` for a reward model; loads no weights.

        ``extra`` holds functions from Python by name. A config entry may name one to set its weight and arguments; those that
        no entry names are added with weight 1. An extra function goes before a built-in one of the same name.
        """
        extra = dict(extra or {})
        named = {entry.called for entry in config.functions if entry.model is None}
        entries = [*config.functions, *(RewardFunctionConfig(function=name) for name in extra if name not in named)]
        loaded = [load_reward(entry, extra, max_completion_tokens, open_model) for entry in entries]
        return cls(
            loaded,
            answer_style,
            config.on_error,
            config.timeout_s,
            total=Shaper(config.normalise, config.clip),
            max_completion_tokens=max_completion_tokens,
            concurrent_calls=config.concurrent_calls,
            processes=config.processes,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Component names, in config order."""
        return tuple(reward.name for reward in self.rewards)

    @property
    def sees_batches(self) -> bool:
        """Whether some function compares the completions of all problems of a step."""
        return any(reward.scope == "batch" for reward in self.rewards)

    @property
    def by_one(self) -> bool:
        """Whether the first process of several scores for all, since more is looked at than single groups."""
        return self.sees_batches or self.has_state

    def describe(self) -> list[RewardDescription]:
        """What a dry run shows: one row for each function."""
        return [
            RewardDescription(r.name, r.weight, r.source, _summary(r.function), r.arguments, r.scope + _ISOLATED[r.isolate])
            for r in self.rewards
        ]

    def notes(self) -> list[str]:
        """Settings that are legal but have little effect in this run."""
        notes = []
        for reward in self.rewards:
            if reward.built_in and (advice := _style_advice(reward.function.__name__, self.answer_style)):
                notes.append(f"reward {reward.name!r} {advice}")
            if reward.weight == 0:
                notes.append(f"reward {reward.name!r} has weight 0: it is logged, but nothing is learnt from it")
        calls, usual = self._caller.concurrent_calls, RewardsConfig.model_fields["concurrent_calls"].default
        if calls != usual and not any(is_async(reward.function) for reward in self.rewards):
            notes.append(f"rewards.concurrent_calls={calls} has no effect here: no reward function is async")
        limit, usual = self._caller.timeout_s, RewardsConfig.model_fields["timeout_s"].default
        if limit not in (None, usual) and not any(reward.takes_the_run_s_limit for reward in self.rewards):
            notes.append(f"rewards.timeout_s={limit:g} has no effect here: it is for your own functions without a timeout_s")
        return notes

    def check_prompt(self, prompt: Prompt) -> None:
        """Raise ``RewardError`` where a reward model cannot take prompts of this kind."""
        for function in self.models.values():
            function.check(prompt.text if prompt.messages is None else [dict(message) for message in prompt.messages])

    def load(self) -> list[str]:
        """Load what reward models need before the first call, and say of each what it is; start a process for isolated functions.
        Numbers that reward models have counted before are dropped.

        Raises ``ModelError``, and ``RewardError`` where a process cannot load what it is to call.
        """
        try:
            self._processes.start()
        except CallRaised as raised:
            raise RewardError(
                f"isolated reward functions gave {raised}; a new process imports their files again, so fix them or leave isolate out"
            ) from raised
        self._told_by_models()  # numbers of calls before the run
        return [str(function.load()) for function in self.models.values()]

    def without_weights(self) -> RewardSuite | None:
        """The functions that a text alone can be tried on: all but reward models, and what an environment gives. None where there is no
        other with a weight."""
        light = copy.copy(self)
        light.rewards = tuple(reward for reward in self.rewards if not reward.is_model and not reward.is_environment)
        return light if any(reward.weight for reward in light.rewards) else None

    @property
    def models(self) -> dict[str, Any]:
        """The reward models among the functions (`groupwise.models.reward_model.RewardModel`), by component name."""
        return {reward.name: reward.function for reward in self.rewards if reward.is_model}

    def require_environment(self, named: object) -> None:
        """Raise ``RewardError`` for our functions of what an environment gave where none is ``named``."""
        for reward in self.rewards:
            if named is None and reward.built_in and reward.is_environment:
                raise RewardError(
                    f"reward {reward.name!r} is what an environment gave, but rollout.environment is null: name one, or leave the "
                    "function out"
                )

    def require_columns(self, problem: Problem) -> None:
        """Raise ``RewardError`` where a function needs a column that this problem lacks. Cheap: call it before the run."""
        for reward in self.rewards:
            require_columns(reward, self._arguments.names(problem))

    def score(self, prompt: Prompt, completions: Sequence[Completion]) -> Group | RewardFailure:
        """Rewards for one group: the weighted sum, per completion, over the functions whose score is not ``None``.

        A completion to which no function applies (all ``None``) is a failure of kind ``not_a_number``: 0 would be a judgement
        that nobody made, and leaving out one completion would break up its group. A result of the wrong length always raises
        ``RewardError``, since it is a bug of the function whatever the data; other failures follow ``on_error``.

        Running statistics are used as they are, and learn nothing from it.
        """
        return self.score_each([(prompt, completions)])[0]

    def score_each(self, pairs: Iterable[tuple[Prompt, Sequence[Completion]]]) -> list[Group | RewardFailure]:
        """`score` for several groups at once, which functions of scope ``batch`` see together; in order."""
        return self._score(list(pairs), learn=False, more=False, on_progress=None)[0]

    def score_all(
        self,
        pairs: Iterable[tuple[Prompt, Sequence[Completion]]],
        on_progress: Callable[[int], None] | None = None,
        more: bool = False,
        seeds: Sequence[int] = (),
    ) -> Scoring:
        """Score a step's groups, and take their scores into the running statistics. ``on_progress(groups_done)`` is called after each.

        ``more``: of the step that was scored last. They are divided by what its other groups were divided by.
        ``seeds``: one for each group. The generators of Python, numpy and torch are seeded with it before the group's functions are
        called, so that what they draw depends on no other group. Async functions, which run side by side, draw in no fixed order.
        """
        scored, metrics = self._score(list(pairs), learn=True, more=more, on_progress=on_progress, seeds=seeds)
        groups = [one for one in scored if isinstance(one, Group)]
        return Scoring(groups, [one for one in scored if isinstance(one, RewardFailure)], metrics)

    def close(self, sandboxes_alone: bool = False) -> None:
        """End the processes of isolated functions, or of sandboxes alone. Scoring again would start new ones."""
        self._processes.close(sandboxes_alone)

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """Whether anything here has to go into checkpoints."""
        return any(shaper.normalise != "none" for shaper in self._shapers.values())

    def state_dict(self) -> dict[str, Any]:
        """The running statistics, as JSON values that give the same numbers back."""
        return {name: shaper.state() for name, shaper in self._shapers.items() if shaper.normalise != "none"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave. A function that it does not know starts again; ValueError or TypeError for other things."""
        for name, shaper in self._shapers.items():
            if name in state:
                shaper.restore(state[name])

    def checkpoint_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """No tensors, and ``state_dict``."""
        return {}, {"statistics": self.state_dict()}

    def load_checkpoint_state(self, tensors: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        """Restore exactly what ``checkpoint_state`` gave."""
        self.load_state_dict(values.get("statistics", {}))

    @property
    def _shapers(self) -> dict[str, Shaper]:
        return {**{reward.name: reward.shaper for reward in self.rewards}, _TOTAL: self.total}

    # --- scoring -----------------------------------------------------------------------------------------------------

    def _score(
        self, batch: Batch, learn: bool, more: bool, on_progress: Callable[[int], None] | None, seeds: Sequence[int] = ()
    ) -> tuple[list[Group | RewardFailure], dict[str, Metric]]:
        for prompt, completions in batch:
            if not completions:
                raise RewardError(f"problem {prompt.problem.id!r} has no completions to score: sample at least one")
        renew_budget()
        unchecked = sum(latex_failures().values())
        components, failures, metrics = self._call_all(batch, on_progress, seeds)
        metrics["answers/unchecked"] = Sum(sum(latex_failures().values()) - unchecked)
        sound = [g for g in range(len(batch)) if g not in failures]
        for reward in self.rewards:
            scores = [score for g in sound for score in components[g][reward.name]]
            numbers = [r for score in scores for r in numbers_of(score)]
            if learn:
                reward.shaper.learn(numbers, more=more)
            metrics |= reward.shaper.metrics(reward.name, numbers) | step_metrics(reward.name, scores)
        groups: dict[int, Group] = {}
        for g in sound:
            group = self._weighted(*batch[g], components[g])
            if isinstance(group, RewardFailure):
                failures[g] = self._apply_on_error(group)
            else:
                groups[g] = group
        totals = [r for group in groups.values() if _has_outcomes(group) for r in group.outcomes]
        if learn:
            self.total.learn(totals, more=more)
        metrics |= self.total.metrics(_TOTAL, totals) | self._told_by_models()
        return [failures[g] if g in failures else self._totalled(groups[g]) for g in range(len(batch))], metrics

    def _weighted(
        self, prompt: Prompt, completions: Sequence[Completion], components: Mapping[str, Sequence[Score]]
    ) -> Group | RewardFailure:
        """The group with weighted sums over functions, whole completions apart from steps, before ``total``.

        Functions of weight 0 count for nothing. A completion to which no other applies makes the group a failure.
        """
        judges = [reward for reward in self.rewards if reward.weight != 0]
        process = {r.name: _steps(r, completions, components[r.name]) for r in judges if has_steps(components[r.name])}
        whole = [reward for reward in judges if reward.name not in process]
        shaped = {
            r.name: tuple(None if s is None else math.fsum(map(r.shaper, numbers_of(s))) for s in components[r.name])
            for r in whole
        }
        sums = []
        for i in range(len(completions)):
            if all(components[reward.name][i] is None for reward in judges):
                names, problem_id = ", ".join(reward.name for reward in judges), prompt.problem.id
                message = f"no reward function applies to completion {i} of problem {problem_id!r}: {names} returned None for it"
                return RewardFailure(names, problem_id, "not_a_number", message)
            sums.append(math.fsum(r.weight * (shaped[r.name][i] or 0.0) for r in whole))
        shown = {
            name: tuple(None if s is None else math.fsum(numbers_of(s)) for s in scores) for name, scores in components.items()
        }
        weights = {reward.name: reward.weight for reward in judges}
        return Group(prompt, tuple(completions), tuple(sums), shown, process, tuple(sums) if process else None, weights, shaped)

    def _totalled(self, group: Group) -> Group:
        """The group with ``total`` applied to its outcomes, and the rewards of steps added."""
        outcomes = tuple(self.total(r) for r in group.outcomes) if _has_outcomes(group) else group.outcomes
        if not group.process:
            return replace(group, rewards=outcomes)
        of_steps = [
            math.fsum(s.weight * r for s in group.process.values() for _, r in s.steps[i]) for i in range(len(group.completions))
        ]
        rewards = tuple(a + b for a, b in zip(outcomes, of_steps, strict=True))
        return replace(group, rewards=rewards, outcome_rewards=outcomes)

    def _told_by_models(self) -> dict[str, Metric]:
        """Numbers that reward models count themselves, such as how many texts they had to cut."""
        return {f"{key}_{name}": value for name, one in self.models.items() for key, value in one.take_metrics().items()}

    def _call_all(
        self, batch: Batch, on_progress: Callable[[int], None] | None, seeds: Sequence[int]
    ) -> tuple[list[dict[str, list[Score]]], dict[int, RewardFailure], dict[str, Metric]]:
        """Every function's scores of every group; for groups with a failure the first one, and counts of what went wrong."""
        components: list[dict[str, list[Score]]] = [
            {r.name: [None] * len(completions) for r in self.rewards} for _, completions in batch
        ]
        failures = {g: self._apply_on_error(failure) for g, pair in enumerate(batch) if (failure := _unplayed(*pair)) is not None}
        failed: Counter[str] = Counter()
        killed_before = self._processes.killed.copy()
        calls, done = list(plan_calls(self.rewards, batch, failures)), 0
        seeded = -1
        if seeds:
            seed_generators(seeds[0])  # before async functions begin, and those of the whole batch
        with self._caller.begin(calls, batch, self.decode, seeds) as (ask, forget):
            for index, call in enumerate(calls):
                if on_progress is not None and call.reward.scope != "batch" and call.groups[0] > done:
                    done = call.groups[0]
                    on_progress(done)
                if all(g in failures for g in call.groups):
                    forget(index)
                    continue
                if seeds and call.reward.scope != "batch" and call.groups[0] != seeded:
                    seeded = call.groups[0]
                    seed_generators(seeds[seeded])
                answers = ask(index)
                failed[call.reward.name] += any(isinstance(answer, BadResult) for answer in answers)
                for (g, m), answer in zip(call.targets, answers, strict=True):
                    if isinstance(answer, BadResult):
                        failures.setdefault(g, self._apply_on_error(_failure(call, batch, g, answer), answer.cause))
                    else:
                        components[g][call.reward.name][m] = answer
        if on_progress is not None:
            for number in range(done + 1, len(batch) + 1):
                on_progress(number)
        return components, failures, self._counts(failed, self._processes.killed - killed_before)

    def _counts(self, failed: Counter[str], killed: Counter[str]) -> dict[str, Metric]:
        counts: dict[str, Metric] = {f"calls/killed_{r.name}": Sum(killed[r.name]) for r in self.rewards if r.isolate}
        if self.on_error == "skip":
            counts |= {f"calls/failed_{r.name}": Sum(failed[r.name]) for r in self.rewards}
        return counts

    def _apply_on_error(self, failure: RewardFailure, cause: BaseException | None = None) -> RewardFailure:
        """The failure again where ``on_error`` lets it pass, else raises ``RewardError``."""
        if self.on_error == "skip" and failure.kind != "wrong_length":
            return failure
        raise RewardError(f"{failure.message}; {remedy(failure.kind)}") from cause


def _failure(call: Call, batch: Batch, group: int, bad: BadResult) -> RewardFailure:
    problem_id = batch[group][0].problem.id
    alone = bad.kind in ("not_a_number", "bad_step")  # of one completion, whatever else the call saw
    where = f"reward {call.reward.name!r} on problem {problem_id!r}" if alone else call.where(batch)
    return RewardFailure(call.reward.name, problem_id, bad.kind, f"{where} {bad}")


def _unplayed(prompt: Prompt, completions: Sequence[Completion]) -> RewardFailure | None:
    """A group in which an environment failed: what its functions say of such a completion would be no judgement of the policy."""
    for i, completion in enumerate(completions):
        if completion.failed:
            why = f": {completion.calls[-1].result}" if completion.calls else ""
            where = f"the environment failed in completion {i} of problem {prompt.problem.id!r} ({completion.finish_reason}){why}"
            return RewardFailure("environment", prompt.problem.id, "environment", where)
    return None


def _has_outcomes(group: Group) -> bool:
    """Whether some function scored completions as wholes, and not only steps."""
    return len(group.process) < len(group.weights)


def _steps(reward: LoadedReward, completions: Sequence[Completion], scores: Sequence[Score]) -> StepScores:
    """A function's shaped scores by step. A number among steps is one step, which ends with the completion."""
    steps = []
    for score, completion in zip(scores, completions, strict=True):
        last = len(completion.token_ids) - 1
        ends = score if isinstance(score, tuple) else tuple((last, r) for r in numbers_of(score) if last >= 0)
        steps.append(tuple((end, reward.shaper(r)) for end, r in ends))
    return StepScores(reward.weight, tuple(steps))


_ISOLATED = {False: "", "process": ", isolated", "sandbox": ", in a sandbox"}
_TOTAL = "total"
"""What the weighted sum is called among components."""


def _require_useful_weights(rewards: Sequence[LoadedReward]) -> None:
    for reward in rewards:
        if not math.isfinite(reward.weight):
            raise RewardError(f"reward {reward.name!r} has weight {reward.weight}, but a weight must be finite; give it a number")
    if all(reward.weight == 0 for reward in rewards):
        raise RewardError("every reward has weight 0, so there is nothing to learn from; give at least one another weight")


def _with_unique_names(rewards: Sequence[LoadedReward]) -> tuple[LoadedReward, ...]:
    """Two uses of ``length`` become ``length`` and ``length_2``; a function that is really called ``length_2`` keeps its name."""
    taken = {"mean", "std", _TOTAL}  # metrics have these names already
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
    if isinstance(own := getattr(function, "summary", None), str):
        return own
    *_, inner, call = layers(function)
    text = inspect.getdoc(inner) if inspect.isroutine(inner) else inspect.getdoc(type(inner)) or call.__doc__
    return inspect.cleandoc(text or "").partition("\n")[0]
