"""Attention over packed rows by PyTorch's flash kernels for sequences of many lengths: no mask, no padding, no new plan for new lengths.

Two calls, since a completion sees its group's prompt and itself. The first has every prompt and every completion as a sequence of its own,
causal. The second has a group's completions, one after the other, as queries of its prompt, of which there is one copy. Both give the
logarithm of the sum of their weights, l1 and l2; what a row sees altogether is, with l = log(exp l1 + exp l2),

    out = exp(l1 - l) out1 + exp(l2 - l) out2

On the way back each call is given the ``out`` and l of both: its weights are exp(score - l) then, and its gradients its own share of them
(as in ring attention, Liu et al., arXiv 2310.01889). So nothing but ``out`` and l is kept, and memory grows with the length.

The operators are those below ``torch.nn.attention.varlen``, whose own gradient knows one call alone.

Axes: R packed rows, C of them in completions, P in prompts; H query heads, K key-value heads, E head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from groupwise.models.ops import rotate_heads
from groupwise.models.packing import Span

__all__ = ["DEVICES", "Runs", "attend_by_flash", "fits", "move_together", "plan_runs"]

DEVICES = frozenset({"cuda"})
"""Where there are such kernels."""


def fits(device: torch.device, dtype: torch.dtype, head_width: int) -> bool:
    """Whether there may be a kernel; the self-check says whether it is any good (``engines/builtin/fast_paths.py``)."""
    return device.type in DEVICES and dtype in (torch.bfloat16, torch.float16) and head_width % 8 == 0 and head_width <= 256


@dataclass(frozen=True, slots=True)
class _Bounds:
    """Sequences one after the other."""

    starts: Tensor
    """``[sequences + 1]`` int32: the row where each begins, and where the last one ends."""
    longest: int


@dataclass(frozen=True, slots=True)
class Runs:
    """What attends to what, for all layers of a pass."""

    own: _Bounds
    queries: _Bounds
    """Groups, in the rows of their completions."""
    keys: _Bounds
    """Groups, in the rows of their prompts."""
    query_rows: Tensor
    """``[C]``."""
    key_rows: Tensor
    """``[P]``, of prompts with completions."""


def plan_runs(spans: Sequence[Span], device: torch.device) -> Runs:
    """``spans``: as of ``Packed``, in the order of their rows, where no sequence has more before it than one stretch of rows. Everything
    goes to ``device`` in two copies that nobody waits for."""
    groups: dict[tuple[int, int], list[Span]] = {}
    for span in spans:
        if span.before and span.length:
            (prompt,) = span.before
            groups.setdefault(prompt, []).append(span)
    sizes = [
        [span.length for span in spans if span.length],
        [sum(span.length for span in own) for own in groups.values()],
        [length for _, length in groups],
    ]
    queries = [torch.arange(s.start, s.start + s.length) for own in groups.values() for s in own]
    keys = [torch.arange(start, start + length) for start, length in groups]
    empty = torch.empty(0, dtype=torch.long)
    starts = move_together([torch.tensor(list(accumulate(size, initial=0)), dtype=torch.int32) for size in sizes], device)
    rows = move_together([torch.cat([empty, *queries]), torch.cat([empty, *keys])], device)
    own, of_queries, of_keys = (_Bounds(s, max(size, default=0)) for s, size in zip(starts, sizes, strict=True))
    return Runs(own, of_queries, of_keys, rows[0], rows[1])


def move_together(indices: list[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors on ``device``, in one copy that nobody waits for."""
    together = torch.cat(indices)
    if device.type == "cuda":
        together = together.pin_memory().to(device, non_blocking=True)
    return list(together.split([len(index) for index in indices]))


