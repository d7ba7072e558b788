"""Two real processes, each with a half of the weights, that sample from one server: the whole is pushed, and the run is that of one."""

from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from groupwise.engines.vllm.server import Server
from groupwise.engines.vllm.service import Service
from groupwise.training.loop import train
from tests.distributed.run_ranks import letters
from tests.distributed.two_processes import launch_two, said
from tests.engines.with_vllm.model_backend import ModelBackend


@pytest.fixture
def server(tiny_folder, tmp_path):
    server = Server(Service(ModelBackend(AutoModelForCausalLM.from_pretrained(tiny_folder)), spool=tmp_path))
    yield server
    server.close()


@pytest.mark.soak
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("lora", "alone"), [(None, False), ({"rank": 4, "alpha": 8}, False), ({"rank": 4, "alpha": 8}, True)])
def test_halves_of_the_weights_are_pushed_as_a_whole(server, small_config, tmp_path, lora, alone, ahead):
    """``alone``: also where the adapter alone is saved."""
    rollout = {"engine": "vllm", "vllm": {"url": server.url}, "ahead": ahead}
    sections = {"rollout": rollout, "output": {"log_completions": 100, "adapter_only": alone}, "model": {"lora": lora}}
    one = tmp_path / "one"
    train(small_config(**sections), rewards={"letters": letters}, run_folder=one, console=Console(quiet=True))
    loads = server.service.backend.loads
    config = small_config(**sections, training={"steps": 2, "sharding": "fsdp2"})
    two = tmp_path / "two"
    assert launch_two(config, tmp_path, two, script=Path(__file__).with_name("run_once.py")) == 0
    assert said(one) == said(two)
    assert server.service.backend.loads == 2 * loads
    file = "adapter/adapter_model.safetensors" if alone else "model.safetensors"
    ones, twos = (load_file(folder / "final_model" / file) for folder in (one, two))
    for name, tensor in ones.items():
        torch.testing.assert_close(twos[name], tensor, rtol=1e-4, atol=1e-5)
