"""Choosing how attention over packed rows is computed, planning it once for all layers of a pass, and the library's kernels.

Exact attention by the library's fused kernels is the fastest way on GPUs. They want a sequence's keys in one piece, so a prompt's keys are
laid before those of each of its completions; nothing else of the prompt is repeated. On CPUs ``models/blocked_attention.py`` computes it.

Axes: R packed rows, H query heads, K key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from groupwise.limits import QUERY_BLOCK
from groupwise.models.blocked_attention import BlockedPlan, plan_blocks
from groupwise.models.packing import Packed, Span

__all__ = [
    "AttentionBlock", "AttentionPlan", "attend_by_library", "default_implementation", "plan_attention", "plan_rectangles",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one kind have in common in a pass: rotary factors ``[R, 1, E / 2]`` and the blocks of one implementation."""

    cos: Tensor
    sin: Tensor
    blocked: BlockedPlan | None
    rectangles: tuple[AttentionBlock, ...] | None


def default_implementation(device: torch.device) -> str:
    """``blocked`` (``models/blocked_attention.py``) on CPUs, ``sdpa`` (``models/attention.py``) elsewhere."""
    return "blocked" if device.type == "cpu" else "sdpa"


def plan_attention(
    packed: Packed, ropes: Sequence[tuple[Tensor, Tensor]], windows: Sequence[int | None], implementation: str
) -> list[AttentionPlan]:
    """One plan for each kind of layer, that is for each window with the rotary factors (cos and sin) of its layers.

    A window that no sequence exceeds is none, so that kinds of layers often share their blocks.
    """
    device = ropes[0][0].device
    needed = [None if window is None or window >= packed.longest else window for window in windows]
    if implementation == "blocked":
        blocked = {w: plan_blocks(packed.spans, len(packed.token_ids_R), w).to(device) for w in set(needed)}
        return [AttentionPlan(cos, sin, blocked[w], None) for (cos, sin), w in zip(ropes, needed, strict=True)]
    library = {w: tuple(block.to(device) for block in plan_rectangles(packed.spans, w)) for w in set(needed)}
    return [AttentionPlan(cos, sin, None, library[w]) for (cos, sin), w in zip(ropes, needed, strict=True)]


SCORE_BUDGET = 2**24
"""Most elements of one block's mask per head: bounds the memory of the repeated prompts."""


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """A rectangle of attention: A sequences, Q query rows each, against an optional shared prefix and S of their own rows.

    ``query_rows`` ``[A * Q]`` and ``key_rows`` ``[A * S]`` index the packed rows; places past a sequence's end repeat row 0 and are
    ruled out by ``query_valid`` (queries) and by causality (keys). ``offset`` is the place of the first query's own row among the keys.
    """

    sequences: int
    queries: int
    keys: int
    offset: int
    query_rows: Tensor
    key_rows: Tensor
    query_valid: Tensor | None
    prefix: tuple[int, int] | None
    """First row and length of what is seen of the shared prompt; ``None`` where nothing is, and for the prompt itself."""
    window: int | None = None
    """How many positions a query sees, itself included; None where it sees all of prefix and keys before it."""

    def visible(self, device: torch.device) -> Tensor:
        """``[Q, prefix + S]``: which keys each query sees."""
        before = self.prefix[1] if self.prefix else 0
        queries = torch.arange(before + self.offset, before + self.offset + self.queries, device=device)[:, None]
        keys = torch.arange(before + self.keys, device=device)[None]
        return keys <= queries if self.window is None else (keys <= queries) & (keys > queries - self.window)

    def to(self, device: torch.device) -> AttentionBlock:
        valid = None if self.query_valid is None else self.query_valid.to(device)
        return replace(self, query_rows=self.query_rows.to(device), key_rows=self.key_rows.to(device), query_valid=valid)


def plan_rectangles(spans: Sequence[Span], window: int | None = None) -> tuple[AttentionBlock, ...]:
    """Rectangles of all prompts, and of each prompt's completions. ``window``: how many positions a row sees, itself included."""
    out: list[AttentionBlock] = []
    prompts = [s for s in spans if s.prompt is None]
    out += _blocks([s.start for s in prompts], [s.length for s in prompts], None, window)
    for prompt in prompts:
        own = [s for s in spans if s.prompt == (prompt.start, prompt.length)]
        out += _blocks([s.start for s in own], [s.length for s in own], (prompt.start, prompt.length), window)
    return tuple(out)


