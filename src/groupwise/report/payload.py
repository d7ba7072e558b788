"""Everything that the page shows, as plain values: one entry per run, and the packed texts beside it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.config import Config
from groupwise.config.advantage import GroupAdvantage
from groupwise.doctor import diagnose_run
from groupwise.report.comparing import differences, flat
from groupwise.report.curves import QUANTILES, bands, curves, taken
from groupwise.report.held_out import asked, comparisons, evaluation_curves, evaluation_rows, held_out
from groupwise.report.transcripts import transcripts
from groupwise.tracking.environment import installed_version
from groupwise.tracking.metric_table import describe_metric
from groupwise.tracking.reading import RunRecord

__all__ = ["Blocks", "build_payload"]

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
    evaluations = evaluation_rows(run)
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
        "findings": [finding.to_json() for finding in diagnose_run(run)],
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
    default = flat(Config().model_dump(mode="json"))
    return [path for path, value in (flat(run.settings) if run.settings else {}).items() if default.get(path) != value]


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
    return {
        "type": advantage.type,
        "baseline": by_group and by_group.baseline,
        "scale": by_group and by_group.scale,
        "epsilon": by_group and by_group.epsilon,
        "aggregation": algorithm.loss.aggregation,
        "kl_placement": kl.placement if kl else None,
        "steps": any(name.startswith("steps/") for name in run.metric_names()),
        "completions": run.config.completions_per_step,
        "max_tokens": rollout.max_completion_tokens,
    }
