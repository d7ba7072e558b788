"""``--resume`` by two processes. On a run that they have finished neither of them begins anything, and nothing changes; a folder that one
of them does not see is refused."""

import json
import shutil
import signal
import threading

import pytest

from groupwise.errors import CheckpointError, StoppedError
from groupwise.training import checkpoint_folder
from groupwise.training import run as run_module
from groupwise.training import start as start_module
from groupwise.training.checkpoint_folder import seal
from groupwise.training.loop import train
from groupwise.training.resume import would_resume
from groupwise.training.setup import prepare
from groupwise.training.stopping import StopSignals
from tests.distributed.two_processes import HERE, launch_two


def content(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_two_leave_a_finished_run_as_it_is(train_in, small_config):
    """In threads."""
    config = small_config(output={"checkpoint_every": 2}, evaluation={"at_start": True})
    _, first = train_in(2, "run", config)
    before = content(first.folder)
    steps, again = train_in(2, "run", config, resume=True)
    assert (steps, again.folder) == ([], first.folder)
    assert again.summary == json.loads((first.folder / "summary.json").read_text())
    assert content(first.folder) == before


def test_a_checkpoint_is_checked_once_and_by_the_first_process(train_in, small_config, monkeypatch):
    """Its files are read whole for that, by all processes from one disk."""
    train_in(2, "run", small_config(output={"checkpoint_every": 2}))
    checked, damage = [], checkpoint_folder.damage

    def noting(checkpoint, **more):
        checked.append((threading.current_thread().name, checkpoint.name))
        return damage(checkpoint, **more)

    monkeypatch.setattr(checkpoint_folder, "damage", noting)
    steps, _ = train_in(2, "run", small_config(training={"steps": 3}, output={"checkpoint_every": 2}), resume=True)
    assert [step.step for step in steps] == [3]
    assert checked == [("process 0 of 2", "step-2")]


def disks_of(monkeypatch, folder, *seen):
    """Let process i of two find the earlier model in ``folder / seen[i]``, as where names mean other disks."""

    def model(self):
        return folder / seen[int(threading.current_thread().name.split()[1])]

    monkeypatch.setattr(start_module.Beginning, "model", property(model))


@pytest.mark.parametrize("sees", [0, 1])
def test_a_disk_that_is_not_shared_is_refused_in_both(sees, small_config, train_in, tmp_path, monkeypatch):
    disks_of(monkeypatch, tmp_path, *("here", "nowhere")[:: 1 - 2 * sees])
    (tmp_path / "here").mkdir()
    with pytest.raises(CheckpointError, match=f"process {1 - sees} of 2 does not see .*: a run's folder must be on a disk"):
        train_in(2, "run", small_config())


def test_a_batch_that_one_process_began_is_refused_before_weights_are_read(
    small_config, letters, quiet, in_threads, tmp_path, monkeypatch
):
    """A checkpoint between two updates has the batch as one process holds it."""
    config = small_config(output={"checkpoint_every": 1})
    folder = train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run").folder
    checkpoint = (folder / "checkpoints" / "step-1").rename(folder / "checkpoints" / "step-1-update-1")
    state = json.loads((checkpoint / "state.json").read_text())
    state["parts"]["window"] = {"updates": 1}
    (checkpoint / "state.json").write_text(json.dumps(state))
    seal(checkpoint)
    monkeypatch.setattr(start_module, "_load_parts", lambda *_: pytest.fail("weights were read"))
    with pytest.raises(CheckpointError, match="written between two updates of a batch, by one process, and 2 were started"):
        in_threads(2, lambda world: start_module.start(config, world, rewards=letters, resume_from=checkpoint, console=quiet))
    prepared = prepare(config.model_copy(update={"training": config.training.model_copy(update={"steps": 5})}), letters)
    for gone in ("final_model", "checkpoints/step-2", "checkpoints/step-3"):
        shutil.rmtree(folder / gone, ignore_errors=True)
    for gone in ("summary.json", "trained.json"):
        (folder / gone).unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="and 2 were started: resume with one"):
        would_resume(folder, prepared, accept=True, processes=2)
    assert would_resume(folder, prepared, accept=True)[0][-1] == f"It would resume from {checkpoint}."


