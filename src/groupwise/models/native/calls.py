"""The kernels as functions of tensors. Whoever calls one has asked ``fits`` first; shapes are the caller's promise.

Axes: B rows, H query heads, K key-value heads, E head width, S groups, P prompt positions, C own positions, V vocabulary, D model width,
F feed-forward width. Tensors are contiguous, and floating ones are bf16, or all of them fp32, where nothing else is said.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from groupwise.models.native.build import kernels

__all__ = [
    "add_by_heads",
    "add_norm",
    "allow",
    "allow_products",
    "by_heads",
    "decode_attention",
    "decode_layers",
    "delta",
    "dither",
    "draw",
    "fits",
    "gated",
    "gated_backward",
    "logit_gradients",
    "merge",
    "multiplies",
    "multiply",
    "multiply_packed",
    "norm",
    "norm_backward",
    "norm_heads",
    "pack",
    "pack_8bit",
    "packs",
    "rotate",
    "soften",
    "soften_backward",
    "table",
    "take_logits",
]  # fmt: skip


LANES = 16
"""Numbers that a kernel takes at a time: widths are multiples of it."""
ROOM = 32
"""Positions that a kernel takes at a time: tables have room for multiples of it."""

_POINTER, _COUNT, _REAL, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "gw_add_norm": (*[_POINTER] * 4, _COUNT, _COUNT, _REAL, _REAL),
    "gw_norm_heads": (*[_POINTER] * 3, *[_COUNT] * 4, _REAL, _REAL),
    "gw_gated": (_POINTER, _POINTER, _COUNT, _COUNT, _FLAG),
    "gw_decode_attention": (*[_POINTER] * 11, *[_COUNT] * 7, _REAL),
    "gw_draw": (*[_POINTER] * 5, _COUNT, _COUNT, _REAL, _FLAG),
    "gw_norm": (*[_POINTER] * 4, _COUNT, _COUNT, _REAL, _REAL),
    "gw_norm_backward": (*[_POINTER] * 7, *[_COUNT] * 3, _REAL),
    "gw_gated_backward": (*[_POINTER] * 4, _COUNT, _COUNT, _FLAG),
    "gw_soften": (*[_POINTER] * 4, *[_COUNT] * 5),
    "gw_soften_backward": (*[_POINTER] * 5, *[_COUNT] * 5),
    "gw_by_heads": (_POINTER, _POINTER, _COUNT, _POINTER, *[_COUNT] * 4, _FLAG),
    "gw_add_by_heads": (_POINTER, _POINTER, _COUNT, _POINTER, *[_COUNT] * 4),
    "gw_delta": (*[_POINTER] * 5, _COUNT, _COUNT),
    "gw_take_logits": (*[_POINTER] * 4, _COUNT, _COUNT, _REAL),
    "gw_logit_gradients": (*[_POINTER] * 6, _COUNT, _COUNT, _REAL),
    "gw_rotate": (*[_POINTER] * 4, *[_COUNT] * 4, _FLAG),
    "gw_merge": (*[_POINTER] * 4, *[_COUNT] * 3, _REAL),
    "gw_dither": (_POINTER, _POINTER, *[_COUNT] * 3),
    "gw_multiply": (*[_POINTER] * 4, *[_COUNT] * 5, _FLAG, _FLAG),
    "gw_pack": (_POINTER, _POINTER, _COUNT, _COUNT),
    "gw_pack_8bit": (*[_POINTER] * 3, _COUNT, _COUNT),
    "gw_multiply_packed": (*[_POINTER] * 5, *[_COUNT] * 3),
    "gw_decode_layers": (*[_POINTER] * 8, *[_COUNT] * 9, *[_REAL] * 3, _FLAG),
}
_functions: dict[torch.dtype, dict[str, Any]] = {}
"""By the dtype of what they compute with."""
_BY_UNITS = ("gw_multiply", "gw_pack", "gw_pack_8bit", "gw_multiply_packed", "gw_decode_layers")
"""By matrix units, in a library that has ``gw_may_multiply``."""
_STEP = 32
"""What sides of a packed weight are multiples of: STEP in ``kernels.c``."""
_LINE = 64
"""What the depth of one in 8 bits is a multiple of: LINE."""
_allowed, _products_allowed = True, True
_NORM_CHUNK = 64
"""Rows whose share of a norm's weight gradient is summed by one thread: a fixed number, so that sums do not depend on threads."""


