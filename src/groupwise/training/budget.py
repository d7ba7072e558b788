"""How many tokens go into one pass, and what is done where memory runs out all the same: half as many, and the pass again."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from groupwise.training.microbatches import MicroBatch

__all__ = ["PassBudget"]

T = TypeVar("T")


class PassBudget:
    """``training.micro_batch_tokens`` as it is now. Once halved it stays so for the run: what did not fit will not fit later.

    The gradient does not depend on it, so a step that is done again has the same numbers.
    """

    def __init__(self, tokens: int, *, fixed: bool = False) -> None:
        """``fixed``: never halve it. Where passes speak to other processes, one alone cannot do them again."""
        self.tokens, self.fixed = tokens, fixed
        self.halvings = 0
        """Since the run began."""
        self.tell: Callable[[str], object] = lambda sentence: None
        """Who hears of it."""

    def attempt(
        self, action: Callable[[], T], micro_batches: Callable[[], Sequence[MicroBatch]], restart: Callable[[], None]
    ) -> T:
        """``action``; while it runs out of the accelerator's memory, again with half the tokens.

        Args:
            micro_batches: those that ``action`` works on.
            restart: drops what the failed attempt left, and cuts the batch anew by ``tokens``.
        Raises the ``torch.OutOfMemoryError`` where no micro-batch has more than one completion.
        """
        while True:
            try:
                return action()
            except torch.OutOfMemoryError:
                largest = _halvable(micro_batches())
                if largest is None or self.fixed:
                    raise
            # Only now, since the error's frames hold on to the tensors of the failed pass.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            before, self.tokens = self.tokens, max(1, min(self.tokens, largest) // 2)
            self.halvings += 1
            restart()
            self.tell(
                f"memory ran out in a pass of {largest:,} tokens: training.micro_batch_tokens is {self.tokens:,} from here on instead of "
                f"{before:,}, and the step is done again; its numbers stay the same"
            )


def _halvable(micro_batches: Sequence[MicroBatch]) -> int | None:
    """Tokens of the largest micro-batch that has several completions, each prompt once; None where all have one."""
    sizes = [len(m.sampled_T) + sum(m.prompt_tokens) for m in micro_batches if sum(len(part.members) for part in m.parts) > 1]
    return max(sizes, default=None)
