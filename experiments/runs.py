"""Several short GRPO runs that differ in a few settings, one process each, kept as they finish so that a stop loses little.

The task and the model are the recipe's, the quickstart's by default. Of each seed there is one warm start, made once; every variant of
that seed begins from its weights and sees the same problems in the same order. (A recipe without a warm start begins from its model.)
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from experiments.common import ROOT, environment
from groupwise.tracking.environment import usable_cpus

__all__ = [
    "CURVES",
    "Budget",
    "Job",
    "Variant",
    "carry_out",
    "carry_out_all",
    "config_hash",
    "grpo_job",
    "run_all",
    "settings_of",
    "warm_start_job",
    "warm_starts",
]

CURVES = ("accuracy/strict", "reward/mean", "policy/loss", "policy/kl", "policy/entropy", "optimizer/grad_norm", "time/step_s",
          "rollout/staleness", "policy/sampler_mismatch", "policy/correction_cut", "policy/clip_share",
          "time/wait_s", "time/sample_s", "time/learn_s", "completions/truncated", "completions/stop_rate")  # fmt: skip
"""What is kept of each step, where it is logged."""


@dataclass(frozen=True)
class Budget:
    """What every run of a comparison may use."""

    steps: int = 20
    prompts_per_step: int = 4
    completions_per_prompt: int = 8
    evaluate_every: int = 10
    problems: int = 120
    """Held-out problems of each evaluation, one completion each at temperature 1, the same ones with the same seed in all runs."""

    @property
    def completions(self) -> int:
        """Completions sampled for learning, over the whole run."""
        return self.steps * self.prompts_per_step * self.completions_per_prompt

    def to_json(self) -> dict[str, int]:
        return {**asdict(self), "completions": self.completions}

    def settings(self) -> list[str]:
        return [
            f"training.steps={self.steps}",
            f"rollout.prompts_per_step={self.prompts_per_step}",
            f"rollout.completions_per_prompt={self.completions_per_prompt}",
            f"evaluation.every={self.evaluate_every}",
            f"evaluation.problems={self.problems}",
        ]

    def accumulated(self, batches: int) -> Budget:
        """The same problems and completions with one update for so many batches. Raises SystemExit where steps do not divide by it."""
        if self.steps % batches or self.evaluate_every % batches:
            raise SystemExit(
                f"{self.steps} steps with an evaluation every {self.evaluate_every} do not divide into updates of {batches} batches: "
                f"give --steps and --evaluate-every multiples of {batches}"
            )
        return replace(
            self, steps=self.steps // batches, evaluate_every=self.evaluate_every // batches,
            prompts_per_step=self.prompts_per_step * batches,
        )  # fmt: skip


@dataclass(frozen=True)
class Variant:
    """What a run does differently: settings that win over recipe and budget."""

    name: str
    settings: tuple[str, ...] = ()
    start: tuple[str, ...] = ()
    """Settings of the warm start too: variants that agree in them share one."""
    accumulated: int = 1
    """Batches of the budget whose gradients make one update. Sampled by one policy, they are one batch of as many times the problems; that
    a sum has this many times a mean's length is nothing to Adam, nor to a clip that shortens both."""
    before: str | None = None
    """``Job.before`` of its runs; that of warm starts is the comparison's."""

    @property
    def made(self) -> dict[str, Any]:
        """What its numbers depend on beside settings."""
        return {"accumulated": self.accumulated, "before": self.before}


