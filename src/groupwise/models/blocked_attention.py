"""Exact attention over group-packed rows by batched matrix products, forward and backward: the fastest way on CPUs.

A completion's row attends to its group's prompt and to the earlier rows of its own completion. The two parts are different products:

- *shared*: the rows of a whole group lie beside each other and all see all of the prompt, so they are one dense product with its
  single copy of keys and values: no padding, no mask. Where what all prompts begin with is there once, the rests of all prompts lie beside
  each other too, and all see all of it;
- *own*: sequences (prompts too) by rectangles of so many sequences x queries x keys, causal.

Where a layer has a sliding window, keys that no query of a block sees are left out, and a mask hides those that only some see.

One softmax spans both. As in flash attention (Dao et al., arXiv 2205.14135) each part is computed with its own maximum, and the parts
are merged by rescaling; the backward pass recomputes scores block by block, so that no score matrix outlives its block. Element-wise
work stays in the inputs' dtype (bf16 moves half the bytes, and blocks stay in the cache); sums over rows are taken in fp32.

Axes: R packed rows, H query heads, K key-value heads, U = H / K queries per key head, E head width, A sequences of a block, Q queries
of each, S own keys of each, P keys of what is before them. Row tensors have R + 1 rows here: the last is zero, stands in for padding, and
is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from groupwise.models.native import calls as native
from groupwise.models.packing import Span, Stretches, end_of, rows_in

__all__ = ["BlockedPlan", "Statistics", "attend", "attend_backward", "plan_blocks"]

QUERY_BLOCK = 64
"""Queries of one sequence that are attended at a time: skips most of the causal upper half."""
SCORE_BUDGET = 131_072
"""Most elements of one block's score matrix per head: about what the cache of a CPU holds over all heads."""


@dataclass(frozen=True, slots=True)
class OwnBlock:
    """A sequences, Q query rows each, against S of their own rows."""

    sequences: int
    queries: int
    keys: int
    offset: int
    """The place of the first query's own row among the keys."""
    query_rows: Tensor
    """``[A * Q]``; places past a sequence's end are row R."""
    key_rows: Tensor
    """``[A * S]``, likewise; causality alone rules them out."""
    low: Tensor | None = None
    """``[Q]``: the first key in each query's window; None where all see from the first on."""


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """Rows ``first .. first + count`` of one group's completions against its prompt, or the end of it that their windows reach; or of
    prompts' rests against what all prompts begin with."""

    first: int
    count: int
    seen: Stretches
    """Where the keys lie, in the order of positions."""
    low: Tensor | None = None
    """``[count]``: the first of these that each row sees; None where all see all."""


