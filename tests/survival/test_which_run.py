"""Which run ``--resume`` means, and what is said of an earlier one that could be resumed."""

import json
import os
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from groupwise.cli import app
from groupwise.config import dump_config
from groupwise.errors import CheckpointError, ConfigError
from groupwise.tracking import RunFolder
from groupwise.training.loop import train
from groupwise.training.resume import newest_run, unfinished_note


@pytest.fixture
def runs(tmp_path):
    """``runs(name, age, saved=None, finished=False)`` makes a run's folder; the smaller the age, the newer."""

    def make(name, age, saved=None, finished=False):
        folder = tmp_path / "runs" / name
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text("training: {steps: 9}\n")
        os.utime(folder / "config.yaml", (10**9 - age, 10**9 - age))
        if saved:
            (folder / "checkpoints" / saved).mkdir()
            (folder / "checkpoints" / saved / "state.json").write_text("{}")
        if finished:
            (folder / "summary.json").write_text(json.dumps({"steps": 9}))
        return folder

    return make


def chosen(tmp_path, recipe="mine"):
    said = []
    return newest_run(recipe, said.append, tmp_path / "runs").name, said


def note(tmp_path, recipe="mine"):
    found = unfinished_note(recipe, tmp_path / "runs")
    return found and found.replace(f"{tmp_path}/", "")


A, B, C = (f"mine-20260101-00000{i}" for i in (1, 2, 3))
RESUMED = f"--resume (in Python: resume=True, run_folder='runs/{A}')"


def test_one_with_progress_goes_before_a_newer_empty_one_which_is_named(runs, tmp_path):
    runs(A, 30, "step-40")
    runs(B, 20)
    runs(C, 10, finished=True)
    name, (sentence,) = chosen(tmp_path)
    assert name == A
    assert re.search(rf"{A} is resumed; unfinished too: \S*{B} \(nothing saved\)\. Choose with --run-folder\.", sentence)
    assert note(tmp_path) == f"runs/{A} stopped after step 40; {RESUMED} continues it. This is a new run."


def test_one_that_is_going_on_is_left_alone(runs, tmp_path):
    runs(A, 30, "step-4")
    going_on = RunFolder(runs(B, 20, "step-8-update-2"))
    going_on.lock()
    name, (sentence,) = chosen(tmp_path)
    assert name == A
    assert f"{B} (going on)" in sentence
    assert "step 4;" in note(tmp_path)
    going_on.release()
    assert chosen(tmp_path)[0] == B
    assert "step 8;" in note(tmp_path)


def test_a_finished_one_is_taken_only_without_any_that_has_progress(runs, tmp_path):
    runs(A, 30)
    runs(B, 20, finished=True)
    assert chosen(tmp_path)[0] == B
    assert note(tmp_path) is None


def test_many_others_are_counted(runs, tmp_path):
    for i in range(6):
        runs(f"mine-20260101-00001{i}", 20 - i, f"step-{i + 1}")
    name, (sentence,) = chosen(tmp_path)
    assert name == "mine-20260101-000015"
    assert sentence.count("saved up to") == 3
    assert "and 2 more" in sentence


def test_another_recipe_whose_name_begins_alike_is_not_meant(runs, tmp_path):
    runs("gsm8k-0.5b-20260101-000000", 10, "step-1")
    with pytest.raises(CheckpointError, match="no run of gsm8k was found"):
        newest_run("gsm8k", print, tmp_path / "runs")
    assert unfinished_note("gsm8k", tmp_path / "runs") is None
    assert chosen(tmp_path, "gsm8k-0.5b") == ("gsm8k-0.5b-20260101-000000", [])


def test_one_that_was_ended_while_it_was_judged_is_told_so(runs, tmp_path):
    (runs(A, 30) / "trained.json").write_text("{}")
    assert note(tmp_path) == f"runs/{A} stopped before its last evaluation; {RESUMED} continues it. This is a new run."


def test_a_new_run_says_so_and_is_made_all_the_same(runs, small_config, letters, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runs(A, 30, "step-40")
    result = train(small_config(training={"steps": 1}), recipe="mine", rewards=letters, console=Console(width=200))
    assert result.folder.name != A
    assert f"runs/{A} stopped after step 40; {RESUMED} continues it. This is a new run." in capsys.readouterr().out
    train(small_config(training={"steps": 1}), rewards=letters, console=Console(width=200), run_folder=tmp_path / "named")
    assert "--resume" not in capsys.readouterr().out


def test_python_is_told_which(small_config, letters, quiet, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"give run_folder, or set output\.folder"):
        train(small_config(), rewards=letters, console=quiet, resume=True)
    assert not (tmp_path / "runs").exists()
    named = small_config(training={"steps": 1}, output={"folder": "mine"})
    for _ in range(2):
        assert train(named, rewards=letters, console=quiet, resume=True).folder.name == "mine"


def test_by_the_command_line(small_config, runs, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reward = tmp_path / "mine.py"
    reward.write_text("def size(completions, **columns):\n    return [float(len(str(c))) for c in completions]\n")
    config = small_config(
        rewards={"functions": [{"function": f"{reward}:size"}]}, output={"checkpoint_every": 1}, training={"steps": 2}
    )
    (tmp_path / "mine.yaml").write_text(dump_config(config), encoding="utf-8")
    assert CliRunner().invoke(app, ["train", "mine.yaml"]).exit_code == 0
    (folder,) = (tmp_path / "runs").iterdir()
    (folder / "summary.json").unlink()
    runs("mine-20990101-000000", -(10**9))
    resumed = CliRunner().invoke(app, ["train", "mine.yaml", "--resume"])
    said = " ".join(resumed.output.split())
    assert resumed.exit_code == 0, said
    assert f"runs/{folder.name} is resumed; unfinished too: runs/mine-20990101-000000 (nothing saved)." in said
    assert f"Resuming from runs/{folder.name}/checkpoints/step-2" in said
