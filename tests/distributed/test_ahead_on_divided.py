"""Sampling ahead where two real processes divide the weights: the run of one process, which a whole copy sampled for."""

import pytest
from rich.console import Console

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
from tests.tiny import tiny_config


@pytest.mark.soak
@pytest.mark.parametrize("refills", [0, 1])
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize(("way", "lora"), [("fsdp2", None), ("fsdp2", {"rank": 4, "alpha": 8}), ("zero2", None), ("zero3", None)])
def test_two_processes_that_divide_the_weights_sample_ahead_as_one(tiny_folder, sums, tmp_path, way, lora, ahead, refills):
    if way != "fsdp2":
        pytest.importorskip("deepspeed")
    if lora:
        pytest.importorskip("peft")
    sections = {
        "model": {"lora": lora},
        "training": {"steps": 5, "micro_batch_tokens": 60, "sharding": way},
        "rollout": {"ahead": ahead, "refill_rounds": refills},
        "output": {"checkpoint_every": 3, "log_completions": 100},
        "optimizer": {"learning_rate": 1e-2 if lora else 1e-3},
    }
    config, quiet = tiny_config(tiny_folder, sums, **sections), Console(quiet=True)
    one = train(config, rewards={"letters": letters}, run_folder=tmp_path / "one", console=quiet).folder
    (tmp_path / "two").mkdir()
    assert launch_two(config, tmp_path / "two", tmp_path / "two", "sound") == 0
    assert_same_run(one, tmp_path / "two/whole", without="optimizer/updates_lost" if "zero" in way else "")
    assert_same_bits(tmp_path / "two")
    alone = on_from_step_3(config, tmp_path / "two", tmp_path / "on")
    assert_same_numbers(numbers(alone), numbers(one)[3:])
