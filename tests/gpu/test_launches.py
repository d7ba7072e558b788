"""What a pass asks of a GPU: kernels in a decode step, and waits for an answer, which leave it idle."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from groupwise import limits
from groupwise.engines.base import SamplingSettings
from groupwise.engines.builtin import decode
from groupwise.engines.builtin.cache import Cache
from groupwise.engines.builtin.decode import DecodeStep, DecodeWeights
from groupwise.engines.builtin.draw import Draw
from groupwise.engines.builtin.runner import Runner
from groupwise.models import varlen_attention
from groupwise.models.decoder import Decoder
from groupwise.models.devices import product_gives_fp32
from groupwise.planner import cost
from tests.conftest import TINY
from tests.gpu.counting import Dispatched


@pytest.fixture
def decode_step(fake_decoder, cuda, monkeypatch):
    """``decode_step(**config)``: one step of eight rows in two groups, on a GPU that is not there; it ran once before."""

    monkeypatch.setattr(
        decode, "product_gives_fp32", lambda product, device, dtype: device.type == "cuda"
    )  # tensors without memory cannot be compared

    def make(**config):
        decoder = fake_decoder(**config)
        decoder.reserve_positions(64)
        cache = Cache(
            layers=len(decoder.layers), kv_heads=decoder.shape.kv_heads, head_width=decoder.shape.head_width,
            groups=2, prompt_tokens=9, rows=8,
            completion_tokens=20, dtype=decoder.dtype, device=cuda,
        )  # fmt: skip
        step = DecodeStep.plan(
            cache,
            group_of_row=[0] * 4 + [1] * 4,
            prompt_lengths=[9, 7],
            own_lengths=[1] * 8,
            last_tokens=[3] * 8,
            keys=[1] * 8,
            turn_starts=[0] * 8,
        )
        runner = Runner(
            decoder, DecodeWeights(decoder, 8), cache, Draw(SamplingSettings(max_tokens=20), decoder.vocabulary, cuda)
        )
        with torch.no_grad():
            runner._once(step)
        return torch.no_grad()(lambda: runner._once(step))

    return make


def test_by_operations_a_decode_step_launches_as_many_kernels_as_are_counted(decode_step):
    found = []
    for layers in (1, 2):
        step = decode_step(num_hidden_layers=layers)
        with Dispatched() as seen:
            step()
        found.append(sum(seen.launches.values()))
        assert not seen.waits, "a graph that is captured may ask nothing"
    one, two = found
    assert (two - one, one - (two - one)) == cost.DECODE_OPERATIONS


class StandIns:
    """For the kernels of ``gpu_kernels.py``, whose launches PyTorch does not dispatch: as many as ``test_gpu_kernels.py`` counts."""

    def __init__(self):
        self.launches = 0

    def add_norm(self, x, *_):
        self.launches += 1
        return x.new_empty(x.shape)

    def gated(self, gate_up, *_):
        self.launches += 1
        return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)

    def rotate_and_store(self, qkv, cos, sin, own, own_lengths, heads, *_):
        self.launches += 1
        return qkv.new_empty(len(qkv), heads, qkv.shape[2])

    def attend(self, query, *_, **__):
        self.launches += 2
        return query.new_empty(query.shape)


def test_by_kernels_it_launches_as_many_as_the_plan_counts_and_asks_nothing(decode_step, monkeypatch):
    """Four products remain in a layer."""
    kernels, found = StandIns(), []
    monkeypatch.setattr(decode, "decoding_kernels_fit", lambda device: True)
    monkeypatch.setattr(decode, "_gpu_kernels", lambda: kernels)
    for layers in (1, 2):
        step = decode_step(num_hidden_layers=layers)
        kernels.launches = 0
        with Dispatched() as seen:
            step()
        assert not seen.waits
        assert seen.launches["addmm"] + seen.launches["mm"] == 4 * layers + 1
        found.append(kernels.launches + sum(seen.launches.values()))
    one, two = found
    assert (two - one, one - (two - one)) == cost.DECODE_LAUNCHES


def test_a_row_that_moves_is_one_launch(fake_cuda, cuda):
    """It was two for each layer, and rows that end move others all the time. Groups move in the same way."""
    cache = Cache(
        layers=3, kv_heads=2, head_width=16, groups=2, prompt_tokens=9, rows=4, completion_tokens=20, dtype=torch.bfloat16,
        device=cuda,
    )  # fmt: skip
    with Dispatched() as seen:
        cache.move_row(3, 0, 5)
        cache.move_group(1, 0)
    assert seen.launches == {"_foreach_copy_": 2}


GROUPS = [(list(range(3, 12)), [list(range(3, 3 + n)) for n in (4, 9, 1)]), ([5], [[6, 7], [8]])]


def on_cpu(**config):
    """The same computation as on a GPU, in fp32 on the CPU: autograd makes no backward pass on a GPU that is not there."""
    settings = Qwen2Config(**{**TINY, "tie_word_embeddings": True, **config})
    return Decoder(AutoModelForCausalLM.from_config(settings, dtype=torch.float32), attention="sdpa")


def test_a_forward_pass_asks_the_device_nothing_and_stays_there(fake_decoder):
    decoder = fake_decoder()
    packed = decoder.prepare(GROUPS)
    with Dispatched() as seen, torch.no_grad():
        scored = decoder.score(packed, entropy=True)
    assert not seen.waits
    assert scored.logprobs_T.device.type == scored.entropy_T.device.type == "cuda"


def test_flash_attention_stays_on_the_device_in_both_directions(fake_decoder, cuda):
    """By PyTorch's own descriptions of its kernels. Autograd goes no way back on a GPU that is not there: it is called by hand."""
    decoder = fake_decoder()
    decoder.attention = "varlen"
    packed = decoder.prepare(GROUPS)
    with Dispatched() as seen, torch.no_grad():
        scored = decoder.score(packed)
    assert not seen.waits
    assert seen.launches["_flash_attention_forward"] == 2 * len(decoder.layers)
    assert scored.logprobs_T.device == cuda
    rows, heads, kv_heads, width = len(packed.token_ids_R), decoder.shape.heads, decoder.shape.kv_heads, decoder.shape.head_width
    qkv = torch.empty(rows, heads + 2 * kv_heads, width, dtype=torch.bfloat16, device=cuda)
    ctx = SimpleNamespace(
        save_for_backward=lambda *kept: setattr(ctx, "saved_tensors", kept), mark_non_differentiable=lambda x: None
    )
    cos, sin = decoder.ropes(packed.positions_R)[0]
    attended, _ = varlen_attention._Attend.forward(
        ctx, qkv, cos, sin, varlen_attention.plan_runs(packed.spans, cuda), heads, kv_heads, None
    )
    with Dispatched() as seen:
        gradient, *_ = varlen_attention._Attend.backward(ctx, torch.empty_like(attended), None)
    assert not seen.waits
    assert seen.launches["_flash_attention_backward"] == 2
    assert (gradient.shape, gradient.dtype, gradient.device) == (qkv.shape, qkv.dtype, cuda)


