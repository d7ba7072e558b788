"""A model laid over memory and disk computes what it does in one piece, and only where nothing is learnt."""

import gc
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from groupwise.config.schema import Config, ModelConfig
from groupwise.engines import SamplingSettings, make_engine
from groupwise.engines.transformers import TransformersEngine
from groupwise.errors import ConfigError
from groupwise.models.devices import has_device_map
from groupwise.models.load import load_policy
from groupwise.training.setup import prepare
from groupwise.types import Problem, Prompt
from tests.tiny import write_tiny_llama
from tests.warm import python

pytest.importorskip("accelerate")

PROMPT = Prompt(Problem(id="p", question="?", answer=""), "?", (5, 9, 3, 17))


@pytest.fixture
def folder(tmp_path):
    return write_tiny_llama(tmp_path / "model")


def spread(folder, memory="85KB"):
    return ModelConfig(name=str(folder), dtype="float32", device="cpu", device_map="auto", max_memory={"cpu": memory})


def test_layers_on_the_disk_give_the_same_samples(folder):
    whole = load_policy(ModelConfig(name=str(folder), dtype="float32", device="cpu"))
    parts = load_policy(spread(folder))
    assert "disk" in parts.model.hf_device_map.values()
    assert parts.device == torch.device("cpu")
    rollout, settings = Config().rollout, SamplingSettings(max_tokens=6)
    engine = make_engine(parts, rollout)
    assert isinstance(engine, TransformersEngine)
    found, right = (e.sample([PROMPT], 3, settings, seed=0, scope="x")[0] for e in (engine, make_engine(whole, rollout)))
    assert [c.token_ids for c in found] == [c.token_ids for c in right]
    for one, other in zip(found, right, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    with pytest.raises(ConfigError, match="its weights lie on several devices"):
        make_engine(parts, Config(rollout={"engine": "builtin"}).rollout)


def test_the_folder_on_the_disk_goes_with_the_model(folder, tmp_path, monkeypatch):
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    policy = load_policy(spread(folder))
    kept = list(place.iterdir())
    assert not has_device_map(load_policy(spread(folder, "1GB")).model), "it fits, and then lies in one piece"
    assert list(place.iterdir()) == kept
    del policy
    gc.collect()
    assert not list(place.iterdir())


def test_training_refuses_it_before_anything_is_loaded():
    with pytest.raises(ConfigError, match=r"model.device_map is auto, .*leave it out"):
        prepare(Config(model={"name": "no/such-model", "device_map": "auto"}))


@pytest.mark.slow
def test_the_command_generates_with_it(folder):
    def say(*options):
        command = [
            python(),
            "-m",
            "groupwise",
            "generate",
            str(folder),
            "one two",
            "--max-tokens",
            "8",
            "--seed",
            "3",
            *options,
        ]
        return subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])

    assert say("--device-map", "auto").stdout == say().stdout != ""
    refused = say("--device-map", "auto", "--num-processes", "2")
    assert refused.returncode == 2
    assert "leave one of the two out" in refused.stderr
