"""Asynchronous rollouts: which weights sample which batch, that nothing depends on who is faster, and how such a run ends."""

import json
import os
import signal
import threading
import time

import pytest
import torch
from safetensors.torch import load_file

from groupwise import load_config
from groupwise.engines import Engine, make_engine
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.engines.wrappers import SamplingThread
from groupwise.errors import CheckpointError, ConfigError, RewardError, StoppedError, TrainingError
from groupwise.models.load import load_policy
from groupwise.rollout import rollout_scope, rollout_settings
from groupwise.tracking import Trackers
from groupwise.training import ahead as ahead_module
from groupwise.training import start as start_module
from groupwise.training.ahead import PolicyCopy
from groupwise.training.learner import Learner
from groupwise.training.loop import train
from tests.survival.kills import differences
from tests.tiny import rows

slow = pytest.mark.slow
LOG_ALL = {"log_completions": 100, "checkpoint_every": 1, "keep_checkpoints": 10}


@pytest.fixture
def go(small_config, letters, quiet, tmp_path):
    """``go("name", rollout={...}, ...)``: a run of five steps in a folder of that name; returns the folder."""

    def run(name, *, functions=letters, resume=False, resume_from=None, on_step=None, **sections):
        sections = {
            "training": {"steps": 5, **sections.pop("training", {})},
            "output": {**LOG_ALL, **sections.pop("output", {})},
            **sections,
        }
        return train(
            small_config(**sections), rewards=functions, console=quiet, run_folder=tmp_path / name, resume=resume,
            resume_from=resume_from, on_step=on_step,
        ).folder  # fmt: skip

    return run


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    assert not [t for t in threading.enumerate() if t.name == "groupwise-sampling"]


def same_run(one, other):
    return not differences(one, other)


@pytest.mark.parametrize("steps_ahead", [1, pytest.param(2, marks=slow), 4])
def test_each_batch_is_sampled_by_the_weights_so_many_steps_old(go, small_config, steps_ahead):
    """Completions are sampled anew, by an engine over the checkpoint that the schedule names."""
    reports = []
    folder = go("run", rollout={"ahead": steps_ahead}, on_step=reports.append)
    config = load_config(folder / "config.yaml")
    for step, report in enumerate(reports):
        behind = max(0, step - steps_ahead)
        assert {c.policy_version for g in report.groups for c in g.completions} == {behind}
        assert report.metrics["rollout/staleness"] == step - behind
        if behind == 0:
            continue
        name = str(folder / "checkpoints" / f"step-{behind}" / "model")
        policy = load_policy(config.model.model_copy(update={"name": name}))
        again = make_engine(policy, config.rollout).sample(
            [g.prompt for g in report.groups], config.rollout.completions_per_prompt, rollout_settings(config.rollout),
            seed=config.training.seed, scope=rollout_scope(step),
        )  # fmt: skip
        for group, completions in zip(report.groups, again, strict=True):
            assert [c.token_ids for c in group.completions] == [c.token_ids for c in completions]
            assert [c.logprobs for c in group.completions] == [pytest.approx(c.logprobs, abs=1e-5) for c in completions]


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"rollout": {"ahead": 1}}, marks=slow),
        {
            "rollout": {"ahead": 3},
            "algorithm": {"updates_per_batch": 2, "kl": {"beta": 0.1}},
            "rewards": {"normalise": "mean_std"},
        },
        pytest.param({"rollout": {"ahead": 2, "engine": "transformers"}}, marks=slow),
        {"rollout": {"ahead": 1, "refill_rounds": 2, "completions_per_prompt": 2, "max_completion_tokens": 2}},
        pytest.param(
            {"rollout": {"ahead": 2}, "model": {"lora": {"rank": 2, "alpha": 4}}, "evaluation": {"every": 2}}, marks=slow
        ),
    ],
    ids=["one", "three, mu 2, running statistics", "module", "refills", "lora, two"],
)
def test_who_is_faster_does_not_matter(go, monkeypatch, sections):
    """With a sampler that is done before learning begins, and one that does nothing before it is waited for: the same run."""
    _sampled_at_once(monkeypatch)
    fast = go("at once", **sections)
    monkeypatch.undo()
    _sampled_when_waited_for(monkeypatch)
    assert same_run(fast, go("when waited for", **sections))


