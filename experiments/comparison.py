"""Command line, figure and table of a comparison of runs: what ``learning_curves``, ``faults`` and ``puzzle`` share."""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from experiments.common import FIGURES, ROOT, Experiment, describe, earlier, markdown_table, publish, read_numbers
from experiments.runs import Budget, Variant, config_hash, run_all
from groupwise.metrics import wilson_interval

__all__ = [
    "T_QUANTILES",
    "UP_TO_15",
    "Comparison",
    "beside",
    "between_seeds",
    "compare",
    "difference",
    "held_out",
    "newcombe_interval",
    "pooled",
    "welch_interval",
]

UP_TO_15 = ("data.arithmetic.largest_number=15", "data.arithmetic.problems=20000")
"""The problems of comparisons on the quickstart's task: those of the recipe are soon all solved, by good settings and bad ones."""
T_QUANTILES = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093,
    2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5% of Student's t with 1, 2, ... degrees of freedom."""
SMOOTHING = 3
"""Steps over which training accuracy is averaged in figures: a step has only a few dozen completions."""


@dataclass(frozen=True)
class Comparison:
    """Runs that differ in one thing each."""

    name: str
    description: str
    variants: Mapping[str, Variant]
    option: str
    """The word for a variant on the command line, such as ``presets``."""
    timed: bool = True
    """Whether seconds per step belong into the table: only where the machine does nothing else."""
    shown: Mapping[str, str] = field(default_factory=dict)
    """Further columns: heading -> curve, whose mean over steps and seeds is shown."""
    recipe: str = "quickstart"
    settings: tuple[str, ...] = ()
    """Of all runs; ``--set`` wins over them, and a variant's own over both."""
    budget: Budget = field(default_factory=Budget)
    """What the command line's numbers are by default."""
    equal: Literal["completions", "steps"] = "completions"
    """What all runs have as many of. A step is a sampled batch, whether or not an update follows each."""
    work: str = "comparisons"
    """Folder below ``runs`` for finished runs. Comparisons with warm starts of their own need one of their own."""
    jobs: int = 2
    """Runs at a time, by default."""
    before: str | None = None
    """``module:function`` that warm starts call first (``runs.Job.before``)."""
    further: Callable[[Mapping[str, Any]], str] | None = None
    """More Markdown from the numbers, under the table."""
    usual: tuple[str, ...] = ()
    """The variants that run where none is named, if not all of them."""

    def chosen(self, names: Sequence[str]) -> list[Variant]:
        """The variants of these names, or those that run where none is named. Raises SystemExit for a name that there is not."""
        if unknown := sorted({*names} - {*self.variants}):
            raise SystemExit(f"there is no {self.option[:-1]} {unknown[0]!r}: choose among {', '.join(self.variants)}")
        return [self.variants[name] for name in names or self.usual or self.variants]

    @property
    def experiment(self) -> Experiment:
        return Experiment(
            self.name, dict, draw, partial(report, name=self.name, timed=self.timed, shown=self.shown, further=self.further)
        )


