"""A whole GRPO step on workload W against TRL: seconds by phase, and peak memory.

Each side lives in a process of its own with the same threads and the same memory settings; they take turns, and change who goes
first. Two regimes: `natural`, where each side samples its own completions, and `forced`, where TRL's completions are given the very
lengths that ours have.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.common import Result, finish, median, parser, print_table, quotient
from benchmarks.workers import Worker
from groupwise.models.embedded import EMBEDDED_NAME, ensure_embedded_model

__all__ = ["main", "run"]

PHASES = ("sampling", "reference", "forward_backward", "optimiser", "rest")
_WARM_UP = 1
_BUSY = "import time; end = time.time() + 1800\nwhile time.time() < end: pass"
"""Another program that keeps a core busy; it ends by itself, should nobody be left to end it."""


def options() -> argparse.ArgumentParser:
    out = parser("step", __doc__)
    out.add_argument("--pairs", type=int, default=5, help="steps of each side in each regime, after one to warm up")
    out.add_argument("--regimes", nargs="+", choices=("natural", "forced"), default=["natural", "forced"])
    out.add_argument("--model", default=EMBEDDED_NAME, help="the embedded model, or a folder")
    out.add_argument("--groups", type=int, default=4, help="prompts")
    out.add_argument("--completions", type=int, default=8, help="completions of each prompt")
    out.add_argument("--max-tokens", type=int, default=128, help="longest completion")
    out.add_argument("--rank", type=int, default=0, help="an adapter of this rank in place of all weights; not with TRL")
    out.add_argument(
        "--malloc", choices=("keep", "default"), default="keep", help="glibc told to keep freed memory, or left alone"
    )
    out.add_argument(
        "--ours",
        nargs="+",
        default=[],
        metavar="SETTING",
        help="settings of groupwise's alone, such as training.micro_batch_tokens=1024",
    )
    out.add_argument("--ours-only", action="store_true", help="leave TRL out")
    out.add_argument(
        "--neighbour", action="store_true",
        help="in place of TRL: our step beside a process that keeps one core busy, with threads that give way and with a fixed number",
    )  # fmt: skip
    out.add_argument("--against", type=Path, metavar="CHECKOUT", help="in place of TRL: another checkout of groupwise")
    return out


def _workload(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of ``step_config``. What was not asked for is left out: earlier checkouts do not know it."""
    more = {name: value for name, value in (("rank", args.rank), ("ours", args.ours)) if value}
    return {"groups": args.groups, "completions": args.completions, "max_tokens": args.max_tokens, **more}


def against_a_checkout(args: argparse.Namespace) -> Result:
    """Steps of the same seeds by this checkout and by another, by turns; ``ratio`` is the other's time to ours, step by step."""
    model = str(ensure_embedded_model()) if args.model == EMBEDDED_NAME else args.model
    settings = {"role": "step", "model": model, "workload": _workload(args)}
    steps: dict[str, list[dict[str, Any]]] = {"this": [], "other": []}
    with ExitStack() as stack:
        workers = {
            side: stack.enter_context(
                Worker(
                    "benchmarks.ours_worker", settings, threads=args.threads, keep_memory=args.malloc == "keep", checkout=checkout
                )
            )
            for side, checkout in (("this", None), ("other", args.against))
        }
        for pair in range(-_WARM_UP, args.pairs):
            for side in sorted(workers, reverse=pair % 2 == 0):
                step = workers[side].ask(seed=pair + _WARM_UP)
                if pair >= 0:
                    steps[side].append(step)
    sides = {side: _summary(found) for side, found in steps.items()}
    rows: list[list[Any]] = [["whole step, s", *(s["step_s"] for s in sides.values()), _by_step(steps, lambda s: s["total"])]]
    for phase in PHASES[:-1]:
        ratio = _by_step({side: [s["phases"] for s in found] for side, found in steps.items()}, itemgetter(phase))
        rows.append([f"  {phase.replace('_', ' + ')}, s", *(s["phases_s"][phase] for s in sides.values()), ratio])
    rows.append(["peak memory, GiB", *(s["peak_memory_gib"] for s in sides.values()), None])
    print_table("Workload W, medians; ratio: the median over steps", ("", "this checkout", "the other", "ratio"), rows)
    shown = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    return Result("step against a checkout", rows[0][-1], rows[0][1], rows[0][2], "s/step", shown, {"steps": steps, **sides})


