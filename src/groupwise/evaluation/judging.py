"""Judging a policy on held-out problems: accuracy with intervals, the same way at every stage of a run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from groupwise.config.schema import Config
from groupwise.data.answers import AnswerStyle
from groupwise.data.latex import renew_budget
from groupwise.data.sources import held_out_from
from groupwise.engines.base import Engine, SamplingSettings
from groupwise.errors import ConfigError, DataError
from groupwise.evaluation.figures import figures
from groupwise.evaluation.records import further_verdicts, make_record, references_of
from groupwise.tracking import Trackers
from groupwise.types import Problem, Prompt

__all__ = [
    "Evaluation",
    "EvaluationMode",
    "conditions",
    "evaluate",
    "evaluate_stage",
    "evaluation_of",
    "held_out_prompts",
    "prompt_format",
    "sampling_settings",
]

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
    found = figures(records)
    if unchecked := found.get("unchecked"):
        logger.warning(
            "%d of %d completions are left out of the %s figures: math-verify, asked twice, gave no verdict on their answers",
            unchecked,
            len(records),
            stage.replace("_", " "),
        )
    return Evaluation(
        stage=stage,
        mode=mode,
        n=found["n"],
        strict_accuracy=found["strict"][0],
        strict_interval=(found["strict"][1], found["strict"][2]),
        lenient_accuracy=found["lenient"][0],
        lenient_interval=(found["lenient"][1], found["lenient"][2]),
        format_rate=found["format_rate"],
        stop_rate=found["stop_rate"],
        mean_tokens=found["mean_tokens"],
        seconds=seconds,
        temperature=conditions["temperature"],
        max_tokens=conditions["max_tokens"],
        records=tuple(records),
        samples=found["samples"],
        figures=found,
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
) -> Evaluation:
    """``samples`` completions per prompt (one where ``mode`` is greedy), graded.

    The seed's scope is ``evaluation/<mode>`` at every stage, so that stages are compared on the same random numbers, and the
    first samples of a problem are the same however many are drawn. ``further`` asks for the verdicts of ``groupwise eval``, which
    cost a computer algebra system's time. ``asked`` is what ``conditions`` says. ``on_progress(finished_completions,
    sampled_tokens)`` comes from the engine.

    Raises:
        DataError: there are no prompts.
    """
    if not prompts:
        raise DataError(NO_PROBLEMS)
    started = time.monotonic()
    samples = 1 if mode == "greedy" else samples
    sampled = engine.sample(prompts, samples, settings, seed=seed, scope=f"evaluation/{mode}", on_progress=on_progress)
    assert len(sampled) == len(prompts), f"the engine answered {len(sampled)} of {len(prompts)} prompts"
    assert all(len(group) == samples for group in sampled), f"the engine did not sample {samples} of each"
    renew_budget()
    records = [
        make_record(prompt, completion, style, index)
        for prompt, group in zip(prompts, sampled, strict=True)
        for index, completion in enumerate(group)
    ]
    if further:
        records = [{**r, **further_verdicts(r["response"], references_of(r), style)} for r in records]
    sampling = {
        "temperature": 0.0 if settings.greedy else settings.temperature,
        "max_tokens": settings.max_tokens,
        "samples": samples,
        "seed": seed,
    }
    told = {"style": style, **(asked or {}), **sampling}
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
    kinds = {"chat": "the model's chat template", "plain": "User:/Assistant:", "concat": "bare text"}
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
) -> list[Evaluation]:
    """Every mode of ``config.evaluation``, with a progress bar each; results go to ``trackers`` and are returned in order."""
    trackers = trackers or Trackers()
    results = []
    for mode in config.evaluation.modes:
        samples = 1 if mode == "greedy" else config.evaluation.samples
        name = "evaluation" if stage == "eval" else f"evaluation, {stage.replace('_', ' ')}"
        with trackers.phase(f"{name} ({mode})", len(prompts) * samples, "problems" if samples == 1 else "completions") as bar:

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
                samples=samples,
                further=further,
                asked=conditions(config, system, available),
                on_progress=progress,
            )
            bar.advance(len(prompts) * samples - bar.done)
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
