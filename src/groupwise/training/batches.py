"""A step's batch: which problems it has, their sampled and scored groups, and the refills of dynamic sampling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from groupwise.config.schema import Config
from groupwise.data.order import problems_for_step
from groupwise.distributed import World
from groupwise.engines import Engine
from groupwise.errors import CheckpointError
from groupwise.rollout import Rollout, Sampled, collect, score
from groupwise.training.setup import Prepared
from groupwise.types import Prompt, number_occurrences

__all__ = ["Batches"]

_REFILL_SEED = 0x4EF111
"""Apart from the run's own order of problems, so that refills do not run ahead of it, and from the warm start's."""


@dataclass(frozen=True)
class Batches:
    """The batches of a run. What a step's problems are is a function of seed and step alone, whatever came before."""

    config: Config
    prepared: Prepared
    world: World

    def prompts(self, step: int) -> list[Prompt]:
        """The problems of the step, which counts from 0."""
        available = self.prepared.train_prompts
        indices = problems_for_step(
            len(available), self.config.rollout.prompts_per_step, step, self.config.training.seed, self.config.data.shuffle
        )
        return number_occurrences(available.take(indices))

    def refill_prompts(self, step: int, refill: int, count: int) -> list[Prompt]:
        """Further problems for a step whose groups have no variance; a function of seed, step and round (from 1) alone."""
        available, rounds = self.prepared.train_prompts, self.config.rollout.refill_rounds
        indices = problems_for_step(
            len(available),
            self.config.rollout.prompts_per_step,
            step * rounds + refill - 1,
            self.config.training.seed + _REFILL_SEED,
        )
        return number_occurrences(available.take(indices[:count]))

    def prompt_of(self, checkpoint: Path | None, problem_id: str) -> Prompt:
        """The prompt of a problem in a batch that ``checkpoint`` holds. Raises CheckpointError where the data no longer has it."""
        for index, problem in enumerate(self.prepared.train_prompts.problems):
            if problem.id == problem_id:
                return self.prepared.train_prompts[index]
        raise CheckpointError(
            f"the checkpoint {checkpoint} holds a batch with the problem {problem_id!r}, which the data no longer has: use an earlier one"
        )

    def collect(
        self,
        engine: Engine,
        step: int,
        *,
        on_progress: Callable[[int, int], None],
        ready: tuple[Sequence[Prompt], Sampled] | None = None,
    ) -> tuple[Rollout, int]:
        """Sample and score the step's groups, and with dynamic sampling replace those without variance (arXiv 2503.14476).

        ``ready``: the step's prompts and what this process sampled of them, where that was done ahead; refills are sampled now.
        Returns the rollout, and how many groups it took.
        """
        size = self.config.rollout.prompts_per_step
        prompts: Sequence[Prompt] = self.prompts(step) if ready is None else ready[0]
        sampled = len(prompts)
        if ready is None:
            rollout = self._collect(engine, prompts, step, 0, on_progress)
        else:
            rollout = score(prompts, ready[1], self.prepared.rewards, self.world, seed=self.config.training.seed, step=step)
        for refill in range(1, self.config.rollout.refill_rounds + 1):
            missing = size - rollout.informative
            if missing <= 0:
                break
            prompts = self.refill_prompts(step, refill, missing)
            sampled += len(prompts)
            rollout = rollout.refilled(self._collect(engine, prompts, step, refill, on_progress), size)
        return rollout, sampled

    def _collect(
        self, engine: Engine, prompts: Sequence[Prompt], step: int, refill: int, on_progress: Callable[[int, int], None]
    ) -> Rollout:
        return collect(
            engine, prompts, self.prepared.rewards, self.config.rollout, seed=self.config.training.seed, step=step,
            refill=refill, on_progress=on_progress, world=self.world,
        )  # fmt: skip
