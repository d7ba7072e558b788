"""The lean decoder against transformers' own module, in fp32: log-probabilities and every parameter's gradient."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from groupwise.config.schema import ModelConfig, RolloutConfig
from groupwise.engines import make_engine
from groupwise.engines.transformers import TransformersEngine
from groupwise.models import attention, blocked_attention, packing
from groupwise.models.attention import attend_by_library, plan_rectangles
from groupwise.models.blocked_attention import BlockedPlan, attend, attend_backward, plan_blocks
from groupwise.models.decoder import Decoder, why_not_lean, why_unsupported
from groupwise.models.load import Policy, save_model
from groupwise.models.module_scorer import ModuleScorer
from groupwise.models.scorer import make_scorer
from groupwise.training.reference import Reference

from .slow import (
    SHAPES,
    Groups,
    assert_equal_gradients,
    module_gradients,
    random_groups,
    slow_entropies,
    slow_logprobs,
    token_weights,
)

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 2.0}


@pytest.fixture
def tiny(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """``tiny("llama", **config)``: one of the tiny models by its family."""
    return lambda family, **config: request.getfixturevalue(f"tiny_{family}")(**config)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 queries, few sequences each, so that these short texts are cut the way long ones are."""
    for module in (blocked_attention, attention):
        monkeypatch.setattr(module, "QUERY_BLOCK", 8)
        monkeypatch.setattr(module, "SCORE_BUDGET", 600)


def gradients_of(decoder: Decoder, groups: Groups, weights: Tensor) -> dict[str, Tensor]:
    """The summed gradient of one micro-batch, on top of what earlier ones left."""
    (decoder.logprobs(decoder.prepare(groups)) * weights).sum().backward()
    return {name: tensor.grad.clone() for name, tensor in decoder.named_parameters() if tensor.grad is not None}


def check_parity(model: Any, temperature: float = 1.0, groups: Groups | None = None, **options: Any) -> None:
    """Packed against slow: the logprobs, and the gradient of a weighted sum of them for every parameter of the module."""
    reference, groups = copy.deepcopy(model), groups or random_groups()
    decoder = Decoder(model, **options)
    ours, expected = decoder.logprobs(decoder.prepare(groups), temperature), slow_logprobs(reference, groups, temperature)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    weights = token_weights(len(ours))
    (ours * weights).sum().backward()
    (expected * weights).sum().backward()
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert_equal_gradients(module_gradients(decoder), wanted, relative=1e-5)


