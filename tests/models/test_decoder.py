"""The lean decoder computes what transformers' own module computes, on the same memory: log-probabilities and every gradient."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from groupwise.models import layout
from groupwise.models.decoder import Decoder, why_unsupported
from groupwise.models.load import Policy, save_model

from .slow_scoring import completion_logprobs, fused_gradients, random_groups, token_weights

RAGGED = [(9, [5, 1, 17]), (3, [8, 2]), (1, [1]), (24, [30, 30])]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32, "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}


@pytest.fixture
def family(request, tiny_llama, tiny_qwen2, tiny_qwen3):
    return {"llama": tiny_llama, "qwen2": tiny_qwen2, "qwen3": tiny_qwen3}[request.param]


def assert_parity(make, groups, temperature=1.0, *, attention="blocked", checkpointing=False, **config):
    """Equal log-probabilities, and equal gradients of every parameter, to 1e-5 of their norms."""
    module, decoder = make(**config), Decoder(make(**config), attention=attention, gradient_checkpointing=checkpointing)
    ours = decoder.logprobs(decoder.prepare(groups), temperature)
    theirs = completion_logprobs(module, groups, temperature)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
    weights = token_weights(len(ours))
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    expected, found = fused_gradients(module), dict(decoder.named_parameters())
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        # A key bias moves all scores of a query alike, so its gradient is 0 but for rounding: it is measured with its fused tensor.
        error = (found[name].grad - gradient).norm() / gradient.norm()
        assert error < 1e-5, f"{name}: {error:.1e}"


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("attention", ["blocked", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"], indirect=True)
def test_packed_groups_equal_the_module_on_single_completions(family, attention, checkpointing, tied):
    groups = random_groups(RAGGED)
    assert_parity(family, groups, 0.7, attention=attention, checkpointing=checkpointing, tie_word_embeddings=tied)


@pytest.mark.parametrize("attention", ["blocked", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"], indirect=True)
def test_prompts_and_completions_longer_than_a_block_of_queries(family, attention):
    groups = random_groups([(layout.QUERY_BLOCK + 40, [layout.QUERY_BLOCK + 60, 7]), (layout.QUERY_BLOCK, [3])])
    assert_parity(family, groups, attention=attention)


@pytest.mark.parametrize("attention", ["blocked", "sdpa"])
@pytest.mark.parametrize(("query_block", "score_budget"), [(4, 64), (7, 1), (256, 900)])
def test_where_blocks_are_cut_does_not_matter(tiny_qwen3, monkeypatch, attention, query_block, score_budget):
    monkeypatch.setattr(layout, "QUERY_BLOCK", query_block)
    monkeypatch.setattr(layout, "SCORE_BUDGET", score_budget)
    groups = random_groups(RAGGED)
    assert len(layout.pack(groups).blocks) > 2 * len(groups)
    assert_parity(tiny_qwen3, groups, attention=attention)


@pytest.mark.parametrize("attention", ["blocked", "sdpa"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (1, 1)])
def test_any_number_of_queries_per_key_head(tiny_llama, heads, kv_heads, attention):
    assert_parity(tiny_llama, random_groups(RAGGED), attention=attention, num_attention_heads=heads, num_key_value_heads=kv_heads)


def test_biases_of_every_attention_projection(tiny_llama):
    assert_parity(tiny_llama, random_groups(RAGGED), attention_bias=True)


@pytest.mark.parametrize("scaling", [LLAMA3, YARN], ids=["llama3", "yarn"])
@pytest.mark.parametrize("attention", ["blocked", "sdpa"])
def test_scaled_rotary_embeddings(tiny_llama, scaling, attention):
    groups = random_groups([(70, [50, 3])])
    assert_parity(tiny_llama, groups, attention=attention, rope_scaling=dict(scaling))
    plain, scaled = Decoder(tiny_llama()), Decoder(tiny_llama(rope_scaling=dict(scaling)))
    assert not torch.allclose(plain.logprobs(plain.prepare(groups)), scaled.logprobs(scaled.prepare(groups)), atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"], indirect=True)
def test_without_gradients_the_same_numbers(family):
    decoder = Decoder(family())
    packed = decoder.prepare(random_groups(RAGGED))
    with torch.no_grad():
        plain = decoder.logprobs(packed, 0.7)
    torch.testing.assert_close(plain, decoder.logprobs(packed, 0.7).detach(), rtol=1e-6, atol=1e-6)


def _gradient(make, batches):
    """All gradients as one vector, summed over micro-batches; a token's weight depends on which token it is, not on where it lies."""
    decoder = Decoder(make())
    for batch in batches:
        packed = decoder.prepare(batch)
        weights = torch.cat([torch.sin(torch.arange(len(c)) + sum(c) + sum(prompt)) for prompt, group in batch for c in group])
        (decoder.logprobs(packed) * weights).sum().backward()
    return torch.cat([p.grad.flatten() for _, p in decoder.named_parameters()])


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"], indirect=True)
def test_cutting_and_reordering_a_batch_leaves_the_gradient(family):
    groups = random_groups(RAGGED)
    whole = _gradient(family, [groups])
    cuts = {
        "a micro-batch per group": [[group] for group in groups],
        "a micro-batch per completion": [[(prompt, [c])] for prompt, completions in groups for c in completions],
        "groups reversed": [groups[::-1]],
        "completions reversed": [[(prompt, completions[::-1]) for prompt, completions in groups]],
        "a group cut in two within a batch": [[(p, part) for p, cs in groups for part in (cs[:1], cs[1:]) if part]],
    }
    for name, batches in cuts.items():
        error = (_gradient(family, batches) - whole).norm() / whole.norm()
        assert error < 1e-6, f"{name}: {error:.1e}"


