"""Resuming in the same folder: from what, whether it is the same run, and what a signal leaves."""

import dataclasses
import functools
import json
import os
import random
import shutil
import signal
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from groupwise.config.algorithm import CorrectionConfig
from groupwise.errors import CheckpointError, ConfigError, StoppedError, TrainingError
from groupwise.evaluation import evaluate_stage
from groupwise.tracking import RunFolder
from groupwise.tracking.reading import read_run
from groupwise.training.learner import Learner
from groupwise.training.loop import train
from groupwise.training.resume import drift, would_resume
from groupwise.training.setup import prepare
from groupwise.training.window import HeldWindow, _group_values
from groupwise.types import Completion, Group, Problem, Prompt, StepScores, ToolCall, Turn
from tests.survival.kills import differences

EVERY = {"training": {"steps": 4}, "output": {"checkpoint_every": 1, "keep_checkpoints": 4}}


def go(config, letters, quiet, folder, **more):
    return train(config, rewards=letters, console=quiet, run_folder=folder, **more)


def before_its_end(folder):
    """The same as a run that was killed when its last checkpoint was whole."""
    (folder / "summary.json").unlink()
    return folder


def steps_in(folder):
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_run_carries_on(small_config, letters, quiet, tmp_path, number):
    config = small_config(training={"steps": 4})

    def stop(report):
        if report.step == 2:
            os.kill(os.getpid(), number)

    with pytest.raises(StoppedError, match="after step 2, which is saved") as caught:
        go(config, letters, quiet, tmp_path / "run", on_step=stop)
    assert caught.value.exit_code == 128 + number
    assert f"continue with --resume (in Python: resume=True, run_folder='{tmp_path / 'run'}')" in str(caught.value)
    began = RunFolder(tmp_path / "run").read_environment()["fast_paths_of"]
    go(config, letters, quiet, tmp_path / "run", resume=True)
    assert steps_in(tmp_path / "run") == [1, 2, 3, 4]
    assert RunFolder(tmp_path / "run").read_environment()["fast_paths_of"] == began, "nothing is timed anew"


def test_a_signal_that_comes_twice_at_once_is_one(small_config, letters, quiet, tmp_path):
    def stop(report):
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError, match="after step 1, which is saved"):
        go(small_config(), letters, quiet, tmp_path / "run", on_step=stop)


def test_a_signal_in_a_reward_function_abandons_the_step(small_config, quiet, tmp_path):
    calls = []

    def letters(completions, **columns):
        calls.append(0)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return [float(i) for i, _ in enumerate(completions)]

    with pytest.raises(StoppedError, match="after step 1, which is saved"):
        go(small_config(**EVERY), {"letters": letters}, quiet, tmp_path / "run")
    assert steps_in(tmp_path / "run") == [1]


def test_a_signal_between_two_updates_saves_the_batch(small_config, letters, quiet, tmp_path, monkeypatch):
    """The later updates are measured by what the weights said before the first: that is resumed with, also in other micro-batches."""
    sections = {
        "training": {"steps": 4},
        "algorithm": {"kl": {"beta": 0.1}, "updates_per_batch": 4, "loss": {"epsilon": 0.01}, "entropy": {"top_share": 0.5}},
    }  # fmt: skip
    whole = go(small_config(**sections), letters, quiet, tmp_path / "whole").folder
    update, updates = Learner.step, []

    def step(learner, rate=None):
        updates.append(learner.updates)
        if len(updates) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(learner, rate)

    monkeypatch.setattr(Learner, "step", step)
    with pytest.raises(StoppedError, match="after step 1 and 2 updates of the next, which is saved"):
        go(small_config(**sections), letters, quiet, tmp_path / "run")
    assert updates == [*range(6)]
    assert (tmp_path / "run" / "checkpoints" / "step-1-update-2").is_dir()
    fewer = small_config(**{**sections, "training": {"steps": 1}})
    lines = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    inside = r"step-1-update-2 is inside step 2: set training\.steps to at least 2"
    with pytest.raises(CheckpointError, match=inside):
        go(fewer, letters, quiet, tmp_path / "run", resume=True)
    with pytest.raises(CheckpointError, match=inside):
        would_resume(tmp_path / "run", prepare(fewer, letters), accept=False)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == lines
    shutil.copytree(tmp_path / "run", tmp_path / "smaller")
    folder = go(small_config(**sections), letters, quiet, tmp_path / "run", resume=True).folder
    assert updates == [*range(16)]
    assert differences(whole, folder) == []
    sections["training"]["micro_batch_tokens"] = 60
    smaller = go(small_config(**sections), letters, quiet, tmp_path / "smaller", resume=True).folder
    first, second = (load_file(f / "final_model" / "model.safetensors") for f in (whole, smaller))
    assert all(torch.allclose(first[name], second[name], atol=1e-5) for name in first)