@dataclass(frozen=True, slots=True)
class BlockedPlan:
    """Every causal pair of rows, in exactly one block."""

    own: tuple[OwnBlock, ...]
    shared: tuple[SharedBlock, ...]
    common: int = 0
    """How many of the first rows several groups see: those of what all prompts begin with."""

    def to(self, device: torch.device) -> BlockedPlan:
        def moved(low: Tensor | None) -> Tensor | None:
            return None if low is None else low.to(device)

        return BlockedPlan(
            tuple(
                replace(b, query_rows=b.query_rows.to(device), key_rows=b.key_rows.to(device), low=moved(b.low)) for b in self.own
            ),
            tuple(replace(b, low=moved(b.low)) for b in self.shared),
            self.common,
        )


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the backward pass needs of each softmax: its largest score and, relative to it, its sum; ``[R + 1, H, 1]`` each."""

    top: Tensor
    total: Tensor


def plan_blocks(spans: Sequence[Span], rows: int, window: int | None = None) -> BlockedPlan:
    """Cut the causal attention of ``spans`` into blocks; ``rows`` is R, ``window`` how many positions a row sees, itself included."""
    own = []
    for offset in range(0, max((s.length for s in spans), default=0), QUERY_BLOCK):
        alive = sorted((s for s in spans if s.length > offset), key=lambda s: -s.length)
        first = _first_seen(offset, window)
        while alive:
            end = min(alive[0].length, offset + QUERY_BLOCK)
            take = max(1, SCORE_BUDGET // ((end - offset) * (end - first)))
            own.append(_own_block(alive[:take], first, offset, end, rows, window))
            alive = alive[take:]
    shared = []
    for before, behind in _families(spans):
        keys = rows_in(before) if window is None else min(rows_in(before), window - 1)
        seen = end_of(before, keys)
        for first, end in _runs(behind, window):
            most = max(1, SCORE_BUDGET // keys)
            for at in range(first, end, most):
                last = min(end, at + most)
                shared.append(SharedBlock(at, last - at, seen, _lows(behind, at, last, keys, window)))
    common = max((s.before[0][1] for s in spans if len(s.before) > 1), default=0)
    return BlockedPlan(tuple(own), tuple(shared), common)


def _first_seen(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _own_block(part: Sequence[Span], first: int, offset: int, end: int, rows: int, window: int | None) -> OwnBlock:
    """Queries at positions ``offset .. end`` against keys at ``first .. end``."""
    starts, lengths = torch.tensor([s.start for s in part])[:, None], torch.tensor([s.length for s in part])[:, None]
    q, k = torch.arange(offset, end)[None], torch.arange(first, end)[None]
    low = None if window is None or end <= window else (q[0] - window + 1 - first).clamp_(min=0)
    return OwnBlock(
        len(part), end - offset, end - first, offset - first,
        torch.where(q < lengths, starts + q, rows).flatten(), torch.where(k < lengths, starts + k, rows).flatten(), low,
    )  # fmt: skip


def _runs(behind: Sequence[Span], window: int | None) -> list[tuple[int, int]]:
    """Runs of adjacent rows that see anything of what is before them: the first row, and the row past the end."""
    out: list[tuple[int, int]] = []
    for span in behind:
        end = span.start + (span.length if window is None else min(span.length, window - 1))
        if out and out[-1][1] == span.start:
            out[-1] = (out[-1][0], end)
        elif end > span.start:
            out.append((span.start, end))
    return out


def _lows(behind: Sequence[Span], first: int, end: int, keys: int, window: int | None) -> Tensor | None:
    """The first of the last ``keys`` rows before them that each of the rows ``first .. end`` has in its window; None where all see all of
    them."""
    if window is None:
        return None
    places = [at - s.start for s in behind for at in range(max(first, s.start), min(end, s.start + s.length))]
    low = (torch.tensor(places) + keys + 1 - window).clamp_(min=0)
    return low if bool(low.any()) else None


def _families(spans: Sequence[Span]) -> Iterator[tuple[Stretches, list[Span]]]:
    """What sequences have before them, with those sequences that have rows; they lie one after the other."""
    for before, behind in groupby((span for span in spans if span.length and span.before), key=lambda span: span.before):
        yield before, list(behind)


def _own_rows(rows: Tensor, index: Tensor, sequences: int, kv_heads: int) -> Tensor:
    """Rows ``[R + 1, K * U, E]`` at ``[A * Q]`` to ``[A * K, Q * U, E]``, contiguous."""
    if native.fits(rows, rows.shape[2]):
        laid = rows.new_empty(sequences * kv_heads, len(index) // sequences * (rows.shape[1] // kv_heads), rows.shape[2])
        native.by_heads(rows, index, laid, kv_heads)
        return laid
    picked = rows.index_select(0, index).view(sequences, -1, kv_heads, rows.shape[1] // kv_heads, rows.shape[2])
    return picked.transpose(1, 2).reshape(sequences * kv_heads, -1, rows.shape[2]).contiguous()  # with K = H that can be a view


def _put_own(out: Tensor, index: Tensor, values: Tensor, block: OwnBlock, kv_heads: int) -> None:
    """Write ``[A * K, Q * U, E]`` to rows ``index`` of ``out`` ``[R + 1, K * U, E]``; padding lands in the last row."""
    if native.fits(values, values.shape[-1]):
        native.by_heads(out, index, values, kv_heads, back=True)
        return
    unit = out.shape[1] // kv_heads
    laid = values.view(block.sequences, kv_heads, -1, unit, values.shape[-1]).transpose(1, 2)
    out.index_copy_(0, index, laid.reshape(len(index), *out.shape[1:]))


def _add_own(out: Tensor, index: Tensor, values: Tensor, block: OwnBlock, kv_heads: int) -> None:
    """Like ``_put_own``, added to what is there. Outside padding, rows of one block differ, so this is no scatter."""
    if native.fits(values, values.shape[-1]):
        native.add_by_heads(out, index, values, kv_heads)
        return
    laid = values.view(block.sequences, kv_heads, -1, 1, values.shape[-1]).transpose(1, 2).reshape(len(index), *out.shape[1:])
    out.index_copy_(0, index, laid.add_(out.index_select(0, index)))


def _shared_rows(rows: Tensor, first: int, count: int, kv_heads: int) -> Tensor:
    """Rows ``first .. first + count`` of ``[R + 1, K * U, E]`` as ``[K, count * U, E]``, contiguous."""
    if native.fits(rows, rows.shape[2]):
        laid = rows.new_empty(kv_heads, count * (rows.shape[1] // kv_heads), rows.shape[2])
        native.by_heads(rows, range(first, first + count), laid, kv_heads)
        return laid
    part = rows[first : first + count].view(count, kv_heads, -1, rows.shape[2])
    return part.transpose(0, 1).reshape(kv_heads, -1, rows.shape[2]).contiguous()


def _seen_rows(rows: Tensor, seen: Stretches) -> Tensor:
    """Rows ``seen`` of ``[R + 1, K, E]`` as ``[K, P, E]``, contiguous."""
    return torch.cat([rows[first : first + count].transpose(0, 1) for first, count in seen], dim=1)


def _from_shared(values: Tensor, count: int) -> Tensor:
    """The inverse: ``[K, count * U, E]`` to ``[count, K * U, E]``."""
    kv_heads, _, width = values.shape
    return values.view(kv_heads, count, -1, width).transpose(0, 1).reshape(count, -1, width)


def _hide(scores: Tensor, lines: _Lines) -> None:
    """Set to -inf, in place, what the lines of ``scores`` ``[x, Q * U, S]`` do not see."""
    places = torch.arange(scores.shape[2], device=scores.device)[None]
    if lines.offset >= 0:
        ends = torch.arange(lines.queries, device=scores.device).repeat_interleave(lines.unit)[:, None] + lines.offset
        scores[:, :, lines.offset :].masked_fill_((places > ends)[:, lines.offset :], float("-inf"))
    if lines.low is not None:
        scores.masked_fill_(places < lines.low.repeat_interleave(lines.unit)[:, None], float("-inf"))


def _weights(query: Tensor, key: Tensor, lines: _Lines) -> tuple[Tensor, Tensor, Tensor]:
    """exp(score - max) of queries ``[x, Q * U, E]`` against keys ``[x, S, E]``, as far as they see; the maxima, and fp32 sums."""
    scores = torch.bmm(query, key.transpose(1, 2))
    if native.fits(scores):
        return scores, *native.soften(scores, *lines)
    _hide(scores, lines)
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    return weights, top, weights.sum(-1, keepdim=True, dtype=torch.float32)


def _weights_and_gradient(
    rows: tuple[Tensor, Tensor, Tensor, Tensor], key: Tensor, value: Tensor, lines: _Lines
) -> tuple[Tensor, Tensor]:
    """w = exp(score - top) once more, and the scores' gradient w (grad_out . value - delta); ``rows``: query, grad_out, delta, top."""
    query, grad_out, delta, top = rows
    scores, grad_scores = torch.bmm(query, key.transpose(1, 2)), torch.bmm(grad_out, value.transpose(1, 2))
    if native.fits(scores):
        native.soften_backward(scores, grad_scores, top, delta, *lines)
        return scores, grad_scores
    _hide(scores, lines)
    weights = scores.sub_(top).exp_()
    return weights, grad_scores.sub_(delta).mul_(weights)


