"""``--resume`` on a run that is finished, or was ended while it finished: nothing that it came to is lost."""

import hashlib
import json
import os
import signal
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from groupwise.cli import app
from groupwise.config import dump_config
from groupwise.durable import write_bytes
from groupwise.errors import CheckpointError, StoppedError, TrainingError
from groupwise.evaluation import evaluate_stage
from groupwise.models.load import save_model
from groupwise.tracking import RunFolder
from groupwise.tracking.reading import read_run
from groupwise.training import checkpoint, ending
from groupwise.training.checkpoint_folder import latest_checkpoint, read_state
from groupwise.training.loop import train
from groupwise.training.run import Run
from tests.survival.kills import differences
from tests.survival.test_carrying_on import steps_in

CHECKPOINTS = {"checkpoint_every": 2, "keep_checkpoints": 4}


class Killed(BaseException):
    """Stands for SIGKILL: nothing that would write is called after it."""


def go(config, letters, quiet, folder, **more):
    return train(config, rewards=letters, console=quiet, run_folder=folder, **more)


def content(folder):
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.mark.parametrize("output", [{}, CHECKPOINTS])
def test_a_finished_run_is_left_as_it_is(small_config, letters, tmp_path, output, capsys):
    config = small_config(output=output, evaluation={"at_start": True})
    first = go(config, letters, Console(), tmp_path / "run")
    before = content(first.folder)
    capsys.readouterr()
    again = go(config, letters, Console(width=200), tmp_path / "run", resume=True)
    assert content(first.folder) == before
    assert (again.folder, again.summary) == (first.folder, json.loads((first.folder / "summary.json").read_text()))
    assert capsys.readouterr().out == f"{tmp_path / 'run'} finished after step 2: nothing to resume.\n"
    fewer = small_config(output=output, training={"steps": 1})
    assert go(fewer, letters, Console(quiet=True), tmp_path / "run", resume=True).summary == again.summary


def test_a_run_that_a_callback_ended_is_finished(small_config, letters, quiet, tmp_path):
    config = small_config(training={"steps": 4}, output=CHECKPOINTS)
    folder = go(config, letters, quiet, tmp_path / "run", on_step=lambda report: report.step < 3).folder
    before = content(folder)
    assert go(config, letters, quiet, folder, resume=True).summary["steps"] == 3
    assert content(folder) == before


def test_a_run_of_an_earlier_version_is_finished_where_it_has_a_summary(small_config, letters, quiet, tmp_path):
    """Its summary does not say how many steps it made."""
    config = small_config(output=CHECKPOINTS)
    folder = go(config, letters, quiet, tmp_path / "run").folder
    summary = json.loads((folder / "summary.json").read_text())
    del summary["steps"], summary["steps_asked"]
    (folder / "summary.json").write_text(json.dumps(summary))
    before = content(folder)
    assert go(config, letters, quiet, folder, resume=True).summary == summary
    assert content(folder) == before


def test_more_steps_without_a_checkpoint_are_refused(small_config, letters, quiet, tmp_path):
    folder = go(small_config(), letters, quiet, tmp_path / "run").folder
    before = content(folder)
    with pytest.raises(CheckpointError, match=r"made its 2 steps and kept no checkpoint.*step 4.*model\.name=.*final_model"):
        go(small_config(training={"steps": 4}), letters, quiet, folder, resume=True)
    assert content(folder) == before


def test_epochs_are_counted_before_a_run_is_called_finished(small_config, letters, quiet, tmp_path):
    def epochs(number):
        return small_config(training={"epochs": number}, output=CHECKPOINTS)

    first = go(epochs(0.3), letters, quiet, tmp_path / "run")
    before = content(first.folder)
    assert go(epochs(0.3), letters, quiet, first.folder, resume=True).summary == json.loads(
        (first.folder / "summary.json").read_text()
    )
    assert content(first.folder) == before
    assert go(epochs(0.6), letters, quiet, first.folder, resume=True).summary["steps"] > first.summary["steps"]