@pytest.mark.parametrize(
    ("mu", "left"), [(1, "step 1, which"), pytest.param(2, "step 1 and 1 updates of the next, which", marks=pytest.mark.slow)]
)
def test_a_signal_between_two_passes_is_told_at_once_and_does_not_wait_for_the_others(
    small_config, letters, quiet, tmp_path, monkeypatch, capfd, mu, left
):
    """Nothing was learnt from an update's passes before its step: they are dropped, and made again by the resumed run."""
    sections = {"training": {"steps": 3, "micro_batch_tokens": 20}, "algorithm": {"updates_per_batch": mu}}
    whole = go(small_config(**sections), letters, quiet, tmp_path / "whole").folder
    backward, passes, told = Learner._backward, [], []

    def one(learner, *words):
        passes.append(learner.updates)
        if passes.count(2 * mu - 1) == 2 and not told:
            os.kill(os.getpid(), signal.SIGTERM)
            told.append(capfd.readouterr().err)
        return backward(learner, *words)

    monkeypatch.setattr(Learner, "_backward", one)
    with pytest.raises(StoppedError, match=f"after {left} is saved"):
        go(small_config(**sections), letters, quiet, tmp_path / "run")
    assert passes.count(2 * mu - 1) == 2, "the pass that was under way was the last"
    assert "SIGTERM: " in told[0]
    assert "the run is saved" in told[0]
    folder = go(small_config(**sections), letters, quiet, tmp_path / "run", resume=True).folder
    assert differences(whole, folder) == []


@pytest.mark.slow
def test_an_abandoned_step_does_not_renew_the_reference_twice(small_config, letters, quiet, tmp_path):
    """It is renewed before the step; a moving average that moves twice is another one."""
    config = small_config(
        training={"steps": 4},
        algorithm={"kl": {"beta": 0.5, "reference_every": 1, "reference_mixing": 0.3}, "updates_per_batch": 2},
    )
    whole = go(config, letters, quiet, tmp_path / "whole").folder
    calls = []

    def stopping(completions, **columns):
        calls.append(0)
        if len(calls) == 2 * 3 + 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return letters["letters"](completions)

    with pytest.raises(StoppedError, match="after step 2,"):
        go(config, {"letters": stopping}, quiet, tmp_path / "run")
    assert differences(whole, go(config, letters, quiet, tmp_path / "run", resume=True).folder) == []


def test_what_a_reward_draws_at_random_repeats(small_config, quiet, tmp_path):
    config = small_config(**EVERY)

    def draw(completions, **columns):
        return [random.random() + float(np.random.rand()) + float(torch.rand(())) for _ in completions]

    def stop(report):
        random.random()
        if report.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    whole = go(config, {"letters": draw}, quiet, tmp_path / "whole").folder
    with pytest.raises(StoppedError):
        go(config, {"letters": draw}, quiet, tmp_path / "run", on_step=stop)
    assert differences(whole, go(config, {"letters": draw}, quiet, tmp_path / "run", resume=True).folder) == []


