"""On a GPU at the shapes of Qwen2.5 (random weights): sampling in tokens/s against transformers' `generate` and vLLM; learning in
tokens/s, model FLOPs utilisation and peak memory; and a whole step, with `--trl-python` against TRL with vLLM in its process. Every
step has new prompts, new lengths and another seed, as in a run.

All weights are bf16. Groupwise keeps fp32 masters and moments beside them where a shape has room (all but 7b). TRL's AdamW works
on the bf16 weights with bf16 moments: that takes less memory and time, and drops most updates at small rates. TRL learns as many
completions at a time as fit into groupwise's micro-batch at full length.

Without CUDA it runs in miniature on the CPU, which shows that it works and nothing more.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import Result, finish, median, parser, print_table, quotient
from benchmarks.shapes import SHAPES
from benchmarks.workers import Worker, WorkerDied
from groupwise.planner.hardware import named_in

__all__ = ["main", "run"]

ROOM = {
    "0.5b": {"micro_batch_tokens": 32768, "precision": "masters"},
    "1.5b": {"micro_batch_tokens": 16384, "precision": "masters"},
    "7b": {"micro_batch_tokens": 8192, "precision": "pure"},
    "tiny": {"micro_batch_tokens": 256, "precision": "masters"},
}
"""What one 140 GB device has room for without gradient checkpointing. With fp32 masters, moments and gradients a 7B model would
take 137 GB before the first activation, so there AdamW works on the bf16 weights."""
_OPTIMISERS = {"masters": "fp32 masters and moments", "pure": "bf16"}
_ROLES = ("ours", "transformers", "learning", "step")


def options() -> argparse.ArgumentParser:
    out = parser("gpu", __doc__)
    out.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    out.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), help="by default 0.5b 1.5b 7b on CUDA, tiny elsewhere")
    out.add_argument("--sequences", type=int, default=256, help="completions at once")
    out.add_argument("--samples", type=int, default=8, help="completions of each prompt")
    out.add_argument("--prompt-tokens", type=int, default=256, help="of the longest; the shortest have half of it")
    out.add_argument(
        "--completion-tokens", type=int, default=512,
        help="at most: sampled rows end by chance, on average after 0.6 of it; learnt from are lengths from a quarter of it to all",
    )  # fmt: skip
    out.add_argument("--repeats", type=int, default=3, help="measurements of each, after one to warm up")
    out.add_argument("--micro-batch-tokens", type=int, help="by default what the shape has room for")
    out.add_argument("--gradient-checkpointing", action="store_true")
    out.add_argument("--peak-tflops", type=float, help="the device's dense bf16 peak, for utilisation; known for common ones")
    out.add_argument("--vllm-python", metavar="PATH", help="interpreter of an environment with vLLM, to sample with it too")
    out.add_argument(
        "--trl-python",
        metavar="PATH",
        help="interpreter of an environment with TRL, and on a GPU vLLM, for whole steps of TRL too",
    )
    out.add_argument("--roles", nargs="+", choices=_ROLES, default=list(_ROLES), help="what to measure")
    return out


def run(args: argparse.Namespace) -> Result:
    """Measure, print the tables, and return the result (not yet finished)."""
    on_gpu = args.device.startswith("cuda")
    if not on_gpu:
        print("No CUDA here: this is a miniature on the CPU, which shows that the benchmark runs and nothing about speed.")
        if args.shapes is None:
            args.sequences, args.samples, args.prompt_tokens, args.completion_tokens = 8, 4, 8, 8
    shapes = args.shapes or (["0.5b", "1.5b", "7b"] if on_gpu else ["tiny"])
    peak = args.peak_tflops or _known_peak(on_gpu)
    details = {shape: {role: _measure(args, shape, role, peak) for role in args.roles} for shape in shapes}
    if args.vllm_python:
        for shape in shapes:
            details[shape]["vllm"] = _by_vllm(args, shape)
    if args.trl_python:
        for shape in shapes:
            details[shape]["trl"] = _by_trl(args, shape)
    _print(details)
    headline = details["1.5b" if "1.5b" in details else shapes[0]]
    ours, theirs = (headline.get(role, {}).get("tokens_per_s") for role in ("ours", "transformers"))
    settings = {key: str(value) if key == "output" else value for key, value in vars(args).items()}
    return Result("gpu", quotient(ours, theirs), ours, theirs, "tokens/s", {**settings, "peak_tflops": peak}, details)


def _known_peak(on_gpu: bool) -> float | None:
    card = named_in(torch.cuda.get_device_name()) if on_gpu else None
    return None if card is None else card.flops_per_s / 1e12


def _measure(args: argparse.Namespace, shape: str, role: str, peak: float | None) -> dict[str, Any]:
    """Medians of one side at one shape, or the reason why there are none (such as too little memory)."""
    settings = {
        "role": role, "shape": shape, "device": args.device, "sequences": args.sequences, "samples": args.samples,
        "prompt_tokens": args.prompt_tokens, "completion_tokens": args.completion_tokens,
        "gradient_checkpointing": args.gradient_checkpointing, **ROOM[shape],
    }  # fmt: skip
    if args.micro_batch_tokens:
        settings["micro_batch_tokens"] = args.micro_batch_tokens
    try:
        with Worker("benchmarks.gpu_worker", settings, threads=args.threads) as worker:
            answers = [worker.ask() for _ in range(1 + args.repeats)][1:]
    except WorkerDied as error:
        print(f"{shape}, {role}: not measured. {error}")
        return {"failed": str(error).splitlines()[-1]}
    taken = median([a["seconds"] for a in answers])
    found = {
        "seconds": taken,
        "tokens_per_s": median([a["tokens"] / a["seconds"] for a in answers]),
        "peak_memory_gib": max(a["peak_memory"] for a in answers) / 2**30,
    }
    if role == "learning":
        tflops, whole = (median([a["flops"] / a[of] / 1e12 for a in answers]) for of in ("forward_backward_s", "seconds"))
        passes = median([a["forward_backward_s"] for a in answers])
        found |= {"forward_backward_s": passes, "tflops": tflops, **{key: settings[key] for key in ROOM[shape]}}
        if peak:
            found |= {"utilisation": tflops / peak, "utilisation_with_optimiser": whole / peak}
    return found


def _by_vllm(args: argparse.Namespace, shape: str) -> dict[str, Any]:
    """vLLM's sampling of the prompts and lengths that `generate` is given; it makes random weights itself."""
    from benchmarks.gpu_worker import forced_lengths, prompts_of

    settings = {
        "shape": shape,
        **{name: getattr(args, name) for name in ("sequences", "samples", "prompt_tokens", "completion_tokens")},
    }
    with tempfile.TemporaryDirectory() as folder:
        SHAPES[shape].save_pretrained(folder)
        worker = {
            "model": folder, "max_model_tokens": args.prompt_tokens + args.completion_tokens, "max_rows": args.sequences, "eager": False,
            "more": {"load_format": "dummy", "skip_tokenizer_init": True},
        }  # fmt: skip
        speeds, seconds = [], []
        try:
            with Worker("benchmarks.vllm_worker", worker, threads=args.threads, python=args.vllm_python) as vllm:
                for step in range(1 + args.repeats):
                    prompts = [list(prompt.token_ids) for prompt in prompts_of(settings, step)]
                    answer = vllm.ask(prompts=prompts, lengths=forced_lengths(settings, step, len(prompts)))
                    seconds.append(answer["seconds"])
                    speeds.append(sum(answer["lengths"]) / answer["seconds"])
        except WorkerDied as error:
            print(f"{shape}, vllm: not measured. {error}")
            return {"failed": str(error).splitlines()[-1]}
    return {"seconds": median(seconds[1:]), "tokens_per_s": median(speeds[1:]), "version": vllm.hello.get("version")}


