"""What learning computes between its matrix products, as Triton kernels: gating, rotation and the softmax over the vocabulary, in both
directions. Each reads its operands once, and rounds once.

Between products a GPU waits for bytes. Of SwiGLU, forward and backward, PyTorch's operations move 21 tensors ``[R, F]`` and these move 8;
of the softmax over ``[T, V]`` in fp32 they move 15.5, and these 4.5. Liger's kernels want gate and up as tensors of their own, and would
begin with copies of the two halves; its loss over a vocabulary gives neither entropies nor log-probabilities with a gradient.

Only this file and ``engines/builtin/gpu_kernels.py`` import Triton, which comes with PyTorch for CUDA. Its interpreter runs the kernels on
CPUs (``TRITON_INTERPRET=1``).

Axes: R rows, F feed-forward width, N heads, E head width; T tokens, V columns of a slice of the vocabulary.
"""
# mypy: disallow-untyped-defs=False, disallow-untyped-decorators=False
# Triton reads a kernel's annotations as types of its own.

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["gated", "gated_backward", "logit_gradients", "rotate", "take_logits"]

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


@triton.jit
def _take_logits(
    logits, targets, chosen, top, total, weighted, first, width, temperature, ENTROPY: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = at < width
    x = tl.load(logits + row * width + at, mask=there, other=float("-inf")).to(tl.float32) / temperature
    place = tl.load(targets + row) - first
    if (place >= 0) & (place < width):
        tl.store(chosen + row, tl.load(logits + row * width + place).to(tl.float32) / temperature)
    before, sum_before = tl.load(top + row), tl.load(total + row)
    highest = tl.maximum(before, tl.max(x, 0))
    shrink, weights = tl.exp(before - highest), tl.exp(x - highest)
    if ENTROPY:
        moved = tl.where(before == float("-inf"), 0.0, before - highest)  # at first nothing was summed
        shifted = tl.where(there, x - highest, 0.0)
        so_far = (tl.load(weighted + row) + sum_before * moved) * shrink
        tl.store(weighted + row, so_far + tl.sum(weights * shifted, 0))
    tl.store(total + row, sum_before * shrink + tl.sum(weights, 0))
    tl.store(top + row, highest)


def take_logits(
    logits: Tensor, targets: Tensor, chosen: Tensor, top: Tensor, total: Tensor, weighted: Tensor | None, first: int,
    temperature: float,
) -> None:  # fmt: skip
    """Take a slice ``[T, V]`` of the vocabulary, from column ``first`` on, into fp32 ``[T]`` in place: the targets' own logits, the maxima,
    the sums of exp(s - max), and if asked for those of exp(s - max) (s - max); logits s are divided by ``temperature``."""
    rows, width = logits.shape
    _take_logits[(rows,)](
        logits, targets, chosen, top, total, total if weighted is None else weighted, first, width, temperature,
        ENTROPY=weighted is not None, BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip


@triton.jit
def _logit_gradients(
    logits, out, targets, normaliser, grad, grad_entropy, entropy, first, width, temperature, ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = at < width
    x = tl.load(logits + row * width + at, mask=there, other=0.0).to(tl.float32) / temperature
    log_p, of_target = x - tl.load(normaliser + row), tl.load(grad + row)
    factor = of_target + tl.zeros([BLOCK], tl.float32)
    if ENTROPY:
        factor += tl.load(grad_entropy + row) * (log_p + tl.load(entropy + row))
    own = tl.where(at == tl.load(targets + row) - first, of_target, 0.0)
    tl.store(out + row * width + at, (own - tl.exp(log_p) * factor).to(out.dtype.element_ty), mask=there)


def logit_gradients(
    logits: Tensor, out: Tensor, targets: Tensor, normaliser: Tensor, grad: Tensor, of_entropy: tuple[Tensor, Tensor] | None,
    first: int, temperature: float,
) -> None:  # fmt: skip
    """Write the gradient of a slice's logits ``[T, V]`` into ``out``: grad (onehot - p), and for the entropy H -grad_H p (log p + H).

    ``grad`` and ``of_entropy``, which is grad_H and H, are fp32 ``[T]``, gradients divided by ``temperature``.
    """
    (rows, width), (grad_entropy, entropy) = logits.shape, of_entropy or (grad, grad)
    _logit_gradients[(rows,)](
        logits, out, targets, normaliser, grad, grad_entropy, entropy, first, width, temperature, ENTROPY=of_entropy is not None,
        BLOCK=triton.next_power_of_2(width), num_warps=8,
    )  # fmt: skip