@pytest.mark.parametrize(
    ("stage", "saved"),
    [
        ("base", "before the first step: nothing was learnt"),
        ("warm_start", "after step 0, which is saved"),
        ("step-2", "step-2"),
        pytest.param("final", "step-4", marks=pytest.mark.slow),
    ],
)
def test_a_signal_in_an_evaluation_abandons_it_and_it_is_made_up_for(
    small_config, letters, quiet, tmp_path, monkeypatch, stage, saved
):
    warmed = {"warm_start": {"steps": 2, "examples_per_step": 4}} if stage == "warm_start" else {}
    config = small_config(training={"steps": 4}, evaluation={"at_start": True, "every": 2}, **warmed)
    whole = go(config, letters, quiet, tmp_path / "whole").folder
    stages = []

    def evaluate(*words, **named):
        stages.append(named["stage"])
        if named["stage"] == stage and stages.count(stage) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return evaluate_stage(*words, **named)

    monkeypatch.setattr("groupwise.training.run.evaluate_stage", evaluate)
    with pytest.raises(StoppedError, match=saved) as caught:
        go(config, letters, quiet, tmp_path / "run")
    assert caught.value.exit_code == 143
    folder = go(config, letters, quiet, tmp_path / "run", resume=True).folder
    assert stages.count(stage) == 2
    assert differences(whole, folder) == []
    first, second = (json.loads((f / "summary.json").read_text()) for f in (whole, folder))
    for name in ("evaluations", "training_evaluations"):
        assert [{**row, "seconds": 0} for row in first[name]] == [{**row, "seconds": 0} for row in second[name]]


def test_an_evaluation_that_ends_the_run_takes_no_step_with_it(small_config, letters, quiet, tmp_path, monkeypatch):
    """The checkpoint of its step is written before: else a resumed run would make the steps before it again and again."""
    config = small_config(training={"steps": 4}, evaluation={"every": 2}, output={"checkpoint_every": 2})
    whole, judged = go(config, letters, quiet, tmp_path / "whole").folder, []

    def fail(*words, **named):
        raise TrainingError("memory ran out")

    def noting(*words, **named):
        judged.append(named["stage"])
        return evaluate_stage(*words, **named)

    with monkeypatch.context() as patch:
        patch.setattr("groupwise.training.run.evaluate_stage", fail)
        with pytest.raises(TrainingError, match="memory ran out"):
            go(config, letters, quiet, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-2"]
    monkeypatch.setattr("groupwise.training.run.evaluate_stage", noting)
    folder = go(config, letters, quiet, tmp_path / "run", resume=True).folder
    assert judged == ["step-2", "final"]
    assert differences(whole, folder) == []


def test_a_signal_in_the_first_step_keeps_the_evaluations_before_it(small_config, letters, quiet, tmp_path, monkeypatch):
    """The checkpoint of step 0 was written before the last of them, and is written again with it."""
    sections = {
        "evaluation": {"at_start": True},
        "warm_start": {"steps": 2, "examples_per_step": 4},
        "output": {"checkpoint_every": 2},
    }
    config = small_config(training={"steps": 2}, **sections)
    whole = go(config, letters, quiet, tmp_path / "whole").folder

    def stopping(completions, **columns):
        os.kill(os.getpid(), signal.SIGTERM)
        return letters["letters"](completions)

    with pytest.raises(StoppedError, match="after step 0, which is saved"):
        go(config, {"letters": stopping}, quiet, tmp_path / "run")
    judged = []

    def noting(*words, **named):
        judged.append(named["stage"])
        return evaluate_stage(*words, **named)

    monkeypatch.setattr("groupwise.training.run.evaluate_stage", noting)
    result = go(config, letters, quiet, tmp_path / "run", resume=True)
    assert judged == ["final"]
    assert [row["stage"] for row in result.summary["evaluations"]] == ["base", "warm_start", "final"]
    assert differences(whole, result.folder) == []


def test_a_folder_whose_run_was_killed_before_its_settings_were_written_is_used(small_config, letters, quiet, tmp_path):
    for name in ("new", "resumed"):
        (tmp_path / name / "evaluations").mkdir(parents=True)
        (tmp_path / name / ".config.yaml.x1.part").write_text("model:")
    go(small_config(), letters, quiet, tmp_path / "new")
    folder = go(small_config(), letters, quiet, tmp_path / "resumed", resume=True).folder
    assert [p.name for p in folder.glob(".*")] == [".lock"]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="no run's folder"):
        go(small_config(), letters, quiet, tmp_path / "other", resume=True)