@pytest.mark.parametrize(
    "gradient_checkpointing", [pytest.param(False, marks=pytest.mark.slow), True], ids=["kept", "recomputed"]
)
@pytest.mark.parametrize(
    ("attention", "common"), [("blocked", 0), ("blocked", 2), ("sdpa", 0)], ids=["blocked", "blocked, alike", "sdpa"]
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
@pytest.mark.usefixtures("small_blocks")
def test_packed_equals_one_completion_at_a_time(
    family: str, tied: bool, attention: str, common: int, gradient_checkpointing: bool, tiny: Callable[..., Any]
) -> None:
    model, groups = tiny(family, tie_word_embeddings=tied), random_groups(common=common)
    assert packing.beginning_to_share(groups) == common
    check_parity(model, 0.8, groups, attention=attention, gradient_checkpointing=gradient_checkpointing)


@pytest.mark.parametrize("attention", ["blocked", "sdpa"])
def test_whole_sequences_in_one_block(attention: str, tiny_llama: Callable[..., Any]) -> None:
    check_parity(tiny_llama(), attention=attention)


@pytest.mark.parametrize("window", [None, 4, 12], ids=lambda window: f"window {window}")
@pytest.mark.usefixtures("small_blocks")
def test_what_prompts_begin_with_computed_once(window: int | None, tiny_mistral: Callable[..., Any]) -> None:
    groups = random_groups(((12, (5, 1, 17)), (11, (8, 2)), (30, (1,)), (21, (26, 11, 26))), common=10)
    model = tiny_mistral(sliding_window=window)
    rows = [len(Decoder(copy.deepcopy(model), attention=kind).prepare(groups).token_ids_R) for kind in ("blocked", "sdpa")]
    assert rows[0] == rows[1] - 3 * 10
    check_parity(model, groups=groups, attention="blocked")


def test_gradients_of_what_many_groups_see_are_added_in_fp32() -> None:
    """Keys and values of the beginning: as many terms as groups, of which sums in bf16 would lose the small ones."""
    packed = packing.pack(random_groups(((12, (9, 9)),) * 200, common=11), 11)
    rows, plan = len(packed.token_ids_R), plan_blocks(packed.spans, len(packed.token_ids_R))
    assert plan.common == 11
    generator = torch.Generator().manual_seed(0)
    rotated, grad = (torch.randn(rows + 1, n, 16, generator=generator).bfloat16() for n in (4, 2))
    rotated[rows] = grad[rows] = 0

    def gradient(dtype: torch.dtype, plan: BlockedPlan) -> Tensor:
        """Of the beginning's keys and values."""
        out, statistics = attend(rotated.to(dtype), plan, 2, 1)
        return attend_backward(grad.to(dtype), rotated.to(dtype), out, statistics, plan, 2, 1)[:11, 2:].double()

    exact = gradient(torch.float64, plan)
    error, in_bf16 = (
        float((gradient(torch.bfloat16, one) - exact).norm() / exact.norm()) for one in (plan, replace(plan, common=0))
    )
    assert error < 0.01
    assert error < in_bf16 / 2


@pytest.mark.parametrize("scaling", [LLAMA3, YARN, LINEAR], ids=lambda scaling: scaling["rope_type"])
@pytest.mark.usefixtures("small_blocks")
def test_scaled_rotary_embeddings(scaling: dict[str, Any], tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama(rope_scaling=dict(scaling))
    assert model.model.rotary_emb.rope_type == scaling["rope_type"]
    check_parity(model, attention="blocked")


@pytest.mark.parametrize("attention", ["blocked", "sdpa"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (1, 1)])
@pytest.mark.usefixtures("small_blocks")
def test_any_number_of_queries_per_key_head(heads: int, kv_heads: int, attention: str, tiny_llama: Callable[..., Any]) -> None:
    check_parity(tiny_llama(num_attention_heads=heads, num_key_value_heads=kv_heads), attention=attention)


@pytest.mark.usefixtures("small_blocks")
def test_attention_biases_of_llama(tiny_llama: Callable[..., Any]) -> None:
    check_parity(tiny_llama(attention_bias=True), attention="blocked")


@pytest.mark.parametrize("attention", ["blocked", "sdpa"])
@pytest.mark.usefixtures("small_blocks")
def test_splits_and_orders_leave_the_gradient(attention: str, tiny_qwen3: Callable[..., Any]) -> None:
    groups, generator = random_groups(), torch.Generator().manual_seed(3)
    weights = [[torch.randn(n, generator=generator) for n in lengths] for _, lengths in SHAPES]

    def summed(parts: list[list[tuple[int, list[int]]]]) -> dict[str, Tensor]:
        """``parts``: micro-batches of (group, its completions)."""
        decoder = Decoder(tiny_qwen3(), attention=attention)
        for part in parts:
            chosen = [(groups[g][0], [groups[g][1][c] for c in members]) for g, members in part]
            total = gradients_of(decoder, chosen, torch.cat([weights[g][c] for g, members in part for c in members]))
        return total

    at_once = summed([[(0, [0, 1, 2]), (1, [0, 1]), (2, [0]), (3, [0, 1, 2])]])
    size = torch.cat([g.flatten() for g in at_once.values()]).norm()
    for parts in (
        [[(3, [0, 1, 2]), (1, [0, 1]), (0, [0, 1, 2]), (2, [0])]],
        [[(0, [2, 0, 1]), (1, [1, 0]), (2, [0]), (3, [1, 2, 0])]],
        [[(0, [0, 1]), (1, [1])], [(0, [2]), (3, [1])], [(1, [0]), (2, [0]), (3, [0, 2])]],
    ):
        other = summed(parts)
        difference = torch.cat([(other[name] - at_once[name]).flatten() for name in at_once]).norm()
        assert difference <= 1e-6 * size


@pytest.mark.usefixtures("small_blocks")
def test_a_completion_does_not_see_its_siblings(tiny_llama: Callable[..., Any]) -> None:
    decoder, (prompt, (first, *_, last)) = Decoder(tiny_llama()), random_groups()[0]
    alone = decoder.logprobs(decoder.prepare([(prompt, [last])]))
    beside = decoder.logprobs(decoder.prepare([(prompt, [first, last])]))
    torch.testing.assert_close(beside[len(first) :], alone, rtol=1e-5, atol=1e-6)


def test_without_gradients_the_logprobs_are_the_same(tiny_qwen3: Callable[..., Any]) -> None:
    decoder = Decoder(tiny_qwen3())
    batch = decoder.prepare(random_groups())
    learning = decoder.logprobs(batch, 0.7)
    with torch.no_grad():
        torch.testing.assert_close(decoder.logprobs(batch, 0.7), learning.detach(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
def test_the_module_sees_every_update_of_the_fused_tensors(family: str, tiny: Callable[..., Any]) -> None:
    decoder, ids = Decoder(tiny(family)), torch.tensor([[5, 9, 77, 3]])
    with torch.no_grad():
        before = decoder.module(ids).logits
        for name, tensor in decoder.named_parameters():
            generator = torch.Generator().manual_seed(len(name))
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=generator))
            after = decoder.module(ids).logits
            assert (after - before).abs().max() > 1e-6, f"the module does not see {name}"
            before = after
    groups = random_groups()
    torch.testing.assert_close(
        decoder.logprobs(decoder.prepare(groups)), slow_logprobs(decoder.module, groups), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", "gemma3"])
def test_what_was_trained_is_what_is_saved(family: str, tiny: Callable[..., Any], tmp_path: Path) -> None:
    decoder, ids = Decoder(tiny(family)), torch.tensor([[5, 9, 77, 3]])
    with torch.no_grad():
        for _, tensor in decoder.named_parameters():
            tensor.add_(0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)))
    no_tokenizer: Any = SimpleNamespace(save_pretrained=lambda *_, **__: None)
    folder = save_model(Policy(decoder.module, no_tokenizer, (2,), 256, "tiny"), tmp_path / "saved")
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(again(ids).logits, decoder.module(ids).logits)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_reference_shares_no_memory_and_is_renewed_exactly(tied: bool, tiny_qwen3: Callable[..., Any]) -> None:
    policy: Any = SimpleNamespace(model=tiny_qwen3(tie_word_embeddings=tied))
    scorer, groups = make_scorer(policy, ModelConfig()), random_groups()
    assert isinstance(scorer, Decoder)
    held = Reference(scorer)
    reference = held.scorer
    batch, as_it_was = scorer.prepare(groups), scorer.logprobs(scorer.prepare(groups)).detach()
    ours = {t.untyped_storage().data_ptr() for _, t in scorer.named_parameters()}
    theirs = {t.untyped_storage().data_ptr() for _, t in [*reference.named_parameters(), *reference.module.named_parameters()]}
    assert ours.isdisjoint(theirs)
    assert not any(t.requires_grad for _, t in reference.named_parameters())
    with torch.no_grad():
        for _, tensor in scorer.named_parameters():
            tensor.mul_(1.1)
    assert torch.equal(reference.logprobs(batch), as_it_was)
    assert not torch.allclose(scorer.logprobs(batch), as_it_was, atol=1e-3)
    held.renew()
    renewed = dict(reference.named_parameters())
    assert all(torch.equal(tensor, renewed[name]) for name, tensor in scorer.named_parameters())
    assert ours.isdisjoint({t.untyped_storage().data_ptr() for t in renewed.values()})
    assert torch.equal(reference.logprobs(batch), scorer.logprobs(batch))


@pytest.mark.parametrize("attention", ["blocked", "sdpa"])
@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_entropies_and_their_gradients(family: str, attention: str, tiny: Callable[..., Any]) -> None:
    model, groups = tiny(family), random_groups()
    reference, decoder = copy.deepcopy(model), Decoder(model, attention=attention)
    ours, expected = decoder.score(decoder.prepare(groups), 0.8, entropy=True).entropy_T, slow_entropies(reference, groups, 0.8)
    assert ours is not None
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    weights = token_weights(len(ours))
    (ours * weights).sum().backward()
    (expected * weights).sum().backward()
    wanted = {name: parameter.grad for name, parameter in reference.named_parameters()}
    assert_equal_gradients(module_gradients(decoder), wanted, relative=1e-5)


@pytest.mark.parametrize(
    ("config", "reason"),
    [({"final_logit_softcapping": 30.0}, "caps of logits"), ({"attn_logit_softcapping": 50.0}, "caps of attention"),
     ({"use_bidirectional_attention": True}, "both directions"), ({"hidden_activation": "gelu"}, "'gelu'")],
    ids=["logit_cap", "attention_cap", "bidirectional", "activation"],
)  # fmt: skip
def test_variants_of_gemma_that_it_does_not_compute_are_told(
    config: dict[str, Any], reason: str, tiny_gemma3: Callable[..., Any]
) -> None:
    assert why_unsupported(tiny_gemma3()) is None
    assert reason in (why_unsupported(tiny_gemma3(**config)) or "")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"hidden_act": "gelu"}, "gelu"),
        ({"mlp_bias": True}, "biases"),
        ({"attention_dropout": 0.1}, "dropout"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
    ],
    ids=["activation", "mlp_bias", "attention_dropout", "dynamic_rope"],
)
def test_variants_it_does_not_compute_are_told(config: dict[str, Any], reason: str, tiny_llama: Callable[..., Any]) -> None:
    assert why_unsupported(tiny_llama()) is None
    assert reason in (why_unsupported(tiny_llama(**config)) or "")


