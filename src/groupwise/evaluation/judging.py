"""Judge a policy on held-out problems, the same way at every stage of a run: prompts with worked examples, figures, ``summary.json``."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from groupwise.config.combinations import prompt_limit
from groupwise.config.schema import Config
from groupwise.data.answers import AnswerStyle
from groupwise.data.latex import renew_budget
from groupwise.data.prompts import worked_completion
from groupwise.data.sources import held_out_from, load_problems, order_key, question_key
from groupwise.engines.base import Engine, SamplingSettings
from groupwise.episodes import Episodes, render_episode
from groupwise.errors import DataError
from groupwise.evaluation.figures import figures, headline_verdict, paired_comparison
from groupwise.evaluation.records import PartialRecords, further_verdicts, make_record, references_of
from groupwise.tracking import Trackers
from groupwise.types import Message, Problem, Prompt

__all__ = [
    "Evaluation",
    "EvaluationMode",
    "build_summary",
    "choose_shots",
    "conditions",
    "evaluate",
    "evaluate_stage",
    "evaluation_of",
    "held_out_prompts",
    "prompt_format",
    "sampling_settings",
    "with_shots",
]


def with_shots(problems: Sequence[Problem], config: Config, style: AnswerStyle) -> list[Problem]:
    """``problems`` with the same ``config.evaluation.shots`` worked examples before each question; unchanged at 0.

    Raises:
        DataError: the training problems, which the examples come from, are too few or cannot be read.
    """
    if config.evaluation.shots == 0:
        return list(problems)
    turns: list[Message] = []
    for shot in choose_shots(config, problems):
        turns += [turn for turn in _conversation(shot) if turn["role"] != "system"]  # one stands first alone
        turns.append({"role": "assistant", "content": worked_completion(shot, style)})
    return [replace(problem, question=_after(turns, problem)) for problem in problems]


def choose_shots(config: Config, judged: Sequence[Problem]) -> list[Problem]:
    """Training problems in an order that depends on ``evaluation.seed`` and the questions alone; none that is itself judged."""
    wanted = config.evaluation.shots
    taken = {question_key(problem) for problem in judged}
    try:
        offered = load_problems(config.data).train
    except DataError as error:
        raise DataError(
            f"evaluation.shots is {wanted}, but there are no training problems to take worked examples from ({error}): name them "
            "with data.source and data.split, or set shots to 0"
        ) from error
    kept = [p for p in offered if question_key(p) not in taken]
    if len(kept) < wanted:
        raise DataError(
            f"evaluation.shots is {wanted}, but only {len(kept)} training problems of {config.data.source!r} are not judged "
            "themselves: name others with data.source, or lower shots"
        )
    return sorted(kept, key=lambda problem: _rank(problem, config.evaluation.seed))[:wanted]


def _rank(problem: Problem, seed: int) -> bytes:
    return hashlib.blake2b(f"shots/{seed}/{order_key(problem)}".encode(), digest_size=16).digest()


def _conversation(problem: Problem) -> list[Message]:
    question = problem.question
    return [{"role": "user", "content": question}] if isinstance(question, str) else list(question)


def _after(turns: Sequence[Message], problem: Problem) -> tuple[Message, ...]:
    """The examples, then the problem's own turns; a system turn of its own stays first."""
    own = _conversation(problem)
    system = [turn for turn in own[:1] if turn["role"] == "system"]
    return (*system, *turns, *own[len(system) :])


logger = logging.getLogger("groupwise")

EvaluationMode = Literal["sampled", "greedy"]
NO_PROBLEMS = (
    "there are 0 held-out problems to evaluate on, and at least 1 is needed: raise data.holdout or name data.eval_source"
)
LONGEST_SYSTEM = 90
"""Characters of a system prompt that a report line shows."""


