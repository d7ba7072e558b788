"""A run whose completions come from a sampling server."""

from __future__ import annotations

import json

import pytest
from transformers import AutoModelForCausalLM

from groupwise import train
from groupwise.engines.vllm.server import Server
from groupwise.engines.vllm.service import Service
from groupwise.errors import ConfigError
from tests.engines.vllm.model_backend import ModelBackend


@pytest.fixture
def server(tiny_folder, tmp_path):
    backend = ModelBackend(AutoModelForCausalLM.from_pretrained(tiny_folder))
    server = Server(Service(backend, spool=tmp_path))
    yield server
    server.close()


def test_it_learns_from_a_server_as_from_its_own_engine(server, small_config, letters, quiet, tmp_path):
    """The server samples other tokens from the same seeds, so curves differ; every step is sampled from the step before it."""
    config = small_config(
        rollout={"engine": "vllm", "vllm": {"url": server.url}}, training={"steps": 12}, optimizer={"learning_rate": 1e-2}
    )
    steps = []
    train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run", on_step=steps.append)
    versions = [{c.policy_version for g in step.groups for c in g.completions} for step in steps]
    assert versions == [{i} for i in range(12)]
    assert server.service.backend.loads == 13  # once at the start, once after every update
    for step in steps:
        assert step.metrics["policy/sampler_mismatch"] < 1e-4
        assert step.metrics["policy/correction"] == pytest.approx(1, abs=1e-3)
        assert 0 <= step.metrics["policy/sampler_kl"] < 1e-6
        assert step.metrics["policy/push_probe"] < 1e-3
        assert step.metrics["time/push_s"] > 0
        assert 0 <= step.metrics["completions/prompt_cached"] <= 1
    rewards = [step.metrics["reward/mean"] for step in steps]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    kept = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert "policy/push_probe" in json.dumps(kept)


def test_a_server_that_is_not_there_is_told_before_weights_are_read(small_config, letters, quiet, tmp_path):
    config = small_config(rollout={"engine": "vllm", "vllm": {"url": "http://127.0.0.1:9"}})
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.url .*nobody answers"):
        train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
