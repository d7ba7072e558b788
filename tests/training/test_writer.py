"""Checkpoints written beside the run: the state is that of the moment, and what goes wrong is heard of."""

import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from groupwise.distributed import failures
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.errors import CheckpointError, TrainingError
from groupwise.models.load import copy_to_cpu
from groupwise.rollout import rollout_scope
from groupwise.training import checkpoint as checkpoints
from groupwise.training.checkpoint import CheckpointWriter
from groupwise.training.checkpoint_folder import is_sound
from groupwise.training.loop import train
from groupwise.training.run import Run
from groupwise.training.sharding.divided import AdapterOnDivided
from groupwise.training.start import start


def manifests(folder):
    return {p.name: json.loads((p / "manifest.json").read_text())["files"] for p in (folder / "checkpoints").iterdir()}


@pytest.mark.parametrize(
    "model",
    [{}, *(pytest.param(one, marks=pytest.mark.slow) for one in ({"dtype": "bfloat16"}, {"lora": {"rank": 2, "alpha": 4}}))],
)
def test_what_is_written_beside_a_run_is_the_state_of_the_moment(small_config, letters, quiet, tmp_path, monkeypatch, model):
    """The first checkpoint is held up until the second batch has been sampled; learning from that waits for it."""
    sections = {"model": model, "training": {"steps": 3}, "algorithm": {"kl": {"beta": 0.1}, "updates_per_batch": 2}}
    sampled, write, learn = threading.Event(), checkpoints._write, Run.learn

    def late(aside, snapshot):
        assert threading.current_thread() is not threading.main_thread()
        assert sampled.wait(60)
        write(aside, snapshot)

    def note(run, rollout):
        if run.done == 1:
            assert not (run.folder.checkpoints / "step-1").exists()
            sampled.set()
        return learn(run, rollout)

    wanted = train(
        small_config(**sections, output={"checkpoint_every": 1, "keep_checkpoints": 3, "checkpoint_in_background": False}),
        rewards=letters, console=quiet, run_folder=tmp_path / "waiting",
    )  # fmt: skip
    monkeypatch.setattr(checkpoints, "_write", late)
    monkeypatch.setattr(Run, "learn", note)
    found = train(
        small_config(**sections, output={"checkpoint_every": 1, "keep_checkpoints": 3}),
        rewards=letters, console=quiet, run_folder=tmp_path / "beside",
    )  # fmt: skip
    one, other = manifests(wanted.folder), manifests(found.folder)
    assert one.keys() == other.keys() == {"step-1", "step-2", "step-3"}
    for name in one:
        for changing in ("state.json", "model/adapter/adapter_config.json"):  # the setting in question; a set in any order
            one[name].pop(changing, None), other[name].pop(changing, None)
        assert one[name] == other[name]


def test_on_a_cpu_a_checkpoint_beside_the_run_takes_no_memory(small_config, letters, quiet, tmp_path):
    run = start(small_config(algorithm={"kl": {"beta": 0.1}}), rewards=letters, console=quiet, run_folder=tmp_path / "run")
    run.begin_learning()
    snapshot = checkpoints.take_snapshot(0, run.policy, run.learner)
    copied = snapshot.copied(run.policy.tokenizer)
    assert snapshot.copied_bytes() == sum(
        t.nbytes for name, of in snapshot.tensors.items() if name.startswith("part-") for t in of.values()
    )
    assert copied.policy.model is run.policy.model
    masters = snapshot.tensors["optimizer.safetensors"]
    assert all(copied.tensors["optimizer.safetensors"][name] is tensor for name, tensor in masters.items())
    run.close()


def test_of_divided_weights_the_critic_is_copied_too(small_config, letters, quiet, tmp_path):
    """What is whole there is written beside the run as it is: nothing of it may be what the next step learns with."""
    run = start(small_config(algorithm={"preset": "ppo"}), rewards=letters, console=quiet, run_folder=tmp_path / "run")
    run.begin_learning()
    run.sharding.divides_weights = True
    snapshot = checkpoints.take_snapshot(0, run.policy, run.learner)
    assert snapshot.is_copy
    run.learner.critic.weight.data.add_(1)
    assert not torch.equal(snapshot.tensors["critic.safetensors"]["weight"], run.learner.critic.weight)
    run.close()