def _sampled_at_once(monkeypatch):
    """Whoever puts an order waits until it is over."""
    put = SamplingThread.put

    def at_once(thread, order):
        put(thread, order)
        thread.wait(order)

    monkeypatch.setattr(SamplingThread, "put", at_once)


def _sampled_when_waited_for(monkeypatch):
    """No order is begun before somebody waits for it (orders are waited for as they were put)."""
    wanted = threading.Semaphore(0)
    serve, wait, close = SamplingThread._sample, SamplingThread.wait, SamplingThread.close

    def sample(thread, order):
        wanted.acquire()
        return serve(thread, order)

    def wait_for_it(thread, order, on_progress=None):
        wanted.release()
        return wait(thread, order, on_progress)

    def close_at_last(thread):
        thread._unwanted = True
        wanted.release(100)
        close(thread)

    monkeypatch.setattr(SamplingThread, "_sample", sample)
    monkeypatch.setattr(SamplingThread, "wait", wait_for_it)
    monkeypatch.setattr(SamplingThread, "close", close_at_last)


def _under_way_for_ever(monkeypatch, begins):
    """From when ``begins(order)``, orders are under way until nobody wants them: whoever waits for one waits in vain."""
    serve = SamplingThread._sample

    def sample(thread, order):
        if begins(order):
            given_up = time.monotonic() + 120
            while not thread._unwanted and time.monotonic() < given_up:
                time.sleep(0.005)
            assert thread._unwanted, "nobody ended it"
        return serve(thread, order)

    monkeypatch.setattr(SamplingThread, "_sample", sample)


def test_a_learning_rate_of_almost_nothing_gives_the_synchronous_run(go):
    """Weights that do not move: then no sample is stale, and both runs have the same completions and rewards."""
    alike = {"optimizer": {"learning_rate": 1e-30}}
    one, other = (rows(go(str(k), rollout={"ahead": k}, **alike), "completions") for k in (0, 2))
    text = [(r["step"], r["problem"], r["completion"], r["reward"]) for r in one]
    assert text == [(r["step"], r["problem"], r["completion"], r["reward"]) for r in other]


