"""The fused loops against definitions in fp64, against PyTorch's path through a whole model, and what happens without a compiler.

A kernel computes in fp32 and rounds once, so its results are compared with the exact ones to half a unit of bf16 (2^-9 relative), and of
fp32 models to what sums of fp32 may lose.
"""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from groupwise.engines import SampleRequest, SamplingSettings
from groupwise.engines.builtin import decode
from groupwise.engines.builtin.draw import Draw
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.engines.turns import Turns
from groupwise.models import merging
from groupwise.models.decoder import Decoder
from groupwise.models.merging import added_up, dithered, round_dithered_
from groupwise.models.native import build, calls
from groupwise.models.ops import normalise, normalise_backward, product, rope_rotate
from groupwise.models.packing import pack
from groupwise.types import Problem, Prompt

BF16, FP32 = torch.bfloat16, torch.float32
ROUNDING = {BF16: 2.0**-8, FP32: 2.0**-16}  # of one or two roundings, relative

needs_kernels = pytest.mark.skipif(
    not calls.fits(torch.empty(0, dtype=BF16)), reason=f"no kernels: {build.kernels().description}"
)


@pytest.fixture(autouse=True)
def _start(monkeypatch):
    monkeypatch.setattr(calls, "_allowed", True)  # whatever was chosen for the models of other tests
    monkeypatch.setattr(calls, "_products_allowed", True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        yield


def random(dtype, *shape, scale=1.0):
    return (torch.randn(shape) * scale).to(dtype)


@pytest.fixture(params=[BF16, FP32], ids=["bf16", "fp32"])
def dtype(request):
    """What models are made of; its kernels are loaded."""
    calls.fits(torch.empty(0, dtype=request.param))
    return request.param


@pytest.fixture
def numbers(dtype):
    return partial(random, dtype)


@pytest.fixture(params=[FP32, torch.float64], ids=["", "fp64-by-default"])
def default_dtype(request):
    """PyTorch's for new tensors, which a program may set."""
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(FP32)


def close(found, expected, roundings=1):
    """Within so many roundings of the exact numbers, and of their size where terms cancel."""
    exact, tolerance = expected.double(), roundings * ROUNDING[found.dtype]
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance * exact.abs().mean().item())


def exact_norm(x, weight, offset=0.0, epsilon=1e-5):
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * (offset + weight.double())


@needs_kernels
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.usefixtures("default_dtype")
def test_norm_and_its_gradients(numbers, offset):
    x, weight, grad, residual = numbers(130, 48), numbers(48), numbers(130, 48), numbers(130, 48)
    assert calls.fits(x, 48)
    assert not calls.fits(x, 40)
    assert not calls.fits(x.half(), 48)
    assert not calls.fits(x.double(), 48)
    out, scales = calls.norm(x, weight, 1e-5, offset)
    assert scales.dtype == FP32
    close(out, exact_norm(x, weight, offset), 2)
    inputs = [x.double().requires_grad_(), weight.double().requires_grad_()]
    exact_norm(*inputs, offset).backward(grad.double())
    found, weight_grad = calls.norm_backward(grad, x, scales, weight, None, offset)
    close(found, inputs[0].grad, 2)
    close(weight_grad, inputs[1].grad)
    added, _ = calls.norm_backward(grad, x, scales, weight, residual, offset)
    close(added, inputs[0].grad + residual.double(), 2)
    same, _ = calls.norm_backward(grad, x, scales, weight, residual[:1].expand(130, 48), offset)
    close(same, inputs[0].grad + residual[:1].double(), 2)  # a sum's gradient: rows that are stored once


@needs_kernels
def test_a_norm_of_two_kinds_of_numbers_goes_by_operations():
    x, weight, grad = random(FP32, 5, 48), random(BF16, 48), random(FP32, 5, 48)
    out, scales = normalise(x, weight, 1e-5)
    close(out, exact_norm(x, weight))
    exact = x.double().requires_grad_()
    exact_norm(exact, weight).backward(grad.double())
    close(normalise_backward(grad, x, scales, weight)[0], exact.grad, 2)


@needs_kernels
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_adding_and_norm_in_one(numbers, offset):
    x, y, weight = numbers(5, 48), numbers(5, 48), numbers(48)
    total = x + y
    out = calls.add_norm(x, y, weight, 1e-5, offset)
    assert torch.equal(x, total)
    assert torch.equal(out, calls.norm(total, weight, 1e-5, offset)[0])
    assert torch.equal(calls.add_norm(x, None, weight, 1e-5, offset), out)


ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh")}


@needs_kernels
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norm_of_heads(numbers, offset):
    qkv, q_weight, k_weight = numbers(40, 9, 64), numbers(64), numbers(64)
    given = qkv.clone()
    assert calls.norm_heads(qkv, q_weight, k_weight, 5, 2, 1e-5, offset) is qkv
    close(qkv[:, :5], exact_norm(given[:, :5], q_weight, offset), roundings=2)
    close(qkv[:, 5:7], exact_norm(given[:, 5:7], k_weight, offset), roundings=2)
    assert torch.equal(qkv[:, 7:], given[:, 7:])


@needs_kernels
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated_units_and_their_gradients(numbers, activation):
    gate_up, grad = numbers(33, 64, scale=4), numbers(33, 32)
    exact = gate_up.double().requires_grad_()
    gate, up = exact.chunk(2, -1)
    expected = ACTIVATIONS[activation](gate) * up
    expected.backward(grad.double())
    close(calls.gated(gate_up, activation), expected.detach())
    found, again = calls.gated_backward(grad, gate_up, activation)
    close(found, exact.grad)
    assert torch.equal(again, calls.gated(gate_up, activation))