def _delta(grad_out: Tensor, out: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """``grad_out . out`` of each head ``[R + 1, H, 1]`` and ``grad_out``, both over ``total``."""
    if native.fits(grad_out, grad_out.shape[-1]):
        return native.delta(grad_out, out, total)
    delta = ((grad_out.float() * out.float()).sum(-1, keepdim=True) / total).to(grad_out.dtype)
    return delta, grad_out / total.to(grad_out.dtype)


def _add_seen(grad: Tensor, common: Tensor, values: Tensor, seen: Stretches) -> None:
    """Add ``[K, P, E]`` to rows ``seen`` of ``grad`` ``[R + 1, K, E]``; where they are the first rows, which several groups see, to
    ``common``, in fp32: there are as many terms as groups."""
    for (first, count), part in zip(seen, values.transpose(0, 1).split([count for _, count in seen]), strict=True):
        into = common if first < len(common) else grad
        into[first : first + count] += part


class _Lines(NamedTuple):
    """What the lines of a block's scores see: they are ``queries`` x ``unit`` heads, again and again."""

    queries: int
    unit: int
    offset: int
    """Query i sees the first ``offset + i + 1`` keys; all where it is negative,"""
    low: Tensor | None
    """those before ``low[i]`` left out."""


def _lines(block: OwnBlock | SharedBlock, unit: int) -> _Lines:
    if isinstance(block, OwnBlock):
        return _Lines(block.queries, unit, block.offset, block.low)
    return _Lines(1, 1, -1, None) if block.low is None else _Lines(block.count, unit, -1, block.low)


def _parts(rotated: Tensor, heads: int, kv_heads: int, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, scaled, and keys and values, each contiguous by rows."""
    query, key, value = rotated.split([heads, kv_heads, kv_heads], dim=1)
    return query * (rotated.shape[-1] ** -0.5 if scale is None else scale), key.contiguous(), value.contiguous()


def attend(
    rotated: Tensor, plan: BlockedPlan, heads: int, kv_heads: int, scale: float | None = None
) -> tuple[Tensor, Statistics]:
    """Output ``[R + 1, H, E]`` and the statistics of its softmax, from rotated ``[R + 1, H + 2K, E]`` whose last row is zero.

    ``scale``: of queries; 1 / sqrt(E) by default.
    """
    unit = heads // kv_heads
    query, key, value = _parts(rotated, heads, kv_heads, scale)
    out = torch.empty_like(query)
    top = torch.zeros(*query.shape[:2], 1, dtype=query.dtype, device=query.device)
    total = torch.ones(top.shape, dtype=torch.float32, device=query.device)
    for own in plan.own:
        k, v = (_own_rows(x, own.key_rows, own.sequences, kv_heads) for x in (key, value))
        weights, largest, sums = _weights(_own_rows(query, own.query_rows, own.sequences, kv_heads), k, _lines(own, unit))
        _put_own(top, own.query_rows, largest, own, kv_heads)
        _put_own(total, own.query_rows, sums, own, kv_heads)
        _put_own(out, own.query_rows, torch.bmm(weights, v), own, kv_heads)
    shared_rows = torch.zeros(len(out), dtype=torch.bool) if plan.shared else None
    for part in plan.shared:
        _attend_shared(part, query, key, value, out, Statistics(top, total), kv_heads)
        assert shared_rows is not None
        shared_rows[part.first : part.first + part.count] = True
    if shared_rows is None:
        out.div_(total.to(out.dtype))
    else:
        alone = (~shared_rows).nonzero()[:, 0].to(out.device)
        out.index_copy_(0, alone, out.index_select(0, alone).div_(total.index_select(0, alone).to(out.dtype)))
    return out, Statistics(top, total)


def _attend_shared(
    part: SharedBlock, query: Tensor, key: Tensor, value: Tensor, out: Tensor, statistics: Statistics, kv_heads: int
) -> None:
    """Add the share of what is before them to rows whose own share is there, and divide by the sum over both."""
    rows = slice(part.first, part.first + part.count)
    k, v = (_seen_rows(x, part.seen) for x in (key, value))
    weights, largest, sums = _weights(
        _shared_rows(query, part.first, part.count, kv_heads), k, _lines(part, query.shape[1] // kv_heads)
    )
    total = _from_shared(sums.contiguous(), part.count)
    before = _from_shared(torch.bmm(weights, v), part.count)
    largest = _from_shared(largest, part.count)
    top = torch.maximum(statistics.top[rows], largest)
    own_factor, factor = ((x.float() - top.float()).exp_() for x in (statistics.top[rows], largest))
    statistics.top[rows] = top
    both = statistics.total[rows].mul_(own_factor).addcmul_(total, factor)
    out[rows] = (out[rows] * (own_factor / both).to(out.dtype)).addcmul_(before, (factor / both).to(out.dtype))


def attend_backward(
    grad_out: Tensor, rotated: Tensor, out: Tensor, statistics: Statistics, plan: BlockedPlan, heads: int, kv_heads: int,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """Gradient of ``rotated``, ``[R + 1, H + 2K, E]``; ``grad_out`` and ``out`` are ``[R + 1, H, E]``, the last row of ``grad_out`` 0.

    With w = exp(score - top) / total, the gradient of the scores is w (grad_out . value - delta). The division by ``total`` is made
    once, on ``grad_out`` and ``delta``, instead of on every weight.
    """
    unit = heads // kv_heads
    query, key, value = _parts(rotated, heads, kv_heads, scale)
    delta, grad_out = _delta(grad_out, out, statistics.total)
    grad_query, grad_key, grad_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for own in plan.own:
        q, g, d, t = (_own_rows(x, own.query_rows, own.sequences, kv_heads) for x in (query, grad_out, delta, statistics.top))
        k, v = (_own_rows(x, own.key_rows, own.sequences, kv_heads) for x in (key, value))
        weights, grad_scores = _weights_and_gradient((q, g, d, t), k, v, _lines(own, unit))
        _add_own(grad_value, own.key_rows, torch.bmm(weights.transpose(1, 2), g), own, kv_heads)
        _add_own(grad_key, own.key_rows, torch.bmm(grad_scores.transpose(1, 2), q), own, kv_heads)
        _put_own(grad_query, own.query_rows, torch.bmm(grad_scores, k), own, kv_heads)
    common = torch.zeros(2, plan.common, *key.shape[1:], dtype=torch.promote_types(key.dtype, torch.float32), device=key.device)
    for part in plan.shared:
        q, g, d, t = (_shared_rows(x, part.first, part.count, kv_heads) for x in (query, grad_out, delta, statistics.top))
        k, v = (_seen_rows(x, part.seen) for x in (key, value))
        weights, grad_scores = _weights_and_gradient((q, g, d, t), k, v, _lines(part, unit))
        _add_seen(grad_value, common[0], torch.bmm(weights.transpose(1, 2), g), part.seen)
        _add_seen(grad_key, common[1], torch.bmm(grad_scores.transpose(1, 2), q), part.seen)
        grad_query[part.first : part.first + part.count] += _from_shared(torch.bmm(grad_scores, k), part.count)
    if plan.common:
        grad_value[: plan.common] += common[0]
        grad_key[: plan.common] += common[1]
    return torch.cat([grad_query.mul_(rotated.shape[-1] ** -0.5 if scale is None else scale), grad_key, grad_value], dim=1)
