"""Command line, figure and table of a comparison of runs: what ``learning_curves`` and ``faults`` share."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common import FIGURES, ROOT, Experiment, describe, environment, markdown_table, publish, read_numbers
from experiments.runs import Budget, Variant, run_all
from groupwise.metrics import wilson_interval

__all__ = ["Comparison", "compare", "held_out", "pooled"]

SMOOTHING = 3
"""Steps over which training accuracy is averaged in figures: a step has only a few dozen completions."""


@dataclass(frozen=True)
class Comparison:
    """Runs that differ in one thing each, and the page that shows them."""

    name: str
    description: str
    variants: Callable[[Sequence[str]], list[Variant]]
    """The variants of the names asked for; all of them for no names."""
    option: str
    """The word for a variant on the command line, such as ``presets``."""
    page: Path

    @property
    def experiment(self) -> Experiment:
        return Experiment(self.name, dict, draw, partial(report, name=self.name), self.page)


def compare(comparison: Comparison, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Carry out ``python -m experiments.NAME``: do the runs that are missing, then write numbers, figure and table."""
    options, budget = _parse(comparison, arguments)
    if options.redraw:
        numbers = read_numbers(comparison.name, options.out)
    else:
        numbers = run_all(
            comparison.variants(options.variants), options.seeds, budget, options.work, jobs=options.jobs, settings=options.set
        )
        numbers |= {"settings": options.set, "environment": environment()}
    if not all(numbers["runs"].values()):
        raise SystemExit(f"no finished run of {', '.join(v for v, runs in numbers['runs'].items() if not runs)}")
    publish(comparison.experiment, numbers, options.out)
    return numbers


def _parse(comparison: Comparison, arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Budget]:
    plain = Budget()
    options = argparse.ArgumentParser(
        prog=f"python -m experiments.{comparison.name}", description=comparison.description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )  # fmt: skip
    options.add_argument(
        f"--{comparison.option}", nargs="*", default=[], dest="variants", metavar="NAME", help="all if none is named"
    )
    options.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    options.add_argument("--steps", type=int, default=plain.steps)
    options.add_argument("--prompts", type=int, default=plain.prompts_per_step, help="problems per step")
    options.add_argument("--completions", type=int, default=plain.completions_per_prompt, help="completions per problem")
    options.add_argument("--evaluate-every", type=int, default=plain.evaluate_every, help="steps")
    options.add_argument("--problems", type=int, default=plain.problems, help="held-out problems of an evaluation")
    options.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="further settings of all runs")
    options.add_argument("--jobs", type=int, default=2, help="runs at a time; the cores are divided among them")
    options.add_argument("--work", type=Path, default=ROOT / "runs" / comparison.name, help="finished runs are kept here")
    options.add_argument("--out", type=Path, default=FIGURES, help="folder of the JSON file and the figure")
    options.add_argument("--redraw", action="store_true", help="make figure and table from the JSON file that is there already")
    chosen = options.parse_args(arguments)
    budget = Budget(chosen.steps, chosen.prompts, chosen.completions, chosen.evaluate_every, chosen.problems)
    return chosen, budget


def held_out(numbers: Mapping[str, Any], variant: str) -> dict[int, list[float]]:
    """Strict accuracy on held-out problems by step, one number per seed; step 0 is the shared warm-started model."""
    found: dict[int, list[float]] = {}
    for seed, run in numbers["runs"][variant].items():
        start = {**numbers["starts"][seed]["evaluations"][-1], "step": 0}
        for row in (start, *run["evaluations"]):
            found.setdefault(row["step"], []).append(row["strict_accuracy"])
    return found


def pooled(numbers: Mapping[str, Any], variant: str) -> tuple[float, tuple[float, float], int]:
    """Strict accuracy after the last step over all seeds together, its 95% interval (Wilson), and the number of answers."""
    rows = [run["evaluations"][-1] for run in numbers["runs"][variant].values()]
    right, n = sum(round(row["strict_accuracy"] * row["n"]) for row in rows), sum(row["n"] for row in rows)
    return right / n, wilson_interval(right, n), n


def training_accuracy(numbers: Mapping[str, Any], variant: str) -> list[list[float]]:
    """Strict accuracy of each step's own completions, a list per seed."""
    return [run["curves"]["accuracy/strict"] for run in numbers["runs"][variant].values()]


def _smooth(curve: Sequence[float]) -> list[float]:
    return [statistics.fmean(curve[max(0, i - SMOOTHING + 1) : i + 1]) for i in range(len(curve))]


