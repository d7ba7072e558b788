"""What cannot be trained is refused before anything is read, and a rate meant for something else is told."""

import json

import pytest

from groupwise.config.combinations import notes
from groupwise.config.schema import Config
from groupwise.errors import ConfigError
from groupwise.training.setup import prepare
from tests.tiny import tiny_config, write_tiny_llama, write_tiny_mixture


@pytest.mark.parametrize("kind", ["4bit", "8bit"])
def test_a_quantised_base_without_an_adapter_is_refused_in_training(kind):
    with pytest.raises(ConfigError, match=rf"model.quantization is {kind} and model.lora is null.*add 'model.lora="):
        prepare(Config(model={"name": "no/such-model", "quantization": kind}))


IN_4_BITS = {"quant_method": "bitsandbytes", "load_in_4bit": True}


@pytest.mark.parametrize(
    ("stored", "model", "complaint"),
    [
        ({"quant_method": "fp8"}, {"lora": {"rank": 4}}, "quantised by fp8, .* name the model that it was made of"),
        (IN_4_BITS, {}, r"quantised \(4bit\) and model.lora is null.*add 'model.lora="),
        (IN_4_BITS, {"lora": {"rank": 4}, "quantization": "8bit"}, "model.quantization is 8bit, .* quantised already"),
    ],
)
def test_weights_that_are_quantised_already_are_refused_by_their_config(tmp_path, sums, letters, stored, model, complaint):
    path = write_tiny_llama(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": stored}))
    with pytest.raises(ConfigError, match=complaint):
        prepare(tiny_config(tmp_path, sums, model=model))
    critic = {"preset": "ppo", "value": {"critic": str(tmp_path)}}
    with pytest.raises(ConfigError, match="name the model that it was made of"):
        prepare(tiny_config(write_tiny_llama(tmp_path / "plain"), sums, algorithm=critic), letters)


def test_a_base_that_bitsandbytes_has_quantised_already_is_taken_as_one_that_is_quantised_here(tmp_path, sums, letters):
    pytest.importorskip("bitsandbytes")
    path = write_tiny_llama(tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": IN_4_BITS}))
    assert prepare(tiny_config(tmp_path, sums, model={"lora": {"rank": 4}}), letters).config.model.quantization == "4bit"


@pytest.mark.parametrize(
    ("model", "processes", "complaint"),
    [
        ({"lora": {"rank": 4}, "quantization": "4bit"}, 1, "is sent plain weights, but model.quantization is 4bit"),
        ({}, 2, "is for one process, but there are 2"),
    ],
)
def test_what_vllm_cannot_sample_is_refused_before_weights_are_read(tmp_path, sums, model, processes, complaint):
    if model:
        pytest.importorskip("bitsandbytes")
    config = tiny_config(write_tiny_llama(tmp_path), sums, model=model, rollout={"engine": "vllm"})
    with pytest.raises(ConfigError, match=complaint):
        prepare(config, processes=processes)


def test_experts_that_an_adapter_leaves_alone_are_told(tmp_path, sums, letters):
    pytest.importorskip("transformers", minversion="5", reason="before, experts are linear layers")
    for folder, leaves in ((write_tiny_mixture(tmp_path / "mixture"), True), (write_tiny_llama(tmp_path / "dense"), False)):
        found = prepare(tiny_config(folder, sums, model={"lora": {"rank": 4}}), letters).notes
        assert any("leaves the experts" in note for note in found) == leaves


def test_a_rate_for_all_weights_is_told_where_an_adapter_is_trained():
    def told(**optimizer):
        config = Config(model={"lora": {"rank": 4}}, optimizer=optimizer)
        return [note for note in notes(config) if "rate for all weights" in note]

    assert told(), "the default rate is one for all weights"
    assert told(learning_rate=2e-6)
    assert not told(learning_rate=5e-5)
