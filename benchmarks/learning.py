"""Held-out accuracy against hours and sampled tokens: one script for TRL's ``GRPOTrainer``, run by TRL and by groupwise.

The quickstart's task, model and rewards. Each seed has one warm start; from its weights both libraries see the same problems in the same
order, with the same hyper-parameters, on the same cores, one after the other and by turns who is first. Weights are kept every few steps
with the seconds of training until then, and judged afterwards by one evaluator on the same held-out problems. What is finished is kept in
``--work``: called again, the benchmark goes on with what is left.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Result, finish, median, parser, print_table
from benchmarks.workers import KEEP_MEMORY
from experiments.common import FIGURES, Experiment, markdown_table, publish
from experiments.comparison import newcombe_interval
from experiments.runs import Budget, warm_starts
from groupwise.config import Config, load_config
from groupwise.config.objective import ClipLoss
from groupwise.data.order import problems_for_step
from groupwise.data.prompts import resolve_system
from groupwise.data.sources import load_problems
from groupwise.evaluation import evaluate_model

__all__ = ["EXPERIMENT", "difference", "draw", "main", "reached", "report", "rows_of", "run"]

SIDES = {"groupwise": "groupwise.trl", "trl": "trl"}
LEVELS = (0.60, 0.70, 0.75)


def options() -> argparse.ArgumentParser:
    out = parser("learning", __doc__)
    out.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    out.add_argument("--steps", type=int, default=60, help="GRPO steps of every run")
    out.add_argument("--every", type=int, default=6, help="steps from one judged policy to the next")
    out.add_argument("--problems", type=int, default=250, help="held-out problems, one sample each at temperature 1")
    out.add_argument("--rows", type=int, default=8, help="completions that TRL holds in a micro-batch")
    out.add_argument("--sides", nargs="+", choices=[*SIDES], default=[*SIDES])
    out.add_argument("--work", type=Path, default=ROOT / "runs" / "learning", help="what is finished is kept here")
    out.add_argument("--show", type=Path, metavar="FILE", help="run nothing: figure and table in docs/ from what --output wrote")
    out.add_argument("settings", nargs="*", help="of the quickstart, such as model.name=FOLDER")
    return out


def run(args: argparse.Namespace) -> Result:
    """Train and judge what is not there yet, print the tables, and return the result. Its ratio is of the times to the highest level
    that both sides reach with every seed, the median over seeds; None where they reach none."""
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    starts = warm_starts(args.seeds, Budget(problems=args.problems), work, args.settings)
    found: dict[str, dict[int, dict[str, Any]]] = {side: {} for side in args.sides}
    for turn, seed in enumerate(args.seeds):
        start = _judged(starts[seed], starts[seed] / "judged.json", args)
        for side in args.sides if turn % 2 == 0 else args.sides[::-1]:
            one = _trained(side, seed, starts[seed], work / f"{side}-{seed}", args)
            rows = [{"step": 0, "seconds": 0.0, "sampled_tokens": 0.0, **start}]
            for row in one["rows"]:
                policy = work / f"{side}-{seed}" / f"step-{row['step']}"
                rows.append({**row, **_judged(policy, policy.with_suffix(".json"), args)})
                shutil.rmtree(policy, ignore_errors=True)  # judged: its numbers are kept
            found[side][seed] = {**one, "rows": rows}
    return _result(args, found)


def _config(args: argparse.Namespace, *more: str) -> Config:
    given = [f"evaluation.problems={args.problems}", "evaluation.modes=[sampled]", "evaluation.show=0", *args.settings, *more]
    return load_config("quickstart", [*given, f"training.threads={args.threads}"])


def _trained(side: str, seed: int, start: Path, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """One run of one library, in a process of its own; what it found, from its file if it is finished."""
    config = _config(args, f"training.seed={seed}", f"training.steps={args.steps}")
    settings = {
        "library": SIDES[side],
        "model": str(start),
        "folder": str(folder),
        "threads": args.threads,
        "every": args.every,
        "rewards": [function.function for function in config.rewards.functions],
        "arguments": _arguments(config, args.rows),
        "rows": rows_of(config),
    }
    place, finished = folder / "settings.json", folder / "found.json"
    if finished.exists() and json.loads(place.read_text(encoding="utf-8")) == settings:
        return json.loads(finished.read_text(encoding="utf-8"))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    place.write_text(json.dumps(settings), encoding="utf-8")
    print(f"{side}, seed {seed}: {args.steps} steps", flush=True)
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    surroundings = {
        **os.environ, "GLIBC_TUNABLES": KEEP_MEMORY, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }  # fmt: skip
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        words = [sys.executable, "-m", "benchmarks.learning_worker", str(place)]
        code = subprocess.run(words, cwd=ROOT, env=surroundings, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        raise SystemExit(f"{side} with seed {seed} ended with code {code}: see {folder / 'log.txt'}")
    return json.loads(finished.read_text(encoding="utf-8"))


def _arguments(config: Config, rows: int) -> dict[str, Any]:
    """The run's settings in TRL's names. ``rows``: completions of a micro-batch; the batch of an update is the config's."""
    rollout, optimizer, loss = config.rollout, config.optimizer, config.algorithm.loss
    batch = rollout.prompts_per_step * rollout.completions_per_prompt
    assert isinstance(loss, ClipLoss)
    assert (config.algorithm.preset, config.algorithm.kl, optimizer.schedule) == ("grpo", None, "constant")
    return {
        "use_cpu": True, "bf16": True, "gradient_checkpointing": False, "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": batch // rows, "num_generations": rollout.completions_per_prompt,
        "max_completion_length": rollout.max_completion_tokens, "num_iterations": 1, "temperature": rollout.temperature,
        "top_p": 1.0, "top_k": 0, "beta": 0.0, "epsilon": loss.epsilon, "loss_type": "grpo", "scale_rewards": "group",
        "learning_rate": optimizer.learning_rate, "lr_scheduler_type": "constant", "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1], "adam_epsilon": optimizer.epsilon, "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm, "max_steps": config.training.steps, "shuffle_dataset": False, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "seed": config.training.seed,
    }  # fmt: skip