def test_a_completion_does_not_see_its_siblings(tiny_llama):
    decoder = Decoder(tiny_llama())
    (prompt, completions), other = random_groups([(6, [5, 9, 7]), (4, [9])])
    with torch.no_grad():
        together = decoder.logprobs(decoder.prepare([(prompt, completions), other]))
        changed = [completions[0], [(t + 1) % 128 for t in completions[1]], completions[2]]
        apart = decoder.logprobs(decoder.prepare([(prompt, changed), other]))
    same = torch.tensor([True] * 5 + [False] * 9 + [True] * 16)
    assert torch.equal(together[same], apart[same])
    assert not torch.isclose(together[~same], apart[~same], atol=1e-4).any()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"], indirect=True)
def test_the_module_holds_views_of_the_decoders_tensors(family, tied):
    module = family(tie_word_embeddings=tied)
    decoder = Decoder(module)
    groups = random_groups([(5, [4, 6])])
    storages = {p.untyped_storage().data_ptr() for _, p in decoder.named_parameters()}
    assert {p.untyped_storage().data_ptr() for p in module.parameters()} == storages
    for _, parameter in decoder.named_parameters():
        with torch.no_grad():
            before = completion_logprobs(module, groups)
            parameter.mul_(1.0 + 0.3 * torch.rand(parameter.shape))
            after = completion_logprobs(module, groups)
            assert not torch.equal(before, after)
            torch.testing.assert_close(decoder.logprobs(decoder.prepare(groups)), after, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"], indirect=True)
def test_a_trained_decoder_is_saved_as_the_module_it_came_from(family, tied, tmp_path):
    fresh, module = family(tie_word_embeddings=tied), family(tie_word_embeddings=tied)
    decoder = Decoder(module)
    with torch.no_grad():
        for _, parameter in decoder.named_parameters():
            parameter.add_(0.01)
    assert {n: t.shape for n, t in module.state_dict().items()} == {n: t.shape for n, t in fresh.state_dict().items()}
    tokenizer = SimpleNamespace(save_pretrained=lambda folder, **_: None)
    policy = Policy(module, tokenizer, end_token_ids=(2,), context_length=256, name="tiny")
    again = AutoModelForCausalLM.from_pretrained(save_model(policy, tmp_path / "saved"), dtype=torch.float32).eval()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert torch.equal(again(ids).logits, module(ids).logits)
        assert not torch.equal(again(ids).logits, fresh(ids).logits)


def test_a_frozen_decoder_asks_for_no_gradients(tiny_llama):
    decoder = Decoder(tiny_llama(), trainable=False)
    assert not decoder.logprobs(decoder.prepare(random_groups(RAGGED))).requires_grad


def test_what_the_decoder_does_not_compute_is_told(tiny_llama, tiny_qwen2, tiny_qwen3):
    assert [why_unsupported(make()) for make in (tiny_llama, tiny_qwen2, tiny_qwen3)] == [None] * 3
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    assert "sliding" in why_unsupported(tiny_qwen2(**window))
    assert "gelu" in why_unsupported(tiny_llama(hidden_act="gelu"))
    assert "biases" in why_unsupported(tiny_llama(mlp_bias=True))
    assert "dropout" in why_unsupported(tiny_llama(attention_dropout=0.1))
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert "dynamic" in why_unsupported(tiny_llama(rope_scaling=dynamic))
    adapted = tiny_llama()
    adapted.model.layers[0].mlp.down_proj = type("LoraLinear", (torch.nn.Linear,), {})(96, 64, bias=False)
    assert "adapters" in why_unsupported(adapted)
