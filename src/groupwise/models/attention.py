"""Exact attention over group-packed rows: a prompt's keys and values are used in place by all its completions, never repeated.

Two implementations of the same rectangle, chosen by device: ``blocked`` (batched matrix products with a hand-written backward pass
that keeps no score matrix; the fastest on CPUs, where scores of one block stay in cache) and ``sdpa`` (the library's fused kernels,
which want the prompt's keys repeated; the fastest on GPUs).

Axes: R packed rows, H query heads, K key-value heads, U = H / K queries per key head, E head width, A sequences in a block,
Q queries of each, S own keys of each, P prompt keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from groupwise.models.layout import AttentionBlock
from groupwise.models.ops import apply_rope

__all__ = ["packed_attention"]


def packed_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, blocks: tuple[AttentionBlock, ...], heads: int, kv_heads: int, implementation: str
) -> tuple[Tensor, Tensor]:
    """Rotary embedding and causal attention.

    Args:
        qkv: ``[R, H + 2K, E]``, queries, keys and values before the rotary embedding.
        cos, sin: ``[R, 1, E / 2]`` in ``qkv``'s dtype.
    Returns:
        the output ``[R, H, E]``, and the rotated ``qkv`` (detached), from which a sampler fills its cache.
    """
    if implementation == "sdpa":
        return _sdpa_attention(qkv, cos, sin, blocks, heads, kv_heads)
    if not torch.is_grad_enabled():
        rotated = apply_rope(qkv, cos, sin, heads + kv_heads)
        return _forward(rotated, blocks, heads, kv_heads)[0], rotated
    return _PackedAttention.apply(qkv, cos, sin, blocks, heads, kv_heads)


def _gather(rows: Tensor, index: Tensor, sequences: int, groups: int) -> Tensor:
    """Rows ``[R, groups * U, E]`` to ``[groups, A, U, Q, E]``, contiguous."""
    width, head = rows.shape[1], rows.shape[2]
    picked = rows.index_select(0, index).view(sequences, -1, groups, width // groups, head)
    return picked.permute(2, 0, 3, 1, 4).contiguous()


def _scatter(out: Tensor, values: Tensor, block: AttentionBlock) -> None:
    """The inverse of ``_gather`` for queries: write ``[K, A, U, Q, E]`` to its rows of ``out``, leaving padding out."""
    flat = values.permute(1, 3, 0, 2, 4).reshape(block.sequences * block.queries, out.shape[1], out.shape[2])
    if block.query_valid is None:
        out[block.query_rows] = flat
    else:
        out[block.query_rows[block.query_valid]] = flat[block.query_valid]


def _causal_mask(block: AttentionBlock, like: Tensor) -> Tensor:
    """``[Q, S]`` additive: query i of the block sees own keys 0 .. offset + i."""
    mask = torch.full((block.queries, block.keys), float("-inf"), dtype=like.dtype, device=like.device)
    return mask.triu_(block.offset + 1)


class _Rectangle:
    """Queries, own keys and values, and prefix keys and values of one block, laid out for batched products."""

    def __init__(self, rotated: Tensor, block: AttentionBlock, heads: int, kv_heads: int) -> None:
        self.block, self.kv_heads, self.unit = block, kv_heads, heads // kv_heads
        self.scale = rotated.shape[-1] ** -0.5
        q_rows, k_rows, v_rows = rotated[:, :heads], rotated[:, heads : heads + kv_heads], rotated[:, heads + kv_heads :]
        a, q, s, e = block.sequences, block.queries, block.keys, rotated.shape[-1]
        self.query = _gather(q_rows, block.query_rows, a, kv_heads).mul_(self.scale)  # [K, A, U, Q, E]
        self.own_query = self.query.view(kv_heads * a, self.unit * q, e)
        self.key = _gather(k_rows, block.key_rows, a, kv_heads).view(kv_heads * a, s, e)
        self.value = _gather(v_rows, block.key_rows, a, kv_heads).view(kv_heads * a, s, e)
        if block.prefix:
            rows = slice(block.prefix[0], block.prefix[0] + block.prefix[1])
            self.prefix_query = self.query.view(kv_heads, a * self.unit * q, e)
            self.prefix_key = k_rows[rows].transpose(0, 1)  # [K, P, E], a view: the prompt is shared, not copied
            self.prefix_value = v_rows[rows].transpose(0, 1)

    def scores(self) -> tuple[Tensor, Tensor | None]:
        """fp32 scores against own keys ``[K, A, U, Q, S]`` and against the prefix ``[K, A, U, Q, P]``."""
        shape = self.query.shape[:-1]
        own = torch.bmm(self.own_query, self.key.transpose(1, 2)).view(*shape, -1).float()
        own += _causal_mask(self.block, own)
        if not self.block.prefix:
            return own, None
        return own, torch.bmm(self.prefix_query, self.prefix_key.transpose(1, 2)).view(*shape, -1).float()


def _forward(rotated: Tensor, blocks: tuple[AttentionBlock, ...], heads: int, kv_heads: int) -> tuple[Tensor, list[Tensor]]:
    """Output ``[R, H, E]`` and, for each block, the log-sum-exp of its scores ``[K, A, U, Q, 1]``."""
    out = torch.empty_like(rotated[:, :heads], memory_format=torch.contiguous_format)
    normalisers = []
    for block in blocks:
        r = _Rectangle(rotated, block, heads, kv_heads)
        own, prefix = r.scores()
        top = own.amax(-1, keepdim=True)
        if prefix is not None:
            top = torch.maximum(top, prefix.amax(-1, keepdim=True))
            prefix = prefix.sub_(top).exp_()
        own = own.sub_(top).exp_()
        total = own.sum(-1, keepdim=True)
        value = torch.bmm(own.to(rotated.dtype).view(*r.own_query.shape[:2], -1), r.value).view(r.query.shape)
        if prefix is not None:
            total += prefix.sum(-1, keepdim=True)
            seen = prefix.to(rotated.dtype).view(*r.prefix_query.shape[:2], -1)
            value += torch.bmm(seen, r.prefix_value).view(r.query.shape)
        _scatter(out, value.div_(total.to(value.dtype)), block)
        normalisers.append(total.log_().add_(top))
    return out, normalisers


def _score_gradient(
    score: Tensor, normaliser: Tensor, grad_weight: Tensor, delta: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """From scores and the gradient of the attention weights: the weights, and the gradient of the scores, both in ``dtype``."""
    weight = score.sub_(normaliser).exp_()
    grad = grad_weight.float().sub_(delta).mul_(weight)
    return weight.to(dtype), grad.to(dtype)


def _backward_block(r: _Rectangle, grad_out: Tensor, delta: Tensor, normaliser: Tensor) -> Iterator[tuple[str, Tensor]]:
    dtype = grad_out.dtype
    own, prefix = r.scores()
    own_grad_out = grad_out.view(r.own_query.shape)
    grad_weight = torch.bmm(own_grad_out, r.value.transpose(1, 2)).view(own.shape)
    weight, grad_score = _score_gradient(own, normaliser, grad_weight, delta, dtype)
    weight, grad_score = weight.view(*r.own_query.shape[:2], -1), grad_score.view(*r.own_query.shape[:2], -1)
    yield "value", torch.bmm(weight.transpose(1, 2), own_grad_out)
    yield "key", torch.bmm(grad_score.transpose(1, 2), r.own_query)
    grad_query = torch.bmm(grad_score, r.key).view(r.query.shape)
    if prefix is not None:
        prefix_grad_out = grad_out.view(r.prefix_query.shape)
        grad_weight = torch.bmm(prefix_grad_out, r.prefix_value.transpose(1, 2)).view(prefix.shape)
        weight, grad_score = _score_gradient(prefix, normaliser, grad_weight, delta, dtype)
        weight, grad_score = weight.view(*r.prefix_query.shape[:2], -1), grad_score.view(*r.prefix_query.shape[:2], -1)
        yield "prefix_value", torch.bmm(weight.transpose(1, 2), prefix_grad_out)
        yield "prefix_key", torch.bmm(grad_score.transpose(1, 2), r.prefix_query)
        grad_query += torch.bmm(grad_score, r.prefix_key).view(r.query.shape)
    yield "query", grad_query.mul_(r.scale)


class _PackedAttention(Function):
    """Forward keeps the rotated ``qkv``, the output and one number per query; backward recomputes scores block by block."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, blocks: tuple[AttentionBlock, ...], heads: int, kv_heads: int
    ) -> tuple[Tensor, Tensor]:
        rotated = apply_rope(qkv, cos, sin, heads + kv_heads)
        out, normalisers = _forward(rotated, blocks, heads, kv_heads)
        ctx.save_for_backward(rotated, out, cos, sin, *normalisers)
        ctx.plan = (blocks, heads, kv_heads)
        ctx.mark_non_differentiable(rotated)
        return out, rotated

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        rotated, out, cos, sin, *normalisers = ctx.saved_tensors
        blocks, heads, kv_heads = ctx.plan
        grad = torch.zeros_like(rotated)
        keys, values = grad[:, heads : heads + kv_heads], grad[:, heads + kv_heads :]
        delta_rows = (grad_out.float() * out.float()).sum(-1, keepdim=True)  # [R, H, 1]
        for block, normaliser in zip(blocks, normalisers, strict=True):
            r = _Rectangle(rotated, block, heads, kv_heads)
            grad_block = _gather(grad_out, block.query_rows, block.sequences, kv_heads)
            delta = _gather(delta_rows, block.query_rows, block.sequences, kv_heads)
            if block.query_valid is not None:
                # A padded query repeats row 0: without this its gradient would be counted again there.
                padding = ~block.query_valid.view(1, block.sequences, 1, block.queries, 1)
                grad_block.masked_fill_(padding, 0)
                delta.masked_fill_(padding, 0)
            for part, value in _backward_block(r, grad_block, delta, normaliser):
                if part == "query":
                    _scatter(grad[:, :heads], value, block)
                elif block.prefix and part.startswith("prefix"):
                    rows = slice(block.prefix[0], block.prefix[0] + block.prefix[1])
                    (keys if part == "prefix_key" else values)[rows] += value.transpose(0, 1)
                else:
                    rows_first = value.view(kv_heads, block.sequences * block.keys, -1).transpose(0, 1)
                    (keys if part == "key" else values).index_add_(0, block.key_rows, rows_first)
        return apply_rope(grad, cos, sin, heads + kv_heads, inverse=True), None, None, None, None, None


