"""A batch of groups, cut to a budget of tokens and packed: what one forward and backward pass is made of.

Axes: N completions and T tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.algorithm import BatchCounts, Objective, sampler_correction
from groupwise.batching import Part, cut_batch
from groupwise.config.schema import AlgorithmConfig, CorrectionConfig
from groupwise.distributed import World
from groupwise.metrics import Mean, Metric, Sum
from groupwise.models.module_scorer import ModuleScorer
from groupwise.models.scorer import Scorer
from groupwise.types import Group

__all__ = [
    "MicroBatch",
    "Share",
    "cut",
    "keep_most_entropic",
    "mask_below",
    "members_of",
    "note_first_sweep",
    "pack_for",
    "packs_alike",
]


@dataclass(frozen=True, slots=True)
class Share:
    """Completions that are swept together, by (group, completion), and the counts that their weights in the loss are made of.

    Usually one share is the whole batch. Several divide a batch among several optimiser steps, or add up several denominators in one.
    """

    members: Sequence[tuple[int, int]]
    counts: BatchCounts


@dataclass
class MicroBatch:
    """Some completions, packed, with everything the loss needs to know about them."""

    parts: list[Part]
    packed: Any
    sampled_T: Tensor
    weights_T: Tensor
    prompt_tokens: list[int]
    """Of each part's prompt, which it holds once."""
    advantages_N: Tensor | None = None
    advantages_T: Tensor | None = None
    reference_T: Tensor | None = None
    policy_T: Tensor | None = None
    """The policy's own logprobs before the first update, where something asks for them and those of the sampler are not the same."""
    old_T: Tensor | None = None
    """The policy's own logprobs at the first update, by which later ones are measured; None on-policy."""
    correction_T: Tensor | None = None
    """Weights that make up for the sampler's mismatch, from the first update on."""
    mask_T: Tensor | None = None
    """1 for tokens that take part in the policy's loss, else 0; None for all."""
    entropy_weights_T: Tensor | None = None
    """Weights of the tokens' entropies in the entropy bonus; None for those of the loss."""
    critic_batch: Any = None
    """The same completions as a critic of another kind than the policy wants them packed; None where ``packed`` will do."""
    values_T: Tensor | None = None
    """What the critic said before the first update."""
    returns_T: Tensor | None = None
    """What it should have said."""
    value_weights_T: Tensor | None = None

    @property
    def own_T(self) -> Tensor:
        """The policy's logprobs before the first update: the sampler's where those are the policy's."""
        return self.sampled_T if self.policy_T is None else self.policy_T

    def factor_T(self) -> Tensor | None:
        """What multiplies the surrogate of each token."""
        found = [x for x in (self.correction_T, self.mask_T) if x is not None]
        return None if not found else found[0] if len(found) == 1 else found[0] * found[1]

    def by_member(self, numbers_T: Tensor) -> list[tuple[tuple[int, int], list[float]]]:
        """One number per token, taken apart by completion."""
        pieces = numbers_T.split(self.packed.lengths_N.tolist())
        return [(member, piece.tolist()) for member, piece in zip(members_of(self), pieces, strict=True)]


def members_of(micro_batch: MicroBatch) -> list[tuple[int, int]]:
    """(group, completion) of each of its N completions."""
    return [(part.group, member) for part in micro_batch.parts for member in part.members]


def cut(groups: Sequence[Group], share: Share, scorer: Scorer, objective: Objective, budget: int) -> list[MicroBatch]:
    """Pack a share's completions, at most ``budget`` tokens at a time."""
    chosen: dict[int, list[int]] = {}
    for group, member in share.members:
        chosen.setdefault(group, []).append(member)
    listed = list(chosen.items())
    sizes = [
        (len(groups[i].prompt.token_ids), [len(groups[i].completions[m].token_ids) for m in members]) for i, members in listed
    ]
    return [
        _pack(
            groups,
            [Part(listed[p.group][0], tuple(listed[p.group][1][m] for m in p.members)) for p in parts],
            share.counts,
            scorer,
            objective,
        )
        for parts in cut_batch(sizes, budget)
    ]


