"""The GPU's kernels for decoding: on a card by `make test-gpu`, and by Triton's interpreter on a CPU.

Triton comes with PyTorch for CUDA. Elsewhere: `pip install triton==3.9.0` (3.6 does not interpret with numpy 2.4) in an environment of its
own, and there `TRITON_INTERPRET=1 python -m pytest tests/engines/test_gpu_kernels.py`.
"""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma3TextConfig, Qwen2Config, Qwen3Config

from groupwise.engines.base import SamplingSettings
from groupwise.engines.builtin import decode, fast_paths
from groupwise.engines.builtin.cache import Cache
from groupwise.engines.builtin.chunked_prefill import MissingTokens, PrefillChunk
from groupwise.engines.builtin.decode import DecodeStep
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.types import Problem, Prompt
from tests.conftest import TINY

pytest.importorskip("triton", reason="Triton is not installed: it comes with PyTorch for CUDA")

from groupwise.engines.builtin import gpu_kernels
from groupwise.models import triton_kernels

CPU = torch.device("cpu")
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1")
on_a_card = pytest.param("cuda", marks=pytest.mark.gpu)
PROMPTS, OWN = [70, 5, 33], [0, 1, 31, 32, 33, 64, 90, 5, 17]
GROUPS = [0, 2, 2, 0, 0, 1, 2, 2, 2]


@pytest.fixture
def by_kernels(monkeypatch):
    """``by_kernels(yes)``: whether decode steps on the CPU go through the interpreter."""

    def switch(yes: bool) -> None:
        monkeypatch.setattr(decode, "_KERNELS_ON", frozenset({"cpu"} if yes else ()))

    switch(True)
    yield switch
    decode.ALLOWED["kernels"] = True


def filled(kv_heads, head_width, dtype=torch.float32, device="cpu", rows=9):
    """A cache with random keys and values where something was written, and NaN everywhere else."""
    cache = Cache(
        layers=1, kv_heads=kv_heads, head_width=head_width, groups=3, prompt_tokens=max(PROMPTS), rows=rows,
        completion_tokens=100, dtype=dtype, device=torch.device(device),
    )  # fmt: skip
    cache.reserve(95, 9)
    generator = torch.Generator().manual_seed(0)
    for pair, lengths in ((cache.prompt[0], PROMPTS), (cache.own[0], [n + 1 for n in OWN])):
        for table in pair:
            table.fill_(float("nan"))
            for row, length in enumerate(lengths):
                table[row, :, :length] = torch.randn(kv_heads, length, head_width, generator=generator).to(table)
    return cache


def planned(cache, **padded):
    return DecodeStep.plan(
        cache, group_of_row=GROUPS, prompt_lengths=PROMPTS, own_lengths=OWN, last_tokens=[3] * 9, keys=[1] * 9, turn_starts=[0] * 9,
        **padded,
    )  # fmt: skip


def attended(query, cache, step, window=None):
    lanes = step.lanes
    return gpu_kernels.attend(
        query, cache.own[0], cache.prompt[0], row_of_lane=lanes.row_of_lane,
        lane_of_row=lanes.row_index if lanes.lane_of_row is None else lanes.lane_of_row, group_of_row=step.group_of_row,
        prompt_lengths=step.prompt_lengths, own_lengths=step.own_lengths, positions=step.positions, scale=0.3, window=window,
    )  # fmt: skip


