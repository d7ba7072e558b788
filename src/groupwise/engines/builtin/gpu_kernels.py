"""What a decode step computes between its matrix products on a GPU, as Triton kernels: six launches a layer.

Attention is flash-decoding over a shared prompt (Dao et al., 2023; Juravsky et al., arXiv 2402.05099). Positions are cut into chunks, and
one kernel attends to all of them side by side: a group's rows are the queries of one product with each chunk of their prompt, which is
read once, and each row has its own tokens. Another merges the chunks by their log-sum-exp. Scores, softmax and sums are fp32. Chunks lie
at fixed positions, so what a row gets does not depend on what else is in the batch. Lengths are read on the device: a captured graph asks
nothing.

Gating is learning's (``models/triton_kernels.py``). Triton comes with PyTorch for CUDA; its interpreter runs the kernels on CPUs
(``TRITON_INTERPRET=1``).

Axes: B rows, S groups, W lanes per group, K key-value heads, U query heads per key head, H = K * U, E head width, P prompt positions, C own
positions there is room for, D model width; M queries and N positions of a tile.
"""
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
# Triton reads a kernel's annotations as types of its own.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor, float32

from groupwise.models.triton_kernels import gated

__all__ = ["CHUNK", "add_norm", "attend", "gated", "rotate_and_store"]

CHUNK = 256
"""Positions that one program attends to. Shorter ones keep a GPU busy with few rows, longer ones leave less to merge."""
_LOG2_E = 1.4426950408889634


