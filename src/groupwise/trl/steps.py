"""Which completions go into which optimiser step, as TRL counts, which of their tokens count, and what is logged of them.

A generation is divided into micro-steps of ``per_device_train_batch_size`` completions a process, and ``gradient_accumulation_steps`` of
them make an optimiser step.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from groupwise.algorithm import BatchCounts
from groupwise.errors import DataError
from groupwise.metrics import Max, Mean, Metric
from groupwise.training.learner import Learner
from groupwise.training.window import Window
from groupwise.trl.config import GRPOConfig

__all__ = [
    "EntropyControl",
    "Part",
    "Schedule",
    "Stretch",
    "epoch_order",
    "micro_step_numbers",
    "prompts_needed",
    "split",
    "unit_counts",
    "whole_loss",
]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Micro-steps of one optimiser step that belong to one pass over one generation."""

    generation: int
    """Counted within the epoch."""
    micro_steps: tuple[int, ...]
    """Which of the generation's micro-steps, 0 to ``steps_per_generation`` - 1."""
    first_pass: bool

    @property
    def begins_generation(self) -> bool:
        """Whether nothing was learnt from the generation before."""
        return self.first_pass and self.micro_steps[0] == 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """An epoch's optimiser steps. Every epoch has the same, since it holds whole generations."""

    prompts: int
    prompts_per_generation: int
    steps_per_generation: int
    num_iterations: int
    accumulation: int

    @classmethod
    def of(cls, args: GRPOConfig, prompts: int) -> Schedule:
        """The schedule for so many prompts. Raises DataError where they are fewer than one generation takes."""
        needed = args.generation_batch_size // args.num_generations
        if prompts < needed:
            raise DataError(
                f"the data set has {prompts} prompts, but one generation takes {needed} (generation_batch_size "
                f"{args.generation_batch_size} / num_generations {args.num_generations}): lower per_device_train_batch_size or "
                "steps_per_generation, or give more prompts"
            )
        return cls(prompts, needed, args.steps_per_generation, args.num_iterations, args.gradient_accumulation_steps)

    @property
    def generations(self) -> int:
        """Generations in an epoch; prompts that do not fill one are left out."""
        return self.prompts // self.prompts_per_generation

    @property
    def micro_steps(self) -> int:
        """Micro-steps in an epoch."""
        return self.generations * self.steps_per_generation * self.num_iterations

    @property
    def updates(self) -> int:
        """Optimiser steps in an epoch; the last may have fewer micro-steps than the others."""
        return math.ceil(self.micro_steps / self.accumulation)

    def share_done(self, update: int) -> float:
        """The share of the epoch's micro-steps that are made after its optimiser step ``update``."""
        return min((update + 1) * self.accumulation, self.micro_steps) / self.micro_steps

    @property
    def off_policy(self) -> bool:
        """Whether the weights move between a generation and some of its micro-steps."""
        return self.accumulation % (self.steps_per_generation * self.num_iterations) != 0

    def total_updates(self, max_steps: int, epochs: float) -> int:
        return max_steps if max_steps > 0 else math.ceil(epochs * self.updates)

    def step(self, update: int) -> list[Stretch]:
        """The micro-steps of the epoch's optimiser step ``update``, in order."""
        first = update * self.accumulation
        indices = range(first, min(first + self.accumulation, self.micro_steps))
        return [
            Stretch(
                number // self.num_iterations,
                tuple(i % self.steps_per_generation for i in members),
                number % self.num_iterations == 0,
            )
            for number, members in groupby(indices, key=lambda i: i // self.steps_per_generation)  # passes over generations
        ]

    def micro_steps_of(self, generation: int) -> set[tuple[int, ...]]:
        """Every different stretch of micro-steps in which ``generation`` is learnt from."""
        per_generation = self.steps_per_generation * self.num_iterations
        first = generation * per_generation // self.accumulation
        last = ((generation + 1) * per_generation - 1) // self.accumulation
        stretches = [s for update in range(first, last + 1) for s in self.step(update)]
        return {s.micro_steps for s in stretches if s.generation == generation}


def epoch_order(prompts: int, seed: int, shuffle: bool, epoch: int) -> list[int]:
    """The order of prompts in ``epoch``: the one that TRL's sampler draws from the same seed."""
    if not shuffle:
        return list(range(prompts))
    generator = torch.Generator()
    generator.manual_seed(seed)
    for _ in range(epoch):
        torch.randperm(prompts, generator=generator)
    return torch.randperm(prompts, generator=generator).tolist()


def prompts_needed(args: GRPOConfig) -> int:
    """Prompts of the generations that ``max_steps`` optimiser steps take."""
    generations = math.ceil(args.max_steps * args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations))
    return generations * (args.generation_batch_size // args.num_generations)


def split(completions: int, micro_steps: int, seed: int, generation: int, units: int = 1) -> list[list[int]]:
    """Divide the generation's completions into ``micro_steps`` x ``units`` equal parts, at random where there are several micro-steps.

    A micro-step's ``units``, one for each process of the run, follow each other. Which completions a micro-step has does not depend on how
    many units it has: processes divide the work alone.
    """
    order = list(range(completions))
    if micro_steps > 1:
        random.Random(f"{seed}/{generation}").shuffle(order)
    ends = [completions * part // (micro_steps * units) for part in range(micro_steps * units + 1)]
    return [order[start:end] for start, end in itertools.pairwise(ends)]


def unit_counts(
    loss_type: str, *, unit: Sequence[int], micro_step: int, lengths: Sequence[int], micro_steps: int, units: int, max_tokens: int
) -> BatchCounts:
    """What the token losses of one unit are divided by, before the division by the number of micro-steps in the optimiser step.

    ``unit``: a process's completions of a micro-step, which has ``micro_step`` of them in ``units`` such parts. ``lengths`` are the tokens
    that count of each completion of the generation: 0 where a truncated one is masked. ``dapo`` and its like divide by the generation's
    tokens, shared out evenly over its ``micro_steps``; ``bnpo`` by the unit's own, and averages units.
    """
    tokens = max(1, sum(lengths[i] for i in unit)) * units if loss_type == "bnpo" else max(1, sum(lengths)) / micro_steps
    return BatchCounts(completions=micro_step, tokens=tokens, max_tokens=max_tokens)


@dataclass
class Part:
    """Some micro-steps of a generation that are learnt from together."""

    window: Window
    """This process's completions of them that have something to teach."""
    unit_N: Tensor
    """Which of the micro-steps' units each of them belongs to, on the CPU."""
    units: int
    units_per_micro_step: int
    skipped: Mean
    """Of all processes' tokens that count of completions without an advantage, which are not computed: -log of the probability with which
    they were drawn, NaN where a ``rollout_func`` drew them."""


class EntropyControl:
    """Masks of low-entropy tokens, and the coefficient of the entropy bonus as it is now."""

    def __init__(self, args: GRPOConfig) -> None:
        self.args = args
        self.coef = float(args.entropy_coef)
        self.last_entropy = float("inf")
        """Nats per token, of the last optimiser step's tokens."""

    @property
    def has_bonus(self) -> bool:
        return self.args.entropy_coef != 0 or self.args.use_adaptive_entropy

    @property
    def acts(self) -> bool:
        """Whether every token matters, with an advantage or without, and every micro-step by itself."""
        return self.has_bonus or self.args.top_entropy_quantile < 1

    @property
    def applied(self) -> float | None:
        """What the learner is to take off the loss now. Adaptively, only where the last step's entropy was at the target or below."""
        if not self.has_bonus:
            return None
        return 0.0 if self.args.use_adaptive_entropy and self.last_entropy > self.args.entropy_target else self.coef

    def prepare(self, learner: Learner, part: Part) -> None:
        """Choose which tokens count by the policy as it is now, and weigh them in the bonus. A collective call, before the passes.

        The mask is that of "Beyond the 80/20 rule" (arXiv 2506.01939), of each micro-step by itself; the bonus is the mean over a unit's
        tokens that count, whatever the loss type is, and the mean of those over the units of a micro-step.
        """
        learner.entropy_bonus = self.applied
        if not self.acts:
            return
        batch, world = part.window.batch, learner.world
        unit_T = part.unit_N.to(batch.weights_T.device)[batch.sequence_T]
        counts_T = torch.ones_like(batch.weights_T)
        if self.args.top_entropy_quantile < 1:
            entropies_T = learner.entropies(part.window)
            for micro_step in range(part.units // part.units_per_micro_step):
                chosen_T = unit_T // part.units_per_micro_step == micro_step
                everywhere = torch.cat(world.all_gather_object(entropies_T[chosen_T].float().cpu()))
                if len(everywhere):
                    threshold = float(torch.quantile(everywhere, 1 - self.args.top_entropy_quantile))
                    counts_T[chosen_T] = (entropies_T[chosen_T] >= threshold).float()
        batch.mask_T = counts_T
        if self.has_bonus:
            own_U = torch.zeros(part.units, dtype=torch.float32).index_add_(0, unit_T.cpu(), counts_T.cpu())
            tokens_U = world.assemble(own_U, torch.arange(part.units), part.units).clamp(min=1)
            batch.entropy_weights_T = counts_T * (1 / (tokens_U * part.units_per_micro_step)).to(counts_T)[unit_T]

    def numbers(self, found: Mapping[str, Metric], micro_steps: int, *, evaluating: bool = False) -> dict[str, float]:
        """What TRL logs with an entropy bonus: the loss without it, and the coefficient after the optimiser step."""
        if not self.has_bonus:
            return {}
        by_token = self.args.loss_type not in ("grpo", "bnpo", "dr_grpo", "luspo", "sapo", "gmpo")
        shared_out = micro_steps if by_token else 1
        loss = found["policy/loss"].value if "policy/loss" in found else 0.0
        return {"policy_loss": loss / shared_out} | ({} if evaluating else {"entropy_coef": self.coef})

    def step(self, found: Mapping[str, Metric]) -> None:
        """Move the coefficient towards the target entropy (Skywork-OR1, arXiv 2505.22312), after an optimiser step whose passes measured
        ``found``."""
        args, kept = self.args, found.get("detail/entropy_kept")
        if args.use_adaptive_entropy:
            self.last_entropy = kept.value if isinstance(kept, Mean) and kept.count else 0.0
            move = args.entropy_coef_delta if self.last_entropy <= args.entropy_target else -args.entropy_coef_delta
            self.coef = min(self.coef + move, args.entropy_coef_max) if move > 0 else max(self.coef + move, args.entropy_coef_min)

    def checkpoint_state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """No tensors; what goes on from step to step."""
        return {}, {"entropy_coef": self.coef, "last_world_entropy": self.last_entropy}

    def load_checkpoint_state(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Restore what ``checkpoint_state`` gave where both runs adapt the coefficient; else it is what the arguments say now."""
        if self.args.use_adaptive_entropy and math.isfinite(last := float(values["last_world_entropy"])):
            self.coef, self.last_entropy = float(values["entropy_coef"]), last


def micro_step_numbers(found: Mapping[str, Metric], skipped: Mean, loss_type: str) -> dict[str, float]:
    """Entropy, KL and clipping of one optimiser step's micro-steps, as means over its tokens.

    ``skipped`` are those of completions without an advantage, which were not computed: none of them is clipped. Where how they were drawn
    is unknown (NaN) entropy is that of the others, and is left out without any.
    """
    out = {name: metric.value for name, metric in found.items() if name.startswith("loss/")}  # of a loss of the user's
    measured = found.get("detail/entropy", Mean(0.0, 0))
    assert isinstance(measured, Mean)
    drawn = measured if math.isnan(skipped.total) else measured + skipped
    if drawn.count or not skipped.count:
        out["entropy"] = drawn.total / max(1, drawn.count)
    for ours, theirs in (("policy/kl", "kl"), ("detail/kl_corrected", "kl")):
        if ours in found:
            out[theirs] = found[ours].value
    if loss_type in ("sapo", "vespo"):
        return out  # they clip nothing
    low, high = (found.get(f"detail/clip_{side}", Mean(0.0, 0)) for side in ("low", "high"))
    tokens = max(1, low.count + skipped.count)  # type: ignore[union-attr]
    shares = [m.total / tokens for m in (low, high)]  # type: ignore[union-attr]
    if loss_type == "cispo":
        return out | {"cispo_clip_ratio": sum(shares)}  # a bound below 1 holds down ratios below 1 too
    return out | {
        "clip_ratio/low_mean": shares[0],
        "clip_ratio/high_mean": shares[1],
        "clip_ratio/region_mean": sum(shares),
        "clip_ratio/low_min": 0.0 if skipped.count else found.get("detail/clip_low_min", Max(0.0)).value,
        "clip_ratio/high_max": found.get("detail/clip_high_max", Max(0.0)).value,
    }


def whole_loss(found: Mapping[str, Metric]) -> float:
    """The policy's loss less the entropy bonus; 0 of nothing."""
    return sum(sign * found[name].value for name, sign in (("policy/loss", 1), ("detail/entropy_bonus", -1)) if name in found)
