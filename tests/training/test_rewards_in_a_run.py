"""Rewards with a memory, and rewards that see whole steps, in real runs: what is resumed, and what is left behind."""

import json
import os
import signal

import pytest
import torch
from safetensors.torch import load_file

from groupwise.errors import StoppedError
from groupwise.rewards import reward_scope
from groupwise.training.loop import train

NORMALISED = {
    "functions": [{"function": "letters", "normalise": "mean_std", "clip": [-1, 1]}, {"function": "length", "normalise": "std"}],
    "normalise": "std",
}
TIMES = ("time", "speed", "memory")


def metrics_of(folder, first=0):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in rows[first:]]


def weights_of(folder):
    return load_file(folder / "final_model" / "model.safetensors")


def test_running_statistics_are_carried_on_bit_for_bit(small_config, letters, quiet, tmp_path):
    config = small_config(
        rewards=NORMALISED,
        training={"steps": 3},
        output={"checkpoint_every": 1, "keep_checkpoints": 3},
        rollout={"refill_rounds": 1},
    )
    whole = train(config, rewards=letters, console=quiet, run_folder=tmp_path / "whole").folder
    checkpoint = whole / "checkpoints" / "step-1"
    resumed = train(config, rewards=letters, console=quiet, run_folder=tmp_path / "resumed", resume_from=checkpoint).folder
    assert metrics_of(resumed) == metrics_of(whole, first=1)
    one, other = weights_of(whole), weights_of(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    statistics = json.loads((checkpoint / "state.json").read_text())["parts"]["rewards"]["statistics"]
    assert {name: state[0] for name, state in statistics.items()} == {"letters": 12, "length": 12, "total": 12}


def test_a_step_that_was_abandoned_leaves_no_trace_in_the_statistics(small_config, letters, quiet, tmp_path):
    """The signal comes while the refill is scored: by then the step's own scores have been taken in."""
    config = small_config(rewards=NORMALISED, training={"steps": 2}, rollout={"refill_rounds": 1, "prompts_per_step": 2})
    calls = []

    def flat_first(completions, **columns):
        calls.append(0)
        if len(calls) == 7 and kill:
            os.kill(os.getpid(), signal.SIGTERM)
        return letters["letters"](completions) if len(calls) % 4 in (0, 3) else [1.0] * len(completions)

    functions = {"letters": flat_first, "length": lambda completions: [2.0] * len(completions)}
    kill = True
    with pytest.raises(StoppedError, match="after step 1"):
        train(config, rewards=functions, console=quiet, run_folder=tmp_path / "stopped")
    calls[4:] = []
    kill = False
    train(config, rewards=functions, console=quiet, run_folder=tmp_path / "stopped", resume=True)
    calls.clear()
    train(config, rewards=functions, console=quiet, run_folder=tmp_path / "whole")
    assert metrics_of(tmp_path / "stopped") == metrics_of(tmp_path / "whole")


def test_a_batch_function_sees_the_whole_step(small_config, quiet, tmp_path):
    seen = []

    @reward_scope("batch")
    def letters(completions, group_index, **columns):
        seen.append(list(group_index))
        return [float(i % 5) for i, _ in enumerate(completions)]

    folder = train(small_config(), rewards={"letters": letters}, console=quiet, run_folder=tmp_path / "run").folder
    assert seen == [[0] * 4 + [1] * 4 + [2] * 4] * 2
    assert metrics_of(folder)[0]["reward/letters"] == sum(i % 5 for i in range(12)) / 12
