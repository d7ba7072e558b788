"""One step's completions as flat tensors: what passes, objective, checkpoints and other processes read and write.

Axes: N completions, T the tokens that the policy sampled in them, S all their tokens, those that a tool or an environment gave included;
flattened and ragged: there is no padding. Names end with the axis. What a loss, a mean or a count is about is T: a given token is context,
as the prompt is. Columns of T lie on the device that computes, but for ``place_T``. A micro-batch is a range of completions, and its `view`
shares the batch's memory: cutting the batch again moves no number.

An episode whose history was rewritten (``rollout.rewritten_history: fork``) is one completion of several samples, its segments: each
has its own prompt in the passes, and all have the completion's row in N. So a group, a mean, a ratio of whole completions and a weight
``1 / (|o| N)`` are about the episode: ``|o|`` counts its sampled tokens in all segments, each once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby, pairwise

import torch
from torch import Tensor

from groupwise.errors import TrainingError
from groupwise.types import Group

__all__ = ["Batch", "Member", "everyone"]

Member = tuple[int, int]
"""A completion by its group's index in the step and its own index in the group."""


def everyone(groups: Sequence[Group]) -> list[Member]:
    """All completions of ``groups``, in their order."""
    return [(g, m) for g, group in enumerate(groups) for m in range(len(group.completions))]