@needs_kernels
@pytest.mark.parametrize("inverse", [False, True])
def test_rotary_embedding(numbers, dtype, inverse):
    x, angle = numbers(9, 5, 32), torch.rand(9, 1, 16) * 6
    cos, sin, out, expected = angle.cos().to(dtype), angle.sin().to(dtype), torch.empty_like(x), x.double().clone()
    calls.rotate(x, cos, sin, out, 3, inverse)
    rope_rotate(x[:, :3].double(), cos.double(), sin.double(), expected[:, :3], inverse)
    close(out, expected)
    assert torch.equal(out[:, 3:], x[:, 3:])


@needs_kernels
@pytest.mark.parametrize("window", [None, 5, 18])
@pytest.mark.parametrize(("keys", "offset"), [(7, -1), (48, -1), (21, 9), (40, 28)])
@pytest.mark.usefixtures("default_dtype")
def test_softmax_of_scores_and_its_gradient(numbers, keys, offset, window):
    """12 queries of 3 heads in 4 batches; with an offset, query i sees offset + i + 1 keys; with a window, the last so many of them."""
    batches, queries, unit = 4, 12, 3
    scores, grads, delta = (
        numbers(batches, queries * unit, keys, scale=3),
        numbers(batches, queries * unit, keys),
        numbers(4, 36, 1),
    )
    hidden = torch.zeros(36, keys, dtype=torch.bool)
    if offset >= 0:
        hidden = torch.arange(keys)[None] > offset + torch.arange(queries).repeat_interleave(unit)[:, None]
    low = None
    if window is not None:
        low = (torch.arange(queries) + max(0, offset) + 1 - window).clamp_(0, keys - 1)
        hidden |= torch.arange(keys)[None] < low.repeat_interleave(unit)[:, None]
    exact = scores.double().masked_fill(hidden, float("-inf"))
    expected = (exact - exact.amax(-1, keepdim=True)).exp()
    weights, given = scores.clone(), (queries, unit, offset, low)
    top, total = calls.soften(weights, *given)
    assert torch.equal(top.double(), exact.amax(-1, keepdim=True))
    close(weights, expected)
    torch.testing.assert_close(total.double(), weights.double().sum(-1, keepdim=True), rtol=1e-6, atol=0)
    again, gradient = scores.clone(), grads.clone()
    calls.soften_backward(again, gradient, top, delta, *given)
    assert torch.equal(again, weights)
    close(gradient, (grads.double() - delta.double()) * weights.double())


@needs_kernels
def test_rows_to_heads_and_back(numbers):
    rows, index = numbers(11, 6, 32), torch.tensor([4, 5, 6, 10, 0, 1, 2, 3])  # two sequences of four, three key heads of two
    expected = rows[index].view(2, 4, 3, 2, 32).transpose(1, 2).reshape(6, 8, 32)
    laid = torch.empty_like(expected)
    calls.by_heads(rows, index, laid, 3)
    assert torch.equal(laid, expected)
    put = torch.zeros_like(rows)
    calls.by_heads(put, index, laid, 3, back=True)
    assert torch.equal(put[index], rows[index])
    assert not put[7:10].any()
    added = rows.clone()
    calls.add_by_heads(added, index, laid, 3)
    once = index[index != 10]
    assert torch.equal(added[once], rows[once] + rows[once])
    assert torch.equal(added[7:], rows[7:])
    part = laid.new_empty(3, 8, 32)
    calls.by_heads(rows, range(2, 6), part, 3)
    assert torch.equal(part, rows[2:6].view(4, 3, 2, 32).transpose(0, 1).reshape(3, 8, 32))


@needs_kernels
def test_delta_of_the_attention_gradient(numbers):
    grad, out, total = numbers(8, 3, 32), numbers(8, 3, 32), torch.rand(8, 3, 1) + 0.5
    delta, divided = calls.delta(grad, out, total)
    close(delta, (grad.double() * out.double()).sum(-1, keepdim=True) / total)
    close(divided, grad.double() / total)


@needs_kernels
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logits_in_slices(numbers, temperature):
    """Running maximum, sum and entropy sum over slices, and the gradient of log-probability and entropy."""
    logits, targets = numbers(6, 75, scale=3), torch.tensor([0, 74, 30, 31, 40, 50])
    exact = logits.double().requires_grad_()
    log_p = (exact / temperature).log_softmax(-1)
    entropies = -(log_p.exp() * log_p).sum(-1)
    top, total, weighted = torch.full((6,), float("-inf")), torch.zeros(6), torch.zeros(6)
    for columns in (slice(0, 32), slice(32, 75)):
        calls.take_logits(logits[:, columns].contiguous(), top, total, weighted, temperature)
    torch.testing.assert_close(top + total.log(), (exact / temperature).logsumexp(-1).float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(total.log() - weighted / total, entropies.float(), rtol=1e-4, atol=1e-5)
    grad, grad_entropy = torch.randn(6), torch.randn(6)
    (log_p[torch.arange(6), targets] * grad + entropies * grad_entropy).sum().backward()
    for columns in (slice(0, 32), slice(32, 75)):
        part = logits[:, columns].contiguous()
        of_entropy = (grad_entropy / temperature, entropies.detach().float())
        calls.logit_gradients(
            part, (top + total.log()), grad / temperature, of_entropy, targets - columns.start, temperature
        )  # fmt: skip
        close(part, exact.grad[:, columns], 2)


@needs_kernels
@pytest.mark.parametrize("logit", [20.0, 19.7])
@pytest.mark.parametrize("temperature", [0.7, 0.01, 1e-4, 1e-6])
def test_a_certain_token_has_a_gradient_of_0(numbers, temperature, logit):
    """Its logit over the temperature is rounded as it was for the normaliser."""
    logits, targets = torch.zeros_like(numbers(2, 40)), torch.tensor([7, 7])
    logits[:, 7] = logit
    top, total = torch.full((2,), float("-inf")), torch.zeros(2)
    calls.take_logits(logits, top, total, None, temperature)
    calls.logit_gradients(logits, top + total.log(), torch.full((2,), 1 / temperature), None, targets, temperature)
    assert logits[:, 7].tolist() == [0.0, 0.0]


@needs_kernels
@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (8, 3), (37, 32)])
def test_an_adapter_is_added_and_dithered_as_the_operations_do(monkeypatch, rows, rank):
    weight, a, b = random(BF16, rows, 48), torch.randn(rank, 48) * 0.1, torch.randn(rows, rank) * 0.1
    merged = added_up(weight, [(a, b, 0.5)])
    into = torch.zeros(2 * rows, 48, dtype=BF16)
    assert torch.equal(added_up(weight, [(a, b, 0.5)], into[rows:]), merged)
    assert torch.equal(into[rows:], merged)
    assert not into[:rows].any()
    exact = weight.double() + 0.5 * b.double() @ a.double()
    assert ((merged.double() - exact).abs() < 2.0**-7 * exact.abs().clamp_min(1e-6)).all(), "one of the two neighbours"
    monkeypatch.setattr(calls, "_allowed", False)
    plain = added_up(weight, [(a, b, 0.5)])
    assert (plain == merged).float().mean() > 0.995, "the same thresholds: only sums that end within a rounding of one may differ"


