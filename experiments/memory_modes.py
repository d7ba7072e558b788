"""What do the modes that save memory cost, and do they learn? The quickstart in each of them, with numbers up to 15: accuracy, peak memory.

Each mode is one process, so that its peak is its own: the highest resident memory between the start of training and its end, sampling and
learning together. Runs that are finished are kept, and a command that was stopped goes on with the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.common import FIGURES, PAGE, ROOT, describe, environment, markdown_table, write_block
from experiments.comparison import UP_TO_15
from experiments.runs import config_hash
from experiments.runs import settings_of as settings_of_recipe
from groupwise.tracking.environment import installed_version

__all__ = ["MODES", "Mode", "main", "report"]

NAME = "memory_modes"
ADAPTER = ("model.lora={rank: 16, alpha: 32}", "optimizer.learning_rate=2e-4", "warm_start.learning_rate=5e-4")
"""An adapter, and the rates it wants here: ten times those of the quickstart."""


@dataclass(frozen=True)
class Mode:
    """A way to train: its name in the table, and how its settings differ from the quickstart's."""

    name: str
    title: str
    settings: tuple[str, ...] = ()


MODES = (
    Mode("full", "all weights, fp32 masters and moments"),
    Mode("full-8bit-moments", "all weights, 8-bit moments", ("optimizer.precision=masters-8bit",)),
    Mode("lora", "LoRA", ADAPTER),
    Mode("lora-8bit-base", "LoRA on an 8-bit base", (*ADAPTER, "model.quantization=8bit")),
    Mode("qlora", "QLoRA: LoRA on a 4-bit base", (*ADAPTER, "model.quantization=4bit")),
)


def settings_of(mode: Mode, steps: int, problems: int, micro_batch_tokens: int) -> list[str]:
    """All that a run of ``mode`` changes in the recipe."""
    return [
        f"training.steps={steps}",
        f"evaluation.problems={problems}",
        f"training.micro_batch_tokens={micro_batch_tokens}",
        "evaluation.modes=[sampled]",
        "evaluation.show=0",
        *settings_of_recipe("quickstart"),
        *UP_TO_15,
        *mode.settings,
    ]


