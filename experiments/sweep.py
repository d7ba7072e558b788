"""What do token budget, packing and the number of processes change? Time and memory, and no number that is learnt.

    python -m experiments.sweep                              # measure; writes docs/figures/sweep.json and sweep.svg and the table
    python -m experiments.sweep --redraw

One batch of the real small model (4 prompts x 4 completions of up to 96 tokens) is learnt from at every budget of
``training.micro_batch_tokens``, packed (each prompt once for its group, no padding) and as padded rows of the model's own module, by one
process with two threads and by two with one. Every setting's gradient is compared with the first one's.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.common import ROOT, Experiment, describe, main, markdown_table
from groupwise.distributed.launch import launch
from groupwise.models.embedded import ensure_embedded_model

__all__ = ["EXPERIMENT", "draw", "measure", "report"]

BUDGETS = (128, 256, 512, 1024)
DTYPES = ("float32", "bfloat16")
"""The gradients are held against each other in both; time and memory are those of the last."""
SETTINGS = {"packed": True, "padded rows": False}
SIZES: dict[str, Any] = {"groups": 4, "completions": 4, "max_tokens": 96, "repeats": 3}
CHECKED: dict[str, Any] = {"groups": 2, "completions": 3, "max_tokens": 48, "repeats": 0}
"""The batch in the first precision, in which only gradients are compared, at the smallest and the largest budget."""


def measure(
    model: str | None = None,
    budgets: Sequence[int] = BUDGETS,
    sizes: Mapping[str, Any] = SIZES,
    cores: int = 2,
    work: Path = ROOT / "runs" / "sweep",
) -> dict[str, Any]:
    """Every combination in processes of its own, one after the other; the same batch for all of a precision.

    Finished lines are kept in ``work`` until all are there, so that a stop loses one of them.
    """
    model = model or str(ensure_embedded_model())
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        folder = work.resolve() / dtype
        folder.mkdir(parents=True, exist_ok=True)
        given = {**sizes, "model": model, "dtype": dtype, "budgets": sorted(budgets), "folder": str(folder)}
        if dtype != DTYPES[-1]:
            given |= {**CHECKED, "budgets": [min(budgets), max(budgets)]}
        found[dtype] = {
            f"{name}, {count} process{'es' if count > 1 else ''}": _line(
                {**given, "packed": packed, "threads": max(1, cores // count)}, count
            )
            for name, packed in SETTINGS.items()
            for count in (1, 2)
        }
        batch = json.loads((folder / "batch.json").read_text(encoding="utf-8"))
        tokens = sum(len(completion["token_ids"]) for group in batch for completion in group)
    shutil.rmtree(work)
    return {"curves": found, "sizes": dict(sizes), "completion_tokens": tokens, "cores": cores}


def _line(given: Mapping[str, Any], processes: int) -> list[dict[str, Any]]:
    """As ``_run``, unless the same was done before and is kept."""
    kept = Path(given["folder"]) / f"line-{given['packed']}-{processes}.json"
    if kept.exists():
        before = json.loads(kept.read_text(encoding="utf-8"))
        if before["given"] == dict(given):
            return before["points"]  # type: ignore[no-any-return]
    points = _run(given, processes)
    kept.write_text(json.dumps({"given": dict(given), "points": points}), encoding="utf-8")
    print(f"{given['dtype']}, {'packed' if given['packed'] else 'padded'}, {processes}: done", flush=True)
    return points


def _run(given: Mapping[str, Any], processes: int) -> list[dict[str, Any]]:
    """The points of one line; of several processes the slowest's time, the largest's memory, and both gradients' distance."""
    folder = Path(given["folder"])
    (folder / "settings.json").write_text(json.dumps(dict(given)), encoding="utf-8")
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    surroundings = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    surroundings |= {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": str(given["threads"])}
    code = launch([sys.executable, "-m", "experiments.sweep_worker", str(folder / "settings.json")], processes, surroundings)
    if code:
        raise SystemExit(code)
    ranks = [json.loads((folder / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(processes)]
    return [
        {
            "budget": points[0]["budget"],
            **({"seconds": round(max(p["seconds"] for p in points), 4)} if "seconds" in points[0] else {}),
            **({"peak_gib": round(max(p["peak_bytes"] for p in points) / 2**30, 4)} if "peak_bytes" in points[0] else {}),
            "passes": sum(p["passes"] for p in points),
            "loss": points[0]["loss"],
            "gradient_difference": max(p["gradient_difference"] for p in points),
        }
        for points in zip(*ranks, strict=True)
    ]


def draw(numbers: Mapping[str, Any], path: Path) -> None:
    """Time and memory against the token budget, a line per setting."""
    from experiments.style import COLOURS, figure

    curves = numbers["curves"][DTYPES[-1]]
    with figure(path, ["seconds of an update", "peak memory of a process, GiB"], height=3.4) as axes:
        for (name, points), colour in zip(curves.items(), COLOURS, strict=False):
            style = "--" if "2 processes" in name else "-"
            for axis, key in zip(axes, ("seconds", "peak_gib"), strict=True):
                axis.plot([p["budget"] for p in points], [p[key] for p in points], style, marker="o", color=colour, label=name)
        for axis in axes:
            axis.set_xscale("log", base=2)
            axis.set_xticks([p["budget"] for p in points], [f"{p['budget']:,}" for p in points])
            axis.set_xlabel("training.micro_batch_tokens")
            axis.set_ylim(bottom=0)
        axes[0].legend()


def report(numbers: Mapping[str, Any]) -> str:
    """Figure, table, and by how much gradients and losses differ."""
    curves, sizes = numbers["curves"], numbers["sizes"]
    budgets = [p["budget"] for p in next(iter(curves[DTYPES[-1]].values()))]
    rows = [
        [name, *(f"{p['seconds']:.2f} s, {p['peak_gib']:.2f} GiB" for p in points)] for name, points in curves[DTYPES[-1]].items()
    ]
    differences = {
        dtype: (
            max(p["gradient_difference"] for points in lines.values() for p in points),
            max(abs(p["loss"] - next(iter(lines.values()))[0]["loss"]) for points in lines.values() for p in points),
        )
        for dtype, lines in curves.items()
    }
    said = "; ".join(
        f"in {dtype} the gradient differs by at most {gradient:.1e} of its norm, the loss by {loss:.1e}"
        f"{'' if dtype == DTYPES[-1] else ' (a smaller batch, smallest and largest budget)'}"
        for dtype, (gradient, loss) in differences.items()
    )
    return "\n\n".join(
        [
            "![Seconds of an update and peak memory against the token budget](../docs/figures/sweep.svg)",
            markdown_table(["", *(f"{budget:,} tokens" for budget in budgets)], rows),
            f"One update on {sizes['groups']} prompts x {sizes['completions']} completions, {numbers['completion_tokens']:,} completion "
            f"tokens, bfloat16 weights with fp32 masters, no reference; median of {sizes['repeats']}; {numbers['cores']} threads in all. "
            "Memory: the larger process's. A budget counts each prompt once for its group; padded rows repeat it.",
            f"Every setting has the gradient of the first: {said}. {describe(numbers)}",
        ]
    )


EXPERIMENT = Experiment("sweep", measure, draw, report)

if __name__ == "__main__":
    main(EXPERIMENT)
