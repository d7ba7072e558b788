"""The operations of a Llama-style layer: matrix products, and element-wise ones, whose gradients are written out.

Autograd would give the same numbers; writing the backward pass by hand keeps one saved tensor per operation instead of four or
five, which is what activation memory is made of. Shapes: T tokens (packed, no padding), D model width, F feed-forward width,
H query heads, K key-value heads, E head width.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import gelu, silu

from groupwise.models.native import calls as native

__all__ = [
    "allow_kernels", "allow_library_norms", "gated", "gated_backward", "head_norm", "head_norm_backward", "kernels_fit", "normalise",
    "normalise_backward", "norms_by_library", "product", "rms_norm", "rope_rotate", "rotate_heads", "scramble",
    "triton_kernels", "uniforms",
]  # fmt: skip

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift_right(x: Tensor, bits: int) -> Tensor:
    return (x >> bits) & ((1 << (64 - bits)) - 1)  # logical, where torch's own is arithmetic


def scramble(keys: Tensor, positions: Tensor) -> Tensor:
    """64 random bits as int64 for each pair of a key and a position, which are broadcast (splitmix64; Steele et al., 2014)."""
    x = keys + (positions + 1) * GOLDEN
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def uniforms(keys: Tensor, positions: Tensor) -> Tensor:
    """Uniform numbers in [0, 1) as fp64, for int64 ``keys`` and token ``positions``."""
    return _shift_right(scramble(keys, positions), 11).double() * 2.0**-53


DEVICES = frozenset({"cuda"})
"""Where PyTorch has a kernel for a whole norm, and for its gradient, and where Triton computes."""
_by_library, _by_kernels = False, False


def allow_library_norms(yes: bool) -> None:
    """Take PyTorch's kernels for norms, one launch for eight, or leave them out. On GPUs they round once, where the operations do twice."""
    global _by_library
    _by_library = yes


def norms_by_library(device: torch.device, offset: float) -> bool:
    """Whether norms on ``device`` go by PyTorch's kernel. Not with an offset, which it would add in the weights' own dtype."""
    return _by_library and device.type in DEVICES and not offset


def allow_kernels(yes: bool) -> None:
    """Take Triton's kernels for learning (``triton_kernels.py``) where it is installed, or leave them out."""
    global _by_kernels
    _by_kernels = yes and find_spec("triton") is not None


def kernels_fit(device: torch.device) -> bool:
    """Whether learning on ``device`` goes by Triton's kernels."""
    return _by_kernels and device.type in DEVICES


def triton_kernels() -> Any:
    """The module of that name."""
    from groupwise.models import triton_kernels  # only here: Triton takes a while to import, and is not everywhere

    return triton_kernels