@pytest.mark.parametrize("there", [True, False], ids=["batches are there", "batches are under way"])
@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({"rollout": {"ahead": 1}}, marks=slow),
        {"rollout": {"ahead": 2}, "rewards": {"normalise": "mean_std"}, "algorithm": {"updates_per_batch": 2}},
        pytest.param({"rollout": {"ahead": 1}, "model": {"lora": {"rank": 2, "alpha": 4}}}, marks=slow),
    ],
    ids=["one", "two", "lora"],
)
def test_a_checkpoint_has_the_batches_under_way(go, monkeypatch, sections, there):
    (_sampled_at_once if there else _sampled_when_waited_for)(monkeypatch)
    whole = go("whole", **sections)
    parts = [load_file(p) for p in sorted((whole / "checkpoints").glob("step-2/part-ahead.safetensors"))]
    kept = {name.split(".")[0] for part in parts for name in part}
    assert (kept == {"batch"}) if there else ("weights" in kept)
    monkeypatch.undo()
    for done in (1, 3):
        resumed = go(f"from {done}", resume_from=whole / "checkpoints" / f"step-{done}", **sections)
        assert rows(resumed)[0]["step"] == done + 1
        one, other = (load_file(f / "checkpoints" / "step-5" / "optimizer.safetensors") for f in (whole, resumed))
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_resumed_run_that_is_stopped_before_it_takes_a_batch_saves_those_under_way(go, monkeypatch):
    sections = {"rollout": {"ahead": 2}}
    _sampled_when_waited_for(monkeypatch)
    whole = go("whole", **sections)
    monkeypatch.undo()
    monkeypatch.setattr(ahead_module.Ahead, "_bring_back", lambda ahead: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(StoppedError, match="saved"):
        go("stopped", resume_from=whole / "checkpoints/step-2", **sections)
    monkeypatch.undo()
    resumed = go("stopped", resume=True, **sections)
    assert [row["step"] for row in rows(resumed)] == [3, 4, 5]
    one, other = (load_file(f / "checkpoints/step-5/optimizer.safetensors") for f in (whole, resumed))
    assert all(torch.equal(one[name], other[name]) for name in one)


SIGNALS = [(where, steps) for where in ("waiting", "learning", "between updates") for steps in (1, 2)]
FAST_SIGNALS = [("waiting", 1), ("learning", 1), ("between updates", 2)]


@pytest.mark.parametrize(("where", "steps_ahead"), [pytest.param(*at, marks=[slow] * (at not in FAST_SIGNALS)) for at in SIGNALS])
def test_a_signal_ends_the_run_and_it_carries_on(go, monkeypatch, where, steps_ahead):
    sections = {"rollout": {"ahead": steps_ahead}, "algorithm": {"updates_per_batch": 3}, "output": {"checkpoint_every": 0}}
    whole = go("whole", **sections)
    calls = []

    def once(at):
        calls.append(at)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    if where == "waiting":
        wait = SamplingThread.wait
        monkeypatch.setattr(SamplingThread, "wait", lambda t, o, p=None: (once(0), wait(t, o, p))[1])
    else:
        name = "learn" if where == "learning" else "step"
        original = getattr(Learner, name)
        monkeypatch.setattr(Learner, name, lambda self, *a, **k: (once(0), original(self, *a, **k))[1])
    _under_way_for_ever(monkeypatch, lambda order: len(calls) >= 3)
    with pytest.raises(StoppedError, match="saved"):
        go("run", **sections)
    monkeypatch.undo()
    assert same_run(whole, go("run", resume=True, **sections))


def test_what_the_engine_raises_in_the_thread_ends_the_run(go, monkeypatch):
    serve = BuiltinEngine.serve

    def fail(engine, request, on_progress=None):
        if request.scope == "rollout/step=2":
            raise MemoryError("no room")
        return serve(engine, request, on_progress)

    monkeypatch.setattr(BuiltinEngine, "serve", fail)
    with pytest.raises(Exception, match=r"no room|memory"):
        go("run", rollout={"ahead": 1})
    monkeypatch.undo()
    assert same_run(go("whole", rollout={"ahead": 1}), go("run", rollout={"ahead": 1}, resume=True))


def test_a_reward_that_fails_ends_the_run_while_a_batch_is_sampled(go, monkeypatch):
    def letters(completions, **columns):
        raise ValueError("out of luck")

    _under_way_for_ever(monkeypatch, lambda order: order.request.scope != rollout_scope(0))
    with pytest.raises(RewardError, match="out of luck"):
        go("run", functions={"letters": letters}, rollout={"ahead": 2})


def test_a_callback_that_ends_the_run_leaves_nothing_running(go, monkeypatch):
    _under_way_for_ever(monkeypatch, lambda order: order.request.scope != rollout_scope(0))
    folder = go("run", on_step=lambda report: False, rollout={"ahead": 2})
    assert len(rows(folder)) == 1
    assert (folder / "final_model").is_dir()


def test_refills_are_fresh(go):
    """The batch is a step old, what is sampled in place of groups without variance is not."""
    found = rows(go("run", rollout={"ahead": 1, "refill_rounds": 2, "completions_per_prompt": 2, "max_completion_tokens": 2}))
    refilled = [row for row in found[1:] if row["groups/sampled"] > 3]
    assert all(0 <= row["rollout/staleness"] <= 1 for row in refilled)
    assert any(row["rollout/staleness"] < 1 for row in refilled)


class EngineWithWeights(Engine):
    """Samples with a copy of the weights that only ``refresh`` changes, as an engine in another program does."""

    holds_weights = True

    def __init__(self, policy, rollout):
        self.copied = PolicyCopy(policy)
        self.engine = make_engine(self.copied.policy, rollout)
        self.samples = 0

    def refresh(self, policy_version):
        assert self.samples == 0, "weights are pushed while it samples"
        self.copied.follow()
        self.engine.refresh(policy_version)

    def serve(self, request, on_progress=None):
        assert self.samples == 0, "two threads sample at once"
        self.samples += 1
        time.sleep(0.02)
        try:
            return self.engine.serve(request, on_progress)
        finally:
            self.samples -= 1


@pytest.mark.parametrize(
    "sections",
    [
        {"evaluation": {"every": 1, "at_start": True}, "algorithm": {"updates_per_batch": 2}},
        {"rollout": {"refill_rounds": 2, "completions_per_prompt": 2, "max_completion_tokens": 2}},
    ],
    ids=["evaluations", "refills"],
)
@pytest.mark.slow
def test_an_engine_with_weights_of_its_own_needs_no_other_copy(go, monkeypatch, sections):
    """It is sent weights, evaluates and refills only while it samples nothing ahead; and a checkpoint waits for what it samples."""
    sections = {**sections, "rollout": {"ahead": 1, **sections.get("rollout", {})}}
    copied = go("copied", **sections)
    monkeypatch.setattr(start_module, "make_engine", lambda policy, rollout, *rest, **more: EngineWithWeights(policy, rollout))
    monkeypatch.setattr(ahead_module, "PolicyCopy", None)
    own = go("own", **sections)
    assert same_run(copied, own)
    kept = {name.split(".")[0] for name in load_file(own / "checkpoints/step-2/part-ahead.safetensors")}
    assert kept == {"batch"}
    resumed = go("resumed", resume_from=own / "checkpoints/step-2", **sections)
    assert rows(resumed)[-1]["reward/mean"] == rows(own)[-1]["reward/mean"]


@pytest.mark.parametrize(("where", "exact"), [("waiting", False), ("learning", True)])
def test_a_signal_does_not_wait_for_a_batch_that_an_engine_with_its_own_weights_samples(go, monkeypatch, where, exact):
    """What the checkpoint's weights sampled, they sample again; they also sample what older ones did, which is told."""
    sections, calls, said = {"rollout": {"ahead": 1}, "output": {"checkpoint_every": 0}}, [], []
    monkeypatch.setattr(start_module, "make_engine", lambda policy, rollout, *rest, **more: EngineWithWeights(policy, rollout))
    whole = go("whole", **sections)

    def once():
        calls.append(0)
        if len(calls) == (3 if where == "waiting" else 2):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(ahead_module, "_LAST_BATCH_S", 0.05)
        patch.setattr(Trackers, "say", lambda trackers, sentence, style="": said.append(sentence))
        if where == "waiting":
            wait = SamplingThread.wait
            patch.setattr(SamplingThread, "wait", lambda t, o, p=None: (once(), wait(t, o, p))[1])
        else:
            learn = Learner.learn
            patch.setattr(Learner, "learn", lambda self, *a, **k: (once(), learn(self, *a, **k))[1])
        _under_way_for_ever(patch, lambda order: order.request.scope == rollout_scope(2))
        with pytest.raises(StoppedError, match=f"after step {1 if exact else 2}, which is saved"):
            go("run", **sections)
    assert [sentence for sentence in said if "could not be saved" in sentence] == said[-1:] * (not exact)
    resumed = go("run", resume=True, **sections)
    assert [row["step"] for row in rows(resumed)] == [1, 2, 3, 4, 5]
    assert same_run(whole, resumed) == exact


@pytest.mark.parametrize("signalled", [True, False], ids=["by a signal", "by a checkpoint that is due"])
def test_what_is_learnt_is_saved_where_sampling_ahead_has_failed(go, monkeypatch, signalled):
    sections = {"rollout": {"ahead": 1}, "output": {"checkpoint_every": 0 if signalled else 1}}
    monkeypatch.setattr(start_module, "make_engine", lambda policy, rollout, *rest, **more: EngineWithWeights(policy, rollout))
    serve = EngineWithWeights.serve

    def fail(engine, request, on_progress=None):
        if request.scope == rollout_scope(2):
            raise MemoryError("no room")
        return serve(engine, request, on_progress)

    def stop(report):
        if signalled and report.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(EngineWithWeights, "serve", fail)
        with pytest.raises(Exception, match="after step 2, which is saved" if signalled else r"no room|memory"):
            go("run", on_step=stop, **sections)
    assert [row["step"] for row in rows(go("run", resume=True, **sections))] == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_another_number_of_steps_ahead_may_carry_on(go, small_config, letters, quiet, tmp_path):
    whole = go("whole", rollout={"ahead": 2})
    for steps_ahead in (0, 1, 3):
        config = small_config(rollout={"ahead": steps_ahead}, training={"steps": 5}, output=LOG_ALL)
        found = train(
            config, rewards=letters, console=quiet, run_folder=tmp_path / f"on {steps_ahead}", accept_changes=True,
            resume_from=whole / "checkpoints/step-2",
        ).folder  # fmt: skip
        assert [row["step"] for row in rows(found)] == [3, 4, 5]


def test_a_batch_that_came_with_a_checkpoint_stays_in_the_next_one(go, small_config, letters, quiet, tmp_path, monkeypatch):
    """Without sampling ahead too, though no update was made of it: it was scored, and what sampled it may be gone."""
    sections = {"training": {"steps": 5}, "rewards": {"functions": [{"function": "letters", "normalise": "mean_std"}]}}
    learn, learnt = Learner.learn, []

    def signalled(learner, *words, **more):
        learnt.append(words)
        if len(learnt) >= 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(learner, *words, **more)

    def parts():
        return json.loads((tmp_path / "run/checkpoints/step-2/state.json").read_text())["parts"]

    monkeypatch.setattr(Learner, "learn", signalled)
    with pytest.raises(StoppedError, match="after step 2, which is saved"):
        go("run", rollout={"ahead": 1}, output={"checkpoint_every": 0}, **sections)
    before = parts()
    with pytest.raises(StoppedError, match="after step 2, which is saved"):
        train(
            small_config(**sections), rewards=letters, console=quiet, run_folder=tmp_path / "run", resume=True,
            accept_changes=True,
        )  # fmt: skip
    assert "ahead" not in parts()
    assert before["window"]["groups"] == parts()["window"]["groups"]
    assert before["rewards"] == parts()["rewards"]


def fails_from(monkeypatch, number):
    """Learning fails in its pass of that number and in later ones: each step has one pass."""
    accumulate, passes = Learner.accumulate, []

    def fails(*words, **more):
        passes.append(words)
        if len(passes) >= number:
            raise TrainingError("odd")
        return accumulate(*words, **more)

    monkeypatch.setattr(Learner, "accumulate", fails)


def test_where_learning_from_a_batch_that_was_sampled_ahead_fails_nothing_is_saved(go, tmp_path, monkeypatch):
    """A checkpoint would lack that batch, and a resumed run would sample it with newer weights."""
    fails_from(monkeypatch, 3)
    with pytest.raises(TrainingError, match=r"^odd$"):
        go("run", rollout={"ahead": 1}, output={"checkpoint_every": 0})
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_where_learning_from_a_batch_of_a_checkpoint_fails_that_checkpoint_stays(
    go, small_config, letters, quiet, tmp_path, monkeypatch
):
    sections = {"training": {"steps": 5}, "rewards": {"functions": [{"function": "letters", "normalise": "mean_std"}]}}
    learn, state = Learner.learn, tmp_path / "run/checkpoints/step-2/state.json"

    def signalled(learner, *words, **more):
        if more["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return learn(learner, *words, **more)

    with monkeypatch.context() as patch:
        patch.setattr(Learner, "learn", signalled)
        with pytest.raises(StoppedError, match="after step 2, which is saved"):
            go("run", rollout={"ahead": 1}, output={"checkpoint_every": 0}, **sections)
    before = state.read_text()
    fails_from(monkeypatch, 1)
    with pytest.raises(TrainingError, match=r"^odd$"):
        train(
            small_config(**sections), rewards=letters, console=quiet, run_folder=tmp_path / "run", resume=True,
            accept_changes=True,
        )  # fmt: skip
    assert state.read_text() == before
    assert [path.name for path in state.parent.parent.iterdir()] == ["step-2"]


def test_a_longer_run_is_another_run(go):
    """Behind its end nothing was sampled, so what comes next would be fresher than in a run that was long from the start."""
    go("run", rollout={"ahead": 1})
    with pytest.raises(CheckpointError, match=r"training\.steps: 5 -> 6"):
        go("run", rollout={"ahead": 1}, training={"steps": 6}, resume=True)


def test_a_ratio_to_the_sampler_wants_a_ratio():
    with pytest.raises(ConfigError, match="which has no ratio to the sampler: set stale_samples to decoupled"):
        load_config(None, ["rollout.ahead=1", "algorithm.stale_samples=behaviour", "algorithm.loss.type=reinforce"])
