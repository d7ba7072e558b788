"""A script for TRL's ``GRPOTrainer`` that keeps the policy's weights every few steps: one side of ``benchmarks.learning``.

Which library runs it is the one thing that differs between the sides: ``library`` is ``trl`` or ``groupwise.trl``.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback

from groupwise.memory import peak_memory_bytes
from groupwise.rewards import functions


class Keep(TrainerCallback):
    """The mean reward of every step; a row and the weights after every ``every``, and the clock stands still while they are written."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self.rows: list[dict[str, float]] = []
        self.rewards: list[float] = []
        self.tokens, self.stopped = 0.0, 0.0
        self.trainer: Any = None

    def begin(self, trainer: Any) -> None:
        self.trainer, self.started = trainer, time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self.tokens += (logs or {}).get("completions/mean_length", 0.0) * size
        if "reward" not in (logs or {}):  # the Trainer's last log, of the whole run
            return
        self.rewards.append(logs["reward"])
        if state.global_step % self.every == 0:
            now = time.perf_counter()
            self.trainer.save_model(str(self.folder / f"step-{state.global_step}"))
            self.rows.append(
                {"step": state.global_step, "seconds": now - self.started - self.stopped, "sampled_tokens": self.tokens}
            )
            self.stopped += time.perf_counter() - now
            print(json.dumps(self.rows[-1]), flush=True)


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    library = importlib.import_module(settings["library"])
    folder = Path(settings["folder"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    arguments = library.GRPOConfig(output_dir=str(folder / "trainer"), **settings["arguments"])
    keep = Keep(folder, settings["every"])
    trainer = library.GRPOTrainer(
        settings["model"],  # by its name: both libraries read it as float32 weights and compute in bfloat16
        reward_funcs=[getattr(functions, name) for name in settings["rewards"]],
        args=arguments,
        train_dataset=Dataset.from_list(settings["rows"]),
        processing_class=tokenizer,
        callbacks=[keep],
    )
    keep.begin(trainer)
    trainer.train()
    found = {
        "rows": keep.rows, "rewards": keep.rewards, "peak_memory_gib": peak_memory_bytes() / 2**30, "library": settings["library"],
    }  # fmt: skip
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
