"""Peak memory as `groupwise plan` predicts it, against what a process really took: short runs of the embedded model, one process each.

Two steps of each setting are trained, as ``groupwise bench`` does it (the second has everything: moments, gradients, activations):
completions reach the limit, as a plan assumes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Result, finish, parser, print_table
from groupwise.config import load_config
from groupwise.distributed.launch import launch
from groupwise.planner import HARDWARE, make_plan
from groupwise.training.trial import run_trial, trial_settings

__all__ = ["CASES", "main", "run"]

_SHARED = (
    "model.device=cpu", "warm_start.steps=0", "data.holdout=0", "training.threads=1", "data.arithmetic.problems=200",
    *trial_settings(steps=2),
)  # fmt: skip
_SMALL = ("rollout.prompts_per_step=4", "rollout.completions_per_prompt=4", "rollout.max_completion_tokens=96")
CASES: dict[str, tuple[str, ...]] = {
    "4 x 4 x 96, one pass": _SMALL,
    "the same, 1,024 tokens a pass": (*_SMALL, "training.micro_batch_tokens=1024"),
    "the same, recomputed": (*_SMALL, "model.gradient_checkpointing=true"),
    "the same, with a reference": (*_SMALL, "algorithm.beta=0.04"),
    "the same, fp32": (*_SMALL, "model.dtype=float32"),
    "the same, stochastic rounding": (*_SMALL, "optimizer.precision=stochastic"),
    "the same, LoRA": (*_SMALL, "model.lora={rank: 16, alpha: 32}"),
    "the same, LoRA recomputed": (*_SMALL, "model.lora={rank: 16, alpha: 32}", "model.gradient_checkpointing=true"),
    "the same, LoRA on a base of 8 bits": (*_SMALL, "model.lora={rank: 16, alpha: 32}", "model.quantization=8bit"),
    "the same, LoRA on a base of 4 bits": (*_SMALL, "model.lora={rank: 16, alpha: 32}", "model.quantization=4bit"),
    "8 x 8 x 64, 2,048 tokens a pass": ("rollout.max_completion_tokens=64", "training.micro_batch_tokens=2048"),
    "the same, 8-bit moments": (*_SMALL, "optimizer.precision=masters-8bit"),
    "8 x 8 x 64, 8-bit moments and a reference, 2,048 tokens a pass": (
        "rollout.max_completion_tokens=64", "training.micro_batch_tokens=2048", "optimizer.precision=masters-8bit", "algorithm.beta=0.04",
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
    "the same, PPO with a critic of its own": (*_SMALL, "algorithm.preset=ppo", "algorithm.critic=copy", "algorithm.beta=0"),
    "the same, two processes": _SMALL,
    "the same, sampled a step ahead": (*_SMALL, "rollout.ahead=1"),
    "the same, two processes, FSDP2": (*_SMALL, "training.sharding=fsdp2"),
    "the same, two processes, FSDP2 and a reference": (*_SMALL, "training.sharding=fsdp2", "algorithm.beta=0.04"),
    "the same, two processes, FSDP2 and LoRA": (*_SMALL, "training.sharding=fsdp2", "model.lora={rank: 16, alpha: 32}"),
    "4 x 4 x 96, two processes, FSDP2 and LoRA": (*_SMALL, "training.sharding=fsdp2", "model.lora={rank: 16, alpha: 32}"),
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
    out.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    out.add_argument("--worker", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return out


def work(settings: Sequence[str]) -> dict[str, Any]:
    """One run, of this process and those that were started with it; peak bytes of the fullest, and the lengths there really were."""
    from rich.console import Console

    recipe, *overrides = settings
    found = run_trial(load_config(recipe, overrides), Console(quiet=True))
    return {
        "peak_bytes": found.peak_bytes,
        "prompt_tokens": found.prompt_tokens,
        "mean_completion_tokens": found.completion_tokens,
    }


def measured(args: argparse.Namespace, overrides: Sequence[str], processes: int) -> dict[str, Any]:
    """Of a run in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.memory", "--into", folder, "--worker", args.recipe, *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "PYTHONPATH": os.pathsep.join(sys.path)}
        if processes == 1:
            subprocess.run(command, cwd=ROOT, env=environment, check=True)
        elif launch(command, processes, environment):
            raise SystemExit(f"the run of {processes} processes failed")
        return dict(json.loads((Path(folder) / "0.json").read_text(encoding="utf-8")))


def run(args: argparse.Namespace) -> Result:
    rows, details = [], {}
    for name in args.cases:
        overrides, processes = [*_SHARED, *CASES[name]], 2 if _PROCESSES.search(name) else 1
        found = measured(args, overrides, processes)
        config = load_config(args.recipe, overrides)
        made = make_plan(config, HARDWARE["cpu"], prompt_tokens=found["prompt_tokens"], world_size=processes)
        predicted, peak = made.peak.bytes, found["peak_bytes"]
        details[name] = {
            **found,
            "predicted_bytes": predicted,
            "ratio": predicted / peak,
            "phase": made.peak.name,
            "processes": processes,
            "settings": overrides,
        }
        rows.append([name, predicted / 2**30, peak / 2**30, predicted / peak, made.peak.name])
        print(f"{name}: {predicted / 2**30:.2f} GiB predicted, {peak / 2**30:.2f} measured", file=sys.stderr, flush=True)
    print_table("Peak memory of the process, GiB", ("settings", "predicted", "measured", "ratio", "fullest while"), rows)
    worst = max((one["ratio"] for one in details.values()), key=lambda ratio: abs(ratio - 1))
    return Result("memory", worst, None, None, "predicted / measured, the worst", {"recipe": args.recipe}, details)


def main() -> None:
    args = options().parse_args()
    if args.worker:
        found = json.dumps(work(args.worker))
        (args.into / f"{os.environ.get('RANK', '0')}.json").write_text(found, encoding="utf-8")
        return
    finish(run(args), args.output)


if __name__ == "__main__":
    main()
