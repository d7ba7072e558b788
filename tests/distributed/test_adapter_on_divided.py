"""An adapter on a base of which two real processes hold a half each: the numbers of one process, that holds it whole."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from groupwise.models.load import load_policy
from groupwise.models.scorer import make_scorer
from groupwise.training.loop import train
from tests.distributed.run_ranks import letters
from tests.distributed.two_processes import (
    assert_same_bits,
    assert_same_numbers,
    assert_same_run,
    launch_two,
    numbers,
    on_from_step_3,
)
from tests.tiny import tiny_config, write_tiny_qwen2

pytest.importorskip("peft")
WAYS = [
    "fsdp2",
    pytest.param("zero3", marks=pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed")),
]
SECTIONS = {
    "model": {"lora": {"rank": 4, "alpha": 8}},
    "training": {"steps": 5, "micro_batch_tokens": 60},  # so that one process makes more passes than the other
    "output": {"checkpoint_every": 3, "log_completions": 100},
    "algorithm": {"kl": {"beta": 0.04}},
    "optimizer": {"learning_rate": 1e-2},  # an update that does not reach the sampler shows in the next step's tokens
    "warm_start": {"steps": 2, "examples_per_step": 3},
}


@pytest.fixture(scope="module")
def one_process(tiny_folder, sums, tmp_path_factory):
    """The config, and the folder of its run in this process."""
    config = tiny_config(tiny_folder, sums, **SECTIONS)
    folder = tmp_path_factory.mktemp("one")
    return config, train(config, rewards={"letters": letters}, run_folder=folder, console=Console(quiet=True)).folder


@pytest.fixture(scope="module", params=WAYS)
def two_processes(request, one_process, tmp_path_factory):
    """The folder in which two processes left what run_ranks.py says."""
    config, folder = one_process[0], tmp_path_factory.mktemp(request.param)
    sharded = config.model_copy(update={"training": config.training.model_copy(update={"sharding": request.param})})
    assert launch_two(sharded, folder, folder, "sound") == 0
    return folder


@pytest.mark.slow
def test_two_processes_with_half_the_base_each_are_one(one_process, two_processes):
    """Completions token for token, numbers and merged weights to fp32 rounding, and so the adapter's, its masters' and its moments."""
    one, two = one_process[1], two_processes / "whole"
    assert_same_run(one, two)
    for file in ("final_model/adapter/adapter_model.safetensors", "checkpoints/step-3/optimizer.safetensors"):
        state, other = load_file(one / file), load_file(two / file)
        assert state.keys() == other.keys()
        for name, values in state.items():
            torch.testing.assert_close(other[name], values, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_the_adapters_gradient_is_the_same_on_both_to_the_bit(two_processes):
    first, second = (load_file(two_processes / f"gradient-{rank}.safetensors") for rank in range(2))
    assert first
    assert all("lora" in name and torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_two_processes_with_half_the_base_each_carry_on_bit_for_bit(two_processes):
    assert_same_bits(two_processes)


@pytest.mark.slow
def test_one_process_carries_on_from_what_two_wrote(one_process, two_processes, tmp_path):
    one = on_from_step_3(one_process[0], two_processes, tmp_path / "on")
    assert_same_numbers(numbers(one), numbers(two_processes / "whole")[3:])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="asks Linux which threads there are")
def test_no_thread_of_the_exchange_is_left_at_the_end(two_processes):
    """One that outlives the interpreter aborts it now and then, and the launcher would say that the run had failed."""
    for rank in range(2):
        assert (two_processes / f"threads-{rank}.txt").read_text() == ""


@pytest.fixture(params=["float32", "bfloat16"])
def decoder(request, tmp_path):
    """Of a model with biases, some of whose projections have an adapter that does something."""
    lora = {"rank": 2, "alpha": 4, "target_modules": ["q_proj", "down_proj"]}
    config = tiny_config(write_tiny_qwen2(tmp_path), tmp_path, model={"lora": lora, "dtype": request.param}).model
    scorer = make_scorer(load_policy(config), config)
    with torch.no_grad():
        for index, (_, parameter) in enumerate(scorer.named_parameters()):
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(index))
    return scorer


def gradients(decoder, batch):
    decoder.logprobs(batch).sum().backward()
    found = [p.grad for _, p in decoder.named_parameters()]
    for _, parameter in decoder.named_parameters():
        parameter.grad = None
    return found


def test_a_base_in_blocks_computes_what_it_did_in_the_model(decoder):
    """To the bit, gradients too; and in the module that it came from it is no more."""
    batch = decoder.prepare([([5, 6, 7], [[8, 9], [10, 11, 12]])])
    logprobs, wanted = decoder.logprobs(batch), gradients(decoder, batch)
    merged = [layer.dense().tensors() for layer in decoder.layers]
    blocks = decoder.to_modules()
    assert not any(p.requires_grad for p in blocks.parameters())
    assert torch.equal(decoder.logprobs(batch), logprobs)
    assert all(map(torch.equal, gradients(decoder, batch), wanted))
    for layer, tensors in zip(decoder.layers, merged, strict=True):
        assert all(a is None if b is None else torch.equal(a, b) for a, b in zip(layer.dense().tensors(), tensors, strict=True))
    assert all(p.untyped_storage().nbytes() <= 4 for n, p in decoder.module.named_parameters() if "lora_" not in n)


def test_what_is_taken_out_of_a_block_stays_when_the_block_is_emptied(decoder):
    decoder.to_modules()
    layer = decoder.layers[0]
    wanted = [None if t is None else t.clone() for t in layer.dense().tensors()]
    taken = layer.taken_out()
    for parameter in layer.block.parameters():
        parameter.data.zero_()
    assert all(a is None if b is None else torch.equal(a, b) for a, b in zip(taken.tensors(), wanted, strict=True))