@dataclass(frozen=True)
class Job:
    """One process: a run of ``recipe`` with ``settings``, whose numbers go to ``result``."""

    name: str
    settings: tuple[str, ...]
    result: str
    keep_model: str | None = None
    """Folder for the trained model; by default it is thrown away."""
    recipe: str = "quickstart"
    before: str | None = None
    """``module:function`` that the process calls first, for what no setting can say."""

    @property
    def done(self) -> bool:
        """Whether there is a result of exactly these settings, and of the recipe as it is today."""
        try:
            found = json.loads(Path(self.result).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        same = all(found.get(key) == value for key, value in self.conditions.items())
        return same and (self.keep_model is None or Path(self.keep_model).is_dir())

    @property
    def conditions(self) -> dict[str, Any]:
        """What the numbers depend on."""
        return {"settings": list(self.settings), "recipe": self.recipe, "before": self.before, "config": config_hash(self.recipe)}


COMMON = ("evaluation.modes=[sampled]", "evaluation.at_start=false", "evaluation.show=0", "output.log_completions=0",
          "training.micro_batch_tokens=4096")  # fmt: skip
"""Settings of all runs. The size of micro-batches changes memory, not the gradient."""
REWARDED_BY_TWO = ("quickstart", "gsm8k-1.5b-cpu")
"""Recipes with other rewards now than when the runs on the pages were made: later runs have those too."""


def settings_of(recipe: str) -> tuple[str, ...]:
    """Settings of a recipe's runs that its file no longer has."""
    return ("rewards.functions=[correctness, format]",) if recipe in REWARDED_BY_TWO else ()


def config_hash(recipe: str) -> str:
    """What a recipe's runs set, shortly: its file changes while its name stays. Defaults are left out, since every version adds some."""
    from groupwise.config import load_config

    config = load_config(recipe, [*COMMON, *settings_of(recipe)])
    return hashlib.sha256(config.model_dump_json(exclude_unset=True).encode()).hexdigest()[:12]


def warm_start_job(
    seed: int, budget: Budget, work: Path, settings: Sequence[str] = (), start: Sequence[str] = (), recipe: str = "quickstart",
    before: str | None = None,
) -> Job:  # fmt: skip
    """The seed's shared starting point: the recipe's warm start alone, with ``start``, judged as all runs are.

    Where the recipe has no warm start, the untrained model is judged, and nothing is kept.
    """
    from groupwise import load_config

    name = f"warm-start-{seed}{_suffix(start)}"
    problems = f"evaluation.problems={budget.problems}"
    given = (*COMMON, *settings_of(recipe), problems, *settings, *start, f"training.seed={seed}", "training.steps=0")
    kept = str(work / f"{name}.model") if load_config(recipe, list(given)).warm_start.steps else None
    return Job(name, given, str(work / f"{name}.json"), kept, recipe, before)


def _suffix(start: Sequence[str]) -> str:
    return "".join("-" + re.sub(r"[^\w.]+", "-", word).strip("-") for word in start)


def warm_starts(
    seeds: Sequence[int], budget: Budget, work: Path, settings: Sequence[str] = (), recipe: str = "quickstart"
) -> dict[int, Path]:
    """The folders of the seeds' starting points, made where they are not there yet."""
    jobs = {seed: warm_start_job(seed, budget, work, settings, recipe=recipe) for seed in seeds}
    if failed := carry_out_all([*jobs.values()], jobs=1):
        raise SystemExit(f"{', '.join(failed)} failed: see the logs in {work}")
    return {seed: Path(str(job.keep_model)) for seed, job in jobs.items()}


def grpo_job(variant: Variant, seed: int, budget: Budget, work: Path, settings: Sequence[str], start: Job) -> Job:
    """GRPO as ``variant`` has it, from where ``start`` ends."""
    begin = [f"model.name={start.keep_model}", "warm_start.steps=0"] if start.keep_model else []
    cut = budget.accumulated(variant.accumulated).settings()
    common = (*COMMON, *settings_of(start.recipe))
    given = (*common, *cut, *settings, f"training.seed={seed}", *begin, *variant.start, *variant.settings)
    name = f"{variant.name}-{seed}"
    return Job(name, given, str(work / f"{name}.json"), recipe=start.recipe, before=variant.before)


def run_all(
    variants: Sequence[Variant], seeds: Sequence[int], budget: Budget, work: Path, *, jobs: int, settings: Sequence[str] = (),
    recipe: str = "quickstart", before: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Do what is not done yet, ``jobs`` processes at a time, and gather the numbers of every variant and seed.

    Stopped and called again with the same arguments, it goes on with the runs that are not finished; with ``jobs`` 0 it only gathers.
    Runs without a result are listed as ``missing``. The environment is that of the last run. ``before``: what processes of warm starts
    call first (``Job.before``). A run with ``output.checkpoint_every`` among its settings goes on from its newest checkpoint.
    """
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    starts = {
        (seed, start): warm_start_job(seed, budget, work, settings, start, recipe, before)
        for seed in seeds
        for start in dict.fromkeys(v.start for v in variants)
    }
    runs = {(v.name, seed): grpo_job(v, seed, budget, work, settings, starts[seed, v.start]) for seed in seeds for v in variants}
    failed = carry_out_all([*starts.values()], jobs) if jobs else []
    start_of = {v.name: v.start for v in variants}
    able = [job for (name, seed), job in runs.items() if starts[seed, start_of[name]].done]
    failed += carry_out_all(able, jobs) if jobs else []
    finished = [job for job in runs.values() if job.done]
    if not finished:
        raise SystemExit("no run is finished: see the logs in " + str(work))
    return {
        "budget": budget.to_json(),
        "seeds": list(seeds),
        "starts": {f"{seed}{_suffix(start)}": _result(job) for (seed, start), job in starts.items() if job.done},
        "start_of": {v.name: _suffix(v.start) for v in variants if v.start},
        "runs": {
            v.name: found
            for v in variants
            if (found := {str(s): _result(runs[v.name, s]) for s in seeds if runs[v.name, s].done})
        },
        "variants": {v.name: [*v.start, *v.settings] for v in variants},
        "made": {v.name: v.made for v in variants},
        "missing": [f"{v.name}-{seed}" for seed in seeds for v in variants if not runs[v.name, seed].done],
        "failed": failed,
        "environment": json.loads(Path(finished[-1].result).read_text(encoding="utf-8"))["environment"],
    }


def _result(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(job.result).read_text(encoding="utf-8"))
    return {key: found[key] for key in ("curves", "evaluations", "seconds")}


def carry_out_all(jobs_to_do: Sequence[Job], jobs: int) -> list[str]:
    """Run what is not done, ``jobs`` at a time; the names of those that failed."""
    waiting = [job for job in jobs_to_do if not job.done]
    if not waiting:
        return []
    threads = max(1, (usable_cpus() or 1) // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        outcomes = list(pool.map(lambda job: _process(job, threads), waiting))
    return [job.name for job, good in zip(waiting, outcomes, strict=True) if not good]


def _process(job: Job, threads: int) -> bool:
    """One job in a process of its own, with its share of the cores; its output goes beside its result."""
    started = time.perf_counter()
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    surroundings = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with Path(job.result).with_suffix(".log").open("w", encoding="utf-8") as log:
        words = [sys.executable, "-m", "experiments.runs", json.dumps(asdict(job))]
        code = subprocess.run(words, env=surroundings, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    good = code == 0 and job.done
    print(f"{job.name}: {'done' if good else f'FAILED, see {log.name}'} after {time.perf_counter() - started:.0f} s", flush=True)
    return good


def carry_out(job: Job) -> None:
    """What a job's process does: the run, and its numbers into one file at the very end."""
    from rich.console import Console

    from groupwise import load_config, train

    threads, begun = os.environ.get("OMP_NUM_THREADS"), environment()
    if job.before:
        module, _, function = job.before.partition(":")
        getattr(importlib.import_module(module), function)()
    config = load_config(job.recipe, [*job.settings, *([f"training.threads={threads}"] if threads else [])])
    scratch, begun_by = Path(job.result).with_suffix(".run"), Path(job.result).with_suffix(".begun")
    conditions = job.conditions  # of now: the recipe may be edited while the run goes on
    text = json.dumps(conditions)
    resume = config.output.checkpoint_every > 0 and begun_by.exists() and begun_by.read_text(encoding="utf-8") == text
    if not resume:
        shutil.rmtree(scratch, ignore_errors=True)  # what a run that was stopped may have left
        begun_by.write_text(text, encoding="utf-8")
    # Unchecked: some experiments make mistakes on purpose.
    outcome = train(config, recipe=job.name, run_folder=scratch, console=Console(width=100), check=False, resume=resume)
    logged = scratch / "metrics.jsonl"  # a warm start alone has none
    metrics = [json.loads(line) for line in logged.read_text(encoding="utf-8").splitlines()] if logged.exists() else []
    summary = outcome.summary
    found = {
        "name": job.name,
        **conditions,
        "curves": {key: _rounded([row.get(key) for row in metrics]) for key in CURVES if any(key in row for row in metrics)},
        "evaluations": sorted(
            (_judged(row, config.training.steps) for row in (*summary["training_evaluations"], *summary["evaluations"])),
            key=itemgetter("step"),
        ),
        "seconds": round(summary["seconds"], 1),
        "environment": begun,
    }
    if job.keep_model:
        shutil.rmtree(job.keep_model, ignore_errors=True)
        shutil.move(scratch / "final_model", job.keep_model)
    aside = Path(job.result).with_suffix(".partial")
    aside.write_text(json.dumps(found, indent=1), encoding="utf-8")
    aside.rename(job.result)
    shutil.rmtree(scratch)
    begun_by.unlink()


def _rounded(numbers: Sequence[float | None]) -> list[float | None]:
    return [None if x is None else float(f"{x:.5g}") for x in numbers]


def _judged(row: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """An evaluation with the step after which it was made."""
    stages = {"base": 0, "warm_start": 0, "final": steps}
    step = stages[row["stage"]] if row["stage"] in stages else int(row["stage"].removeprefix("step-"))
    keys = ("n", "strict_accuracy", "format_rate", "stop_rate", "mean_tokens")
    return {"step": step, **{key: row[key] for key in keys}}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    carry_out(Job(**{**given, "settings": tuple(given["settings"])}))