def _by_step(steps: dict[str, list[dict[str, Any]]], pick: Callable[[dict[str, Any]], float]) -> float:
    return median([pick(other) / pick(this) for this, other in zip(steps["this"], steps["other"], strict=True)])


def beside_a_neighbour(args: argparse.Namespace) -> Result:
    """Steps of the same seed, quiet and with a busy process beside them; ``ratio`` is that of fixed threads to ours, both disturbed."""
    model = str(ensure_embedded_model()) if args.model == EMBEDDED_NAME else args.model
    seconds: dict[str, dict[str, list[float]]] = {}
    for side, fixed in (("giving way", False), ("fixed threads", True)):
        settings = {"role": "step", "model": model, "workload": _workload(args), "fixed": fixed}
        with Worker("benchmarks.ours_worker", settings, threads=args.threads, keep_memory=args.malloc == "keep") as worker:
            worker.ask(seed=0)
            quiet = [worker.ask(seed=0)["total"] for _ in range(args.pairs)]
            neighbour = subprocess.Popen([sys.executable, "-c", _BUSY], stdout=subprocess.DEVNULL, start_new_session=True)
            try:
                disturbed = [worker.ask(seed=0)["total"] for _ in range(args.pairs)]
            finally:
                neighbour.kill()
                neighbour.wait()
            seconds[side] = {"quiet": quiet, "beside a neighbour": disturbed}
    middles = {side: {when: median(times) for when, times in by.items()} for side, by in seconds.items()}
    rows = [[side, m["quiet"], m["beside a neighbour"], m["beside a neighbour"] / m["quiet"]] for side, m in middles.items()]
    print_table("Workload W, seconds a step, medians", ("threads", "quiet", "neighbour", "times as long"), rows)
    ours, theirs = (m["beside a neighbour"] for m in middles.values())
    shown = {key: str(value) if key == "output" else value for key, value in vars(args).items()}
    return Result("step beside a neighbour", quotient(theirs, ours), ours, theirs, "s/step", shown, {"all_s": seconds})


def run(args: argparse.Namespace) -> Result:
    """Measure, print the table, and return the result (not yet finished)."""
    model = str(ensure_embedded_model()) if args.model == EMBEDDED_NAME else args.model
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "role": "step",
            "model": model,
            "folder": folder,
            "workload": _workload(args),
        }
        sides = {"ours": "benchmarks.ours_worker"}
        if not args.ours_only:
            sides["trl"] = "benchmarks.trl_worker"
        workers: dict[str, Worker] = {}
        try:
            for side, module in sides.items():
                workers[side] = Worker(module, settings, threads=args.threads, keep_memory=args.malloc == "keep")
            measured = {regime: _take_turns(workers, args.pairs, regime == "forced") for regime in args.regimes}
            floors = {regime: _floor(workers["ours"], sides["ours"]) for regime, sides in measured.items()}
        finally:
            for worker in workers.values():
                worker.close()
    details = {regime: {side: _summary(steps) for side, steps in sides.items()} for regime, sides in measured.items()}
    for regime, floor in floors.items():
        details[regime]["floor"] = floor
    for regime, by_side in details.items():
        _print(regime, by_side)
    return _result(args, details)


def _take_turns(workers: dict[str, Worker], pairs: int, forced: bool) -> dict[str, list[dict[str, Any]]]:
    """Steps of every side, in pairs. With ``forced`` ours repeats one seed, whose lengths the other side is given. Peaks of memory are of
    these steps."""
    steps: dict[str, list[dict[str, Any]]] = {side: [] for side in workers}
    lengths = None
    for pair in range(-_WARM_UP, pairs):
        order = list(workers) if pair % 2 == 0 or lengths is None else list(reversed(workers))
        for side in order:
            if side == "ours":
                step = workers[side].ask(seed=0 if forced else pair + _WARM_UP, fresh=pair == -_WARM_UP)
                lengths = step["lengths"]
            else:
                step = workers[side].ask(lengths=lengths if forced else None, fresh=pair == -_WARM_UP)
                if forced and step["lengths"] != lengths:
                    raise AssertionError(f"{side} was told to sample lengths {lengths} and sampled {step['lengths']}")
            if pair >= 0:
                steps[side].append(step)
            print(f"{side}, {f'step {pair + 1} of {pairs}' if pair >= 0 else 'warm-up'}: {step['total']:.1f} s", flush=True)
    return steps