@triton.jit
def _add_norm(x, y, weight, out, width, epsilon, offset, ADD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    place, there = tl.program_id(0).to(tl.int64) * width + at, at < width
    row = tl.load(x + place, mask=there, other=0.0).to(tl.float32)
    if ADD:
        total = (row + tl.load(y + place, mask=there, other=0.0).to(tl.float32)).to(x.dtype.element_ty)
        tl.store(x + place, total, mask=there)
        row = total.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(row * row, 0) / width + epsilon)
    gain = tl.load(weight + at, mask=there, other=0.0).to(tl.float32) + offset
    tl.store(out + place, (row * scale * gain).to(out.dtype.element_ty), mask=there)


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    """Add ``y`` to ``x`` ``[B, D]`` in place, and return ``rms_norm(x, weight)``."""
    out, (rows, width) = x.new_empty(x.shape), x.shape
    block = triton.next_power_of_2(width)
    warps = min(16, max(1, block // 512))
    _add_norm[(rows,)](
        x, x if y is None else y, weight, out, width, epsilon, offset, ADD=y is not None, BLOCK=block, num_warps=warps
    )
    return out


@triton.jit(do_not_specialize=["room", "stride"])
def _rotate_and_store(
    qkv, cos, sin, q_norm, k_norm, own_lengths, query, key, value, room, stride, epsilon, offset,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head, half = tl.program_id(0).to(tl.int64), tl.program_id(1), E // 2
    at = tl.arange(0, BLOCK)
    there = at < half
    source = qkv + row * stride + head * E + at
    first, second = tl.load(source, mask=there, other=0.0), tl.load(source + half, mask=there, other=0.0)
    kind = first.dtype
    own = tl.load(own_lengths + row)
    if head < H + K:
        a, b = first.to(tl.float32), second.to(tl.float32)
        if NORM:
            scale = 1.0 / tl.sqrt((tl.sum(a * a, 0) + tl.sum(b * b, 0)) / E + epsilon)
            gain = q_norm + at
            if head >= H:
                gain = k_norm + at
            a *= scale * (tl.load(gain, mask=there, other=0.0).to(tl.float32) + offset)
            b *= scale * (tl.load(gain + half, mask=there, other=0.0).to(tl.float32) + offset)
        c = tl.load(cos + row * half + at, mask=there, other=0.0).to(tl.float32)
        s = tl.load(sin + row * half + at, mask=there, other=0.0).to(tl.float32)
        first, second = (a * c - b * s).to(kind), (b * c + a * s).to(kind)
    if head < H:
        target = query + (row * H + head) * E + at
        tl.store(target, first, mask=there)
        tl.store(target + half, second, mask=there)
    elif head < H + K:
        target = key + ((row * K + head - H) * room + own) * E + at
        tl.store(target, first, mask=there)
        tl.store(target + half, second, mask=there)
    else:
        target = value + ((row * K + head - H - K) * room + own) * E + at
        tl.store(target, first, mask=there)
        tl.store(target + half, second, mask=there)


def rotate_and_store(
    qkv: Tensor, cos: Tensor, sin: Tensor, own: tuple[Tensor, Tensor], own_lengths: Tensor, heads: int,
    norms: tuple[Tensor, Tensor] | None, epsilon: float, offset: float = 0.0,
) -> Tensor:  # fmt: skip
    """The fed tokens' rotated queries ``[B, H, E]``; their rotated keys, and values, are appended to ``own``.

    Args:
        qkv: ``[B, H + 2K, E]``; rows may have gaps between them.
        cos, sin: ``[B, 1, E / 2]``.
        own: keys and values ``[.., K, C, E]``.
        own_lengths: ``[B]``, without the fed token.
        norms: of each query and key head ``[E]``, before they are rotated.
    """
    (rows, all_heads, width), (key, value) = qkv.shape, own
    query = qkv.new_empty(rows, heads, width)
    q_norm, k_norm = norms or (qkv, qkv)
    _rotate_and_store[(rows, all_heads)](
        qkv, cos, sin, q_norm, k_norm, own_lengths, query, key, value, key.shape[2], qkv.stride(0), epsilon, offset,
        H=heads, K=key.shape[1], E=width, NORM=norms is not None, BLOCK=triton.next_power_of_2(width // 2), num_warps=1,
    )  # fmt: skip
    return query


@triton.jit
def _attend_to(
    q_ME, key, value, start, end, low_M, scale,
    E: tl.constexpr, WINDOW: tl.constexpr, M: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention output ``[M, BLOCK]`` over positions ``start`` to ``end`` of keys and values ``[positions, E]``, and its log-sum-exp to the
    base of 2, -inf where query m sees none: with a window only those from ``low_M`` on."""
    at_E = tl.arange(0, BLOCK)
    top_M = tl.full([M], float("-inf"), tl.float32)
    total_M = tl.zeros([M], tl.float32)
    out_ME = tl.zeros([M, BLOCK], tl.float32)
    for n in range(start, end, N):
        at_N = n + tl.arange(0, N)
        place = at_N[:, None] * E + at_E[None, :]
        there = (at_N < end)[:, None] & (at_E < E)[None, :]  # what was never written may be anything
        k_NE = tl.load(key + place, mask=there, other=0.0)
        v_NE = tl.load(value + place, mask=there, other=0.0)
        scores = tl.dot(q_ME, tl.trans(k_NE), input_precision="ieee") * scale
        seen = (at_N < end)[None, :]
        if WINDOW > 0:
            seen = seen & (at_N[None, :] >= low_M[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        higher_M = tl.maximum(top_M, tl.max(scores, 1))
        base_M = tl.where(higher_M == float("-inf"), 0.0, higher_M)
        weights = tl.exp2(scores - base_M[:, None])
        shrink_M = tl.exp2(top_M - base_M)
        total_M = total_M * shrink_M + tl.sum(weights, 1)
        out_ME = out_ME * shrink_M[:, None] + tl.dot(weights.to(v_NE.dtype), v_NE, input_precision="ieee")
        top_M = higher_M
    some_M = total_M > 0
    divisor_M = tl.where(some_M, total_M, 1.0)
    return out_ME / divisor_M[:, None], tl.where(some_M, top_M + tl.log2(divisor_M), float("-inf"))


@triton.jit(do_not_specialize=["groups", "width", "prompt_room", "own_room", "prompt_chunks", "own_chunks"])
def _attend_to_chunks(
    query, prompt_key, prompt_value, own_key, own_value, row_of_lane, prompt_lengths, own_lengths, positions,
    prompt_out, prompt_sum, own_out, own_sum, groups, width, prompt_room, own_room, prompt_chunks, own_chunks, scale,
    K: tl.constexpr, U: tl.constexpr, E: tl.constexpr, WINDOW: tl.constexpr, LENGTH: tl.constexpr, M_PROMPT: tl.constexpr,
    M_OWN: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first programs each take a chunk of a prompt, a key head and some of the group's queries; the others a chunk of a row's own
    tokens and a key head. Both leave fp32 outputs ``[lanes or B, H, chunks, E]`` and log-sum-exps without E."""
    unit = tl.program_id(0)
    tiles = tl.cdiv(width * U, M_PROMPT)
    of_prompts = groups * K * tiles * prompt_chunks
    at_E = tl.arange(0, BLOCK)
    if unit < of_prompts:
        chunk, rest = unit % prompt_chunks, unit // prompt_chunks
        tile, rest = rest % tiles, rest // tiles
        head, group = rest % K, rest // K
        length = tl.load(prompt_lengths + group).to(tl.int32)
        start = chunk * LENGTH
        if start < length:
            at_M = tile * M_PROMPT + tl.arange(0, M_PROMPT)
            lane_M, there_M = group * width + at_M // U, at_M < width * U
            row_M = tl.load(row_of_lane + lane_M, mask=there_M, other=0)
            low_M = tl.load(positions + row_M).to(tl.int32) - (WINDOW - 1)
            first = start
            if WINDOW > 0:
                first = tl.maximum(start, tl.min(low_M, 0) // N * N)
            q_ME = tl.load(
                query + ((row_M * K + head) * U + at_M % U)[:, None] * E + at_E[None, :],
                mask=there_M[:, None] & (at_E < E)[None, :], other=0.0,
            )  # fmt: skip
            base = (group.to(tl.int64) * K + head) * prompt_room * E
            out_ME, sum_M = _attend_to(
                q_ME, prompt_key + base, prompt_value + base, first, tl.minimum(length, start + LENGTH), low_M, scale,
                E, WINDOW, M_PROMPT, N, BLOCK,
            )  # fmt: skip
            place_M = ((lane_M.to(tl.int64) * K + head) * U + at_M % U) * prompt_chunks + chunk
            tl.store(prompt_out + place_M[:, None] * E + at_E[None, :], out_ME, mask=there_M[:, None] & (at_E < E)[None, :])
            tl.store(prompt_sum + place_M, sum_M, mask=there_M)
    else:
        rest = unit - of_prompts
        chunk, rest = rest % own_chunks, rest // own_chunks
        head, row = rest % K, rest // K
        length = tl.load(own_lengths + row).to(tl.int32) + 1
        start = chunk * LENGTH
        if start < length:
            at_M = tl.arange(0, M_OWN)
            there_M = at_M < U
            low_M = tl.zeros([M_OWN], tl.int32) + (length - WINDOW)
            first = start
            if WINDOW > 0:
                first = tl.maximum(start, tl.maximum(length - WINDOW, 0) // N * N)
            from_M = (row.to(tl.int64) * K + head) * U + at_M
            there = there_M[:, None] & (at_E < E)[None, :]
            q_ME = tl.load(query + from_M[:, None] * E + at_E[None, :], mask=there, other=0.0)
            base = (row.to(tl.int64) * K + head) * own_room * E
            out_ME, sum_M = _attend_to(
                q_ME, own_key + base, own_value + base, first, tl.minimum(length, start + LENGTH), low_M, scale,
                E, WINDOW, M_OWN, N, BLOCK,
            )  # fmt: skip
            place_M = from_M * own_chunks + chunk
            tl.store(own_out + place_M[:, None] * E + at_E[None, :], out_ME, mask=there)
            tl.store(own_sum + place_M, sum_M, mask=there_M)


@triton.jit(do_not_specialize=["prompt_chunks", "own_chunks"])
def _merge(
    prompt_out, prompt_sum, own_out, own_sum, lane_of_row, group_of_row, prompt_lengths, own_lengths, out, prompt_chunks, own_chunks,
    H: tl.constexpr, E: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at_E = tl.arange(0, BLOCK)
    there = at_E < E
    top = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    out_E = tl.zeros([BLOCK], tl.float32)
    of_prompt = tl.cdiv(tl.load(prompt_lengths + tl.load(group_of_row + row)), LENGTH).to(tl.int32)
    of_own = tl.cdiv(tl.load(own_lengths + row) + 1, LENGTH).to(tl.int32)
    prompt_place = (tl.load(lane_of_row + row) * H + head) * prompt_chunks
    own_place = (row * H + head) * own_chunks - of_prompt
    for chunk in range(0, of_prompt + of_own):
        outs, sums, place = own_out, own_sum, own_place + chunk
        if chunk < of_prompt:
            outs, sums, place = prompt_out, prompt_sum, prompt_place + chunk
        sum_1 = tl.load(sums + place + tl.zeros([1], tl.int32))
        higher = tl.maximum(top, sum_1)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight, shrink = tl.exp2(sum_1 - base), tl.exp2(top - base)
        out_E = out_E * shrink + tl.load(outs + place * E + at_E, mask=there, other=0.0) * weight
        total = total * shrink + weight
        top = higher
    tl.store(out + (row * H + head) * E + at_E, (out_E / total).to(out.dtype.element_ty), mask=there)


def attend(
    query: Tensor, own: tuple[Tensor, Tensor], prompt: tuple[Tensor, Tensor], *, row_of_lane: Tensor, lane_of_row: Tensor,
    group_of_row: Tensor, prompt_lengths: Tensor, own_lengths: Tensor, positions: Tensor, scale: float, window: int | None = None,
) -> Tensor:  # fmt: skip
    """``[B, H, E]``: each row over its group's prompt and its own tokens, the fed one included. Integers are int64.

    Args:
        query: ``[B, H, E]``, rotated.
        own: keys and values ``[.., K, C, E]``.
        prompt: keys and values ``[.., K, P, E]``.
        row_of_lane: ``[S * W]``: the rows of each group; what the others of its places repeat is computed and not read.
        lane_of_row: ``[B]``.
        group_of_row, prompt_lengths, own_lengths, positions: ``[B]``, ``[S]``, ``[B]``, ``[B]``; own lengths do not count the fed token.
        scale: of scores.
        window: how many positions the fed token sees, itself included; all by default.
    """
    (rows, heads, width), (own_key, own_value), (prompt_key, prompt_value) = query.shape, own, prompt
    kv_heads, groups, lanes = own_key.shape[1], len(prompt_lengths), len(row_of_lane)
    unit = heads // kv_heads
    prompt_chunks, own_chunks = (triton.cdiv(key.shape[2], CHUNK) for key in (prompt_key, own_key))
    prompt_out, own_out = (
        query.new_empty((n, heads, chunks, width), dtype=float32) for n, chunks in ((lanes, prompt_chunks), (rows, own_chunks))
    )
    prompt_sum, own_sum = (parts.new_empty(parts.shape[:3]) for parts in (prompt_out, own_out))
    block, queries = max(16, triton.next_power_of_2(width)), lanes // groups * unit
    of_prompts = 16 if queries <= 16 or query.dtype == float32 else 64  # products of fp32 keep their tiles in registers
    programs = groups * kv_heads * triton.cdiv(queries, of_prompts) * prompt_chunks + rows * kv_heads * own_chunks
    _attend_to_chunks[(programs,)](
        query, prompt_key, prompt_value, own_key, own_value, row_of_lane, prompt_lengths, own_lengths, positions,
        prompt_out, prompt_sum, own_out, own_sum, groups, lanes // groups, prompt_key.shape[2], own_key.shape[2],
        prompt_chunks, own_chunks, scale * _LOG2_E, K=kv_heads, U=unit, E=width, WINDOW=window or 0, LENGTH=CHUNK, M_PROMPT=of_prompts,
        M_OWN=max(16, triton.next_power_of_2(unit)), N=max(16, min(64, 16384 // (block * query.element_size()))), BLOCK=block,
        num_stages=2,
    )  # fmt: skip
    out = query.new_empty(query.shape)
    _merge[(rows, heads)](
        prompt_out, prompt_sum, own_out, own_sum, lane_of_row, group_of_row, prompt_lengths, own_lengths, out, prompt_chunks,
        own_chunks, H=heads, E=width, LENGTH=CHUNK, BLOCK=block, num_warps=1,
    )  # fmt: skip
    return out