def compare(comparison: Comparison, arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Carry out ``python -m experiments.NAME``: do the runs that are missing, then write numbers, figure and table."""
    options, budget = _parse(comparison, arguments)
    if options.redraw:
        numbers = read_numbers(comparison.name, options.out)
    else:
        jobs = 0 if options.finished else options.jobs
        chosen = comparison.chosen(options.variants)
        settings = [*comparison.settings, *options.set]
        same = {
            "settings": [_without_place(setting) for setting in settings],
            "recipe": comparison.recipe,
            "equal": comparison.equal,
            "before": comparison.before,
            "config": config_hash(comparison.recipe),
        }
        kept = read_numbers(comparison.name, options.out) if options.beside else None
        if kept is not None:
            _check_comparable(kept, {**same, "budget": budget.to_json()})  # before hours of runs
        numbers = run_all(
            chosen, options.seeds, budget, options.work, jobs=jobs, settings=settings, recipe=comparison.recipe,
            before=comparison.before,
        ) | same  # fmt: skip
        if kept is not None:
            numbers = beside(kept, numbers)
    publish(comparison.experiment, numbers, options.out)
    return numbers


def _without_place(setting: str) -> str:
    """The setting without a place of this machine, which nobody else has: ``model.name=FOLDER``."""
    name, _, value = setting.partition("=")
    return f"{name}=FOLDER" if Path(value).is_absolute() else setting


def beside(kept: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """``found`` with the runs that ``kept`` has of the same variants and of other seeds.

    Raises SystemExit where budget, settings, recipe or what it says, what is called before warm starts, or the warm start of a
    seed differ: such runs are not to be compared.
    """
    _check_comparable(kept, found)
    for key in kept["starts"].keys() & found["starts"].keys():
        if kept["starts"][key]["evaluations"] != found["starts"][key]["evaluations"]:
            raise SystemExit(
                f"--beside: the runs of seed {key} that are there began with another warm start than these: run all of that seed again"
            )
    variants = {**kept["variants"], **found["variants"]}
    made = {name: _made(found, name, _made(kept, name)) for name in variants}
    seeds = sorted({*kept["seeds"], *found["seeds"]})
    runs = {}
    for name, settings in variants.items():
        same = kept["variants"].get(name) == settings and _made(kept, name, made[name]) == made[name]
        old = kept["runs"].get(name, {}) if same else {}
        each = {**old, **found["runs"].get(name, {})}
        if each:
            runs[name] = {str(seed): each[str(seed)] for seed in seeds if str(seed) in each}
    asked = {*kept["missing"], *found["missing"], *(f"{name}-{seed}" for name, of in kept["runs"].items() for seed in of)}
    return {
        **found,
        "starts": {**kept["starts"], **found["starts"]},
        "start_of": {name: of for name, of in kept["start_of"].items() if name not in found["variants"]} | found["start_of"],
        "earlier": earlier(kept, found),
        "seeds": seeds,
        "runs": runs,
        "variants": variants,
        "made": {name: how for name, how in made.items() if how is not None},
        "missing": [
            pair
            for seed in seeds
            for name in variants
            if str(seed) not in runs.get(name, {}) and (pair := f"{name}-{seed}") in asked
        ],
    }


def _made(numbers: Mapping[str, Any], name: str, unsaid: Any = None) -> Any:
    """``Variant.made`` of the variant; ``unsaid`` where ``numbers`` do not say it, as those of earlier versions."""
    return numbers.get("made", {}).get(name, unsaid)


def _check_comparable(kept: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    later = [key for key in ("before",) if key in kept]  # files of earlier versions do not say it
    for key in ("budget", "settings", "recipe", "equal", *later):
        if kept.get(key) != found.get(key):
            raise SystemExit(f"--beside: the runs that are there had {key} {kept.get(key)}, these have {found.get(key)}")
    if kept.get("config") != found.get("config"):
        why = "had another recipe of this name" if "config" in kept else "do not say what their recipe was"
        raise SystemExit(f"--beside: the runs that are there {why}: run all of them again")


def _parse(comparison: Comparison, arguments: Sequence[str] | None) -> tuple[argparse.Namespace, Budget]:
    plain = comparison.budget
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
    options.add_argument("--jobs", type=int, default=comparison.jobs, help="runs at a time; the cores are divided among them")
    options.add_argument("--work", type=Path, default=ROOT / "runs" / comparison.work, help="finished runs are kept here")
    options.add_argument("--out", type=Path, default=FIGURES, help="folder of the JSON file and the figure")
    options.add_argument("--beside", action="store_true", help="keep the runs of other seeds and variants that the JSON file has")
    options.add_argument("--finished", action="store_true", help="start no run: show those that are finished")
    options.add_argument("--redraw", action="store_true", help="make figure and table from the JSON file that is there already")
    chosen = options.parse_args(arguments)
    budget = Budget(chosen.steps, chosen.prompts, chosen.completions, chosen.evaluate_every, chosen.problems)
    return chosen, budget


def amount(numbers: Mapping[str, Any]) -> int:
    """How many completions, or steps, each run has in all."""
    return int(numbers["budget"][numbers.get("equal", "completions")])


def started(numbers: Mapping[str, Any], variant: str, seed: str) -> dict[str, Any]:
    """The evaluation of what the variant began with."""
    start = numbers["starts"][seed + numbers.get("start_of", {}).get(variant, "")]
    return {**start["evaluations"][-1], "step": 0}


def held_out(numbers: Mapping[str, Any], variant: str) -> dict[int, list[float]]:
    """Strict accuracy on held-out problems by completions learnt from, or steps, one number per seed; 0 is the shared start."""
    found: dict[int, list[float]] = {}
    for seed, run in numbers["runs"][variant].items():
        per_update = amount(numbers) // len(run["curves"]["accuracy/strict"])
        for row in (started(numbers, variant, seed), *(row for row in run["evaluations"] if row["step"])):
            found.setdefault(row["step"] * per_update, []).append(row["strict_accuracy"])
    return found


def pooled(numbers: Mapping[str, Any], variant: str) -> tuple[float, tuple[float, float], int]:
    """Strict accuracy after the last step over all seeds together, its 95% interval (Wilson), and the number of answers.

    The interval takes all answers as independent, though those of a run share its weights.
    """
    right, n = _counts(numbers, variant, list(numbers["runs"][variant]))
    return right / n, wilson_interval(right, n), n


def _counts(numbers: Mapping[str, Any], variant: str, seeds: Sequence[str]) -> tuple[int, int]:
    """Right answers after the last step, and all, of these seeds."""
    rows = [numbers["runs"][variant][seed]["evaluations"][-1] for seed in seeds]
    return sum(round(row["strict_accuracy"] * row["n"]) for row in rows), sum(row["n"] for row in rows)


def newcombe_interval(right: int, n: int, others_right: int, others_n: int) -> tuple[float, float]:
    """95% interval of right / n - others_right / others_n, both from samples of their own.

    R. G. Newcombe (1998), "Interval estimation for the difference between independent proportions: comparison of eleven methods",
    method 10: from the two Wilson intervals.
    """
    p, q = right / n, others_right / others_n
    (low_p, high_p), (low_q, high_q) = wilson_interval(right, n), wilson_interval(others_right, others_n)
    return p - q - math.hypot(p - low_p, high_q - q), p - q + math.hypot(high_p - p, q - low_q)


def difference(numbers: Mapping[str, Any], one: str, other: str) -> tuple[float, tuple[float, float], list[float]] | None:
    """How much more of the held-out answers ``one`` has right than ``other`` in the end, with its interval, and seed by seed.

    Of the seeds that both have; None where there is none. The interval takes all answers as independent: that both judge the same
    problems makes it wider than need be, that runs of one seed share their weights makes it narrower. What chance does from run to
    run is to be seen seed by seed.
    """
    mine, theirs = numbers["runs"].get(one, {}), numbers["runs"].get(other, {})
    seeds = [seed for seed in mine if seed in theirs]
    if not seeds:
        return None
    counts = (*_counts(numbers, one, seeds), *_counts(numbers, other, seeds))
    last = [(mine[s]["evaluations"][-1], theirs[s]["evaluations"][-1]) for s in seeds]
    by_seed = [a["strict_accuracy"] - b["strict_accuracy"] for a, b in last]
    return counts[0] / counts[1] - counts[2] / counts[3], newcombe_interval(*counts), by_seed


def between_seeds(numbers: Mapping[str, Any]) -> tuple[float, int] | None:
    """Standard deviation of the last held-out accuracy between runs that differ in their seed alone, pooled over the variants, and its
    degrees of freedom. None where no variant has two seeds. It holds what chance does to a run, which ``difference``'s interval leaves
    out, and the choice of answers."""
    each = [rows for name in numbers["runs"] if len(rows := last_by_seed(numbers, name)) > 1]
    degrees = sum(len(rows) - 1 for rows in each)
    squares = math.fsum((len(rows) - 1) * statistics.variance(rows) for rows in each)
    return (math.sqrt(squares / degrees), degrees) if degrees else None


def welch_interval(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float] | None:
    """95% interval of the difference of two means by Welch's t: each side's deviation is its own. None with one number on a side, or
    where no number differs from its side's others.

    B. L. Welch (1947), "The generalization of 'Student's' problem when several different population variances are involved". Between two
    whole degrees of freedom the quantile lies on the straight line over their reciprocals, which makes the interval up to 2% too wide with
    two or more of them and up to 18% with fewer.
    """
    if min(len(ours), len(theirs)) < 2:
        return None
    a, b = statistics.variance(ours) / len(ours), statistics.variance(theirs) / len(theirs)
    if a + b == 0:
        return None
    degrees = min((a + b) ** 2 / (a**2 / (len(ours) - 1) + b**2 / (len(theirs) - 1)), len(T_QUANTILES))
    below = min(int(degrees), len(T_QUANTILES) - 1)
    share = (1 / below - 1 / degrees) / (1 / below - 1 / (below + 1))
    half = math.sqrt(a + b) * (T_QUANTILES[below - 1] * (1 - share) + T_QUANTILES[below] * share)
    mean = statistics.fmean(ours) - statistics.fmean(theirs)
    return mean - half, mean + half


def last_by_seed(numbers: Mapping[str, Any], variant: str) -> list[float]:
    return [run["evaluations"][-1]["strict_accuracy"] for run in numbers["runs"][variant].values()]


def training_accuracy(numbers: Mapping[str, Any], variant: str) -> list[list[float]]:
    """Strict accuracy of each step's own completions, a list per seed."""
    return [run["curves"]["accuracy/strict"] for run in numbers["runs"][variant].values()]


def _smooth(curve: Sequence[float]) -> list[float]:
    return [statistics.fmean(curve[max(0, i - SMOOTHING + 1) : i + 1]) for i in range(len(curve))]


def draw(numbers: Mapping[str, Any], path: Path) -> None:
    """A panel per variant: training accuracy as mean and range over the seeds, held-out accuracy as points; grey: the first one."""
    from experiments.style import COLOURS, INK, band, figure

    names, columns = list(numbers["runs"]), 3
    rows = -(-len(names) // columns)
    curves = {name: [_smooth(curve) for curve in training_accuracy(numbers, name)] for name in names}
    with figure(path, names, rows=rows, height=2.5) as axes:
        for index, (name, axis, colour) in enumerate(zip(names, axes, COLOURS * rows, strict=False)):
            first = [statistics.fmean(column) for column in zip(*curves[names[0]], strict=True)]
            if index:
                axis.plot(_along(numbers, len(first)), first, color=INK, linewidth=1, linestyle="--")
            band(axis, _along(numbers, len(curves[name][0])), curves[name], colour)
            points = held_out(numbers, name)
            mean = [statistics.fmean(accuracies) for accuracies in points.values()]
            spread = [[m - min(a) for m, a in zip(mean, points.values(), strict=True)],
                      [max(a) - m for m, a in zip(mean, points.values(), strict=True)]]  # fmt: skip
            axis.errorbar(list(points), mean, yerr=spread, fmt="o", color=colour, markersize=5, linewidth=1.2)
            axis.set_ylim(0, 0.9)
            if index >= len(names) - columns:
                axis.set_xlabel(numbers.get("equal", "completions"))
            if index % columns == 0:
                axis.set_ylabel("right (strict)")


def _along(numbers: Mapping[str, Any], updates: int) -> list[int]:
    """Completions learnt from, or steps, after each of ``updates``."""
    return [amount(numbers) * (i + 1) // updates for i in range(updates)]


def report(
    numbers: Mapping[str, Any], name: str, timed: bool = True, shown: Mapping[str, str] | None = None,
    further: Callable[[Mapping[str, Any]], str] | None = None,
) -> str:  # fmt: skip
    """Figure, table, and what was measured on what."""
    shown = shown or {}
    budget, seeds = numbers["budget"], numbers["seeds"]
    checks = sorted({at for variant in numbers["runs"] for at in held_out(numbers, variant)})
    what = numbers.get("equal", "completions")
    header = ["", *(f"held out, {at} {what}" for at in checks), "the last, all seeds", "in training, last quarter",
              "gradient norm", "clipped", *(["s per step"] if timed else []), *shown]  # fmt: skip
    rows = [
        [f"`{variant}`", *_row(numbers, variant, checks, timed), *_means(numbers, variant, shown.values())]
        for variant in numbers["runs"]
    ]
    total = sum(run["seconds"] for runs in numbers["runs"].values() for run in runs.values())
    missing = f" Not run: {', '.join(f'`{name}`' for name in numbers['missing'])}." if numbers["missing"] else ""
    took = f" All runs together took {total / 60:.0f} minutes of process time." if timed else ""
    all_have = f", {amount(numbers)} {what} in all" if what == "completions" else ""
    return "\n\n".join(
        [
            f"![A panel per run: accuracy by {what}, in training and held out](../docs/figures/{name}.svg)",
            "Lines: right completions of a step, averaged over three steps; mean and range over the seeds. "
            f"Dashed: `{next(iter(numbers['runs']))}`. Points: held-out problems.",
            markdown_table(header, rows),
            f"Held out: {budget['problems']} problems, strict, at temperature 1{_over(seeds)}. All seeds: with a 95% interval "
            "(Wilson's) that takes all answers as independent; what a seed does comes on top. "
            "Gradient norm: the median before clipping; clipped: the share of steps above `optimizer.max_grad_norm`.",
            f"Each run: {budget['steps']} steps of {budget['prompts_per_step']} problems x {budget['completions_per_prompt']} "
            f"completions where its name says nothing else{all_have}.{took}{missing} {describe(numbers)}",
            *([further(numbers)] if further else []),
        ]
    )


def _over(seeds: Sequence[int]) -> str:
    if len(seeds) == 1:
        return f"; seed {seeds[0]} alone"
    return f"; mean over seeds {', '.join(map(str, seeds))}, with the smallest and the largest"


def _row(numbers: Mapping[str, Any], name: str, checks: Sequence[int], timed: bool) -> list[str]:
    points = held_out(numbers, name)
    accuracy, (low, high), _ = pooled(numbers, name)
    quarters = [curve[-max(1, len(curve) // 4) :] for curve in training_accuracy(numbers, name)]
    curves = [run["curves"] for run in numbers["runs"][name].values()]
    norms = [x for found in curves for x in found.get("optimizer/grad_norm", []) if x is not None]
    limit = max_grad_norm(numbers, name)
    seconds = statistics.fmean(x for found in curves for x in found["time/step_s"])
    return [
        *(_spread(points[at]) if at in points else "-" for at in checks),
        f"{accuracy:.1%} [{low:.1%}, {high:.1%}]",
        f"{statistics.fmean(x for quarter in quarters for x in quarter):.0%}",
        f"{statistics.median(norms):.2g}" if norms else "-",
        "-" if limit is None or not norms else f"{statistics.fmean(x > limit for x in norms):.0%}",
        *([f"{seconds:.1f}"] if timed else []),
    ]


def _means(numbers: Mapping[str, Any], name: str, wanted: Iterable[str]) -> list[str]:
    runs = [run["curves"] for run in numbers["runs"][name].values()]
    found = [[x for curves in runs for x in curves.get(curve, []) if x is not None] for curve in wanted]
    return [f"{statistics.fmean(values):.2g}" if values else "-" for values in found]


def _spread(accuracies: Sequence[float]) -> str:
    mean = f"{statistics.fmean(accuracies):.0%}"
    return mean if len(accuracies) == 1 else f"{mean} ({min(accuracies):.0%} to {max(accuracies):.0%})"


def max_grad_norm(numbers: Mapping[str, Any], name: str) -> float | None:
    """The clipping norm that a variant's runs had."""
    from groupwise import load_config

    words = [*numbers["settings"], *numbers["variants"][name]]  # of earlier versions too, whose other settings had other names
    return load_config(
        numbers.get("recipe", "quickstart"), [word for word in words if word.startswith("optimizer.")]
    ).optimizer.max_grad_norm