def fits(like: Tensor, *widths: int) -> bool:
    """Whether the kernels are there and take tensors such as ``like`` with these widths."""
    if not _allowed or like.device.type != "cpu" or any(width % LANES for width in widths):
        return False
    return like.dtype in _functions or _load(like.dtype)


def allow(yes: bool) -> None:
    """Take the kernels, or leave them out, from now on, in the whole process."""
    global _allowed
    _allowed = yes


def multiplies(like: Tensor) -> bool:
    """Whether ``multiply`` is there for matrices such as ``like``: of bf16, on a processor with matrix units (Intel's AMX)."""
    return _products_allowed and like.dtype == torch.bfloat16 and fits(like) and "gw_multiply" in _functions[like.dtype]


def packs(like: Tensor) -> bool:
    """Whether ``multiply_packed`` is there for weights such as ``like``: of fp32, or of bf16 on a processor that multiplies it.

    On a processor with matrix units bf16 goes by these or not at all: not where the system or ``allow_products`` rules them out.
    """
    if not fits(like) or "gw_pack" not in _functions[like.dtype]:
        return False
    return _products_allowed or "gw_multiply" not in _functions[like.dtype]


def offered(dtype: torch.dtype) -> list[str]:
    """Names of the kernels for ``dtype`` that the compiler made and the system permits."""
    return sorted(_functions.get(dtype, {})) if dtype in _functions or _load(dtype) else []


def allow_products(yes: bool) -> None:
    """Take ``multiply``, and packed weights on matrix units, or leave them out, from now on, in the whole process."""
    global _products_allowed
    _products_allowed = yes


def _load(dtype: torch.dtype) -> bool:
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    library = kernels(dtype == torch.float32).library
    if library is None:
        return False
    loaded = {}
    refused = hasattr(library, "gw_may_multiply") and not library.gw_may_multiply()
    for name, signature in _SIGNATURES.items():
        if hasattr(library, name) and not (refused and name in _BY_UNITS):
            loaded[name] = function = getattr(library, name)
            function.argtypes, function.restype = signature, None
    _functions[dtype] = loaded  # whole: another thread may look
    return True


def _function(name: str, like: Tensor) -> Any:
    """The kernel for numbers such as those of ``like``."""
    return _functions[like.dtype][name]


def _addresses(*tensors: Tensor) -> list[int]:
    """Where their numbers are. A kernel reads whatever is there, and another device's memory would end the process."""
    assert all(tensor.device.type == "cpu" for tensor in tensors), f"a kernel of the CPU was given {[t.device for t in tensors]}"
    return [tensor.data_ptr() for tensor in tensors]


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    """Add ``y`` to ``x`` ``[B, D]`` in place, and return ``rms_norm(x, weight)``."""
    assert weight.dtype == x.dtype, f"a kernel for {x.dtype} was given weights of {weight.dtype}"
    out = torch.empty_like(x)
    added = None if y is None else y.data_ptr()
    _function("gw_add_norm", x)(x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), *x.shape, epsilon, offset)
    return out