def test_a_head_of_its_own_stays_whatever_the_config_says(tiny_llama: Callable[..., Any]) -> None:
    """transformers 5 makes two tensors of a file with two that differ, and 4 one."""
    model = tiny_llama(tie_word_embeddings=False)
    model.config.tie_word_embeddings = True
    check_parity(model)
    assert model.config.tie_word_embeddings is False, "as it is saved"
    tied = tiny_llama(tie_word_embeddings=True)
    check_parity(tied)
    assert tied.config.tie_word_embeddings is True


def test_a_class_of_its_own_is_not_taken_for_the_one_whose_type_it_bears(tiny_llama: Callable[..., Any]) -> None:
    model = tiny_llama()
    model.__class__ = type("Louder", (type(model),), {"__module__": "mine"})
    assert why_unsupported(model) == "a class of its own, Louder"


def test_weights_of_several_dtypes_are_left_to_the_module(tiny_gemma3: Callable[..., Any]) -> None:
    """Kernels read all as what the embedding is. Gemma's own norms compute in fp32, whatever their weights are."""
    model = tiny_gemma3().bfloat16()
    assert why_unsupported(model) is None
    assert why_not_lean(model) is None
    for part in (model.model.norm, model.lm_head, model.model.layers[1].input_layernorm, model.model.layers[1].mlp.down_proj):
        part.float()
        assert why_unsupported(model) == why_not_lean(model) == "weights of several dtypes"
        part.bfloat16()
    model.model.norm.float()
    policy = Policy(model, None, (2,), 256, "tiny")
    assert isinstance(make_scorer(policy, ModelConfig()), ModuleScorer)
    assert isinstance(make_engine(policy, RolloutConfig()), TransformersEngine)