def product(a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """``a @ b + bias`` for ``a`` ``[M, C]``, ``b`` ``[C, N]`` and ``bias`` ``[N]``; into ``out`` if given. Has no gradient."""
    given = (a, b) if bias is None else (a, b, bias)
    assert not (torch.is_grad_enabled() and any(x.requires_grad for x in given)), "this product has no gradient"
    if native.multiplies(a) and all(x.dtype == a.dtype for x in given) and (out is None or out.is_contiguous()):
        return native.multiply(a, b, bias, out)
    if bias is None:
        return torch.mm(a, b, out=out)
    return torch.addmm(bias, a, b, out=out)


def normalise(x: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """``rms_norm`` without a gradient, and the factor of each row, fp32 ``[..., 1]``."""
    if native.fits(x, x.shape[-1]) and x.dtype == weight.dtype and x.is_contiguous():
        return native.norm(x, weight, epsilon, offset)
    if norms_by_library(x.device, offset):
        y, scale = torch.ops.aten._fused_rms_norm(x, list(weight.shape), weight, epsilon)
        return y, scale
    x32 = x.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + epsilon)
    if offset:
        return (x32 * scale * (offset + weight.float())).to(x.dtype), scale
    return (x32 * scale).to(x.dtype) * weight, scale


def normalise_backward(
    grad: Tensor, x: Tensor, scale: Tensor, weight: Tensor, residual: Tensor | None = None, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Gradients of ``x``, with ``residual`` added if given, and of ``weight``; ``scale`` is what ``normalise`` gave."""
    if native.fits(x, x.shape[-1]) and x.dtype == weight.dtype and x.is_contiguous() and grad.is_contiguous():
        return native.norm_backward(grad, x, scale, weight, residual, offset)
    if norms_by_library(x.device, offset):
        back, grad_weight = torch.ops.aten._fused_rms_norm_backward(
            grad.contiguous(), x.contiguous(), list(weight.shape), scale, weight, [True, True]
        )
        return back if residual is None else back.add_(residual), grad_weight
    normal = x.float() * scale
    grad_weight = (grad.float() * normal).flatten(0, -2).sum(0)
    inner = grad.float() * (weight.float() + offset if offset else weight.float())
    dot = (inner * normal).mean(-1, keepdim=True)
    grad_x = inner.addcmul_(normal, dot, value=-1).mul_(scale)
    back = grad_x.to(x.dtype)
    return back if residual is None else back.add_(residual), grad_weight.to(weight.dtype)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
        y, scale = normalise(x, weight, epsilon, offset)
        ctx.save_for_backward(x, scale, weight)
        ctx.offset = offset
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, scale, weight = ctx.saved_tensors
        return *normalise_backward(grad, x, scale, weight, offset=ctx.offset), None, None


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * (offset + weight)`` over the last axis, statistics in fp32 (Zhang & Sennrich, 2019)."""
    if not torch.is_grad_enabled():
        return normalise(x, weight, epsilon, offset)[0]
    return _RMSNorm.apply(x, weight, epsilon, offset)


def _head_norm(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, heads: int, kv_heads: int, epsilon: float, offset: float
) -> Tensor:
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    return torch.cat([normalise(q, q_weight, epsilon, offset)[0], normalise(k, k_weight, epsilon, offset)[0], v], dim=1)


class _HeadNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, heads: int, kv_heads: int, epsilon: float, offset: float
    ) -> Tensor:
        ctx.save_for_backward(qkv, q_weight, k_weight)
        ctx.split = (heads, kv_heads, epsilon, offset)
        return _head_norm(qkv, q_weight, k_weight, heads, kv_heads, epsilon, offset)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *head_norm_backward(grad, *ctx.saved_tensors, *ctx.split), None, None, None, None


def head_norm_backward(
    grad: Tensor, qkv: Tensor, q_weight: Tensor, k_weight: Tensor, heads: int, kv_heads: int, epsilon: float, offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``head_norm``'s ``qkv`` and of both weights."""
    out, weight_grads = grad.clone(), []
    for part, weight in ((slice(0, heads), q_weight), (slice(heads, heads + kv_heads), k_weight)):
        _, scale = normalise(qkv[:, part], weight, epsilon)
        out[:, part], weight_grad = normalise_backward(grad[:, part], qkv[:, part], scale, weight, offset=offset)
        weight_grads.append(weight_grad)
    return out, weight_grads[0], weight_grads[1]


def head_norm(
    qkv: Tensor, q_weight: Tensor, k_weight: Tensor, heads: int, kv_heads: int, epsilon: float, offset: float = 0.0
) -> Tensor:
    """Qwen3's norm of each query and key head; ``qkv`` is ``[T, H + 2K, E]`` and its value heads pass through."""
    if not torch.is_grad_enabled():
        return _head_norm(qkv, q_weight, k_weight, heads, kv_heads, epsilon, offset)
    return _HeadNorm.apply(qkv, q_weight, k_weight, heads, kv_heads, epsilon, offset)


def rope_rotate(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, inverse: bool = False) -> None:
    """Write the rotary embedding of ``x`` ``[T, heads, E]`` into ``out`` (which may not be ``x``); ``cos`` and ``sin`` are ``[T, 1, E/2]``.

    The inverse rotation is the transpose, so it is also the backward pass (Su et al., arXiv 2104.09864).
    """
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    sign = -1.0 if inverse else 1.0
    torch.mul(first, cos, out=out_first)
    out_first.addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second)
    out_second.addcmul_(first, sin, value=sign)


def _activate(gate: Tensor, activation: str) -> Tensor:
    return silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")


def _gated(gate_up: Tensor, activation: str) -> Tensor:
    if native.fits(gate_up, gate_up.shape[1] // 2):
        return native.gated(gate_up, activation)
    if kernels_fit(gate_up.device) and gate_up.is_contiguous():
        return triton_kernels().gated(gate_up, activation)  # type: ignore[no-any-return]
    gate, up = gate_up.chunk(2, dim=-1)
    return _activate(gate, activation).mul_(up)


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, turned: int, inverse: bool = False) -> None:
    """Write ``x`` ``[T, heads, E]`` into ``out``, its first ``turned`` heads by ``rope_rotate``, the others as they are."""
    if native.fits(x, x.shape[-1] // 2) and x.is_contiguous() and out.is_contiguous():
        native.rotate(x, cos, sin, out, turned, inverse)
        return
    if kernels_fit(x.device) and all(tensor.is_contiguous() for tensor in (x, cos, sin, out)):
        triton_kernels().rotate(x, cos, sin, out, turned, inverse)
        return
    rope_rotate(x[:, :turned], cos, sin, out[:, :turned], inverse)
    out[:, turned:] = x[:, turned:]


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate_up)
        ctx.activation = activation
        return _gated(gate_up, activation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        grad = grad.contiguous()
        if kernels_fit(grad.device) and gate_up.is_contiguous():
            return triton_kernels().gated_backward(grad, gate_up, ctx.activation), None
        return gated_backward(grad, gate_up, ctx.activation)[0], None


def gated_backward(grad: Tensor, gate_up: Tensor, activation: str = "silu") -> tuple[Tensor, Tensor]:
    """Gradient of ``gated``'s input ``[T, 2F]``, and its output once more ``[T, F]``."""
    if native.fits(gate_up, grad.shape[1]):
        return native.gated_backward(grad, gate_up, activation)
    gate, up = gate_up.chunk(2, dim=-1)
    grad_gate_up = torch.empty_like(gate_up)
    grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
    activated = _activate(gate, activation)
    torch.mul(activated, grad, out=grad_up)
    if activation == "silu":
        grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
    else:
        grad_gate.copy_(torch.ops.aten.gelu_backward(grad * up, gate, approximate="tanh"))
    return grad_gate_up, activated.mul_(up)


def gated(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """``act(gate) * up`` for ``gate_up`` ``[T, 2F]``: SwiGLU or GeGLU (Shazeer, arXiv 2002.05202).

    ``activation``: ``silu``, or ``gelu_tanh`` (GELU by its approximation with tanh).
    """
    if not torch.is_grad_enabled():
        return _gated(gate_up, activation)
    return _Gated.apply(gate_up, activation)
