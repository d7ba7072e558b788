"""Held-out accuracy against hours and sampled tokens: one script for TRL's ``GRPOTrainer``, run by TRL and by groupwise.

Task and model are the quickstart's, with the rewards `correctness` and `format`, or another recipe's. Where it has a warm start, each seed
has its own; from its weights both libraries see the same problems in the same order, with the same hyper-parameters, on the same machine,
one after the other and by turns who is first. Weights are kept every few steps with the seconds of training until then, and judged
afterwards by one evaluator on the same held-out problems. What is finished is kept in ``--work``: called again, the benchmark goes on with
what is left. With ``model.dtype=float32``, or on a processor without bfloat16, both compute in float32; else both keep float32 weights and
compute in bfloat16, each as it rounds them. ``--trl model.dtype=float32`` says so to TRL alone.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from benchmarks.common import ROOT, Result, described, finish, median, parser, print_table
from benchmarks.workers import KEEP_MEMORY
from experiments.common import FIGURES, Experiment, markdown_table, publish
from experiments.comparison import T_QUANTILES, newcombe_interval
from experiments.runs import Budget, settings_of, warm_starts
from groupwise.config import Config, load_config
from groupwise.config.objective import ClipLoss
from groupwise.data.order import problems_for_step
from groupwise.data.prompts import resolve_system
from groupwise.data.sources import load_problems
from groupwise.evaluation import evaluate_model
from groupwise.models.devices import with_dtype
from groupwise.models.load import resolve_device

__all__ = ["EXPERIMENT", "against", "difference", "draw", "joined", "main", "over_seeds", "reached", "report", "rows_of", "run"]

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
    out.add_argument("--recipe", default="quickstart", help="task, model and settings; with a warm start of its own, or none")
    out.add_argument(
        "--trl", nargs="+", default=[], metavar="SETTING", help="settings of TRL's runs alone, such as model.dtype=float32"
    )
    out.add_argument(
        "--ours",
        nargs="+",
        default=[],
        metavar="SETTING",
        help="settings of groupwise's alone, such as rollout.quantization=8bit",
    )
    out.add_argument("--levels", type=float, nargs="+", default=[*LEVELS], help="accuracies whose times are compared")
    out.add_argument(
        "--save-steps", type=int, default=0, help="steps from one checkpoint, where a stopped run goes on, to the next"
    )
    out.add_argument("--name", help="of the figure, its numbers and its block of the page; learning, or learning-RECIPE")
    out.add_argument("--work", type=Path, help="what is finished is kept here; runs/NAME")
    out.add_argument(
        "--show",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="run nothing: figure and table in docs/ from what --output wrote, joined",
    )
    out.add_argument(
        "--against",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="with --show: a table more, of the same runs of groupwise against those that TRL had here with other settings",
    )
    out.add_argument("settings", nargs="*", help="of the recipe, such as model.name=FOLDER")
    return out


def run(args: argparse.Namespace) -> Result:
    """Train and judge what is not there yet, print the tables, and return the result. Its ratio is of the times to the highest level
    that both sides reach with every seed, the median over seeds; None where they reach none."""
    work = (args.work or ROOT / "runs" / name_of(vars(args))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    more = {"groupwise": tuple(args.ours), "trl": tuple(args.trl)}
    for side in args.sides:  # refuses what it has no name for, before any run
        _arguments(side, _config(args, *more[side]), args.rows, args.save_steps)
    config = _config(args)
    if config.warm_start.steps:
        starts = warm_starts(args.seeds, Budget(problems=args.problems), work, args.settings, args.recipe)
    else:
        starts = dict.fromkeys(args.seeds, Path(config.model.name))
    found: dict[str, dict[int, dict[str, Any]]] = {side: {} for side in args.sides}
    for seed in args.seeds:
        # Without a warm start of its own the folder may hold what was judged of other models, or by other settings.
        asked = hashlib.sha256(json.dumps([str(starts[seed]), *_asked(args)]).encode()).hexdigest()[:8]
        kept = starts[seed] / "judged.json" if config.warm_start.steps else work / f"judged-{asked}.json"
        start = _judged(starts[seed], kept, args)
        for side in args.sides if seed % 2 == 0 else args.sides[::-1]:
            one = _trained(side, seed, starts[seed], work / f"{side}-{seed}", args, *more[side])
            rows = [{"step": 0, "seconds": 0.0, "sampled_tokens": 0.0, **start}]
            for row in one["rows"]:
                policy = work / f"{side}-{seed}" / f"step-{row['step']}"
                rows.append({**row, **_judged(policy, policy.with_suffix(".json"), args, *more[side])})
                shutil.rmtree(policy, ignore_errors=True)  # judged: its numbers are kept
            found[side][seed] = {**one, "rows": rows}
    return _result(args, found)


def _asked(args: argparse.Namespace, *more: str) -> list[Any]:
    """What warm starts and judged accuracies depend on, beside the seed."""
    return [args.recipe, args.problems, args.settings, [*more]]


def _config(args: argparse.Namespace, *more: str) -> Config:
    given = [f"evaluation.problems={args.problems}", "evaluation.modes=[sampled]", "evaluation.show=0", *args.settings, *more]
    config = load_config(args.recipe, [*settings_of(args.recipe), *given, f"training.threads={args.threads}"])
    return config.model_copy(update={"model": with_dtype(config.model)})


def _trained(side: str, seed: int, start: Path, folder: Path, args: argparse.Namespace, *more: str) -> dict[str, Any]:
    """One run of one library, in a process of its own; what it found, from its file if it is finished."""
    config = _config(args, f"training.seed={seed}", f"training.steps={args.steps}", *more)
    settings = {
        "library": SIDES[side],
        "model": str(start),
        "asked": _asked(args, *more),
        "folder": str(folder),
        "threads": args.threads,
        "every": args.every,
        "rewards": [[function.function, function.arguments] for function in config.rewards.functions],
        "arguments": _arguments(side, config, args.rows, args.save_steps),
        "rows": rows_of(config),
    }
    if (lora := config.model.lora) is not None:
        settings["lora"] = {
            "r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": lora.target_modules,
            "task_type": "CAUSAL_LM",
        }  # fmt: skip
    place, finished = folder / "settings.json", folder / "found.json"
    same = place.exists() and json.loads(place.read_text(encoding="utf-8")) == settings
    if same and finished.exists():
        return json.loads(finished.read_text(encoding="utf-8"))
    if not (same and args.save_steps):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        place.write_text(json.dumps(settings), encoding="utf-8")
    print(f"{side}, seed {seed}: {args.steps} steps", flush=True)
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    surroundings = {
        "GLIBC_TUNABLES": KEEP_MEMORY,  # unless set outside: where memory is short, what glibc keeps may be missing elsewhere
        **os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }  # fmt: skip
    begun = described()
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        words = [sys.executable, "-m", "benchmarks.learning_worker", str(place)]
        code = subprocess.run(words, cwd=ROOT, env=surroundings, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if code != 0:
        raise SystemExit(f"{side} with seed {seed} ended with code {code}: see {folder / 'log.txt'}")
    # Of the date the day: runs of one day stand on one line of the page.
    found = {**json.loads(finished.read_text(encoding="utf-8")), **begun, "date": begun["date"][:10]}
    finished.write_text(json.dumps(found), encoding="utf-8")
    return found


def _arguments(side: str, config: Config, rows: int, save_steps: int) -> dict[str, Any]:
    """The run's settings in TRL's names. ``rows``: completions of a micro-batch; the batch of an update is the config's."""
    rollout, optimizer, loss = config.rollout, config.optimizer, config.algorithm.loss
    batch = rollout.prompts_per_step * rollout.completions_per_prompt
    if rollout.tools or rollout.environment:
        raise SystemExit("rollout.tools and rollout.environment are not given to TRL here: choose a recipe without them")
    assert isinstance(loss, ClipLoss)
    if optimizer.schedule != "constant" or optimizer.warmup_steps:
        raise SystemExit("the rate must be the same at every step: give optimizer.schedule=constant optimizer.warmup_steps=0")
    assert (config.algorithm.preset, config.algorithm.kl) == ("grpo", None)
    own: dict[str, Any] = {}
    if rollout.quantization != "none":
        if side == "trl":
            raise SystemExit("TRL does not sample with rounded weights: give rollout.quantization to --ours")
        own["rollout_quantization"] = rollout.quantization
        if (kept := config.algorithm.correction) is not None:
            own |= {"vllm_importance_sampling_mode": f"{kept.level}_{kept.mode}", "vllm_importance_sampling_clip_max": kept.cap}
        else:
            own["vllm_importance_sampling_correction"] = False
    # The base of an adapter is not trained, so neither library needs it in float32.
    small = {} if config.model.lora is None else {"model_init_kwargs": {"dtype": "bfloat16"}}
    saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": save_steps, "save_total_limit": 1}
    return {
        **small, **own, **(saving if save_steps else {"save_strategy": "no"}),
        "use_cpu": resolve_device(config.model.device).type == "cpu", "bf16": config.model.dtype != "float32",
        "gradient_checkpointing": False, "per_device_train_batch_size": rows, "gradient_accumulation_steps": batch // rows,
        "num_generations": rollout.completions_per_prompt, "max_completion_length": rollout.max_completion_tokens,
        "num_iterations": 1, "temperature": rollout.temperature, "top_p": 1.0, "top_k": 0,
        "beta": 0.0, "epsilon": loss.epsilon, "loss_type": "grpo", "scale_rewards": "group",
        "learning_rate": optimizer.learning_rate, "lr_scheduler_type": "constant", "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1], "adam_epsilon": optimizer.epsilon, "weight_decay": optimizer.weight_decay,
        "max_grad_norm": optimizer.max_grad_norm, "max_steps": config.training.steps, "shuffle_dataset": False, "logging_steps": 1,
        "report_to": [], "disable_tqdm": True, "seed": config.training.seed,
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


def _judged(policy: Path, kept: Path, args: argparse.Namespace, *more: str) -> dict[str, float]:
    """Strict accuracy of a folder's weights on the held-out problems, from its file if it was judged before.

    ``accuracy`` is of the policy that is trained. TRL keeps and saves all of a model's weights in float32, but its autocast samples and
    learns with them rounded to bfloat16, each to the nearest: they are judged so, and ``float32`` is their accuracy as they were saved.
    """
    if not kept.exists():
        found = _strict(policy, config := _config(args, *more))
        if config.model.dtype != "float32" and _in_float32(policy):
            found["float32"] = _strict(policy, _config(args, "model.dtype=float32"))["accuracy"]
        kept.write_text(json.dumps(found), encoding="utf-8")
    return json.loads(kept.read_text(encoding="utf-8"))


def _in_float32(policy: Path) -> bool:
    """Whether the folder holds a whole model in float32: one of an adapter has no config.json."""
    place = policy / "config.json"
    saved = json.loads(place.read_text(encoding="utf-8")) if place.exists() else {}
    return saved.get("dtype", saved.get("torch_dtype")) == "float32"


def _strict(policy: Path, config: Config) -> dict[str, float]:
    # In a process of its own, which gives its memory back before the next run is trained.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        numbers = pool.submit(_evaluated, str(policy), config).result()
    return {"accuracy": numbers["strict_accuracy"], "stopped": numbers["stop_rate"]}


def _evaluated(policy: str, config: Config) -> dict[str, Any]:
    torch.set_num_threads(config.training.threads or 1)
    (one,) = evaluate_model(policy, config)
    return one.to_summary()


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
    known = ratios(ours, theirs)
    return median(known) if len(known) == len(ours) else None


def ratios(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[float]:
    """Theirs divided by ours, of each seed with which both reached the level and neither began there."""
    return [b / a for a, b in zip(ours, theirs, strict=True) if a and b]


def difference(ours: Sequence[float], theirs: Sequence[float], problems: int) -> tuple[float, float, float]:
    """Mean accuracy of ours less theirs over seeds, each a share of ``problems``, and its 95% interval (Newcombe 1998, method 10)."""
    right, others_right = (round(sum(shares) * problems) for shares in (ours, theirs))
    low, high = newcombe_interval(right, len(ours) * problems, others_right, len(theirs) * problems)
    return sum(ours) / len(ours) - sum(theirs) / len(theirs), low, high


def over_seeds(differences: Sequence[float]) -> tuple[float, float, float]:
    """Mean of one difference a seed and its 95% interval by Student's t, so with what the runs themselves differ by; 2 to 31 seeds."""
    mean, half = fmean(differences), T_QUANTILES[len(differences) - 2] * stdev(differences) / len(differences) ** 0.5
    return mean, mean - half, mean + half


def details_of(
    found: Mapping[str, Mapping[Any, dict[str, Any]]], problems: int, levels: Sequence[float] = LEVELS
) -> dict[str, Any]:
    """Runs by side and seed, where each first reached the levels, and with both sides the differences of their accuracies: after the
    last step over problems, after it and on average over the judged steps over seeds."""
    details: dict[str, Any] = {"runs": found, "levels": {}}
    for level in levels:
        details["levels"][f"{level:.0%}"] = {
            unit: {side: [reached(one["rows"], level, unit) for one in seeds.values()] for side, seeds in found.items()}
            for unit in ("seconds", "sampled_tokens")
        }
    if len(found) < len(SIDES):
        return details
    ends = {side: [one["rows"][-1]["accuracy"] for one in seeds.values()] for side, seeds in found.items()}
    means = {side: [fmean(row["accuracy"] for row in one["rows"][1:]) for one in seeds.values()] for side, seeds in found.items()}
    details["difference"] = difference(ends["groupwise"], ends["trl"], problems)
    if 2 <= len(ends["trl"]) <= len(T_QUANTILES) + 1:
        for name, values in (("last_over_seeds", ends), ("mean_over_seeds", means)):
            details[name] = over_seeds([a - b for a, b in zip(values["groupwise"], values["trl"], strict=True)])
    return details


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Results of several calls, of other seeds with the same settings, as one. Raises SystemExit where they do not fit together."""
    runs: dict[str, dict[str, Any]] = {side: {} for side in SIDES}
    seeds: list[int] = []
    measured: list[Mapping[str, Any]] = []
    earlier = {
        "recipe": "quickstart",
        "levels": [*LEVELS],
        "save_steps": 0,
        "name": None,
        "trl": [],
        "ours": [],
    }  # of files from before these could be given
    settings = [{**earlier, **{key: value for key, value in part["settings"].items() if key != "seeds"}} for part in parts]
    for part, of_it in zip(parts, settings, strict=True):
        if part["details"]["runs"].keys() != runs.keys():
            raise SystemExit("a file has the runs of one library alone: there is nothing to compare")
        if of_it != settings[0]:
            raise SystemExit(f"the files differ in their settings, {settings[0]} and {of_it}: give those of the same settings")
        if again := set(seeds).intersection(part["settings"]["seeds"]):
            raise SystemExit(f"two files have seed {min(again)}: give each seed once")
        for side in SIDES:
            runs[side] |= part["details"]["runs"][side]
        seeds += part["settings"]["seeds"]
        measured += part["measured"] if "measured" in part else _measured(part)
    return {
        "name": "learning",
        "settings": settings[0] | {"seeds": seeds},
        "details": details_of(runs, settings[0]["problems"], settings[0]["levels"]),
        "measured": measured,
        **({"against": parts[0]["against"]} if len(parts) == 1 and "against" in parts[0] else {}),
    }


def _measured(part: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Versions, machine and date of the runs with their seeds, and with the ``side`` where the two differ. Runs of older files
    have those of the call."""
    found: dict[str, dict[str, Any]] = {}
    for seed in part["settings"]["seeds"]:
        runs = {side: part["details"]["runs"][side][str(seed)] for side in SIDES}
        keys = ("versions", "machine", "date")
        places = {side: {key: run.get(key, part.get(key)) for key in keys} for side, run in runs.items()}
        same = places["groupwise"] == places["trl"]
        for one in [places["trl"]] if same else [{"side": side, **place} for side, place in places.items()]:
            found.setdefault(json.dumps(one), {"seeds": [], **one})["seeds"].append(seed)
    return list(found.values())


def against(numbers: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """``numbers`` with TRL's runs of ``others``, of the same seeds and task: what it does when it is told otherwise.

    Both are what ``joined`` returns. Raises SystemExit where seeds, task or what is judged differ.
    """
    for key in ("recipe", "problems", "seeds"):
        if numbers["settings"][key] != others["settings"][key]:
            raise SystemExit(
                f"--against: {key} {others['settings'][key]}, but {numbers['settings'][key]} in --show: give the same"
            )
    asked = [one for one in others["settings"]["settings"] if one not in numbers["settings"]["settings"]]
    if not asked:
        raise SystemExit("--against: its runs have no setting that those of --show lack: give runs of TRL with other settings")
    return {
        **numbers,
        "against": {"asked": asked, "runs": others["details"]["runs"]["trl"], "steps": others["settings"]["steps"]},
    }


def _result(args: argparse.Namespace, found: dict[str, dict[int, dict[str, Any]]]) -> Result:
    best: tuple[str, float, float, float] | None = None
    levels: list[list[Any]] = []
    details = details_of(found, args.problems, args.levels)
    for level, by_unit in details["levels"].items():
        seconds = {side: [t for t in by_unit["seconds"][side] if t is not None] for side in found}
        everywhere = {side: median(t) for side, t in seconds.items() if len(t) == len(args.seeds)}
        faster = ratio(*(by_unit["seconds"][side] for side in SIDES)) if len(everywhere) == 2 else None
        if faster is not None:
            best = level, faster, everywhere["groupwise"], everywhere["trl"]
        levels.append([level, *(everywhere.get(side) for side in found), faster])
    print_table("Seconds of training to a strict accuracy, medians over seeds", ("level", *found, "ratio"), levels)
    ends = {side: [one["rows"][-1] for one in seeds.values()] for side, seeds in found.items()}
    rows = [
        [side, *(median([end[key] for end in last]) for key in ("accuracy", "seconds", "sampled_tokens")),
         max(one["peak_memory_gib"] for one in found[side].values())]
        for side, last in ends.items()
    ]  # fmt: skip
    print_table(f"After {args.steps} steps, medians", ("", "accuracy", "seconds", "sampled tokens", "GiB"), rows)
    if "difference" in details:
        print("\nGroupwise less TRL after the last step: {:+.1%} ({:+.1%} to {:+.1%})".format(*details["difference"]))
    shown = {key: value for key, value in vars(args).items() if key != "show" and not isinstance(value, Path | None)}
    shown["settings"] = [one for one in args.settings if not one.startswith(("model.name=", "data.folder="))]  # of one machine
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
                    label = f"{side}, {len(seeds)} seed{'s' * (len(seeds) > 1)}" if i == 0 else None
                    axis.plot(x, [row["accuracy"] for row in one["rows"]], color=colour, marker=".", alpha=0.8, label=label)
            axis.set_ylim(0, 1)
            axis.set_xlabel(name)
        axes[0].set_ylabel("held-out accuracy")
        axes[0].legend(loc="lower right")


def report(numbers: Mapping[str, Any]) -> str:
    """Markdown of what ``joined`` returns: when each level was reached, where the runs ended, and how far apart they are."""
    details, settings = numbers["details"], numbers["settings"]
    levels = []
    for level, by_unit in details["levels"].items():
        cells = [level]
        for unit in ("seconds", "sampled_tokens"):
            cells += _compared(*(by_unit[unit][side] for side in SIDES))
        levels.append(cells)
    names = list(SIDES)
    title = "ratio" if len(settings["seeds"]) == 1 else "ratio (range)"
    head = ["strict", *(f"seconds, {name}" for name in names), title, *(f"sampled tokens, {name}" for name in names), title]
    ends = []
    unrounded = any("float32" in one["rows"][-1] for seeds in details["runs"].values() for one in seeds.values())
    for side, seeds in details["runs"].items():
        last = [one["rows"][-1] for one in seeds.values()]
        ends.append([
            side,
            _shares(row["accuracy"] for row in last),
            *([_shares(row.get("float32") for row in last)] if unrounded else []),
            _shares(row["stopped"] for row in last),
            ", ".join(f"{row['seconds']:,.0f}" for row in last),
            ", ".join(f"{row['sampled_tokens']:,.0f}" for row in last),
            f"{max(one['peak_memory_gib'] for one in seeds.values()):.1f}",
        ])  # fmt: skip
    first = next(iter(details["runs"].values()))
    starts = ", ".join(f"{one['rows'][0]['accuracy']:.1%}" for one in first.values())
    gaps = {
        "after the last step, over problems": "difference",
        "after the last step, over seeds": "last_over_seeds",
        f"mean of the {len(next(iter(first.values()))['rows']) - 1} judged steps, over seeds": "mean_over_seeds",
    }
    known = {what: [100 * x for x in details[key]] for what, key in gaps.items() if key in details}
    shown = [[what, "{:+.1f} ({:+.1f} to {:+.1f})".format(*gap)] for what, gap in known.items()]
    places = [
        f"{_named(one['seeds'], one.get('side')).capitalize()}: {one['date'][:10]}, revision {one['versions']['commit']}, "
        f"{one['machine']['cpu']}, {one['machine']['cores']} cores{_card(one['machine'])}, torch {one['versions']['torch']}, "
        f"transformers {one['versions']['transformers']}, TRL {one['versions']['trl']}."
        for one in numbers["measured"]
    ]
    return "\n\n".join([
        f"![Held-out accuracy by time and by sampled tokens, a line for every run](figures/{name_of(settings)}.svg)",
        f"When each accuracy was first reached ({_named(settings['seeds'])}; before training {starts}):",
        markdown_table(head, levels),
        f"After {settings['steps']} steps:",
        markdown_table(
            ["", "strict", *(["strict, in fp32"] if unrounded else []), "stopped", "seconds", "sampled tokens", "GiB"], ends
        ),
        "Groupwise less TRL, in points of accuracy, with 95% intervals:",
        markdown_table(["", "points"], shown),
        *_against(numbers, title),
        *(
            f"{who} alone was given {', '.join(f'`{one}`' for one in settings[side])}."
            for who, side in (("Groupwise", "ours"), ("TRL", "trl"))
            if settings.get(side)
        ),
        " ".join(places),
    ])  # fmt: skip


def _card(machine: Mapping[str, Any]) -> str:
    return f", {machine['gpu']}" if machine.get("gpu") else ""


def _compared(ours: Sequence[float | None], theirs: Sequence[float | None]) -> list[str]:
    """What each side took, seed by seed, and the ratio with its range where there is one."""
    less, each = ratio(ours, theirs), ratios(ours, theirs)
    spread = f" ({min(each):.2f} to {max(each):.2f})" if len(each) > 1 else ""
    seconds = [", ".join("-" if t is None else f"{t:,.0f}" for t in side) for side in (ours, theirs)]
    return [*seconds, "-" if less is None else f"{less:.2f}{spread}"]


def _against(numbers: Mapping[str, Any], title: str) -> list[str]:
    """Markdown of TRL's other runs against those of groupwise; nothing where there are none."""
    if not (other := numbers.get("against")):
        return []
    ours, theirs = numbers["details"]["runs"]["groupwise"], other["runs"]
    rows = [
        [f"{level:.0%}", *_compared(*([reached(one["rows"], level) for one in side.values()] for side in (ours, theirs)))]
        for level in numbers["settings"]["levels"]
    ]
    asked = ", ".join(f"`{one}`" for one in other["asked"])
    starts = _shares(one["rows"][0]["accuracy"] for one in theirs.values())
    return [
        f"The same runs of groupwise against {other['steps']} steps of TRL with {asked} (before training {starts}):",
        markdown_table(["strict", "seconds, groupwise", "seconds, trl", title], rows),
    ]


def _shares(values: Iterable[float | None]) -> str:
    return ", ".join("-" if value is None else f"{value:.1%}" for value in values)


def _named(seeds: Sequence[int], side: str | None = None) -> str:
    return ("seed " if len(seeds) == 1 else "seeds ") + ", ".join(map(str, [*seeds, *([side] if side else [])]))


def name_of(settings: Mapping[str, Any]) -> str:
    """Of the figure, its numbers and its block of the page."""
    if settings.get("name"):
        return str(settings["name"])
    return "learning" if settings["recipe"] == "quickstart" else f"learning-{settings['recipe']}"


EXPERIMENT = Experiment("learning", dict, draw, report, page=ROOT / "docs" / "results.md")


def main() -> None:
    args = (parsed := options()).parse_args()
    if args.against and not args.show:
        parsed.error("--against is a table beside those of --show: give the files of both")
    if args.show:
        parts = [json.loads(path.read_text(encoding="utf-8")) for path in args.show]
        numbers = joined(parts)
        if args.against:
            numbers = against(numbers, joined([json.loads(path.read_text(encoding="utf-8")) for path in args.against]))
        publish(replace(EXPERIMENT, name=name_of(numbers["settings"])), numbers, FIGURES)
    else:
        finish(lambda: run(args), args.output)


if __name__ == "__main__":
    main()