def test_a_run_that_is_refused_before_its_first_step_may_begin_again(small_config, letters, quiet, tmp_path, monkeypatch):
    def refuse(*words):
        raise ConfigError("nobody is logged in")

    def refused(**named):
        with monkeypatch.context() as patch:
            patch.setattr("groupwise.training.start.make_trackers", refuse)
            with pytest.raises(ConfigError, match="nobody is logged in"):
                go(small_config(), letters, quiet, tmp_path / "run", **named)

    refused()
    folder = before_its_end(go(small_config(), letters, quiet, tmp_path / "run").folder)
    refused(resume=True)
    assert {"config.yaml", "environment.json", "evaluations"} <= {path.name for path in folder.iterdir()}, "an earlier run stays"


def test_a_damaged_checkpoint_is_passed_over_and_set_aside(small_config, letters, quiet, tmp_path):
    config = small_config(**EVERY)
    folder = before_its_end(go(config, letters, quiet, tmp_path / "run").folder)
    state = folder / "checkpoints" / "step-4" / "state.json"
    state.write_text(state.read_text().replace('"updates": 4', '"updates": 9'))
    (folder / "checkpoints" / "step-3" / "model" / "pytorch_model.bin").write_bytes(b"planted")
    go(config, letters, quiet, folder, resume=True)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["damaged-step-3", "damaged-step-4", "step-1", "step-2", "step-3", "step-4"]
    assert steps_in(folder) == [1, 2, 3, 4]


def test_without_a_sound_checkpoint_nothing_starts(small_config, letters, quiet, tmp_path):
    config = small_config(**EVERY)
    folder = before_its_end(go(config, letters, quiet, tmp_path / "run").folder)
    for manifest in folder.glob("checkpoints/*/manifest.json"):
        manifest.write_text("{")
    with pytest.raises(CheckpointError, match=r"every checkpoint in .* is damaged"):
        go(config, letters, quiet, folder, resume=True)


def test_a_change_of_the_result_is_refused_and_any_other_is_not(small_config, letters, quiet, tmp_path):
    folder = before_its_end(go(small_config(**EVERY), letters, quiet, tmp_path / "run").folder)
    other = small_config(**EVERY, optimizer={"learning_rate": 2e-3})
    with pytest.raises(CheckpointError, match=r"optimizer\.learning_rate: 0\.001 -> 0\.002.*--accept-changes .*accept_changes"):
        go(other, letters, quiet, folder, resume=True)
    before = (folder / "config.yaml").read_bytes()
    before_its_end(go(other, letters, quiet, folder, resume=True, accept_changes=True).folder)
    assert (folder / "config-step-4.yaml").read_bytes() == before
    assert read_run(folder).config.optimizer.learning_rate == 2e-3
    assert json.loads((folder / "environment.json").read_text())["seeds"]["training.seed"] == other.training.seed
    before_its_end(go(small_config(**EVERY, evaluation={"problems": 2}), letters, quiet, folder, resume=True).folder)
    skips = small_config(**EVERY, rewards={"on_error": "skip"})  # what a run that a reward has ended is advised to do
    go(skips, letters, quiet, folder, resume=True)


def test_rewards_from_python_that_are_left_out_change_the_result(small_config, letters, quiet, tmp_path):
    config = small_config(**EVERY)
    more = {**letters, "more": lambda completions, **columns: [float(i) for i, _ in enumerate(completions)]}
    folder = before_its_end(go(config, more, quiet, tmp_path / "run").folder)
    with pytest.raises(CheckpointError, match="rewards from Python: letters, more -> letters"):
        go(config, letters, quiet, folder, resume=True)
    go(config, letters, quiet, folder, resume=True, accept_changes=True)