def draw(numbers: Mapping[str, Any], path: Path) -> None:
    """A panel per variant: training accuracy as mean and range over the seeds, held-out accuracy as points; grey: all variants."""
    from experiments.style import COLOURS, INK, band, figure

    names = list(numbers["runs"])
    rows = -(-len(names) // 3)
    steps = range(1, numbers["budget"]["steps"] + 1)
    everyone = [_smooth(curve) for name in names for curve in training_accuracy(numbers, name)]
    overall = [statistics.fmean(column) for column in zip(*everyone, strict=True)]
    with figure(path, names, rows=rows, height=2.5) as axes:
        for name, axis, colour in zip(names, axes, COLOURS * rows, strict=False):
            axis.plot(steps, overall, color=INK, linewidth=1, linestyle="--")
            band(axis, steps, [_smooth(curve) for curve in training_accuracy(numbers, name)], colour)
            points = held_out(numbers, name)
            mean = [statistics.fmean(accuracies) for accuracies in points.values()]
            spread = [[m - min(a) for m, a in zip(mean, points.values(), strict=True)],
                      [max(a) - m for m, a in zip(mean, points.values(), strict=True)]]  # fmt: skip
            axis.errorbar(list(points), mean, yerr=spread, fmt="o", color=colour, markersize=5, linewidth=1.2)
            axis.set_ylim(0, max(0.75, *overall) + 0.1)
        for axis in axes[-3:]:
            axis.set_xlabel("step")
        for axis in axes[::3]:
            axis.set_ylabel("right (strict)")


def report(numbers: Mapping[str, Any], name: str) -> str:
    """Figure, table, and what was measured on what."""
    budget, seeds = numbers["budget"], numbers["seeds"]
    checks = sorted(next(iter([held_out(numbers, name) for name in numbers["runs"]])))
    header = ["", *(f"held out, step {step}" for step in checks), f"all seeds, step {checks[-1]}", "in training, last 5 steps",
              "gradient norm", "clipped", "s per step"]  # fmt: skip
    rows = [[f"`{variant}`", *_row(numbers, variant, checks)] for variant in numbers["runs"]]
    total = sum(run["seconds"] for runs in numbers["runs"].values() for run in runs.values())
    return "\n\n".join(
        [
            f"![A panel per run: accuracy by step, in training and held out](figures/{name}.svg)",
            "Lines: share of a step's own completions that are right, averaged over three steps; mean and range over the seeds. "
            "Dashed: the mean of all panels. Points: held-out problems, mean and range.",
            markdown_table(header, rows),
            f"Held out: share of {budget['problems']} problems right in the form asked for, sampled at temperature 1; mean over seeds "
            f"{', '.join(map(str, seeds))}, with the smallest and the largest. All seeds: their answers together, with a 95% interval "
            "(Wilson's). Gradient norm: the median before clipping; clipped: the share of steps in which it was above "
            "`optimizer.max_grad_norm`.",
            f"Each run: {budget['steps']} steps of {budget['prompts_per_step']} problems x {budget['completions_per_prompt']} "
            f"completions, {budget['completions']} completions in all. All runs together took {total / 60:.0f} minutes of process "
            f"time. {describe(numbers)}",
        ]
    )


def _row(numbers: Mapping[str, Any], name: str, checks: Sequence[int]) -> list[str]:
    points = held_out(numbers, name)
    accuracy, (low, high), _ = pooled(numbers, name)
    last = statistics.fmean(x for curve in training_accuracy(numbers, name) for x in curve[-5:])
    curves = [run["curves"] for run in numbers["runs"][name].values()]
    norms = [x for found in curves for x in found.get("optimizer/grad_norm", []) if x is not None]
    limit = max_grad_norm(numbers, name)
    clipped = "-" if limit is None or not norms else f"{statistics.fmean(x > limit for x in norms):.0%}"
    seconds = statistics.fmean(x for found in curves for x in found["time/step_s"])
    return [
        *(f"{statistics.fmean(points[step]):.0%} ({min(points[step]):.0%} to {max(points[step]):.0%})" for step in checks),
        f"{accuracy:.1%} [{low:.1%}, {high:.1%}]",
        f"{last:.0%}",
        f"{statistics.median(norms):.2g}" if norms else "-",
        clipped,
        f"{seconds:.1f}",
    ]


def max_grad_norm(numbers: Mapping[str, Any], name: str) -> float | None:
    """The clipping norm that a variant's runs had."""
    from groupwise import load_config

    return load_config("quickstart", [*numbers["settings"], *numbers["variants"][name]]).optimizer.max_grad_norm