def test_more_steps_keep_what_there_was_until_its_successor_is_whole(small_config, letters, quiet, tmp_path, monkeypatch):
    whole = go(small_config(training={"steps": 4}, output=CHECKPOINTS), letters, quiet, tmp_path / "whole").folder
    folder = go(small_config(output=CHECKPOINTS), letters, quiet, tmp_path / "run").folder
    model, summary = content(folder / "final_model"), (folder / "summary.json").read_bytes()
    settings, begun = (folder / "config.yaml").read_bytes(), (folder / "config.yaml").stat().st_mtime_ns
    judged = (folder / "evaluations" / "final-sampled.jsonl").read_bytes()
    longer = small_config(training={"steps": 4}, output=CHECKPOINTS)

    def die(report):
        raise Killed

    for _ in range(2):  # killed in the first step, twice
        with pytest.raises(Killed):
            go(longer, letters, quiet, folder, resume=True, on_step=die)
        assert content(folder / "final_model") == model
        assert (folder / "summary-step-2.json").read_bytes() == summary
        assert (folder / "evaluations" / "end-2-sampled.jsonl").read_bytes() == judged
        assert (folder / "config-step-2.yaml").read_bytes() == settings
        assert read_run(folder).config.model_dump() == longer.model_dump(), "what the report and the doctor go by"
        assert (folder / "config.yaml").stat().st_mtime_ns == begun, "no later run than it was"
    with monkeypatch.context() as patch:
        patch.setattr("groupwise.tracking.run_folder.os.rename", no_room)
        with pytest.raises(TrainingError, match="No space left"):
            go(longer, letters, quiet, folder, resume=True)
    assert content(folder / "final_model") == model
    result = go(longer, letters, quiet, folder, resume=True)
    assert steps_in(folder) == [1, 2, 3, 4]
    assert result.summary["steps"] == 4
    assert [p.name for p in folder.glob(".*")] == [".lock"]
    assert differences(whole, folder) == []


def test_an_earlier_end_s_evaluation_is_kept_and_is_none_of_the_continued_run(small_config, letters, quiet, tmp_path):
    settings = {"output": CHECKPOINTS, "evaluation": {"every": 2}}
    folder = go(small_config(**settings), letters, quiet, tmp_path / "run").folder
    judged = (folder / "evaluations" / "final-sampled.jsonl").read_bytes()
    go(small_config(training={"steps": 4}, **settings), letters, quiet, folder, resume=True)
    assert (folder / "evaluations" / "end-2-sampled.jsonl").read_bytes() == judged
    assert [evaluation.stage for evaluation in read_run(folder).evaluations] == ["step-2", "final"]
    scored_by = read_state(folder / "checkpoints" / "step-4")["scored_by"]
    assert {stage: how["mode"] for stage, how in scored_by.items()} == {"step-2": "sampled"}


def no_room(*words, **named):
    raise OSError(28, "No space left on device")


def no_room_for(*names):
    """`write_bytes` on a disk that has no room for files of these names."""

    def write(path, content):
        if path.name in names:
            no_room()
        write_bytes(path, content)

    return write


def test_more_steps_on_a_full_disk_leave_the_run_as_it_ended(small_config, letters, quiet, tmp_path, monkeypatch):
    folder = go(small_config(output=CHECKPOINTS), letters, quiet, tmp_path / "run").folder
    (folder / "trained.json").write_text("{}")
    before, longer = content(folder), small_config(training={"steps": 4}, output=CHECKPOINTS)
    with monkeypatch.context() as patch:
        patch.setattr("groupwise.training.start.os.posix_fallocate", no_room)
        for _ in range(2):  # the folder's lock is not kept
            with pytest.raises(TrainingError, match=r"/run' cannot be written \(No space left on device\): a run needs"):
                go(longer, letters, quiet, folder, resume=True)
    assert content(folder) == before
    assert go(longer, letters, quiet, folder, resume=True).summary["steps"] == 4