def test_a_run_that_starts_from_the_beginning_has_the_settings_of_its_new_start(small_config, letters, quiet, tmp_path):
    folder = before_its_end(go(small_config(), letters, quiet, tmp_path / "run").folder)
    (folder / "trained.json").unlink(missing_ok=True)
    other = small_config(training={"steps": 1, "seed": 5})
    go(other, letters, quiet, folder, resume=True)
    assert read_run(folder).config.model_dump() == other.model_dump()
    assert json.loads((folder / "environment.json").read_text())["seeds"]["training.seed"] == 5
    assert not list(folder.glob("config-step-*"))


def test_a_setting_that_came_since_had_its_default(small_config):
    """A checkpoint of an earlier version: it does not know the setting, and ran as its default runs."""
    config = small_config(**EVERY)
    written = config.model_dump(mode="json")
    assert written["rollout"].pop("ahead") == 0
    problems = SimpleNamespace(fingerprint="f")
    same = SimpleNamespace(config=config, problems=problems)
    assert drift({"config": written, "data": "f"}, same) == ([], [])
    other = SimpleNamespace(config=small_config(**EVERY, rollout={"ahead": 1}), problems=problems)
    assert drift({"config": written, "data": "f"}, other) == (["rollout.ahead: 0 -> 1"], [])


def test_a_correction_that_an_earlier_version_wrote_and_nothing_used_is_no_change(small_config):
    config = small_config(rollout={"engine": "vllm", "ahead": 1}, algorithm={"stale_samples": "behaviour"})
    written = config.model_dump(mode="json")
    written["algorithm"]["correction"] = CorrectionConfig().model_dump(mode="json")
    prepared = SimpleNamespace(config=config, problems=SimpleNamespace(fingerprint="f"))
    assert drift({"config": written, "data": "f"}, prepared) == ([], [])


@pytest.mark.parametrize(
    ("setting", "before", "now", "harmful"),
    [
        ("rollout.vllm.url", "http://node-1:8300", "http://node-7:8300", False),
        ("rollout.vllm.patience_s", 300.0, 60.0, False),
        ("rollout.vllm.max_model_tokens", None, 512, True),
        ("data.folder", None, "/scratch/data", False),
        ("data.source", "a.jsonl", "b.jsonl", True),
        ("rewards.timeout_s", 60.0, 90.0, False),
        ("rewards.processes", 2, 3, False),
        ("rewards.concurrent_calls", 16, 2, False),
        ("rollout.quantization", "none", "8bit", True),
        ("rollout.concurrent_tool_calls", 16, 2, False),
        ("rollout.tool_timeout_s", 10.0, 20.0, True),
        ("optimizer.offload", False, True, False),
        ("training.offload_reference", False, True, False),
    ],
)
def test_where_and_how_fast_is_no_change(small_config, setting, before, now, harmful):
    """As for a job that the queue starts again on other machines, by the same command."""

    def written(value):
        state = small_config().model_dump(mode="json")
        *sections, name = setting.split(".")
        functools.reduce(dict.__getitem__, sections, state)[name] = value
        return state

    config = SimpleNamespace(model_dump=lambda mode: written(now), clips_against_the_sampler=False)
    prepared = SimpleNamespace(config=config, problems=SimpleNamespace(fingerprint="f"))
    line = f"{setting}: {before!r} -> {now!r}"
    assert drift({"config": written(before), "data": "f"}, prepared) == (([line], []) if harmful else ([], [line]))


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"optimizer": {"warmup_steps": 0}}, None),
        ({"optimizer": {"warmup_steps": 2}}, None),
        ({"optimizer": {"warmup_steps": 0.5}}, "the rate of the first steps"),
        ({"optimizer": {"schedule": "linear"}}, "the rate of each step (optimizer.schedule is linear)"),
        ({"optimizer": {"schedule": "cosine"}}, "the rate of each step (optimizer.schedule is cosine)"),
        ({"algorithm": {"kl": {"beta": 0.1, "reference_updates": 2}}}, "when the reference is renewed"),
        ({"rollout": {"ahead": 1}}, "which weights sample what follows"),
    ],
)
def test_more_steps_change_a_run_whose_steps_depend_on_their_number(small_config, settings, changed):
    def of(steps):
        return small_config(training={"steps": steps}, **settings)

    longer = SimpleNamespace(config=of(8), problems=SimpleNamespace(fingerprint="f"))
    harmful, harmless = drift({"config": of(4).model_dump(mode="json"), "data": "f"}, longer)
    if changed is None:
        assert (harmful, harmless) == ([], ["training.steps: 4 -> 8"])
    else:
        assert harmless == []
        assert harmful[0].startswith(f"training.steps: 4 -> 8, which changes {changed}")