def _blocks(
    starts: Sequence[int], lengths: Sequence[int], prompt: tuple[int, int] | None, window: int | None
) -> list[AttentionBlock]:
    """Cut the causal attention of several sequences (rows ``start .. start + length``) into rectangles."""
    out: list[AttentionBlock] = []
    before = prompt[1] if prompt else 0
    for offset in range(0, max(lengths, default=0), QUERY_BLOCK):
        alive = [(s, n) for s, n in zip(starts, lengths, strict=True) if n > offset]
        alive.sort(key=lambda pair: -pair[1])
        hidden = 0 if window is None else max(0, before + offset - window + 1)  # positions that no query of the block sees
        prefix = (prompt[0] + hidden, before - hidden) if prompt and hidden < before else None
        first = max(0, hidden - before)
        while alive:
            end = min(alive[0][1], offset + QUERY_BLOCK)
            width = end - first + (prefix[1] if prefix else 0)
            take = max(1, SCORE_BUDGET // ((end - offset) * width))
            part, alive = alive[:take], alive[take:]
            out.append(_block(part, first, offset, end, prefix, None if window is None or before + end <= window else window))
    return out


def _block(
    part: list[tuple[int, int]], first: int, offset: int, end: int, prefix: tuple[int, int] | None, window: int | None
) -> AttentionBlock:
    """Queries at positions ``offset .. end`` of their sequences against keys at ``first .. end``."""
    starts = torch.tensor([s for s, _ in part])[:, None]
    lengths = torch.tensor([n for _, n in part])[:, None]
    q, k = torch.arange(offset, end)[None], torch.arange(first, end)[None]
    valid = q < lengths
    return AttentionBlock(
        sequences=len(part),
        queries=end - offset,
        keys=end - first,
        offset=offset - first,
        query_rows=torch.where(valid, starts + q, 0).flatten(),
        key_rows=torch.where(k < lengths, starts + k, 0).flatten(),
        query_valid=None if bool(valid.all()) else valid.flatten(),
        prefix=prefix,
        window=window,
    )


def _rotate_differentiably(qkv: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> Tensor:
    first, second = qkv[:, :rotated].chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned, qkv[:, rotated:]], dim=1)


def attend_by_library(
    qkv: Tensor, cos: Tensor, sin: Tensor, blocks: tuple[AttentionBlock, ...], heads: int, kv_heads: int,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output ``[R, H, E]``, differentiable, and the rotated ``qkv``, detached; ``qkv`` is ``[R, H + 2K, E]``.

    ``scale``: of queries; 1 / sqrt(E) by default.
    """
    rotated = _rotate_differentiably(qkv, cos, sin, heads + kv_heads)
    q_rows, k_rows, v_rows = rotated.split([heads, kv_heads, kv_heads], dim=1)
    pieces, rows = [], []
    for block in blocks:
        a = block.sequences

        def lay_out(source: Tensor, index: Tensor, count: int = a) -> Tensor:
            return source.index_select(0, index).view(count, -1, *source.shape[1:]).transpose(1, 2)

        query, key, value = lay_out(q_rows, block.query_rows), lay_out(k_rows, block.key_rows), lay_out(v_rows, block.key_rows)
        mask = block.visible(qkv.device)
        if block.prefix:
            start, length = block.prefix
            key = torch.cat([k_rows[start : start + length].transpose(0, 1).expand(a, -1, -1, -1), key], dim=2)
            value = torch.cat([v_rows[start : start + length].transpose(0, 1).expand(a, -1, -1, -1), value], dim=2)
        unit = heads // kv_heads
        key, value = key.repeat_interleave(unit, dim=1), value.repeat_interleave(unit, dim=1)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
        flat = out.transpose(1, 2).reshape(a * block.queries, heads, -1)
        valid = block.query_valid
        pieces.append(flat if valid is None else flat[valid])
        rows.append(block.query_rows if valid is None else block.query_rows[valid])
    order = torch.argsort(torch.cat(rows))
    return torch.cat(pieces).index_select(0, order), rotated.detach()