def rows_of(config: Config) -> list[dict[str, Any]]:
    """The problems of all steps in the order in which the quickstart has them, as rows of a data set for TRL."""
    problems = load_problems(config.data).train
    system, _ = resolve_system(config.prompt, config.data)
    order = [
        place
        for step in range(config.training.steps)
        for place in problems_for_step(len(problems), config.rollout.prompts_per_step, step, config.training.seed)
    ]
    turns = [{"role": "system", "content": system}] if system else []
    return [{"prompt": [*turns, {"role": "user", "content": problems[i].question}], "answer": problems[i].answer} for i in order]


def _judged(policy: Path, kept: Path, args: argparse.Namespace) -> dict[str, float]:
    """Strict accuracy of a folder's weights on the held-out problems, from its file if it was judged before."""
    if not kept.exists():
        (one,) = evaluate_model(str(policy), _config(args))
        numbers = one.to_summary()
        kept.write_text(json.dumps({"accuracy": numbers["strict_accuracy"], "stopped": numbers["stop_rate"]}), encoding="utf-8")
    return json.loads(kept.read_text(encoding="utf-8"))


def reached(rows: Sequence[Mapping[str, float]], level: float, unit: str = "seconds") -> float | None:
    """Where the curve first reaches ``level``: seconds or sampled tokens, between two judged policies on the straight line."""
    for before, after in pairwise(rows):
        if after["accuracy"] >= level:
            if before["accuracy"] >= level:
                return before[unit]
            share = (level - before["accuracy"]) / (after["accuracy"] - before["accuracy"])
            return before[unit] + share * (after[unit] - before[unit])
    return None


def ratio(ours: Sequence[float | None], theirs: Sequence[float | None]) -> float | None:
    """Median over seeds of theirs divided by ours; None unless both reached the level with every seed, and neither began there."""
    pairs = list(zip(ours, theirs, strict=True))
    known = [b / a for a, b in pairs if a and b]
    return median(known) if len(known) == len(pairs) else None


def difference(ours: Sequence[float], theirs: Sequence[float], problems: int) -> tuple[float, float, float]:
    """Mean accuracy of ours less theirs over seeds, each a share of ``problems``, and its 95% interval (Newcombe 1998, method 10)."""
    right, others_right = (round(sum(shares) * problems) for shares in (ours, theirs))
    low, high = newcombe_interval(right, len(ours) * problems, others_right, len(theirs) * problems)
    return sum(ours) / len(ours) - sum(theirs) / len(theirs), low, high


def _result(args: argparse.Namespace, found: dict[str, dict[int, dict[str, Any]]]) -> Result:
    best: tuple[str, float, float, float] | None = None
    levels: list[list[Any]] = []
    times: dict[str, dict[str, dict[str, list[float | None]]]] = {}
    for level in LEVELS:
        times[f"{level:.0%}"] = by_unit = {
            unit: {side: [reached(one["rows"], level, unit) for one in seeds.values()] for side, seeds in found.items()}
            for unit in ("seconds", "sampled_tokens")
        }
        seconds = {side: [t for t in by_unit["seconds"][side] if t is not None] for side in found}
        everywhere = {side: median(t) for side, t in seconds.items() if len(t) == len(args.seeds)}
        faster = ratio(*(by_unit["seconds"][side] for side in SIDES)) if len(everywhere) == 2 else None
        if faster is not None:
            best = f"{level:.0%}", faster, everywhere["groupwise"], everywhere["trl"]
        levels.append([f"{level:.0%}", *(everywhere.get(side) for side in found), faster])
    print_table("Seconds of training to a strict accuracy, medians over seeds", ("level", *found, "ratio"), levels)
    ends = {side: [one["rows"][-1] for one in seeds.values()] for side, seeds in found.items()}
    rows = [
        [side, *(median([end[key] for end in last]) for key in ("accuracy", "seconds", "sampled_tokens")),
         max(one["peak_memory_gib"] for one in found[side].values())]
        for side, last in ends.items()
    ]  # fmt: skip
    print_table(f"After {args.steps} steps, medians", ("", "accuracy", "seconds", "sampled tokens", "GiB"), rows)
    details: dict[str, Any] = {"runs": found, "levels": times}
    if len(ends) == 2:
        ours, theirs = ([end["accuracy"] for end in ends[side]] for side in SIDES)
        gap = difference(ours, theirs, args.problems)
        details["difference"] = gap
        print("\nGroupwise less TRL after the last step: {:+.1%} ({:+.1%} to {:+.1%})".format(*gap))
    shown = {key: value for key, value in vars(args).items() if not isinstance(value, Path | None)}
    if best is None:
        return Result("learning", None, None, None, "s", shown, details)
    return Result("learning", best[1], best[2], best[3], f"s to {best[0]}", shown, details)


