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
from typing import Any

import torch
from torch import Tensor

__all__ = ["AttentionBlock", "Packed", "pack", "pack_prompts"]

QUERY_BLOCK = 256
"""Queries of one sequence that are attended at a time: bounds the score matrix, and skips most of the causal upper half."""
SCORE_BUDGET = 262_144
"""Most elements of one block's score matrix per head: about what the cache of a CPU holds over all heads."""


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """A rectangle of attention: A sequences, Q query rows each, against an optional shared prefix and their own first S rows.

    ``query_rows`` ``[A * Q]`` and ``key_rows`` ``[A * S]`` index the packed rows; places past a sequence's end repeat row 0 and are
    ruled out by ``query_valid`` (queries) and by causality (keys). ``offset`` is the position of the first query in its sequence.
    """

    sequences: int
    queries: int
    keys: int
    offset: int
    query_rows: Tensor
    key_rows: Tensor
    query_valid: Tensor | None
    prefix: tuple[int, int] | None
    """First row and length of the shared prompt; ``None`` for the prompt itself."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A micro-batch, packed. R rows are inputs, T tokens are predicted, N completions they belong to."""

    token_ids_R: Tensor
    positions_R: Tensor
    blocks: tuple[AttentionBlock, ...]
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
        return replace(self, **_moved(self, device), blocks=tuple(replace(b, **_moved(b, device)) for b in self.blocks))


def _moved(record: Any, device: torch.device) -> dict[str, Any]:
    """The tensors among a record's fields, on ``device``."""
    found = {f.name: getattr(record, f.name) for f in fields(record)}
    return {name: value.to(device, non_blocking=True) for name, value in found.items() if isinstance(value, Tensor)}


def _blocks(starts: Sequence[int], lengths: Sequence[int], prefix: tuple[int, int] | None) -> list[AttentionBlock]:
    """Cut the causal attention of several sequences (rows ``start .. start + length``) into rectangles."""
    out: list[AttentionBlock] = []
    for offset in range(0, max(lengths, default=0), QUERY_BLOCK):
        alive = [(s, n) for s, n in zip(starts, lengths, strict=True) if n > offset]
        alive.sort(key=lambda pair: -pair[1])
        while alive:
            keys = min(alive[0][1], offset + QUERY_BLOCK)
            queries = keys - offset
            width = keys + (prefix[1] if prefix else 0)
            take = max(1, SCORE_BUDGET // (queries * width))
            part, alive = alive[:take], alive[take:]
            out.append(_block(part, queries, keys, offset, prefix))
    return out


def _block(part: list[tuple[int, int]], queries: int, keys: int, offset: int, prefix: tuple[int, int] | None) -> AttentionBlock:
    starts = torch.tensor([s for s, _ in part])[:, None]
    lengths = torch.tensor([n for _, n in part])[:, None]
    q = torch.arange(offset, offset + queries)[None]
    k = torch.arange(keys)[None]
    valid = q < lengths
    return AttentionBlock(
        sequences=len(part),
        queries=queries,
        keys=keys,
        offset=offset,
        query_rows=torch.where(valid, starts + q, 0).flatten(),
        key_rows=torch.where(k < lengths, starts + k, 0).flatten(),
        query_valid=None if bool(valid.all()) else valid.flatten(),
        prefix=prefix,
    )


def pack(groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]) -> Packed:
    """Pack ``(prompt ids, [completion ids, ...])`` pairs. Every prompt and every completion must have at least one token.

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
    blocks: list[AttentionBlock] = []
    for prompt, completions in groups:
        assert len(prompt) > 0, "a prompt has at least one token"
        start, prompt_length = len(tokens), len(prompt)
        tokens.extend(prompt)
        positions.extend(range(prompt_length))
        last_rows.append(len(tokens) - 1)
        blocks.extend(_blocks([start], [prompt_length], None))
        starts = []
        for completion in completions:
            assert len(completion) > 0, "a completion has at least one token"
            n = len(completion)
            starts.append(len(tokens))
            predict.extend([last_rows[-1], *range(len(tokens), len(tokens) + n - 1)])
            targets.extend(completion)
            sequence.extend([len(lengths)] * n)
            lengths.append(n)
            tokens.extend(completion[:-1])
            positions.extend(range(prompt_length, prompt_length + n - 1))
        blocks.extend(_blocks(starts, [len(c) - 1 for c in completions], (start, prompt_length)))
    return Packed(
        token_ids_R=torch.tensor(tokens, dtype=torch.long),
        positions_R=torch.tensor(positions, dtype=torch.long),
        blocks=tuple(blocks),
        predict_rows_T=torch.tensor(predict, dtype=torch.long),
        targets_T=torch.tensor(targets, dtype=torch.long),
        sequence_T=torch.tensor(sequence, dtype=torch.long),
        lengths_N=torch.tensor(lengths, dtype=torch.long),
        last_rows=torch.tensor(last_rows, dtype=torch.long),
        longest=max(positions, default=-1) + 1,
    )


def pack_prompts(prompts: Sequence[Sequence[int]]) -> Packed:
    """Prompts alone, for prefilling a cache."""
    return pack([(prompt, ()) for prompt in prompts])
