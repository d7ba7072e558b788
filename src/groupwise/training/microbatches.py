"""A batch cut to a budget of tokens and packed: what one forward and backward pass is made of.

Where memory runs out all the same, the budget is halved and the pass is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

import torch
from torch import Tensor

from groupwise.batch import Batch
from groupwise.batching import cut_batch
from groupwise.memory import ran_out_on_device, reclaim_memory
from groupwise.models.module_scorer import Padded
from groupwise.models.packing import Packed, PackedTokens
from groupwise.models.scorer import Scorer

__all__ = ["LESS_MEMORY", "MicroBatch", "PassBudget", "cut", "sampled_alone"]

LESS_MEMORY = "model.gradient_checkpointing=true or model.lora"
"""Settings for a run of which no more is known."""


@dataclass
class MicroBatch:
    """The completions ``rows`` of a batch, packed for one pass."""

    batch: Batch
    rows: range
    packed: PackedTokens

    @property
    def view(self) -> Batch:
        """The rows' own columns, which are parts of the batch's."""
        return self.batch.view(self.rows)

    def write(self, **columns: Tensor) -> None:
        self.batch.write(self.rows, **columns)

    @property
    def tokens(self) -> int:
        """Tokens of the pass, each prompt counted once."""
        return sum(len(prompt) + sum(map(len, completions)) for prompt, completions in self.view.packing())


def cut(batch: Batch, scorer: Scorer, budget: int) -> list[MicroBatch]:
    """Micro-batches of the batch's completions in their order, of at most ``budget`` tokens each."""
    if not len(batch):
        return []
    numbered = groupby(zip(batch.group_N.tolist(), batch.span_N.tolist(), strict=True), key=lambda pair: pair[0])
    sizes = [(len(batch.prompts[group]), [span for _, span in pairs]) for group, pairs in numbered]
    out, start = [], 0
    for parts in cut_batch(sizes, budget):
        chosen = range(start, start + sum(len(part.members) for part in parts))
        view = batch.view(chosen)
        out.append(MicroBatch(batch, chosen, sampled_alone(scorer.prepare(view.packing()), view)))
        start = chosen.stop
    return out


def sampled_alone(packed: PackedTokens, batch: Batch) -> PackedTokens:
    """``packed``, which predicts what follows each prompt of ``batch``, so that it predicts the tokens that the policy sampled, in the
    batch's order."""
    if bool(batch.sampled_S.all()):
        return packed
    assert isinstance(packed, (Packed, Padded))
    predicted = torch.cat([torch.arange(places.start, places.stop) for _, sequences in batch.samples() for places in sequences])
    found_S = torch.zeros(len(batch.sampled_S), dtype=torch.long)
    found_S[predicted] = torch.arange(len(predicted))
    device = packed.targets_T.device
    chosen_T = found_S[batch.sampled_S].to(device)
    return replace(
        packed, predict_rows_T=packed.predict_rows_T[chosen_T], targets_T=packed.targets_T[chosen_T],
        sequence_T=batch.sequence_T.to(device), lengths_N=batch.lengths_N.to(device),
    )  # fmt: skip


T = TypeVar("T")


class PassBudget:
    """``training.micro_batch_tokens`` as it is now. Once halved it stays so for the run: what did not fit will not fit later.

    The gradient does not depend on it, so a step that is done again has the same numbers.
    """

    def __init__(
        self, tokens: int, *, fixed: bool = False, tell: Callable[[str], object] = lambda sentence: None,
        less_memory: str = LESS_MEMORY,
    ) -> None:  # fmt: skip
        """``fixed``: never halve it. Where passes speak to other processes, one alone cannot do them again. ``tell``: hears of
        it. ``less_memory``: settings that help where halving does not."""
        self.tokens, self.fixed, self.tell, self.less_memory = tokens, fixed, tell, less_memory
        self.halvings = 0
        """Since the run began."""

    @contextmanager
    def lowered(self, tokens: int) -> Iterator[None]:
        """Allow at most ``tokens`` inside this context. Where memory ran out all the same, what was halved stays so."""
        before, self.tokens = self.tokens, tokens
        try:
            yield
        finally:
            if self.tokens == tokens:
                self.tokens = before

    def attempt(self, action: Callable[[], T], largest: Callable[[], int | None], restart: Callable[[], None]) -> T:
        """``action``, which speaks to no other process; while it runs out of the accelerator's memory, again with half the tokens.

        Args:
            largest: tokens of its largest pass that can be divided; None where there is none.
            restart: drops what the failed attempt left, and cuts the batch again by ``tokens``.
        Raises the error, with a note on what to set, where no pass can be divided, or none may be.
        """
        while True:
            try:
                return action()
            except RuntimeError as error:
                if not ran_out_on_device(error):
                    raise
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
            others = f"set {self.less_memory}, or " if self.less_memory else ""
            return (
                "a pass of a single completion did not fit, and no smaller training.micro_batch_tokens would help: "
                f"{others}lower rollout.max_completion_tokens"
            )
        return (
            f"set training.micro_batch_tokens={self._half_of(tokens)}, which leaves the numbers as they are: a pass of {tokens:,} tokens "
            "did not fit, and processes that divide the weights cannot make it again by themselves"
        )
