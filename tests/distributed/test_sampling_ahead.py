"""Asynchronous rollouts in two processes: the run of one process, and resumed bit for bit, by two processes or by one."""

import json
import os
import signal

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from groupwise import load_config
from groupwise.engines.wrappers import SamplingThread
from groupwise.errors import StoppedError
from groupwise.rollout import rollout_scope
from groupwise.tracking import Trackers
from groupwise.training import ahead as ahead_module
from groupwise.training import start as start_module
from groupwise.training.learner import Learner
from groupwise.training.loop import train
from groupwise.training.run import Run
from tests.distributed.test_processes import module_config  # noqa: F401
from tests.distributed.two_processes import launch_two, numbers, rows, weights
from tests.tiny import lower_case_share
from tests.training.test_ahead import EngineWithWeights, _under_way_for_ever

SCRIPT = """
import sys
import torch
from pathlib import Path
from rich.console import Console
from groupwise import load_config
from groupwise.training.loop import train
from tests.tiny import lower_case_share
torch.set_num_threads(1)
folder = Path(sys.argv[2])
config = load_config(folder / "config.yaml")
go = {"rewards": {"letters": lower_case_share}, "console": Console(quiet=True)}
train(config, run_folder=folder / "whole", **go)
train(config, run_folder=folder / "resumed", resume_from=folder / "whole/checkpoints/step-3", **go)
"""


@pytest.mark.slow
def test_two_processes_sample_ahead_as_one(module_config, tmp_path):  # noqa: F811
    config = module_config.model_copy(update={"rollout": module_config.rollout.model_copy(update={"ahead": 2})})
    (tmp_path / "go.py").write_text(SCRIPT)
    assert launch_two(config, tmp_path, script=tmp_path / "go.py") == 0
    go = {"rewards": {"letters": lower_case_share}, "console": Console(quiet=True)}
    config = load_config(tmp_path / "config.yaml")
    one = train(config, run_folder=tmp_path / "one", **go).folder
    alone = train(config, run_folder=tmp_path / "alone", resume_from=tmp_path / "whole/checkpoints/step-3", **go).folder
    two, resumed = tmp_path / "whole", tmp_path / "resumed"
    said = ("problem", "sample", "completion", "policy_version", "reward")
    assert [[r[k] for k in said] for r in rows(one / "completions.jsonl")] == [
        [r[k] for k in said] for r in rows(two / "completions.jsonl")
    ]
    assert [row["rollout/staleness"] for row in numbers(two)] == [0, 1, 2, 2, 2]
    assert numbers(resumed) == numbers(two)[3:]
    assert all(torch.equal(w, weights(resumed)[name]) for name, w in weights(two).items())
    for name, w in weights(two).items():
        torch.testing.assert_close(weights(one)[name], w, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(weights(alone)[name], w, rtol=1e-4, atol=2e-5)
    held = load_file(two / "checkpoints/step-3/part-ahead.safetensors")
    assert {name.split(".")[0] for name in held} == {"batch"}, "what is under way is finished first"
    state = json.loads((two / "checkpoints/step-3/state.json").read_text())
    assert [len(row["places"]) for row in state["parts"]["ahead"]["batches"]] == [3, 3]


def sampled(steps):
    return [[c.token_ids for group in report.groups for c in group.completions] for report in steps]


@pytest.mark.parametrize("fails", [True, False], ids=["failed", "under way"])
@pytest.mark.parametrize("own_weights", [True, False], ids=["an engine's own weights", "a copy of the weights"])
def test_a_signal_saves_what_is_learnt_beside_a_batch_that_one_of_two_lacks(
    small_config, train_in, monkeypatch, own_weights, fails
):
    """The checkpoint has the weights that sample it again; where an engine has them, newer ones sample it, and that is told."""
    config = small_config(rollout={"ahead": 1}, training={"steps": 4}, output={"checkpoint_every": 0})
    if own_weights:
        monkeypatch.setattr(start_module, "make_engine", lambda policy, rollout, *_, **__: EngineWithWeights(policy, rollout))
    whole, _ = train_in(2, "whole", config)
    ask, serve, chosen, said = Run._asked_to_stop, SamplingThread._sample, [], []

    def stop(run):
        run.signals.received = signal.SIGTERM if run.done == 2 else None
        return ask(run)

    def is_chosen(order):
        if order.request.scope == rollout_scope(2):
            chosen.append(order)
        return bool(chosen) and order is chosen[0]

    def fail(thread, order):
        if is_chosen(order):
            raise MemoryError("no room")
        return serve(thread, order)

    with monkeypatch.context() as patch:
        patch.setattr(ahead_module, "_LAST_BATCH_S", 0.05)
        patch.setattr(Trackers, "say", lambda trackers, sentence, style="": said.append(sentence))
        patch.setattr(Run, "_asked_to_stop", stop)
        if fails:
            patch.setattr(SamplingThread, "_sample", fail)
        else:
            _under_way_for_ever(patch, is_chosen)
        with pytest.raises(StoppedError, match="after step 2, which is saved"):
            train_in(2, "run", config)
    assert any("batch of step 3, which is sampled ahead, could not be saved" in sentence for sentence in said) == own_weights
    steps, _ = train_in(2, "run", config, resume=True)
    assert [report.metrics["rollout/staleness"] for report in steps] == [0 if own_weights else 1, 1]
    assert own_weights or sampled(steps) == sampled(whole[2:])


def test_two_go_on_with_a_batch_of_which_one_process_had_made_no_update(small_config, train_in, monkeypatch):
    config = small_config(
        rollout={"ahead": 1}, algorithm={"updates_per_batch": 2}, training={"steps": 4}, output={"checkpoint_every": 0}
    )
    whole, _ = train_in(1, "whole", config)
    learn, calls = Learner.learn, []

    def signalled(learner, *words, **more):
        calls.append(words)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(learner, *words, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "learn", signalled)
        with pytest.raises(StoppedError, match="after step 2, which is saved"):
            train_in(1, "run", config)
    steps, _ = train_in(2, "run", config, resume=True)
    assert sampled(steps) == sampled(whole[2:])
    for name in ("policy/loss", "optimizer/grad_norm", "reward/mean"):
        expected = [report.metrics[name] for report in whole[2:]]
        assert [report.metrics[name] for report in steps] == pytest.approx(expected, rel=1e-3, abs=1e-6)