def norm_heads(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, heads: int, kv_heads: int, epsilon: float, offset: float = 0.0
) -> Tensor:
    """``qkv`` ``[B, H + 2K, E]``, its query and key heads replaced by their ``rms_norm``."""
    _function("gw_norm_heads", qkv)(
        *_addresses(qkv, q_weight, k_weight), len(qkv), heads, kv_heads, qkv.shape[2], epsilon, offset
    )
    return qkv


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """``act(gate) * up`` for ``[B, 2F]``; ``activation``: ``silu`` or ``gelu_tanh``."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _function("gw_gated", gate_up)(gate_up.data_ptr(), out.data_ptr(), rows, width, activation == "gelu_tanh")
    return out


def decode_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, own: tuple[Tensor, Tensor], prompt: tuple[Tensor, Tensor], own_lengths: Tensor,
    group_of_row: Tensor, prompt_lengths: Tensor, heads: int, scale: float | None = None, window: int | None = None,
) -> Tensor:  # fmt: skip
    """Rotate the fed tokens' queries and keys, append their keys and values to ``own``, and attend: ``[B, H, E]``.

    Args:
        qkv: ``[B, H + 2K, E]``; E a multiple of 32.
        cos, sin: ``[B, 1, E / 2]``.
        own: keys ``[B, K, E, C]`` and values ``[B, K, C, E]``; C a multiple of 32.
        prompt: keys ``[S, K, E, P]`` and values ``[S, K, P, E]``; P a multiple of 32.
        own_lengths, group_of_row, prompt_lengths: int64 ``[B]``, ``[B]``, ``[S]``; own lengths do not count the fed token.
        scale: of queries; 1 / sqrt(E) by default.
        window: how many positions the fed token sees, itself included; all by default.
    """
    rows, kv_heads, width = len(qkv), own[0].shape[1], qkv.shape[2]
    out = qkv.new_empty(rows, heads, width)
    addresses = (qkv, cos, sin, *own, *prompt, own_lengths, group_of_row, prompt_lengths, out)
    _function("gw_decode_attention", qkv)(
        *(tensor.data_ptr() for tensor in addresses),
        rows,
        heads,
        kv_heads,
        width,
        own[0].shape[3],
        prompt[0].shape[3],
        window or 0,
        width**-0.5 if scale is None else scale,
    )
    return out


def draw(logits: Tensor, keys: Tensor, positions: Tensor, temperature: float, greedy: bool) -> tuple[Tensor, Tensor]:
    """Tokens ``[B]`` and log-probabilities ``[B]`` (fp32) from ``logits`` ``[B, V]``: as ``Draw`` without top-k and top-p."""
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.long)
    logprobs = torch.empty(rows, dtype=torch.float32)
    addresses = (logits, keys, positions, tokens, logprobs)
    _function("gw_draw", logits)(*(tensor.data_ptr() for tensor in addresses), rows, vocabulary, temperature, int(greedy))
    return tokens, logprobs


def multiply(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """``a @ b``, with ``bias`` ``[N]`` added to each row, for ``a`` ``[M, C]`` and ``b`` ``[C, N]``; into a contiguous ``out`` if given.

    Either may be transposed, or a part of the rows or columns of something larger. Each number is one sum over C, in a fixed order,
    rounded once: it does not depend on the rows and columns beside it.
    """
    if out is None:
        out = a.new_empty(len(a), b.shape[1])
    assert out.shape == (len(a), b.shape[1])
    assert bias is None or (bias.dtype, bias.shape, bias.is_contiguous()) == (a.dtype, b.shape[1:], True)
    if not out.numel() or not a.numel():
        return out.zero_() if bias is None else out.copy_(bias.expand_as(out))
    (a, a_line, a_turned), (b, b_line, b_turned) = _lines(a), _lines(b)
    assert out.is_contiguous()
    assert a.shape[1] == len(b), f"{tuple(a.shape)} times {tuple(b.shape)}"
    added = None if bias is None else bias.data_ptr()
    _function("gw_multiply", out)(
        *_addresses(a, b), added, out.data_ptr(), a_line, b_line, *out.shape, len(b), int(a_turned), int(not b_turned)
    )
    return out


def _lines(matrix: Tensor) -> tuple[Tensor, int, bool]:
    """A matrix whose lines lie in one piece each: from one to the next, and whether they are its columns."""
    if matrix.stride(1) != 1 and matrix.stride(0) != 1:
        matrix = matrix.contiguous()
    return (matrix, matrix.stride(0), False) if matrix.stride(1) == 1 else (matrix, matrix.stride(1), True)


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def pack(weight: Tensor) -> Tensor:
    """A weight ``[N, C]`` laid out for ``multiply_packed``."""
    weight = weight.contiguous()
    rows, depth = weight.shape
    packed = weight.new_empty(_up(rows, _STEP), _up(depth, _STEP))
    _function("gw_pack", weight)(*_addresses(weight, packed), rows, depth)
    return packed


def pack_8bit(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A weight ``[N, C]`` rounded to 8 bits, laid out for ``multiply_packed``, and its scales, fp32 ``[N, rounded up]``: a number is the
    nearest of -127 .. 127 times its row's scale, which is the row's largest magnitude / 127. C is below 131,072."""
    weight = weight.contiguous()
    rows, depth = weight.shape
    packed = weight.new_empty(_up(rows, _STEP), _up(depth, _LINE), dtype=torch.int8)
    scales = torch.empty(len(packed), dtype=torch.float32)
    assert depth < 1 << 17, f"{depth} products of bytes may not fit into 32 bits"
    _function("gw_pack_8bit", weight)(*_addresses(weight, packed, scales), rows, depth)
    return packed, scales