def _rotate_differentiably(qkv: Tensor, cos: Tensor, sin: Tensor, rotated: int) -> Tensor:
    first, second = qkv[:, :rotated].chunk(2, dim=-1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return torch.cat([turned, qkv[:, rotated:]], dim=1)


def _sdpa_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, blocks: tuple[AttentionBlock, ...], heads: int, kv_heads: int
) -> tuple[Tensor, Tensor]:
    rotated = _rotate_differentiably(qkv, cos, sin, heads + kv_heads)
    q_rows, k_rows, v_rows = rotated.split([heads, kv_heads, kv_heads], dim=1)
    pieces, rows = [], []
    for block in blocks:
        a = block.sequences

        def lay_out(source: Tensor, index: Tensor, count: int = a) -> Tensor:
            return source.index_select(0, index).view(count, -1, *source.shape[1:]).transpose(1, 2)

        query, key, value = lay_out(q_rows, block.query_rows), lay_out(k_rows, block.key_rows), lay_out(v_rows, block.key_rows)
        mask = torch.ones(block.queries, block.keys, dtype=torch.bool, device=qkv.device).tril(block.offset)
        if block.prefix:
            start, length = block.prefix
            mask = torch.cat([mask.new_ones(block.queries, length), mask], dim=1)
            key = torch.cat([k_rows[start : start + length].transpose(0, 1).expand(a, -1, -1, -1), key], dim=2)
            value = torch.cat([v_rows[start : start + length].transpose(0, 1).expand(a, -1, -1, -1), value], dim=2)
        unit = heads // kv_heads
        key, value = key.repeat_interleave(unit, dim=1), value.repeat_interleave(unit, dim=1)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        flat = out.transpose(1, 2).reshape(a * block.queries, heads, -1)
        valid = block.query_valid
        pieces.append(flat if valid is None else flat[valid])
        rows.append(block.query_rows if valid is None else block.query_rows[valid])
    order = torch.argsort(torch.cat(rows))
    return torch.cat(pieces).index_select(0, order), rotated.detach()