@needs_kernels
@pytest.mark.parametrize("which", range(2))
def test_factors_of_another_device_are_an_error_and_do_not_end_the_process(which):
    factors = [torch.randn(3, 48), torch.randn(8, 3)]
    factors[which] = factors[which].to("meta")
    with pytest.raises(AssertionError, match=r"a kernel of the CPU was given .*'meta'"):
        added_up(random(BF16, 8, 48), [(*factors, 0.5)])


def test_an_adapter_is_added_to_fp32_as_it_is():
    weight, a, b = torch.randn(5, 48), torch.randn(3, 48), torch.randn(5, 3)
    torch.testing.assert_close(added_up(weight, [(a, b, 0.5)]), weight + 0.5 * b @ a)


@needs_kernels
@pytest.mark.parametrize("shape", [(5, 48), (70, 37), (100,), (3, 20, 50), (0, 16)])
def test_masters_are_dithered_as_the_operations_do(monkeypatch, shape):
    exact, rounded, plain = torch.randn(shape), torch.zeros(shape, dtype=BF16), torch.zeros(shape, dtype=BF16)
    given = exact.clone()
    round_dithered_(rounded, exact)
    monkeypatch.setattr(calls, "_allowed", False)
    monkeypatch.setattr(merging, "_PIECE", 64)
    round_dithered_(plain, exact)
    assert torch.equal(rounded, plain)
    assert torch.equal(exact, given), "masters stay what they are"
    whole = dithered(exact.clone().view(-1, shape[-1]), BF16).view(shape)
    assert torch.equal(rounded, whole), "in pieces the pattern is the whole tensor's"


def test_masters_of_any_layout_are_dithered():
    exact = torch.randn(6, 40)
    expected = dithered(exact.clone(), BF16)
    turned = torch.zeros(40, 6, dtype=BF16).t()
    round_dithered_(turned, exact)
    assert torch.equal(turned, expected)
    round_dithered_(turned, exact.t().contiguous().t())
    assert torch.equal(turned, expected)
    single = torch.zeros((), dtype=BF16)
    round_dithered_(single, torch.tensor(0.2))
    assert torch.equal(single, dithered(torch.tensor([0.2]), BF16)[0])