def test_a_checkpoint_of_an_adapter_on_divided_weights_gathers_no_base(small_config, letters, quiet, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    config = small_config(model={"lora": {"rank": 2, "alpha": 4}})
    run = start(config, rewards=letters, console=quiet, run_folder=tmp_path / "run")
    run.begin_learning()
    base = SimpleNamespace(name="fsdp2", whole_policy=lambda policy: pytest.fail("the base was gathered"))
    run.learner.sharding = AdapterOnDivided(run.scorer, run.world, base)
    snapshot = checkpoints.take_snapshot(0, run.policy, run.learner)
    trained = {name: p for name, p in run.policy.model.named_parameters() if p.requires_grad}
    before = {name.replace(".default", ""): p.detach().clone() for name, p in trained.items()}
    with torch.no_grad():
        for parameter in trained.values():
            parameter.add_(1)
    written = checkpoints.write_snapshot(tmp_path / "kept", snapshot, 1)
    found = load_file(written / "model" / "adapter" / "adapter_model.safetensors")
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())
    run.close()


def test_a_copy_shares_nothing_with_the_model_and_ties_what_is_tied(tiny_qwen2):
    model = tiny_qwen2()
    copied = copy_to_cpu(model)
    with torch.no_grad():
        before = {name: p.clone() for name, p in model.named_parameters()}
        for parameter in model.parameters():
            parameter.add_(1)
    assert all(torch.equal(p, before[name]) for name, p in copied.named_parameters())
    assert copied.lm_head.weight is copied.model.embed_tokens.weight


def snapshot(size_bytes=1, copy=SimpleNamespace(is_copy=True)):  # noqa: B008
    return SimpleNamespace(
        name="step-1", policy=SimpleNamespace(tokenizer=None), copied_bytes=lambda: size_bytes, copied=lambda tokenizer: copy
    )


def test_a_failure_in_the_background_is_told_and_ends_nothing(tmp_path, monkeypatch):
    def full(folder, snapshot, keep, keep_best):
        raise CheckpointError("the disk is full")

    monkeypatch.setattr(checkpoints, "write_snapshot", full)
    writer = CheckpointWriter(tmp_path, 2, False, in_background=True)
    writer.begin(snapshot())
    writer.finish()
    assert writer.news() == ["NOT SAVED: the disk is full"]
    assert writer.news() == []
    with pytest.raises(CheckpointError):
        writer.write(snapshot())


