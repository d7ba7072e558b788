"""PyTorch's operators for attention over many lengths, with kernels written out for CPUs, where it has none."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from groupwise.models import attention, varlen_attention

__all__ = ["flash_on_cpus"]


@contextmanager
def flash_on_cpus() -> Iterator[None]:
    """The operators' own schemas check how they are called; fp32 is taken too."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", slow_forward, "CPU")
    library.impl("_flash_attention_backward", slow_backward, "CPU")
    with (
        mock.patch.object(varlen_attention, "DEVICES", frozenset({"cpu"})),
        mock.patch.object(varlen_attention, "fits", return_value=True),
        mock.patch.object(attention, "fits", return_value=True),
    ):
        try:
            yield
        finally:
            library._destroy()


def _each(query: Tensor, key: Tensor, starts_q: Tensor, starts_k: Tensor, causal: bool, scale: float | None):
    """For each sequence: its queries ``[H, q, E]``, its keys' rows, and its scores ``[H, q, k]`` in fp32."""
    per_key = query.shape[1] // key.shape[1]
    for (a, b), (c, d) in zip(starts_q.unfold(0, 2, 1).tolist(), starts_k.unfold(0, 2, 1).tolist(), strict=True):
        keys = key[c:d].repeat_interleave(per_key, 1).transpose(0, 1).float()
        scores = query[a:b].transpose(0, 1).float() @ keys.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
        if causal:  # aligned at the last of both
            q, k = b - a, d - c
            scores = scores.masked_fill(torch.ones(q, k).triu(1 + k - q).bool(), -math.inf)
        yield slice(a, b), slice(c, d), per_key, scores


def slow_forward(
    query, key, value, starts_q, starts_k, max_q, max_k, dropout, causal, debug, *, scale=None, window_size_left=None,
    window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None, num_splits=None,
):  # fmt: skip
    assert starts_q.dtype == starts_k.dtype == torch.int32
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1, "the kernel wants heads without gaps"
    assert (max_q, max_k) == (int(starts_q.diff().max()), int(starts_k.diff().max()))
    assert starts_q[-1] == len(query)
    assert starts_k[-1] == len(key)
    assert not dropout
    out, lse = torch.empty(query.shape, dtype=query.dtype), torch.empty(query.shape[1], len(query))
    for rows, keys, per_key, scores in _each(query, key, starts_q, starts_k, causal, scale):
        values = value[keys].repeat_interleave(per_key, 1).transpose(0, 1).float()
        out[rows] = (scores.softmax(-1) @ values).transpose(0, 1).to(query.dtype)
        lse[:, rows] = scores.logsumexp(-1)
    return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def slow_backward(
    grad, query, key, value, out, lse, starts_q, starts_k, max_q, max_k, dropout, causal, state, unused, *, scale=None,
    window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert state.dtype == torch.uint64
    assert grad.is_contiguous()
    found = [torch.zeros(x.shape) for x in (query, key, value)]
    for rows, keys, per_key, scores in _each(query, key, starts_q, starts_k, causal, scale):
        weights = (scores - lse[:, rows, None]).exp()
        by_head = grad[rows].transpose(0, 1).float()
        values = value[keys].repeat_interleave(per_key, 1).transpose(0, 1).float()
        of_scores = weights * (by_head @ values.mT - (by_head * out[rows].transpose(0, 1).float()).sum(-1, keepdim=True))
        of_scores = of_scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        repeated = key[keys].repeat_interleave(per_key, 1).transpose(0, 1).float()
        found[0][rows] += (of_scores @ repeated).transpose(0, 1)
        of_keys, of_values = of_scores.mT @ query[rows].transpose(0, 1).float(), weights.mT @ by_head
        for total, part in ((found[1], of_keys), (found[2], of_values)):
            total[keys] += part.unflatten(0, (-1, per_key)).sum(1).transpose(0, 1)
    return tuple(total.to(query.dtype) for total in found)
