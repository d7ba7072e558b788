"""Rewards with a memory, and rewards that see whole steps, in real runs: what is resumed, and what is left behind."""

import json
import os
import signal

import numpy as np
import pytest
import torch

from groupwise.errors import ConfigError, RewardError, StoppedError
from groupwise.rewards import RewardSuite, reward_scope, sandbox
from groupwise.tracking import RunFolder
from groupwise.training.loop import train
from tests.tiny import final_weights, metrics_of

NORMALISED = {
    "functions": [{"function": "letters", "normalise": "mean_std", "clip": [-1, 1]}, {"function": "length", "normalise": "std"}],
    "normalise": "std",
}


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
    one, other = final_weights(whole), final_weights(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    statistics = json.loads((checkpoint / "state.json").read_text())["parts"]["rewards"]["statistics"]
    assert {name: state[0] for name, state in statistics.items()} == {"letters": 12, "length": 12, "total": 12}


def test_what_a_score_is_worth_does_not_depend_on_the_round_it_was_sampled_in(small_config, letters, quiet, tmp_path):
    """Both groups of the first round are flat but one; what joins it is divided by that round's spread, and shifted by its mean."""
    rewards = {"functions": [{"function": "letters", "normalise": "mean_std"}]}
    config = small_config(rewards=rewards, training={"steps": 1}, rollout={"refill_rounds": 1, "prompts_per_step": 2})
    rounds = []

    def scaled(completions, **columns):
        """Group by group: as it is, flat, and, of the refill, ten times as large."""
        rounds.append(letters["letters"](completions))
        return [[x, 1.0, 10 * x][len(rounds) - 1] for x in rounds[-1]]

    steps = []
    train(config, rewards={"letters": scaled}, console=quiet, run_folder=tmp_path / "run", on_step=steps.append)
    assert len(rounds) == 3
    own, refill = rounds[0], [10 * x for x in rounds[2]]
    first = np.array([*own, 1.0, 1.0, 1.0, 1.0])
    found = sorted(reward for group in steps[0].groups for reward in group.rewards)
    expected = sorted((np.array([*own, *refill]) - first.mean()) / first.std(ddof=1))
    assert found == pytest.approx(expected, rel=1e-9)


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


def test_what_was_learnt_is_saved_where_a_function_fails(small_config, letters, quiet, tmp_path):
    """... in the second of step 3's three calls; once it is corrected, the run is the one that never failed."""
    config = small_config(rewards={"functions": NORMALISED["functions"][:1]}, training={"steps": 4})
    calls = []

    def fails(completions, **columns):
        calls.append(0)
        if len(calls) == 8:
            raise ValueError("out of luck")
        return letters["letters"](completions)

    with pytest.raises(RewardError, match=r"ValueError: out of luck.*; step 2 is saved in .*step-2$"):
        train(config, rewards={"letters": fails}, console=quiet, run_folder=tmp_path / "run")
    train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run", resume=True)
    train(config, rewards=letters, console=quiet, run_folder=tmp_path / "whole")
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "whole")
    one, other = final_weights(tmp_path / "run"), final_weights(tmp_path / "whole")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_batch_function_sees_the_whole_step(small_config, quiet, tmp_path):
    seen = []

    @reward_scope("batch")
    def letters(completions, group_index, **columns):
        seen.append(list(group_index))
        return [float(i % 5) for i, _ in enumerate(completions)]

    folder = train(small_config(), rewards={"letters": letters}, console=quiet, run_folder=tmp_path / "run").folder
    assert seen == [[0] * 4 + [1] * 4 + [2] * 4] * 2
    assert metrics_of(folder)[0]["reward/letters"] == sum(i % 5 for i in range(12)) / 12


def test_a_folder_that_is_taken_is_refused_before_data_are_read(small_config, letters, quiet, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        train(small_config(data={"source": "absent.jsonl"}), rewards=letters, console=quiet, run_folder=tmp_path / "run")


FINDS = """
from pathlib import Path

def finds(completions, **columns):
    here = Path(__file__).parent
    found = 100 * (bool(list(here.glob("**/environment.json"))) or not list(here.glob("mine.py")))
    return [found + i % 2 for i, _ in enumerate(completions)]
"""


def test_a_sandbox_that_was_tried_before_the_run_does_not_show_its_folder(small_config, quiet, tmp_path):
    if sandbox.refusal():
        pytest.skip(f"no sandbox on this machine: {sandbox.refusal()}")
    tmp_path.chmod(0o755)  # in the sandbox root is nobody
    (tmp_path / "mine.py").write_text(FINDS)
    entry = {"function": f"{tmp_path}/mine.py:finds", "isolate": "sandbox"}

    def check(prepared):
        prepared.rewards.load()
        return []

    config = small_config(rewards={"functions": [entry]})
    folder = train(config, console=quiet, run_folder=tmp_path / "run", check=check).folder
    assert [step["reward/finds"] for step in metrics_of(folder)] == [0.5, 0.5]


def test_functions_are_let_go_where_no_folder_can_be_made(small_config, letters, quiet, tmp_path, monkeypatch):
    """Somebody took it while data were read."""
    closed = []

    def taken(*_):
        raise ConfigError("taken meanwhile")

    monkeypatch.setattr(RewardSuite, "close", lambda suite: closed.append(suite))
    monkeypatch.setattr(RunFolder, "create", taken)
    with pytest.raises(ConfigError, match="taken meanwhile"):
        train(small_config(), rewards=letters, console=quiet, run_folder=tmp_path / "run")
    assert len(closed) == 1