@dataclass
class Batch:
    """Completions in the order in which they are packed, with everything that is known about their tokens.

    The first ``learnt`` completions are those the loss is about. Those after them are scored only, because their KL or values
    belong to what the others are compared with. Columns that are None have not been needed yet.
    """

    prompts: dict[int, tuple[int, ...]]
    """Token ids of each group's prompt, by the group's index."""
    group_N: Tensor
    """Index of each completion's group in the step, on the CPU."""
    member_N: Tensor
    """Index of each completion in its group, on the CPU."""
    place_N: Tensor
    """Index of each completion among all of the step, on the CPU."""
    lengths_N: Tensor
    """Sampled tokens of each completion, on the CPU."""
    span_N: Tensor
    """All tokens of each completion, on the CPU."""
    learnt: int
    temperature: float
    """At which every token was sampled, and is scored."""
    token_ids_S: Tensor
    """On the CPU."""
    sampled_S: Tensor
    """True where the policy sampled the token, on the CPU."""
    segment_S: Tensor
    """Which sample of its completion each token belongs to, on the CPU. What was given at the beginning of a further one is its prompt."""
    place_T: Tensor
    """Index of each sampled token among all of the step, on the CPU."""
    sampler_logprobs_T: Tensor
    """Log-probabilities under the distribution that each token was drawn from, in nats."""
    weights_T: Tensor
    """Weight of each token in the policy's loss, see ``algorithm.aggregate``."""
    advantages_T: Tensor | None = None
    reference_logprobs_T: Tensor | None = None
    """Log-probabilities under the reference, in nats."""
    policy_T: Tensor | None = None
    """The policy's own log-probabilities before the first update, in nats, where something needs them and the sampler's are others."""
    old_logprobs_T: Tensor | None = None
    """Log-probabilities that the ratio is measured from, in nats; None while the ratio is 1 by definition."""
    correction_T: Tensor | None = None
    """Importance weights for the sampler's mismatch, from the first update on."""
    mask_T: Tensor | None = None
    """1 for tokens that take part in the policy's loss, else 0; None for all."""
    entropy_T: Tensor | None = None
    """Entropies of the whole distributions, in nats, before the first update, where tokens are chosen by them."""
    entropy_weights_T: Tensor | None = None
    """Weights in the entropy bonus; None for those of the loss."""
    values_T: Tensor | None = None
    """The critic's values before the first update."""
    returns_T: Tensor | None = None
    """The values' targets."""
    value_weights_T: Tensor | None = None

    @classmethod
    def of(cls, groups: Sequence[Group], members: Sequence[Member], device: torch.device, learnt: int | None = None) -> Batch:
        """The completions ``members`` of ``groups``, weights still 0. ``learnt``: how many of them the loss is about, by default all.

        Raises TrainingError where they were sampled at several temperatures: one pass scores at one.
        """
        chosen = [groups[g].completions[m] for g, m in members]
        temperatures = sorted({c.temperature for c in chosen})
        if len(temperatures) > 1:
            raise TrainingError(
                f"the batch was sampled at temperatures {', '.join(f'{t:g}' for t in temperatures)}, but log-probabilities are scored at "
                "one: sample a step's completions with one rollout.temperature"
            )
        places = {member: n for n, member in enumerate(everyone(groups))}
        all_lengths = torch.tensor([groups[g].completions[m].sampled_tokens for g, m in places], dtype=torch.long)
        place_N = torch.tensor([places[member] for member in members], dtype=torch.long)
        lengths_N = all_lengths[place_N]
        before_N = (all_lengths.cumsum(0) - all_lengths)[place_N] - (lengths_N.cumsum(0) - lengths_N)
        sampled_S = torch.tensor([sampled for c in chosen for sampled in c.sampled], dtype=torch.bool)
        logprobs_T = torch.tensor([x for c in chosen for x in c.logprobs], dtype=torch.float32)[sampled_S]
        return cls(
            prompts={g: groups[g].prompt.token_ids for g, _ in members},
            group_N=torch.tensor([g for g, _ in members], dtype=torch.long),
            member_N=torch.tensor([m for _, m in members], dtype=torch.long),
            place_N=place_N,
            lengths_N=lengths_N,
            span_N=torch.tensor([len(c.token_ids) for c in chosen], dtype=torch.long),
            learnt=len(members) if learnt is None else learnt,
            temperature=temperatures[0] if temperatures else 1.0,
            token_ids_S=torch.tensor([t for c in chosen for t in c.token_ids], dtype=torch.long),
            sampled_S=sampled_S,
            segment_S=torch.tensor([number for c in chosen for number in c.segments], dtype=torch.long),
            place_T=torch.repeat_interleave(before_N, lengths_N) + torch.arange(len(logprobs_T)),
            sampler_logprobs_T=logprobs_T.to(device),
            weights_T=torch.zeros(len(logprobs_T), dtype=torch.float32, device=device),
        )

    def __len__(self) -> int:
        return len(self.lengths_N)

    @property
    def own_T(self) -> Tensor:
        """The policy's log-probabilities before the first update: the sampler's where those are the policy's."""
        return self.sampler_logprobs_T if self.policy_T is None else self.policy_T

    @property
    def factor_T(self) -> Tensor | None:
        """What multiplies each token's surrogate."""
        factors = [x for x in (self.correction_T, self.mask_T) if x is not None]
        return None if not factors else factors[0] if len(factors) == 1 else factors[0] * factors[1]

    @property
    def members(self) -> list[Member]:
        return list(zip(self.group_N.tolist(), self.member_N.tolist(), strict=True))

    @property
    def sequence_T(self) -> Tensor:
        """Which of the N completions each sampled token belongs to."""
        return torch.repeat_interleave(torch.arange(len(self)), self.lengths_N).to(self.weights_T.device)

    def per_token(self, numbers_N: Tensor) -> Tensor:
        """Each completion's number at each of its tokens, on the device that computes."""
        return numbers_N.to(self.weights_T.device)[self.sequence_T]

    def tokens(self, rows: range) -> slice:
        """Where the sampled tokens of the completions ``rows`` lie."""
        return _part(self.lengths_N, rows)

    def view(self, rows: range) -> Batch:
        """The completions ``rows`` alone: their columns are parts of this batch's."""
        chosen = slice(rows.start, rows.stop)
        by_axis = {"N": chosen, "T": self.tokens(rows), "S": _part(self.span_N, rows)}
        parts = {name: column[by_axis[name[-1]]] for name, column in self._columns()}
        groups = dict.fromkeys(self.group_N[chosen].tolist())
        learnt = max(0, min(self.learnt, rows.stop) - rows.start)
        return Batch({g: self.prompts[g] for g in groups}, learnt=learnt, temperature=self.temperature, **parts)

    def write(self, rows: range, **columns: Tensor) -> None:
        """Write numbers about the sampled tokens of ``rows`` into columns, which are made where they are not there yet."""
        span = self.tokens(rows)
        for name, values in columns.items():
            column = getattr(self, name)
            if column is None:
                column = torch.zeros(len(self.weights_T), dtype=values.dtype, device=self.weights_T.device)
                setattr(self, name, column)
            column[span] = values

    def samples(self) -> list[tuple[tuple[int, ...], list[range]]]:
        """What a pass computes: prompts, and where in S each sequence lies that follows one. Each group's prompt with its completions is
        followed by their further segments, each behind its own."""
        found: list[tuple[tuple[int, ...], list[range]]] = []
        stops = self.span_N.cumsum(0).tolist()
        spans = zip(self.group_N.tolist(), [0, *stops], stops, strict=False)
        for group, members in groupby(spans, key=lambda span: span[0]):
            first, further = [], []
            for _, start, stop in members:
                cuts = [start, *(start + 1 + self.segment_S[start:stop].diff().nonzero()[:, 0]).tolist(), stop]
                first.append(range(start, cuts[1]))
                for begin, end in pairwise(cuts[1:]):
                    if given := self.sampled_S[begin:end].nonzero()[:1, 0].tolist():
                        own = begin + given[0]
                        further.append((tuple(self.token_ids_S[begin:own].tolist()), [range(own, end)]))
            found += [(self.prompts[group], first), *further]
        return found

    def packing(self) -> list[tuple[tuple[int, ...], list[list[int]]]]:
        """``samples`` as ``(prompt ids, [completion ids, ...])``, as ``Scorer.prepare`` takes them."""
        ids = self.token_ids_S.tolist()
        return [(prompt, [ids[places.start : places.stop] for places in sequences]) for prompt, sequences in self.samples()]

    def by_member(self, numbers_T: Tensor) -> Iterator[tuple[Member, Tensor]]:
        """One number per sampled token, split by completion."""
        return zip(self.members, numbers_T.split(self.lengths_N.tolist()), strict=True)

    def computed(self) -> dict[str, Tensor]:
        """Columns that were computed since the batch was made, on the CPU: for a checkpoint."""
        return {name: column.cpu().clone() for name, column in self._columns() if name in _COMPUTED}

    def restore(self, columns: Mapping[str, Tensor]) -> None:
        """Take the columns that ``computed`` gave. Raises ValueError for those of another batch."""
        for name, column in columns.items():
            if name not in _COMPUTED or len(column) != len(self.weights_T):
                raise ValueError(f"this batch of {len(self.weights_T)} tokens has no column {name} of {len(column)}")
            setattr(self, name, column.to(self.weights_T.device))

    def _columns(self) -> Iterator[tuple[str, Tensor]]:
        for f in fields(self):
            column = getattr(self, f.name)
            if isinstance(column, Tensor):
                yield f.name, column


_COMPUTED = frozenset(
    ("advantages_T", "reference_logprobs_T", "policy_T", "old_logprobs_T", "correction_T", "mask_T", "values_T", "returns_T")
)


def _part(sizes_N: Tensor, rows: range) -> slice:
    """Where the elements of the completions ``rows`` lie, of which each has so many."""
    start = int(sizes_N[: rows.start].sum())
    return slice(start, start + int(sizes_N[rows.start : rows.stop].sum()))