def _forward(
    query: Tensor, keys_values: Tensor, queries: _Bounds, keys: _Bounds, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output ``[rows, H, E]``, log-sum-exp ``[H, rows]`` in fp32, and the state of the dropout that there is not."""
    key, value = keys_values.chunk(2, dim=1)
    out, lse, state, *_ = torch.ops.aten._flash_attention_forward(
        query, key, value, queries.starts, keys.starts, queries.longest, keys.longest, 0.0, causal, False, scale=scale
    )
    if lse.shape != (query.shape[1], query.shape[0]):
        raise RuntimeError(f"log-sum-exps of shape {tuple(lse.shape)}, where {(query.shape[1], query.shape[0])} were expected")
    return out, lse, state


def _backward(
    grad: Tensor, query: Tensor, keys_values: Tensor, out: Tensor, lse: Tensor, queries: _Bounds, keys: _Bounds, causal: bool,
    state: Tensor, scale: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of ``query`` and ``keys_values``; ``out`` and ``lse`` are those of all that the rows see."""
    key, value = keys_values.chunk(2, dim=1)
    of_query, of_key, of_value = torch.ops.aten._flash_attention_backward(
        grad, query, key, value, out, lse, queries.starts, keys.starts, queries.longest, keys.longest, 0.0, causal, state,
        torch.empty(0, device=query.device), scale=scale,
    )  # fmt: skip
    return of_query, torch.cat([of_key, of_value], dim=1)


class _Attend(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, plan: Runs, heads: int, kv_heads: int, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        rotated = torch.empty_like(qkv)
        rotate_heads(qkv, cos, sin, rotated, heads + kv_heads)
        out, lse, state = _forward(rotated[:, :heads], rotated[:, heads:], plan.own, plan.own, True, scale)
        if plan.queries.longest:
            rows = plan.query_rows
            query, keys_values = _with_prompts(rotated, plan, heads)
            from_prompt, beside, _ = _forward(query, keys_values, plan.queries, plan.keys, False, scale)
            alone = lse.index_select(1, rows)
            both = torch.logaddexp(alone, beside)
            one, other = ((part - both).exp_().t()[..., None] for part in (alone, beside))
            merged = out.index_select(0, rows).float().mul_(one).addcmul_(from_prompt.float(), other)
            out.index_copy_(0, rows, merged.to(out.dtype))
            lse.index_copy_(1, rows, both)
        ctx.save_for_backward(rotated, cos, sin, out, lse, state)
        ctx.rest = (plan, heads, kv_heads, scale)
        ctx.mark_non_differentiable(rotated)
        return out, rotated

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (rotated, cos, sin, out, lse, state), (plan, heads, kv_heads, scale) = ctx.saved_tensors, ctx.rest
        grad = grad.contiguous()
        own = _backward(grad, rotated[:, :heads], rotated[:, heads:], out, lse, plan.own, plan.own, True, state, scale)
        gradient = torch.cat(own, dim=1)
        if plan.queries.longest:
            rows = plan.query_rows
            query, keys_values = _with_prompts(rotated, plan, heads)
            picked, weighed, sums = grad.index_select(0, rows), out.index_select(0, rows), lse.index_select(1, rows)
            of_query, of_prompt = _backward(
                picked, query, keys_values, weighed, sums, plan.queries, plan.keys, False, state, scale
            )
            gradient[:, :heads].index_add_(0, rows, of_query)
            gradient[:, heads:].index_add_(0, plan.key_rows, of_prompt)
        back = torch.empty_like(gradient)
        rotate_heads(gradient, cos, sin, back, heads + kv_heads, inverse=True)
        return back, *[None] * 6


def _with_prompts(rotated: Tensor, plan: Runs, heads: int) -> tuple[Tensor, Tensor]:
    """Queries of the completions, and keys and values of the prompts: small copies beside those of all heads for each block of queries."""
    return rotated[:, :heads].index_select(0, plan.query_rows), rotated[:, heads:].index_select(0, plan.key_rows)


def attend_by_flash(
    qkv: Tensor, cos: Tensor, sin: Tensor, plan: Runs, heads: int, kv_heads: int, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """As ``attention.attend_by_library``: output ``[R, H, E]``, differentiable, and the rotated ``qkv``, detached."""
    out: tuple[Tensor, Tensor] = _Attend.apply(qkv, cos, sin, plan, heads, kv_heads, scale)
    return out
