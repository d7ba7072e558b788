"""Who says how weights are divided, what is refused, and where the rows are."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, LlamaConfig, MistralConfig

from groupwise.distributed import World
from groupwise.distributed.sharding import chosen_sharding, sharding_of_launcher
from groupwise.errors import ConfigError
from groupwise.models.load import load_policy
from groupwise.models.scorer import make_scorer
from groupwise.training.sharding import check_sharding
from groupwise.training.sharding.divided import Divided, read_rows, rows_of
from groupwise.training.sharding.fsdp2 import check_fsdp2
from tests.distributed.conftest import small_config

FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
LLAMA = LlamaConfig()

__all__ = ["small_config"]


def test_the_launcher_decides_where_the_settings_leave_it_to_it():
    assert chosen_sharding("auto", 2, {}) == "none"
    assert chosen_sharding("auto", 2, FSDP2) == "fsdp2"
    assert chosen_sharding("fsdp2", 2, {}) == "fsdp2"
    assert chosen_sharding("fsdp2", 1, {}) == "none", "a world of one divides nothing"
    assert sharding_of_launcher({"ACCELERATE_USE_FSDP": "false"}) is None
    plain = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}  # as it always sets them
    of_fsdp = {"FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_OFFLOAD_PARAMS": "false", "FSDP_ACTIVATION_CHECKPOINTING": "false"}
    assert sharding_of_launcher(plain) is None
    assert sharding_of_launcher(FSDP2 | plain | of_fsdp | {"PARALLELISM_CONFIG_TP_SIZE": "1"}) == "fsdp2"


@pytest.mark.parametrize(
    ("setting", "environment", "said"),
    [
        ("none", FSDP2, "training.sharding is none, but the configuration of accelerate launch asks for fsdp2"),
        ("auto", {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "1"}, "fsdp_version: 2"),
        ("auto", {"ACCELERATE_USE_FSDP": "true"}, "fsdp_version: 2"),
        ("auto", {"ACCELERATE_MIXED_PRECISION": "fp16"}, "mixed_precision to fp16"),
        ("auto", {**FSDP2, "ACCELERATE_MIXED_PRECISION": "bf16"}, "set model.dtype"),
        ("auto", {**FSDP2, "FSDP_OFFLOAD_PARAMS": "true"}, "fsdp_offload_params"),
        ("auto", {**FSDP2, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "model.gradient_checkpointing=true"),
        ("auto", {**FSDP2, "FSDP_RESHARD_AFTER_FORWARD": "false"}, "fsdp_reshard_after_forward to false"),
        ("auto", {**FSDP2, "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "2"}, "parallelism_config_dp_replicate_size to 2"),
        ("auto", {**FSDP2, "PARALLELISM_CONFIG_TP_SIZE": "2"}, "parallelism_config_tp_size to 2"),
        ("auto", {"ACCELERATE_USE_MEGATRON_LM": "true"}, "use_megatron_lm to true"),
        ("auto", {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}, "dynamo_backend to INDUCTOR"),
    ],
)
def test_what_the_launcher_asks_for_is_honoured_or_refused(setting, environment, said):
    with pytest.raises(ConfigError, match=said):
        chosen_sharding(setting, 2, environment)


@pytest.mark.parametrize(
    ("sections", "kind", "said"),
    [
        ({"model": {"lora": {"dropout": 0.1}}}, "llama", "model.lora.dropout=0.1"),
        ({"model": {"lora": {}, "quantization": "4bit"}}, "llama", "model.quantization=4bit"),
        ({}, "gemma2", "architecture 'gemma2' is not one of llama"),
        ({"rollout": {"engine": "transformers"}}, "llama", "rollout.engine"),
        ({"optimizer": {"precision": "masters-8bit"}}, "llama", "masters-8bit"),
        ({"optimizer": {"offload": True}}, "llama", "optimizer.offload"),
        ({"training": {"offload_reference": True}}, "llama", "training.offload_reference"),
        ({"algorithm": {"advantage": {"type": "gae"}, "value": {"critic": "copy"}}}, "llama", "algorithm.value.critic=copy"),
    ],
)
def test_what_fsdp2_does_not_go_with_is_refused_in_a_sentence(small_config, sections, kind, said):
    with pytest.raises(ConfigError, match=said):
        check_fsdp2(small_config(**sections), AutoConfig.for_model(kind))


def test_one_gpu_for_several_processes_is_refused(small_config):
    config = small_config(model={"device": "cuda:1"})
    check_sharding(config, LLAMA, 1)
    with pytest.raises(ConfigError, match=r"model\.device is 'cuda:1', but each of the 2 processes needs a GPU of its own"):
        check_sharding(config, LLAMA, 2)


def test_what_the_lean_decoder_does_not_compute_is_not_divided(small_config):
    check_fsdp2(small_config(), MistralConfig())
    with pytest.raises(ConfigError, match="this model \\(activation 'gelu' is not one of silu"):
        check_fsdp2(small_config(), MistralConfig(hidden_act="gelu"))


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"optimizer": {"precision": "pure"}},
        {"algorithm": {"advantage": {"type": "gae"}}},
        {"model": {"lora": {"rank": 4}}},
        {"model": {"lora": {"rank": 4}}, "optimizer": {"offload": True}},
    ],
)
def test_what_fsdp2_goes_with_is_not(small_config, sections):
    check_fsdp2(small_config(**sections), LLAMA)


@pytest.mark.parametrize("length", [1, 2, 5, 7, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_rows_are_where_torch_puts_them(length, size):
    tensor = torch.arange(length)
    chunks = [*tensor.chunk(size), *[tensor[:0]] * size][:size]
    for rank, chunk in enumerate(chunks):
        first, end = rows_of(length, rank, size)
        assert tensor[first:end].tolist() == chunk.tolist()


def test_a_process_reads_its_rows_of_a_file_of_whole_tensors(tmp_path):
    weight, step = torch.randn(5, 3), torch.tensor(7.0)
    save_file({"exp_avg.layers.0.down": weight, "step.layers.0.down": step, "other": weight + 1}, tmp_path / "x.safetensors")
    found = read_rows(tmp_path / "x.safetensors", {"layers.0.down": (weight.shape, (3, 5))})
    assert torch.equal(found["exp_avg.layers.0.down"], weight[3:5])
    assert torch.equal(found["step.layers.0.down"], step)
    assert torch.equal(found["other"], weight + 1)


def test_blocks_compute_what_the_decoder_did_and_a_filled_copy_is_the_module_it_came_from(small_config):
    """The module is hollow in between: it holds one number a tensor."""
    from groupwise.models.layer import copy_filled

    policy = load_policy(small_config().model)
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    decoder = make_scorer(policy, small_config().model)
    batch = decoder.prepare([([5, 6, 7], [[8, 9], [10, 11, 12]])])
    wanted = decoder.logprobs(batch)
    names = [name for name, _ in decoder.named_parameters()]
    decoder.to_modules()
    assert [name for name, _ in decoder.named_parameters()] == names
    assert torch.equal(decoder.logprobs(batch), wanted)
    assert all(p.untyped_storage().nbytes() <= 4 for p in policy.model.parameters())
    full = copy_filled(policy.model, decoder.views, {name: p.detach() for name, p in decoder.named_parameters()})
    found = dict(full.named_parameters())
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], value) for name, value in before.items())
    assert full.lm_head.weight is full.model.embed_tokens.weight


def test_a_whole_policy_computes_on_the_cpu_whatever_attention_the_model_has(small_config):
    """Kernels for GPUs alone are not the copy's: what is pushed to vLLM is tried with it."""
    policy = load_policy(small_config().model)
    ids = torch.tensor([[5, 6, 7, 8]])
    wanted = policy.model(input_ids=ids).logits
    decoder = make_scorer(policy, small_config().model)
    decoder.to_modules()
    policy.model.config._attn_implementation = "flash_attention_2"
    weights = {name: p.detach() for name, p in decoder.named_parameters()}
    whole = Divided.whole_policy(SimpleNamespace(world=World(), scorer=decoder, whole_weights=lambda: weights), policy)
    torch.testing.assert_close(whole.model(input_ids=ids).logits, wanted)
    assert policy.model.config._attn_implementation == "flash_attention_2"
