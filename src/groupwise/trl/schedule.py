"""Which completions go into which optimiser step, as TRL counts: a generation is dealt into sweeps of ``per_device_train_batch_size``
completions a process, and ``gradient_accumulation_steps`` sweeps make an optimiser step. Pure arithmetic, no torch but for the order of
prompts.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from groupwise.algorithm import BatchCounts
from groupwise.errors import DataError

__all__ = ["Schedule", "Stretch", "deal", "epoch_order", "unit_counts"]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Sweeps of one optimiser step that belong to one pass over one generation."""

    generation: int
    """Counted within the epoch."""
    sweeps: tuple[int, ...]
    """Which of the generation's sweeps, 0 to ``steps_per_generation`` - 1."""
    first_pass: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """An epoch's optimiser steps. Every epoch has the same, since it holds whole generations."""

    prompts: int
    prompts_per_generation: int
    steps_per_generation: int
    num_iterations: int
    accumulation: int

    @classmethod
    def of(cls, args: Any, prompts: int) -> Schedule:
        """Raises DataError where the data set has fewer prompts than one generation takes."""
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
    def sweeps(self) -> int:
        """Sweeps in an epoch."""
        return self.generations * self.steps_per_generation * self.num_iterations

    @property
    def updates(self) -> int:
        """Optimiser steps in an epoch; the last may have fewer sweeps than the others."""
        return math.ceil(self.sweeps / self.accumulation)

    @property
    def off_policy(self) -> bool:
        """Whether the weights move between a generation and some of its sweeps."""
        return self.accumulation % (self.steps_per_generation * self.num_iterations) != 0

    def total_updates(self, max_steps: int, epochs: float) -> int:
        return max_steps if max_steps > 0 else math.ceil(epochs * self.updates)

    def step(self, update: int) -> list[Stretch]:
        """The sweeps of the epoch's optimiser step ``update``, in order."""
        first = update * self.accumulation
        indices = range(first, min(first + self.accumulation, self.sweeps))
        passes = groupby(indices, key=lambda i: i // self.steps_per_generation)
        return [self._stretch(index, list(members)) for index, members in passes]

    def _stretch(self, pass_index: int, members: list[int]) -> Stretch:
        generation, iteration = divmod(pass_index, self.num_iterations)
        return Stretch(generation, tuple(i % self.steps_per_generation for i in members), iteration == 0)

    def sweeps_of(self, generation: int) -> set[tuple[int, ...]]:
        """Every different stretch of sweeps in which ``generation`` is learnt from."""
        per_generation = self.steps_per_generation * self.num_iterations
        first = generation * per_generation // self.accumulation
        last = ((generation + 1) * per_generation - 1) // self.accumulation
        stretches = [s for update in range(first, last + 1) for s in self.step(update)]
        return {s.sweeps for s in stretches if s.generation == generation}


def epoch_order(prompts: int, seed: int, shuffle: bool, epoch: int) -> list[int]:
    """The order of prompts in ``epoch``: the one that TRL's sampler draws from the same seed."""
    if not shuffle:
        return list(range(prompts))
    import torch

    generator = torch.Generator()
    generator.manual_seed(seed)
    for _ in range(epoch):
        torch.randperm(prompts, generator=generator)
    return torch.randperm(prompts, generator=generator).tolist()


def deal(completions: int, sweeps: int, seed: int, generation: int, units: int = 1) -> list[list[int]]:
    """The generation's completions, dealt into ``sweeps`` x ``units`` equal parts, at random where there are several sweeps.

    A sweep's ``units``, one for each process of the run, follow each other. Which completions a sweep has does not depend on how many
    units it has: processes divide the work alone.
    """
    order = list(range(completions))
    if sweeps > 1:
        random.Random(f"{seed}/{generation}").shuffle(order)
    ends = [completions * part // (sweeps * units) for part in range(sweeps * units + 1)]
    return [order[start:end] for start, end in itertools.pairwise(ends)]


def unit_counts(
    loss_type: str, *, unit: Sequence[int], sweep: int, lengths: Sequence[int], sweeps: int, units: int, max_tokens: int
) -> BatchCounts:
    """What the token losses of one unit are divided by, before the division by the number of sweeps in the optimiser step.

    ``unit``: a process's completions of a sweep, which has ``sweep`` of them in ``units`` such parts. ``lengths`` are the tokens that
    count of each completion of the generation: 0 where a truncated one is masked. ``dapo`` and its like divide by the generation's
    tokens, shared out evenly over its ``sweeps``; ``bnpo`` by the unit's own, and averages units.
    """
    tokens = max(1, sum(lengths[i] for i in unit)) * units if loss_type == "bnpo" else max(1, sum(lengths)) / sweeps
    return BatchCounts(completions=sweep, tokens=tokens, max_tokens=max_tokens)
