"""Gating and rotation as Triton kernels, in both directions: each reads its operands once, and rounds once.

Between matrix products it is bytes that a GPU waits for. Of SwiGLU, forward and backward, PyTorch's operations move 21 tensors ``[R, F]``
and these move 8. Liger's kernels want gate and up as tensors of their own, and would begin with copies of the two halves.

Only this file and ``engines/builtin/gpu_kernels.py`` import Triton, which comes with PyTorch for CUDA. Its interpreter runs the kernels on
CPUs (``TRITON_INTERPRET=1``).

Axes: R rows, F feed-forward width, N heads, E head width.
"""
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
# Triton reads a kernel's annotations as types of its own.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gated", "gated_backward", "rotate"]

_WIDTH, _HEADS = 1024, 16
"""Of what one program computes."""


@triton.jit
def _share(gate, GELU: tl.constexpr):
    """What the activation lets through of ``gate``, and the slope of the sigmoid's argument. 0.5 (1 + tanh(z)) is sigmoid(2 z)."""
    inner, slope = gate, 1.0
    if GELU:
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    return tl.sigmoid(inner), slope


@triton.jit
def _gated(gate_up, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < width
    gate = tl.load(gate_up + 2 * row * width + at, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * width + at, mask=there, other=0.0).to(tl.float32)
    share, _ = _share(gate, GELU)
    tl.store(out + row * width + at, (gate * share * up).to(out.dtype.element_ty), mask=there)


@triton.jit
def _gated_backward(grad, gate_up, back, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there, of_gate, of_up = at < width, 2 * row * width + at, (2 * row + 1) * width + at
    out = tl.load(grad + row * width + at, mask=there, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + of_gate, mask=there, other=0.0).to(tl.float32)
    up = tl.load(gate_up + of_up, mask=there, other=0.0).to(tl.float32)
    share, slope = _share(gate, GELU)
    tl.store(back + of_gate, (out * up * share * (1.0 + gate * (1.0 - share) * slope)).to(back.dtype.element_ty), mask=there)
    tl.store(back + of_up, (out * gate * share).to(back.dtype.element_ty), mask=there)


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """``act(gate) * up`` for contiguous ``[R, 2F]``; ``activation``: ``silu`` or ``gelu_tanh``."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    _gated[(rows, triton.cdiv(width, _WIDTH))](gate_up, out, width, GELU=activation == "gelu_tanh", BLOCK=_WIDTH)
    return out


def gated_backward(grad: Tensor, gate_up: Tensor, activation: str = "silu") -> Tensor:
    """Gradient of ``gated``'s input ``[R, 2F]`` from that of its output ``[R, F]``, both contiguous."""
    (rows, width), back = grad.shape, gate_up.new_empty(gate_up.shape)
    _gated_backward[(rows, triton.cdiv(width, _WIDTH))](grad, gate_up, back, width, GELU=activation == "gelu_tanh", BLOCK=_WIDTH)
    return back


@triton.jit
def _rotate(x, cos, sin, out, sign, turned, N: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    row, half = tl.program_id(0).to(tl.int64), E // 2
    head, at = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    place, there = (row * N + head) * E + at, (head < N) & (at < half)
    first, second = tl.load(x + place, mask=there, other=0.0), tl.load(x + place + half, mask=there, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    c = tl.load(cos + row * half + at, mask=at < half, other=0.0).to(tl.float32)
    s = tl.load(sin + row * half + at, mask=at < half, other=0.0).to(tl.float32) * sign
    tl.store(out + place, tl.where(head < turned, (a * c - b * s).to(first.dtype), first), mask=there)
    tl.store(out + place + half, tl.where(head < turned, (b * c + a * s).to(first.dtype), second), mask=there)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, turned: int, inverse: bool = False) -> None:
    """Write ``x`` ``[R, N, E]`` into ``out``, its first ``turned`` heads by the rotary embedding, the others as they are.

    ``cos`` and ``sin`` are ``[R, 1, E / 2]``. All are contiguous.
    """
    rows, heads, width = x.shape
    _rotate[(rows, triton.cdiv(heads, _HEADS))](
        x, cos, sin, out, -1.0 if inverse else 1.0, turned, N=heads, E=width, HEADS=_HEADS,
        BLOCK=triton.next_power_of_2(width // 2),
    )  # fmt: skip
