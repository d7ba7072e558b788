"""How many sequences are sampled at once, and what is done where memory runs out all the same: half as many, and what is missing again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import torch

from groupwise.memory import reclaim_memory
from groupwise.metrics import Metric, Sum

__all__ = ["RowLimit"]

T = TypeVar("T")
logger = logging.getLogger("groupwise")


class RowLimit:
    """``rollout.max_concurrent_sequences`` as it is now, for every engine of a run. Once halved it stays so.

    What a completion's randomness is derived from does not depend on it, so what is sampled again is the same.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.halvings = 0
        """Since the run began."""
        self.tell: Callable[[str], object] = logger.warning
        """Who hears of it."""

    def metrics(self) -> dict[str, Metric]:
        return {"memory/sampling_halvings": Sum(self.halvings)}

    def attempt(self, action: Callable[[], T], at_once: Callable[[], int]) -> T:
        """``action``; while it runs out of the accelerator's memory, again with half the rows. It keeps by itself what it has finished.

        Args:
            at_once: sequences that the last attempt still had to sample; where those are fewer than the limit, they are what is halved.
        Raises the ``torch.OutOfMemoryError``, with a note on what to set, where it was one.
        """
        while True:
            try:
                return action()
            except torch.OutOfMemoryError as error:
                tried = min(at_once(), self.rows)
                if tried <= 1:
                    error.add_note(
                        "there was no room to sample a single sequence: lower the limit on completions (rollout.max_completion_tokens, "
                        "evaluation.max_completion_tokens), or see what else takes the memory"
                    )
                    raise
            reclaim_memory()  # only now, since the error's frames hold on to the cache
            before, self.rows = self.rows, tried // 2
            self.halvings += 1
            self.tell(
                f"memory ran out while {tried:,} sequences were sampled at once: rollout.max_concurrent_sequences is {self.rows:,} from "
                f"here on instead of {before:,}; what was finished is kept, the rest is sampled again, and the completions stay the same"
            )
