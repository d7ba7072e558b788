"""Attention by flash kernels for many lengths: the real operators, over kernels written out here where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from groupwise.models import packing, varlen_attention
from groupwise.models.attention import attend_by_library, plan_rectangles
from groupwise.models.decoder import Decoder
from groupwise.models.varlen_attention import attend_by_flash, fits, plan_runs
from tests.gpu.counting import Dispatched
from tests.models.slow_flash import flash_on_cpus

HEADS, KV_HEADS, WIDTH = 4, 2, 8
GROUPS = [
    (list(range(3, 12)), [list(range(3, 3 + n)) for n in (4, 9, 1, 17)]),
    ([5], [[6, 7], [8]]),
    ([5, 6, 7], []),
    ([9], [[4]]),
]


@pytest.fixture
def kernels():
    with flash_on_cpus():
        yield


def numbers(groups=GROUPS, dtype=torch.float32):
    packed = packing.pack(groups)
    generator, rows = torch.Generator().manual_seed(0), len(packed.token_ids_R)
    qkv = torch.randn(rows, HEADS + 2 * KV_HEADS, WIDTH, generator=generator).to(dtype).requires_grad_()
    angle = torch.rand(rows, 1, WIDTH // 2, generator=generator)
    return packed, qkv, angle.cos().to(dtype), angle.sin().to(dtype)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize(
    "groups", [GROUPS, GROUPS[2:3], GROUPS[3:], [*GROUPS[:1], *GROUPS[:1]]], ids=["all", "prompts", "one token", "two"]
)
def test_output_and_gradients_are_those_of_rectangles(kernels, groups, scale):
    packed, qkv, cos, sin = numbers(groups)
    arguments = (HEADS, KV_HEADS, scale)
    by_flash, rotated = attend_by_flash(qkv, cos, sin, plan_runs(packed.spans, qkv.device), *arguments)
    expected, also = attend_by_library(qkv, cos, sin, plan_rectangles(packed.spans), *arguments)
    torch.testing.assert_close(by_flash, expected)
    assert torch.equal(rotated, also)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    found, wanted = (torch.autograd.grad((x * weights).sum(), qkv)[0] for x in (by_flash, expected))
    torch.testing.assert_close(found, wanted)


def test_in_bf16_it_is_as_near_to_fp32_as_rectangles_are(kernels):
    packed, exact, cos, sin = numbers()
    runs, rectangles = plan_runs(packed.spans, exact.device), plan_rectangles(packed.spans)
    truth, _ = attend_by_library(exact, cos, sin, rectangles, HEADS, KV_HEADS)
    _, qkv, cos, sin = numbers(dtype=torch.bfloat16)
    one, other = (
        way(qkv, cos, sin, plan, HEADS, KV_HEADS)[0] for way, plan in ((attend_by_flash, runs), (attend_by_library, rectangles))
    )
    near, far = (float((x.float() - truth).detach().norm() / truth.detach().norm()) for x in (one, other))
    assert 0 < near < 1.5 * far < 2e-2


@pytest.mark.parametrize(("family", "config"), [
    ("llama", {}),
    ("qwen3", {}),
    ("mistral", {"sliding_window": 6}),
    ("gemma3", {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6}),
])  # fmt: skip
@pytest.mark.parametrize("recompute", [False, True])
def test_a_whole_pass_gives_the_same(kernels, request, family, config, recompute, monkeypatch):
    """Also where some layers have a window, which keep to rectangles."""
    called = []
    real = varlen_attention._forward
    monkeypatch.setattr(varlen_attention, "_forward", lambda *given: called.append(None) or real(*given))
    found = []
    for attention in ("sdpa", "varlen"):
        decoder = Decoder(
            request.getfixturevalue(f"tiny_{family}")(**config), attention=attention, gradient_checkpointing=recompute
        )
        logprobs = decoder.logprobs(decoder.prepare(GROUPS[:2]))
        logprobs.sum().backward()
        found.append([logprobs.detach(), *(p.grad for _, p in decoder.named_parameters())])
        assert bool(called) is (attention == "varlen" and family != "mistral")
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-5)


def test_what_is_kept_grows_with_the_length(kernels):
    kept = []

    def keep(tensor):
        kept[-1][tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    for length in (33, 65):
        kept.append({})
        packed, qkv, cos, sin = numbers([([5], [list(range(3, 3 + length))])])
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            attend_by_flash(qkv, cos, sin, plan_runs(packed.spans, qkv.device), HEADS, KV_HEADS)
    short, long = (sum(sizes.values()) for sizes in kept)
    assert short < long < 2.05 * short


def test_the_device_is_asked_nothing(kernels):
    packed, qkv, cos, sin = numbers()
    plan = plan_runs(packed.spans, qkv.device)
    with Dispatched() as seen:
        attend_by_flash(qkv, cos, sin, plan, HEADS, KV_HEADS)[0].sum().backward()
    assert not seen.waits
    assert seen.launches["_flash_attention_forward"] == seen.launches["_flash_attention_backward"] == 2


def test_rows_of_another_layout_are_refused(kernels, monkeypatch):
    """So that the self-check leaves it out where a version of PyTorch gives log-sum-exps otherwise."""
    real = torch.ops.aten._flash_attention_forward
    monkeypatch.setattr(
        torch.ops.aten, "_flash_attention_forward", lambda *a, **k: (lambda o: (o[0], o[1].t(), *o[2:]))(real(*a, **k))
    )
    packed, qkv, cos, sin = numbers()
    with pytest.raises(RuntimeError, match="log-sum-exps of shape"):
        attend_by_flash(qkv, cos, sin, plan_runs(packed.spans, qkv.device), HEADS, KV_HEADS)


@pytest.mark.parametrize(
    ("device", "dtype", "width", "there"),
    [
        ("cuda", torch.bfloat16, 64, True), ("cuda", torch.float16, 128, True), ("cuda", torch.float32, 64, False),
        ("cuda", torch.bfloat16, 20, False), ("cuda", torch.bfloat16, 512, False), ("cpu", torch.bfloat16, 64, False),
    ],
)  # fmt: skip
def test_where_there_are_such_kernels(device, dtype, width, there):
    assert fits(torch.device(device), dtype, width) is there