@needs_kernels
@pytest.mark.parametrize("width", [32, 96])
@pytest.mark.parametrize("window", [None, 1, 20, 60, 1000])
def test_decode_attention_against_every_row_alone(numbers, dtype, window, width):
    heads, kv_heads, own_room, prompt_room = 10, 2, 64, 96  # five query heads a key head: more than a kernel takes at once
    qkv, angle = numbers(7, heads + 2 * kv_heads, width), torch.rand(7, 1, width // 2) * 6
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    lengths, groups, prompts = (
        torch.tensor([0, 5, 31, 32, 33, 62, 63]),
        torch.tensor([0, 0, 1, 1, 2, 2, 2]),
        torch.tensor([1, 50, 96]),
    )
    own = (qkv.new_zeros(9, kv_heads, width, own_room), qkv.new_zeros(9, kv_heads, own_room, width))
    for row, length in enumerate(lengths.tolist()):
        own[0][row, :, :, :length] = numbers(kv_heads, width, length)
        own[1][row, :, :length] = numbers(kv_heads, length, width)
    prompt = numbers(3, kv_heads, width, prompt_room, scale=2), numbers(3, kv_heads, prompt_room, width)
    found = calls.decode_attention(qkv, cos, sin, own, prompt, lengths, groups, prompts, heads, 0.3, window)
    turned = qkv.new_empty(7, heads + kv_heads, width)
    calls.rotate(qkv[:, : heads + kv_heads].contiguous(), cos, sin, turned, heads + kv_heads)
    for row, (length, group) in enumerate(zip(lengths.tolist(), groups.tolist(), strict=True)):
        assert torch.equal(own[0][row, :, :, length], turned[row, heads:])  # its key and value were appended
        assert torch.equal(own[1][row, :, length], qkv[row, heads + kv_heads :])
        seen = int(prompts[group])
        keys = torch.cat([prompt[0][group, :, :, :seen], own[0][row, :, :, : length + 1]], -1).double()
        values = torch.cat([prompt[1][group, :, :seen], own[1][row, :, : length + 1]], 1).double()
        past = 0 if window is None else max(0, seen + length + 1 - window)
        keys, values = keys[:, :, past:], values[:, past:]
        weights = (turned[row, :heads].view(kv_heads, -1, width).double() @ keys * 0.3).softmax(-1)
        close(found[row], (weights @ values).view(heads, width))


@needs_kernels
@pytest.mark.parametrize("greedy", [False, True])
def test_draws_are_those_of_the_operations(numbers, greedy, monkeypatch):
    logits, keys, positions = numbers(40, 1000, scale=3), torch.randint(-(2**62), 2**62, (40,)), torch.arange(40)
    draw = Draw(SamplingSettings(max_tokens=4, temperature=0.8, greedy=greedy), 1000, torch.device("cpu"))
    tokens, logprobs = draw(logits, keys, positions)
    monkeypatch.setattr("groupwise.engines.builtin.draw.fits", lambda *_: False)
    by_operations, expected = draw(logits, keys, positions)
    assert torch.equal(tokens, by_operations)
    torch.testing.assert_close(logprobs, expected, rtol=1e-5, atol=1e-6)


@needs_kernels
def test_what_is_not_a_number_stays_so(numbers):
    x = numbers(2, 32)
    x[0, 3] = float("nan")
    ones = torch.ones(32, dtype=x.dtype)
    for out in (calls.norm(x, ones, 1e-5)[0], calls.gated(torch.cat([x, x], 1)), calls.soften(x.clone(), 1, 1, -1)[1]):
        assert out[0].isnan().any()
        assert not out[1].isnan().any()
    total = torch.zeros(2)
    calls.take_logits(x, torch.full((2,), float("-inf")), total, None, 1.0)
    assert total[0].isnan()
    assert total[1].isfinite()


@needs_kernels
def test_numbers_do_not_depend_on_threads(numbers, dtype):
    x, weight, grad = numbers(500, 64), numbers(64), numbers(500, 64)
    qkv, angle, groups = numbers(9, 4, 32), torch.rand(9, 1, 16) * 6, torch.arange(9) // 3
    own, prompt = [numbers(9, 1, 32, 32) for _ in range(2)], (numbers(3, 1, 32, 64), numbers(3, 1, 64, 32))
    cos, sin, lengths, prompts = angle.cos().to(dtype), angle.sin().to(dtype), torch.arange(9), torch.tensor([64, 9, 40])
    attention = (qkv, cos, sin, own, prompt, lengths, groups, prompts, 2)
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            out, scales = calls.norm(x, weight, 1e-5)
            found.append((out, *calls.norm_backward(grad, x, scales, weight, None), calls.decode_attention(*attention)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


# Products on matrix units, and with packed weights.

needs_units = pytest.mark.skipif(not calls.multiplies(torch.empty(0, dtype=BF16)), reason="this processor has no matrix units")
SIZES = [
    (1, 1, 1), (5, 7, 3), (33, 65, 31), (1, 96, 64), (100, 64, 1500), (31, 900, 70), (700, 300, 1200), (300, 2100, 2600),
    (1100, 1060, 1900),
]  # fmt: skip


def either_way(rows, columns, turned):
    return random(BF16, columns, rows).t() if turned else random(BF16, rows, columns)


@needs_units
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)])
def test_products_are_sums_in_fp32_rounded_once(size, turned):
    rows, columns, depth = size
    a, b, bias = either_way(rows, depth, turned[0]), either_way(depth, columns, turned[1]), random(BF16, columns)
    exact = a.double() @ b.double()
    close(calls.multiply(a, b), exact)
    close(calls.multiply(a, b, bias), exact + bias.double())
    out = torch.full((rows + 1, columns), 7.0, dtype=BF16)
    calls.multiply(a, b, bias, out[:rows])
    assert torch.equal(out[:rows], calls.multiply(a, b, bias))
    assert bool((out[rows] == 7).all())


@needs_units
def test_products_of_parts_of_larger_matrices():
    a, b = random(BF16, 90, 200), random(BF16, 200, 150)
    assert torch.equal(
        calls.multiply(a[3:70, 40:100], b[40:100, 9:90]), calls.multiply(a[3:70, 40:100].clone(), b[40:100, 9:90].clone())
    )
    every_second = calls.multiply(a[:, ::2], b[::2])
    assert torch.equal(every_second, calls.multiply(a[:, ::2].contiguous(), b[::2].contiguous()))
    assert calls.multiply(a[:0], b).shape == (0, 150)
    assert torch.equal(calls.multiply(a[:, :0], b[:0]), torch.zeros(90, 150, dtype=BF16))
    assert torch.equal(calls.multiply(a[:, :0], b[:0], b[0]), b[0].expand(90, 150))


@needs_units
@pytest.mark.parametrize("depth", [576, 1536, 2600])
def test_a_row_of_a_product_is_the_same_whatever_is_beside_it(depth):
    x, weight, bias = random(BF16, 130, depth), random(BF16, 500, depth), random(BF16, 500)
    whole = calls.multiply(x, weight.t(), bias)
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 64, 129):
        assert torch.equal(calls.multiply(x[:rows], weight.t(), bias), whole[:rows])
    assert torch.equal(calls.multiply(x, weight[100:133].t(), bias[100:133]), whole[:, 100:133])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert torch.equal(calls.multiply(x, weight.t(), bias), whole)
    finally:
        torch.set_num_threads(threads)


@needs_kernels
@pytest.mark.parametrize(("columns", "depth"), [(500, 576), (33, 70), (2100, 96), (9000, 64), (70, 33)])
def test_packed_weights_give_the_same_products(numbers, dtype, columns, depth):
    """Whatever rows are beside one, and on however many threads."""
    x, weight, bias = numbers(600, depth), numbers(columns, depth), numbers(columns)
    if not calls.packs(weight):
        pytest.skip("this processor does not multiply such numbers")
    packed, exact = calls.pack(weight), x.double() @ weight.double().t()
    threads = torch.get_num_threads()
    for added in (None, bias):
        whole = calls.multiply_packed(x, packed, columns, added)
        close(whole, exact if added is None else exact + added.double())
        for rows in (1, 2, 5, 8, 13, 16, 17, 32, 33, 130, 257):
            assert torch.equal(calls.multiply_packed(x[:rows], packed, columns, added), whole[:rows])
        if calls.multiplies(weight):
            assert torch.equal(calls.multiply(x, weight.t(), added), whole)
        try:
            torch.set_num_threads(3 - min(threads, 2))
            assert torch.equal(calls.multiply_packed(x, packed, columns, added), whole)
        finally:
            torch.set_num_threads(threads)
    assert calls.multiply_packed(x[:0], packed, columns).shape == (0, columns)