@pytest.mark.parametrize("last", [True, False])
def test_a_checkpoint_that_is_waited_for_is_whole_when_another_process_fails_meanwhile(
    small_config, letters, quiet, tmp_path, monkeypatch, last
):
    config = small_config(output={"checkpoint_every": 1, "checkpoint_in_background": False})
    run = start(config, rewards=letters, console=quiet, run_folder=tmp_path / "run")
    run.begin_learning()
    writing, write = threading.Event(), checkpoints._write

    def slowly(aside, snapshot):
        writing.set()
        time.sleep(0.5)
        assert run.world.is_saving()
        write(aside, snapshot)

    monkeypatch.setattr(failures, "_LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(checkpoints, "_write", slowly)
    board = SimpleNamespace(rank=0, read=lambda: failures.Failure(1, "out of luck", 3) if writing.is_set() else None)
    watch = failures.Watch(board, 2, None, run.world.is_saving)
    watch.start()
    with pytest.raises(failures.RankLost):
        run.save(1) if last else run.checkpoint_if_due(0)
    watch.finish()
    run.writer.finish()
    assert is_sound(run.folder.checkpoints / "step-1")
    run.close()


@pytest.mark.parametrize(("is_copy", "on_gpu"), [(True, True), (False, True), (True, False)])
def test_learning_waits_for_what_is_written_from_its_own_weights_or_memory(tmp_path, monkeypatch, is_copy, on_gpu):
    go_on = threading.Event()
    monkeypatch.setattr(checkpoints, "write_snapshot", lambda *words, **more: go_on.wait(60))
    writer = CheckpointWriter(tmp_path, 2, False, in_background=True, beside_learning=on_gpu)
    writer.begin(snapshot(copy=SimpleNamespace(is_copy=is_copy)))
    learning = threading.Thread(target=writer.finish, kwargs={"copies": False})
    learning.start()
    goes_on = is_copy and on_gpu
    learning.join(60 if goes_on else 0.2)
    assert learning.is_alive() == (not goes_on)
    assert writer.is_writing
    go_on.set()
    learning.join()
    writer.finish()
    assert not writer.is_writing


def test_a_copy_is_written_before_the_next_is_made(small_config, letters, quiet, tmp_path, monkeypatch):
    """Of divided weights: both at once would take twice the memory."""
    run = start(small_config(output={"checkpoint_every": 1}), rewards=letters, console=quiet, run_folder=tmp_path / "run")
    run.begin_learning()
    run.sharding.divides_weights = True
    take, writing = checkpoints.take_snapshot, []

    def noting(*words, **more):
        writing.append(run.writer.is_writing)
        return take(*words, **more)

    write, looked_at = checkpoints._write, threading.Event()

    def slowly(aside, snapshot):
        looked_at.wait(0.2 if snapshot.name == "step-1" else 60)
        write(aside, snapshot)

    monkeypatch.setattr("groupwise.training.run.take_snapshot", noting)
    monkeypatch.setattr(checkpoints, "_write", slowly)
    for step in range(2):
        run.checkpoint_if_due(step)
    assert run.writer.is_writing
    assert run.world.is_saving(), "the process is not ended meanwhile"
    looked_at.set()
    assert writing == [False, False]
    run.close()


def test_without_memory_for_a_copy_the_run_waits_for_the_disk(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(checkpoints, "write_snapshot", lambda folder, snapshot, keep, keep_best: written.append(snapshot))
    monkeypatch.setattr(checkpoints, "available_memory_bytes", lambda: 2 * 2**30)
    writer = CheckpointWriter(tmp_path, 2, False, in_background=True)
    for _ in range(2):
        writer.begin(snapshot(size_bytes=2 * 2**30))
    assert [one.name for one in written] == ["step-1", "step-1"], "the state itself, not a copy"
    (told,) = writer.news()
    assert "2.5 GiB of memory, and 2.0 are free" in told
    writer.begin(snapshot(size_bytes=2**30))
    writer.finish()
    assert written[2].is_copy


def test_a_run_tells_of_a_checkpoint_that_was_not_written(small_config, letters, tmp_path, monkeypatch, capsys):
    def full(*words):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "write_tensors", full)
    config = small_config(output={"checkpoint_every": 1})
    result = train(config, rewards=letters, run_folder=tmp_path / "run")
    told = capsys.readouterr().out
    assert told.count("NOT SAVED") == 2
    assert "No space left on device" in told
    assert (result.folder / "summary.json").exists()


@pytest.mark.parametrize("always", [False, True])
def test_a_step_that_the_disk_did_not_take_is_saved_where_the_run_fails(
    small_config, letters, quiet, tmp_path, monkeypatch, always
):
    write, serve, refused = checkpoints.write_tensors, BuiltinEngine.serve, []

    def full_once(path, tensors):
        if always or not refused:
            refused.append(path)
            raise OSError(28, "No space left on device")
        write(path, tensors)

    def fail(engine, request, on_progress=None):
        if request.scope == rollout_scope(2):
            raise TrainingError("the engine broke down")
        return serve(engine, request, on_progress)

    monkeypatch.setattr(checkpoints, "write_tensors", full_once)
    monkeypatch.setattr(BuiltinEngine, "serve", fail)
    config = small_config(training={"steps": 3}, output={"checkpoint_every": 2})
    said = "what was learnt since the last checkpoint is lost: .*No space left" if always else "step 2 is saved in .*step-2$"
    with pytest.raises(TrainingError, match=f"broke down; {said}"):
        train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run")
    assert refused
    assert always or is_sound(tmp_path / "run/checkpoints/step-2")
