"""Triton's kernels for learning: on a card by `make test-gpu`, and by Triton's interpreter on a CPU, as
`tests/engines/test_gpu_kernels.py` says."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from transformers import Gemma3TextConfig, Qwen3Config

from groupwise.engines.builtin import fast_paths
from groupwise.models import logprobs, ops
from groupwise.models.logprobs import score_tokens
from tests.conftest import TINY
from tests.models.test_ops import plain_geglu, plain_swiglu, rope_tables

pytest.importorskip("triton", reason="Triton is not installed: it comes with PyTorch for CUDA")

from groupwise.models import triton_kernels

interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
everywhere = pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]
)


KERNELS = ("_gated", "_gated_backward", "_rotate", "_take_logits", "_logit_gradients")


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """The kernels, which are allowed for the test's time, in the order in which they are launched."""
    names = []

    class Counted:
        def __init__(self, name):
            self.name, self.kernel = name, getattr(triton_kernels, name)

        def __getitem__(self, grid):
            names.append(self.name)
            return self.kernel[grid]

    for name in KERNELS:
        monkeypatch.setattr(triton_kernels, name, Counted(name))
    monkeypatch.setattr(ops, "DEVICES", frozenset({"cpu", "cuda"}))
    ops.allow_kernels(True)
    yield names
    ops.allow_kernels(False)


