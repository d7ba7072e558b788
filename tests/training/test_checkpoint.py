"""What is saved is what is needed: a run that resumes from a checkpoint is the run that was never stopped."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from groupwise.engines.builtin.decode import why_not_in_8_bits
from groupwise.errors import CheckpointError
from groupwise.training.checkpoint import load_checkpoint, take_snapshot, write_snapshot
from groupwise.training.checkpoint_folder import find_checkpoint, last_good, latest_checkpoint, read_state
from groupwise.training.loop import train
from groupwise.training.start import start
from tests.tiny import final_weights, metrics_of, rows

ALGORITHM = {"kl": {"beta": 0.1, "reference_updates": 2}, "updates_per_batch": 2, "loss": {"epsilon": 0.01}}


def save(folder, step, run, keep):
    return write_snapshot(folder, take_snapshot(step, run.policy, run.learner), keep)


def completions_of(folder, first_step):
    return [row for row in rows(folder, "completions") if row["step"] >= first_step]


def resumes_exactly(config, letters, quiet, folder):
    """The folder of a run, of which one that goes on from its first checkpoint repeats every number."""
    whole = train(config, rewards=letters, console=quiet, run_folder=folder / "whole").folder
    checkpoint = whole / "checkpoints" / "step-1"
    resumed = train(config, rewards=letters, console=quiet, run_folder=folder / "resumed", resume_from=checkpoint).folder
    assert metrics_of(resumed) == metrics_of(whole, first=1)
    one, other = final_weights(whole), final_weights(resumed)
    assert all(torch.equal(one[name], other[name]) for name in one)
    return whole


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(("dtype", "done"), [slow("float32", 1), ("float32", 2), slow("float32", 3), ("bfloat16", 3)])
def test_a_run_in_two_parts_is_the_run_in_one_bit_for_bit(small_config, letters, quiet, tmp_path, dtype, done):
    """With everything that has a state: masters, moments, schedule, a reference (renewed at step 3, so that after step 3 it is
    neither the first policy nor the last), two updates a batch. There are later checkpoints; the one asked for is taken."""
    config = small_config(
        algorithm=ALGORITHM, training={"steps": 4}, output={"checkpoint_every": 1, "keep_checkpoints": 4},
        optimizer={"learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 1},
    )  # fmt: skip
    config.model.dtype = dtype
    whole = train(config, rewards=letters, console=quiet, run_folder=tmp_path / "whole").folder
    resumed = train(
        config,
        rewards=letters,
        console=quiet,
        run_folder=tmp_path / "resumed",
        resume_from=whole / "checkpoints" / f"step-{done}",
    ).folder
    assert [row["step"] for row in metrics_of(resumed)] == list(range(done + 1, 5))
    assert metrics_of(resumed) == metrics_of(whole, first=done)
    assert completions_of(resumed, done + 1) == completions_of(whole, done + 1)
    one, other = final_weights(whole), final_weights(resumed)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    same_step = [load_file(f / "checkpoints" / "step-4" / "optimizer.safetensors") for f in (whole, resumed)]
    assert all(torch.equal(same_step[0][name], same_step[1][name]) for name in same_step[0])


def test_another_target_of_the_kl_acts_from_the_checkpoint_on(small_config, letters, quiet, tmp_path):
    def steered(**kl):
        return small_config(
            algorithm={"kl": {"beta": 0.1, **kl}}, training={"steps": 3}, output={"checkpoint_every": 1, "keep_checkpoints": 3}
        )

    whole = train(steered(target=0.02, gain=0.2), rewards=letters, console=quiet, run_folder=tmp_path / "whole").folder
    resumed = train(
        steered(target=1e9, gain=0.5), rewards=letters, console=quiet, run_folder=tmp_path / "resumed",
        resume_from=whole / "checkpoints" / "step-1", accept_changes=True,
    ).folder  # fmt: skip
    (second, third), old = [row["policy/beta"] for row in metrics_of(resumed)], metrics_of(whole, first=1)
    assert second == old[0]["policy/beta"] != 0.1
    assert third == pytest.approx(0.9 * second)  # 1 + gain x clip((kl - target) / target, -0.2, 0.2)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"preset": "ppo", "kl": {"beta": 0.1}, "updates_per_batch": 2},
        slow({"preset": "ppo", "value": {"critic": "copy", "critic_learning_rate": 1e-3}, "updates_per_batch": 2}),
        slow({"kl": {"beta": 0.1, "target": 0.02, "gain": 0.5}}),
        {"kl": {"beta": 0.1, "reference_every": 1, "reference_mixing": 0.3}},
        {"entropy": {"bonus": 0.01, "floor": 5.0, "top_share": 0.5}, "correction": {"level": "token"}},
    ],
    ids=["critic", "critic of its own", "steered leash", "moving reference", "stateless"],
)
def test_what_stands_around_the_objective_resumes_bit_for_bit_too(small_config, letters, quiet, tmp_path, algorithm):
    config = small_config(
        algorithm=algorithm,
        training={"steps": 3},
        output={"checkpoint_every": 1, "keep_checkpoints": 3},
        rollout={"refill_rounds": 2},
    )
    resumes_exactly(config, letters, quiet, tmp_path)


@pytest.mark.parametrize("ahead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_that_samples_with_weights_of_8_bits_resumes_bit_for_bit(small_config, letters, quiet, tmp_path, ahead):
    """Its samples are not quite the policy's, and are weighted for it."""
    config = small_config(
        algorithm={"updates_per_batch": 2}, training={"steps": 3}, output={"checkpoint_every": 1, "keep_checkpoints": 3},
        rollout={"quantization": "8bit", "ahead": ahead},
    )  # fmt: skip
    if (why := why_not_in_8_bits(torch.device("cpu"), torch.float32)) is not None:
        pytest.skip(why)
    config.model.dtype = "float32"
    whole = resumes_exactly(config, letters, quiet, tmp_path)
    for row in metrics_of(whole):
        assert 1e-5 < row["policy/sampler_mismatch"] < 0.1
        assert row["policy/correction"] == pytest.approx(1, abs=0.1)


