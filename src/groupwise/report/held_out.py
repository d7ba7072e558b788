"""Evaluations: the tables, and every held-out problem with what the model said to it at each stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from groupwise.data.prompts import resolve_system
from groupwise.evaluation.figures import crosstab, first_samples, share
from groupwise.evaluation.judging import EvaluationMode, conditions, sampling_settings
from groupwise.report.packing import pack_json
from groupwise.tracking.reading import EvaluationRecords, RunRecord
from groupwise.tracking.tables import condition_line

__all__ = ["asked", "comparisons", "evaluation_curves", "evaluation_rows", "held_out"]

PORTION = 100
"""Problems that are packed together."""


def evaluation_rows(run: RunRecord) -> list[dict[str, Any]]:
    """One row per stage and mode, counted again from the records, with 95% intervals clustered by problem."""
    return [evaluation_row(evaluation) for evaluation in run.evaluations]


def evaluation_row(evaluation: EvaluationRecords) -> dict[str, Any]:
    n = len({record["problem"] for record in evaluation.records})
    row: dict[str, Any] = {"stage": evaluation.stage, "mode": evaluation.mode, "n": n, "step": evaluation.step}
    stopped = [{**record, "stopped": record["finish_reason"] == "stop"} for record in evaluation.records]
    for key in ("strict", "lenient", "format", "stopped"):
        row[key] = list(share(stopped, key))
    row["samples"] = round(len(evaluation.records) / n)
    row["tokens"] = sum(record["tokens"] for record in evaluation.records) / len(evaluation.records)
    return row


def evaluation_curves(rows: Sequence[Mapping[str, Any]], last_step: int) -> dict[str, dict[str, list[float]]]:
    """Strict held-out accuracy over the steps, by mode, with the ends of its interval as ``low`` and ``high``: what training starts
    from (after a warm start, where there is one) stands at step 0, and the final evaluation at the last step."""
    found: dict[str, dict[str, list[float]]] = {}
    for mode in dict.fromkeys(row["mode"] for row in rows):
        ends = {"base": 0, "warm_start": 0, "final": last_step}
        placed = [
            (row["step"] if row["step"] is not None else ends.get(row["stage"]), row) for row in rows if row["mode"] == mode
        ]
        at = {step: row["strict"] for step, row in placed if step is not None}
        values, low, high = ([at[step][i] for step in sorted(at)] for i in range(3))
        found[f"evaluation/{mode}_strict"] = {"steps": sorted(at), "values": values, "low": low, "high": high}
    return found


def asked(run: RunRecord) -> list[str]:
    """How the scores were taken, a sentence for each mode, by the run's settings; none where these cannot be read."""
    if run.config is None:
        return []
    system, style = resolve_system(run.config.prompt, run.config.data)
    told = {"style": style, "seed": run.config.evaluation.seed, **conditions(run.config, system)}
    latest = {evaluation.mode: evaluation_row(evaluation) for evaluation in run.evaluations}
    modes: list[EvaluationMode] = [mode for mode in ("sampled", "greedy") if mode in latest]
    lines = []
    for mode in modes:
        settings = sampling_settings(run.config, mode)
        how = {"mode": mode, "temperature": settings.temperature, "max_tokens": settings.max_tokens, "conditions": told}
        lines.append(f"Asked: {condition_line({**latest[mode], **how})}.")
    return lines


def comparisons(run: RunRecord) -> list[dict[str, Any]]:
    """What became of the problems that two neighbouring stages share, mode by mode, with McNemar's exact p-value."""
    found = []
    for mode in dict.fromkeys(e.mode for e in run.evaluations):
        stages = [e for e in run.evaluations if e.mode == mode]
        named = [e for e in stages if e.step is None]
        for before, after in pairwise(named):
            if pairs := first_samples(before.records, after.records):
                names = {"mode": mode, "before": before.stage, "after": after.stage}
                found.append({**names, "n": len(pairs), **crosstab(pairs)})
    return found


def held_out(run: RunRecord) -> tuple[list[dict[str, Any]], list[str]]:
    """For each mode its stages, problems and verdicts, and the packed portions of texts (numbered through over all modes).

    ``verdicts[stage][problem]`` is ``r`` (right), ``l`` (right elsewhere only), ``w`` (wrong) or ``-`` (not asked). A portion lists
    problems as ``{question, expected, said}`` with ``said[stage]`` = ``[response, extracted, finish reason, tokens]`` or null.
    """
    tables: list[dict[str, Any]] = []
    portions: list[str] = []
    for mode in dict.fromkeys(e.mode for e in run.evaluations):
        stages = [e for e in run.evaluations if e.mode == mode]
        by_stage = [{record["problem"]: record for record in e.records} for e in stages]
        problems = list(dict.fromkeys(record["problem"] for e in stages for record in e.records))
        tables.append(
            {
                "mode": mode,
                "stages": [e.stage for e in stages],
                "problems": problems,
                "verdicts": ["".join(verdict(found.get(p)) for p in problems) for found in by_stage],
                "first_portion": len(portions),
                "portion": PORTION,
            }
        )
        for start in range(0, len(problems), PORTION):
            portions.append(pack_json([said(p, by_stage) for p in problems[start : start + PORTION]]))
    return tables, portions


def verdict(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return "-"
    return "r" if record["strict"] else "l" if record["lenient"] else "w"


def said(problem: str, by_stage: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    records = [found.get(problem) for found in by_stage]
    first = next(record for record in records if record is not None)
    return {
        "question": first["question"] or first["prompt"],
        "expected": first["expected"],
        "said": [r and [r["response"], r["extracted"], r["finish_reason"], r["tokens"]] for r in records],
    }
