"""Groupwise as one side of a benchmark: whole steps, or sampling alone. A worker (see ``benchmarks.workers``)."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.floor import floor_seconds
from benchmarks.workers import Commands, serve
from benchmarks.workload import even_tokens, prompts, step_config
from groupwise.engines import SamplingSettings, make_engine
from groupwise.memory import keep_freed_memory, peak_memory_bytes, reset_peak_memory
from groupwise.models.decoder import Decoder
from groupwise.models.load import load_policy
from groupwise.models.packing import common_tokens
from groupwise.models.scorer import make_scorer
from groupwise.rewards.load import LoadedReward
from groupwise.rewards.suite import RewardSuite
from groupwise.rollout import collect
from groupwise.threads import fix_threads
from groupwise.training.learner import Learner

__all__ = ["OurSampler", "OurStep"]


class OurStep:
    """A training step as the program makes it: collect, score, learn, refresh."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.config = step_config(settings["model"], **settings["workload"])
        policy = load_policy(self.config.model)
        scorer = make_scorer(policy, self.config.model)
        self.engine = make_engine(policy, self.config.rollout, scorer)
        self.learner = Learner(scorer, self.config)
        self.rewards = RewardSuite([LoadedReward("even", even_tokens, 1.0, "python")], "xml", timeout_s=None)
        self.prompts = prompts(policy.tokenizer, self.config.rollout.prompts_per_step)

    def step(self, seed: int, fresh: bool = False) -> dict[str, Any]:
        """One step whose samples follow from ``seed``: seconds by phase, lengths, peak memory, which with ``fresh`` counts from here."""
        if fresh:
            reset_peak_memory()
        started = time.perf_counter()
        rollout = collect(self.engine, self.prompts, self.rewards, self.config.rollout, seed=seed, step=0)
        _, metrics = self.learner.learn(rollout.groups)
        self.engine.refresh(self.learner.updates)
        total = time.perf_counter() - started
        phases = {
            "sampling": rollout.sampling_s,
            "reference": metrics["time/reference_s"].value,
            "forward_backward": metrics["time/learn_s"].value,
            "optimiser": metrics["time/optimizer_s"].value,
        }
        return {
            "total": total,
            "phases": {**phases, "rest": total - sum(phases.values())},
            "lengths": [[len(c.token_ids) for c in group.completions] for group in rollout.groups],
            "prompt_lengths": [len(p.token_ids) for p in self.prompts],
            "peak_memory": peak_memory_bytes(),
        }

    def floor(self, prompt_lengths: list[int], lengths: list[list[int]]) -> dict[str, Any]:
        """Seconds that the matrix products of such a step take alone."""
        assert isinstance(self.learner.scorer, Decoder)
        return floor_seconds(self.learner.scorer, prompt_lengths, lengths, common_tokens([p.token_ids for p in self.prompts]))


class OurSampler:
    """The engine alone, over a policy that is not being trained."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.config = step_config(settings["model"])
        self.policy = load_policy(self.config.model)
        in_8_bits = settings.get("in_8_bits", False)
        changed = {"max_concurrent_sequences": settings["max_rows"], "quantization": "8bit" if in_8_bits else "none"}
        self.engine = make_engine(replace(self.policy), self.config.rollout.model_copy(update=changed))
        self.limits = SamplingSettings(max_tokens=settings["max_tokens"], in_8_bits=in_8_bits)

    def sample(self, groups: int, samples: int, seed: int) -> dict[str, Any]:
        """Sample ``samples`` completions for each of ``groups`` prompts: seconds, lengths, and the prompts' ids."""
        asked = prompts(self.policy.tokenizer, groups)
        started = time.perf_counter()
        done = self.engine.sample(asked, samples, self.limits, seed=seed, scope="benchmark")
        return {
            "seconds": time.perf_counter() - started,
            "lengths": [[len(c.token_ids) for c in group] for group in done],
            "prompts": [list(p.token_ids) for p in asked],
            "peak_memory": peak_memory_bytes(),
        }


def main(commands: Commands, settings: dict[str, Any]) -> None:
    keep_freed_memory()
    torch.set_num_threads(settings["threads"])
    if settings.get("fixed"):
        fix_threads()
    side = OurStep(settings) if settings["role"] == "step" else OurSampler(settings)
    commands.answer(ready=True)
    for command in commands:
        if isinstance(side, OurSampler):
            commands.answer(**side.sample(**command))
        else:
            commands.answer(**(side.floor(**command) if "lengths" in command else side.step(**command)))


if __name__ == "__main__":
    serve(main)