def rounded_to_8_bits(weight):
    """By what ``pack_8bit`` promises; in fp32 up to the whole numbers, since ties are many in bf16."""
    largest = weight.float().abs().amax(1, keepdim=True)
    inverse = torch.full_like(largest, 127) / largest  # 127 / largest would be 127 times a reciprocal
    return (weight.float() * inverse.nan_to_num(posinf=0)).round().double() * (largest / 127).double()


def check_products_in_8_bits(dtype, columns, depth):
    """Whatever rows are beside one, and on however many threads. Inputs are cut at 1 / 65,024 of a row's largest number."""
    x, weight, bias = random(dtype, 300, depth), random(dtype, columns, depth), random(dtype, columns)
    if not calls.packs(weight):
        pytest.skip("this processor does not multiply such numbers")
    x[7] *= 1000  # each row has a scale of its own
    weight[5] *= 100
    packed, scales = calls.pack_8bit(weight)
    assert packed.numel() <= (columns + 31) * (depth + 63)
    assert packed.element_size() == 1
    torch.testing.assert_close(scales[:columns], weight.float().abs().amax(1) / 127)
    rounded, threads = rounded_to_8_bits(weight).t(), torch.get_num_threads()
    exact, cut = x.double() @ rounded, x.double().abs().amax(1, keepdim=True) / 65_024 * rounded.abs().sum(0)
    for added in (None, bias):
        whole = calls.multiply_packed(x, packed, columns, added, scales)
        expected = exact if added is None else exact + added.double()
        assert ((whole.double() - expected).abs() <= 1.01 * (cut + ROUNDING[dtype] * expected.abs()) + 1e-6).all()
        error, size = ((y - expected if y is whole else y)[8:, 6:].norm() for y in (whole, expected))
        assert error < (3e-3 if dtype == BF16 else 1e-4) * size  # of those that are as large as each other
        for rows in (1, 2, 3, 5, 8, 13, 16, 17, 32, 33, 130, 257):
            assert torch.equal(calls.multiply_packed(x[:rows], packed, columns, added, scales), whole[:rows])
        try:
            torch.set_num_threads(3 - min(threads, 2))
            assert torch.equal(calls.multiply_packed(x, packed, columns, added, scales), whole)
        finally:
            torch.set_num_threads(threads)
    assert calls.multiply_packed(x[:0], packed, columns, None, scales).shape == (0, columns)


@needs_kernels
@pytest.mark.parametrize(("columns", "depth"), [(500, 576), (33, 70), (2100, 96), (9000, 64), (70, 33), (40, 9000)])
def test_products_in_8_bits_are_those_of_the_rounded_weights(dtype, columns, depth):
    check_products_in_8_bits(dtype, columns, depth)