@dataclass(frozen=True)
class Evaluation:
    """Figures of one stage in one mode. Rates are shares from 0 to 1, intervals 95% intervals clustered by problem, which with one
    sample of each problem are Wilson's."""

    stage: str
    mode: str
    n: int
    """Problems."""
    strict_accuracy: float
    """The answer stands where the format asks for it, and is right; with several samples, mean@n."""
    strict_interval: tuple[float, float]
    lenient_accuracy: float
    """Strict, or the right answer is found elsewhere in the completion."""
    lenient_interval: tuple[float, float]
    format_rate: float
    """Completions in exactly the form asked for, right or wrong."""
    stop_rate: float
    """Completions that the model ended by itself, with an end token."""
    mean_tokens: float
    """Mean completion length in tokens, stop token included."""
    seconds: float
    temperature: float
    """0 for greedy."""
    max_tokens: int
    records: tuple[dict[str, Any], ...]
    """One per completion, in the order of the prompts."""
    samples: int = 1
    """Completions of each problem."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """All that ``figures.figures`` counts, as plain JSON values."""
    conditions: Mapping[str, Any] = field(default_factory=dict)
    """How the model was asked, as ``conditions`` gives it: a score without this cannot be compared with another."""

    def kept(self) -> Evaluation:
        """Without the records, but at the stages that a run's end compares: the others', which files have, would fill memory."""
        return self if self.stage in STAGES else replace(self, records=())

    def to_summary(self) -> dict[str, Any]:
        """Everything but the records, as plain JSON values."""
        return {
            "stage": self.stage,
            "mode": self.mode,
            "n": self.n,
            "samples": self.samples,
            "strict_accuracy": self.strict_accuracy,
            "strict_interval": list(self.strict_interval),
            "lenient_accuracy": self.lenient_accuracy,
            "lenient_interval": list(self.lenient_interval),
            "format_rate": self.format_rate,
            "stop_rate": self.stop_rate,
            "mean_tokens": self.mean_tokens,
            "temperature": self.temperature,
            "max_tokens": self.max_tokens,
            "seconds": round(self.seconds, 3),
            "figures": dict(self.figures),
            "conditions": dict(self.conditions),
        }


def evaluation_of(
    records: Sequence[dict[str, Any]], *, stage: str, mode: str, conditions: Mapping[str, Any], seconds: float = 0.0
) -> Evaluation:
    """The figures that ``records`` come to. ``conditions`` has at least ``temperature`` and ``max_tokens``."""
    counted = figures(records)
    if unchecked := counted.get("unchecked"):
        logger.warning(
            "%d of %d completions are left out of the %s figures: math-verify, asked twice, gave no verdict on their answers",
            unchecked,
            len(records),
            stage.replace("_", " "),
        )
    lenient = counted.get("lenient", counted["strict"])  # where every answer out of its place went unchecked
    return Evaluation(
        stage=stage,
        mode=mode,
        n=counted["n"],
        strict_accuracy=counted["strict"][0],
        strict_interval=(counted["strict"][1], counted["strict"][2]),
        lenient_accuracy=lenient[0],
        lenient_interval=(lenient[1], lenient[2]),
        format_rate=counted["format_rate"],
        stop_rate=counted["stop_rate"],
        mean_tokens=counted["mean_tokens"],
        seconds=seconds,
        temperature=conditions["temperature"],
        max_tokens=conditions["max_tokens"],
        records=tuple(records),
        samples=counted["samples"],
        figures=counted,
        conditions=conditions,
    )


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    stage: str,
    mode: EvaluationMode,
    settings: SamplingSettings,
    style: AnswerStyle,
    seed: int,
    samples: int = 1,
    further: bool = False,
    asked: Mapping[str, Any] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
    partial: PartialRecords | None = None,
) -> Evaluation:
    """``samples`` completions per prompt (one where ``mode`` is greedy), graded.

    The seed's scope is ``evaluation/<mode>`` at every stage, so that stages are compared on the same random numbers, and the
    first samples of a problem are the same however many are drawn. ``further`` asks for the verdicts of ``groupwise eval``, which
    cost a computer algebra system's time. ``asked`` is what ``conditions`` says. ``on_progress(finished_completions,
    sampled_tokens)`` comes from the engine. ``partial`` has what was judged before, which is finished and not sampled, and gets the
    rest part by part.

    Raises:
        DataError: there are no prompts, or ``partial`` is of another evaluation.
    """
    if not prompts:
        raise DataError(NO_PROBLEMS)
    started = time.monotonic()
    samples = 1 if mode == "greedy" else samples
    sampling = {
        "temperature": 0.0 if settings.greedy else settings.temperature,
        "max_tokens": settings.max_tokens,
        "samples": samples,
        "seed": seed,
    }
    told = {"style": style, **(asked or {}), **sampling}
    records = partial.judged(mode, told, prompts) if partial else []
    found = len(records)
    if found and on_progress is not None:
        on_progress(found, 0)
    for part in partial.parts(prompts[found // samples :], samples) if partial else [prompts]:
        judged, before = [], (len(records), sum(record["tokens"] for record in records[found:]))

        def progress(finished: int, tokens: int, before: tuple[int, int] = before) -> None:
            if on_progress is not None:
                on_progress(before[0] + finished, before[1] + tokens)

        sampled = engine.sample(part, samples, settings, seed=seed, scope=f"evaluation/{mode}", on_progress=progress)
        assert len(sampled) == len(part), f"the engine answered {len(sampled)} of {len(part)} prompts"
        assert all(len(group) == samples for group in sampled), f"the engine did not sample {samples} of each"
        for prompt, group in zip(part, sampled, strict=True):
            renew_budget()  # for each problem: what some answers cost must not leave the other problems' unchecked
            rows = [make_record(prompt, completion, style, index) for index, completion in enumerate(group)]
            if further:
                rows = [{**r, **further_verdicts(r["response"], references_of(r), style)} for r in rows]
            judged += rows
        records += judged
        if partial:
            partial.add(mode, told, judged)
    return evaluation_of(records, stage=stage, mode=mode, conditions=told, seconds=time.monotonic() - started)


def sampling_settings(config: Config, mode: EvaluationMode) -> SamplingSettings:
    """How an evaluation samples: over the full distribution, whatever top-k and top-p the rollout uses."""
    return SamplingSettings(
        max_tokens=config.evaluation.max_completion_tokens or config.rollout.max_completion_tokens,
        temperature=config.evaluation.temperature,
        greedy=mode == "greedy",
    )


def conditions(config: Config, system: str | None, available: int | None = None) -> dict[str, Any]:
    """What a score must say of how it was taken, as far as ``config`` knows: the data, the prompt and the worked examples.
    ``available`` is how many problems there are, of which ``evaluation.problems`` may take a part."""
    return {
        "data": held_out_from(config.data, available),
        "available": available,
        "prompt_format": prompt_format(config, system),
        "shots": config.evaluation.shots,
    }


def prompt_format(config: Config, system: str | None) -> str:
    """``chat template, system prompt "Reason in ..."`` in one phrase."""
    given = ", ".join(f"{name}={value!r}" for name, value in config.prompt.template_arguments.items())
    chat = "the model's chat template" + (f" ({given})" if given else "")
    kinds = {"chat": chat, "plain": "User:/Assistant:", "concat": "bare text"}
    words = " ".join((system or "").split())
    shown = words if len(words) <= LONGEST_SYSTEM else words[: LONGEST_SYSTEM - 3] + "..."
    return kinds[config.prompt.style] + (f' with the system prompt "{shown}"' if shown else " without a system prompt")


def evaluate_stage(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    stage: str,
    config: Config,
    style: AnswerStyle,
    system: str | None = None,
    further: bool = False,
    available: int | None = None,
    trackers: Trackers | None = None,
    partial: PartialRecords | None = None,
) -> list[Evaluation]:
    """Every mode of ``config.evaluation``, with a progress bar each; results go to ``trackers`` and are returned in order.
    ``partial``: see ``evaluate``."""
    trackers = trackers or Trackers()
    results = []
    for mode in config.evaluation.modes:
        samples = 1 if mode == "greedy" else config.evaluation.samples
        name = "evaluation" if stage == "eval" else f"evaluation, {stage.replace('_', ' ')}"
        with trackers.phase(f"{name} ({mode})", len(prompts) * samples, "problems" if samples == 1 else "completions") as bar:
            bar.most_tokens = sampling_settings(config, mode).max_tokens

            def progress(finished: int, tokens: int, bar: Any = bar) -> None:
                if not tokens:
                    bar.begun_at = finished
                bar.advance(finished - bar.done, tokens=tokens)

            result = evaluate(
                engine,
                prompts,
                stage=stage,
                mode=mode,
                settings=sampling_settings(config, mode),
                style=style,
                seed=config.evaluation.seed,
                samples=samples,
                further=further,
                asked=conditions(config, system, available),
                on_progress=progress,
                partial=partial,
            )
            bar.advance(len(prompts) * samples - bar.done)
        trackers.evaluation(result)
        results.append(result)
    return results


def held_out_prompts(
    problems: Sequence[Problem], tokenizer: Any, config: Config, system: str | None, context_length: int,
    episodes: Episodes | None = None, by_vllm: bool = False,
) -> list[Prompt]:  # fmt: skip
    """The first ``config.evaluation.problems`` held-out problems, rendered. ``context_length`` is the model's, in tokens, or with
    ``by_vllm`` what that takes.

    Raises:
        DataError: there are none, or one is too long and ``data.on_long_prompt`` says ``error``.
        ConfigError: a completion alone would fill the context.
    """
    from groupwise.data.prompts import drop_long_prompts

    chosen = problems[: config.evaluation.problems]
    if episodes is not None:
        episodes.start_together(chosen)
    prompts = [render_episode(problem, tokenizer, config.prompt, system, episodes) for problem in chosen]
    if not prompts:
        raise DataError(NO_PROBLEMS)
    completion_tokens = sampling_settings(config, "sampled").max_tokens
    limit = prompt_limit(config, context_length, completion_tokens, "evaluation.max_completion_tokens", by_vllm)
    kept, too_long = drop_long_prompts(prompts, limit, config.data.on_long_prompt)
    if too_long:
        logger.warning("%d of %d held-out problems were dropped: their prompts are too long", too_long, len(prompts))
    return kept


STAGES = ("base", "warm_start", "final")
"""The stages that ``summary.json`` lists by themselves; evaluations in mid-run have names of their own, such as ``step-40``."""


def build_summary(
    evaluations: Sequence[Evaluation],
    seconds: float,
    config: Config,
    *,
    recipe: str | None = None,
    style: AnswerStyle | None = None,
    folder: str | Path | None = None,
    final_model: str | Path | None = None,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What ``summary.json`` holds.

    ``evaluations`` has one entry for each of base, warm_start and final, in the headline mode (the first of
    ``config.evaluation.modes``); the other mode's are in ``greedy_evaluations`` (or ``sampled_evaluations``), and those taken in
    mid-run in ``training_evaluations``. ``comparison`` is what training changed problem by problem, from the warm start (or the
    base, without one) to the final model. ``seconds`` is the whole run's.
    """
    from groupwise.tracking.environment import code_revision, installed_version

    mode = config.evaluation.modes[0]
    other: EvaluationMode = "greedy" if mode == "sampled" else "sampled"
    headline = by_stage(evaluations, mode)
    return {
        "evaluations": [result.to_summary() for result in headline.values()],
        f"{other}_evaluations": [result.to_summary() for result in by_stage(evaluations, other).values()],
        "training_evaluations": [result.to_summary() for result in evaluations if result.stage not in STAGES],
        "comparison": training_effect(headline),
        "seconds": round(seconds, 3),
        "seed": config.training.seed,
        "model": config.model.name,
        "task": config.data.source,
        "format": style,
        "temperature": config.evaluation.temperature,
        "max_completion_tokens": sampling_settings(config, mode).max_tokens,
        "recipe": recipe,
        "version": installed_version("groupwise"),
        "code": code_revision(),
        "folder": None if folder is None else str(folder),
        "final_model": None if final_model is None else str(final_model),
        **(extra or {}),
    }


def by_stage(evaluations: Sequence[Evaluation], mode: str) -> dict[str, Evaluation]:
    """The named stages in their order; of several evaluations of one stage, the latest."""
    latest = {result.stage: result for result in evaluations if result.mode == mode}
    return {stage: latest[stage] for stage in STAGES if stage in latest}


def training_effect(headline: Mapping[str, Evaluation]) -> dict[str, Any] | None:
    before = headline.get("warm_start") or headline.get("base")
    after = headline.get("final")
    if before is None or after is None:
        return None
    verdict = headline_verdict(before.records, after.records)
    try:
        paired = paired_comparison(before.records, after.records, key=verdict)
    except DataError as error:  # a run that goes on may judge other problems than it began with
        logger.warning("%s and %s cannot be compared: %s", before.stage, after.stage, error)
        return None
    return {"before": before.stage, "after": after.stage, "verdict": verdict, **paired}
