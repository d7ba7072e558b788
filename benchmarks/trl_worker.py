"""TRL's GRPOTrainer as one side of a benchmark: whole steps, one at a time. A worker (see ``benchmarks.workers``).

The trainer runs its own loop; a callback holds it at the start of every step until it is told to go on. Its methods are timed from
outside and otherwise left as they are.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessorList, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.forced import ForcedLengths
from benchmarks.workers import Commands, serve
from benchmarks.workload import SYSTEM, even_tokens, problems
from groupwise.memory import peak_memory_bytes, reset_peak_memory
from groupwise.models.devices import computes_bf16

__all__ = ["make_trainer"]

_MOST_STEPS = 100_000


class Clock:
    """Seconds by phase since the last ``restart``."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = defaultdict(float)
        self.started = 0.0

    def restart(self) -> None:
        self.spent.clear()
        self.started = time.perf_counter()

    def timed(self, phase: str, function: Callable[..., Any], when: Callable[..., bool] = lambda *_, **__: True) -> Any:
        """``function``, its seconds added to ``phase`` for calls of which ``when(arguments)`` is true."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if when(*args, **kwargs):
                    self.spent[phase] += time.perf_counter() - started

        return wrapper


def make_trainer(settings: dict[str, Any]) -> GRPOTrainer:
    """TRL at W as it comes: fp32 weights, under bf16 autocast where the processor has instructions for it, as many completions at a
    time as a group has, gradients accumulated over the groups, sdpa, no checkpointing. Others, such as bf16 weights, were not timed."""
    workload = settings["workload"]
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32, attn_implementation="sdpa")
    arguments = GRPOConfig(
        output_dir=settings["folder"], use_cpu=True, bf16=computes_bf16(), gradient_checkpointing=False,
        per_device_train_batch_size=workload["completions"], gradient_accumulation_steps=workload["groups"],
        num_generations=workload["completions"], max_completion_length=workload["max_tokens"], num_iterations=1,
        temperature=1.0, top_p=1.0, top_k=0, beta=0.04, loss_type="grpo", scale_rewards="group", learning_rate=1e-12,
        lr_scheduler_type="constant", max_grad_norm=1.0, max_steps=_MOST_STEPS, shuffle_dataset=False, logging_steps=_MOST_STEPS,
        save_strategy="no", report_to=[], disable_tqdm=True, seed=0,
    )  # fmt: skip
    rows = [
        {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem.question}]}
        for problem in problems(workload["groups"])
    ]
    return GRPOTrainer(
        model, reward_funcs=even_tokens, args=arguments, train_dataset=Dataset.from_list(rows), processing_class=tokenizer
    )


class StepByStep(TrainerCallback):
    """Holds the trainer between steps, and forces the lengths of its next completions where the command names any."""

    def __init__(self, trainer: GRPOTrainer, commands: Commands) -> None:
        self.trainer, self.commands, self.clock = trainer, commands, Clock()
        self.forced: list[int] | None = None
        self.lengths: list[int] = []
        self._instrument()

    def _instrument(self) -> None:
        trainer, clock = self.trainer, self.clock
        self._generate = trainer.model.generate
        trainer.model.generate = self._generate_as_told
        trainer._generate_single_turn = self._sampled(clock.timed("sampling", trainer._generate_single_turn))
        trainer._get_per_token_logps_and_entropies = clock.timed(
            "reference", trainer._get_per_token_logps_and_entropies, when=lambda model, *_, **__: model is trainer.ref_model
        )
        trainer.compute_loss = clock.timed("forward_backward", trainer.compute_loss)
        trainer.accelerator.backward = clock.timed("forward_backward", trainer.accelerator.backward)
        trainer.accelerator.clip_grad_norm_ = clock.timed("optimiser", trainer.accelerator.clip_grad_norm_)

    def _sampled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            completion_ids, logprobs = function(*args, **kwargs)
            self.lengths = [len(ids) for ids in completion_ids]
            return completion_ids, logprobs

        return wrapper

    def _generate_as_told(self, **inputs: Any) -> Any:
        if self.forced is not None:
            width = inputs["input_ids"].shape[1]
            processor = ForcedLengths(self.forced, self.trainer.eos_token_ids, width)
            inputs["logits_processor"] = LogitsProcessorList([processor])
        return self._generate(**inputs)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.commands.answer(ready=True)
        command = self.commands.next()
        if command is None:
            raise SystemExit(0)
        if command.get("fresh"):
            reset_peak_memory()
        lengths = command.get("lengths")
        self.forced = None if lengths is None else [n for group in lengths for n in group]
        self.clock.restart()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.spent["optimiser"] -= time.perf_counter()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.spent["optimiser"] += time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        total = time.perf_counter() - self.clock.started
        phases = dict(self.clock.spent)
        groups, size = args.gradient_accumulation_steps, args.per_device_train_batch_size
        self.commands.answer(
            total=total,
            phases={**phases, "rest": total - sum(phases.values())},
            lengths=[self.lengths[i * size : (i + 1) * size] for i in range(groups)],
            peak_memory=peak_memory_bytes(),
        )


def main(commands: Commands, settings: dict[str, Any]) -> None:
    torch.set_num_threads(settings["threads"])
    trainer = make_trainer(settings)
    trainer.add_callback(StepByStep(trainer, commands))
    trainer.train()


if __name__ == "__main__":
    serve(main)
