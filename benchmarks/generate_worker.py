"""transformers' ``generate`` as one side of a benchmark, at given lengths. A worker (see ``benchmarks.workers``)."""

from __future__ import annotations

import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, LogitsProcessorList

from benchmarks.forced import ForcedLengths
from benchmarks.workers import Commands, serve
from groupwise.memory import peak_memory_bytes

__all__ = ["generate_forced"]


@torch.no_grad()
def generate_forced(
    model: Any, prompts: list[list[int]], lengths: list[list[int]], end_token_ids: list[int]
) -> tuple[float, list[int]]:
    """Sample from ``model`` at temperature 1, each completion as long as told; all of them in one call, prompts padded on the left.

    Returns seconds and the lengths that came out, sequence by sequence.
    """
    rows = [prompt for prompt, group in zip(prompts, lengths, strict=True) for _ in group]
    wanted = [length for group in lengths for length in group]
    longest = max(len(row) for row in rows)
    pad = end_token_ids[0]
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=model.device)
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=model.device)
    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=max(wanted), eos_token_id=end_token_ids,
        pad_token_id=pad,
    )  # fmt: skip
    force = LogitsProcessorList([ForcedLengths(wanted, end_token_ids, longest)])
    _wait(model)
    started = time.perf_counter()
    out = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings, logits_processor=force)
    _wait(model)
    taken = time.perf_counter() - started
    return taken, _lengths(out[:, longest:], end_token_ids)


def _wait(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def _lengths(completions: torch.Tensor, end_token_ids: list[int]) -> list[int]:
    ended = torch.isin(completions, torch.tensor(end_token_ids, device=completions.device))
    first = torch.where(ended.any(1), ended.int().argmax(1) + 1, completions.shape[1])
    return first.tolist()


def main(commands: Commands, settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=getattr(torch, settings["dtype"])).eval()
    commands.answer(ready=True)
    for command in commands:
        taken, lengths = generate_forced(model, command["prompts"], command["lengths"], settings["end_token_ids"])
        commands.answer(seconds=taken, lengths=lengths, peak_memory=peak_memory_bytes())


if __name__ == "__main__":
    serve(main)
