"""A base in 4 or 8 bits with an adapter: its numbers are the format's, learning and sampling use the same ones, and it can be exported."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from transformers import AutoModelForCausalLM

from groupwise.config.schema import Config, LoraConfig, ModelConfig, RolloutConfig
from groupwise.engines import SamplingSettings, make_engine
from groupwise.engines.builtin.decode import why_not_in_8_bits
from groupwise.errors import ConfigError
from groupwise.memory import own_memory
from groupwise.models.adapters import attach, base_module, merged, peft_config_of
from groupwise.models.decoder import MergedDecoder
from groupwise.models.load import Policy, load_policy, save_model
from groupwise.models.merging import dithered, merged_weight
from groupwise.models.quantised import dense_weight, multiply_dequantised, quantisation_settings, quantised_layers
from groupwise.models.scorer import make_scorer
from groupwise.training.learner import Learner
from groupwise.types import Group, Problem, Prompt
from tests.tiny import write_tiny_llama

pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

PROMPT = Prompt(Problem(id="p", question="?", answer=""), "?", (5, 9, 3, 17))
COMPLETION = (7, 8, 9, 30, 2)
NF4 = (-1.0, -0.6961928, -0.5250731, -0.3949175, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.0795803, 0.1609302, 0.2461123,
       0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0)  # fmt: skip
"""Quantiles of the normal distribution, scaled to [-1, 1] (arXiv 2305.14314, appendix E)."""


class Plain:
    def decode(self, ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))

    def save_pretrained(self, *_: Any, **__: Any) -> None:
        pass


def in_few_bits(model: Any, kind: str, folder: Path, dtype: str = "float32") -> Any:
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    config = ModelConfig(name=str(folder), quantization=kind, dtype=dtype)  # type: ignore[arg-type]
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), quantization_config=quantisation_settings(config), device_map={"": "cpu"}
    )
    return multiply_dequantised(loaded).eval()


def adapted(model: Any, *, filled: bool = False, **settings: Any) -> Policy:
    model = attach(model, peft_config_of(LoraConfig(**{"rank": 4, "alpha": 8, **settings}))).eval()
    if filled:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "lora_B" in name:
                    p.normal_(std=0.1)
    return Policy(model, Plain(), (2,), 256, "tiny")


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux says which files are in memory")
@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_the_file_of_many_bits_does_not_stay_in_memory(tiny_llama, tmp_path, kind):
    model = in_few_bits(tiny_llama(), kind, tmp_path, "bfloat16")
    own_memory([*model.parameters(), *model.buffers()])  # as load_policy does
    assert (
        model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr() or not model.config.tie_word_embeddings
    )
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def slow(model: Any, completion: tuple[int, ...] = COMPLETION) -> torch.Tensor:
    ids = torch.tensor([[*PROMPT.token_ids, *completion]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(PROMPT.token_ids) - 1 : -1].float()
    return torch.log_softmax(logits, -1)[torch.arange(len(completion)), ids[0, len(PROMPT.token_ids) :]]


def scored(scorer: Any, completion: tuple[int, ...] = COMPLETION) -> torch.Tensor:
    return scorer.logprobs(scorer.prepare([(PROMPT.token_ids, [completion])]))


def settings(**algorithm: Any) -> Config:
    return Config(
        model={"dtype": "float32"},  # type: ignore[arg-type]
        algorithm={"kl": None, **algorithm},  # type: ignore[arg-type]
        optimizer={"learning_rate": 2e-2},  # type: ignore[arg-type]
    )


KINDS = pytest.mark.parametrize("kind", ["4bit", "8bit"])


def test_4_bit_weights_are_nf4_with_scales_in_8_bits(tiny_llama, tmp_path):
    model = tiny_llama()
    whole = model.model.layers[0].mlp.down_proj.weight.detach().clone()
    layer = in_few_bits(model, "4bit", tmp_path).model.layers[0].mlp.down_proj
    assert whole.shape == (64, 96), "a block of 64 weights may go over the end of a row"
    found, blocks = dense_weight(layer).flatten().view(-1, 64), whole.flatten().view(-1, 64)
    scales = found.abs().amax(1, keepdim=True)
    codes = torch.tensor(NF4)
    nearest = codes[(blocks / blocks.abs().amax(1, keepdim=True))[..., None].sub(codes).abs().argmin(-1)]
    torch.testing.assert_close(found / scales, nearest, atol=1e-4, rtol=0)
    torch.testing.assert_close(scales, blocks.abs().amax(1, keepdim=True), atol=0.02, rtol=0.02)
    stored = layer.weight.numel() + layer.weight.quant_state.absmax.numel()
    assert stored == whole.numel() * (1 / 2 + 1 / 64), "bytes, besides the scale of 256 scales and the table"


def test_8_bit_weights_have_a_scale_for_each_row(tiny_llama, tmp_path):
    model = tiny_llama()
    whole = model.model.layers[0].mlp.down_proj.weight.detach().clone()
    layer = in_few_bits(model, "8bit", tmp_path).model.layers[0].mlp.down_proj
    scales = whole.half().float().abs().amax(1, keepdim=True) / 127
    torch.testing.assert_close(dense_weight(layer, torch.float32), (whole / scales).round() * scales, atol=0.011, rtol=0)
    assert layer.weight.dtype == torch.int8


@KINDS
def test_embeddings_head_and_norms_stay_whole_and_the_rest_is_quantised(tiny_qwen2, tmp_path, kind):
    model = in_few_bits(tiny_qwen2(), kind, tmp_path)
    assert len(quantised_layers(model)) == 2 * 7
    assert {p.dtype for n, p in model.named_parameters() if "proj.weight" not in n} == {torch.float32}


def test_sampling_with_weights_of_8_bits_is_for_a_base_that_is_not(tiny_llama, tmp_path, monkeypatch):
    monkeypatch.setattr("groupwise.engines.builtin.fast_paths.check_fast_paths", lambda *_: [])  # a clock might leave kernels out
    policy = adapted(in_few_bits(tiny_llama(), "8bit", tmp_path))
    for engine in ("auto", "builtin"):
        with pytest.raises(ConfigError, match=r"its base is in 8 bits already, .*\. Set it to none"):
            make_engine(policy, RolloutConfig(quantization="8bit", engine=engine))
    if why_not_in_8_bits(torch.device("cpu"), torch.float32) is None:
        assert make_engine(adapted(in_few_bits(tiny_llama(), "4bit", tmp_path)), RolloutConfig(quantization="8bit"))


@KINDS
def test_a_product_is_that_of_the_dequantised_weight_whatever_is_beside_it_in_the_batch(tiny_qwen2, tmp_path, kind):
    layer = in_few_bits(tiny_qwen2(), kind, tmp_path).model.layers[1].self_attn.q_proj
    x = torch.randn(6, 64)
    x[3] *= 50.0  # an outlier, which LLM.int8() would treat in another way
    expected = linear(x, dense_weight(layer, torch.float32), layer.bias)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x[:1]), expected[:1])
    wanted = x.clone().requires_grad_()
    layer(wanted).sum().backward()
    torch.testing.assert_close(wanted.grad, dense_weight(layer, torch.float32).sum(0).expand(6, 64))


@KINDS
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen2", "tiny_qwen3", "tiny_gemma3"])
@pytest.mark.parametrize("recompute", [pytest.param(False, marks=pytest.mark.slow), True], ids=["keeping", "recomputing"])
@pytest.mark.parametrize("attention", ["blocked", "sdpa"])
def test_logprobs_and_gradients_are_those_of_peft_s_own_module(request, tmp_path, kind, family, recompute, attention):
    policy = adapted(in_few_bits(request.getfixturevalue(family)(), kind, tmp_path), filled=True)
    scorer = MergedDecoder(policy.model, gradient_checkpointing=recompute, attention=attention)
    parameters = [p for _, p in scorer.named_parameters()]
    assert len(parameters) == 2 * 2 * 7
    expected = slow(policy.model)
    found = scored(scorer)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    weights = torch.linspace(-1, 1, len(COMPLETION))
    wanted = torch.autograd.grad((expected * weights).sum(), parameters)
    for gradient, right in zip(torch.autograd.grad((found * weights).sum(), parameters), wanted, strict=True):
        torch.testing.assert_close(gradient, right, atol=1e-4, rtol=1e-3)


@KINDS
@pytest.mark.parametrize("engine", ["builtin", "transformers"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_an_update_reaches_the_sampler_and_the_reference_is_the_base_without_it(tiny_llama, tmp_path, kind, engine, dropout):
    policy, config = adapted(in_few_bits(tiny_llama(), kind, tmp_path), dropout=dropout), settings(kl={"beta": 0.1})
    config.rollout.engine = engine  # type: ignore[assignment]
    with torch.no_grad():
        at_first = slow(policy.model)
    learner = Learner(make_scorer(policy, config.model), config)
    assert isinstance(learner.scorer, MergedDecoder) == (dropout == 0), "an adapter with dropout is learnt by the module"
    sampler = make_engine(policy, config.rollout, learner.scorer)

    def sample() -> tuple[Any, ...]:
        return sampler.sample([PROMPT], 8, SamplingSettings(max_tokens=8), seed=0, scope="x")[0]

    def mismatch(completions: tuple[Any, ...]) -> float:
        with torch.no_grad():
            return max(float((scored(learner.scorer, c.token_ids) - torch.tensor(c.logprobs)).abs().max()) for c in completions)

    before = sample()
    assert mismatch(before) < 1e-4
    kept = {n: p.detach().clone() for n, p in base_module(policy.model).named_parameters() if "lora_" not in n}
    for _ in range(3):
        learner.learn([Group(PROMPT, before, tuple(float(len(set(c.token_ids))) for c in before))])
        sampler.refresh(learner.updates)
    assert mismatch(before) > 0.05, "the policy was to move"
    assert mismatch(sample()) < 1e-4, "what is sampled is the policy as it is now"
    assert learner.reference is not None
    torch.testing.assert_close(scored(learner.reference), at_first, atol=1e-4, rtol=1e-4)
    for name, parameter in base_module(policy.model).named_parameters():
        assert "lora_" in name or torch.equal(parameter, kept[name]), name


def test_what_bf16_samples_is_what_it_scores_and_half_a_step_of_its_grid_is_not_lost(tiny_llama):
    policy = adapted(tiny_llama().to(torch.bfloat16))
    scorer = make_scorer(policy, ModelConfig())
    layer = base_module(policy.model).model.layers[0].self_attn.q_proj
    base = layer.base_layer.weight.detach()
    assert torch.equal(merged_weight(layer), base), "an adapter that adds nothing changes nothing"
    with torch.no_grad():
        for part, size in ((layer.lora_A, 0.07), (layer.lora_B, 1e-3)):
            weight = part["default"].weight
            weight.copy_(size * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    added = layer.get_delta_weight("default").detach().float()
    nearest = (base.float() + added).bfloat16().float() - base.float()
    found = merged_weight(layer).float() - base.float()
    towards = added.flatten() / added.norm() ** 2
    assert float(nearest.flatten() @ towards) < 0.8, "rounding to the nearest keeps part of so small a change"
    assert float(found.flatten() @ towards) == pytest.approx(1, abs=0.05)
    assert torch.equal(merged_weight(layer), merged_weight(layer))
    completions = make_engine(policy, Config().rollout, scorer).sample(
        [PROMPT], 4, SamplingSettings(max_tokens=8), seed=0, scope="x"
    )[0]
    with torch.no_grad():
        for c in completions:
            assert (scored(scorer, c.token_ids) - torch.tensor(c.logprobs)).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dithering_takes_one_of_the_two_neighbours_and_on_average_the_number_itself(dtype):
    exact = torch.linspace(0.5, 1, 256 * 256).view(256, 256) * torch.tensor([1.0, -1.0]).repeat(128)
    found = dithered(exact.clone(), dtype).float()
    step = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    assert (found - exact).abs().max() < step
    assert abs(float((found - exact).abs().mean()) / step - 1 / 3) < 0.02
    assert abs(float(((found - exact) * exact.sign()).mean())) < step / 100
    held = exact.to(dtype)
    assert torch.equal(dithered(held.float(), dtype), held)


@KINDS
def test_the_export_is_the_model_that_was_sampled_and_the_adapter_lies_beside_it(tiny_llama, tmp_path, kind):
    policy = adapted(in_few_bits(tiny_llama(), kind, tmp_path / "base"), filled=True)
    save_model(policy, tmp_path / "out")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert not hasattr(whole.config, "quantization_config")
    again = peft.PeftModel.from_pretrained(
        in_few_bits(tiny_llama(), kind, tmp_path / "again"), tmp_path / "out" / "adapter"
    ).eval()
    with torch.no_grad():
        torch.testing.assert_close(slow(whole), slow(policy.model), atol=1e-4, rtol=1e-4)
        assert torch.equal(slow(again), slow(policy.model))
    weights = dict(whole.named_parameters())
    for name, layer in base_module(policy.model).named_modules():
        if hasattr(layer, "lora_A"):
            assert torch.equal(weights[f"{name}.weight"], merged_weight(layer, dtype=torch.float32)), name
    assert len(quantised_layers(policy.model)) == 14, "saving leaves the policy as it is"


@KINDS
@pytest.mark.parametrize(
    "more",
    [{"use_dora": True}, {"modules_to_save": ["lm_head"]}, {"target_modules": ["q_proj", "down_proj", "embed_tokens"]}],
    ids=["dora", "head", "embedding"],
)
@pytest.mark.filterwarnings("ignore")
def test_the_export_of_an_adapter_of_more_than_two_factors_is_not_rounded_again(tiny_llama, tmp_path, kind, more):
    if kind == "4bit" and "use_dora" in more:
        pytest.skip("peft takes DoRA's norms by bitsandbytes' kernel, which is wrong on CPUs for rows as short as these")
    base = in_few_bits(tiny_llama(tie_word_embeddings=False), kind, tmp_path / "base")
    config = {"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM", **more}
    policy = Policy(attach(base, peft.LoraConfig(**config)).eval(), Plain(), (2,), 256, "tiny")
    with torch.no_grad():
        wanted = slow(policy.model)
        save_model(policy, tmp_path / "out")
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
        assert not hasattr(whole.config, "quantization_config")
        torch.testing.assert_close(slow(whole), wanted, atol=1e-4, rtol=1e-4)
        assert torch.equal(slow(policy.model), wanted), "saving leaves the policy as it is"


@KINDS
def test_a_quantised_model_alone_is_sampled_and_saved_whole(tiny_qwen2, tmp_path, kind):
    model = in_few_bits(tiny_qwen2(), kind, tmp_path)
    policy = Policy(model, Plain(), (2,), 256, "tiny")
    engines = [make_engine(policy, Config(rollout={"engine": e}).rollout) for e in ("builtin", "transformers")]  # type: ignore[arg-type]
    first, second = (e.sample([PROMPT], 3, SamplingSettings(max_tokens=6), seed=0, scope="x")[0] for e in engines)
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    with torch.no_grad():
        torch.testing.assert_close(slow(merged(model)), slow(copy.deepcopy(model)), atol=1e-5, rtol=1e-4)


@KINDS
def test_files_that_are_quantised_already_are_loaded_as_they_are(tmp_path, kind):
    whole = AutoModelForCausalLM.from_pretrained(write_tiny_llama(tmp_path), dtype=torch.float32)
    quantised = in_few_bits(whole, kind, tmp_path / "whole")
    quantised.save_pretrained(tmp_path)
    policy = load_policy(ModelConfig(name=str(tmp_path), dtype="float32", device="cpu", lora=LoraConfig(rank=4)))
    layers = [quantised_layers(model) for model in (policy.model, quantised)]
    assert len(layers[0]) == len(layers[1]) == 14
    for found, wanted in zip(*layers, strict=True):
        assert torch.equal(dense_weight(found, torch.float32), dense_weight(wanted, torch.float32))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["none", "4bit", "8bit"])
def test_the_merged_export_of_the_real_small_model_gives_the_same_logits(embedded_model_folder, tmp_path, kind):
    """In fp32, where merging rounds nothing away: what plain transformers computes from the folder is what base and adapter give."""
    base = AutoModelForCausalLM.from_pretrained(embedded_model_folder, dtype=torch.float32).eval()
    if kind != "none":
        base = in_few_bits(base, kind, tmp_path / "base")
    policy = adapted(base, filled=True, rank=16, alpha=32)
    save_model(policy, tmp_path / "out")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = torch.tensor([[*range(100, 140)]])
    with torch.no_grad(), policy.model.disable_adapter():
        without = policy.model(input_ids=ids, use_cache=False).logits
    with torch.no_grad():
        expected, found = (m(input_ids=ids, use_cache=False).logits for m in (policy.model, whole))
    assert (expected - without).abs().max() > 1, "the adapter matters"
    print(f"{kind}: logits differ by at most {float((found - expected).abs().max()):.1e} of {float(expected.abs().max()):.1f}")
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)