def test_changed_data_is_found(small_config, letters, quiet, tmp_path, sums):
    data = tmp_path / "mine.jsonl"
    data.write_text(sums.read_text())
    config = small_config(**EVERY, data={"source": str(data), "holdout": 6})
    folder = before_its_end(go(config, letters, quiet, tmp_path / "run").folder)
    data.write_text(data.read_text().replace("0 + 1 = ?", "0 + 1 is?"))
    with pytest.raises(CheckpointError, match="the data itself"):
        go(config, letters, quiet, folder, resume=True)


def test_changed_columns_beside_question_and_answer_are_found(small_config, letters, quiet, tmp_path, sums):
    """Reward functions read them."""
    data = tmp_path / "mine.jsonl"
    data.write_text(sums.read_text().replace("}", ', "level": 1}'))
    config = small_config(**EVERY, data={"source": str(data), "holdout": 6})
    folder = before_its_end(go(config, letters, quiet, tmp_path / "run").folder)
    data.write_text(data.read_text().replace('"level": 1', '"level": 2', 1))
    with pytest.raises(CheckpointError, match=r"has changed .other columns of the data: fingerprint"):
        go(config, letters, quiet, folder, resume=True)


def test_a_folder_with_a_checkpoint_says_so_and_holds_one_run_at_a_time(small_config, letters, quiet, tmp_path):
    config = small_config(**EVERY)
    folder = before_its_end(go(config, letters, quiet, tmp_path / "run").folder)
    with pytest.raises(ConfigError, match=r"holds a run with a checkpoint.*--resume. .in Python: resume=True"):
        go(config, letters, quiet, folder)
    other = RunFolder(folder)
    other.lock()
    with pytest.raises(ConfigError, match="another run is going on"):
        go(config, letters, quiet, folder, resume=True)
    other.release()
    go(config, letters, quiet, folder, resume=True)


def test_the_summary_has_the_evaluations_before_the_stop(small_config, letters, quiet, tmp_path):
    config = small_config(**EVERY, evaluation={"problems": 4, "modes": ["sampled"], "at_start": True, "every": 2})

    def stop(report):
        if report.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError):
        go(config, letters, quiet, tmp_path / "run", on_step=stop)
    summary = go(config, letters, quiet, tmp_path / "run", resume=True).summary
    assert [row["stage"] for row in summary["evaluations"]] == ["base", "final"]
    assert [row["stage"] for row in summary["training_evaluations"]] == ["step-2"]
    assert summary["comparison"]["before"] == "base"


def half(text):
    lines = text.splitlines(keepends=True)
    return "".join(lines[: len(lines) // 2])


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("evaluations/base-sampled.jsonl", lambda text: "5\n"),
        ("evaluations/base-sampled.jsonl", lambda text: "{}\n" * 4),
        ("evaluations/base-sampled.jsonl", lambda text: text.replace('"strict"', '"strikt"')),
        ("evaluations/base-sampled.jsonl", half),
        ("evaluations/base-sampled.jsonl", lambda text: ""),
        ("trained.json", lambda text: '{"step": 4, "steps_asked": 4, "evaluations": [{}]}'),
        ("trained.json", lambda text: '{"step": 4, "steps_asked": 4, "evaluations": 5}'),
    ],
)
def test_an_evaluation_that_is_not_whole_is_left_out_which_is_told(small_config, letters, tmp_path, capsys, name, damaged):
    config = small_config(training={"steps": 4}, evaluation={"problems": 4, "modes": ["sampled"], "at_start": True})
    folder = go(config, letters, Console(quiet=True), tmp_path / "run").folder
    state = {"step": 4, "steps_asked": 4, "evaluations": json.loads((folder / "summary.json").read_text())["evaluations"][:1]}
    (folder / "trained.json").write_text(json.dumps(state))
    before_its_end(folder)
    (folder / name).write_text(damaged((folder / name).read_text()))
    capsys.readouterr()
    summary = go(config, letters, Console(width=300), folder, resume=True).summary
    assert [row["stage"] for row in summary["evaluations"]] == ["final"]
    what = "base (sampled)" if name.startswith("evaluations") else "without a name"
    assert f"LEFT OUT: the evaluation {what} is not whole in {folder / 'evaluations'} any more" in capsys.readouterr().out


