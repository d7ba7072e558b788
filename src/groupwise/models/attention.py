"""Choosing how attention over packed rows is computed, planning it once for all layers of a pass, and the library's kernels.

Exact attention by the library's fused kernels is the fastest way on GPUs. They want a sequence's keys in one piece, so a prompt's keys are
laid before those of each of its completions; nothing else of the prompt is repeated. On CPUs ``models/blocked_attention.py`` computes it.

Axes: R packed rows, H query heads, K key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from groupwise.limits import ATTENTION_SCORES, QUERY_BLOCK
from groupwise.models.blocked_attention import BlockedPlan, plan_blocks
from groupwise.models.ops import rotate_heads
from groupwise.models.packing import Packed, Span, Stretches, end_of, rows_in
from groupwise.models.varlen_attention import Runs, fits, move_together, plan_runs

__all__ = [
    "AttentionBlock", "AttentionPlan", "Rectangles", "allow_flash", "allow_library", "attend_by_library", "default_implementation",
    "plan_attention", "plan_rectangles",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of one kind have in common in a pass: rotary factors ``[R, 1, E / 2]`` and the blocks of one implementation."""

    cos: Tensor
    sin: Tensor
    blocked: BlockedPlan | None
    rectangles: Rectangles | None
    runs: Runs | None = None


def default_implementation(device: torch.device) -> str:
    """``blocked`` (``models/blocked_attention.py``) on CPUs; elsewhere ``varlen`` (``models/varlen_attention.py``) where a self-check has
    allowed it, else ``sdpa`` (``models/attention.py``)."""
    if device.type == "cpu" or not _by_library:
        return "blocked"
    return "varlen" if _by_flash else "sdpa"


_by_library, _by_flash = True, False


def allow_flash(yes: bool) -> None:
    """Take the flash kernels for sequences of many lengths on GPUs, or leave them out, for decoders that are made from now on."""
    global _by_flash
    _by_flash = yes


def allow_library(yes: bool) -> None:
    """Take the library's kernels on GPUs, or leave them out, for decoders that are made from now on."""
    global _by_library
    _by_library = yes


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
    if device.type == "cuda":
        # With a mask, cuDNN's attention is tried first on sm90 and later, and makes a plan for each new shape (20 to 40 ms are reported):
        # rectangles hardly ever have the same shape twice.
        torch.backends.cuda.enable_cudnn_sdp(False)
    cos = ropes[0][0]
    flash = implementation == "varlen" and fits(device, cos.dtype, 2 * cos.shape[-1])
    # What a window leaves of a prompt differs from row to row: those layers keep to rectangles.
    runs = plan_runs(packed.spans, device) if flash and None in needed else None
    library = {w: plan_rectangles(packed.spans, w, device) for w in set(needed) if w is not None or runs is None}
    return [
        AttentionPlan(cos, sin, None, library.get(w), runs if w is None else None)
        for (cos, sin), w in zip(ropes, needed, strict=True)
    ]


SCORE_BUDGET = ATTENTION_SCORES


@dataclass(frozen=True, slots=True)
class AttentionBlock:
    """A rectangle of attention: A sequences, Q query rows each, against P rows of a shared prompt and S of their own rows."""

    sequences: int
    queries: int
    prefix: int
    """P; 0 where nothing is seen of a prompt, and for the prompt itself."""
    query_rows: Tensor
    """``[A * Q]``; places past a sequence's end repeat row 0, and nobody reads what comes out of them."""
    key_rows: Tensor
    """``[P + A * S]``: the prompt's rows, then each sequence's own; places past a sequence's end repeat row 0, and causality alone rules
    them out."""
    mask: Tensor
    """``[Q, P + S]``: which keys each query sees."""


@dataclass(frozen=True, slots=True)
class Rectangles:
    """Every causal pair of rows, in exactly one block."""

    blocks: tuple[AttentionBlock, ...]
    places: Tensor
    """``[R]``: where each row's output lies among all blocks' queries, one block after the other."""