@pytest.mark.parametrize("seen_by", [(0,), (1,), ()])
def test_the_first_process_decides_whether_a_run_is_new(seen_by, small_config, in_threads, letters, tmp_path, monkeypatch):
    """What others see of the folder does not matter: where it did, they met in other messages, or waited."""
    checked = []
    for rank in seen_by:
        (tmp_path / str(rank)).mkdir()

    def begin(world):
        start_module.start(
            small_config(), world, rewards=letters, run_folder=tmp_path / str(world.rank), resume=True,
            check=lambda prepared: checked.append(world.rank) or [],
        )  # fmt: skip

    def stop(*_):
        raise CheckpointError("far enough")

    monkeypatch.setattr(start_module, "_load_parts", stop)
    with pytest.raises(CheckpointError, match="far enough"):
        in_threads(2, begin)
    assert checked == ([] if 0 in seen_by else [0])


@pytest.mark.parametrize(("entry", "loading"), [({}, [0, 1]), ({"scope": "batch"}, [0]), ({"normalise": "mean_std"}, [0])])
def test_rewards_are_loaded_where_they_score(entry, loading, small_config, in_threads, letters, tmp_path, monkeypatch):
    """A reward model's weights take memory of a GPU."""
    loaded = []

    def load(suite):
        loaded.append(int(threading.current_thread().name.split()[1]))
        return []

    def stop(*_):
        raise CheckpointError("far enough")

    monkeypatch.setattr("groupwise.rewards.suite.RewardSuite.load", load)
    monkeypatch.setattr(start_module, "_load_parts", stop)
    config = small_config(rewards={"functions": [{"function": "letters", **entry}]})
    with pytest.raises(CheckpointError, match="far enough"):
        in_threads(2, lambda world: start_module.start(config, world, rewards=letters, run_folder=tmp_path / "run"))
    assert sorted(loaded) == loading


def signals_in(monkeypatch, name, when=lambda named: True):
    """Have a SIGTERM come to every process in that function of the run's, which does what it does."""
    made, function = [], getattr(run_module, name)

    def signals(**settings):
        made.append(StopSignals(**settings))
        return made[-1]

    def signalled(*words, **named):
        found = function(*words, **named)
        for one in made if when(named) else ():
            one.received = signal.SIGTERM
        return found

    monkeypatch.setattr(start_module, "StopSignals", signals)
    monkeypatch.setattr(run_module, name, signalled)


@pytest.mark.parametrize("stage", ["step-1", "final"])
def test_a_signal_in_an_evaluation_ends_what_there_is_left_to_do(stage, train_in, small_config, tmp_path, monkeypatch):
    """Both come to the end of the evaluation, and after the last one nothing is left: its summary is written."""
    signals_in(monkeypatch, "evaluate_stage", lambda named: named["stage"] == stage)
    config = small_config(evaluation={"every": 1})
    if stage == "final":
        _, result = train_in(2, "run", config)
        assert [row["stage"] for row in result.summary["evaluations"]] == ["final"]
    else:
        with pytest.raises(StoppedError, match="after step 1, which is saved"):
            train_in(2, "run", config)
    assert (tmp_path / "run" / "summary.json").exists() == (stage == "final")


def test_a_signal_in_the_warm_start_loses_none_of_it(train_in, small_config, tmp_path, monkeypatch):
    signals_in(monkeypatch, "warm_start")
    with pytest.raises(StoppedError, match="after step 0, which is saved"):
        train_in(2, "run", small_config(warm_start={"steps": 2, "examples_per_step": 4}))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-0"]


@pytest.mark.soak
def test_two_real_processes_do(small_config, tmp_path):
    config = small_config(output={"checkpoint_every": 2}, evaluation={"at_start": True})
    assert launch_two(config, tmp_path, tmp_path, script=HERE / "run_finished.py") == 0
    before = content(tmp_path / "before")
    assert {"summary.json", "metrics.jsonl", "final_model/model.safetensors"} <= before.keys()
    assert content(tmp_path / "run") == before
    for rank in range(2):
        first, again = json.loads((tmp_path / f"told-{rank}.json").read_text())
        assert again == first