@needs_kernels
@pytest.mark.parametrize(
    ("machine", "needs"),
    [
        ("-march=x86-64-v2", "sse4_2"),
        ("-march=x86-64-v3", "avx2"),
        ("-march=x86-64-v4", "avx512bw"),
        ("-march=x86-64-v3 -mavxvnni", "avx_vnni"),
    ],
)
def test_products_in_8_bits_on_processors_that_have_less(machine, needs, monkeypatch, tmp_path):
    """Without instructions for bytes, and with those of registers half as wide; without any for whole numbers of 16 bits."""
    if f" {needs} " not in Path("/proc/cpuinfo").read_text(encoding="utf-8"):
        pytest.skip(f"this processor has no {needs}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(build, "FLAGS", (*machine.split(), *(flag for flag in build.FLAGS if not flag.startswith("-march"))))
    monkeypatch.setattr(calls, "_functions", {})
    monkeypatch.setattr(calls, "kernels", build.kernels.__wrapped__)
    for columns, depth in ((500, 576), (33, 70), (40, 2000)):
        check_products_in_8_bits(FP32, columns, depth)
    check_the_largest_sums(FP32)


def check_the_largest_sums(dtype):
    """Sums of bytes, or of pairs of whole numbers, may not run over where all of them are as large as they can be."""
    weight, x = torch.ones(40, 10_000, dtype=dtype), torch.ones(20, 10_000, dtype=dtype)
    if not calls.packs(weight):
        pytest.skip("this processor does not multiply such numbers")
    x[1::2] *= -1
    packed, scales = calls.pack_8bit(weight)
    close(calls.multiply_packed(x, packed, 40, None, scales), x.double() @ weight.double().t())


@needs_kernels
def test_the_largest_sums_in_8_bits(dtype):
    check_the_largest_sums(dtype)


@needs_kernels
def test_weights_in_8_bits_read_back_one_by_one(numbers, dtype):
    """Rows of zeros but for a one read the weight's columns: each number is within half a step of what it was."""
    weight = numbers(70, 130)
    if not calls.packs(weight):
        pytest.skip("this processor does not multiply such numbers")
    weight[3] = 0
    packed, scales = calls.pack_8bit(weight)
    found = calls.multiply_packed(torch.eye(130, dtype=dtype), packed, 70, None, scales).t()
    assert ((found - weight).float().abs() <= (0.5 + 127 * ROUNDING[dtype]) * scales[:70, None]).all()
    close(found, rounded_to_8_bits(weight))
    largest = weight.float().abs().amax(1)
    torch.testing.assert_close(found.float().abs().amax(1), largest, rtol=ROUNDING[dtype] + 1e-5, atol=0)
    assert found[3].count_nonzero() == 0


@needs_kernels
def test_what_is_no_number_stays_so_in_8_bits(numbers, dtype):
    """Where it is a weight, in its column; where it is an input, in its row."""
    weight, x = numbers(40, 70), numbers(20, 70)
    if not calls.packs(weight):
        pytest.skip("this processor does not multiply such numbers")
    weight[4, 9] = x[3, 60] = float("nan")
    packed, scales = calls.pack_8bit(weight)
    missing = calls.multiply_packed(x, packed, 40, None, scales).isnan()
    assert missing[:, 4].all()
    assert missing[3].all()
    assert missing.sum() == 20 + 40 - 1


@needs_kernels
def test_inputs_of_zeros_give_zeros_in_8_bits(numbers, dtype):
    weight = numbers(40, 70)
    if not calls.packs(weight):
        pytest.skip("this processor does not multiply such numbers")
    packed, scales = calls.pack_8bit(weight)
    assert calls.multiply_packed(torch.zeros(3, 70, dtype=dtype), packed, 40, None, scales).count_nonzero() == 0


@pytest.mark.parametrize("units", [pytest.param(True, marks=needs_units), False])
def test_a_product_with_and_without_matrix_units(units, monkeypatch):
    monkeypatch.setattr(calls, "_products_allowed", units)
    a, b, bias, out = random(BF16, 40, 64), random(BF16, 64, 96), random(BF16, 96), torch.empty(40, 96, dtype=BF16)
    assert calls.multiplies(a) == units
    for added in (None, bias):
        exact = a.double() @ b.double() + (0 if added is None else added.double())
        close(product(a, b, added), exact)
        assert product(a, b, added, out) is out
        close(out, exact)
    with pytest.raises(AssertionError):  # it would be no part of the graph
        product(a.requires_grad_(), b)


@needs_units
def test_packed_products_are_the_units_where_there_are_some():
    assert calls.packs(torch.empty(0, dtype=BF16))
    calls.allow_products(False)
    assert not calls.packs(torch.empty(0, dtype=BF16))
    assert calls.packs(torch.empty(0))


@needs_kernels
@pytest.mark.parametrize("permitted", [True, False])
def test_a_system_that_refuses_matrix_units_has_no_products_by_them(permitted, monkeypatch):
    class Library:
        def __getattr__(self, name):
            return lambda *_: int(permitted)

    monkeypatch.setattr(calls, "_functions", {})
    monkeypatch.setattr(calls, "kernels", lambda fp32: build.Kernels(Library(), "a compiler"))
    assert calls.fits(torch.empty(0, dtype=BF16))
    assert calls.multiplies(torch.empty(0, dtype=BF16)) == permitted
    assert calls.packs(torch.empty(0, dtype=BF16)) == permitted


@needs_kernels
def test_weights_of_another_dtype_are_an_error():
    """A kernel would read them as what they are not."""
    packed = calls.pack(random(FP32, 64, 32))
    with pytest.raises(AssertionError, match=r"inputs in torch\.bfloat16 take those in torch\.bfloat16"):
        calls.multiply_packed(random(BF16, 4, 32), packed, 64)
    with pytest.raises(AssertionError, match=r"inputs in torch.float32 take those in torch.int8"):
        calls.multiply_packed(random(FP32, 4, 32), packed, 64, None, torch.ones(64))


def test_matrix_units_are_for_bf16_alone():
    assert not calls.multiplies(torch.empty(0))
    assert not calls.multiplies(torch.empty(0, dtype=torch.float16))


class Numbers:
    """All that the engine asks of a tokenizer."""

    def decode(self, tokens, **_):
        return " ".join(map(str, tokens))


def _prompts(lengths):
    problems = [Problem(id=str(i), question="", answer="0") for i in range(len(lengths))]
    return [
        Prompt(problem=p, text="", token_ids=tuple(range(3, 3 + n))) for p, n in zip(problems, lengths, strict=True)
    ]  # fmt: skip


@needs_kernels
@pytest.mark.parametrize(
    ("family", "kv_heads"), [("tiny_llama", 2), ("tiny_llama", 4), ("tiny_qwen2", 2), ("tiny_qwen3", 2), ("tiny_gemma3", 1)]
)
def test_a_model_samples_and_learns_as_without_them(family, kv_heads, dtype, request, monkeypatch):
    """Sampling log-probabilities equal the learner's, and gradients the fp64 model's, no worse than by operations."""
    build_model = request.getfixturevalue(family)
    sizes = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32, "num_key_value_heads": kv_heads}
    exact = Decoder(build_model(**sizes).double())
    errors = {}
    for name in ("kernels", "operations"):
        if name == "operations":
            monkeypatch.setattr(build, "kernels", lambda *_: build.Kernels(None, "ruled out"))
            monkeypatch.setattr(calls, "_functions", {})
            monkeypatch.setattr(calls, "kernels", build.kernels)
        decoder = Decoder(build_model(**sizes).to(dtype))
        engine = BuiltinEngine(decoder, Numbers(), (2,))
        groups = engine.sample(_prompts([5, 40]), 32, SamplingSettings(max_tokens=40), seed=1, scope="s")  # of 6 by chance 1.4
        prompts = [tuple(range(3, 8)), tuple(range(3, 43))]
        packed = pack([(p, [c.token_ids for c in group]) for p, group in zip(prompts, groups, strict=True)])
        sampled = torch.tensor([x for group in groups for c in group for x in c.logprobs])
        logprobs, expected = decoder.logprobs(packed), exact.logprobs(packed)
        errors[name] = [(sampled - logprobs.detach()).abs().mean(), (logprobs - expected).detach().abs().mean()]
        pairs = [(decoder, logprobs), (exact, expected)]
        found = [torch.autograd.grad(out.sum(), [p for _, p in model.named_parameters()]) for model, out in pairs]
        errors[name].append(sum((a - b).norm() / b.norm() for a, b in zip(*found, strict=True)) / len(found[0]))
    for by_kernels, by_operations in zip(errors["kernels"], errors["operations"], strict=True):
        assert by_kernels < 1.3 * by_operations
    share = ROUNDING[dtype] / ROUNDING[BF16]
    assert errors["kernels"][0] < 0.05 * share
    assert errors["kernels"][2] < 0.1 * share