def plan_rectangles(spans: Sequence[Span], window: int | None = None, device: torch.device | None = None) -> Rectangles:
    """Rectangles of all prompts, and of each prompt's completions. ``window``: how many positions a row sees, itself included.

    All indices go to ``device`` at once, and nothing has to be asked of it, neither here nor in the layers.
    """
    families: dict[Stretches, list[Span]] = {}
    for span in spans:
        families.setdefault(span.before, []).append(span)
    cuts = [cut for before, own in families.items() for cut in _cut(own, before, window)]
    rows = [cut.rows() for cut in cuts]
    count = sum(s.length for s in spans)
    places = torch.zeros(count + 1, dtype=torch.long)  # padding's go to the last
    if rows:
        of_rows = torch.cat([torch.where(valid, queries, count) for queries, valid, _ in rows])
        places[of_rows] = torch.arange(len(of_rows))
    indices = move_together([places[:count], *(r[0] for r in rows), *(r[2] for r in rows)], device or places.device)
    places, of_queries, of_keys = indices[0], indices[1 : 1 + len(rows)], indices[1 + len(rows) :]
    masks: dict[tuple[int | None, ...], Tensor] = {}
    blocks = []
    for cut, query_rows, key_rows in zip(cuts, of_queries, of_keys, strict=True):
        prefix = rows_in(cut.prefix)
        shape = (cut.end - cut.offset, prefix + cut.end - cut.first, prefix + cut.offset - cut.first, cut.window)
        if shape not in masks:
            masks[shape] = _visible(*shape, places.device)
        blocks.append(AttentionBlock(len(cut.part), cut.end - cut.offset, prefix, query_rows, key_rows, masks[shape]))
    return Rectangles(tuple(blocks), places)


def _visible(queries: int, keys: int, offset: int, window: int | None, device: torch.device) -> Tensor:
    """``[queries, keys]``: which keys each query sees; the first query is ``offset`` keys behind the first key."""
    query = torch.arange(offset, offset + queries, device=device)[:, None]
    key = torch.arange(keys, device=device)[None]
    return key <= query if window is None else (key <= query) & (key > query - window)


@dataclass(frozen=True, slots=True)
class _Cut:
    """Queries at positions ``offset .. end`` of sequences (first row, length) against keys at ``first .. end``, and a prompt's rows."""

    part: list[tuple[int, int]]
    first: int
    offset: int
    end: int
    prefix: Stretches
    """What is seen of the shared prompt."""
    window: int | None

    def rows(self) -> tuple[Tensor, Tensor, Tensor]:
        """Rows of the queries ``[A * Q]``, which of them are any sequence's, and rows of the keys ``[P + A * S]``."""
        starts = torch.tensor([s for s, _ in self.part])[:, None]
        lengths = torch.tensor([n for _, n in self.part])[:, None]
        q, k = torch.arange(self.offset, self.end)[None], torch.arange(self.first, self.end)[None]
        valid = q < lengths
        shared = [torch.arange(first, first + count) for first, count in self.prefix]
        own = torch.where(k < lengths, starts + k, 0).flatten()
        return torch.where(valid, starts + q, 0).flatten(), valid.flatten(), torch.cat([*shared, own])


