"""Judging a policy on held-out problems: strict and lenient accuracy with intervals, the same way at every stage of a run."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from groupwise.config.schema import Config
from groupwise.data.answers import AnswerStyle, grade
from groupwise.engines.base import Engine, SamplingSettings
from groupwise.errors import ConfigError, DataError
from groupwise.metrics import wilson_interval
from groupwise.tracking import Trackers
from groupwise.types import Completion, Problem, Prompt

__all__ = [
    "Evaluation",
    "EvaluationMode",
    "build_summary",
    "evaluate",
    "evaluate_model",
    "evaluate_stage",
    "held_out_prompts",
    "is_well_formed",
    "mcnemar_p_value",
    "paired_comparison",
    "sampling_settings",
]

logger = logging.getLogger("groupwise")

EvaluationMode = Literal["sampled", "greedy"]
STAGES = ("base", "warm_start", "final")
"""The stages that ``summary.json`` lists by themselves; evaluations in mid-run have names of their own, such as ``step-40``."""
NO_PROBLEMS = (
    "there are 0 held-out problems to evaluate on, and at least 1 is needed: raise data.holdout or name data.eval_source"
)


@dataclass(frozen=True)
class Evaluation:
    """Figures of one stage in one mode. Rates are shares from 0 to 1, intervals 95% Wilson intervals."""

    stage: str
    mode: str
    n: int
    strict_accuracy: float
    """The answer stands where the format asks for it, and is right."""
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
    """One per problem, in the order of the prompts."""

    def to_summary(self) -> dict[str, Any]:
        """Everything but the records, as plain JSON values."""
        return {
            "stage": self.stage,
            "mode": self.mode,
            "n": self.n,
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
        }


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    *,
    stage: str,
    mode: EvaluationMode,
    settings: SamplingSettings,
    style: AnswerStyle,
    seed: int,
    on_progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """One completion per prompt, graded.

    The seed's scope is ``evaluation/<mode>`` at every stage, so that stages are compared on the same random numbers.
    ``on_progress(finished_completions, sampled_tokens)`` comes from the engine.

    Raises:
        DataError: there are no prompts.
    """
    if not prompts:
        raise DataError(NO_PROBLEMS)
    started = time.monotonic()
    sampled = engine.sample(prompts, 1, settings, seed=seed, scope=f"evaluation/{mode}", on_progress=on_progress)
    assert len(sampled) == len(prompts), f"the engine answered {len(sampled)} of {len(prompts)} prompts"
    records = tuple(make_record(prompt, group[0], style) for prompt, group in zip(prompts, sampled, strict=True))
    n = len(records)
    strict, lenient = (sum(record[key] for record in records) for key in ("strict", "lenient"))
    return Evaluation(
        stage=stage,
        mode=mode,
        n=n,
        strict_accuracy=strict / n,
        strict_interval=wilson_interval(strict, n),
        lenient_accuracy=lenient / n,
        lenient_interval=wilson_interval(lenient, n),
        format_rate=sum(record["format"] for record in records) / n,
        stop_rate=sum(record["finish_reason"] == "stop" for record in records) / n,
        mean_tokens=sum(record["tokens"] for record in records) / n,
        seconds=time.monotonic() - started,
        temperature=0.0 if settings.greedy else settings.temperature,
        max_tokens=settings.max_tokens,
        records=records,
    )


def make_record(prompt: Prompt, completion: Completion, style: AnswerStyle) -> dict[str, Any]:
    problem = prompt.problem
    verdict = grade(completion.text, problem.answer, style)
    question = problem.question if isinstance(problem.question, str) else problem.question[-1]["content"]
    return {
        "problem": problem.id,
        "question": question,
        "prompt": prompt.text,
        "expected": problem.answer,
        "extracted": verdict.extracted,
        "strict": verdict.strict,
        "lenient": verdict.lenient,
        "format": is_well_formed(completion.text, style),
        "finish_reason": completion.finish_reason,
        "tokens": len(completion.token_ids),
        "response": completion.text,
    }


def is_well_formed(text: str, style: AnswerStyle) -> bool:
    """Exactly the form asked for. xml: one filled reasoning block, then one filled answer block, and nothing else but white
    space; boxed: exactly one filled ``\\boxed{}``; plain: exactly one ``####`` with something after it."""
    from groupwise.rewards.functions.format import boxed_format, strict_xml

    if style == "xml":
        return strict_xml([text], score=1.0) == [1.0]
    if style == "boxed":
        return boxed_format([text], score=1.0) == [1.0]
    _, mark, answer = text.partition("####")
    return bool(mark and answer.strip()) and "####" not in answer


def sampling_settings(config: Config, mode: EvaluationMode) -> SamplingSettings:
    """How an evaluation samples: over the full distribution, whatever top-k and top-p the rollout uses."""
    return SamplingSettings(
        max_tokens=config.evaluation.max_completion_tokens or config.rollout.max_completion_tokens,
        temperature=config.evaluation.temperature,
        greedy=mode == "greedy",
    )