@needs_kernels
@pytest.mark.parametrize("in_8_bits", [False, True])
@pytest.mark.parametrize(("family", "kv_heads"), [("tiny_llama", 2), ("tiny_qwen2", 1), ("tiny_qwen3", 4), ("tiny_gemma3", 1)])
def test_layers_in_one_call_give_the_numbers_of_many(family, kv_heads, in_8_bits, dtype, request, monkeypatch):
    """Rows end and leave, and the tables of keys and values grow."""
    if not calls.packs(torch.empty(0, dtype=dtype)):
        pytest.skip("this processor does not multiply such numbers")
    monkeypatch.setitem(decode.ALLOWED, "rearranged", True)
    sizes = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32, "num_key_value_heads": kv_heads}
    decoder = Decoder(request.getfixturevalue(family)(**sizes).to(dtype))
    calls_seen: list[int] = []
    in_one = calls.decode_layers
    monkeypatch.setattr(calls, "decode_layers", lambda *args, **rest: (calls_seen.append(len(args[2])), in_one(*args, **rest))[1])
    found = []
    for one_call in (True, False):
        if not one_call:
            monkeypatch.setattr(calls, "table", lambda rows: None)
        groups = BuiltinEngine(decoder, Numbers(), (2,)).sample(
            _prompts([5, 40]), 9, SamplingSettings(max_tokens=100, in_8_bits=in_8_bits), seed=1, scope="s"
        )
        found.append([(c.token_ids, c.logprobs) for group in groups for c in group])
        assert len({len(tokens) for tokens, _ in found[-1]}) > (2 if in_8_bits else 3)
    assert found[0] == found[1]
    assert len(calls_seen) == max(len(tokens) for tokens, _ in found[0]) - 1
    assert set(calls_seen) > {18}


@needs_kernels
def test_a_norm_whose_weight_is_of_another_dtype_is_not_computed():
    with pytest.raises(AssertionError, match=r"for torch\.bfloat16 was given weights of torch\.float32"):
        calls.add_norm(random(BF16, 2, 64), None, random(FP32, 64), 1e-6)


@needs_kernels
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_gemma3"])
def test_what_rows_are_given_between_turns_is_kept_by_kernels_as_by_operations(family, request, monkeypatch):
    """Sampling log-probabilities of whole rows, in bf16, against the fp32 model's; half of the answers come late."""
    build_model = request.getfixturevalue(family)
    sizes = {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32}
    exact, prompts = Decoder(build_model(**sizes)), _prompts([5, 40])
    errors = {}
    for name in ("kernels", "operations"):
        if name == "operations":
            monkeypatch.setattr(build, "kernels", lambda *_: build.Kernels(None, "ruled out"))
            monkeypatch.setattr(calls, "_functions", {})
            monkeypatch.setattr(calls, "kernels", build.kernels)
        said: dict[tuple[int, int], list[Any]] = {}
        late: list[Any] = []

        def answer(place, turn, said=said, late=late):
            turns = said.setdefault((place, turn.sample), [])
            turns.append(turn)
            room = 60 - sum(len(x if isinstance(x, list) else x.token_ids) for x in turns)
            more = turn.stopped and len(turns) < 5 and 3 + turn.sample < room
            given = [50 + len(turns) + place] * (3 + turn.sample) if more else None
            found: Future[Any] = Future()
            if given and turn.sample % 2:
                turns.append(given)
                late.append(lambda: found.set_result(given))
            else:
                turns += [given] if given else []
                found.set_result(given)
            return found

        def look(ended, tokens, late=late):
            while late:
                late.pop()()

        engine = BuiltinEngine(Decoder(build_model(**sizes).to(BF16)), Numbers(), tuple(range(2, 12)))
        engine.serve_turns(SampleRequest(prompts, 6, SamplingSettings(max_tokens=60), 1, "s"), Turns(answer, 0.0), look)
        assert sum(len(turns) > 1 for turns in said.values()) > 6, "the test needs rows of several turns"
        rows = [[said[i, s] for s in range(6)] for i in range(2)]
        ids = [[[t for x in row for t in (x if isinstance(x, list) else x.token_ids)] for row in group] for group in rows]
        packed = pack([(p.token_ids, group) for p, group in zip(prompts, ids, strict=True)])
        parts = [x for group in rows for row in group for x in row]
        own = torch.tensor([not isinstance(x, list) for x in parts for _ in (x if isinstance(x, list) else x.token_ids)])
        sampled = torch.tensor([x for part in parts if not isinstance(part, list) for x in part.logprobs])
        errors[name] = float((sampled - exact.logprobs(packed).detach()[own]).abs().mean())
    assert errors["kernels"] < 1.3 * errors["operations"]
    assert errors["kernels"] < 0.05


