"""Everything that the page shows, as plain values: one entry per run with its settings, evaluations and held-out problems, and the packed
texts beside it.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from groupwise.config import Config
from groupwise.config.load import changed_settings
from groupwise.config.objective import GroupAdvantage
from groupwise.data.prompts import resolve_system
from groupwise.doctor import diagnose_run, verdict_on
from groupwise.errors import DataError, GroupwiseError
from groupwise.evaluation.figures import (
    crosstab,
    first_samples,
    headline_verdict,
    of_episodes,
    paired_comparison,
    share,
    turns_interval,
)
from groupwise.evaluation.judging import EvaluationMode, conditions, sampling_settings
from groupwise.report.curves import QUANTILES, bands, curves, taken
from groupwise.report.transcripts import fill_portions, transcripts
from groupwise.tracking.environment import installed_version
from groupwise.tracking.files import finite
from groupwise.tracking.metric_table import describe_metric
from groupwise.tracking.reading import EvaluationRecords, RunRecord
from groupwise.tracking.tables import condition_line

__all__ = [
    "Blocks",
    "asked",
    "build_payload",
    "comparisons",
    "differences",
    "evaluation_curves",
    "evaluation_rows",
    "flat",
    "held_out",
]

Blocks = dict[str, str]
"""Packed texts by the id of their script block: ``c-RUN-PORTION`` (completions), ``e-RUN-PORTION`` (held-out problems)."""


def build_payload(runs: Sequence[RunRecord], *, completions: bool = True) -> tuple[dict[str, Any], Blocks]:
    """The page's data. ``completions=False`` leaves all texts out, for a page that can be shown around."""
    blocks: Blocks = {}
    entries = [run_entry(index, run, blocks, completions=completions) for index, run in enumerate(runs)]
    names = dict.fromkeys(name for entry in entries for name in entry["curves"])
    payload = {
        "version": installed_version("groupwise"),
        "made": time.strftime("%Y-%m-%d %H:%M"),
        "quantiles": list(QUANTILES),
        "metrics": {name: describe_metric(name) for name in names},
        "runs": entries,
        "settings_differences": differences([as_known(run) for run in runs]),
        "environment_differences": differences([without(entry["environment"], OWN) for entry in entries]),
    }
    return payload, blocks


OWN = ("id", "started")
"""What every run has of its own, and is no difference worth a line."""


def without(table: Mapping[str, str], paths: Sequence[str]) -> dict[str, str]:
    return {path: value for path, value in table.items() if path not in paths}


def run_entry(index: int, run: RunRecord, blocks: Blocks, *, completions: bool) -> dict[str, Any]:
    evaluations, findings = evaluation_rows(run), diagnose_run(run)
    entry: dict[str, Any] = {
        "name": run.name,
        "state": "finished" if run.summary else "not finished",
        "steps": run.last_step,
        "planned_steps": run.config.training.steps if run.config else None,
        "seconds": seconds(run),
        "settings": flat(run.settings) if run.settings else {},
        "chosen": chosen(run),
        "environment": flat(run.environment) if run.environment else {},
        "curves": curves(run) | evaluation_curves(evaluations, run.last_step),
        "bands": bands(run),
        "taken": taken(run),
        "evaluations": evaluations,
        "asked": asked(run),
        "comparisons": comparisons(run),
        "findings": [finding.to_json() for finding in findings],
        "verdict": verdict_on(run, findings),
        "headline": run.config.evaluation.modes[0] if run.config else None,
        "unreadable": dict(run.unreadable),
        "weights": reward_weights(run),
        "advantage": advantage_rule(run),
        "transcripts": None,
        "held_out": [],
    }
    if not completions:
        for finding in entry["findings"]:
            finding["examples"] = []
        return entry
    entry["transcripts"], texts = transcripts(run)
    blocks.update({f"c-{index}-{i}": text for i, text in enumerate(texts)})
    entry["held_out"], texts = held_out(run)
    blocks.update({f"e-{index}-{i}": text for i, text in enumerate(texts)})
    return entry


def seconds(run: RunRecord) -> float | None:
    """The whole run's, evaluations included, once it has finished; up to the last step before."""
    told = (run.summary or {}).get("seconds")
    return told if isinstance(told, (int, float)) else max((v for _, v in run.series("time_s")), default=None)


