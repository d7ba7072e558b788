"""What a recipe's runs came to: held-out accuracy by step, before and after on the whole test split, and what it cost.

    groupwise train gsm8k-1.5b-cpu training.seed=0 --run-folder runs/seed-0      # and further seeds
    groupwise eval MODEL runs/seed-0 runs/seed-1 --data gsm8k:test evaluation.problems=null 'evaluation.modes=[greedy]' \\
        --out judged.jsonl --resume
    python -m experiments.headline runs/seed-0 runs/seed-1 --judged judged.jsonl
    python -m experiments.headline runs/seed-2 --judged judged-2.jsonl --beside  # where the folders of the others are gone
    python -m experiments.headline runs/math --name headline-math   # another table and figure, of other data
    python -m experiments.headline --redraw

It trains nothing: it reads the runs' folders and the records of ``groupwise eval``, whose first model is the one before training. Where the
records are of the runs alone, ``--beside`` adds the model before training once it is judged.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from experiments.common import (
    FIGURES,
    PAGE,
    ROOT,
    Experiment,
    environment,
    markdown_table,
    publish,
    read_block,
    read_numbers,
)
from experiments.comparison import newcombe_interval
from groupwise.evaluation import Evaluation, paired_comparison, rescore
from groupwise.evaluation.figures import figures
from groupwise.tracking.reading import EvaluationRecords, RunRecord, read_run

__all__ = ["EXPERIMENT", "beside", "draw", "measure", "report"]

RESULTS = ROOT / "docs" / "results.md"
"""The page of the headline itself; what else was tried stands with the experiments."""
WATTS, WATTS_OF_A_CARD = 30, 700
"""Assumed for two busy cores and their share of the machine: a laptop's processor at work takes 15 to 45 W. Of a GPU the most that an H100
or H200 may take, all the time: it takes less."""
VERDICTS = ("strict", "lenient")
SIGNS = {True: "1", False: "0", None: "-"}
"""A problem's verdict in a file of numbers; ``None`` where math-verify gave none."""
MACHINE = ("processor", "cores", "torch", "transformers")
"""What is said of the machine of a run."""


def measure(runs: Sequence[Path], judged: Path | None = None) -> dict[str, Any]:
    """The numbers of finished or unfinished runs, and of the whole test split where ``judged`` holds it."""
    rows, untrained = ([], None) if judged is None else whole_split(judged, {run.resolve().name for run in runs})
    return {"runs": [one_run(read_run(run), untrained) for run in runs], "judged": rows}


