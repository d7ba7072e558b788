"""How many tokens go into one pass, and what is done where memory runs out all the same: half as many, and the pass again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from groupwise.memory import reclaim_memory
from groupwise.training.microbatches import MicroBatch

__all__ = ["PassBudget", "largest_divisible"]

T = TypeVar("T")


class PassBudget:
    """``training.micro_batch_tokens`` as it is now. Once halved it stays so for the run: what did not fit will not fit later.

    The gradient does not depend on it, so a step that is done again has the same numbers.
    """

    def __init__(self, tokens: int, *, fixed: bool = False, tell: Callable[[str], object] = lambda sentence: None) -> None:
        """``fixed``: never halve it. Where passes speak to other processes, one alone cannot do them again. ``tell``: hears of it."""
        self.tokens, self.fixed, self.tell = tokens, fixed, tell
        self.halvings = 0
        """Since the run began."""

    def attempt(self, action: Callable[[], T], largest: Callable[[], int | None], restart: Callable[[], None]) -> T:
        """``action``, which speaks to no other process; while it runs out of the accelerator's memory, again with half the tokens.

        Args:
            largest: tokens of its largest pass that can be divided; None where there is none.
            restart: drops what the failed attempt left, and cuts the batch again by ``tokens``.
        Raises the ``torch.OutOfMemoryError``, with a note on what to set, where no pass can be divided, or none may be.
        """
        while True:
            try:
                return action()
            except torch.OutOfMemoryError as error:
                tokens = largest()
                if tokens is None or self.fixed:
                    error.add_note(self._remedy(tokens))
                    raise
            reclaim_memory()  # only now, since the error's frames hold on to the tensors of the failed pass
            before, self.tokens = self.tokens, self._half_of(tokens)
            self.halvings += 1
            restart()
            self.tell(
                f"memory ran out in a pass of {tokens:,} tokens: training.micro_batch_tokens is {self.tokens:,} from here on instead of "
                f"{before:,}, and the step is done again; its numbers stay the same"
            )

    def _half_of(self, tokens: int) -> int:
        return max(1, min(self.tokens, tokens) // 2)

    def _remedy(self, tokens: int | None) -> str:
        if tokens is None:
            return (
                "a pass of a single completion did not fit, and no smaller training.micro_batch_tokens would help: set "
                "model.gradient_checkpointing=true or model.lora, or lower rollout.max_completion_tokens"
            )
        return (
            f"set training.micro_batch_tokens={self._half_of(tokens)}, which leaves the numbers as they are: a pass of {tokens:,} tokens "
            "did not fit, and processes that divide the weights cannot make it again by themselves"
        )


def largest_divisible(micro_batches: Sequence[MicroBatch]) -> int | None:
    """Tokens of the largest micro-batch that has several completions, each prompt once; None where all have one."""
    return max((m.tokens for m in micro_batches if len(m.rows) > 1), default=None)