def as_known(run: RunRecord) -> dict[str, str]:
    """The settings with those that came since the run was made, which had their defaults."""
    return flat(run.config.model_dump(mode="json")) if run.config else flat(run.settings) if run.settings else {}


def chosen(run: RunRecord) -> list[str]:
    """Paths of the settings that are not what a run has by itself."""
    return list(flat(changed_settings(run.settings))) if run.settings else []


def reward_weights(run: RunRecord) -> Mapping[str, float]:
    """Weight of each component: by its place in the settings, since two uses of one function have names of their own. Functions
    that were given from Python come after those of the settings, with weight 1."""
    names = list(dict.fromkeys(name for record in run.completions[:1000] for name in record.components))
    weights = [entry.weight for entry in run.config.rewards.functions] if run.config else []
    return {name: weights[i] if i < len(weights) else 1.0 for i, name in enumerate(names)}


def advantage_rule(run: RunRecord) -> Mapping[str, Any] | None:
    """How rewards became advantages, and advantages weights of tokens."""
    if run.config is None:
        return None
    algorithm, rollout = run.config.algorithm, run.config.rollout
    advantage, kl = algorithm.advantage, algorithm.kl
    by_group = advantage if isinstance(advantage, GroupAdvantage) else None
    failed = [] if rollout.refill_rounds else run.series("groups/failed")  # refills take their places
    return {
        "type": advantage.type,
        "baseline": by_group and by_group.baseline,
        "scale": by_group and by_group.scale,
        "epsilon": by_group and by_group.epsilon,
        "aggregation": algorithm.loss.aggregation,
        "kl_placement": kl.placement if kl else None,
        "steps": any(name.startswith("steps/") for name in run.metric_names()),
        "completions": run.config.completions_per_step,
        "left_out": {step: round(groups) * rollout.completions_per_prompt for step, groups in failed if groups},
        "max_tokens": rollout.max_completion_tokens,
        "masks": algorithm.mask_truncated,
        "top_share": algorithm.entropy.top_share if algorithm.entropy else 1,
    }


LONGEST = 2000
DEEPEST = 8


def flat(value: object, path: str = "", depth: int = 0) -> dict[str, str]:
    """Nested mappings as dotted paths -> values as text; lists stay whole, but those of mappings (such as reward functions).

    >>> flat({"a": {"b": 1, "c": [1, 2]}, "d": None})
    {'a.b': '1', 'a.c': '[1, 2]', 'd': 'null'}
    >>> flat({"functions": [{"weight": 2.0}, {"weight": 0.5}]})
    {'functions.0.weight': '2.0', 'functions.1.weight': '0.5'}
    """
    if isinstance(value, Mapping) and value and depth < DEEPEST:
        table: dict[str, str] = {}
        for key, inner in value.items():
            table |= flat(inner, f"{path}.{key}" if path else str(key), depth + 1)
        return table
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value) and depth < DEEPEST:
        return flat({str(i): item for i, item in enumerate(value[:LONGEST])}, path, depth)
    return {path: words(value)}


def words(value: object) -> str:
    if isinstance(value, str):
        return clean(value[:LONGEST])
    try:
        return clean(json.dumps(finite(value), ensure_ascii=False, default=str)[:LONGEST])
    except (RecursionError, ValueError):
        return "(too deeply nested to show)"


def clean(text: str) -> str:
    return text.encode("utf-8", errors="replace").decode("utf-8")


