"""Exact attention over group-packed rows by batched matrix products, forward and backward: the fastest way on CPUs.

A completion's row attends to its group's prompt and to the earlier rows of its own completion. The two parts are different products:

- *shared*: the rows of a whole group lie beside each other and all see all of the prompt, so they are one dense product with its
  single copy of keys and values: no padding, no mask;
- *own*: sequences (prompts too) by rectangles of so many sequences x queries x keys, causal.

One softmax spans both. As in flash attention (Dao et al., arXiv 2205.14135) each part is computed with its own maximum, and the parts
are merged by rescaling; the backward pass recomputes scores block by block, so that no score matrix outlives its block. Element-wise
work stays in the inputs' dtype (bf16 moves half the bytes, and blocks stay in the cache); sums over rows are taken in fp32.

Axes: R packed rows, H query heads, K key-value heads, U = H / K queries per key head, E head width, A sequences of a block, Q queries
of each, S own keys of each, P prompt keys. Row tensors have R + 1 rows here: the last is zero, stands in for padding, and is dropped.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from groupwise.models.layout import Span
from groupwise.models.native import calls as native

__all__ = ["BlockedPlan", "Statistics", "attend", "attend_backward", "plan_blocks"]

QUERY_BLOCK = 64
"""Queries of one sequence that are attended at a time: skips most of the causal upper half."""
SCORE_BUDGET = 131_072
"""Most elements of one block's score matrix per head: about what the cache of a CPU holds over all heads."""


@dataclass(frozen=True, slots=True)
class OwnBlock:
    """A sequences, Q query rows each from position ``offset`` on, against their own first S rows."""

    sequences: int
    queries: int
    keys: int
    offset: int
    query_rows: Tensor
    """``[A * Q]``; places past a sequence's end are row R."""
    key_rows: Tensor
    """``[A * S]``, likewise; causality alone rules them out."""


@dataclass(frozen=True, slots=True)
class SharedBlock:
    """Rows ``first .. first + count`` of one group's completions against all of its prompt."""

    first: int
    count: int
    prompt: int
    """The prompt's first row."""
    keys: int
    """Its length."""


@dataclass(frozen=True, slots=True)
class BlockedPlan:
    """Every causal pair of rows, in exactly one block."""

    own: tuple[OwnBlock, ...]
    shared: tuple[SharedBlock, ...]

    def to(self, device: torch.device) -> BlockedPlan:
        return BlockedPlan(
            tuple(replace(b, query_rows=b.query_rows.to(device), key_rows=b.key_rows.to(device)) for b in self.own), self.shared
        )


@dataclass(frozen=True, slots=True)
class Statistics:
    """What the backward pass needs of each softmax: its largest score and, relative to it, its sum; ``[R + 1, H, 1]`` each."""

    top: Tensor
    total: Tensor


