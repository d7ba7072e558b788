"""Several short GRPO runs that differ in a few settings, one process each, kept as they finish so that a stop loses little.

The task and the model are the quickstart's. Of each seed there is one warm start, made once; every variant of that seed begins
from its weights, sees the same problems in the same order and samples the same number of completions.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from experiments.common import ROOT, environment
from groupwise.tracking.environment import usable_cpus

__all__ = ["CURVES", "Budget", "Job", "Variant", "carry_out", "grpo_job", "run_all", "warm_start_job", "warm_starts"]

CURVES = ("accuracy/strict", "reward/mean", "policy/loss", "policy/kl", "policy/entropy", "optimizer/grad_norm", "time/step_s",
          "rollout/staleness", "policy/sampler_mismatch", "policy/correction_cut", "policy/clip_share",
          "time/wait_s", "time/sample_s", "time/learn_s")  # fmt: skip
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

    def settings(self) -> list[str]:
        return [
            f"training.steps={self.steps}",
            f"rollout.prompts_per_step={self.prompts_per_step}",
            f"rollout.completions_per_prompt={self.completions_per_prompt}",
            f"evaluation.every={self.evaluate_every}",
            f"evaluation.problems={self.problems}",
        ]


@dataclass(frozen=True)
class Variant:
    """What a run does differently: settings that win over recipe and budget."""

    name: str
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class Job:
    """One process: a run of the quickstart recipe with ``settings``, whose numbers go to ``result``."""

    name: str
    settings: tuple[str, ...]
    result: str
    keep_model: str | None = None
    """Folder for the trained model; by default it is thrown away."""

    @property
    def done(self) -> bool:
        """Whether there is a result of exactly these settings."""
        try:
            found = json.loads(Path(self.result).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return False
        return found["settings"] == list(self.settings) and (self.keep_model is None or Path(self.keep_model).is_dir())


COMMON = ("evaluation.modes=[sampled]", "evaluation.at_start=false", "evaluation.show=0", "output.log_completions=0",
          "training.micro_batch_tokens=4096")  # fmt: skip
"""Settings of all runs. The size of micro-batches changes memory, not the gradient."""


def warm_start_job(seed: int, budget: Budget, work: Path, settings: Sequence[str] = ()) -> Job:
    """The seed's shared starting point: the recipe's warm start alone, judged as all runs are."""
    name = f"warm-start-{seed}"
    problems = f"evaluation.problems={budget.problems}"
    given = (*COMMON, problems, *settings, f"training.seed={seed}", "training.steps=0")
    return Job(name, given, str(work / f"{name}.json"), keep_model=str(work / f"{name}.model"))


def warm_starts(seeds: Sequence[int], budget: Budget, work: Path, settings: Sequence[str] = ()) -> dict[int, Path]:
    """The folders of the seeds' starting points, made where they are not there yet."""
    jobs = {seed: warm_start_job(seed, budget, work, settings) for seed in seeds}
    if failed := _do([*jobs.values()], jobs=1):
        raise SystemExit(f"{', '.join(failed)} failed: see the logs in {work}")
    return {seed: Path(str(job.keep_model)) for seed, job in jobs.items()}


def grpo_job(variant: Variant, seed: int, budget: Budget, work: Path, settings: Sequence[str] = ()) -> Job:
    """GRPO as ``variant`` has it, from the seed's warm-started weights."""
    start = f"model.name={work / f'warm-start-{seed}.model'}"
    given = (*COMMON, *budget.settings(), *settings, f"training.seed={seed}", start, "warm_start.steps=0", *variant.settings)
    name = f"{variant.name}-{seed}"
    return Job(name, given, str(work / f"{name}.json"))


def run_all(
    variants: Sequence[Variant], seeds: Sequence[int], budget: Budget, work: Path, *, jobs: int, settings: Sequence[str] = ()
) -> dict[str, Any]:
    """Do what is not done yet, ``jobs`` processes at a time, and gather the numbers of every variant and seed.

    Stopped and called again with the same arguments, it goes on with the runs that are not finished; with ``jobs`` 0 it only gathers.
    Runs without a result are listed as ``missing``. The environment is that of the last run.
    """
    work = work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    starts = [warm_start_job(seed, budget, work, settings) for seed in seeds]
    runs = {(v.name, seed): grpo_job(v, seed, budget, work, settings) for seed in seeds for v in variants}
    failed = [*_do(starts, jobs), *_do([*runs.values()], jobs)] if jobs else []
    finished = [job for job in runs.values() if job.done]
    if not finished:
        raise SystemExit("no run is finished: see the logs in " + str(work))
    return {
        "budget": {**asdict(budget), "completions": budget.completions},
        "seeds": list(seeds),
        "starts": {str(seed): _result(job) for seed, job in zip(seeds, starts, strict=True) if job.done},
        "runs": {
            v.name: found
            for v in variants
            if (found := {str(s): _result(runs[v.name, s]) for s in seeds if runs[v.name, s].done})
        },
        "variants": {v.name: list(v.settings) for v in variants},
        "missing": [f"{v.name}-{seed}" for seed in seeds for v in variants if not runs[v.name, seed].done],
        "failed": failed,
        "environment": json.loads(Path(finished[-1].result).read_text(encoding="utf-8"))["environment"],
    }


def _result(job: Job) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(job.result).read_text(encoding="utf-8"))
    return {key: found[key] for key in ("curves", "evaluations", "seconds")}


def _do(jobs_to_do: Sequence[Job], jobs: int) -> list[str]:
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
    config = load_config("quickstart", [*job.settings, *([f"training.threads={threads}"] if threads else [])])
    scratch = Path(job.result).with_suffix(".run")
    shutil.rmtree(scratch, ignore_errors=True)  # what a run that was stopped may have left
    # Unchecked: some experiments make mistakes on purpose.
    outcome = train(config, recipe=job.name, run_folder=scratch, console=Console(width=100), check=False)
    logged = scratch / "metrics.jsonl"  # a warm start alone has none
    metrics = [json.loads(line) for line in logged.read_text(encoding="utf-8").splitlines()] if logged.exists() else []
    summary = outcome.summary
    found = {
        "name": job.name,
        "settings": list(job.settings),
        "curves": {key: _rounded([row.get(key) for row in metrics]) for key in CURVES if any(key in row for row in metrics)},
        "evaluations": [
            _judged(row, config.training.steps) for row in (*summary["training_evaluations"], *summary["evaluations"])
        ],
        "seconds": round(summary["seconds"], 1),
        "environment": begun,
    }
    if job.keep_model:
        shutil.rmtree(job.keep_model, ignore_errors=True)
        shutil.move(scratch / "final_model", job.keep_model)
    shutil.rmtree(scratch)
    aside = Path(job.result).with_suffix(".partial")
    aside.write_text(json.dumps(found, indent=1), encoding="utf-8")
    aside.rename(job.result)


def _rounded(numbers: Sequence[float | None]) -> list[float | None]:
    return [None if x is None else float(f"{x:.5g}") for x in numbers]


def _judged(row: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """An evaluation with the step after which it was made."""
    step = steps if row["stage"] == "final" else int(row["stage"].removeprefix("step-"))
    keys = ("n", "strict_accuracy", "format_rate", "stop_rate", "mean_tokens")
    return {"step": step, **{key: row[key] for key in keys}}


if __name__ == "__main__":
    given = json.loads(sys.argv[1])
    carry_out(Job(**{**given, "settings": tuple(given["settings"])}))
