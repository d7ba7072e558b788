"""What rows are given between their turns, or lost while they were away, computed beside a decode step (chunked prefill).

All tokens but a row's last go through the step's own matrix products, which on CPUs cost hardly more for that: a pass of their own would
read all weights once more. The last is fed as a sampled token would be.

Axes: T given tokens, in blocks of A rows with Q tokens each; H query heads, K key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from groupwise.engines.builtin.cache import Cache
from groupwise.limits import PREFILL_TOKENS, QUERY_BLOCK

__all__ = ["MissingTokens", "PrefillChunk"]

SCORE_BUDGET, KEY_BUDGET = 2**20, 2**14
"""Most elements of one block's mask, and most positions of which one block copies keys and values: few queries may look at long prompts."""


@dataclass(frozen=True, slots=True)
class MissingTokens:
    """Tokens of a row that its cache lacks, before the one that it feeds next."""

    row: int
    group: int
    prompt_length: int
    first: int
    """Own position of the first of them."""
    token_ids: Sequence[int]

    def pieces(self) -> list[MissingTokens]:
        """The same, so many tokens at a time."""
        cuts = range(0, len(self.token_ids), QUERY_BLOCK)
        return [replace(self, first=self.first + at, token_ids=self.token_ids[at : at + QUERY_BLOCK]) for at in cuts]


@dataclass(frozen=True, slots=True)
class _Block:
    """Queries of A rows against their prompts and their own positions."""

    rows: Tensor
    groups: Tensor
    queries: Tensor
    """``[A, Q]`` places among the given tokens; those past a row's end repeat place 0, and nobody reads what comes out of them."""
    prompt: int
    """Positions of the prompts that are looked at."""
    own: int
    """Own positions that are looked at."""
    masks: list[Tensor]
    """``[A, Q, prompt + own]`` for each kind of layer: what is seen."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens that rows are given, to be computed beside a step."""

    token_ids: Tensor
    rows: Tensor
    """``[T]``."""
    own: Tensor
    """``[T]`` own position of each."""
    positions: Tensor
    """``[T]`` position in the row's sequence."""
    blocks: list[_Block]
    places: Tensor
    """``[T]`` where each token's output lies among all blocks' queries."""

    @classmethod
    def plan(cls, behind: Sequence[MissingTokens], windows: Sequence[int | None], device: torch.device) -> list[PrefillChunk]:
        """Passes over at most ``PREFILL_TOKENS``, one after the other. ``windows``: of each kind of layer."""
        passes: list[list[MissingTokens]] = [[]]
        tokens = 0
        for piece in (piece for row in behind for piece in row.pieces()):
            if passes[-1] and tokens + len(piece.token_ids) > PREFILL_TOKENS:
                passes.append([])
                tokens = 0
            passes[-1].append(piece)
            tokens += len(piece.token_ids)
        return [cls._of(part, windows, device) for part in passes if part]

    @classmethod
    def _of(cls, pieces: list[MissingTokens], windows: Sequence[int | None], device: torch.device) -> PrefillChunk:
        pieces.sort(key=lambda piece: -len(piece.token_ids))  # alike lengths together: less padding
        lengths = torch.tensor([len(piece.token_ids) for piece in pieces])
        starts, places, blocks, before = lengths.cumsum(0) - lengths, [], [], 0
        for first, end in _blocks(pieces):
            block = _block(pieces[first:end], starts[first:end], windows, device)
            width = block.queries.shape[1]
            places += [before + i * width + torch.arange(int(n)) for i, n in enumerate(lengths[first:end])]
            before += block.queries.numel()
            blocks.append(block)
        own = torch.cat([piece.first + torch.arange(len(piece.token_ids)) for piece in pieces])
        prompts = torch.tensor([piece.prompt_length for piece in pieces]).repeat_interleave(lengths)
        return cls(
            torch.tensor([token for piece in pieces for token in piece.token_ids], device=device),
            torch.tensor([piece.row for piece in pieces]).repeat_interleave(lengths).to(device), own.to(device),
            (prompts + own).to(device), blocks, torch.cat(places).to(device),
        )  # fmt: skip

    def attend(self, rotated: Tensor, value: Tensor, cache: Cache, layer: int, kind: int, scale: float | None) -> Tensor:
        """``[T, H * E]``, of rotated queries and keys ``[T, H + K, E]`` and values ``[T, K, E]``, which are kept."""
        heads = rotated.shape[1] - cache.kv_heads
        prompts, own = cache.by_position(cache.prompt[layer]), cache.by_position(cache.own[layer])
        for table, new in zip(own, (rotated[:, heads:], value), strict=True):
            table[self.rows, :, self.own] = new
        pieces = []
        for block in self.blocks:
            keys, values = (
                torch.cat([p[:, :, : block.prompt][block.groups], o[:, :, : block.own][block.rows]], dim=2).repeat_interleave(
                    heads // cache.kv_heads, dim=1
                )
                for p, o in zip(prompts, own, strict=True)
            )
            query = rotated[:, :heads][block.queries].transpose(1, 2)
            attended = scaled_dot_product_attention(query, keys, values, attn_mask=block.masks[kind][:, None], scale=scale)
            pieces.append(attended.transpose(1, 2).flatten(0, 1))
        return torch.cat(pieces).index_select(0, self.places).flatten(1)


def _blocks(pieces: Sequence[MissingTokens]) -> list[tuple[int, int]]:
    """First and end of each block of ``pieces``, the longest first."""
    out, first = [], 0
    while first < len(pieces):
        end, queries = first + 1, len(pieces[first].token_ids)
        while end < len(pieces):
            positions = (end + 1 - first) * sum(_widths(pieces[first : end + 1]))
            if positions > KEY_BUDGET or queries * positions > SCORE_BUDGET:
                break
            end += 1
        out.append((first, end))
        first = end
    return out


def _widths(pieces: Sequence[MissingTokens]) -> tuple[int, int]:
    """Positions of prompts, and own ones, that some of ``pieces`` sees."""
    return max(piece.prompt_length for piece in pieces), max(piece.first + len(piece.token_ids) for piece in pieces)


def _block(pieces: Sequence[MissingTokens], starts: Tensor, windows: Sequence[int | None], device: torch.device) -> _Block:
    prompt, own = _widths(pieces)
    lengths, firsts, prompts = (
        torch.tensor(column)[:, None]
        for column in zip(*((len(p.token_ids), p.first, p.prompt_length) for p in pieces), strict=True)
    )
    query = torch.arange(int(lengths.max()))[None]
    at = (prompts + firsts + query)[:, :, None]
    there = torch.cat([torch.arange(prompt).expand(len(pieces), -1), prompts + torch.arange(own)], dim=1)[:, None]
    held = torch.cat([torch.arange(prompt) < prompts, torch.ones(len(pieces), own, dtype=torch.bool)], dim=1)[:, None]
    seen = held & (there <= at)
    return _Block(
        torch.tensor([piece.row for piece in pieces], device=device), torch.tensor([piece.group for piece in pieces], device=device),
        torch.where(query < lengths, starts[:, None] + query, 0).to(device), prompt, own,
        [(seen if window is None else seen & (there > at - window)).to(device) for window in windows],
    )  # fmt: skip