def plan_blocks(spans: Sequence[Span], rows: int) -> BlockedPlan:
    """Cut the causal attention of ``spans`` into blocks; ``rows`` is R."""
    own = []
    for offset in range(0, max((s.length for s in spans), default=0), QUERY_BLOCK):
        alive = sorted((s for s in spans if s.length > offset), key=lambda s: -s.length)
        while alive:
            keys = min(alive[0].length, offset + QUERY_BLOCK)
            take = max(1, SCORE_BUDGET // ((keys - offset) * keys))
            own.append(_own_block(alive[:take], keys, offset, rows))
            alive = alive[take:]
    shared = []
    for prompt, first, end in _families(spans):
        most = max(1, SCORE_BUDGET // prompt.length)
        shared += [SharedBlock(at, min(most, end - at), prompt.start, prompt.length) for at in range(first, end, most)]
    return BlockedPlan(tuple(own), tuple(shared))


def _own_block(part: Sequence[Span], keys: int, offset: int, rows: int) -> OwnBlock:
    starts, lengths = torch.tensor([s.start for s in part])[:, None], torch.tensor([s.length for s in part])[:, None]
    q, k = torch.arange(offset, keys)[None], torch.arange(keys)[None]
    return OwnBlock(
        len(part), keys - offset, keys, offset,
        torch.where(q < lengths, starts + q, rows).flatten(), torch.where(k < lengths, starts + k, rows).flatten(),
    )  # fmt: skip


def _families(spans: Sequence[Span]) -> Iterator[tuple[Span, int, int]]:
    """Each prompt with the first row of its completions and the row past their end; they lie one after the other."""
    for index, prompt in enumerate(spans):
        if prompt.prompt is None:
            end = index + 1
            while end < len(spans) and spans[end].prompt is not None:
                end += 1
            first, last = prompt.start + prompt.length, spans[end - 1]
            if last.start + last.length > first:
                yield prompt, first, last.start + last.length


def _own_rows(rows: Tensor, index: Tensor, sequences: int, kv_heads: int) -> Tensor:
    """Rows ``[R + 1, K * U, E]`` at ``[A * Q]`` to ``[A * K, Q * U, E]``, contiguous."""
    if native.fits(rows, rows.shape[2]):
        laid = rows.new_empty(sequences * kv_heads, len(index) // sequences * (rows.shape[1] // kv_heads), rows.shape[2])
        native.by_heads(rows, index, laid, kv_heads)
        return laid
    picked = rows.index_select(0, index).view(sequences, -1, kv_heads, rows.shape[1] // kv_heads, rows.shape[2])
    return picked.transpose(1, 2).reshape(sequences * kv_heads, -1, rows.shape[2])


def _put_own(out: Tensor, index: Tensor, values: Tensor, block: OwnBlock, kv_heads: int) -> None:
    """Write ``[A * K, Q * U, E]`` to rows ``index`` of ``out`` ``[R + 1, K * U, E]``; padding lands in the last row."""
    if native.fits(values, values.shape[-1]):
        native.by_heads(out, index, values, kv_heads, back=True)
        return
    unit = out.shape[1] // kv_heads
    laid = values.view(block.sequences, kv_heads, -1, unit, values.shape[-1]).transpose(1, 2)
    out.index_copy_(0, index, laid.reshape(len(index), *out.shape[1:]))


def _add_own(out: Tensor, index: Tensor, values: Tensor, block: OwnBlock, kv_heads: int) -> None:
    """As ``_put_own``, added to what is there. Outside padding, rows of one block differ, so this is no scatter."""
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
    return part.transpose(0, 1).reshape(kv_heads, -1, rows.shape[2])


def _from_shared(values: Tensor, count: int) -> Tensor:
    """The inverse: ``[K, count * U, E]`` to ``[count, K * U, E]``."""
    kv_heads, _, width = values.shape
    return values.view(kv_heads, count, -1, width).transpose(0, 1).reshape(count, -1, width)


def _causal(block: OwnBlock, unit: int, like: Tensor) -> Tensor:
    """``[Q * U, Q]`` additive, for the last Q of the keys: query i sees own keys up to offset + i."""
    place = torch.arange(block.queries, device=like.device)
    hidden = place[None] > place.repeat_interleave(unit)[:, None]
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))


def _weights(query: Tensor, key: Tensor, unit: int, block: OwnBlock | None) -> tuple[Tensor, Tensor, Tensor]:
    """exp(score - max) of queries ``[x, Q * U, E]`` against keys ``[x, S, E]``, causal in an own block; the maxima, and fp32 sums."""
    scores = torch.bmm(query, key.transpose(1, 2))
    if native.fits(scores):
        return scores, *native.soften(scores, *_lines(block, unit))
    if block is not None:
        scores[:, :, block.offset :].add_(_causal(block, unit, scores))
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    return weights, top, weights.sum(-1, keepdim=True, dtype=torch.float32)


def _weights_and_gradient(
    rows: tuple[Tensor, Tensor, Tensor, Tensor], key: Tensor, value: Tensor, unit: int, block: OwnBlock | None
) -> tuple[Tensor, Tensor]:
    """w = exp(score - top) once more, and the scores' gradient w (grad_out . value - delta); ``rows``: query, grad_out, delta, top."""
    query, grad_out, delta, top = rows
    scores, grad_scores = torch.bmm(query, key.transpose(1, 2)), torch.bmm(grad_out, value.transpose(1, 2))
    if native.fits(scores):
        native.soften_backward(scores, grad_scores, top, delta, *_lines(block, unit))
        return scores, grad_scores
    if block is not None:
        scores[:, :, block.offset :].add_(_causal(block, unit, scores))
    weights = scores.sub_(top).exp_()
    return weights, grad_scores.sub_(delta).mul_(weights)


def _delta(grad_out: Tensor, out: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """``grad_out . out`` of each head ``[R + 1, H, 1]`` and ``grad_out``, both over ``total``."""
    if native.fits(grad_out, grad_out.shape[-1]):
        return native.delta(grad_out, out, total)
    delta = ((grad_out.float() * out.float()).sum(-1, keepdim=True) / total).to(grad_out.dtype)
    return delta, grad_out / total.to(grad_out.dtype)


def _lines(block: OwnBlock | None, unit: int) -> tuple[int, int, int]:
    """For the kernels: queries, heads per key head, and how many keys the first query sees before its own; all where there is no block."""
    return (1, 1, -1) if block is None else (block.queries, unit, block.offset)


def _parts(rotated: Tensor, heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, scaled, and keys and values, each contiguous by rows."""
    query, key, value = rotated.split([heads, kv_heads, kv_heads], dim=1)
    return query * rotated.shape[-1] ** -0.5, key.contiguous(), value.contiguous()


def attend(rotated: Tensor, plan: BlockedPlan, heads: int, kv_heads: int) -> tuple[Tensor, Statistics]:
    """Output ``[R + 1, H, E]`` and the statistics of its softmax, from rotated ``[R + 1, H + 2K, E]`` whose last row is zero."""
    unit = heads // kv_heads
    query, key, value = _parts(rotated, heads, kv_heads)
    out = torch.empty_like(query)
    top = torch.zeros(*query.shape[:2], 1, dtype=query.dtype, device=query.device)
    total = torch.ones(top.shape, dtype=torch.float32, device=query.device)
    for own in plan.own:
        k, v = (_own_rows(x, own.key_rows, own.sequences, kv_heads) for x in (key, value))
        weights, largest, sums = _weights(_own_rows(query, own.query_rows, own.sequences, kv_heads), k, unit, own)
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
    part: SharedBlock, query: Tensor, key: Tensor, value: Tensor, out: Tensor, found: Statistics, kv_heads: int
) -> None:
    """Add the prompt's share to rows whose own share is there, and divide by the sum over both."""
    rows, prompt = slice(part.first, part.first + part.count), slice(part.prompt, part.prompt + part.keys)
    k, v = (x[prompt].transpose(0, 1).contiguous() for x in (key, value))
    weights, largest, sums = _weights(_shared_rows(query, part.first, part.count, kv_heads), k, 1, None)
    total = _from_shared(sums.contiguous(), part.count)
    seen = _from_shared(torch.bmm(weights, v), part.count)
    largest = _from_shared(largest, part.count)
    top = torch.maximum(found.top[rows], largest)
    own_factor, factor = ((x.float() - top.float()).exp_() for x in (found.top[rows], largest))
    found.top[rows] = top
    both = found.total[rows].mul_(own_factor).addcmul_(total, factor)
    out[rows] = (out[rows] * (own_factor / both).to(out.dtype)).addcmul_(seen, (factor / both).to(out.dtype))


def attend_backward(
    grad_out: Tensor, rotated: Tensor, out: Tensor, found: Statistics, plan: BlockedPlan, heads: int, kv_heads: int
) -> Tensor:
    """Gradient of ``rotated``, ``[R + 1, H + 2K, E]``; ``grad_out`` and ``out`` are ``[R + 1, H, E]``, the last row of ``grad_out`` 0.

    With w = exp(score - top) / total, the gradient of the scores is w (grad_out . value - delta). The division by ``total`` is made
    once, on ``grad_out`` and ``delta``, instead of on every weight.
    """
    unit = heads // kv_heads
    query, key, value = _parts(rotated, heads, kv_heads)
    delta, grad_out = _delta(grad_out, out, found.total)
    grad_query, grad_key, grad_value = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for own in plan.own:
        q, g, d, t = (_own_rows(x, own.query_rows, own.sequences, kv_heads) for x in (query, grad_out, delta, found.top))
        k, v = (_own_rows(x, own.key_rows, own.sequences, kv_heads) for x in (key, value))
        weights, grad_scores = _weights_and_gradient((q, g, d, t), k, v, unit, own)
        _add_own(grad_value, own.key_rows, torch.bmm(weights.transpose(1, 2), g), own, kv_heads)
        _add_own(grad_key, own.key_rows, torch.bmm(grad_scores.transpose(1, 2), q), own, kv_heads)
        _put_own(grad_query, own.query_rows, torch.bmm(grad_scores, k), own, kv_heads)
    for part in plan.shared:
        q, g, d, t = (_shared_rows(x, part.first, part.count, kv_heads) for x in (query, grad_out, delta, found.top))
        prompt = slice(part.prompt, part.prompt + part.keys)
        k, v = (x[prompt].transpose(0, 1).contiguous() for x in (key, value))
        weights, grad_scores = _weights_and_gradient((q, g, d, t), k, v, 1, None)
        grad_value[prompt] += torch.bmm(weights.transpose(1, 2), g).transpose(0, 1)
        grad_key[prompt] += torch.bmm(grad_scores.transpose(1, 2), q).transpose(0, 1)
        grad_query[part.first : part.first + part.count] += _from_shared(torch.bmm(grad_scores, k), part.count)
    return torch.cat([grad_query.mul_(rotated.shape[-1] ** -0.5), grad_key, grad_value], dim=1)
