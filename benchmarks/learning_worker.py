"""A script for TRL's ``GRPOTrainer`` that keeps the policy's weights every few steps: one side of ``benchmarks.learning``.

Which library runs it is the one thing that differs between the sides: ``library`` is ``trl`` or ``groupwise.trl``.
"""

from __future__ import annotations

import functools
import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

from groupwise.memory import peak_memory_bytes, release_freed_memory
from groupwise.rewards import functions


class Keep(TrainerCallback):
    """Reward, seconds and tokens of every step in ``steps.jsonl``; the weights after every ``every``, the clock stopped meanwhile."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self.file = folder / "steps.jsonl"
        self.steps: list[dict[str, float]] = []
        self.trainer: Any = None

    def begin(self, trainer: Any, after: int) -> None:
        """``after``: the step of the checkpoint that the run goes on from, 0 for none."""
        if after:
            lines = self.file.read_text(encoding="utf-8").splitlines()
            self.steps = [json.loads(line) for line in lines[:after]]
        self.file.write_text("".join(json.dumps(step) + "\n" for step in self.steps), encoding="utf-8")
        self.tokens = self.steps[-1]["sampled_tokens"] if after else 0.0
        self.started = time.perf_counter() - (self.steps[-1]["seconds"] if after else 0.0)
        self.trainer = trainer

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "reward" not in (logs or {}):  # the Trainer's last log, of the whole run
            return
        now = time.perf_counter()
        self.tokens += logs["completions/mean_length"] * args.per_device_train_batch_size * args.gradient_accumulation_steps
        step = {
            "step": state.global_step, "seconds": now - self.started, "sampled_tokens": self.tokens, "reward": logs["reward"],
            "stopped": 1 - logs["completions/clipped_ratio"],
        }  # fmt: skip
        self.steps.append(step)
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(step) + "\n")
        if state.global_step % self.every == 0:
            self.trainer.save_model(str(self.folder / f"step-{state.global_step}"))
        release_freed_memory()  # else what glibc keeps of a step's backward pass lies beside the next one's prompts
        self.started += time.perf_counter() - now


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    library = importlib.import_module(settings["library"])
    folder = Path(settings["folder"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    arguments = library.GRPOConfig(output_dir=str(folder / "trainer"), **settings["arguments"])
    keep = Keep(folder, settings["every"])
    trainer = library.GRPOTrainer(
        settings["model"],  # by its name: unless told otherwise, both libraries read float32 weights and compute in bfloat16
        reward_funcs=[_reward(name, arguments) for name, arguments in settings["rewards"]],
        args=arguments,
        train_dataset=Dataset.from_list(settings["rows"]),
        processing_class=tokenizer,
        callbacks=[keep],
        peft_config=_adapter(settings["lora"]) if settings.get("lora") else None,
    )
    checkpoint = get_last_checkpoint(arguments.output_dir) if Path(arguments.output_dir).is_dir() else None
    keep.begin(trainer, int(checkpoint.rpartition("-")[2]) if checkpoint else 0)
    trainer.train(resume_from_checkpoint=checkpoint)
    rows = [
        {key: step[key] for key in ("step", "seconds", "sampled_tokens")} for step in keep.steps if step["step"] % keep.every == 0
    ]
    peak = peak_memory_bytes(trainer.accelerator.device.type)
    found = {
        "rows": rows, "rewards": [step["reward"] for step in keep.steps], "peak_memory_gib": peak / 2**30,
        "library": settings["library"],
    }  # fmt: skip
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


def _reward(name: str, arguments: dict[str, Any]) -> Any:
    """A function of groupwise with its arguments; both libraries log a reward by its name."""
    function = getattr(functions, name)
    return functools.update_wrapper(functools.partial(function, **arguments), function)


def _adapter(lora: dict[str, Any]) -> Any:
    from peft import LoraConfig

    return LoraConfig(**lora)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
