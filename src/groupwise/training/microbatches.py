"""A batch cut to a budget of tokens and packed: what one forward and backward pass is made of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from groupwise.batch import Batch
from groupwise.batching import cut_batch
from groupwise.models.module_scorer import ModuleScorer
from groupwise.models.scorer import PackedTokens, Scorer

__all__ = ["MicroBatch", "cut", "pack_for", "packs_alike"]


@dataclass
class MicroBatch:
    """The completions ``rows`` of a batch, packed for one pass."""

    batch: Batch
    rows: range
    packed: PackedTokens
    critic_packed: PackedTokens | None = None
    """The same completions as a critic of another kind than the policy wants them packed; None where ``packed`` will do."""
    pending: dict[str, Tensor] = field(default_factory=dict)
    """What the first sweep found out, noted in the batch once all its passes are made: a sweep that is made again starts afresh."""

    @property
    def view(self) -> Batch:
        """The rows' own columns, which are parts of the batch's."""
        return self.batch.view(self.rows)

    def note(self, **columns: Tensor) -> None:
        self.batch.note(self.rows, **columns)

    @property
    def tokens(self) -> int:
        """Of the pass, each prompt once."""
        return sum(len(prompt) + sum(map(len, completions)) for prompt, completions in self.view.packing())


def cut(batch: Batch, rows: range, scorer: Scorer, budget: int) -> list[MicroBatch]:
    """Micro-batches of the completions ``rows`` in their order, of at most ``budget`` tokens each."""
    if not rows:
        return []
    sizes = [(len(prompt), [len(ids) for ids in completions]) for prompt, completions in batch.view(rows).packing()]
    out, start = [], rows.start
    for parts in cut_batch(sizes, budget):
        chosen = range(start, start + sum(len(part.members) for part in parts))
        out.append(MicroBatch(batch, chosen, scorer.prepare(batch.view(chosen).packing())))
        start = chosen.stop
    return out


def packs_alike(one: Scorer, other: Scorer) -> bool:
    """Whether what one of them prepares is fit for the other: both by packed rows, or both by padded ones, of the same token ids."""
    return isinstance(one, ModuleScorer) is isinstance(other, ModuleScorer) and _embedded(one) == _embedded(other)


def pack_for(scorer: Scorer, batch: Batch) -> PackedTokens:
    """The completions in the same order, prepared by another scorer than the policy's.

    An id beyond what it embeds is read as its last one: models of one family differ in rows that stand for no token.
    """
    last = _embedded(scorer) - 1

    def known(token_ids: Sequence[int]) -> list[int]:
        return [min(token, last) for token in token_ids]

    return scorer.prepare([(known(prompt), [known(ids) for ids in completions]) for prompt, completions in batch.packing()])


def _embedded(scorer: Scorer) -> int:
    return len(scorer.module.get_input_embeddings().weight)