@pytest.mark.parametrize("link", [False, True])
def test_checkpoints_that_are_no_folder_are_refused_and_nothing_is_cut(small_config, letters, quiet, tmp_path, link):
    config = small_config(**EVERY)
    folder = before_its_end(go(config, letters, quiet, tmp_path / "run").folder)
    (folder / "trained.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "checkpoints")
    if link:
        (folder / "checkpoints").symlink_to(tmp_path / "not_mounted")
    else:
        (folder / "checkpoints").touch()
    for _ in range(2):  # its lock is not kept
        with pytest.raises(
            CheckpointError, match="checkpoints is no folder, and a run keeps its checkpoints in one: put it back"
        ):
            go(config, letters, quiet, folder, resume=True)
    assert steps_in(folder) == [1, 2, 3, 4]


@pytest.mark.slow
def test_the_last_good_checkpoint_is_one_that_was_learnt_from(small_config, letters, quiet, tmp_path):
    """The first update of step 4 ruins the weights: what is saved after it is set aside, and the run goes on from before it."""
    config = small_config(training={"steps": 12}, output={"checkpoint_every": 1}, optimizer={"max_grad_norm": None})
    spoilt = small_config(
        training={"steps": 12}, output={"checkpoint_every": 1}, optimizer={"max_grad_norm": None, "learning_rate": 1e30}
    )

    def stop(report):
        if report.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    folder = tmp_path / "run"
    with pytest.raises(StoppedError):
        go(config, letters, quiet, folder, on_step=stop)
    with pytest.raises(
        TrainingError, match=r"5 updates in a row.* the last good checkpoint is .*step-3; later ones are set aside"
    ):
        go(spoilt, letters, quiet, folder, resume=True, accept_changes=True)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-3", "suspect-step-4"]
    go(config, letters, quiet, folder, resume=True)
    assert steps_in(folder) == [*range(1, 13)]


def test_without_a_good_checkpoint_none_is_named(small_config, letters, quiet, tmp_path):
    config = small_config(
        training={"steps": 12}, output={"checkpoint_every": 1}, optimizer={"max_grad_norm": None, "learning_rate": 1e30}
    )
    with pytest.raises(TrainingError, match=r"from the weights of the checkpoints, up to .*step-1, no sound update was made"):
        go(config, letters, quiet, tmp_path / "run")


def test_a_batch_comes_back_as_it_was_with_every_field():
    """A field that is added to groups or completions, and forgotten here, would be lost between two updates."""
    turns = (Turn("assistant", "a", 1, (ToolCall("f", {"x": [1]}, "3", "raised"),)), Turn("tool", "3", 1))
    completion = Completion(
        "a", (1, 2), (-0.1, -1e-7), "length", sample=3, policy_version=4, temperature=0.5, turns=turns, reward=1.5
    )
    steps = StepScores(0.5, (((1, 1.0), (2, 0.25)),))
    group = Group(
        Prompt(Problem("p", "?", "1"), "?", (1,)), (completion,), (0.1 + 0.2,), {"f": (None,)}, {"g": steps}, (0.3,), {"f": 2.0}
    )
    for kind, made in ((Group, group), (Completion, completion), (StepScores, steps)):
        defaults = [f for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING]
        assert all(getattr(made, f.name) != f.default for f in defaults), "a field is not tried"
    held = HeldWindow()
    held.load_checkpoint_state({}, json.loads(json.dumps({"groups": [_group_values(group)]})))
    assert held.groups(lambda problem: group.prompt) == [group]