def one_by_one(query, cache, window=None):
    """Every row and head by itself, in fp64."""
    out, unit = torch.empty_like(query, dtype=torch.float64), query.shape[1] // cache.kv_heads
    for row, group in enumerate(GROUPS):
        for head in range(query.shape[1]):
            keys, values = (
                torch.cat([prompt[group, head // unit, : PROMPTS[group]], own[row, head // unit, : OWN[row] + 1]]).double()
                for prompt, own in zip(cache.prompt[0], cache.own[0], strict=True)
            )
            keys, values = keys[-window:] if window else keys, values[-window:] if window else values
            out[row, head] = torch.softmax(0.3 * keys @ query[row, head].double(), 0) @ values
    return out


SHAPES = [
    (2, 2, 64, None), (1, 6, 128, None), (2, 1, 128, 20), (1, 3, 80, 7), (1, 20, 16, 1), (4, 1, 8, None)
]  # fmt: skip


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=interpreted), on_a_card])
@pytest.mark.parametrize(("kv_heads", "unit", "width", "window"), SHAPES)
def test_attention_over_shared_prompts_and_ragged_rows(kv_heads, unit, width, window, device, monkeypatch):
    """Rows before, at and past the end of a chunk; groups of 1, 3 and 5 rows; places that nobody wrote hold NaN."""
    monkeypatch.setattr(gpu_kernels, "CHUNK", 32)
    cache = filled(kv_heads, width, device=device)
    query = torch.randn(9, kv_heads * unit, width, generator=torch.Generator().manual_seed(1)).to(device)
    out = attended(query, cache, planned(cache), window)
    assert (out.double() - one_by_one(query, cache, window)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param("cpu", torch.float16, marks=interpreted),  # the interpreter's products do not know bf16
        pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_attention_in_half_precision_has_its_scores_in_fp32(device, dtype):
    """Scores of some hundreds would be off by tenths if they were rounded."""
    cache = filled(2, 64, dtype, device)
    query = (20 * torch.randn(9, 8, 64, generator=torch.Generator().manual_seed(1))).to(device, dtype)
    expected = one_by_one(query, cache)
    apart = (attended(query, cache, planned(cache)).double() - expected).norm() / expected.norm()
    assert apart < (1e-3 if dtype == torch.float16 else 8e-3)


@interpreted
def test_rows_groups_and_places_to_spare_change_nothing():
    """As steps are padded once rows have left: the spare ones' outputs are finite, and nobody's."""
    cache = filled(2, 16, rows=16)
    for table in cache.own[0]:
        table[9:] = 0  # as the cache begins
    query = torch.randn(12, 4, 16, generator=torch.Generator().manual_seed(1))
    step = planned(cache, spare_up_to=16)
    assert (len(step.keys), step.lanes.width) == (12, 6) != (9, planned(cache).lanes.width)
    out = attended(query, cache, step)
    assert (out[:9].double() - one_by_one(query[:9], cache)).abs().max() < 1e-5
    assert out.isfinite().all()


CONFIGS = {
    "biases": Qwen2Config(**{**TINY, "tie_word_embeddings": True}),
    "norms of heads": Qwen3Config(**{**TINY, "head_dim": 32}),
    "windows, offsets and GELU": Gemma3TextConfig(**{**TINY, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 24}),
}


@interpreted
@pytest.mark.parametrize("family", CONFIGS)
def test_a_decode_step_is_the_plain_one(family, by_kernels):
    """Logits, and what is kept; with tokens that a row was given beside the step."""
    found = []
    for yes in (False, True):
        by_kernels(yes)
        decoder = fast_paths._small(CONFIGS[family], torch.float32, CPU)
        with torch.no_grad():
            cache, _, weights = fast_paths._step(decoder, 20)
            step = fast_paths._planned(cache, [37, 21], [0, 0, 0, 3, 0, 0, 0, 0])
            (chunk,) = PrefillChunk.plan([MissingTokens(3, 0, 37, 0, [9, 8, 7])], decoder.windows, CPU)
            logits = [decode.decode(decoder, weights, cache, step, beside) for beside in (chunk, None)]
        found.append([*logits, *(table for pair in cache.own for table in pair)])
    for plain, fast in zip(*found, strict=True):
        assert (plain - fast).norm() < 1e-5 * plain.norm()
        assert not torch.equal(plain, fast), "else the kernels were not asked"


@interpreted
def test_an_engine_samples_the_same_tokens(by_kernels, tiny_qwen2, monkeypatch):
    """With rows that end early and leave, and others that take their places, in padded bursts of several steps."""
    from benchmarks.first_light_one import _bursts

    monkeypatch.setattr(gpu_kernels, "CHUNK", 16)
    prompts = [Prompt(Problem(f"p{n}", "", ""), "", tuple(range(3, 3 + n))) for n in (5, 1, 17)]
    tokenizer = SimpleNamespace(decode=lambda ids, **rest: "")
    done = []
    for yes in (False, True):
        by_kernels(yes)
        engine = BuiltinEngine(decode.Decoder(tiny_qwen2()), tokenizer, range(0, 128, 9), max_rows=5)
        with _bursts(4):
            sampled = engine.sample(prompts, 3, SamplingSettings(max_tokens=24), seed=3, scope="s")
        done.append([completion for group in sampled for completion in group])
    assert [c.token_ids for c in done[0]] == [c.token_ids for c in done[1]]
    assert len({len(c.token_ids) for c in done[0]}) > 3
    for plain, fast in zip(*done, strict=True):
        assert list(fast.logprobs) == pytest.approx(list(plain.logprobs), abs=1e-5)


@interpreted
def test_each_function_launches_as_many_kernels_as_are_counted(monkeypatch):
    launched = []

    class Counted:
        def __init__(self, module, name):
            self.name, self.kernel = name, getattr(module, name)

        def __getitem__(self, grid):
            launched.append(self.name)
            return self.kernel[grid]

    for name in ("_add_norm", "_rotate_and_store", "_attend_to_chunks", "_merge"):
        monkeypatch.setattr(gpu_kernels, name, Counted(gpu_kernels, name))
    monkeypatch.setattr(triton_kernels, "_gated", Counted(triton_kernels, "_gated"))
    cache = filled(2, 16)
    step, qkv = planned(cache), torch.randn(9, 8, 16)
    query = gpu_kernels.rotate_and_store(
        qkv, torch.ones(9, 1, 8), torch.zeros(9, 1, 8), cache.own[0], step.own_lengths, 4, None, 1e-5
    )
    attended(query, cache, step)
    gpu_kernels.gated(gpu_kernels.add_norm(torch.ones(9, 8), None, torch.ones(8), 1e-5))
    assert launched == ["_rotate_and_store", "_attend_to_chunks", "_merge", "_add_norm", "_gated"]


PATH = next(path for path in fast_paths.fast_paths() if path.name == "kernels for decoding")


def chosen(monkeypatch):
    monkeypatch.setattr(fast_paths, "_REPEATS", 1)
    decoder = fast_paths._small(CONFIGS["norms of heads"], torch.float32, CPU)
    return fast_paths.choose(replace(PATH, slack=1e6), decoder)[0]


@interpreted
def test_the_kernels_are_compared_before_they_are_taken(by_kernels, monkeypatch):
    choice = chosen(monkeypatch)
    assert choice.taken
    assert choice.notice is None
    assert 0 < choice.operations[0].difference < 1e-5


def test_both_widths_of_the_attention_kernel_are_compared(by_kernels, monkeypatch):
    """By a stand-in for all kernels, which notes what it is compiled for. In fp32 there is one width."""
    widths = set()

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_, M_PROMPT=None, **__: widths.add(M_PROMPT)

    for module, name in ((gpu_kernels, "_add_norm"), (gpu_kernels, "_rotate_and_store"), (gpu_kernels, "_attend_to_chunks"),
                         (gpu_kernels, "_merge"), (triton_kernels, "_gated")):  # fmt: skip
        monkeypatch.setattr(module, name, Kernel())
    decoder = fast_paths._small(CONFIGS["norms of heads"], torch.float16, CPU)
    fast_paths._OPERATIONS["a step of long rows"](decoder)
    assert widths - {None} == {16, 64}


def without_a_chunk(merge):
    class Merge:
        def __getitem__(self, grid):
            def run(*tensors, **constants):
                tensors[3][:, :, 1] = float("-inf")  # rows' second chunks
                merge[grid](*tensors, **constants)

            return run

    return Merge()


@interpreted
def test_kernels_that_leave_something_out_are_left_out_with_a_notice(by_kernels, monkeypatch):
    monkeypatch.setattr(gpu_kernels, "_merge", without_a_chunk(gpu_kernels._merge))
    choice = chosen(monkeypatch)
    assert not choice.taken
    assert not choice.agrees
    assert "kernels for decoding: left out on this machine, since a step of long rows: " in choice.notice


@interpreted
def test_kernels_that_cannot_be_built_are_left_out(by_kernels, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(gpu_kernels, "attend", fail)
    choice = chosen(monkeypatch)
    assert "it failed (RuntimeError: Failed to find C compiler)" in choice.notice
    assert not decode.ALLOWED["kernels"]
    assert not decode.decoding_kernels_fit(CPU)