def _floor(worker: Worker, steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The matrix products of the step of ours in the middle, alone, and their shares of that very step: lengths differ by step."""
    step = sorted(steps, key=itemgetter("total"))[len(steps) // 2]
    phases = worker.ask(prompt_lengths=step["prompt_lengths"], lengths=step["lengths"])
    whole = sum(phases.values())
    shares = {name: took and phases[name] / took for name, took in step["phases"].items() if name in phases}
    return {"step_s": whole, "phases_s": phases, "share": whole / step["total"], "shares": shares}


def _summary(steps: list[dict[str, Any]]) -> dict[str, Any]:
    tokens = [sum(sum(group) for group in step["lengths"]) for step in steps]
    count = sum(len(group) for group in steps[0]["lengths"])
    return {
        "step_s": median([step["total"] for step in steps]),
        "all_s": [step["total"] for step in steps],
        "phases_s": {phase: median([step["phases"].get(phase, 0.0) for step in steps]) for phase in PHASES},
        "mean_completion_tokens": median(tokens) / count,
        "tokens_per_s": median([n / step["total"] for n, step in zip(tokens, steps, strict=True)]),
        "peak_memory_gib": max(step["peak_memory"] for step in steps) / 2**30,
    }


def _print(regime: str, by_side: dict[str, dict[str, Any]]) -> None:
    ours, theirs = by_side["ours"], by_side.get("trl")
    rows: list[list[Any]] = []
    for label, pick in (
        ("whole step, s", lambda s: s["step_s"]),
        *((f"  {phase.replace('_', ' + ')}, s", lambda s, p=phase: s["phases_s"][p]) for phase in PHASES),
        ("peak memory, GiB", lambda s: s["peak_memory_gib"]),
        ("mean completion, tokens", lambda s: s["mean_completion_tokens"]),
    ):
        other = pick(theirs) if theirs else None
        compared = None if "tokens" in label or "rest" in label else quotient(other, pick(ours))
        rows.append([label, float(pick(ours)), other, compared])
    floor = by_side["floor"]
    print(
        f"Matrix products alone: {floor['step_s']:.3g} s, {100 * floor['share']:.0f}% of the step in the middle ("
        + ", ".join(f"{name.replace('_', ' + ')} {100 * value:.0f}%" for name, value in floor["shares"].items()) + ")."
    )  # fmt: skip
    print_table(f"Workload W, {regime} lengths, medians", ("", "groupwise", "TRL", "ratio"), rows)


def _result(args: argparse.Namespace, details: dict[str, Any]) -> Result:
    regime = "forced" if "forced" in details else next(iter(details))
    ours = details[regime]["ours"]["step_s"]
    theirs = details[regime].get("trl", {}).get("step_s")
    ratios = {}
    for name, sides in details.items():
        if "trl" not in sides:
            continue
        mine, other = sides["ours"], sides["trl"]
        ratios[name] = {
            "step": quotient(other["step_s"], mine["step_s"]),
            "peak_memory": quotient(other["peak_memory_gib"], mine["peak_memory_gib"]),
            **{phase: quotient(other["phases_s"][phase], mine["phases_s"][phase]) for phase in PHASES[:-1]},
        }
    settings = {key: str(value) if key == "output" else value for key, value in vars(args).items()}
    return Result("step", quotient(theirs, ours), ours, theirs, "s/step", settings, {"ratios": ratios, **details})


def main() -> None:
    args = options().parse_args()
    if args.rank and not (args.ours_only or args.against or args.neighbour):
        raise SystemExit("--rank: TRL's side trains all weights; add --ours-only, --against or --neighbour")
    if args.neighbour or args.against:
        finish(lambda: against_a_checkout(args) if args.against else beside_a_neighbour(args), args.output)
        return
    if not args.ours_only and importlib.util.find_spec("trl") is None:
        print("TRL is not installed (pip install '.[bench]'): only groupwise is measured.")
        args.ours_only = True
    finish(lambda: run(args), args.output)


if __name__ == "__main__":
    main()
