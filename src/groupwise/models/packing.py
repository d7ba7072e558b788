"""Group packing: where each token of a micro-batch lies, and which tokens attend to which.

A group travels as its prompt, once, and its completions, ragged, without padding:

    rows:  [ prompt a | a.0 | a.1 | a.2 | prompt b | b.0 | b.1 ]

Completion a.1 attends to prompt a and to itself, never to a.0. The result equals the computation in which the prompt is repeated
before every completion (a parity test holds it to 1e-5), with the prompt's share of the work divided by G.

The last token of a completion is predicted but predicts nothing, so it is not an input: a completion of n tokens takes n - 1 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = ["Packed", "PackedTokens", "Span", "pack", "pack_prompts"]


class PackedTokens(Protocol):
    """Completions with their prompts, prepared for one pass of a scorer: N completions, T predicted tokens."""

    @property
    def targets_T(self) -> Tensor: ...

    @property
    def sequence_T(self) -> Tensor:
        """The completion, 0 to N - 1, of each token."""
        ...

    @property
    def lengths_N(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence among the packed rows: a prompt, or the inputs of a completion."""

    start: int
    length: int
    prompt: tuple[int, int] | None
    """First row and length of a completion's prompt; ``None`` for the prompt itself."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch, packed. R rows are inputs, T tokens are predicted, N completions they belong to."""

    token_ids_R: Tensor
    positions_R: Tensor
    spans: tuple[Span, ...]
    """Prompts, each followed by its completions, in the order of their rows."""
    predict_rows_T: Tensor
    """The row whose output predicts each token."""
    targets_T: Tensor
    """The sampled tokens, stop tokens included, completion after completion."""
    sequence_T: Tensor
    """Which completion, 0 to N - 1, each predicted token belongs to."""
    lengths_N: Tensor
    """Tokens of each completion."""
    last_rows: Tensor
    """Last row of every prompt: what a sampler continues from."""
    longest: int
    """Positions of the longest sequence."""

    def to(self, device: torch.device) -> Packed:
        if device.type == "cpu":
            return self
        columns = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {k: v.to(device, non_blocking=True) for k, v in columns.items() if isinstance(v, Tensor)}
        return replace(self, **moved)


def pack(groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]) -> Packed:
    """Pack ``(prompt ids, [completion ids, ...])`` pairs. Every prompt and every completion must have at least one token.

    A completion's positions go on from its prompt's. The further segments of an episode that was forked come as pairs of their own
    (``Batch.samples``), so their positions begin with the history that they were sampled behind.

    >>> p = pack([([1, 2], [[7], [8, 9]])])
    >>> p.token_ids_R.tolist(), p.positions_R.tolist(), p.predict_rows_T.tolist(), p.targets_T.tolist()
    ([1, 2, 8], [0, 1, 2], [1, 1, 2], [7, 8, 9])
    """
    tokens: list[int] = []
    positions: list[int] = []
    predict: list[int] = []
    targets: list[int] = []
    sequence: list[int] = []
    lengths: list[int] = []
    last_rows: list[int] = []
    spans: list[Span] = []
    for prompt, completions in groups:
        assert len(prompt) > 0, "a prompt has at least one token"
        start, prompt_length = len(tokens), len(prompt)
        tokens.extend(prompt)
        positions.extend(range(prompt_length))
        last_rows.append(len(tokens) - 1)
        spans.append(Span(start, prompt_length, None))
        for completion in completions:
            assert len(completion) > 0, "a completion has at least one token"
            n = len(completion)
            spans.append(Span(len(tokens), n - 1, (start, prompt_length)))
            predict.extend([last_rows[-1], *range(len(tokens), len(tokens) + n - 1)])
            targets.extend(completion)
            sequence.extend([len(lengths)] * n)
            lengths.append(n)
            tokens.extend(completion[:-1])
            positions.extend(range(prompt_length, prompt_length + n - 1))
    return Packed(
        token_ids_R=torch.tensor(tokens, dtype=torch.long),
        positions_R=torch.tensor(positions, dtype=torch.long),
        spans=tuple(spans),
        predict_rows_T=torch.tensor(predict, dtype=torch.long),
        targets_T=torch.tensor(targets, dtype=torch.long),
        sequence_T=torch.tensor(sequence, dtype=torch.long),
        lengths_N=torch.tensor(lengths, dtype=torch.long),
        last_rows=torch.tensor(last_rows, dtype=torch.long),
        longest=max(positions, default=-1) + 1,
    )


def pack_prompts(prompts: Sequence[Sequence[int]], common: int = 0) -> Packed:
    """Prompts alone, for prefilling a cache. The first ``common`` tokens, with which all of them begin, take rows once, before all rests;
    every rest has at least one token.

    >>> pack_prompts([[4, 5, 6], [4, 5, 7, 8]], common=2).token_ids_R.tolist()
    [4, 5, 6, 7, 8]
    """
    if not common:
        return pack([(prompt, ()) for prompt in prompts])
    rests = [prompt[common:] for prompt in prompts]
    packed = pack([(prompts[0][:common], [[*rest, 0] for rest in rests])])  # what follows a rest is not an input
    return replace(packed, last_rows=common - 1 + torch.tensor([len(rest) for rest in rests]).cumsum(0))