def _rows(args: argparse.Namespace, shape: str) -> int:
    """Completions that TRL learns at a time: of a micro-batch's tokens, each with its prompt and padded to full length."""
    most = (args.micro_batch_tokens or ROOM[shape]["micro_batch_tokens"]) // (args.prompt_tokens + args.completion_tokens)
    return max(rows for rows in range(1, args.sequences + 1) if rows <= max(1, most) and args.sequences % rows == 0)


def _by_trl(args: argparse.Namespace, shape: str) -> dict[str, Any]:
    """Whole steps of TRL over random weights of the same shape, prompts of the same lengths, and vLLM's completions in its process.

    Prompts differ from ours in their tokens, since TRL takes text. Its completions all reach the limit, while ours end by chance: tokens/s
    are what compares, and equal lengths are in its favour.
    """
    from benchmarks.first_light_one import write_tiny_model

    settings = {
        "shape": shape, "seed": 0, "device": args.device, "learning_rate": 1e-6, "steps": 1 + args.repeats,
        "gradient_checkpointing": args.gradient_checkpointing, "rows": _rows(args, shape),
        **{name: getattr(args, name) for name in ("sequences", "samples", "prompt_tokens", "completion_tokens")},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(Path(folder) / "model")  # for its tokenizer: a letter is a token
        SHAPES[shape].save_pretrained(model)
        try:
            with Worker(
                "benchmarks.trl_gpu_worker", {**settings, "model": str(model), "folder": folder}, threads=args.threads,
                python=args.trl_python,
            ) as trl:  # fmt: skip
                answers = [trl.ask() for _ in range(1 + args.repeats)][1:]
        except WorkerDied as error:
            print(f"{shape}, TRL: not measured. {error}")
            return {"failed": str(error).splitlines()[-1]}
    seconds = median([a["seconds"] for a in answers])
    return {
        "seconds": seconds, "tokens_per_s": median([a["tokens"] / a["seconds"] for a in answers]),
        "peak_memory_gib": max(a["peak_memory"] for a in answers) / 2**30, "rows": settings["rows"],
        **{k: trl.hello[k] for k in ("trl", "vllm")},
    }  # fmt: skip


def _print(details: dict[str, Any]) -> None:
    rows = []
    for shape, sides in details.items():
        ours, theirs = sides.get("ours", {}), sides.get("transformers", {})
        speeds = [ours.get("tokens_per_s"), theirs.get("tokens_per_s")]
        rows.append(
            [
                shape,
                *speeds,
                quotient(*speeds),
                sides.get("vllm", {}).get("tokens_per_s"),
                ours.get("peak_memory_gib"),
                theirs.get("peak_memory_gib"),
            ]
        )
    print_table(
        "Sampling, medians", ("shape", "groupwise, tokens/s", "transformers", "ratio", "vLLM", "GiB", "theirs, GiB"), rows
    )
    keys = ("tokens_per_s", "forward_backward_s", "tflops", "utilisation", "utilisation_with_optimiser", "peak_memory_gib")
    rows = [[shape, *(sides.get("learning", {}).get(key) for key in keys)] for shape, sides in details.items()]
    print_table(
        "One update (forward, backward, optimiser), medians",
        ("shape", "tokens/s", "forward + backward, s", "TFLOP/s", "MFU", "MFU with optimiser", "GiB"),
        rows,
    )

    steps = {shape: (sides.get("step", {}), sides.get("trl", {})) for shape, sides in details.items()}
    if any(ours or theirs for ours, theirs in steps.values()):
        rows = [
            [shape, *(side.get("seconds") for side in both), quotient(*(side.get("tokens_per_s") for side in both)),
             *(side.get("peak_memory_gib") for side in both), _OPTIMISERS[str(ROOM[shape]["precision"])], both[1].get("rows")]
            for shape, both in steps.items()
        ]  # fmt: skip
        columns = ("shape", "groupwise, s", "TRL, s", "tokens/s, ratio", "GiB", "theirs, GiB", "our AdamW", "TRL's rows at once")
        print_table("A whole step, medians; all weights are bf16, and so is TRL's AdamW", columns, rows)


def main() -> None:
    args = options().parse_args()
    finish(lambda: run(args), args.output)


if __name__ == "__main__":
    main()