def beside(kept: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """``found`` with what ``kept`` has of other seeds and, judged on the whole split, of their models.

    What ``kept`` judged of a seed that ran again is dropped: it was another model. Raises SystemExit where the runs differ in more than
    their seed, or where the whole split was judged of another model before, or on other problems.
    """
    for key in ("of", "batch"):
        _check_same(f"training.{'steps' if key == 'of' else key}", (run[key] for run in (*kept["runs"], *found["runs"])))
    _check_same("model before training", (row["model"] for numbers in (kept, found) for row in _before(numbers["judged"])))
    judged_rows = [*kept["judged"], *found["judged"]]
    _check_same("number of problems judged", (len(row["right"]["strict"]) if "right" in row else row["n"] for row in judged_rows))
    _check_same("data judged", map(_data, judged_rows))
    seeds, models = {run["seed"] for run in found["runs"]}, {row["model"] for row in found["judged"]}
    earlier = {run["seed"]: run for run in kept["runs"]}
    again = {run["seed"] for run in found["runs"] if not _is_same(run, earlier.get(run["seed"], run))}
    there = {key: value for key, value in kept.get("environment", {}).items() if key in MACHINE}  # of runs that do not say theirs
    kept_runs = [{**run, "machine": run.get("machine") or there} for run in kept["runs"] if run["seed"] not in seeds]
    found_runs = [run if run["seed"] in again else _as_judged(run, earlier.get(run["seed"], run)) for run in found["runs"]]
    runs = [*found_runs, *kept_runs]
    first = (_before(found["judged"]) or _before(kept["judged"]))[:1]
    others = [row for row in _trained(kept["judged"]) if row["model"] not in models and _number(row["model"]) not in again]
    judged = [*first, *sorted([*others, *_trained(found["judged"])], key=lambda row: _number(row["model"]))]
    return {
        **found,
        "runs": sorted(runs, key=lambda run: int(run["seed"])),
        "judged": _compared(judged),
    }


_OF_JUDGED = ("evaluations", "change")
"""What begins at step 0 where ``judged`` has the model before training."""


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two measures are of one run, whatever was judged besides."""
    return all(one[key] == other[key] for key in one.keys() & other.keys() - {"machine", *_OF_JUDGED})


def _as_judged(run: dict[str, Any], earlier: Mapping[str, Any]) -> dict[str, Any]:
    """``run`` with what was judged of it earlier, where that begins sooner."""
    return run | {key: earlier[key] for key in _OF_JUDGED} if len(earlier["evaluations"]) > len(run["evaluations"]) else run


def _trained(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row.get("trained", "against_first" in row)]  # files of earlier versions have no "trained"


def _before(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The model before training, or none."""
    return [row for row in rows if not row.get("trained", "against_first" in row)]


def _data(row: Mapping[str, Any]) -> str:
    """The data's name, without where its copy lay."""
    return str(row["data"]).partition(" (")[0]


def _check_same(what: str, values: Iterable[object]) -> None:
    if len(different := list(dict.fromkeys(map(str, values)))) > 1:
        raise SystemExit(f"--beside: {what} is {different[-1]} here and was {different[0]}: such runs do not stand in one table")


def _number(model: str) -> int:
    """The seed in the name of a run's folder, such as ``seed-10``; -1 where there is none."""
    return int(found[-1]) if (found := re.findall(r"\d+", str(model))) else -1


def one_run(run: RunRecord, untrained: Evaluation | None = None) -> dict[str, Any]:
    """The numbers of a run. Where it was not judged before its first step (``evaluation.at_start``), ``untrained`` stands for that: the
    model before training, if it was asked the same prompts, and more, with the same limit."""
    asked = run.settings
    rollout = asked["rollout"]
    # In the order of stages: after a warm start the policy that GRPO begins with takes the place of the untrained model.
    greedy = [*{_step(run, one): one.records for one in run.evaluations if one.mode == "greedy"}.items()]
    if not greedy:
        raise SystemExit(f"{run.name} has no greedy evaluation: give 'evaluation.modes=[greedy]'")
    limit = asked["evaluation"]["max_completion_tokens"] or rollout["max_completion_tokens"]
    if greedy[0][0] > 0 and untrained is not None and untrained.conditions["max_tokens"] == limit:
        untrained_by_prompt = {(record["problem"], record["prompt"]): record for record in untrained.records}
        prompts = [(record["problem"], record["prompt"]) for record in greedy[0][1]]
        if untrained_by_prompt.keys() >= set(prompts):
            greedy.insert(0, (0, tuple(untrained_by_prompt[prompt] for prompt in prompts)))
    counted = [{"step": step, **_figures(records)} for step, records in greedy]
    last = greedy[-1][1]
    both = {record["problem"] for record in last}  # a run resumed with a smaller evaluation.problems judges fewer in the end
    first = [record for record in greedy[0][1] if record["problem"] in both]
    code = run.environment.get("code") or {}
    group = rollout["prompts_per_step"] * rollout["completions_per_prompt"]
    tokens = sum(value * group for _, value in run.series("completions/tokens_mean"))
    return {
        "seed": asked["training"]["seed"],
        "steps": run.last_step,
        "of": asked["training"]["steps"],
        "batch": [rollout["prompts_per_step"], rollout["completions_per_prompt"], rollout["max_completion_tokens"]],
        "revision": str(code.get("revision", "unknown"))[:7],
        "date": str(run.environment.get("started", "unknown"))[:10],
        "machine": _machine(run.environment),
        "seconds": (run.summary or {}).get("seconds"),
        "step_seconds": sum(value for _, value in run.series("time/step_s")),
        "sampled_tokens": round(tokens),
        "peak_gib": max((value for _, value in run.series("memory/peak_gib")), default=None),
        "evaluations": counted,
        "change": {key: paired_comparison(first, last, key=key) for key in VERDICTS},
        "accuracy": [value for _, value in run.series("accuracy/strict")],
        "format": [value for _, value in run.series("accuracy/format")],
        "stopped": [value for _, value in run.series("completions/stop_rate")],
        "tokens": [value for _, value in run.series("completions/tokens_mean")],
    }


def _machine(found: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a run's environment.json says of its machine, in the words of ``environment``; None where it does not."""
    if found.get("usable_cpus") is None:
        return None
    processor = ", ".join(found.get("accelerators") or [found.get("processor", "unknown")])
    return {
        "processor": processor,
        "cores": found["usable_cpus"],
        **{name: found.get(name) for name in ("torch", "transformers")},
    }


def _step(run: RunRecord, one: EvaluationRecords) -> int:
    return one.step or (run.last_step if one.stage == "final" else 0)


def _figures(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    found = figures(records)
    return {key: found[key] for key in ("n", *VERDICTS, "format_rate", "stop_rate", "mean_tokens")}


def whole_split(path: Path, runs: Collection[str] = ()) -> tuple[list[dict[str, Any]], Evaluation | None]:
    """Each model of the file, and what changed from the first one, problem by problem, unless that one is of ``runs``, names of folders.
    Then the model before training; None where the first one is of ``runs``."""
    models = [(model, one) for model, evaluations in rescore(path) for one in evaluations if one.mode == "greedy"]
    rows = []
    for i, (model, one) in enumerate(models):
        name = Path(model).name
        records = sorted(one.records, key=lambda record: str(record["problem"]))
        rows.append({
            "model": name,
            "trained": i > 0 or name in runs,
            "data": one.conditions.get("data"),
            **_figures(records),
            "right": {verdict: "".join(SIGNS[record[verdict]] for record in records) for verdict in VERDICTS},
        })  # fmt: skip
    return _compared(rows), None if not rows or rows[0]["trained"] else models[0][1]


def _compared(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """``rows``, each trained one with what changed from the model before training, unless it says so already. "right" has a sign for each
    problem, in the order of their names. Files of earlier versions have only shares of it: then the comparison is not paired."""
    before = next(iter(_before(rows)), None)

    def compared(row: dict[str, Any]) -> dict[str, Any]:
        known = row.get("against_first", {}).get("strict")
        if before is None or "right" not in row or not row["trained"] or (known and ("fixed" in known or "right" not in before)):
            return row
        return row | {"against_first": {verdict: _difference(before, row, verdict) for verdict in VERDICTS}}

    return [compared(row) for row in rows]


def _difference(before: Mapping[str, Any], after: Mapping[str, Any], verdict: str) -> dict[str, Any]:
    if "right" in before:
        return paired_comparison(*(_records(one["right"][verdict], verdict) for one in (before, after)), key=verdict)
    (right, n), (right_before, n_before) = ((round(one["n"] * one[verdict][0]), one["n"]) for one in (after, before))
    interval = newcombe_interval(right, n, right_before, n_before)
    return {"difference": right / n - right_before / n_before, "difference_interval": list(interval)}


def _records(right: str, verdict: str) -> list[dict[str, Any]]:
    verdicts = {sign: one for one, sign in SIGNS.items()}
    return [{"problem": str(i), verdict: verdicts[sign]} for i, sign in enumerate(right)]


def draw(numbers: Mapping[str, Any], path: Path) -> None:
    from experiments.style import COLOURS, figure

    with figure(path, ["held out, greedy", "in training, at temperature 1"], width=9) as (held_out, training):
        for run, colour in zip(numbers["runs"], COLOURS, strict=False):
            steps = [row["step"] for row in run["evaluations"]]
            for verdict, style in zip(VERDICTS, ("-", "--"), strict=True):
                middle, low, high = zip(*(row[verdict] for row in run["evaluations"]), strict=True)
                held_out.plot(steps, middle, style, marker="o", color=colour, label=f"{verdict}, seed {run['seed']}")
                if verdict == "strict":
                    held_out.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
            training.plot(range(1, len(run["accuracy"]) + 1), run["accuracy"], color=colour, label=f"strict, seed {run['seed']}")
        for axis in (held_out, training):
            axis.set_ylim(0, 1)
            axis.set_xlabel("step")
            axis.legend()


def page_of(name: str) -> Path:
    """The page that has the block ``name``; raises ValueError where none has."""
    try:
        read_block(PAGE, name)
    except ValueError:
        read_block(RESULTS, name)
        return RESULTS
    return PAGE


def report(numbers: Mapping[str, Any], name: str = "headline", page: Path = RESULTS) -> str:
    figure = os.path.relpath(FIGURES / f"{name}.svg", page.parent)
    parts = [f"![Held-out accuracy by step, and accuracy in training]({figure})"]
    if numbers["judged"]:
        parts.append(_split_table(numbers["judged"]))
    runs = numbers["runs"]
    rows = []
    for run in runs:
        for row in run["evaluations"]:
            shares = [_share(row[verdict]) for verdict in VERDICTS]
            shown = [
                str(run["seed"]),
                str(row["step"]),
                str(row["n"]),
                *shares,
                f"{row['format_rate']:.1%}",
                f"{row['stop_rate']:.1%}",
            ]
            rows.append([*shown, f"{row['mean_tokens']:.0f}"])
    header = ["seed", "after step", "problems", "strict", "lenient", "in the format", "stopped", "tokens"]
    parts.append(f"By step, greedy:\n\n{markdown_table(header, rows)}")
    for run in (run for run in runs if len(run["evaluations"]) > 1):
        said = "; ".join(f"{verdict} {_change(run['change'][verdict])}" for verdict in VERDICTS)
        first, last = run["evaluations"][0], run["evaluations"][-1]
        fewer = "" if last["n"] == first["n"] else f", of the {last['n']} that both judged"
        # Without evaluation.at_start and the whole split's records the first one is not of the model before training.
        steps = f"step {first['step']} to {last['step']}"
        parts.append(f"Seed {run['seed']}, {steps}, problem by problem{fewer}, in points: {said}.")
    parts.append(f"What it cost:\n\n{_costs(runs)}")
    supposed = {
        f"{WATTS_OF_A_CARD} W for a card, its limit"
        if _on_a_card(run)
        else f"{WATTS} W for two cores and their share of the machine"
        for run in runs
    }
    parts.append(f"Energy is an estimate, not measured: {', '.join(sorted(supposed))}. {_machines(numbers)}.")
    return "\n\n".join(parts)


def _machines(numbers: Mapping[str, Any]) -> str:
    """The machine of all runs, or of each where they differ; in files of earlier versions they do not say theirs."""
    seeds: dict[str, list[str]] = {}
    for run in numbers["runs"]:
        found = run.get("machine") or numbers["environment"]
        place = f"{found['processor']}, {found['cores']} cores, torch {found['torch']}, transformers {found['transformers']}"
        seeds.setdefault(place, []).append(f"seed {run['seed']}")
    if len(seeds) == 1:
        return next(iter(seeds))
    said = "; ".join(f"{', '.join(of)}: {place}" for place, of in seeds.items())
    return said[0].upper() + said[1:]


def _on_a_card(run: Mapping[str, Any]) -> bool:
    return "NVIDIA" in ((run.get("machine") or {}).get("processor") or "")


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:.{2 if seconds >= 360 else 3}f}"


def _costs(runs: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for run in runs:
        seconds = run["seconds"] or run["step_seconds"]
        prompts, completions, limit = run["batch"]
        steps = f"{run['steps']} of {run['of']}" if run["steps"] < run["of"] else str(run["steps"])
        hours = _hours(run["step_seconds"])
        whole = _hours(seconds) if run["seconds"] else "-"
        peak = "-" if run["peak_gib"] is None else f"{run['peak_gib']:.1f} GiB"
        rows.append([
            str(run["seed"]), steps, f"{prompts} x {completions} x {limit}", f"{run['sampled_tokens']:,}", hours, whole, peak,
            f"{(WATTS_OF_A_CARD if _on_a_card(run) else WATTS) * seconds / 3.6e6:.2f} kWh", run["revision"], run["date"],
        ])  # fmt: skip
    header = [
        "seed",
        "steps",
        "batch",
        "tokens sampled",
        "hours of steps",
        "hours in all",
        "peak",
        "energy",
        "revision",
        "started",
    ]
    return markdown_table(header, rows)


def _split_table(rows: Sequence[Mapping[str, Any]]) -> str:
    shown = []
    for row in rows:
        cells = [
            row["model"],
            *(_share(row[verdict]) for verdict in VERDICTS),
            f"{row['format_rate']:.1%}",
            f"{row['stop_rate']:.1%}",
        ]
        for verdict in VERDICTS:
            change = row.get("against_first", {}).get(verdict)
            cells.append("-" if change is None else _change(change))
        shown.append([*cells[:5], f"{row['mean_tokens']:.0f}", *cells[5:]])
    header = [
        "model",
        "strict",
        "lenient",
        "in the format",
        "stopped",
        "tokens",
        "strict, points gained",
        "lenient, points gained",
    ]
    paired = any("fixed" in row.get("against_first", {}).get("strict", {}) for row in rows)
    test = ", McNemar's exact test" if paired else ""
    title = f"All {rows[0]['n']:,} problems of {_data(rows[0])}, greedy; 95% intervals{test}:"
    return f"{title}\n\n{markdown_table(header, shown)}"


def _change(found: Mapping[str, Any]) -> str:
    low, high = found["difference_interval"]
    said = f"{100 * found['difference']:+.1f} ({100 * low:+.1f} to {100 * high:+.1f})"
    if "fixed" not in found:
        return f"{said}, not paired"
    return f"{said}, {found['fixed']} fixed, {found['broken']} broken, p = {found['p_value']:.1g}"


def _share(found: Sequence[float]) -> str:
    middle, low, high = found
    return f"{middle:.1%} ({low:.1%} to {high:.1%})"


EXPERIMENT = Experiment("headline", dict, draw, report, page=RESULTS)


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(prog="python -m experiments.headline")
    options.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folders of runs, of one recipe with several seeds")
    options.add_argument("--judged", type=Path, help="records of groupwise eval --out: the model before, then the runs")
    options.add_argument("--beside", action="store_true", help="keep the other seeds that the JSON file has")
    options.add_argument(
        "--name",
        default=EXPERIMENT.name,
        help="headline or headline-SOMETHING: of the figure, its numbers and the block on the page",
    )
    options.add_argument("--out", type=Path, default=FIGURES)
    options.add_argument("--redraw", action="store_true", help="make figure and table from the JSON file that is there already")
    chosen = options.parse_args(arguments)
    if not re.fullmatch(r"headline(-[\w.-]+)?", chosen.name):
        options.error(f"--name is {chosen.name!r}: begin it with headline-, as no other experiment's name does")
    page = RESULTS
    if chosen.out.resolve() == FIGURES:
        try:
            page = page_of(chosen.name)
        except ValueError as error:
            options.error(f"{error}, or give --out")
    if not chosen.redraw and not chosen.runs:
        options.error("name the folder of a run, or --redraw")
    numbers = (
        read_numbers(chosen.name, chosen.out)
        if chosen.redraw
        else measure(chosen.runs, chosen.judged) | {"environment": environment()}
    )
    if chosen.beside and not chosen.redraw:
        numbers = beside(read_numbers(chosen.name, chosen.out), numbers)
    named = replace(EXPERIMENT, name=chosen.name, report=partial(report, name=chosen.name, page=page), page=page)
    publish(named, numbers, chosen.out)


if __name__ == "__main__":
    main()
