"""Group packing: where each token of a micro-batch lies, and which tokens attend to which.

A group travels as its prompt, once, and its completions, ragged, without padding:

    rows:  [ prompt a | a.0 | a.1 | a.2 | prompt b | b.0 | b.1 ]

Completion a.1 attends to prompt a and to itself, never to a.0. The result equals the computation in which the prompt is repeated
before every completion (a parity test holds it to 1e-5), with the prompt's share of the work divided by G.

What all prompts begin with (a chat template's start, a system prompt, worked examples) can be there once, too:

    rows:  [ beginning | rest of a | rest of b | a.0 | a.1 | a.2 | b.0 | b.1 ]

The last token of a completion is predicted but predicts nothing, so it is not an input: a completion of n tokens takes n - 1 rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

__all__ = [
    "Packed",
    "PackedTokens",
    "Span",
    "Stretches",
    "beginning_to_share",
    "common_tokens",
    "end_of",
    "pack",
    "pack_prompts",
    "rows_in",
]


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


Stretches = tuple[tuple[int, int], ...]
"""Stretches of adjacent rows: the first row and the number of rows of each."""


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence among the packed rows: what prompts begin with, a prompt or its rest, or the inputs of a completion."""

    start: int
    length: int
    before: Stretches = ()
    """What all its rows see, in the order of positions: nothing for a prompt, for a completion its prompt. What all prompts begin with is
    the first rows of a micro-batch: where it is there once, it comes before the rest of each prompt."""


def rows_in(stretches: Stretches) -> int:
    """How many rows they have together."""
    return sum(count for _, count in stretches)


def end_of(stretches: Stretches, count: int) -> Stretches:
    """The last ``count`` rows of ``stretches``."""
    out: list[tuple[int, int]] = []
    for first, length in reversed(stretches):
        taken = min(length, count)
        if taken:
            out.append((first + length - taken, taken))
        count -= taken
    return tuple(reversed(out))


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch, packed. R rows are inputs, T tokens are predicted, N completions they belong to."""

    token_ids_R: Tensor
    positions_R: Tensor
    spans: tuple[Span, ...]
    """In the order of their rows."""
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


def pack(groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], common: int = 0) -> Packed:
    """Pack ``(prompt ids, [completion ids, ...])`` pairs. Every prompt and every completion must have at least one token.

    A completion's positions go on from its prompt's. The further segments of an episode that was forked come as pairs of their own
    (``Batch.samples``), so their positions begin with the history that they were sampled behind.

    ``common``: with how many tokens all prompts begin, where these take rows once. Every prompt has at least one token more.

    >>> p = pack([([1, 2], [[7], [8, 9]])])
    >>> p.token_ids_R.tolist(), p.positions_R.tolist(), p.predict_rows_T.tolist(), p.targets_T.tolist()
    ([1, 2, 8], [0, 1, 2], [1, 1, 2], [7, 8, 9])
    >>> pack([([1, 2], [[8, 9]]), ([1, 3], [[6, 5]])], common=1).token_ids_R.tolist()
    [1, 2, 3, 8, 6]
    """
    tokens: list[int] = []
    positions: list[int] = []
    predict: list[int] = []
    targets: list[int] = []
    sequence: list[int] = []
    lengths: list[int] = []
    spans: list[Span] = []

    def lay(ids: Sequence[int], before: Stretches) -> Stretches:
        """Rows for ``ids``; returns what is seen behind them."""
        start, position = len(tokens), rows_in(before)
        tokens.extend(ids)
        positions.extend(range(position, position + len(ids)))
        spans.append(Span(start, len(ids), before))
        return (*before, (start, len(ids)))

    def lay_prompt(prompt: Sequence[int], beginning: Stretches) -> Stretches:
        assert len(prompt) > common, "a prompt has at least one token of its own"
        assert tuple(prompt[:common]) == tuple(groups[0][0][:common]), "all prompts begin with the same tokens"
        return lay(prompt[common:], beginning)

    # All rests lie beside each other, so that they see the beginning as one block.
    beginning = lay(groups[0][0][:common], ()) if common else ()
    rests = [lay_prompt(prompt, beginning) for prompt, _ in groups] if common else []
    last_rows: list[int] = []
    for index, (prompt, completions) in enumerate(groups):
        before = rests[index] if common else lay_prompt(prompt, ())
        last_rows.append(sum(before[-1]) - 1)
        for completion in completions:
            assert len(completion) > 0, "a completion has at least one token"
            predict.extend([last_rows[-1], *range(len(tokens), len(tokens) + len(completion) - 1)])
            targets.extend(completion)
            sequence.extend([len(lengths)] * len(completion))
            lengths.append(len(completion))
            lay(completion[:-1], before)
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
    """Prompts alone, for prefilling a cache; ``common`` as in ``pack``.

    >>> pack_prompts([[4, 5, 6], [4, 5, 7, 8]], common=2).token_ids_R.tolist()
    [4, 5, 6, 7, 8]
    """
    return pack([(prompt, ()) for prompt in prompts], common)


def common_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """With how many tokens all ``prompts`` begin. There is at least one prompt.

    >>> common_tokens([(1, 2, 3), (1, 2, 4), (1, 2)])
    2
    """
    ids = [tuple(prompt) for prompt in prompts]
    first, last = min(ids), max(ids)  # what these two have in common, all between them have
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


WORTH_SHARING = 0.02
"""Share of a pass's rows that must be saved where what prompts begin with is computed once."""


def beginning_to_share(groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]) -> int:
    """``pack``'s ``common`` for ``groups``: as many tokens as leave each prompt one of its own, or 0 where too few rows are saved.

    >>> beginning_to_share([([1, 2, 3], [[7, 8]]), ([1, 2], [[9]])]), beginning_to_share([([1, 2, 3], [[7, 8]])])
    (1, 0)
    """
    if len(groups) < 2:
        return 0
    prompts = [prompt for prompt, _ in groups]
    common = min(common_tokens(prompts), min(map(len, prompts)) - 1)
    rows = sum(len(prompt) + sum(len(ids) - 1 for ids in completions) for prompt, completions in groups)
    return common if common * (len(groups) - 1) >= WORTH_SHARING * rows else 0
