"""The kernels as functions of tensors. Whoever calls one has asked ``fits`` first; shapes are the caller's promise.

Axes: B rows, H query heads, K key-value heads, E head width, S groups, P prompt positions, C own positions, V vocabulary, D model width,
F feed-forward width. All tensors are contiguous; floating ones are bf16 where nothing else is said.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from groupwise.models.native.build import kernels

__all__ = ["add_norm", "decode_attention", "draw", "fits", "swiglu"]

LANES = 16
"""Numbers that a kernel takes at a time: widths are multiples of it."""
ROOM = 32
"""Positions that a kernel takes at a time: tables have room for multiples of it."""

_POINTER, _COUNT, _REAL, _FLAG = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "gw_add_norm": (*[_POINTER] * 4, _COUNT, _COUNT, _REAL),
    "gw_swiglu": (_POINTER, _POINTER, _COUNT, _COUNT),
    "gw_decode_attention": (*[_POINTER] * 11, *[_COUNT] * 6),
    "gw_draw": (*[_POINTER] * 5, _COUNT, _COUNT, _REAL, _FLAG),
}
_functions: dict[str, Any] = {}


def fits(like: Tensor, *widths: int) -> bool:
    """Whether the kernels are there and take tensors such as ``like`` with these widths."""
    if like.dtype != torch.bfloat16 or like.device.type != "cpu" or any(width % LANES for width in widths):
        return False
    return bool(_functions) or _load()


def _load() -> bool:
    library = kernels().library
    if library is None:
        return False
    for name, signature in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = signature, None
        _functions[name] = function
    return True


def add_norm(x: Tensor, y: Tensor | None, weight: Tensor, epsilon: float) -> Tensor:
    """Add ``y`` to ``x`` ``[B, D]`` in place, and return ``rms_norm(x, weight)``."""
    out = torch.empty_like(x)
    added = None if y is None else y.data_ptr()
    _functions["gw_add_norm"](x.data_ptr(), added, weight.data_ptr(), out.data_ptr(), *x.shape, epsilon)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for ``[B, 2F]``."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _functions["gw_swiglu"](gate_up.data_ptr(), out.data_ptr(), rows, width)
    return out


def decode_attention(
    qkv: Tensor, cos: Tensor, sin: Tensor, own: tuple[Tensor, Tensor], prompt: tuple[Tensor, Tensor], own_lengths: Tensor,
    group_of_row: Tensor, prompt_lengths: Tensor, heads: int,
) -> Tensor:  # fmt: skip
    """Rotate the fed tokens' queries and keys, append their keys and values to ``own``, and attend: ``[B, H, E]``.

    Args:
        qkv: ``[B, H + 2K, E]``; E a multiple of 32.
        cos, sin: ``[B, 1, E / 2]``.
        own: keys ``[B, K, E, C]`` and values ``[B, K, C, E]``; C a multiple of 32.
        prompt: keys ``[S, K, E, P]`` and values ``[S, K, P, E]``; P a multiple of 32.
        own_lengths, group_of_row, prompt_lengths: int64 ``[B]``, ``[B]``, ``[S]``; own lengths do not count the fed token.
    """
    rows, kv_heads, width = len(qkv), own[0].shape[1], qkv.shape[2]
    out = qkv.new_empty(rows, heads, width)
    addresses = (qkv, cos, sin, *own, *prompt, own_lengths, group_of_row, prompt_lengths, out)
    _functions["gw_decode_attention"](
        *(tensor.data_ptr() for tensor in addresses), rows, heads, kv_heads, width, own[0].shape[3], prompt[0].shape[3]
    )
    return out


def draw(logits: Tensor, keys: Tensor, positions: Tensor, temperature: float, greedy: bool) -> tuple[Tensor, Tensor]:
    """Tokens ``[B]`` and log-probabilities ``[B]`` (fp32) from ``logits`` ``[B, V]``: as ``Draw`` without top-k and top-p."""
    rows, vocabulary = logits.shape
    tokens = torch.empty(rows, dtype=torch.long)
    logprobs = torch.empty(rows, dtype=torch.float32)
    addresses = (logits, keys, positions, tokens, logprobs)
    _functions["gw_draw"](*(tensor.data_ptr() for tensor in addresses), rows, vocabulary, temperature, int(greedy))
    return tokens, logprobs