def test_a_run_that_may_be_stopped_begins_from_another_s_checkpoint_until_it_has_its_own(small_config, letters, quiet, tmp_path):
    """As a job does that its queue starts again: the same call each time."""
    config = small_config(training={"steps": 3}, output={"checkpoint_every": 1, "keep_checkpoints": 3})
    whole = train(config, rewards=letters, console=quiet, run_folder=tmp_path / "whole").folder
    checkpoint, folder = whole / "checkpoints" / "step-1", tmp_path / "run"

    def call():
        return train(config, rewards=letters, console=quiet, run_folder=folder, resume=True, resume_from=checkpoint)

    call()
    assert metrics_of(folder) == metrics_of(whole, first=1)
    for gone in ("final_model", "checkpoints"):  # as where it was killed before its first checkpoint
        shutil.rmtree(folder / gone)
    for gone in ("summary.json", "trained.json"):
        (folder / gone).unlink(missing_ok=True)
    call()
    assert metrics_of(folder) == metrics_of(whole, first=1)
    one, other = final_weights(folder), final_weights(whole)
    assert all(torch.equal(one[name], other[name]) for name in one)
    expected = metrics_of(folder)
    shutil.rmtree(whole)  # nobody needs it any more
    shutil.rmtree(folder / "final_model")
    for gone in ("summary.json", "trained.json"):
        (folder / gone).unlink(missing_ok=True)
    shutil.rmtree(folder / "checkpoints" / "step-3")
    call()
    assert all(torch.equal(one[name], final_weights(folder)[name]) for name in one)
    assert metrics_of(folder) == expected, "from its own checkpoint, and not from the beginning"


def test_a_checkpoint_of_changed_settings_takes_the_place_of_the_earlier_run_s(small_config, letters, quiet, tmp_path):
    """Else a run that is stopped in its first step after --accept-changes could not be resumed with the settings it has."""
    run = begun(small_config(), letters, quiet, tmp_path / "a")
    files = []
    for rate, data, rewards in ((1e-5, "a", []), (1e-5, "a", []), (2e-5, "a", []), (2e-5, "b", []), (2e-5, "b", ["letters"])):
        about = {"config": {"rate": rate}, "data": data, "python_rewards": rewards}
        written = write_snapshot(tmp_path / "kept", take_snapshot(1, run.policy, run.learner, about=about), keep=1)
        assert read_state(written).items() >= about.items()
        files.append((written / "state.json").stat().st_mtime_ns)
    assert files[0] == files[1] < files[2] < files[3] < files[4]


def test_of_another_folder_s_checkpoint_no_resume_is_promised(small_config, letters, quiet, tmp_path):
    checkpoint = save(tmp_path / "old", 1, begun(small_config(), letters, quiet, tmp_path / "a"), keep=1)
    updates = int(read_state(checkpoint)["updates"])
    said = last_good(tmp_path / "new", updates + 1, checkpoint)
    assert (
        said == f"the last good checkpoint is {checkpoint}: start from it in another folder, by train(resume_from=...) of Python"
    )
    assert last_good(tmp_path / "new", updates, checkpoint) is None
    assert last_good(tmp_path / "new", updates + 1, tmp_path / "gone" / "step-1") is None