def carry_out(mode: Mode, settings: Sequence[str], work: Path) -> dict[str, Any]:
    """The numbers of one run, from its file if it was made with these settings and this recipe before."""
    if kept := _kept(mode, settings, work):
        return kept
    result, conditions = work / f"{mode.name}.json", _conditions(settings)
    folder = work / mode.name
    shutil.rmtree(folder, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    begun, started = environment(), time.perf_counter()
    paths = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    with (work / f"{mode.name}.log").open("w", encoding="utf-8") as log:
        words = [sys.executable, "-m", "groupwise", "train", "quickstart", *settings, "--run-folder", str(folder)]
        subprocess.run(words, env={**os.environ, "PYTHONPATH": paths}, stdout=log, stderr=subprocess.STDOUT, check=True)
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    judged = {row["stage"]: row for row in summary["evaluations"]}
    found = {
        "name": mode.name,
        **conditions,
        "accuracy": {stage: judged[stage]["strict_accuracy"] for stage in ("base", "warm_start", "final")},
        "interval": judged["final"]["strict_interval"],
        "problems": judged["final"]["n"],
        "peak_memory_gib": summary["peak_memory_gib"],
        "trained_bytes": _trained_bytes(folder),
        "seconds": round(time.perf_counter() - started),
        "environment": begun | {"bitsandbytes": installed_version("bitsandbytes"), "peft": installed_version("peft")},
    }
    result.write_text(json.dumps(found, indent=1), encoding="utf-8")
    shutil.rmtree(folder)
    return found


def _conditions(settings: Sequence[str]) -> dict[str, Any]:
    return {"settings": list(settings), "config": config_hash("quickstart")}


def _kept(mode: Mode, settings: Sequence[str], work: Path) -> dict[str, Any] | None:
    result = work / f"{mode.name}.json"
    kept: dict[str, Any] = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {}
    return kept if _conditions(settings).items() <= kept.items() else None


def _trained_bytes(folder: Path) -> int:
    """Of what was learnt, as it is saved: the adapter's file, or the model's."""
    adapter = folder / "final_model" / "adapter" / "adapter_model.safetensors"
    files = [adapter] if adapter.is_file() else list((folder / "final_model").glob("*.safetensors"))
    return sum(file.stat().st_size for file in files)


def report(numbers: Mapping[str, Any]) -> str:
    """The table, and how it was measured."""
    titles = {mode.name: mode.title for mode in MODES}
    rows = []
    for run in numbers["runs"]:
        low, high = run["interval"]
        accuracy = run["accuracy"]
        rows.append([
            titles[run["name"]], f"{run['peak_memory_gib']:.2f} GiB", f"{run['trained_bytes'] / 1e6:.0f} MB",
            f"{accuracy['base']:.0%}", f"{accuracy['warm_start']:.0%}", f"**{accuracy['final']:.0%}** ({low:.0%} to {high:.0%})",
        ])  # fmt: skip
    header = ["mode", "peak memory", "what was learnt, on disk", "base", "after the warm start", "after GRPO"]
    words = (
        f"The quickstart with numbers up to 15 and {numbers['steps']} steps of 8 x 8 completions; strict accuracy on "
        f"{numbers['problems']} held-out problems, one sample each, with its 95% interval. "
        f"Micro-batches of {numbers['micro_batch_tokens']:,} tokens; one run a mode, seed 0. "
    )
    last = numbers["environment"]
    packages = f"bitsandbytes {last['bitsandbytes']}, peft {last['peft']}."
    return f"\n{markdown_table(header, rows)}\n\n{words}{describe(numbers).removesuffix('.')}, {packages}\n"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """``python -m experiments.memory_modes [MODE ...]``: run what is not there yet, and write JSON and the table of RESULTS.md."""
    options = argparse.ArgumentParser(prog=f"python -m experiments.{NAME}")
    options.add_argument(
        "modes", nargs="*", metavar="MODE", help="of " + ", ".join(mode.name for mode in MODES) + "; by default all"
    )
    options.add_argument("--steps", type=int, default=40)
    options.add_argument("--problems", type=int, default=200)
    options.add_argument("--micro-batch-tokens", type=int, default=2048)
    options.add_argument("--work", type=Path, default=Path("runs") / NAME, help="folder of the runs' logs and numbers")
    options.add_argument("--out", type=Path, default=FIGURES, help="folder of the JSON file (docs/figures)")
    chosen = options.parse_args(arguments)
    if unknown := set(chosen.modes) - {mode.name for mode in MODES}:
        options.error(f"{', '.join(sorted(unknown))}: no such mode")
    runs = []
    for mode in MODES:
        settings = settings_of(mode, chosen.steps, chosen.problems, chosen.micro_batch_tokens)
        if not chosen.modes or mode.name in chosen.modes or _kept(mode, settings, chosen.work):
            runs.append(carry_out(mode, settings, chosen.work.resolve()))
            print(f"{mode.name}: {runs[-1]['accuracy']}, {runs[-1]['peak_memory_gib']} GiB, {runs[-1]['seconds']} s", flush=True)
    numbers = {
        "steps": chosen.steps, "problems": chosen.problems, "micro_batch_tokens": chosen.micro_batch_tokens, "runs": runs,
        "environment": runs[-1]["environment"],
    }  # fmt: skip
    chosen.out.mkdir(parents=True, exist_ok=True)
    (chosen.out / f"{NAME}.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    if chosen.out.resolve() == FIGURES:
        write_block(PAGE, NAME, report(numbers))
    print(report(numbers))
    return numbers


if __name__ == "__main__":
    main()