class TestWithout:
    """No compiler, or one that fails: a reason, and no kernels."""

    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(build.platform, "system", lambda: "Linux")
        monkeypatch.delenv("GROUPWISE_NATIVE_KERNELS", raising=False)

    def reason(self):
        found = build.kernels.__wrapped__()
        assert found.library is None
        return found.description

    def writes_texts(self, monkeypatch):
        """A compiler that writes a text; returns the list of its calls."""
        built = []

        def run(command):
            if "-o" in command:
                built.append(command)
                Path(command[command.index("-o") + 1]).write_bytes(b"a library" * 1000)
            return "cc 1.0"

        monkeypatch.setattr(build, "_compiler", lambda: ["cc"])
        monkeypatch.setattr(build, "_run", run)
        return built

    def test_switched_off(self, monkeypatch):
        monkeypatch.setenv("GROUPWISE_NATIVE_KERNELS", "0")
        assert "GROUPWISE_NATIVE_KERNELS=0" in self.reason()

    def test_no_compiler(self, monkeypatch, tmp_path):
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert "no C compiler" in self.reason()

    def test_a_compiler_that_fails(self, monkeypatch, tmp_path):
        script = tmp_path / "cc"
        script.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "cc 1.0" && exit 0\necho "no such option" >&2\nexit 1\n')
        script.chmod(0o755)
        monkeypatch.setenv("CC", str(script))
        assert "no such option" in self.reason()

    @needs_kernels
    def test_compiled_once_and_kept(self, tmp_path):
        first = build.kernels.__wrapped__()
        assert first.library is not None
        (kept,) = (tmp_path / "cache" / "groupwise" / "kernels").iterdir()
        before = kept.stat().st_mtime_ns
        assert build.kernels.__wrapped__().library is not None
        assert kept.stat().st_mtime_ns == before
        assert (kept.stat().st_mode & 0o777, kept.parent.stat().st_mode & 0o777) == (0o700, 0o700)

    @pytest.mark.parametrize("harm", ["nothing", "half", "empty", "one byte", "planted", "writable", "link"])
    def test_what_is_not_sound_in_the_cache_is_built_anew(self, tmp_path, monkeypatch, harm):
        """With a compiler that writes a text, and a loader that reads it: half a library, loaded, would end this process."""
        built, loaded = self.writes_texts(monkeypatch), []
        monkeypatch.setattr(build.ctypes, "CDLL", lambda name: loaded.append(Path(name).read_bytes()))
        build.kernels.__wrapped__()
        (kept,) = (tmp_path / "cache").rglob("kernels-*.so")
        whole = kept.read_bytes()
        kept.write_bytes(
            {
                "half": whole[: len(whole) // 2], "empty": b"", "one byte": whole[:5000] + b"x" + whole[5001:], "planted": b"theirs" * 1000,
            }.get(harm, whole)
        )  # fmt: skip
        if harm == "writable":
            kept.chmod(0o722)
        if harm == "link":
            kept.rename(tmp_path / "elsewhere.so")
            kept.symlink_to(tmp_path / "elsewhere.so")
        assert build.kernels.__wrapped__().description == "cc 1.0"
        assert loaded == [whole, whole]
        assert len(built) == (1 if harm == "nothing" else 2)
        assert kept.lstat().st_mode == stat.S_IFREG | 0o700

    def test_a_folder_that_others_can_write_is_not_used(self, tmp_path):
        folder = tmp_path / "cache" / "groupwise" / "kernels"
        folder.mkdir(parents=True)
        folder.chmod(0o777)
        assert build._cache_folder() != folder
        folder.chmod(0o755)
        assert build._cache_folder() == folder

    def test_without_a_home_they_are_built_for_this_process(self, monkeypatch):
        def nobody():
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(build.Path, "home", staticmethod(nobody))
        assert build._cache_folder() == Path(build._temporary_folder().name)

    def test_a_cache_from_which_nothing_may_be_executed(self, tmp_path, monkeypatch):
        """The loader refuses it; the folder for temporary files may lie on another disk."""

        def load(name):
            if Path(os.readlink(name)).is_relative_to(tmp_path / "cache"):
                raise OSError(f"{name}: failed to map segment from shared object")
            return "a library"

        self.writes_texts(monkeypatch)
        monkeypatch.setattr(build.ctypes, "CDLL", load)
        folder = SimpleNamespace(name=str(tmp_path))
        monkeypatch.setattr(build, "_temporary_folder", lambda: folder)
        assert build.kernels.__wrapped__().library == "a library"
        folder.name = str(tmp_path / "cache")
        found = build.kernels.__wrapped__()
        assert (found.library, found.failed) == (None, True)
        assert found.description.startswith("could not be loaded: ")
        assert "failed to map segment" in found.description

    @pytest.mark.parametrize("by_compiler", [False, True])
    def test_a_full_cache(self, tmp_path, monkeypatch, by_compiler):
        """A home or a quota is full; the folder for temporary files may have room."""
        self.writes_texts(monkeypatch)
        builds = build._build

        def full(command, path):
            if path.is_relative_to(tmp_path / "cache"):
                said = "No space left on device"
                raise subprocess.CalledProcessError(1, command, stderr=said) if by_compiler else OSError(28, said)
            builds(command, path)

        monkeypatch.setattr(build, "_build", full)
        monkeypatch.setattr(build.ctypes, "CDLL", lambda name: "a library")
        monkeypatch.setattr(build, "_temporary_folder", lambda: SimpleNamespace(name=str(tmp_path)))
        assert build.kernels.__wrapped__().library == "a library"

    def test_a_file_of_somebody_else_is_not_loaded(self, tmp_path, monkeypatch):
        path = tmp_path / "kernels.so"
        content = b"anything"
        path.write_bytes(content + hashlib.sha256(content).digest())
        path.chmod(0o700)
        with path.open("rb") as file:
            assert build._is_sound(file.fileno())
            monkeypatch.setattr(build.os, "getuid", lambda: os.stat(path).st_uid + 1)
            assert not build._is_sound(file.fileno())


@needs_kernels
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_slice_that_is_ruled_out_whole_adds_nothing(numbers, temperature):
    x, out = numbers(2, 40), numbers(2, 40).fill_(float("-inf"))
    sums = []
    for slices in ((x,), (out, x), (x, out)):
        top, total = torch.full((2,), float("-inf")), torch.zeros(2)
        for part in slices:
            calls.take_logits(part, top, total, None, temperature)
        sums.append(top + total.log())
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])
