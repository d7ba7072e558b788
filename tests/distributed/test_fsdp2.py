"""FSDP2 over two real processes: the numbers of one process, with a part of everything in each."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from groupwise.config.schema import Config
from groupwise.models.merging import dithered
from groupwise.training.loop import train
from tests.distributed.run_ranks import letters, note_first_gradient
from tests.distributed.two_processes import (
    assert_same_bits,
    assert_same_numbers,
    assert_same_run,
    launch_two,
    numbers,
    on_from_step_3,
    said,
    weights,
)

SECTIONS = {
    "training": {
        "steps": 5,
        "sharding": "fsdp2",
        "micro_batch_tokens": 60,
    },  # so that one process makes more passes than the other
    "output": {"checkpoint_every": 3, "log_completions": 100},
    "algorithm": {"kl": {"beta": 0.04}},
    "warm_start": {"steps": 2, "examples_per_step": 3},
}


@pytest.fixture(scope="module")
def fsdp_config(tiny_folder, sums):
    from tests.training import conftest

    return conftest.small_config.__wrapped__(tiny_folder, sums)(**SECTIONS)


@pytest.fixture(scope="module")
def two_processes(fsdp_config, tmp_path_factory):
    """The folder in which two processes left what run_ranks.py says, and the exit code."""
    folder = tmp_path_factory.mktemp("fsdp2")
    return folder, launch_two(fsdp_config, folder)


@pytest.mark.slow
def test_two_processes_with_a_half_each_are_one(two_processes, fsdp_config, tmp_path, monkeypatch):
    """Completions token for token; losses, the first gradient and the weights after five steps to fp32 rounding."""
    from groupwise.training.optimizer import MasterAdamW

    monkeypatch.setattr(MasterAdamW, "step", MasterAdamW.step)  # put back afterwards
    note_first_gradient(tmp_path / "gradient.safetensors")
    one = train(fsdp_config, rewards={"letters": letters}, run_folder=tmp_path / "one", console=Console(quiet=True)).folder
    folder = two_processes[0]
    assert_same_run(one, folder / "whole")
    gradient = load_file(tmp_path / "gradient.safetensors")
    halves = [load_file(folder / f"gradient-{rank}.safetensors") for rank in range(2)]
    for name, values in gradient.items():
        together = torch.cat([half[name] for half in halves])
        assert all(len(half[name]) <= -(-len(values) // 2) for half in halves)
        torch.testing.assert_close(together, values, rtol=1e-4, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_two_processes_with_a_half_each_carry_on_bit_for_bit(two_processes):
    assert_same_bits(two_processes[0])


@pytest.mark.slow
def test_one_process_carries_on_from_what_two_wrote(two_processes, fsdp_config, tmp_path):
    """The files are those of one process: whole tensors, under the same names."""
    folder = two_processes[0]
    one = on_from_step_3(fsdp_config, folder, tmp_path / "on")
    assert_same_numbers(numbers(one), numbers(folder / "whole")[3:])
    for name, values in weights(one).items():
        torch.testing.assert_close(weights(folder / "whole")[name], values, rtol=1e-4, atol=2e-5)


@pytest.mark.slow
def test_a_process_that_fails_ends_both_with_its_error(two_processes):
    folder, code = two_processes
    assert code == 2
    assert "process 1 of 2 failed: reward 'letters' on problem" in (folder / "error-0.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "dtype"),
    [
        ("masters", "bfloat16"),  # the run itself looks whether what is gathered is what is saved
        pytest.param("masters", "float16", marks=pytest.mark.soak),
        pytest.param("pure", "bfloat16", marks=pytest.mark.soak),
        pytest.param("stochastic", "bfloat16", marks=pytest.mark.soak),
    ],
)
def test_every_precision_carries_on_and_is_read_by_one_process(tiny_folder, sums, tmp_path, dtype, precision):
    """Two processes write, two resume bit for bit, one finds every tensor it wants; with checkpointed gradients and a reference. The
    first step is one process's: what is rounded otherwise soon draws another token."""
    from tests.training import conftest

    make = conftest.small_config.__wrapped__(tiny_folder, sums)
    sections = {
        **SECTIONS,
        "model": {"dtype": dtype, "gradient_checkpointing": True, "attention": "sdpa"},
        "optimizer": {"precision": precision, "learning_rate": 1e-3},
    }
    config = make(**sections)
    launch_two(config, tmp_path)
    assert_same_bits(tmp_path)
    assert len(numbers(on_from_step_3(config, tmp_path, tmp_path / "on"))) == 2
    one, two = tmp_path / "one", tmp_path / "whole"
    train(config, rewards={"letters": letters}, run_folder=one, console=Console(quiet=True))
    assert said(one)[:12] == said(two)[:12]
    assert numbers(two)[0] == pytest.approx(numbers(one)[0], rel=2e-2, abs=1e-3)


def test_memory_that_runs_out_in_a_pass_is_not_tried_again_by_one_process_alone():
    from groupwise.training.microbatches import PassBudget

    def fails():
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError) as caught:
        PassBudget(100, fixed=True).attempt(fails, lambda: 80, lambda: pytest.fail("it was tried again"))
    assert "set training.micro_batch_tokens=40," in caught.value.__notes__[0]


def gather_and_leave(rank, folder):
    """``gather_twice``, then what ``groupwise.distributed.open`` does at an end: Gloo's threads abort a process that they outlive."""
    from groupwise.distributed.open import _forget_operations

    gather_twice(rank, folder)
    torch.distributed.destroy_process_group()
    _forget_operations()
    gc.collect()


def gather_twice(rank, folder):
    """One of two processes: what FSDP2 gathers of rows that no bf16 holds, before and after an update of them, written by the first."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from groupwise.training.sharding.fsdp2 import _round_when_gathered, _rounded

    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.manual_seed(0)
    layer = torch.nn.Linear(7, 5)  # 5 rows: 3 and 2
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(layer, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    layer(torch.randn(2, 7))
    layer.reshard()
    _round_when_gathered(layer, torch.bfloat16)
    found = {}
    for name in ("before", "after"):
        rows = {key: _rounded(p, torch.bfloat16) for key, p in layer.named_parameters()}
        layer.unshard()
        for key, p in layer.named_parameters():
            found[f"{name}.{key}"] = p.detach().clone()
            first = 3 * rank
            assert torch.equal(p[first : first + len(rows[key])], rows[key]), "the rows that a checkpoint gets"
        layer.reshard()
        for p in layer.parameters():
            p.data.mul_(1 + 2**-10)
    if rank == 0:
        torch.save(found, folder / "found.pt")


def test_gathered_weights_are_those_of_one_process_dithered(tmp_path):
    """Divided or whole, masters become the same weights: thresholds go by the place in the whole tensor."""
    assert launch_two(Config(), tmp_path, script=Path(__file__)) == 0
    torch.manual_seed(0)
    layer = torch.nn.Linear(7, 5)
    found = torch.load(tmp_path / "found.pt")
    for factor, name in ((1, "before"), (1 + 2**-10, "after")):
        for key, exact in layer.state_dict().items():
            whole = dithered((exact * factor).view(-1, exact.shape[-1]), torch.bfloat16).view_as(exact)
            assert torch.equal(found[f"{name}.{key}"], whole)
            if key == "weight":
                assert not torch.equal(whole, (exact * factor).to(torch.bfloat16)), "to the nearest it would be others"


if __name__ == "__main__":
    gather_and_leave(int(os.environ["RANK"]), Path(sys.argv[2]))
