"""Peak memory as `groupwise plan` predicts it, against what a process really took: short runs of the embedded model, one process each.

Two steps of each setting are trained (the second has everything: moments, gradients, activations). The temperature is so high that
completions are noise, which hardly ever ends by itself: they reach the limit, as a plan assumes; rewards are a hash of the text, so that
every group has something to learn from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, Result, finish, parser, print_table
from groupwise.config import load_config
from groupwise.planner import HARDWARE, make_plan

__all__ = ["CASES", "main", "run"]

_SHARED = (
    "model.device=cpu", "warm_start.steps=0", "data.holdout=0", "training.steps=2", "training.threads=1", "rollout.temperature=3",
    "data.arithmetic.problems=200", "output.log_completions=0",
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
    "8 x 8 x 64, 2,048 tokens a pass": ("rollout.max_completion_tokens=64", "training.micro_batch_tokens=2048"),
    "8 x 8 x 80, one pass": ("rollout.max_completion_tokens=80",),
    "2 x 8 x 256, recomputed": (
        "rollout.prompts_per_step=2", "rollout.max_completion_tokens=256", "model.gradient_checkpointing=true",
    ),
}  # fmt: skip
"""What is varied, and the settings."""


def options() -> argparse.ArgumentParser:
    out = parser("memory", __doc__)
    out.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    out.add_argument("--recipe", default="quickstart", help="what the cases are variations of")
    out.add_argument("--worker", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return out


def by_hash(completions: Sequence[Any], **_: Any) -> list[float]:
    """0 or 1, as good as drawn."""
    return [float(hashlib.md5(str(text).encode()).digest()[0] % 2) for text in completions]


def work(settings: Sequence[str]) -> dict[str, Any]:
    """One run in this process; peak bytes and the lengths there really were."""
    from rich.console import Console

    from groupwise.memory import peak_memory_bytes
    from groupwise.training.loop import train

    recipe, *overrides = settings
    lengths: list[tuple[int, int]] = []

    def note(report: Any) -> None:
        lengths.extend((len(g.prompt.token_ids), len(c.token_ids)) for g in report.groups for c in g.completions)

    with tempfile.TemporaryDirectory() as folder:
        train(
            load_config(recipe, overrides), run_folder=Path(folder) / "run", rewards={"by_hash": by_hash},
            console=Console(quiet=True), on_step=note,
        )  # fmt: skip
    return {
        "peak_bytes": peak_memory_bytes(),
        "prompt_tokens": max(prompt for prompt, _ in lengths),
        "mean_completion_tokens": sum(completion for _, completion in lengths) / len(lengths),
    }


def run(args: argparse.Namespace) -> Result:
    rows, details = [], {}
    for name in args.cases:
        overrides = [*_SHARED, *CASES[name]]
        command = [sys.executable, "-m", "benchmarks.memory", "--worker", args.recipe, *overrides]
        environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        measured = json.loads(done.stdout.splitlines()[-1])
        made = make_plan(load_config(args.recipe, overrides), HARDWARE["cpu"], prompt_tokens=measured["prompt_tokens"])
        predicted, peak = made.peak.bytes, measured["peak_bytes"]
        details[name] = {
            **measured,
            "predicted_bytes": predicted,
            "ratio": predicted / peak,
            "phase": made.peak.name,
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
        print(json.dumps(work(args.worker)))
        return
    finish(run(args), args.output)


if __name__ == "__main__":
    main()