def multiply_packed(x: Tensor, packed: Tensor, columns: int, bias: Tensor | None = None, scales: Tensor | None = None) -> Tensor:
    """``x @ weight.t() + bias`` for few rows ``x`` ``[M, C]`` and a weight ``[columns, C]`` that ``pack`` laid out, or with ``scales``
    ``pack_8bit``. A row's numbers do not depend on the rows beside it. Without ``scales`` they are on matrix units to the last bit those
    of ``multiply``. With them a row of ``x`` is rounded to 16 bits, steps of its largest magnitude / 32,512, unless the processor has no
    products of whole numbers (AMX, VNNI, AVX2)."""
    wanted = x.dtype if scales is None else torch.int8
    assert packed.dtype == wanted, f"weights were packed in {packed.dtype}, and inputs in {x.dtype} take those in {wanted}"
    assert packed.shape == (_up(columns, _STEP), _up(x.shape[1], _STEP if scales is None else _LINE))
    assert bias is None or (bias.dtype, bias.shape, bias.is_contiguous()) == (x.dtype, (columns,), True)
    assert scales is None or (scales.dtype, scales.shape, scales.device.type) == (torch.float32, packed.shape[:1], "cpu")
    x, out = x.contiguous(), x.new_empty(len(x), columns)
    by, added = (None if y is None else y.data_ptr() for y in (scales, bias))
    if out.numel():
        _function("gw_multiply_packed", x)(*_addresses(x, packed), by, added, out.data_ptr(), *out.shape, x.shape[1])
    return out


def table(rows: Iterable[Iterable[Tensor | int | None]]) -> Tensor:
    """Where the numbers of tensors are, line by line, 0 for None; counts as they are. It is good for as long as the tensors live."""
    lines = [[x if isinstance(x, int) else 0 if x is None else x.data_ptr() for x in row] for row in rows]
    return torch.tensor(lines, dtype=torch.long)


def decode_layers(
    layers: Tensor, caches: Tensor, x: Tensor, own_lengths: Tensor, group_of_row: Tensor, prompt_lengths: Tensor, *, heads: int,
    kv_heads: int, width: int, inner: int, own_room: int, prompt_room: int, scale: float, epsilon: float, offset: float, activation: str,
) -> Tensor:  # fmt: skip
    """All layers of a decode step: what is still to be added to ``x`` ``[B, D]``, the residual stream, which is changed in place.

    The numbers are those of ``add_norm``, ``multiply_packed``, ``norm_heads``, ``decode_attention`` and ``gated``, called one by one.

    Args:
        layers: ``table`` of the layers' tensors in the order of ``Layer``, the weights of products as ``pack`` lays them out, or
            ``pack_8bit``; then the scales of these four, or None.
        caches: ``table`` of each layer's own keys and values, its prompts', cos and sin, and its window (0 for none).
        width, inner: of a head, and of the feed-forward part.
    """
    added, rows = torch.empty_like(x), len(x)
    scratch = x.new_empty(rows * (x.shape[1] + (2 * heads + 2 * kv_heads) * width + 3 * inner))
    addresses = _addresses(layers, caches, x, added, scratch, own_lengths, group_of_row, prompt_lengths)
    _function("gw_decode_layers", x)(
        *addresses, len(layers), *x.shape, heads, kv_heads, width, inner, own_room, prompt_room, scale, epsilon, offset,
        int(activation == "gelu_tanh"),
    )  # fmt: skip
    return added


