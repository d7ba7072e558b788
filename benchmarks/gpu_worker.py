"""One side of the GPU benchmark at one shape: our sampling, transformers' ``generate``, or our update. A worker (see
``benchmarks.workers``); every side has a process, and so the device's memory, to itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.flops import learning_flops
from benchmarks.generate_worker import generate_forced
from benchmarks.shapes import SHAPES, random_groups, random_policy, random_prompts
from benchmarks.workers import Commands, serve
from groupwise.config.schema import Config
from groupwise.engines import SamplingSettings, make_engine
from groupwise.memory import keep_freed_memory, peak_memory_bytes
from groupwise.models.scorer import make_scorer
from groupwise.training.learner import Learner

__all__ = ["ROLES", "prepare"]

Action = Callable[[], dict[str, Any]]


def _our_sampling(settings: dict[str, Any]) -> Action:
    policy, asked = _policy_and_prompts(settings)
    config = Config.model_validate({"rollout": {"max_concurrent_sequences": settings["sequences"]}})
    engine = make_engine(policy, config.rollout)
    limits = SamplingSettings(max_tokens=settings["completion_tokens"])

    def sample() -> dict[str, Any]:
        done = engine.sample(asked, settings["samples"], limits, seed=0, scope="benchmark")
        return {"tokens": sum(len(c.token_ids) for group in done for c in group)}

    return sample


def _their_sampling(settings: dict[str, Any]) -> Action:
    policy, asked = _policy_and_prompts(settings)
    prompts = [list(prompt.token_ids) for prompt in asked]
    lengths = [[settings["completion_tokens"]] * settings["samples"]] * len(prompts)

    def sample() -> dict[str, Any]:
        return {"tokens": sum(generate_forced(policy.model, prompts, lengths, [1])[1])}

    return sample


def _learning(settings: dict[str, Any]) -> Action:
    policy, asked = _policy_and_prompts(settings)
    config = Config.model_validate(
        {
            "model": {"gradient_checkpointing": settings["gradient_checkpointing"]},
            "algorithm": {"kl": None},
            "optimizer": {"learning_rate": 1e-6, "precision": settings["precision"]},
            "training": {"micro_batch_tokens": settings["micro_batch_tokens"]},
        }
    )
    learner = Learner(make_scorer(policy, config.model), config)
    shape = SHAPES[settings["shape"]]
    longest = settings["completion_tokens"]
    groups = random_groups(asked, settings["samples"], longest // 4, longest, shape.vocab_size)
    sizes = [(len(g.prompt.token_ids), [len(c.token_ids) for c in g.completions]) for g in groups]

    def learn() -> dict[str, Any]:
        _, metrics = learner.learn(groups)
        return {
            "tokens": sum(sum(lengths) for _, lengths in sizes),
            "flops": learning_flops(shape, sizes),
            "forward_backward_s": metrics["time/learn_s"].value,
        }

    return learn


def _policy_and_prompts(settings: dict[str, Any]) -> tuple[Any, Any]:
    shape = SHAPES[settings["shape"]]
    asked = random_prompts(settings["sequences"] // settings["samples"], settings["prompt_tokens"], shape.vocab_size)
    return random_policy(shape, settings["device"]), asked


ROLES: dict[str, Callable[[dict[str, Any]], Action]] = {
    "ours": _our_sampling,
    "transformers": _their_sampling,
    "learning": _learning,
}


def prepare(settings: dict[str, Any]) -> Action:
    """The side's action with its seconds, the device's queue emptied before and after, and its peak memory."""
    action = ROLES[settings["role"]](settings)
    on_gpu = settings["device"].startswith("cuda")

    def measured() -> dict[str, Any]:
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        found = action()
        if on_gpu:
            torch.cuda.synchronize()
        return {"seconds": time.perf_counter() - started, "peak_memory": peak_memory_bytes(settings["device"][:4]), **found}

    return measured


def main(commands: Commands, settings: dict[str, Any]) -> None:
    keep_freed_memory()
    torch.set_num_threads(settings["threads"])
    action = prepare(settings)
    commands.answer(ready=True)
    for _ in commands:
        commands.answer(**action())


if __name__ == "__main__":
    serve(main)