def _cut(spans: Sequence[Span], stretches: Stretches, window: int | None) -> list[_Cut]:
    """Cut the causal attention of several sequences, all behind ``stretches``, into rectangles."""
    out: list[_Cut] = []
    before = rows_in(stretches)
    for offset in range(0, max((s.length for s in spans), default=0), QUERY_BLOCK):
        alive = [(s.start, s.length) for s in spans if s.length > offset]
        alive.sort(key=lambda pair: -pair[1])
        hidden = 0 if window is None else max(0, before + offset - window + 1)  # positions that no query of the block sees
        prefix = end_of(stretches, max(0, before - hidden))
        first = max(0, hidden - before)
        while alive:
            end = min(alive[0][1], offset + QUERY_BLOCK)
            width = end - first + rows_in(prefix)
            take = max(1, SCORE_BUDGET // ((end - offset) * width))
            part, alive = alive[:take], alive[take:]
            out.append(_Cut(part, first, offset, end, prefix, None if window is None or before + end <= window else window))
    return out


def _rotated(qkv: Tensor, cos: Tensor, sin: Tensor, turned: int, inverse: bool = False) -> Tensor:
    out = torch.empty_like(qkv)
    rotate_heads(qkv, cos, sin, out, turned, inverse)
    return out


def _operands(rotated: Tensor, block: AttentionBlock, heads: int) -> tuple[Tensor, Tensor]:
    """Copies for one block: queries ``[A, H, Q, E]``, and keys and values ``[A, 2K, P + S, E]``, the prompt's first."""
    a = block.sequences
    query = rotated[:, :heads].index_select(0, block.query_rows).unflatten(0, (a, -1)).transpose(1, 2)
    seen = rotated[:, heads:].index_select(0, block.key_rows).transpose(0, 1)
    shared = seen[:, : block.prefix].expand(a, -1, -1, -1)
    return query, torch.cat([shared, seen[:, block.prefix :].unflatten(1, (a, -1)).transpose(0, 1)], dim=2)


def _by_kernel(query: Tensor, keys_values: Tensor, mask: Tensor, scale: float | None) -> Tensor:
    unit = 2 * query.shape[1] // keys_values.shape[1]
    key, value = keys_values.repeat_interleave(unit, dim=1).chunk(2, dim=1)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


class _Attend(Function):
    """All blocks. Each block's copies of keys and values live while it is computed: kept for the way back, they would grow with the square
    of a completion's length. So the backward pass makes them again, and with them the block's attention, which is a small part of a layer.
    Gradients go into one sum, block after block, so that it is the same each time."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, plan: Rectangles, heads: int, kv_heads: int, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        rotated = _rotated(qkv, cos, sin, heads + kv_heads)
        pieces = [
            _by_kernel(*_operands(rotated, block, heads), block.mask, scale).transpose(1, 2).flatten(0, 1)
            for block in plan.blocks
        ]
        ctx.save_for_backward(rotated, cos, sin)
        ctx.rest = (plan, heads, kv_heads, scale)
        ctx.mark_non_differentiable(rotated)
        return torch.cat(pieces).index_select(0, plan.places), rotated

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (rotated, cos, sin), (plan, heads, kv_heads, scale) = ctx.saved_tensors, ctx.rest
        # Of a block's places those past a sequence's end have no row: what comes out of them has no gradient.
        spread = grad.new_zeros(sum(len(block.query_rows) for block in plan.blocks), *grad.shape[1:])
        spread.index_copy_(0, plan.places, grad)
        out, start = torch.zeros_like(rotated), 0
        for block in plan.blocks:
            end = start + len(block.query_rows)
            back = spread[start:end].unflatten(0, (block.sequences, -1)).transpose(1, 2)
            start = end
            operands = [x.requires_grad_() for x in _operands(rotated, block, heads)]
            with torch.enable_grad():
                attended = _by_kernel(operands[0], operands[1], block.mask, scale)
            query, keys_values = torch.autograd.grad(attended, operands, back)
            out[:, :heads].index_add_(0, block.query_rows, query.transpose(1, 2).flatten(0, 1))
            shared, own = (
                keys_values[:, :, : block.prefix].sum(0),
                keys_values[:, :, block.prefix :].transpose(0, 1).flatten(1, 2),
            )
            out[:, heads:].index_add_(0, block.key_rows, torch.cat([shared, own], dim=1).transpose(0, 1))
        return _rotated(out, cos, sin, heads + kv_heads, inverse=True), *[None] * 6


def attend_by_library(
    qkv: Tensor, cos: Tensor, sin: Tensor, plan: Rectangles, heads: int, kv_heads: int, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Output ``[R, H, E]``, differentiable, and the rotated ``qkv``, detached; ``qkv`` is ``[R, H + 2K, E]``.

    ``scale``: of queries; 1 / sqrt(E) by default. What is kept for the way back is the rotated ``qkv`` alone.
    """
    out: tuple[Tensor, Tensor] = _Attend.apply(qkv, cos, sin, plan, heads, kv_heads, scale)
    return out