def evaluate_stage(
    engine: Engine, prompts: Sequence[Prompt], *, stage: str, config: Config, style: AnswerStyle, trackers: Trackers | None = None
) -> list[Evaluation]:
    """Every mode of ``config.evaluation``, with a progress bar each; results go to ``trackers`` and are returned in order."""
    trackers = trackers or Trackers()
    results = []
    for mode in config.evaluation.modes:
        name = "evaluation" if stage == "eval" else f"evaluation, {stage.replace('_', ' ')}"
        with trackers.phase(f"{name} ({mode})", len(prompts), "problems") as bar:

            def progress(finished: int, tokens: int, bar: Any = bar) -> None:
                bar.advance(finished - bar.done, tokens=tokens)

            result = evaluate(
                engine,
                prompts,
                stage=stage,
                mode=mode,
                settings=sampling_settings(config, mode),
                style=style,
                seed=config.evaluation.seed,
                on_progress=progress,
            )
            bar.advance(len(prompts) - bar.done)
        trackers.evaluation(result)
        results.append(result)
    return results


def held_out_prompts(
    problems: Sequence[Problem], tokenizer: Any, config: Config, system: str | None, context_length: int
) -> list[Prompt]:
    """The first ``config.evaluation.problems`` held-out problems, rendered. ``context_length`` is the model's, in tokens.

    Raises:
        DataError: there are none, or one is too long and ``data.on_long_prompt`` says ``error``.
        ConfigError: a completion alone would fill the context.
    """
    from groupwise.data.prompts import drop_long_prompts, render

    prompts = [render(problem, tokenizer, config.prompt, system) for problem in problems[: config.evaluation.problems]]
    if not prompts:
        raise DataError(NO_PROBLEMS)
    completion_tokens = sampling_settings(config, "sampled").max_tokens
    room = context_length - completion_tokens
    if room < 1:
        raise ConfigError(
            f"the token limit of evaluation is {completion_tokens}, but the model's context is {context_length} tokens, prompt "
            "included: lower evaluation.max_completion_tokens"
        )
    kept, too_long = drop_long_prompts(prompts, min(room, config.data.max_prompt_tokens or room), config.data.on_long_prompt)
    if too_long:
        logger.warning("%d of %d held-out problems were dropped: their prompts are too long", too_long, len(prompts))
    return kept


def evaluate_model(model: str, config: Config, *, stage: str = "eval", trackers: Trackers | None = None) -> list[Evaluation]:
    """What ``groupwise eval MODEL`` does: load ``model`` (a folder, or a name) and judge it in every mode of the config.

    Data, prompt, token limit and seed are the config's, as are the model's dtype and device. Model folder, problems and prompts
    are checked before weights are read. Records go to ``trackers``.

    Raises:
        ModelError, DataError: what the model or the data lack.
    """
    from groupwise.data.prompts import resolve_system
    from groupwise.data.sources import load_held_out
    from groupwise.engines import make_engine
    from groupwise.models.load import check_model, context_length, load_model_config, load_policy, load_tokenizer

    revision = config.model.revision if model == config.model.name else None  # a revision belongs to the model it was set for
    model_config = config.model.model_copy(update={"name": model, "revision": revision})
    check_model(model_config)
    system, style = resolve_system(config.prompt, config.data)
    held_out = load_held_out(config.data)
    tokenizer = load_tokenizer(model_config)
    room = context_length(load_model_config(model_config), tokenizer)
    prompts = held_out_prompts(held_out, tokenizer, config, system, room)
    engine = make_engine(load_policy(model_config), config.rollout)
    return evaluate_stage(engine, prompts, stage=stage, config=config, style=style, trackers=trackers)


def mcnemar_p_value(broken: int, fixed: int) -> float:
    """Two-sided exact McNemar test: the chance of a split at least this uneven if each change fell either way with 1/2.

    Q. McNemar (1947), "Note on the sampling error of the difference between correlated proportions or percentages".
    """
    changed = broken + fixed
    tail = sum(math.comb(changed, i) for i in range(min(broken, fixed) + 1))
    return min(1.0, 2 * tail / 2**changed)


def paired_comparison(
    before_records: Sequence[Mapping[str, Any]], after_records: Sequence[Mapping[str, Any]], *, key: str = "strict"
) -> dict[str, Any]:
    """What became of each problem between two evaluations of the same problems, with the exact McNemar p-value.

    A paired test sees more than two overlapping intervals do: problems that stayed right or wrong cancel out.

    Raises:
        DataError: the two do not judge the same problems in the same order.
    """
    ids = [[record["problem"] for record in records] for records in (before_records, after_records)]
    if ids[0] != ids[1]:
        raise DataError(
            f"two evaluations of {len(ids[0])} and {len(ids[1])} problems do not judge the same ones in the same order, which a "
            "comparison pair by pair needs: evaluate both with the same data settings"
        )
    outcomes = [(bool(a[key]), bool(b[key])) for a, b in zip(before_records, after_records, strict=True)]
    fixed, broken = outcomes.count((False, True)), outcomes.count((True, False))
    return {
        "n": len(outcomes),
        "fixed": fixed,
        "broken": broken,
        "both_right": outcomes.count((True, True)),
        "both_wrong": outcomes.count((False, False)),
        "p_value": mcnemar_p_value(broken, fixed),
    }


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
    return {"before": before.stage, "after": after.stage, **paired_comparison(before.records, after.records)}
