"""Scoring through a model's own module: the same numbers, on every architecture, and nothing random in them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma2Config,
    Gemma3Config,
    GPT2Config,
    GraniteConfig,
    PhiConfig,
    RecurrentGemmaConfig,
    xLSTMConfig,
)

from groupwise.config.schema import ModelConfig
from groupwise.models.decoder import Decoder, why_unsupported
from groupwise.models.module_scorer import ModuleScorer
from groupwise.models.scorer import make_scorer
from groupwise.training.reference import Reference

from .slow import assert_equal_gradients, module_gradients, random_groups, slow_logprobs, token_weights


def random_model(config: Any) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


def tiny_gpt2(**config: Any) -> Any:
    sizes = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.2}
    return random_model(GPT2Config(**{**sizes, "bos_token_id": 1, "eos_token_id": 2, **config}))


def tiny_gemma2() -> Any:
    """Caps of 2 on the logits: most of them are bent, so that leaving the cap out shows."""
    return random_model(
        Gemma2Config(
            vocab_size=128,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            initializer_range=0.3,
            final_logit_softcapping=2.0,
            attn_logit_softcapping=5.0,
            sliding_window=8,
            attn_implementation="eager",
        )
    )


SMALL = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}


def tiny_granite() -> Any:
    """Divides its logits by 4."""
    return random_model(GraniteConfig(**SMALL, logits_scaling=4.0, pad_token_id=None))


def tiny_phi() -> Any:
    """Its output head has a bias."""
    model = random_model(PhiConfig(**SMALL))
    torch.nn.init.normal_(model.lm_head.bias, generator=torch.Generator().manual_seed(0))
    return model


def tiny_cohere() -> Any:
    """Multiplies its logits by an eighth."""
    return random_model(CohereConfig(**SMALL, logit_scale=0.125, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def tiny_recurrent_gemma() -> Any:
    """Caps its logits at 2, by a setting of another name than Gemma 2's."""
    sizes = {
        **SMALL,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "lru_width": 32,
        "attention_window_size": 64,
        "w_init_variance_scale": 1.0,
    }
    return random_model(RecurrentGemmaConfig(**sizes, logits_soft_cap=2.0, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def tiny_xlstm() -> Any:
    """Caps its logits at 0.5, by a third name."""
    pytest.importorskip("transformers", minversion="5", reason="before, its own pass fails at these sizes")
    return random_model(
        xLSTMConfig(
            vocab_size=128,
            hidden_size=32,
            embedding_dim=32,
            num_hidden_layers=2,
            num_blocks=2,
            num_heads=2,
            chunk_size=8,
            output_logit_soft_cap=0.5,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def tiny_gemma3_with_images() -> Any:
    seen = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    seen |= {"image_size": 28, "patch_size": 14}
    text = {**SMALL, "head_dim": 8, "max_position_embeddings": 256, "sliding_window": 8, "pad_token_id": 0}
    return random_model(Gemma3Config(text_config=text, vision_config=seen, mm_tokens_per_image=4))


def check_against_slow(model: Any, temperature: float = 0.8) -> None:
    reference, groups = copy.deepcopy(model), random_groups()
    scorer = ModuleScorer(model)
    ours, expected = scorer.logprobs(scorer.prepare(groups), temperature), slow_logprobs(reference, groups, temperature)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    weights = token_weights(len(ours))
    (ours * weights).sum().backward()
    (expected * weights).sum().backward()
    found = {name: parameter.grad for name, parameter in scorer.named_parameters() if parameter.grad is not None}
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters() if parameter.grad is not None}
    # A bias added to every key shifts all scores of a query alike: its gradient is 0 but for rounding (GPT-2, no rotary embedding).
    assert_equal_gradients(found, wanted, relative=1e-5, absolute=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_module_equals_one_completion_at_a_time(family: str, request: pytest.FixtureRequest) -> None:
    check_against_slow(request.getfixturevalue(f"tiny_{family}")())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_the_module_equals_the_lean_decoder(family: str, request: pytest.FixtureRequest) -> None:
    model, groups = request.getfixturevalue(f"tiny_{family}")(), random_groups()
    scorer, decoder = ModuleScorer(copy.deepcopy(model)), Decoder(model)
    padded, packed = scorer.prepare(groups), decoder.prepare(groups)
    for name in ("targets_T", "sequence_T", "lengths_N"):
        assert torch.equal(getattr(padded, name), getattr(packed, name))
    ours, lean = scorer.logprobs(padded, 0.8), decoder.logprobs(packed, 0.8)
    torch.testing.assert_close(ours, lean, rtol=1e-5, atol=1e-5)
    weights = token_weights(len(ours))
    (ours * weights).sum().backward()
    (lean * weights).sum().backward()
    found = {name: parameter.grad for name, parameter in scorer.named_parameters()}
    assert_equal_gradients(module_gradients(decoder), found, relative=1e-5)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_gemma2, tiny_granite, tiny_phi, tiny_cohere, tiny_recurrent_gemma, tiny_xlstm])
def test_other_architectures_fall_back_to_it(make: Callable[[], Any]) -> None:
    model = make()
    assert model.config.model_type in (why_unsupported(model) or "")
    policy: Any = SimpleNamespace(model=model)
    assert isinstance(make_scorer(policy, ModelConfig()), ModuleScorer)
    check_against_slow(model)


def test_of_a_model_that_sees_images_what_text_passes_through_is_trained_alone() -> None:
    """Masters and moments of the rest took 12 bytes a weight."""
    scorer = ModuleScorer(tiny_gemma3_with_images())
    scorer.logprobs(scorer.prepare(random_groups())).sum().backward()
    parameters = dict(scorer.named_parameters())
    learnt = {name for name, p in parameters.items() if p.requires_grad}
    assert learnt == {name for name, p in parameters.items() if p.grad is not None}
    left = parameters.keys() - learnt
    assert left
    assert all("vision" in name or "multi_modal" in name for name in left)
    assert not any(p.requires_grad for _, p in ModuleScorer(scorer.module, trainable=False).named_parameters())


@pytest.mark.parametrize(
    ("make", "plain"),
    [
        (tiny_gpt2, True),
        (tiny_gemma2, False),
        (tiny_granite, False),
        (tiny_phi, False),
        (tiny_cohere, False),
        (tiny_recurrent_gemma, False),
        (tiny_xlstm, False),
    ],
)
def test_a_head_is_taken_for_plain_only_where_logits_are_what_it_gives(make: Callable[[], Any], plain: bool) -> None:
    scorer = ModuleScorer(make())
    scorer.logprobs(scorer.prepare(random_groups()))
    assert scorer._head_is_plain is plain


def test_a_cap_far_above_the_logits_is_seen_all_the_same() -> None:
    model = tiny_gemma2()
    model.config.final_logit_softcapping = 1000.0
    scorer = ModuleScorer(model)
    scorer.logprobs(scorer.prepare(random_groups()))
    assert scorer._head_is_plain is False


def test_capped_logits_stay_capped() -> None:
    model, groups = tiny_gemma2(), random_groups()
    scorer = ModuleScorer(model)
    with torch.no_grad():
        capped = scorer.logprobs(scorer.prepare(groups))
        model.config.final_logit_softcapping = None
        assert not torch.allclose(scorer.logprobs(scorer.prepare(groups)), capped, atol=1e-2)


@pytest.mark.parametrize("gradient_checkpointing", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
def test_dropout_is_silenced(training: bool, gradient_checkpointing: bool) -> None:
    rates = {"resid_pdrop": 0.4, "embd_pdrop": 0.4, "attn_pdrop": 0.4}
    model, groups = tiny_gpt2(**rates), random_groups()
    reference = copy.deepcopy(model)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    scorer = ModuleScorer(model.train(training))
    ours, expected = scorer.logprobs(scorer.prepare(groups)), slow_logprobs(reference, groups)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    weights = token_weights(len(ours))
    (ours * weights).sum().backward()
    (expected * weights).sum().backward()
    assert not any(part.training for part in model.modules())
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert_equal_gradients(found, wanted, relative=1e-5, absolute=1e-5)  # type: ignore[arg-type]


def test_a_reference_shares_no_memory_and_is_renewed_exactly() -> None:
    scorer, groups = ModuleScorer(tiny_gpt2()), random_groups()
    held, batch = Reference(scorer), scorer.prepare(groups)
    reference = held.scorer
    as_it_was = scorer.logprobs(batch).detach()
    with torch.no_grad():
        for _, parameter in scorer.named_parameters():
            parameter.mul_(1.1)
    assert torch.equal(reference.logprobs(batch), as_it_was)
    assert not any(parameter.requires_grad for _, parameter in reference.named_parameters())
    held.renew()
    assert torch.equal(reference.logprobs(batch), scorer.logprobs(batch))