@pytest.mark.parametrize("window", [2, 6, 30, 1000])
@pytest.mark.parametrize("attention", ["blocked", "sdpa"])
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("mistral", {}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}),
        ("gemma3", {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    ],
    ids=["mistral", "qwen2", "gemma3"],
)
@pytest.mark.usefixtures("small_blocks")
def test_sliding_windows(family: str, config: dict[str, Any], attention: str, window: int, tiny: Callable[..., Any]) -> None:
    """Of less than a block, of several, and of more positions than there are."""
    model = tiny(family, sliding_window=window, **config)
    assert why_unsupported(model) is None
    check_parity(model, attention=attention)


def test_scores_far_above_a_querys_own_keys_do_not_overflow() -> None:
    qkv = torch.randn(14, 4, 8, generator=torch.Generator().manual_seed(0))
    qkv[:10, 2] = 200 * qkv[:10, 2]  # the prompt's keys
    packed, cos, sin = packing.pack([(list(range(10)), [[1, 2, 3, 4, 5]])]), torch.ones(14, 1, 4), torch.zeros(14, 1, 4)
    rectangles = plan_rectangles(packed.spans)
    sdpa, _ = attend_by_library(qkv, cos, sin, rectangles, 2, 1)
    blocked, _ = attend(torch.cat([qkv, torch.zeros(1, 4, 8)]), plan_blocks(packed.spans, 14), 2, 1)
    blocked = blocked[:14]
    torch.testing.assert_close(blocked, sdpa, rtol=1e-4, atol=1e-4)
