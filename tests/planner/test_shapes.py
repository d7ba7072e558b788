"""A model's shape from its config.json: as many weights as transformers counts, and no plan for what would be counted wrongly."""

import json
import math
import re
from collections import Counter

import huggingface_hub
import huggingface_hub.errors
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, Qwen2Config

from groupwise.config import load_config
from groupwise.config.schema import ModelConfig
from groupwise.errors import ModelError
from groupwise.models.decoder import Decoder, why_unsupported
from groupwise.models.families import FAMILIES
from groupwise.models.load import context_length, load_model_config
from groupwise.planner import HARDWARE, KNOWN_SHAPES, find_shape, make_plan
from groupwise.planner.shape import ModelShape, shape_of_config


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", *(f"Qwen/Qwen2.5-{size}" for size in ("0.5B", "7B"))])
def test_known_models_have_the_weights_that_transformers_counts(name):
    shape = KNOWN_SHAPES[name]
    made = {
        "hidden_size": shape.width, "intermediate_size": shape.feed_forward, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "vocab_size": shape.vocabulary,
        "tie_word_embeddings": shape.tied, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
        "max_position_embeddings": shape.context, "dtype": shape.file_dtype,
    }  # fmt: skip
    config = LlamaConfig(**made) if shape.architecture == "llama" else Qwen2Config(**made)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    assert shape_of_config(config.to_dict(), name) == shape


def test_the_plan_has_the_context_that_training_has(tmp_path, tiny_llama):
    tiny_llama().config.save_pretrained(tmp_path)
    for name in ("smollm2-135m-instruct", str(tmp_path)):
        config = ModelConfig(name=name)
        assert find_shape(config).context == context_length(load_model_config(config)) < 2**20, name


def test_the_published_sizes_of_qwen():
    published = {"0.5B": 0.49e9, "1.5B": 1.54e9, "3B": 3.09e9, "7B": 7.62e9, "14B": 14.8e9, "32B": 32.8e9, "72B": 72.7e9}
    for size, count in published.items():
        assert KNOWN_SHAPES[f"Qwen/Qwen2.5-{size}-Instruct"].parameters == pytest.approx(count, rel=0.01)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_the_numbers_of_the_files_are_those_that_the_config_names(key, tiny_qwen2):
    values = {k: v for k, v in tiny_qwen2().config.to_dict().items() if k not in ("dtype", "torch_dtype")}
    assert shape_of_config(values, "m").file_dtype == "float32"
    assert shape_of_config({**values, key: "bfloat16"}, "m").file_dtype == "bfloat16"
    assert shape_of_config({"model_type": "gemma3", key: "bfloat16", "text_config": values}, "m").file_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("GatedRepoError", "is gated on the Hub: accept its terms on its page, and log in with `hf auth login`"),
        ("RepositoryNotFoundError", "is neither a folder here nor a public model on the Hub: check the spelling"),
        ("RevisionNotFoundError", "has no revision 'old' on the Hub"),
    ],
)
def test_a_model_that_the_hub_does_not_give_is_refused_as_by_a_run(error, said, monkeypatch):
    answer = type("Response", (), {"headers": {}, "request": None, "status_code": 403})()

    def refuse(*asked, **more):
        raise getattr(huggingface_hub.errors, error)("no", response=answer)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", refuse)
    with pytest.raises(ModelError, match=re.escape(f"model 'nobody/nothing' {said}")):
        find_shape(ModelConfig(name="nobody/nothing", revision="old"))


def test_a_folder_s_config_is_enough(tmp_path, tiny_qwen3):
    model = tiny_qwen3()
    model.config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "qwen3"
    config = load_config(None, [f"model.name={tmp_path}"])
    assert find_shape(config.model).parameters == sum(p.numel() for p in model.parameters())
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(ModelError, match="mamba"):
        find_shape(config.model)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json"):
        find_shape(config.model)


MIXTURES = {"qwen3_moe": {"num_experts": 8}, "mixtral": {"num_local_experts": 4}, "deepseek_v3": {"n_routed_experts": 16}}


@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_of_experts_is_refused_and_not_planned_as_a_small_model(kind):
    """Its config names all that a dense one does; taken for one, Qwen3-30B-A3B would be a model of 2 billion weights that fits anywhere."""
    dense = {
        "model_type": kind, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 99,
    }  # fmt: skip
    with pytest.raises(ModelError, match=f"mixture of {next(iter(MIXTURES[kind].values()))} experts"):
        shape_of_config({**dense, **MIXTURES[kind]}, "m")
    assert shape_of_config({**dense, "num_experts": 1}, "m").layers == 2


@pytest.mark.parametrize("broken", [[], {"num_attention_heads": 0}, {"num_experts": [1]}, {"hidden_size": None}])
def test_a_config_that_describes_no_model_gets_one_sentence(broken):
    whole = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2}
    with pytest.raises(ModelError, match=r"the config of model 'm' .* has no usable"):
        shape_of_config({**whole, **broken} if isinstance(broken, dict) else broken, "m")


