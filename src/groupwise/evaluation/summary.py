"""What ``summary.json`` says: each stage's figures, and what training changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from groupwise.config.schema import Config
from groupwise.data.answers import AnswerStyle
from groupwise.evaluation.comparing import paired_comparison
from groupwise.evaluation.judging import Evaluation, EvaluationMode, sampling_settings

__all__ = ["build_summary"]

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
    return {"before": before.stage, "after": after.stage, **paired_comparison(before.records, after.records)}