@pytest.mark.parametrize("part", ["make_trackers", "_load_parts"])
def test_more_steps_that_are_refused_or_interrupted_leave_the_run_as_it_ended(
    small_config, letters, quiet, tmp_path, monkeypatch, part
):
    """Also the lines and settings of a run that goes on from before its last step."""
    folder = go(small_config(output=CHECKPOINTS, training={"steps": 3}), letters, quiet, tmp_path / "run").folder
    before, longer = content(folder), small_config(training={"steps": 4}, output=CHECKPOINTS)

    def refuse(*words, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"groupwise.training.start.{part}", refuse)
        for _ in range(2):  # the folder's lock is not kept
            with pytest.raises(KeyboardInterrupt):
                go(longer, letters, quiet, folder, resume=True)
    assert content(folder) == before
    assert go(longer, letters, quiet, folder, resume=True).summary["steps"] == 4
    assert steps_in(folder) == [1, 2, 3, 4]
    times = [json.loads(line)["time_s"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("place", "name"),
    [("tracking.run_folder", "metrics.jsonl"), ("tracking.files", "config.yaml"), ("tracking.files", "environment.json")],
)
def test_a_file_that_the_disk_does_not_take_when_a_run_is_resumed(
    small_config, letters, quiet, tmp_path, monkeypatch, place, name
):
    config = small_config(output=CHECKPOINTS)
    folder = go(config, letters, quiet, tmp_path / "run").folder
    (folder / "summary.json").unlink()
    if name == "config.yaml":
        config = small_config(output={**CHECKPOINTS, "log_completions": 1})
    with monkeypatch.context() as patch:
        patch.setattr(f"groupwise.{place}.write_bytes", no_room_for(name))
        for _ in range(2):
            with pytest.raises(TrainingError, match=r"cannot be written \(No space left on device\): a run needs"):
                go(config, letters, quiet, folder, resume=True)
    assert go(config, letters, quiet, folder, resume=True).summary["steps"] == 2


def test_a_kill_between_two_renames_keeps_the_earlier_model(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for place in (folder.final_model, folder.new_model):
        place.mkdir(parents=True)
        (place / "config.json").write_text(place.name)
    folder.config.write_text("")
    folder.final_model.rename(tmp_path / "run" / ".final_model.earlier.partial")  # what put_new_model does first
    RunFolder.reopen(folder.path).release()
    assert (folder.final_model / "config.json").read_text() == "final_model"
    assert [p.name for p in folder.path.glob(".*")] == [".lock"]


LORA = {"rank": 2, "alpha": 4}


@pytest.mark.parametrize(
    ("output", "lora"),
    [
        ({}, LORA),
        (CHECKPOINTS, None),
        *(pytest.param(*both, marks=pytest.mark.slow) for both in (({}, None), (CHECKPOINTS, LORA))),
    ],
)
def test_a_kill_in_the_last_evaluation_costs_nothing_but_it(small_config, letters, quiet, tmp_path, monkeypatch, output, lora):
    """Also without a checkpoint: the model was written before it was judged."""
    config = small_config(training={"steps": 3}, output=output, evaluation={"at_start": True, "every": 2}, model={"lora": lora})
    whole = go(config, letters, quiet, tmp_path / "whole").folder
    ends_in(monkeypatch, "final", Killed)
    with pytest.raises(Killed):
        go(config, letters, quiet, tmp_path / "run")
    monkeypatch.undo()
    model = content(tmp_path / "run" / "final_model")
    monkeypatch.setattr(Run, "learn", lambda *words: pytest.fail("a step was made again"))
    monkeypatch.setattr("groupwise.training.run.Learner", lambda *words, **more: pytest.fail("an optimiser was made"))
    result = go(config, letters, quiet, tmp_path / "run", resume=True)
    assert content(result.folder / "final_model") == model == content(whole / "final_model")
    assert not (result.folder / "trained.json").exists()
    assert differences(whole, result.folder) == []
    assert [row["stage"] for row in result.summary["evaluations"]] == ["base", "final"]
    assert [row["stage"] for row in result.summary["training_evaluations"]] == ["step-2"]
    assert result.summary["steps"] == 3


def test_a_run_that_a_callback_ended_and_a_kill_stopped_is_judged_and_learns_no_more(
    small_config, letters, quiet, tmp_path, monkeypatch
):
    config = small_config(training={"steps": 4}, output=CHECKPOINTS)
    ends_in(monkeypatch, "final", Killed)
    with pytest.raises(Killed):
        go(config, letters, quiet, tmp_path / "run", on_step=lambda report: report.step < 3)
    monkeypatch.undo()
    model = content(tmp_path / "run" / "final_model")
    monkeypatch.setattr(Run, "learn", lambda *words: pytest.fail("a step was made"))
    result = go(config, letters, quiet, tmp_path / "run", resume=True)
    assert content(result.folder / "final_model") == model
    assert result.summary["steps"] == 3
    assert [row["stage"] for row in result.summary["evaluations"]][-1] == "final"


@pytest.mark.slow
def test_more_steps_of_a_run_that_was_ended_so(small_config, letters, quiet, tmp_path, monkeypatch):
    """Without a checkpoint they cannot be made, and its model stays; with one they are."""
    for output in ({}, CHECKPOINTS):
        folder = tmp_path / f"run-{len(output)}"
        ends_in(monkeypatch, "final", Killed)
        with pytest.raises(Killed):
            go(small_config(output=output), letters, quiet, folder)
        monkeypatch.undo()
        longer, before = small_config(training={"steps": 4}, output=output), content(folder)
        if not output:
            with pytest.raises(CheckpointError, match="kept no checkpoint"):
                go(longer, letters, quiet, folder, resume=True)
            assert content(folder) == before
        else:
            go(longer, letters, quiet, folder, resume=True)
            assert steps_in(folder) == [1, 2, 3, 4]


def test_a_signal_in_the_evaluation_that_is_made_up_for_saves_no_half_state(small_config, letters, quiet, tmp_path, monkeypatch):
    config = small_config()
    ends_in(monkeypatch, "final", Killed)
    with pytest.raises(Killed):
        go(config, letters, quiet, tmp_path / "run")
    monkeypatch.undo()

    def stop():
        os.kill(os.getpid(), signal.SIGTERM)

    ends_in(monkeypatch, "final", stop)
    with pytest.raises(StoppedError, match=r"after the last step; .*final_model is whole: judge it with --resume .*run_folder="):
        go(config, letters, quiet, tmp_path / "run", resume=True)
    monkeypatch.undo()
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
    assert go(config, letters, quiet, tmp_path / "run", resume=True).summary["steps"] == 2


def test_a_model_that_cannot_be_written_leaves_the_earlier_one(small_config, letters, quiet, tmp_path, monkeypatch):
    folder = go(small_config(output=CHECKPOINTS), letters, quiet, tmp_path / "run").folder
    model = content(folder / "final_model")

    def half(policy, target):
        if "final_model" in str(target):
            (target / "half").mkdir(parents=True)
            raise Killed
        return save_model(policy, target)

    monkeypatch.setattr("groupwise.training.ending.save_model", half)
    longer = small_config(training={"steps": 4}, output=CHECKPOINTS)
    with pytest.raises(Killed):
        go(longer, letters, quiet, folder, resume=True)
    monkeypatch.undo()
    assert content(folder / "final_model") == model
    go(longer, letters, quiet, folder, resume=True)
    assert [p.name for p in folder.glob(".*")] == [".lock"]


def test_by_the_command_line(small_config, tmp_path):
    reward = tmp_path / "mine.py"
    reward.write_text("def size(completions, **columns):\n    return [float(len(str(c))) for c in completions]\n")
    config = small_config(rewards={"functions": [{"function": f"{reward}:size"}]})
    settings = tmp_path / "mine.yaml"
    settings.write_text(dump_config(config), encoding="utf-8")
    words = ["train", str(settings), "--run-folder", str(tmp_path / "run"), "--resume"]
    assert CliRunner().invoke(app, words).exit_code == 0
    before = content(tmp_path / "run")
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 0
    assert "finished after step 2: nothing to resume" in " ".join(again.output.split())
    as_json = CliRunner().invoke(app, [*words, "--json"])
    assert json.loads(as_json.stdout)["summary"]["steps"] == 2
    more = CliRunner().invoke(app, [*words, "training.steps=5"])
    assert more.exit_code == 2
    assert "kept no checkpoint" in more.output
    assert content(tmp_path / "run") == before


def ends_in(monkeypatch, stage, what):
    def evaluate(*words, **named):
        if named["stage"] == stage:
            if isinstance(what, type):
                raise what
            what()
        return evaluate_stage(*words, **named)

    monkeypatch.setattr("groupwise.training.run.evaluate_stage", evaluate)


def test_the_model_counts_as_trained_when_the_last_checkpoint_is_whole(small_config, letters, quiet, tmp_path, monkeypatch):
    """Whoever is killed while judging goes on with the judgement alone, and writes no checkpoint any more."""
    write, note, found = checkpoint.write_snapshot, ending.write_json, []

    def slowly(*given, **named):
        time.sleep(0.5)
        return write(*given, **named)

    def look(path, about):
        found.append(latest_checkpoint(path.parent / "checkpoints"))
        note(path, about)

    monkeypatch.setattr(checkpoint, "write_snapshot", slowly)
    monkeypatch.setattr(ending, "write_json", look)
    config = small_config(output={**CHECKPOINTS, "checkpoint_in_background": True})
    folder = go(config, letters, quiet, tmp_path / "run").folder
    assert found == [folder / "checkpoints" / "step-2"]
