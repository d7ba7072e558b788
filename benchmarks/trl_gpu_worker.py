"""TRL's whole steps at the shape and lengths of ``benchmarks.gpu``. A worker that runs in an environment with TRL (see
``benchmarks.workers``); on a GPU vLLM samples in the trainer's process and sleeps meanwhile, elsewhere TRL's own `generate`. The
model is bf16, so AdamW's moments are too, and there are no masters.
"""

from __future__ import annotations

import random
import resource
import time
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.workers import Commands, serve

__all__ = ["rows_of"]


def rows_of(settings: dict[str, Any]) -> list[dict[str, str]]:
    """Prompts of every step, from half to all of ``prompt_tokens`` letters long: a letter is a token."""
    source, longest = random.Random(settings["seed"]), settings["prompt_tokens"]
    count = settings["steps"] * settings["sequences"] // settings["samples"]
    return [
        {"prompt": "".join(source.choices("abcdefghij", k=source.randint(max(1, longest // 2), longest)))} for _ in range(count)
    ]


def main(commands: Commands, settings: dict[str, Any]) -> None:
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(settings["threads"])
    on_gpu = settings["device"].startswith("cuda")
    vllm = _version("vllm") if on_gpu and find_spec("vllm") else None
    made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(settings["model"]), dtype=torch.bfloat16)
    made.save_pretrained(settings["model"])  # vLLM reads it there
    beside: dict[str, Any] = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": True} if vllm else {}
    arguments = GRPOConfig(
        output_dir=settings["folder"], use_cpu=not on_gpu, bf16=True, gradient_checkpointing=settings["gradient_checkpointing"],
        per_device_train_batch_size=settings["rows"], gradient_accumulation_steps=settings["sequences"] // settings["rows"],
        num_generations=settings["samples"], max_completion_length=settings["completion_tokens"], beta=0.0,
        learning_rate=settings["learning_rate"], max_steps=settings["steps"], logging_steps=settings["steps"], save_strategy="no",
        report_to=[], disable_tqdm=True, seed=0, **beside,
    )  # fmt: skip
    tokens: list[int] = []

    def alternate(completion_ids: list[list[int]], **_: Any) -> list[float]:
        tokens.append(sum(map(len, completion_ids)))
        return [float(place % 2) for place in range(len(completion_ids))]

    class Held(TrainerCallback):
        """Holds the trainer before each step until it is told to go on."""

        started = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 0:
                commands.answer(trl=_version("trl"), vllm=vllm)
            if commands.next() is None:
                raise SystemExit(0)
            tokens.clear()
            self.started = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if on_gpu:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - self.started
            peak = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            commands.answer(seconds=seconds, tokens=sum(tokens), peak_memory=peak)

    trainer = GRPOTrainer(
        made, reward_funcs=alternate, args=arguments, train_dataset=Dataset.from_list(rows_of(settings)),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]), callbacks=[Held()],
    )  # fmt: skip
    trainer.train()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


if __name__ == "__main__":
    serve(main)
