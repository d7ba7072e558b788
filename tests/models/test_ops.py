"""The hand-written gradients of a layer's element-wise operations against autograd, and their forward passes against definitions."""

from __future__ import annotations

import weakref

import pytest
import torch

from groupwise.config.schema import ModelConfig
from groupwise.engines.builtin import decode
from groupwise.models import devices, ops
from groupwise.models.native import calls
from groupwise.models.native.build import kernels
from groupwise.models.ops import gated, head_norm, rms_norm, rope_rotate

EPSILON = 1e-3  # large, so that leaving it out shows


@pytest.fixture(autouse=True)
def _seed():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        yield


def plain_norm(x, weight, offset=0.0):
    return x * (x.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * (offset + weight)


def plain_head_norm(qkv, q_weight, k_weight, offset=0.0):
    return torch.cat([plain_norm(qkv[:, :3], q_weight, offset), plain_norm(qkv[:, 3:5], k_weight, offset), qkv[:, 5:]], dim=1)


def plain_swiglu(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


def plain_geglu(gate_up):
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


CASES = {
    "rms_norm": (lambda x, w: rms_norm(x, w, EPSILON), plain_norm, [(7, 12), (12,)]),
    "head_norm": (lambda x, q, k: head_norm(x, q, k, 3, 2, EPSILON), plain_head_norm, [(7, 7, 8), (8,), (8,)]),
    "swiglu": (gated, plain_swiglu, [(7, 10)]),
    "rms_norm of 1 + weight": (lambda x, w: rms_norm(x, w, EPSILON, 1.0), lambda x, w: plain_norm(x, w, 1.0), [(7, 12), (12,)]),
    "head_norm of 1 + weight": (
        lambda x, q, k: head_norm(x, q, k, 3, 2, EPSILON, 1.0),
        lambda x, q, k: plain_head_norm(x, q, k, 1.0),
        [(7, 7, 8), (8,), (8,)],
    ),
    "geglu": (lambda x: gated(x, "gelu_tanh"), plain_geglu, [(7, 10)]),
}


@pytest.fixture
def by_library(monkeypatch):
    """PyTorch's kernel of a whole norm: there on CPUs forward, and its gradient's operator is given one."""

    def backward(grad, x, shape, scale, weight, wanted):
        assert grad.is_contiguous()
        assert x.is_contiguous()
        assert list(shape) == list(weight.shape)
        assert scale.shape == (*x.shape[:-1], 1)
        normal = x.float() * scale
        inner = grad.float() * weight.float()
        back = scale * (inner - normal * (inner * normal).mean(-1, keepdim=True))
        return back.to(x.dtype), (grad.float() * normal).flatten(0, -2).sum(0).to(weight.dtype)

    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm_backward", backward, "CPU")
    monkeypatch.setattr(ops, "DEVICES", frozenset({"cpu"}))
    monkeypatch.setattr(ops, "_by_library", True)
    yield
    library._destroy()


@pytest.mark.parametrize("name", ["rms_norm", "head_norm", "rms_norm of 1 + weight"])
def test_norms_by_the_library_s_kernel(name, by_library, monkeypatch):
    """But for those with an offset, which keep to operations."""
    import torch.distributed.tensor  # comparing imports it, and it looks at the operation that is replaced here

    called = []
    kernel = torch.ops.aten._fused_rms_norm
    monkeypatch.setattr(torch.ops.aten, "_fused_rms_norm", lambda *given: called.append(None) or kernel(*given))
    test_values_and_gradients(name)
    assert bool(called) is ("1 + weight" not in name)


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name):
    ours, plain, shapes = CASES[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    found, expected = ours(*inputs), plain(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(ours(*inputs), expected, rtol=1e-5, atol=1e-6)
    grad = torch.randn_like(found)
    for x, y in zip(torch.autograd.grad(found, inputs, grad), torch.autograd.grad(expected, inputs, grad), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_the_backward_pass_leaves_the_incoming_gradient_alone(name):
    ours, _, shapes = CASES[name]
    inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
    out = ours(*inputs)
    grad = torch.randn_like(out)
    before = grad.clone()
    torch.autograd.grad(out, inputs, grad)
    assert torch.equal(grad, before)


@pytest.mark.parametrize("name", CASES)
def test_narrow_numbers_keep_their_type(name):
    ours, plain, shapes = CASES[name]
    inputs = [torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    out = ours(*inputs)
    grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
    assert {x.dtype for x in (out, *grads)} == {torch.bfloat16}
    wide = plain(*(x.float() for x in inputs))
    torch.testing.assert_close(out.float(), wide, rtol=2e-2, atol=2e-2)


def rope_tables(positions, width):
    angles = positions[:, None] * 100.0 ** -(torch.arange(width // 2) / (width // 2))
    return angles.cos()[:, None], angles.sin()[:, None]


def test_rotary_embedding_turns_pairs_by_their_angle():
    x, (cos, sin) = torch.randn(5, 3, 8), rope_tables(torch.tensor([0.0, 1.0, 5.0, 2.0, 9.0]), 8)
    out = torch.empty_like(x)
    rope_rotate(x, cos, sin, out)
    as_complex = torch.complex(x[..., :4], x[..., 4:]) * torch.complex(cos, sin)
    torch.testing.assert_close(out, torch.cat([as_complex.real, as_complex.imag], dim=-1))


def test_the_inverse_rotation_is_the_transpose():
    cos, sin = (1.3 * table for table in rope_tables(torch.arange(4.0), 6))  # yarn scales both, so the rotation is no isometry
    x, y = torch.randn(4, 2, 6), torch.randn(4, 2, 6)
    forward, backward = torch.empty_like(x), torch.empty_like(y)
    rope_rotate(x, cos, sin, forward)
    rope_rotate(y, cos, sin, backward, inverse=True)
    torch.testing.assert_close((forward * y).sum(), (x * backward).sum(), rtol=1e-5, atol=1e-5)


@pytest.fixture(params=["own", "library"])
def _products(request, monkeypatch):
    """Rearranged weights: the package's own, where its kernels are, and the library's."""
    monkeypatch.setitem(decode.ALLOWED, "rearranged", True)
    monkeypatch.setattr(calls, "_allowed", request.param == "own")
    monkeypatch.setattr(calls, "_products_allowed", True)
    decode._rows_are_alone.cache_clear()
    yield
    decode._rows_are_alone.cache_clear()


def helps(weight):
    """``decode.rearranging_helps(weight)``, which is what it has to be on this processor. PyTorch's blocked bf16 kernels need
    AVX-512. The package's own are there for fp32 with a compiler. PyTorch's for fp32 are tried: the tests below say for what."""
    found, own = decode.rearranging_helps(weight), calls._allowed and kernels(True).library is not None
    if own or weight.dtype != torch.float32:
        assert found is {torch.bfloat16: devices.computes_bf16(), torch.float16: False, torch.float32: True}[weight.dtype]
    return found


@pytest.mark.usefixtures("_products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_rearranged_weight_is_offered_only_where_the_processor_can_use_it(dtype):
    weight, x, bias = torch.randn(32, 16).to(dtype), torch.randn(4, 16).to(dtype), torch.randn(32).to(dtype)
    if helps(weight):
        product = decode.rearranged_product(weight, bias)
        for rows in (x, x.repeat(100, 1)):
            torch.testing.assert_close(product(rows), torch.nn.functional.linear(rows, weight, bias))


@pytest.mark.usefixtures("_products")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_rearranged_product_keeps_no_weight(dtype):
    """Merged with an adapter it is made for this alone: kept, a model would be there twice."""
    weight = torch.randn(32, 16).to(dtype)
    if helps(weight):
        product, there = decode.rearranged_product(weight), weakref.ref(weight)
        del weight
        assert there() is None
        assert product(torch.zeros(3, 16).to(dtype)).shape == (3, 32)


@pytest.mark.usefixtures("_products")
def test_rows_of_rearranged_fp32_weights_are_rounded_as_alone():
    weight, x = torch.randn(160, 96), torch.randn(24, 96)
    if helps(weight):
        for hint in (1, 64):
            product = decode.rearranged_product(weight, rows=hint)
            assert all(torch.equal(product(x[:rows]), product(x)[:rows]) for rows in range(1, 24))


def test_the_library_rearranges_fp32_weights_only_where_rows_are_rounded_as_alone(monkeypatch):
    monkeypatch.setitem(decode.ALLOWED, "rearranged", True)
    monkeypatch.setattr(calls, "_allowed", False)
    weight = torch.randn(160, 96)
    for alone in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(decode, "_rows_are_alone", lambda alone=alone: alone)
            assert decode.rearranging_helps(weight) is (alone and torch.backends.mkldnn.is_available())
    decode._rows_are_alone.cache_clear()
    if helps(weight):
        hints, reorder = [], torch.ops.mkldnn._reorder_linear_weight
        monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", lambda w, rows: hints.append(rows) or reorder(w, rows))
        decode.rearranged_product(weight, rows=1)
        assert hints == [8], "for a single row they would be rounded otherwise, and never be taken"
    real = decode.rearranged_product
    monkeypatch.setattr(
        decode, "rearranged_product", lambda weight, rows=32: lambda x: real(weight, rows=rows)(x) + 1e-6 * len(x)
    )
    decode._rows_are_alone.cache_clear()
    assert not decode.rearranging_helps(weight)
    decode._rows_are_alone.cache_clear()


def test_it_is_tried_with_fp32_weights_whatever_the_default_dtype(monkeypatch):
    tried = set()
    monkeypatch.setattr(decode, "rearranged_product", lambda weight, rows=32: lambda x: tried.add((weight.dtype, x.dtype)) or x)
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert decode._rows_are_alone.__wrapped__()
    finally:
        torch.set_default_dtype(torch.float32)
    assert tried == {(torch.float32, torch.float32)}


@pytest.mark.parametrize(
    ("computes", "device", "asked", "taken"),
    [
        (True, "cpu", "auto", "bfloat16"),
        (False, "cpu", "auto", "float32"),
        (False, "cpu", "bfloat16", "bfloat16"),
        (False, "cuda", "auto", "bfloat16"),
    ],
)
def test_auto_takes_bf16_only_where_the_processor_computes_in_it(monkeypatch, computes, device, asked, taken):
    monkeypatch.setattr(devices, "computes_bf16", lambda: computes)
    config = ModelConfig(device=device, dtype=asked)
    assert devices.with_dtype(config).dtype == taken