def _pack(groups: Sequence[Group], parts: list[Part], counts: BatchCounts, scorer: Scorer, objective: Objective) -> MicroBatch:
    chosen = [(groups[p.group].prompt.token_ids, [groups[p.group].completions[m] for m in p.members]) for p in parts]
    packed = scorer.prepare([(prompt, [c.token_ids for c in completions]) for prompt, completions in chosen])
    sampled = torch.tensor([x for _, completions in chosen for c in completions for x in c.logprobs])
    weights = objective.weights(packed.lengths_N, packed.sequence_T, counts)
    out = MicroBatch(parts, packed, sampled.to(scorer.device), weights, [len(prompt) for prompt, _ in chosen])
    if objective.needs_values:
        out.value_weights_T = objective.value_weights(packed.lengths_N, packed.sequence_T, counts)
    return out


def keep_most_entropic(
    micro_batches: Sequence[MicroBatch], entropies: Sequence[Tensor], share: float, world: World
) -> dict[str, Metric]:
    """For all processes at once: leave all but this share of the whole batch's tokens, those of the most entropy, out of the loss."""
    everywhere = [] if share == 1.0 else [e for part in world.gather([e.cpu() for e in entropies]) for e in part]
    if not everywhere:
        return {}
    ordered = torch.cat(everywhere).sort(descending=True).values
    threshold = ordered[max(1, math.ceil(share * len(ordered))) - 1]
    return {"policy/tokens_kept": Mean(mask_below(micro_batches, entropies, threshold), sum(len(e) for e in entropies))}


def mask_below(micro_batches: Sequence[MicroBatch], entropies: Sequence[Tensor], threshold: Tensor) -> float:
    """Leave tokens of less entropy than ``threshold`` out of the policy's loss; how many are left."""
    for micro_batch, entropy_T in zip(micro_batches, entropies, strict=True):
        micro_batch.mask_T = (entropy_T >= threshold.to(entropy_T.device)).float()
    return sum(float(m.mask_T.sum()) for m in micro_batches if m.mask_T is not None)


def packs_alike(one: Scorer, other: Scorer) -> bool:
    """Whether what one of them prepares is fit for the other: both by packed rows, or both by padded ones, of the same token ids."""
    return isinstance(one, ModuleScorer) is isinstance(other, ModuleScorer) and _embedded(one) == _embedded(other)


def pack_for(scorer: Scorer, groups: Sequence[Group], micro_batch: MicroBatch) -> Any:
    """The micro-batch's completions in the same order, prepared by another scorer than the policy's.

    An id beyond what it embeds is read as its last one: models of one family differ in rows that stand for no token.
    """
    last = _embedded(scorer) - 1

    def known(token_ids: Sequence[int]) -> list[int]:
        return [min(token, last) for token in token_ids]

    chosen = [(groups[p.group], p.members) for p in micro_batch.parts]
    return scorer.prepare([(known(g.prompt.token_ids), [known(g.completions[m].token_ids) for m in ms]) for g, ms in chosen])


def _embedded(scorer: Scorer) -> int:
    return len(scorer.module.get_input_embeddings().weight)


def note_first_sweep(micro_batch: MicroBatch, taken_T: Tensor, algorithm: AlgorithmConfig, correction: str) -> dict[str, Metric]:
    """What is measured, and noted for later updates, when a micro-batch is swept for the first time.

    ``taken_T``: the policy's logprobs as they are now, in nats, without a graph. ``correction``: ``Config.correction_level``.
    """
    tokens = len(taken_T)
    found: dict[str, Metric] = {
        "policy/sampler_mismatch": Mean(float((taken_T - micro_batch.sampled_T).abs().sum()), tokens),
        "policy/entropy": Mean(-float(taken_T.sum()), tokens),
        "speed/learnt_tokens": Sum(tokens),
    }
    if correction != "none":
        chosen = algorithm.correction or CorrectionConfig()
        old_T = taken_T if micro_batch.old_T is None else micro_batch.old_T
        micro_batch.correction_T, numbers = sampler_correction(
            old_T, micro_batch.sampled_T, micro_batch.packed.sequence_T, len(micro_batch.packed.lengths_N),
            level=correction, mode=chosen.mode, high=chosen.cap,
        )  # fmt: skip
        found |= {f"policy/{name}": number for name, number in numbers.items()}
    if algorithm.updates_per_batch > 1 and micro_batch.old_T is None:
        micro_batch.old_T = taken_T
    return found