@pytest.mark.parametrize("entropy", [False, True])
def test_a_pass_and_its_way_back_ask_the_device_nothing(entropy):
    """Every answer is a wait in which the GPU runs dry: there were three for each rectangle in each layer, and two for each slice of the
    output head."""
    decoder = on_cpu()
    packed = decoder.prepare(GROUPS)
    with Dispatched() as seen:
        scored = decoder.score(packed, entropy=entropy)
        (scored.logprobs_T.sum() + (scored.entropy_T.sum() if entropy else 0)).backward()
    assert not seen.waits
    assert decoder.embedding.grad is not None


def test_indices_and_masks_are_made_once_for_all_layers():
    made = []
    for layers in (1, 3):
        decoder = on_cpu(num_hidden_layers=layers)
        packed = decoder.prepare(GROUPS)
        decoder.reserve_positions(64)
        with Dispatched() as seen, torch.no_grad():
            decoder.hidden(packed)
        made.append({name: seen.launches[name] for name in ("arange", "le", "sort", "argsort", "nonzero")})
    assert made[0] == made[1]
    assert made[0]["le"] > 0, "there are masks"


def test_a_way_back_fills_no_tensor_of_all_rows_for_each_rectangle():
    """One for the queries, and one for keys and values."""
    zeros = []
    for groups in (GROUPS, GROUPS * 5):
        decoder = on_cpu(num_hidden_layers=1)
        logprobs = decoder.logprobs(decoder.prepare(groups)).sum()
        with Dispatched() as seen:
            logprobs.backward()
        zeros.append(sum(seen.launches[name] for name in ("new_zeros", "zeros", "zeros_like")))
    assert zeros[0] == zeros[1]


def test_slices_of_the_output_head_are_aligned_on_a_gpu():
    for rows in (1, 8191, 8200, 9000, 20_001, 131_071):
        assert limits.logit_columns(rows, "cuda") % 64 == 0
    assert limits.logit_columns(9000, "cpu") == 3728, "as it was"


def test_decoding_has_its_scores_in_fp32_on_a_gpu(decode_step, monkeypatch):
    """As learning's kernels have them. Rounded to bf16 they differ by parts in a hundred, and so do the logprobs."""
    seen, softmax = [], torch.softmax

    def watched(scores, dim):
        seen.append(scores.dtype)
        return softmax(scores, dim)

    step = decode_step()
    monkeypatch.setattr(torch, "softmax", watched)
    step()
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize(("product", "taken"), [("right", True), ("wrong", False), ("not there", False), ("refused", False)])
def test_fp32_products_are_taken_where_a_small_one_is_right(product, taken, monkeypatch):
    bmm = torch.bmm

    def stand_in(one, other, **how):
        if not how:
            return bmm(one, other)
        if product == "not there":
            raise TypeError("bmm() got an unexpected keyword argument 'out_dtype'")
        if product == "refused":
            raise RuntimeError("out_dtype is only supported for CUDA")
        return bmm(one.float(), other.float()) + (0.01 if product == "wrong" else 0)

    linspace = torch.linspace
    monkeypatch.setattr(torch, "linspace", lambda *numbers, device: linspace(*numbers))
    monkeypatch.setattr(torch, "bmm", stand_in)
    assert product_gives_fp32(torch.bmm, torch.device("cuda"), torch.bfloat16) is taken
    assert not product_gives_fp32(torch.bmm, torch.device("cpu"), torch.bfloat16)
