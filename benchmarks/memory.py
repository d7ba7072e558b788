"""Peak memory as `groupwise plan` predicts it, against what a process really took: runs by phase, one process each.

By default two steps of each setting are trained, as ``groupwise bench`` does it (the second has everything: moments, gradients,
activations): completions reach the limit, as a plan assumes. ``--whole`` makes whole runs, as ``groupwise bench --whole`` does: from
loading to the final model, with a checkpoint after each step and an evaluation before the last one and at the end. ``--soak`` trains
many steps as they are written, so that completions end where the model ends them, with an evaluation and a checkpoint after every
fifth; the peak of the last ten steps stands beside that of the first ten. Both end with exit code 1 where a peak is more than 10% off its
plan, or the last ten steps take over 3% more than the first ten.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Result, finish, parser, print_table
from groupwise.config import load_config
from groupwise.distributed.launch import launch
from groupwise.planner import HARDWARE, make_plan
from groupwise.training.trial import planned_peaks, run_trial, trial_settings

__all__ = ["CASES", "main", "run"]

_SHARED = ("model.device=cpu", "warm_start.steps=0", "training.threads=1", "data.arithmetic.problems=200")
_STEPS = ("data.holdout=0", *trial_settings(steps=2))
_WHOLE = ("data.holdout=64", "evaluation.problems=64", *trial_settings(steps=3, whole=True))
_SOAK = (
    *trial_settings(steps=60, as_written=True, whole=True), "data.holdout=64", "evaluation.problems=64", "evaluation.every=5",
    "output.checkpoint_every=5", "warm_start.steps=6",
)  # fmt: skip
_SMALL = ("rollout.prompts_per_step=4", "rollout.completions_per_prompt=4", "rollout.max_completion_tokens=96")
CASES: dict[str, tuple[str, ...]] = {
    "quickstart as it is": ("data.holdout=250", "evaluation.problems=250", "warm_start.steps=3"),
    "4 x 4 x 96, one pass": _SMALL,
    "the same, 1,024 tokens a pass": (*_SMALL, "training.micro_batch_tokens=1024"),
    "the same, recomputed": (*_SMALL, "model.gradient_checkpointing=true"),
    "the same, with a reference": (*_SMALL, "algorithm.kl.beta=0.04"),
    "the same, fp32": (*_SMALL, "model.dtype=float32"),
    "the same, stochastic rounding": (*_SMALL, "optimizer.precision=stochastic"),
    "the same, LoRA": (*_SMALL, "model.lora={rank: 16, alpha: 32}"),
    "the same, LoRA recomputed": (*_SMALL, "model.lora={rank: 16, alpha: 32}", "model.gradient_checkpointing=true"),
    "the same, LoRA on a base of 8 bits": (*_SMALL, "model.lora={rank: 16, alpha: 32}", "model.quantization=8bit"),
    "the same, LoRA on a base of 4 bits": (*_SMALL, "model.lora={rank: 16, alpha: 32}", "model.quantization=4bit"),
    "8 x 8 x 64, 2,048 tokens a pass": ("rollout.max_completion_tokens=64", "training.micro_batch_tokens=2048"),
    "the same, 8-bit moments": (*_SMALL, "optimizer.precision=masters-8bit"),
    "8 x 8 x 64, 8-bit moments and a reference, 2,048 tokens a pass": (
        "rollout.max_completion_tokens=64", "training.micro_batch_tokens=2048", "optimizer.precision=masters-8bit",
        "algorithm.kl.beta=0.04",
    ),
    "8 x 8 x 64, LoRA on a base of 4 bits, 2,048 tokens a pass": (
        "rollout.max_completion_tokens=64", "training.micro_batch_tokens=2048", "model.lora={rank: 16, alpha: 32}",
        "model.quantization=4bit",
    ),
    "2 x 2 x 512, LoRA on a base of 8 bits, recomputed": (
        "rollout.prompts_per_step=2", "rollout.completions_per_prompt=2", "rollout.max_completion_tokens=512",
        "model.gradient_checkpointing=true", "model.lora={rank: 16, alpha: 32}", "model.quantization=8bit",
    ),
    "4 x 4 x 96, LoRA on a base of 4 bits, sampled by the module": (
        *_SMALL, "model.lora={rank: 16, alpha: 32}", "model.quantization=4bit", "rollout.engine=transformers",
    ),
    "the same, PPO with a critic of its own": (*_SMALL, "algorithm.preset=ppo", "algorithm.value.critic=copy", "algorithm.kl=null"),
    "the same, two processes": _SMALL,
    "the same, sampled a step ahead": (*_SMALL, "rollout.ahead=1"),
    "the same, two processes, FSDP2": (*_SMALL, "training.sharding=fsdp2"),
    "the same, two processes, FSDP2 and a reference": (*_SMALL, "training.sharding=fsdp2", "algorithm.kl.beta=0.04"),
    "the same, two processes, FSDP2 and LoRA": (*_SMALL, "training.sharding=fsdp2", "model.lora={rank: 16, alpha: 32}"),
    "4 x 4 x 96, two processes, FSDP2 and LoRA": (*_SMALL, "training.sharding=fsdp2", "model.lora={rank: 16, alpha: 32}"),
    "8 x 16 x 40, LoRA of rank 32": (
        "rollout.prompts_per_step=8", "rollout.completions_per_prompt=16", "rollout.max_completion_tokens=40",
        "model.lora={rank: 32, alpha: 64}",
    ),
    "4 x 8 x 24, LoRA of rank 32 on a base of 8 bits, recomputed": (
        "rollout.prompts_per_step=4", "rollout.completions_per_prompt=8", "rollout.max_completion_tokens=24",
        "model.lora={rank: 32, alpha: 64}", "model.quantization=8bit", "model.gradient_checkpointing=true",
    ),
    "2 x 2 x 1,024, recomputed": (
        "rollout.prompts_per_step=2", "rollout.completions_per_prompt=2", "rollout.max_completion_tokens=1024",
        "model.gradient_checkpointing=true",
    ),
    "8 x 8 x 80, one pass": ("rollout.max_completion_tokens=80",),
    "2 x 8 x 256, recomputed": (
        "rollout.prompts_per_step=2", "rollout.max_completion_tokens=256", "model.gradient_checkpointing=true",
    ),
}  # fmt: skip
"""What is varied, and the settings."""
_PROCESSES = re.compile(r"\btwo processes\b")


def options() -> argparse.ArgumentParser:
    out = parser("memory", __doc__)
    out.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    out.add_argument("--recipe", default="quickstart", help="what the cases are variations of")
    kind = out.add_mutually_exclusive_group()
    kind.add_argument("--whole", action="store_true", help="whole runs, from loading to the final model")
    kind.add_argument("--soak", action="store_true", help="sixty steps as they are written, with evaluations and checkpoints")
    out.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="settings after those of the cases")
    out.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    out.add_argument("--worker", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return out


def work(settings: Sequence[str], whole: bool) -> dict[str, Any]:
    """One run, of this process and those that were started with it: what the trial found."""
    from rich.console import Console

    recipe, *overrides = settings
    return run_trial(load_config(recipe, overrides), Console(quiet=True), whole=whole).to_json()


def measured(args: argparse.Namespace, overrides: Sequence[str], processes: int) -> dict[str, Any]:
    """Of a run in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        whole = ["--whole"] if args.whole or args.soak else []
        command = [sys.executable, "-m", "benchmarks.memory", "--into", folder, *whole, "--worker", args.recipe, *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": os.pathsep.join(sys.path)}
        if processes == 1:
            subprocess.run(command, cwd=ROOT, env=environment, check=True)
        elif launch(command, processes, environment):
            raise SystemExit(f"the run of {processes} processes failed")
        return dict(json.loads((Path(folder) / "0.json").read_text(encoding="utf-8")))


def run(args: argparse.Namespace) -> Result:
    rows, details = [], {}
    kind = _WHOLE if args.whole else _SOAK if args.soak else _STEPS
    for name in args.cases:
        overrides, processes = [*_SHARED, *kind, *CASES[name], *args.set], 2 if _PROCESSES.search(name) else 1
        found = measured(args, overrides, processes)
        config = load_config(args.recipe, overrides)
        made = make_plan(config, HARDWARE["cpu"], prompt_tokens=found["prompt_tokens"], world_size=processes)
        phases = planned_peaks(phase for phase in made.phases if args.whole or args.soak or phase.name not in _AROUND)
        predicted, peak = max(phases.values()), found["peak_bytes"]
        both = {phase: {"predicted_bytes": phases.get(phase), "bytes": size} for phase, size in found["phase_bytes"].items()}
        details[name] = {
            **found,
            "predicted_bytes": predicted,
            "ratio": peak / predicted,
            "phases": both,
            "processes": processes,
            "settings": overrides,
        }
        rows.append([name, *_gib(predicted, peak)])
        rows += [[f"  {phase}", *_gib(of["predicted_bytes"], of["bytes"])] for phase, of in both.items()]
        if args.soak:
            first, last, growth = first_and_last(found["step_bytes"])
            rows.append(["  steps: the last ten, the first ten", last / 2**30, first / 2**30, growth])
        parts = (
            f"{one['bytes'] / 2**30:.2f} {phase} ({(one['predicted_bytes'] or 0) / 2**30:.2f})" for phase, one in both.items()
        )
        said = f"{name}: {predicted / 2**30:.2f} GiB predicted, {peak / 2**30:.2f} measured; {', '.join(parts)}"
        print(said, file=sys.stderr, flush=True)
    print_table("Peak memory of the process, GiB", ("settings", "predicted", "measured", "measured / predicted"), rows)
    worst = max((one["ratio"] for one in details.values()), key=lambda ratio: abs(ratio - 1))
    return Result("memory", worst, None, None, "measured / predicted, the worst", {"recipe": args.recipe}, details)


def first_and_last(step_bytes: Sequence[int]) -> tuple[int, int, float]:
    """The peaks of the first ten steps and of the last ten, and the second's ratio to the first."""
    first, last = max(step_bytes[:10]), max(step_bytes[-10:])
    return first, last, last / first


def beyond_bounds(details: Mapping[str, Mapping[str, Any]], soak: bool) -> list[str]:
    """What whole runs may not show: a peak more than 10% off its plan, or a soak whose last ten steps take over 3% more than its first."""
    said = [
        f"{name}: measured / planned is {one['ratio']:.2f}, but must be 0.9 to 1.1"
        for name, one in details.items() if not 0.9 <= one["ratio"] <= 1.1
    ]  # fmt: skip
    for name, one in details.items() if soak else ():
        if (growth := first_and_last(one["step_bytes"])[2]) > 1.03:
            said.append(f"{name}: the last ten steps take {growth:.2f} times what the first ten took, but may take 1.03 times")
    return said


_AROUND = ("evaluation", "final model")
"""Planned phases that steps alone do not have."""


def _gib(predicted: int | None, measured: int) -> list[Any]:
    if predicted is None:
        return ["-", measured / 2**30, "-"]
    return [predicted / 2**30, measured / 2**30, measured / predicted]


def main() -> None:
    args = options().parse_args()
    if args.worker:
        found = json.dumps(work(args.worker, args.whole))
        (args.into / f"{os.environ.get('RANK', '0')}.json").write_text(found, encoding="utf-8")
        return
    result = finish(lambda: run(args), args.output)
    if (args.whole or args.soak) and (said := beyond_bounds(result.details, args.soak)):
        raise SystemExit("\n".join(said))


if __name__ == "__main__":
    main()