def drawn(*shape, device, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(device, dtype)


@pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp"
)  # by the interpreter's sigmoid, which is 0 there, as it should be
@everywhere
@pytest.mark.parametrize(("activation", "plain"), [("silu", plain_swiglu), ("gelu_tanh", plain_geglu)])
@pytest.mark.parametrize("width", [5, 1024, 1500])
def test_gating_and_its_gradient(activation, plain, width, device, launched):
    """Against the definition in fp64, where gates are far from zero too; in widths that end within a program's part."""
    x = (4 * drawn(7, 2 * width, device=device)).requires_grad_()
    grad = drawn(width, 7, device=device).t()  # as of a transposed product: not contiguous
    out = ops.gated(x, activation)
    (back,) = torch.autograd.grad(out, x, grad)
    wide = x.detach().double().requires_grad_()
    expected = plain(wide)
    torch.testing.assert_close(out, expected.float(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(back, torch.autograd.grad(expected, wide, grad.double())[0].float(), rtol=5e-6, atol=5e-6)
    with torch.no_grad():
        assert torch.equal(ops.gated(x, activation), out)
    assert launched == ["_gated", "_gated_backward", "_gated"]


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float16, marks=interpreted),  # the interpreter cuts bf16 off
        pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_narrow_numbers_are_rounded_once(device, dtype):
    """By half a unit of the last place of what fp32 gives; PyTorch's operations round in between."""
    x = drawn(3, 40, device=device, dtype=dtype).requires_grad_()
    out = ops.gated(x)
    (back,) = torch.autograd.grad(out, x, torch.ones_like(out))
    wide = x.detach().float().requires_grad_()
    expected = ops.gated(wide)
    for narrow, exact in ((out, expected), (back, torch.autograd.grad(expected, wide, torch.ones_like(expected))[0])):
        torch.testing.assert_close(narrow.float(), exact, rtol=0.51 * torch.finfo(dtype).eps, atol=1e-7)


@everywhere
@pytest.mark.parametrize(("heads", "turned", "width"), [(16, 14, 128), (4, 3, 80), (37, 33, 8), (3, 3, 2)])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotation_of_the_first_heads(heads, turned, width, inverse, device, launched):
    """As by complex numbers; with more heads than a program takes, and half a width that is no power of two. The others stay."""
    x = drawn(5, heads, width, device=device)
    cos, sin = (table.to(device) for table in rope_tables(torch.tensor([0.0, 1.0, 5.0, 2.0, 9.0]), width))
    out = torch.full_like(x, float("nan"))
    ops.rotate_heads(x, cos, sin, out, turned, inverse)
    one, other = x[:, :turned].double().chunk(2, dim=-1)
    by = torch.complex(one, other) * torch.complex(cos.double(), sin.double() * (-1 if inverse else 1))
    torch.testing.assert_close(out[:, :turned], torch.cat([by.real, by.imag], dim=-1).float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(out[:, turned:], x[:, turned:])
    assert launched == ["_rotate"]


@interpreted
def test_parts_of_other_tensors_go_by_operations(launched):
    """The kernels take rows to lie one after the other."""
    x, (cos, sin) = drawn(6, 4, 8, device="cpu"), rope_tables(torch.arange(3.0), 8)
    whole, out = (torch.empty(3, 4, 8) for _ in range(2))
    ops.rotate_heads(x[::2], cos, sin, out, 3)
    assert launched == []
    ops.rotate_heads(x[::2].contiguous(), cos, sin, whole, 3)
    torch.testing.assert_close(out, whole)
    assert launched == ["_rotate"]
    gate_up = drawn(6, 20, device="cpu")[:, :10]
    torch.testing.assert_close(ops.gated(gate_up), plain_swiglu(gate_up))
    assert launched == ["_rotate"]


def wide_scores(hidden, weight, targets, temperature):
    """Log-probabilities and entropies in fp64, from all logits at once."""
    logp = torch.log_softmax(hidden.double() @ weight.double().t() / temperature, dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(1)


@everywhere
@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_softmax_over_a_vocabulary_and_its_gradient(entropy, temperature, device, launched, monkeypatch):
    """In slices of the vocabulary, the last one narrower, and in tiles of rows; from nearly flat distributions to steep ones."""
    monkeypatch.setattr(logprobs, "logit_columns", lambda rows, device: 96)
    monkeypatch.setattr(logprobs, "LOGIT_ROWS", dict.fromkeys(("cpu", "cuda"), 4))
    hidden, weight = drawn(7, 16, device=device), drawn(300, 16, device=device).requires_grad_()
    hidden = (torch.linspace(0.1, 4, 7, device=device)[:, None] * hidden).requires_grad_()
    targets = torch.tensor([0, 95, 96, 299, 150, 288, 17], device=device)

    def score(*given):
        scored = score_tokens(*given, entropy=entropy)
        return (scored.logprobs_T, scored.entropy_T)[: 1 + entropy]

    found, expected = score(hidden, weight, targets, temperature), wide_scores(hidden, weight, targets, temperature)
    share = torch.linspace(-1, 2, 7, device=device)
    ours, theirs = (sum((share * part).sum() for part in parts[: 1 + entropy]) for parts in (found, expected))
    for one, other in zip(found, expected, strict=False):
        torch.testing.assert_close(one, other.float(), rtol=1e-5, atol=1e-5)
    gradients = zip(*(torch.autograd.grad(total, [hidden, weight]) for total in (ours, theirs)), strict=True)
    for one, other in gradients:
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for one, other in zip(score(hidden, weight, targets, temperature), found, strict=True):
            assert torch.equal(one, other)
    assert launched == ["_take_logits"] * 8 + ["_logit_gradients"] * 8 + ["_take_logits"] * 8


CONFIGS = {
    "silu": Qwen3Config(**{**TINY, "head_dim": 32}),
    "GELU": Gemma3TextConfig(**{**TINY, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24}),
}


@interpreted
@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("part", [None, "gated", "gated_backward", "rotate", "take_logits", "logit_gradients"])
def test_they_are_compared_before_they_are_taken(family, part, launched, monkeypatch):
    """Through forward and backward passes, as on a GPU without flash attention: a factor that is off by 1%, or a slice by a column."""
    monkeypatch.setattr(fast_paths, "_REPEATS", 1)
    monkeypatch.setattr(fast_paths.attention, "default_implementation", lambda device: "sdpa")
    if part == "rotate":
        right = triton_kernels.rotate
        monkeypatch.setattr(triton_kernels, part, lambda x, cos, sin, *rest: right(x, cos, 1.01 * sin, *rest))
    elif part in ("take_logits", "logit_gradients"):
        take = getattr(triton_kernels, part)
        monkeypatch.setattr(triton_kernels, part, lambda *given: take(*given[:-2], given[-2] + 1, given[-1]))
    elif part is not None:
        correct = getattr(triton_kernels, part)
        monkeypatch.setattr(triton_kernels, part, lambda *given: 1.01 * correct(*given))
    path = next(path for path in fast_paths.fast_paths() if path.name == "kernels for learning")
    decoder = fast_paths._small(CONFIGS[family], torch.float32, torch.device("cpu"))
    assert path.applies(decoder)
    choice, _ = fast_paths.choose(replace(path, slack=1e6), decoder)
    assert choice.taken is choice.agrees is (part is None)
    assert all(0 < measured.difference < 1e-5 for measured in choice.operations) is (part is None)
    assert set(KERNELS) == set(launched)


@interpreted
def test_where_triton_is_not_installed_they_do_not_apply(monkeypatch):
    monkeypatch.setattr(ops, "find_spec", lambda name: None)
    ops.allow_kernels(True)
    assert not ops.kernels_fit(torch.device("cuda"))