def differences(tables: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Paths that are not the same in all tables, with each one's value (``None`` where it has no such path). A section that one of them
    leaves out, and so has as null, is one row."""
    absent = [path for path, value in dict.fromkeys(pair for table in tables for pair in table.items()) if value == "null"]
    for section in absent:
        tables = [_in_one_cell(table, section) for table in tables]
    paths = list(dict.fromkeys(path for table in tables for path in table))
    rows = [{"path": path, "values": [table.get(path) for table in tables]} for path in paths]
    return [row for row in rows if len(set(row["values"])) > 1]


def _in_one_cell(table: Mapping[str, str], section: str) -> Mapping[str, str]:
    """The table with what it has inside ``section`` as one text."""
    inside = {path: value for path, value in table.items() if path.startswith(f"{section}.")}
    if not inside:
        return table
    text = ", ".join(f"{path.removeprefix(f'{section}.')}: {value}" for path, value in inside.items())
    return {**{path: value for path, value in table.items() if path not in inside}, section: text}


def evaluation_rows(run: RunRecord) -> list[dict[str, Any]]:
    """One row per stage and mode, counted again from the records, with 95% intervals clustered by problem."""
    return [evaluation_row(evaluation) for evaluation in run.evaluations]


def evaluation_row(evaluation: EvaluationRecords) -> dict[str, Any]:
    n = len({record["problem"] for record in evaluation.records})
    row: dict[str, Any] = {"stage": evaluation.stage, "mode": evaluation.mode, "n": n, "step": evaluation.step}
    stopped = [{**record, "stopped": record["finish_reason"] == "stop"} for record in evaluation.records]
    for key in ("strict", "lenient", "format", "stopped"):
        known = any(record[key] is not None for record in stopped)
        row[key] = list(share(stopped, key)) if known else list(row["strict"])  # lenient: where every answer went unchecked
    if all("turns" in record for record in evaluation.records):
        row["episodes"] = of_episodes(evaluation.records)
        row["turns_interval"] = turns_interval(evaluation.records)
    if all("success" in record for record in evaluation.records) and any(r["success"] is not None for r in evaluation.records):
        row["success"] = list(share(evaluation.records, "success"))
    row["samples"] = round(len(evaluation.records) / n)
    row["tokens"] = sum(record["tokens"] for record in evaluation.records) / len(evaluation.records)
    return row


def evaluation_curves(rows: Sequence[Mapping[str, Any]], last_step: int) -> dict[str, dict[str, list[float]]]:
    """Held-out accuracy over the steps, by mode, with the ends of its interval as ``low`` and ``high``: strict, or the success that an
    environment tells. What training starts from (after a warm start, where there is one) stands at step 0, and the final evaluation
    at the last step."""
    by_mode: dict[str, dict[str, list[float]]] = {}
    for mode in dict.fromkeys(row["mode"] for row in rows):
        ends = {"base": 0, "warm_start": 0, "final": last_step}
        placed = [
            (row["step"] if row["step"] is not None else ends.get(row["stage"]), row) for row in rows if row["mode"] == mode
        ]
        key = "success" if all("success" in row for _, row in placed) else "strict"
        at = {step: row[key] for step, row in placed if step is not None}
        values, low, high = ([at[step][i] for step in sorted(at)] for i in range(3))
        by_mode[f"evaluation/{mode}_{key}"] = {"steps": sorted(at), "values": values, "low": low, "high": high}
    return by_mode


def asked(run: RunRecord) -> list[str]:
    """How the scores were taken, a sentence for each mode: as the run's summary has it, or else, since the data may not lie here, as far as
    its settings tell; none where these cannot be read."""
    if run.config is None:
        return []
    latest = {evaluation.mode: evaluation_row(evaluation) for evaluation in run.evaluations}
    modes: list[EvaluationMode] = [mode for mode in ("sampled", "greedy") if mode in latest]
    lines = []
    for mode in modes:
        settings = sampling_settings(run.config, mode)
        told = recorded_conditions(run, mode) or conditions_here(run.config)
        if told is None:
            continue
        how = {"mode": mode, "temperature": settings.temperature, "max_tokens": settings.max_tokens, "conditions": told}
        lines.append(clean(f"Asked: {condition_line({**latest[mode], **how})}."))
    return lines


def recorded_conditions(run: RunRecord, mode: str) -> dict[str, Any] | None:
    """Those of the last evaluation in the run's summary, if it has one of this mode."""
    lists = [(run.summary or {}).get(key) for key in ("evaluations", f"{mode}_evaluations")]
    rows = [row for rows in lists if isinstance(rows, list) for row in rows if isinstance(row, dict) and row.get("mode") == mode]
    told = rows[-1].get("conditions") if rows else None
    if not isinstance(told, dict):
        return None
    return told if isinstance(told.get("available"), int) else {**told, "available": None}


def conditions_here(config: Config) -> dict[str, Any] | None:
    try:
        system, style = resolve_system(config.prompt, config.data)
        return {"style": style, "seed": config.evaluation.seed, **conditions(config, system)}
    except (GroupwiseError, OSError, RuntimeError):  # another user's data, or a home folder that is not known here
        return None


def comparisons(run: RunRecord) -> list[dict[str, Any]]:
    """What became of the problems that two neighbouring stages share, mode by mode, with an exact p-value (``paired_comparison``).

    With several samples of a problem ``fixed`` and ``broken`` count those that got better and worse; the rest is not known by problem.
    """
    rows = []
    for mode in dict.fromkeys(e.mode for e in run.evaluations):
        stages = [e for e in run.evaluations if e.mode == mode]
        named = [e for e in stages if e.step is None]
        for before, after in pairwise(named):
            key = headline_verdict(before.records, after.records)
            found = compared(before, after, key)
            if found is not None:
                names = {"mode": mode, "before": before.stage, "after": after.stage, "key": key}
                rows.append({**names, **found})
    return rows


def compared(before: EvaluationRecords, after: EvaluationRecords, key: str) -> dict[str, Any] | None:
    """Of the problems of which every sample was checked at both stages, as the run's summary has it."""
    counts = [Counter(record["problem"] for record in stage.records) for stage in (before, after)]
    whole = [(count, max(count.values(), default=0)) for count in counts]
    shared = {problem for problem in counts[0] if all(count[problem] == most for count, most in whole)}
    try:
        found = paired_comparison(*([r for r in e.records if r["problem"] in shared] for e in (before, after)), key=key)
    except DataError:  # asked in another order, or another number of times
        pairs = first_samples(before.records, after.records, key)
        return {"n": len(pairs), "samples": 1, **crosstab(pairs)} if pairs else None
    kept = {name: found[name] for name in ("n", "samples", "p_value")}
    if found["samples"] > 1:
        return {**kept, "fixed": found["better"], "broken": found["worse"], "both_right": None, "both_wrong": None}
    return {**kept, **{name: found[name] for name in ("fixed", "broken", "both_right", "both_wrong")}}


def held_out(run: RunRecord) -> tuple[list[dict[str, Any]], list[str]]:
    """Stages, problems and verdicts of each mode, and the packed portions of texts (numbered through over all modes).

    Of several samples of a problem it is the first. ``verdicts[stage][problem]`` is ``r`` (right, or a success by the environment), ``l``
    (right elsewhere only), ``w`` (wrong) or ``-`` (not asked, or not judged). A portion lists problems as ``{question, expected, said}``
    with ``said[stage]`` = ``[response, extracted, finish reason, tokens]`` or null.
    """
    tables: list[dict[str, Any]] = []
    portions: list[str] = []
    for mode in dict.fromkeys(e.mode for e in run.evaluations):
        stages = [e for e in run.evaluations if e.mode == mode]
        by_stage = [{record["problem"]: record for record in reversed(e.records)} for e in stages]
        key = headline_verdict(*(e.records for e in stages))
        problems = list(dict.fromkeys(record["problem"] for e in stages for record in e.records))
        entries = [said(problem, by_stage) for problem in problems]
        sizes = [len(entry["question"]) + sum(len(one[0]) for one in entry["said"] if one) for entry in entries]
        starts, texts = fill_portions(zip(entries, sizes, strict=True))
        tables.append(
            {
                "mode": mode,
                "stages": [e.stage for e in stages],
                "problems": problems,
                "several": max(len(e.records) / len(records) for e, records in zip(stages, by_stage, strict=True)) > 1,
                "verdicts": ["".join(verdict(records.get(p), key) for p in problems) for records in by_stage],
                "first_portion": len(portions),
                "starts": starts,
            }
        )
        portions += texts
    return tables, portions


def verdict(record: Mapping[str, Any] | None, key: str) -> str:
    if record is None or record[key] is None:
        return "-"
    return "r" if record[key] else "l" if key == "strict" and record["lenient"] else "w"


def said(problem: str, by_stage: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    records = [records_of.get(problem) for records_of in by_stage]
    first = next(record for record in records if record is not None)
    return {
        "question": first["question"] or first["prompt"],
        "expected": first["expected"],
        "said": [r and [r["response"], r["extracted"], r["finish_reason"], r["tokens"]] for r in records],
    }