def norm(x: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """``rms_norm`` of ``[..., D]``, and the factor of each row, fp32 ``[..., 1]``."""
    out, scales = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    width = x.shape[-1]
    addresses = (x, weight, out, scales)
    _function("gw_norm", x)(*(tensor.data_ptr() for tensor in addresses), x.numel() // width, width, epsilon, offset)
    return out, scales


def norm_backward(
    grad: Tensor, x: Tensor, scales: Tensor, weight: Tensor, residual: Tensor | None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` (with ``residual`` added, if given) and of ``weight``."""
    width = x.shape[-1]
    rows = x.numel() // width
    out, parts = torch.empty_like(x), x.new_empty(-(-rows // _NORM_CHUNK), width, dtype=torch.float32)
    residual = None if residual is None else residual.contiguous()  # a sum's gradient is one number, expanded
    added = None if residual is None else residual.data_ptr()
    _function("gw_norm_backward", grad)(
        grad.data_ptr(), x.data_ptr(), scales.data_ptr(), weight.data_ptr(), added, out.data_ptr(), parts.data_ptr(), rows, width,
        _NORM_CHUNK, offset,
    )  # fmt: skip
    return out, parts.sum(0).to(weight.dtype)


def gated_backward(grad: Tensor, gate_up: Tensor, activation: str = "silu") -> tuple[Tensor, Tensor]:
    """Gradient of ``gated``'s input ``[B, 2F]``, and its output once more ``[B, F]``."""
    grad_gate_up, out = torch.empty_like(gate_up), torch.empty_like(grad)
    addresses = (grad, gate_up, grad_gate_up, out)
    _function("gw_gated_backward", grad)(*(tensor.data_ptr() for tensor in addresses), *grad.shape, activation == "gelu_tanh")
    return grad_gate_up, out


def soften(scores: Tensor, queries: int, unit: int, offset: int, low: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``exp(scores - max)`` in place; the maxima, and the sums in fp32, ``[..., 1]`` each.

    Lines of ``scores`` ``[..., keys]`` are ``queries`` x ``unit`` heads, again and again. Query i sees the first ``offset + i + 1`` keys
    (all for a negative ``offset``), those before ``low[i]`` left out (int64 ``[queries]``); what it does not see becomes 0.
    """
    top = scores.new_empty(*scores.shape[:-1], 1)
    total = torch.empty_like(top, dtype=torch.float32)
    addresses = [x.data_ptr() for x in (scores, top, total)]
    first = None if low is None else low.data_ptr()
    _function("gw_soften", scores)(*addresses, first, total.numel(), scores.shape[-1], queries, unit, offset)
    return top, total


def soften_backward(
    scores: Tensor, grads: Tensor, top: Tensor, delta: Tensor, queries: int, unit: int, offset: int, low: Tensor | None = None
) -> None:
    """Turn in place ``scores`` into weights w = exp(scores - top), and ``grads`` into (grads - delta) w. Lines as for ``soften``."""
    addresses = [x.data_ptr() for x in (scores, grads, top, delta)]
    first = None if low is None else low.data_ptr()
    _function("gw_soften_backward", scores)(*addresses, first, top.numel(), scores.shape[-1], queries, unit, offset)


def by_heads(rows: Tensor, index: Tensor | range, heads_first: Tensor, kv_heads: int, back: bool = False) -> None:
    """Copy rows ``[R, K * U, E]``, those at ``index``, to ``heads_first`` ``[A * K, Q * U, E]``; ``back`` copies the other way.

    ``index`` is int64 ``[A * Q]``, or a range of rows (A is 1 then).
    """
    queries = len(index) * kv_heads // len(heads_first)
    first, address = (index.start, None) if isinstance(index, range) else (0, index.data_ptr())
    size = rows.shape[1] // kv_heads * rows.shape[2] * rows.element_size()
    _function("gw_by_heads", rows)(
        rows.data_ptr(), address, first, heads_first.data_ptr(), len(index) // queries, queries, kv_heads, size, int(back)
    )


def add_by_heads(rows: Tensor, index: Tensor, heads_first: Tensor, kv_heads: int) -> None:
    """Like ``by_heads`` with ``back``, added to what is there; the last row, which stands for padding, is left alone."""
    queries = len(index) * kv_heads // len(heads_first)
    width = rows.shape[1] // kv_heads * rows.shape[2]
    _function("gw_add_by_heads", rows)(
        rows.data_ptr(), index.data_ptr(), len(rows) - 1, heads_first.data_ptr(), len(index) // queries, queries, kv_heads, width
    )


def delta(grad: Tensor, out: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """``(grad . out) / total`` and ``grad / total`` for lines ``[..., E]``; ``total`` is fp32 ``[..., 1]``."""
    dots, divided = grad.new_empty(total.shape), torch.empty_like(grad)
    addresses = (grad, out, total, dots, divided)
    _function("gw_delta", grad)(*(x.data_ptr() for x in addresses), total.numel(), grad.shape[-1])
    return dots, divided


def take_logits(logits: Tensor, top: Tensor, total: Tensor, weighted: Tensor | None, temperature: float) -> None:
    """Take a slice of logits ``[T, columns]`` into the running maxima, the sums of exp(l - max) and those of exp(l - max) (l - max),
    fp32 ``[T]`` each; l is the logit over the temperature.
    """
    third = None if weighted is None else weighted.data_ptr()
    _function("gw_take_logits", logits)(logits.data_ptr(), top.data_ptr(), total.data_ptr(), third, *logits.shape, temperature)


def logit_gradients(
    logits: Tensor,
    normaliser: Tensor,
    grad: Tensor,
    of_entropy: tuple[Tensor, Tensor] | None,
    targets: Tensor,
    temperature: float,
) -> None:
    """Logits ``[T, columns]`` to their gradient, in place: grad (onehot(target) - p), and for entropies H with gradient g_H
    (``of_entropy`` is both) -g_H p (log p + H). ``targets`` count from the slice's first column. fp32 ``[T]`` each.
    """
    pair = (None, None) if of_entropy is None else (of_entropy[0].data_ptr(), of_entropy[1].data_ptr())
    _function("gw_logit_gradients", logits)(
        logits.data_ptr(), normaliser.data_ptr(), grad.data_ptr(), *pair, targets.data_ptr(), *logits.shape, temperature
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, turned: int, inverse: bool = False) -> None:
    """The rotary embedding of the first ``turned`` heads of ``x`` ``[B, heads, E]`` into ``out``; other heads are copied."""
    addresses = (x, cos, sin, out)
    _function("gw_rotate", x)(*(tensor.data_ptr() for tensor in addresses), *x.shape[:2], turned, x.shape[2], int(inverse))


def merge(frozen: Tensor, a: Tensor, b: Tensor, scaling: float, out: Tensor) -> None:
    """Write ``frozen + scaling * b @ a`` into ``out`` ``[rows, width]``, rounded as ``merging.dithered`` rounds; ``frozen`` is as ``out``,
    ``a`` ``[rank, width]`` and ``b`` ``[rows, rank]`` are fp32."""
    _function("gw_merge", out)(*_addresses(frozen, a, b, out), *frozen.shape, len(a), scaling)


def dither(exact: Tensor, out: Tensor, first_row: int, width: int) -> None:
    """Write fp32 ``exact``, rows of any ``width`` from ``first_row`` of their tensor on, into ``out``, rounded as ``merging.dithered``
    rounds."""
    _function("gw_dither", out)(*_addresses(exact, out), first_row, exact.numel() // width, width)