def test_a_published_config_that_leaves_out_its_type_s_defaults_can_be_planned():
    """As Gemma 3 of 4B and more has it."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    shape = shape_of_config({"model_type": "gemma3", "text_config": text}, "google/gemma-3-4b-it")
    config = AutoConfig.for_model(**text)
    assert (shape.heads, shape.kv_heads, shape.head_width, shape.vocabulary) == (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.vocab_size,
    )  # fmt: skip
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    assert shape.parameters == pytest.approx(weights, rel=1e-3)
    assert shape.context == config.max_position_embeddings


def test_of_longrope_the_plan_has_the_positions_that_a_run_has():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 131072, "pad_token_id": 0}
    for where in ({"rope_parameters": rope, "original_max_position_embeddings": 4096}, {}):
        config = AutoConfig.for_model("phi3", **sizes, **where)
        assert shape_of_config(config.to_dict(), "m").context == context_length(config) == (4096 if where else 131072)


@pytest.mark.parametrize("family", ["phi3", "gemma", "gemma2", "smollm3", "olmo2", "glm4", "cohere2"])
def test_other_architectures_have_the_weights_that_transformers_counts(family):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = AutoConfig.for_model(family, **sizes, vocab_size=5000, pad_token_id=0)
    with torch.device("meta"):
        weights = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    shape = shape_of_config(config.to_dict(), family)
    assert shape.counted
    assert not shape.lean
    assert shape.parameters == pytest.approx(weights, rel=0.005)


@pytest.mark.parametrize("family", list(FAMILIES))
def test_each_family_has_the_weights_of_its_module(family):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = AutoConfig.for_model(family, **sizes, vocab_size=5000, pad_token_id=0)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of_config(config.to_dict(), family)
    assert shape.lean
    assert shape.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("family", ["gemma", "gemma2", "smollm3", "cohere2"])
def test_a_config_that_does_not_say_whether_it_is_tied(family):
    whole = AutoConfig.for_model(family, vocab_size=5000, pad_token_id=0).to_dict()
    unsaid = {name: value for name, value in whole.items() if name != "tie_word_embeddings"}
    assert shape_of_config(unsaid, family).tied


def test_a_wrapped_text_model_is_computed_by_what_wraps_it():
    text = AutoConfig.for_model("gemma3_text", num_hidden_layers=2).to_dict()
    assert shape_of_config(text, "m").lean
    assert not shape_of_config({"model_type": "gemma3", "text_config": text}, "m").lean


def test_adapters_count_fused_projections_and_both_ends():
    shape = ModelShape(width=64, feed_forward=96, layers=3, heads=4, kv_heads=2, head_width=16, vocabulary=500, tied=False)
    assert shape.adapter(8, ["qkv_proj", "gate_up_proj"]) == 8 * 3 * (64 + 64 + 2 * 32 + 64 + 2 * 96)
    assert shape.adapter(8, ["q_proj", "lm_head"]) == 8 * (3 * (64 + 64) + 64 + 500)


def test_a_config_of_gemma_3_as_it_is_published():
    """Of google/gemma-3-1b-it: the pattern of windows as a number, tied embeddings unsaid."""
    published = {
        "model_type": "gemma3_text", "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
        "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
    }  # fmt: skip
    shape = shape_of_config(published, "gemma-3-1b-it")
    assert shape.lean
    assert shape.parameters == 999_885_952
    windows = FAMILIES["gemma3_text"].windows
    config = AutoConfig.for_model(**published)
    assert windows(published) == windows(config.to_dict())
    assert [layer for layer, window in enumerate(windows(published)) if window is None] == [5, 11, 17, 23]


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("tiny_llama", {}),
        ("tiny_qwen2", {}),
        ("tiny_qwen3", {}),
        ("tiny_mistral", {}),
        ("tiny_mistral", {"sliding_window": 8}),
        ("tiny_gemma3", {}),
        ("tiny_gemma3", {"final_logit_softcapping": 30.0}),
        ("tiny_gemma3", {"hidden_activation": "gelu"}),
        ("tiny_llama", {"hidden_act": "gelu"}),
        ("tiny_llama", {"mlp_bias": True}),
        ("tiny_llama", {"attention_dropout": 0.1}),
        ("tiny_qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
        ("tiny_llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}),
        ("tiny_llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}),
    ],
)
def test_the_plan_knows_what_the_lean_decoder_computes(request, family, settings):
    model = request.getfixturevalue(family)(**settings)
    assert shape_of_config(model.config.to_dict(), "tiny").lean == (why_unsupported(model) is None)


def test_a_type_that_was_never_counted_is_said_to_be_one(tmp_path):
    config = {
        "model_type": "another", "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 2,
        "vocab_size": 99,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = make_plan(load_config(None, [f"model.name={tmp_path}"]), HARDWARE["rtx-4090"])
    assert "the type 'another'" in " ".join(made.assumptions)
    known = make_plan(load_config("quickstart"), HARDWARE["rtx-4090"])
    assert "never counted" not in " ".join(known.assumptions)


def test_windows_are_those_that_the_decoder_computes_by(tiny_gemma3, tiny_mistral, tiny_llama):
    for model in (tiny_gemma3(), tiny_mistral(), tiny_llama()):
        decoder = Decoder(model)
        windows = tuple(decoder.windows[kind] for kind in decoder.kinds)
        found = shape_of_config(model.config.to_dict(), "tiny")
        assert found.windows == (windows if any(windows) else ())
        assert found.layers_by_window == Counter(math.inf if window is None else window for window in windows)