def begun(config, letters, quiet, folder, steps=1):
    """A run, by the loop's own verbs, after ``steps`` steps."""
    run = start(config, rewards=letters, console=quiet, run_folder=folder)
    run.begin_learning()
    with run.trackers.phase("GRPO", steps, "steps") as bar:
        for step in range(steps):
            run.learn(run.collect(step, bar))
    return run


def test_a_checkpoint_brings_back_optimiser_reference_and_counters(small_config, letters, quiet, tmp_path):
    config = small_config(algorithm=ALGORITHM)
    run = begun(config, letters, quiet, tmp_path / "a")
    saved = save(tmp_path / "kept", 1, run, keep=1)
    fresh = begun(config, letters, quiet, tmp_path / "b", steps=0)
    assert load_checkpoint(saved, fresh.learner) == 1
    assert fresh.learner.updates == run.learner.updates == 2
    one, other = run.learner.optimizer.state(), fresh.learner.optimizer.state()
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    pairs = zip(run.learner.reference.named_parameters(), fresh.learner.reference.named_parameters(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)


def test_nothing_is_pickled_and_the_policy_is_a_model_folder(small_config, letters, quiet, tmp_path):
    from transformers import AutoModelForCausalLM

    run = begun(small_config(algorithm=ALGORITHM), letters, quiet, tmp_path / "run")
    saved = save(tmp_path / "kept", 1, run, keep=1)
    files = [path for path in saved.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".jinja"}
    for path in files:
        load_file(path) if path.suffix == ".safetensors" else path.read_text(encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(saved / "model", dtype=torch.float32)
    mine = dict(run.policy.model.named_parameters())
    assert all(torch.equal(p, mine[name]) for name, p in model.named_parameters())


def test_old_checkpoints_are_removed_and_incomplete_ones_ignored(small_config, letters, quiet, tmp_path):
    run = begun(small_config(), letters, quiet, tmp_path / "run")
    kept = tmp_path / "kept"
    for step in (2, 9, 10, 11):
        save(kept, step, run, keep=2)
    assert sorted(path.name for path in kept.iterdir()) == ["step-10", "step-11"], "by number, not by name"
    (kept / "step-12" / "model").mkdir(parents=True)
    (kept / ".step-13.partial").mkdir()
    (kept / "step-final").mkdir()
    (kept / "step-final" / "state.json").write_text("{}")
    assert latest_checkpoint(kept) == kept / "step-11"
    assert find_checkpoint(kept) == kept / "step-11"
    assert find_checkpoint(kept / "step-10") == kept / "step-10"
    assert latest_checkpoint(tmp_path / "nowhere") is None


def test_the_best_is_kept_by_what_later_checkpoints_know_of_it_too(small_config, letters, quiet, tmp_path):
    """One may be judged after it was saved: a signal came in between, or its run was finished and got more steps."""
    run = begun(small_config(), letters, quiet, tmp_path / "run")

    def save_with(step, **about):
        write_snapshot(tmp_path / "kept", take_snapshot(step, run.policy, run.learner, about=about), 1, keep_best=True)
        return sorted(path.name for path in (tmp_path / "kept").iterdir())

    assert save_with(1, score=0.3) == ["step-1"], "of an earlier version"
    assert save_with(2, scores={}) == ["step-1", "step-2"]
    assert save_with(3, scores={"step-2": 0.9}) == ["step-2", "step-3"]
    assert save_with(4, scores={"step-2": 0.9, "step-4": 0.5}) == ["step-2", "step-4"]
    assert save_with(5, scores={"step-2": 0.9, "step-4": 0.5, "step-5": 0.95}) == ["step-5"]


def test_the_best_is_one_that_was_judged_as_the_newest_was(small_config, letters, quiet, tmp_path):
    """A resumed run may evaluate otherwise."""
    run, kept = begun(small_config(), letters, quiet, tmp_path / "run"), []
    one, eight = {"samples": 1}, {"samples": 8}
    scores = {"step-1": 0.9, "step-2": 0.5, "step-3": 0.4}
    for step, by in ((1, [one]), (2, [one]), (3, [one, eight]), (4, [one, eight, eight])):
        scored_by = {f"step-{number}": how for number, how in enumerate(by, 1)}
        about = {"scores": {name: scores[name] for name in scored_by}, "scored_by": scored_by}
        write_snapshot(tmp_path / "kept", take_snapshot(step, run.policy, run.learner, about=about), 1, keep_best=True)
        kept.append(sorted(path.name for path in (tmp_path / "kept").iterdir()))
    assert kept == [["step-1"], ["step-1", "step-2"], ["step-2", "step-3"], ["step-2", "step-4"]]


def test_the_newest_whose_last_update_was_made_stays_beside_later_ones(small_config, letters, quiet, tmp_path):
    """What follows a dropped update may have weights that no update can be made from."""
    run, names = begun(small_config(), letters, quiet, tmp_path / "run"), []
    for step, dropped in enumerate((0, 0, 1, 2, 0), 1):
        run.learner.dropped_in_a_row = dropped
        save(tmp_path / "kept", step, run, keep=1)
        names.append(sorted(path.name for path in (tmp_path / "kept").iterdir()))
    assert names == [["step-1"], ["step-2"], ["step-2", "step-3"], ["step-2", "step-4"], ["step-5"]]


def test_a_checkpoint_that_lacks_what_the_settings_need_is_not_called_damaged(small_config, letters, quiet, tmp_path):
    saved = save(tmp_path / "kept", 1, begun(small_config(), letters, quiet, tmp_path / "run"), keep=1)
    with_reference = begun(small_config(algorithm=ALGORITHM), letters, quiet, tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"step-1 is whole, but does not hold .*reference.*take back what was changed"):
        load_checkpoint(saved, with_reference.learner)


def test_a_file_that_went_since_the_checkpoint_was_chosen_is_damage(small_config, letters, quiet, tmp_path):
    run = begun(small_config(), letters, quiet, tmp_path / "run")
    saved = save(tmp_path / "kept", 1, run, keep=1)
    (saved / "optimizer.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"step-1 cannot be read \(optimizer.safetensors is missing\)"):
        load_checkpoint(saved, run.learner)


def test_a_save_that_was_killed_leaves_the_one_before_and_can_be_repeated(small_config, letters, quiet, tmp_path, monkeypatch):
    run = begun(small_config(), letters, quiet, tmp_path / "run")
    kept = tmp_path / "kept"
    save(kept, 1, run, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr("groupwise.training.checkpoint.write_tensors", killed)
        with pytest.raises(KeyboardInterrupt):
            save(kept, 2, run, keep=1)
    assert latest_checkpoint(kept).name == "step-1"
    assert save(kept, 2, run, keep=1) == latest_checkpoint(kept)
    assert [path.name for path in kept.iterdir()] == ["step-2"]


def killed(*args):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "harm",
    [
        lambda folder: (folder / "optimizer.safetensors").write_bytes(b"x" * 100),
        lambda folder: (folder / "optimizer.safetensors").write_bytes((folder / "optimizer.safetensors").read_bytes()[:-8]),
        lambda folder: (folder / "reference.safetensors").unlink(),
        lambda folder: (folder / "state.json").write_text("{"),
        lambda folder: (folder / "state.json").write_text('{"step": 1}'),
        lambda folder: (folder / "state.json").write_text("[]"),
    ],
)
def test_a_damaged_checkpoint_is_told_in_one_sentence(small_config, letters, quiet, tmp_path, harm):
    run = begun(small_config(algorithm=ALGORITHM), letters, quiet, tmp_path / "run")
    saved = save(tmp_path / "kept", 1, run, keep=1)
    harm(saved)
    with pytest.raises(CheckpointError, match=r"step-1 cannot be read .*use an earlier one"):
        load_checkpoint(find_checkpoint(saved), run.learner)


def test_a_checkpoint_that_is_not_there_is_told_before_any_weights_are_loaded(
    small_config, letters, quiet, tmp_path, monkeypatch
):
    monkeypatch.setattr("groupwise.training.start.load_policy", lambda *_: pytest.fail("weights were loaded"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for gone in (tmp_path / "gone", "~/gone"):
        with pytest.raises(CheckpointError, match=f"^{tmp_path / 'gone'} holds no whole checkpoint"):
            train(small_config(), rewards=letters, console=quiet, run_folder=tmp_path / "run", resume_from=gone)
    assert not (tmp_path / "run").exists()


def test_a_disk_that_refuses_is_told(small_config, letters, quiet, tmp_path, monkeypatch):
    run = begun(small_config(), letters, quiet, tmp_path / "run")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("groupwise.training.checkpoint.write_tensors", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(tmp_path / "kept", 1, run, keep=1)