def draw(numbers: Mapping[str, Any], path: Path) -> None:
    """Accuracy against minutes of training and against sampled tokens, a line for every run."""
    from experiments.style import COLOURS, figure

    units = {"minutes of training": ("seconds", 60.0), "thousand sampled tokens": ("sampled_tokens", 1000.0)}
    with figure(path, ["by time", "by sampled tokens"]) as axes:
        for axis, (name, (unit, size)) in zip(axes, units.items(), strict=True):
            for (side, seeds), colour in zip(numbers["details"]["runs"].items(), COLOURS, strict=False):
                for i, one in enumerate(seeds.values()):
                    x = [row[unit] / size for row in one["rows"]]
                    label = f"{side}, {len(seeds)} seeds" if i == 0 else None
                    axis.plot(x, [row["accuracy"] for row in one["rows"]], color=colour, marker=".", alpha=0.8, label=label)
            axis.set_ylim(0, 1)
            axis.set_xlabel(name)
        axes[0].set_ylabel("held-out accuracy")
        axes[0].legend(loc="lower right")


def report(numbers: Mapping[str, Any]) -> str:
    """Markdown of a result with both sides: when each level was reached, and where the runs ended."""
    details, versions, machine, settings = (numbers[key] for key in ("details", "versions", "machine", "settings"))
    levels = []
    for level, by_unit in details["levels"].items():
        cells = [level]
        for unit in ("seconds", "sampled_tokens"):
            ours, theirs = (by_unit[unit][side] for side in SIDES)
            cells += [", ".join("-" if t is None else f"{t:,.0f}" for t in side) for side in (ours, theirs)]
            less = ratio(ours, theirs)
            cells.append("-" if less is None else f"{less:.2f}")
        levels.append(cells)
    names = list(SIDES)
    head = ["strict", *(f"seconds, {name}" for name in names), "ratio", *(f"sampled tokens, {name}" for name in names), "ratio"]
    ends = []
    for side, seeds in details["runs"].items():
        last = [one["rows"][-1] for one in seeds.values()]
        ends.append([
            side,
            ", ".join(f"{row['accuracy']:.1%}" for row in last),
            ", ".join(f"{row['stopped']:.1%}" for row in last),
            ", ".join(f"{row['seconds']:,.0f}" for row in last),
            ", ".join(f"{row['sampled_tokens']:,.0f}" for row in last),
            f"{max(one['peak_memory_gib'] for one in seeds.values()):.1f}",
        ])  # fmt: skip
    first = next(iter(details["runs"].values()))
    starts = ", ".join(f"{one['rows'][0]['accuracy']:.1%}" for one in first.values())
    gap = "{:+.1f} ({:+.1f} to {:+.1f}) points".format(*(100 * part for part in details["difference"]))
    seeds = ", ".join(map(str, settings["seeds"]))
    return "\n\n".join([
        "![Held-out accuracy by time and by sampled tokens, a line for every run](figures/learning.svg)",
        f"When each accuracy was first reached (seeds {seeds}; all start at {starts}):",
        markdown_table(head, levels),
        f"After {settings['steps']} steps:",
        markdown_table(["", "strict", "stopped", "seconds", "sampled tokens", "GiB"], ends),
        f"Groupwise less TRL after the last step, all seeds together: {gap}.",
        f"Measured {numbers['date'][:10]}, revision {versions['commit']}, {machine['cpu']}, {machine['cores']} cores, "
        f"torch {versions['torch']}, transformers {versions['transformers']}, TRL {versions['trl']}.",
    ])  # fmt: skip


EXPERIMENT = Experiment("learning", dict, draw, report, page=ROOT / "docs" / "results.md")


def main() -> None:
    args = options().parse_args()
    if args.show:
        found = json.loads(args.show.read_text(encoding="utf-8"))
        if "difference" not in found["details"]:
            raise SystemExit(f"{args.show} has the runs of one library alone: there is nothing to compare")
        publish(EXPERIMENT, found, FIGURES)
    else:
        finish(run(args), args.output)


if __name__ == "__main__":
    main()
