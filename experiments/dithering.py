"""What does it change to round fp32 masters into bf16 weights by fixed thresholds, and not to the nearest?

    python -m experiments.dithering
    python -m experiments.dithering --redraw

The quickstart's warm start, 12 supervised steps, three times of each seed: with fp32 weights, with bf16 weights rounded from their masters
as groupwise does, and with bf16 weights rounded to the nearest. Examples, order and rates are the same. Then held-out problems are
answered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.common import ROOT, Experiment, describe, main, markdown_table
from experiments.runs import Budget, Job, carry_out_all, warm_start_job

__all__ = ["EXPERIMENT", "measure", "to_the_nearest"]

SEEDS = (0, 1, 2)
WEIGHTS = {
    "fp32": ("model.dtype=float32", None),
    "bf16, masters dithered": ("model.dtype=bfloat16", None),
    "bf16, masters to the nearest": ("model.dtype=bfloat16", "experiments.dithering:to_the_nearest"),
}
"""Name -> its setting, and what its process calls first."""
COLUMNS = {"right (strict)": "strict_accuracy", "in the form": "format_rate", "stopped": "stop_rate"}


def to_the_nearest() -> None:
    """From now on this process's optimisers round masters to the nearest number that the weights' dtype has."""
    import torch

    from groupwise.training.optimizer import MasterAdamW

    @torch.no_grad()
    def publish(optimizer: MasterAdamW) -> None:
        for parameter, master in zip(optimizer.parameters, optimizer.masters, strict=True):
            parameter.copy_(master)

    MasterAdamW.publish = publish  # type: ignore[assignment,method-assign]


def _jobs(seeds: Sequence[int], work: Path, budget: Budget, settings: Sequence[str]) -> dict[str, dict[int, Job]]:
    def job(place: int, setting: str, before: str | None, seed: int) -> Job:
        made = warm_start_job(seed, budget, work, ("warm_start.steps=12", *settings, setting), before=before)
        name = f"{place}-{seed}"
        return replace(made, name=name, result=str(work / f"{name}.json"), keep_model=None)

    return {name: {seed: job(place, *how, seed) for seed in seeds} for place, (name, how) in enumerate(WEIGHTS.items())}


def measure(
    seeds: Sequence[int] = SEEDS, work: Path = ROOT / "runs" / "dithering", problems: int = 250, settings: Sequence[str] = ()
) -> dict[str, Any]:
    """The last evaluation of each; finished runs are kept in ``work`` and not repeated. Raises SystemExit where one fails."""
    work.mkdir(parents=True, exist_ok=True)
    jobs = _jobs(seeds, work, Budget(problems=problems), settings)
    if failed := carry_out_all([job for each in jobs.values() for job in each.values()], jobs=1):
        raise SystemExit(f"{', '.join(failed)} failed: see the logs in {work}")
    judged = {
        name: {
            str(seed): json.loads(Path(job.result).read_text(encoding="utf-8"))["evaluations"][-1] for seed, job in each.items()
        }
        for name, each in jobs.items()
    }
    return {"problems": problems, "judged": judged}


def draw(numbers: Mapping[str, Any], path: Path) -> None:
    from experiments.style import COLOURS, figure

    with figure(path, ["right after 12 supervised steps (strict)"]) as (panel,):
        for place, (name, runs) in enumerate(numbers["judged"].items()):
            shares = [100 * run["strict_accuracy"] for run in runs.values()]
            panel.bar([place], [sum(shares) / len(shares)], color=COLOURS[place], width=0.6, label=name)
            panel.plot([place] * len(shares), shares, "o", color="#888888", markersize=4)
        panel.set_xticks([])
        panel.set_ylabel("%")
        panel.set_ylim(0, 100)
        panel.legend()


def report(numbers: Mapping[str, Any]) -> str:
    rows = []
    for name, runs in numbers["judged"].items():
        cells = []
        for key in COLUMNS.values():
            shares = [run[key] for run in runs.values()]
            each = ", ".join(f"{x:.0%}" for x in shares)
            cells.append(f"{sum(shares) / len(shares):.1%} ({each})")
        rows.append([name, *cells])
    seeds = ", ".join(next(iter(numbers["judged"].values())))
    return (
        f"![Right answers after 12 supervised steps, by how weights are rounded](../docs/figures/dithering.svg)\n\n"
        f"{markdown_table(['weights', *COLUMNS], rows)}\n\n"
        f"SmolLM2-135M-Instruct, {numbers['problems']} held-out problems, one answer each at temperature 1; means, and in brackets each "
        f"seed ({seeds}). {describe(numbers)}"
    )


EXPERIMENT = Experiment("dithering", measure, draw, report)

if __name__ == "__main__":
    main(EXPERIMENT)
