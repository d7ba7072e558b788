"""Adapters that are sent alone, over a base that was sent once."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from groupwise.config import load_config
from groupwise.engines.base import SamplingSettings
from groupwise.engines.vllm.backend import _Adapters, _Load
from groupwise.engines.vllm.client import Client
from groupwise.engines.vllm.engine import VllmEngine
from groupwise.engines.vllm.pushing import adapter_alone, named_weights
from groupwise.engines.vllm.transfer import Adapter
from groupwise.models.adapters import AdapterScorer, attach, base_module, peft_config_of
from groupwise.models.load import Policy
from groupwise.models.merging import is_adapted_layer, merged_weight
from tests.engines.with_vllm.test_worker import Recorder

SAMPLED = SamplingSettings(max_tokens=6)


@pytest.fixture
def adapted(tiny_llama):
    def make(rank=4, **lora):
        settings = {"rank": rank, "alpha": 12, **lora}
        model = attach(tiny_llama(), peft_config_of(load_config(None, [f"model.lora={json.dumps(settings)}"]).model.lora))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
        return model

    return make


def sent_bytes(server):
    sizes, bucket = [], server.service.bucket
    server.service.bucket = lambda *part: sizes.append(len(part[2])) or bucket(*part)
    return sizes


def agrees(model, backend):
    held = dict(backend.model.named_parameters())
    for name, expected in named_weights(model):
        torch.testing.assert_close(held[name], expected, atol=1e-5, rtol=1e-5)


def test_a_merged_adapter_is_pushed_as_it_is_learnt(adapted):
    """Dithered: to the nearest, what a young adapter adds to bf16 weights would not arrive."""
    model = adapted().bfloat16()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.mul_(1e-3)
    layers = {name: layer for name, layer in base_module(model).named_modules() if is_adapted_layer(layer)}
    pushed = dict(named_weights(model))
    assert layers
    for name, layer in layers.items():
        weight = pushed[f"{name}.weight"]
        assert torch.equal(weight, merged_weight(layer))
        assert not torch.equal(weight, layer.base_layer.weight)


def test_the_probe_scores_without_the_dropout_of_learning(serve, engine_over, tiny_llama, adapted):
    """It stays on behind a pass with gradients, whose backward pass may compute anew."""
    model = adapted(dropout=0.5)
    engine, scorer = engine_over(serve(tiny_llama()), model), AdapterScorer(model)
    scorer.score(scorer.prepare([((3, 4, 5), [(7, 8, 9, 2)])]))
    engine.metrics()
    engine.refresh(1)
    assert engine._push_s > 0
    assert engine._probed < 1e-3


def test_the_whole_policy_is_collected_for_the_server_where_the_adapter_alone_is_saved(serve, tiny_llama, adapted, tokenizer):
    policy = Policy(adapted(), tokenizer, (2, 5), context_length=256, name="some/model", adapter_only=True)
    collected = []
    engine = VllmEngine(policy, Client(serve(tiny_llama()).url), collect=lambda asked: collected.append(asked) or asked)
    assert [asked.adapter_only for asked in collected] == [False]
    assert not engine.divided, "a server that was restarted can be sent it again"
    assert policy.adapter_only, "what is saved is the run's own affair"
    engine.close()


def test_the_base_goes_once_and_then_the_factors_alone(serve, engine_over, tiny_llama, adapted, make_prompts, shifted, scored):
    model, server, prompts = adapted(), serve(tiny_llama(), adapter_rank=8), make_prompts([4])
    sizes = sent_bytes(server)
    engine = engine_over(server, model)
    first, factors = list(sizes), sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert sum(first) > 3 * factors, "base and factors"
    for version in (1, 2):
        sizes.clear()
        shifted(model)
        engine.refresh(version)
        assert factors < sum(sizes) < 1.5 * factors + 8192
        agrees(model, server.backend)
        ((one, _),) = engine.sample(prompts, 2, SAMPLED, seed=1, scope="s")
        torch.testing.assert_close(torch.tensor(one.logprobs), scored(model, prompts[0], one), atol=1e-4, rtol=1e-4)
    assert (server.backend.loads, server.backend.adapters) == (1, 3)


def test_a_server_that_was_restarted_gets_the_base_again(serve, engine_over, tiny_llama, adapted, shifted):
    model, server = adapted(), serve(tiny_llama(), adapter_rank=8)
    engine = engine_over(server, model)
    server.close()
    other = serve(tiny_llama(), port=server.port, adapter_rank=8)
    shifted(model)
    engine.refresh(1)
    agrees(model, other.backend)
    assert (other.backend.loads, other.backend.adapters) == (1, 1)


def test_whole_weights_of_another_run_are_no_base(serve, engine_over, tiny_llama, adapted):
    server = serve(tiny_llama(), adapter_rank=8)
    engine_over(server, tiny_llama()).close()
    model = adapted()
    engine_over(server, model)
    agrees(model, server.backend)
    assert (server.backend.loads, server.backend.adapters) == (2, 1)


def test_where_the_adapter_is_not_taken_it_is_merged(serve, engine_over, tiny_llama, adapted, shifted, caplog):
    model, server = adapted(), serve(tiny_llama(), adapter_rank=8)

    def refused(adapter, label):
        raise ValueError("no room for it")

    server.backend.add = refused
    with caplog.at_level(logging.WARNING, "groupwise"):
        engine = engine_over(server, model)
        shifted(model)
        engine.refresh(1)
    agrees(model, server.backend)
    (record,) = caplog.records
    assert "does not take the adapter alone (the weights" in record.getMessage()
    assert record.getMessage().endswith("no room for it): it is merged from here on")


@pytest.mark.parametrize("rank", [0, 2, 4])
def test_only_a_server_with_room_for_the_rank_gets_it_alone(adapted, tiny_llama, rank):
    model = adapted(rank=4)
    assert (adapter_alone(model, {"adapter_rank": rank}) is not None) is (rank == 4)
    assert adapter_alone(tiny_llama(), {"adapter_rank": 64}) is None


@pytest.mark.parametrize("change", [{"rank_pattern": {"q_proj": 2}}, {"alpha_pattern": {"q_proj": 2}}])
def test_an_adapter_that_differs_by_layer_is_merged(adapted, change):
    model = adapted()
    for name, value in change.items():
        setattr(model.peft_config["default"], name, value)
    assert adapter_alone(model, {"adapter_rank": 64}) is None


def test_factors_have_the_names_of_peft_s_own_files(adapted, tmp_path):
    model = adapted(target_modules=["q_proj", "down_proj"])
    model.save_pretrained(tmp_path)
    found, factors = adapter_alone(model, {"adapter_rank": 64})
    written = load_file(tmp_path / "adapter_model.safetensors")
    assert {name: t.shape for name, t in factors()} == {name: t.shape for name, t in written.items()}
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for name, value in found.config.items():
        expected = config[name]
        assert (sorted(expected) if name == "target_modules" else expected) == value


def test_vllm_is_given_each_adapter_as_a_folder_under_a_number_of_its_own(tmp_path, monkeypatch):
    seen, file = [], tmp_path / "0.safetensors"
    save_file({"a": torch.ones(2)}, file)

    class Request(SimpleNamespace):
        def __init__(self, lora_name, lora_int_id, lora_path):
            super().__init__(lora_int_id=lora_int_id, path=lora_path)
            files = {path.name: path.read_bytes() for path in __import__("pathlib").Path(lora_path).iterdir()}
            seen.append((lora_int_id, files))

    monkeypatch.setitem(__import__("sys").modules, "vllm", SimpleNamespace())
    monkeypatch.setitem(__import__("sys").modules, "vllm.lora", SimpleNamespace())
    monkeypatch.setitem(__import__("sys").modules, "vllm.lora.request", SimpleNamespace(LoRARequest=Request))
    adapters, engine = _Adapters(), Recorder(add_lora=True)
    for number in (1, 2):
        load = _Load(Adapter({"r": 4}, [str(file)]), f"run:{number}", adapters)
        load.run(engine)
        load.result.result()
    expected = {"adapter_config.json": b'{"r": 4}', "adapter_model.safetensors": file.read_bytes()}
    assert seen == [(1, expected), (2, expected)]
    assert [name for name, *_ in engine.asked] == [
        "is_sleeping", "add_lora", "reset_prefix_cache", "set_weight_version", "is_sleeping", "remove_lora", "add_lora",
        "reset_prefix_cache", "set_weight_version",
    ]  # fmt: skip
    assert adapters.request.lora_int_id == 2
    whole = _Load(["a"], "run:3", adapters)
    whole.run(engine)
    assert adapters.request is None, "whole weights stand by themselves"
    load = _Load(Adapter({"r": 4}, [str(file)]), "run:4", adapters)
    load.run(Recorder(add_lora=False))
    with pytest.raises(ValueError, match="did not take the adapter"):
        load.result.result()
