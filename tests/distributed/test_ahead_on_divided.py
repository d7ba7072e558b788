"""Sampling ahead where two real processes divide the weights: the run of one process, which a whole copy sampled for."""

import pytest
from rich.console import Console

from groupwise.engines import make_engine
from groupwise.tracking import Trackers
from groupwise.training.ahead import Ahead, SamplerSlot, WholeCopy
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
from tests.training.test_ahead import _sampled_when_waited_for


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


@pytest.mark.parametrize("divided", [True, False])
def test_a_batch_whose_weights_divided_ones_cannot_take_is_told(tiny_folder, sums, tmp_path, monkeypatch, divided):
    """One process whose weights are whole saved the weights that its batch under way is sampled with."""
    said, quiet = [], Console(quiet=True)
    sections = {"training": {"steps": 3}, "rollout": {"ahead": 1}}
    config = tiny_config(tiny_folder, sums, **sections, output={"checkpoint_every": 2})
    with monkeypatch.context() as patch:
        _sampled_when_waited_for(patch)
        whole = train(config, rewards={"letters": letters}, run_folder=tmp_path / "whole", console=quiet).folder

    def whole_slot(ahead, policy):
        copied = WholeCopy(policy, ahead.learner.scorer)
        return SamplerSlot(make_engine(copied.policy, ahead.config.rollout, copied.decoder), copied)

    if divided:
        monkeypatch.setattr(Ahead, "_own_slot", whole_slot)
    monkeypatch.setattr(Trackers, "say", lambda trackers, sentence, style="": said.append(sentence))
    train(
        tiny_config(tiny_folder, sums, **sections), rewards={"letters": letters}, run_folder=tmp_path / "on", console=quiet,
        resume_from=whole / "checkpoints/step-2",
    )  # fmt: skip
    assert any("batch of step 3, which is sampled ahead, could not be taken over" in sentence for sentence in said) == divided
