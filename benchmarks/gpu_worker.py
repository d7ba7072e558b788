"""One side of the GPU benchmark at one shape: our sampling, transformers' ``generate``, or our update. A worker (see
``benchmarks.workers``); every side has a process, and so the device's memory, to itself.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from benchmarks.flops import learning_flops
from benchmarks.generate_worker import generate_forced
from benchmarks.shapes import SHAPES, random_groups, random_policy, random_prompts
from benchmarks.workers import Commands, serve
from groupwise.config.schema import Config
from groupwise.engines import SamplingSettings, make_engine
from groupwise.memory import keep_freed_memory, peak_memory_bytes, use_expandable_segments
from groupwise.models.load import Policy
from groupwise.models.scorer import make_scorer
from groupwise.training.learner import Learner
from groupwise.types import Group, Prompt

__all__ = ["ROLES", "forced_lengths", "prepare", "prompts_of"]

Action = Callable[[], dict[str, Any]]
Side = Callable[[int], Action]
"""What a side does in step 0, 1 ...: with new prompts, new lengths and another seed each time. A GPU keeps plans, compiled kernels and
graphs by shape; in a run hardly any shape comes twice, so a benchmark that repeats them would measure what a run never sees."""


def _our_sampling(settings: dict[str, Any]) -> Side:
    vocabulary = SHAPES[settings["shape"]].vocab_size
    policy = _policy(settings, range(1, vocabulary, _mean_tokens(settings)))  # by chance, a row ends with one token in so many
    config = Config.model_validate({"rollout": {"max_concurrent_sequences": settings["sequences"]}})
    engine = make_engine(policy, config.rollout)
    limits = SamplingSettings(max_tokens=settings["completion_tokens"])

    def side(step: int) -> Action:
        asked = prompts_of(settings, step)

        def sample() -> dict[str, Any]:
            done = engine.sample(asked, settings["samples"], limits, seed=step, scope="benchmark")
            return {"tokens": sum(len(c.token_ids) for group in done for c in group)}

        return sample

    return side


def _their_sampling(settings: dict[str, Any]) -> Side:
    policy = _policy(settings)

    def side(step: int) -> Action:
        prompts = [list(prompt.token_ids) for prompt in prompts_of(settings, step)]
        lengths = forced_lengths(settings, step, len(prompts))
        return lambda: {"tokens": sum(generate_forced(policy.model, prompts, lengths, [1])[1])}

    return side


def _step(settings: dict[str, Any]) -> Side:
    """A whole step: completions, rewards that need no time, one update; the engine samples from the weights that learn."""
    policy = _policy(settings, range(1, SHAPES[settings["shape"]].vocab_size, _mean_tokens(settings)))
    config = _config(settings)
    scorer = make_scorer(policy, config.model)
    engine, learner = make_engine(policy, config.rollout, scorer), Learner(scorer, config)
    limits = SamplingSettings(max_tokens=settings["completion_tokens"])
    rewards = tuple(float(place % 2) for place in range(settings["samples"]))

    def side(step: int) -> Action:
        asked = prompts_of(settings, step)

        def whole() -> dict[str, Any]:
            done = engine.sample(asked, settings["samples"], limits, seed=step, scope="benchmark")
            engine.release_memory()
            learner.learn([Group(prompt, members, rewards) for prompt, members in zip(asked, done, strict=True)])
            engine.refresh(learner.updates)
            return {"tokens": sum(len(c.token_ids) for group in done for c in group)}

        return whole

    return side


def _config(settings: dict[str, Any]) -> Config:
    return Config.model_validate(
        {
            "model": {"gradient_checkpointing": settings["gradient_checkpointing"]},
            "algorithm": {"kl": None},
            "optimizer": {"learning_rate": 1e-6, "precision": settings["precision"]},
            "training": {"micro_batch_tokens": settings["micro_batch_tokens"]},
            "rollout": {"max_concurrent_sequences": settings["sequences"]},
        }
    )


def _learning(settings: dict[str, Any]) -> Side:
    policy, config = _policy(settings), _config(settings)
    learner = Learner(make_scorer(policy, config.model), config)
    shape = SHAPES[settings["shape"]]
    longest = settings["completion_tokens"]

    def side(step: int) -> Action:
        groups = random_groups(
            prompts_of(settings, step), settings["samples"], longest // 4, longest, shape.vocab_size, seed=1 + step
        )
        sizes = [(len(g.prompt.token_ids), [len(c.token_ids) for c in g.completions]) for g in groups]

        def learn() -> dict[str, Any]:
            _, metrics = learner.learn(groups)
            return {
                "tokens": sum(sum(lengths) for _, lengths in sizes),
                "flops": learning_flops(shape, sizes),
                "forward_backward_s": metrics["time/learn_s"].value,
            }

        return learn

    return side


def _policy(settings: dict[str, Any], end_token_ids: Sequence[int] = ()) -> Policy:
    return replace(random_policy(SHAPES[settings["shape"]], settings["device"]), end_token_ids=tuple(end_token_ids))


def forced_lengths(settings: dict[str, Any], step: int, prompts: int) -> list[list[int]]:
    """Of the completions of each prompt in a step: as if a row ended by chance."""
    source, most, mean = random.Random(step), settings["completion_tokens"], _mean_tokens(settings)
    return [[min(most, 1 + int(source.expovariate(1 / mean))) for _ in range(settings["samples"])] for _ in range(prompts)]


def _mean_tokens(settings: dict[str, Any]) -> int:
    """Of a completion, were there no limit."""
    return max(2, int(0.6 * settings["completion_tokens"]))


def prompts_of(settings: dict[str, Any], step: int) -> list[Prompt]:
    """Random ones of a step, from half to all of ``prompt_tokens`` long."""
    count, longest = settings["sequences"] // settings["samples"], settings["prompt_tokens"]
    lengths, vocabulary = random.Random(step), SHAPES[settings["shape"]].vocab_size
    return [
        random_prompts(1, lengths.randint(max(1, longest // 2), longest), vocabulary, f"{step}-{place}")[0]
        for place in range(count)
    ]


ROLES: dict[str, Callable[[dict[str, Any]], Side]] = {
    "ours": _our_sampling,
    "transformers": _their_sampling,
    "learning": _learning,
    "step": _step,
}


def prepare(settings: dict[str, Any]) -> Action:
    """The side's action with its seconds, the device's queue emptied before and after, and its peak memory."""
    side = ROLES[settings["role"]](settings)
    on_gpu, steps = settings["device"].startswith("cuda"), itertools.count()

    def measured() -> dict[str, Any]:
        action = side(next(steps))
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
    use_expandable_segments()
    torch.set_num_threads(settings["threads"])
    action = prepare(settings)
    commands.answer(ready=True)
    for _ in commands:
        commands.answer(**action())


if __name__ == "__main__":
    serve(main)
