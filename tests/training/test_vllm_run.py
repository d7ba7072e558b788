"""A run whose completions come from a sampling server."""

from __future__ import annotations

import json
import os
import signal
from contextlib import nullcontext

import pytest
from transformers import AutoModelForCausalLM

import groupwise.engines.vllm.engine as engine_module
import groupwise.training.run as run_module
from groupwise.engines.vllm import pushing
from groupwise.engines.vllm.protocol import Broken
from groupwise.engines.vllm.server import Server
from groupwise.engines.vllm.service import Service
from groupwise.errors import ConfigError, StoppedError, TrainingError
from groupwise.evaluation import evaluate_model
from groupwise.training.learner import Learner
from groupwise.training.loop import train
from groupwise.training.setup import prepare
from groupwise.training.sharding import Replicas
from tests.engines.with_vllm.model_backend import ModelBackend
from tests.waiting import comes


@pytest.fixture
def server(tiny_folder, tmp_path):
    backend = ModelBackend(AutoModelForCausalLM.from_pretrained(tiny_folder))
    server = Server(Service(backend, spool=tmp_path))
    yield server
    server.close()


@pytest.mark.slow
def test_it_learns_from_a_server_as_from_its_own_engine(server, small_config, letters, quiet, tmp_path):
    """The server samples other tokens from the same seeds, so curves differ; every step is sampled from the step before it."""
    config = small_config(
        rollout={"engine": "vllm", "vllm": {"url": server.url}}, training={"steps": 12}, optimizer={"learning_rate": 1e-2}
    )
    steps = []
    train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run", on_step=steps.append)
    versions = [{c.policy_version for g in step.groups for c in g.completions} for step in steps]
    assert versions == [{i} for i in range(12)]
    assert server.service.backend.loads == 13  # once at the start, once after every update
    for step in steps:
        assert step.metrics["policy/sampler_mismatch"] < 1e-4
        assert step.metrics["policy/correction"] == pytest.approx(1, abs=1e-3)
        assert 0 <= step.metrics["policy/sampler_kl"] < 1e-6
        assert step.metrics["policy/push_probe"] < 1e-3
        assert step.metrics["time/push_s"] > 0
        assert 0 <= step.metrics["completions/prompt_cached"] <= 1
    rewards = [step.metrics["reward/mean"] for step in steps]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    kept = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert "policy/push_probe" in json.dumps(kept)


def test_sampling_ahead_takes_the_weights_that_the_schedule_names(server, small_config, letters, quiet, tmp_path):
    """The server is one update behind; what it samples is told apart by its own log-probabilities, which the trainer finds changed."""
    sections = {"rollout": {"engine": "vllm", "ahead": 1, "vllm": {"url": server.url}}, "optimizer": {"learning_rate": 1e-2}}
    config, steps, held = small_config(**sections, training={"steps": 6}), [], []
    load = server.service.backend.load
    server.service.backend.load = lambda files, label: held.append(label) or load(files, label)
    train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run", on_step=steps.append)
    assert [{c.policy_version for g in step.groups for c in g.completions} for step in steps] == [{0}, {0}, {1}, {2}, {3}, {4}]
    assert [step.metrics["rollout/staleness"] for step in steps] == [0, 1, 1, 1, 1, 1]
    assert steps[0].metrics["policy/sampler_mismatch"] < 1e-4
    assert all(step.metrics["policy/sampler_mismatch"] > 1e-3 for step in steps[1:])
    # once for the engine, once before each batch that is begun (the first two together), once for the last evaluation
    assert len(held) == len(set(held)) == 1 + 5 + 1
    assert server.service.hello()["version"] == 6


def test_sampling_ahead_pushes_each_version_once(server, small_config, letters, quiet, tmp_path):
    """Whatever else is sampled: evaluations of two modes after every step here."""
    sections = {"rollout": {"engine": "vllm", "ahead": 1, "vllm": {"url": server.url}}, "data": {"holdout": 2}}
    judged = {"evaluation": {"every": 1, "modes": ["greedy", "sampled"]}}
    config = small_config(**sections, **judged, training={"steps": 3})
    train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run")
    assert server.service.hello()["version"] == 3
    assert server.service.backend.loads == 1 + 4, "for the engine, and versions 0 to 3"


@pytest.mark.slow
def test_a_server_that_starts_anew_while_it_samples_ahead_ends_the_run(server, small_config, letters, quiet, tmp_path):
    """... and with a checkpoint it is resumed, with the numbers that it would have had but for the batch that was lost."""
    sections = {"rollout": {"engine": "vllm", "ahead": 1, "vllm": {"url": server.url}}, "output": {"checkpoint_every": 1}}
    config, whole, steps = small_config(**sections, training={"steps": 4}), [], []
    train(config, rewards=letters, console=quiet, run_folder=tmp_path / "whole", on_step=whole.append)
    service, sample = server.service, server.service.sample

    def lose(weights, settings, jobs, **how):
        if weights.endswith(":4") and len(jobs) > 1:  # the weights were looked at, and a batch is sampled from them
            service.weights = None
        return sample(weights, settings, jobs, **how)

    service.sample = lose
    with pytest.raises(TrainingError, match=r"was restarted .*which learning has changed since.*--resume"):
        train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run", on_step=steps.append)
    assert 1 <= len(steps) < 4
    service.sample = sample
    done = len(steps)
    train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run", resume=True, on_step=steps.append)
    assert len(steps) == 4 > done, "nothing that was learnt is lost"
    drawn = [[[c.token_ids for g in s.groups for c in g.completions] for s in run] for run in (whole, steps)]
    assert drawn[0][:done] == drawn[1][:done]


@pytest.mark.parametrize("ahead", [0, 1])
def test_vllm_in_this_process_sleeps_while_the_policy_learns(
    ahead, tiny_folder, small_config, letters, quiet, tmp_path, monkeypatch
):
    """... the warm start included; not where it samples meanwhile."""
    backend = ModelBackend(AutoModelForCausalLM.from_pretrained(tiny_folder), sleeps=True)
    monkeypatch.setattr(engine_module, "check_versions", lambda: None)
    monkeypatch.setattr(engine_module, "_own", lambda policy, rollout: Service(backend, spool=tmp_path))
    asleep, learnt = [], []
    learn, warm = Learner.learn, run_module.warm_start
    monkeypatch.setattr(Learner, "learn", lambda *given, **named: learnt.append(backend.asleep) or learn(*given, **named))
    monkeypatch.setattr(run_module, "warm_start", lambda *given, **named: asleep.append(backend.asleep) or warm(*given, **named))
    sections = {"rollout": {"engine": "vllm", "ahead": ahead}, "warm_start": {"steps": 1}}
    train(small_config(**sections, training={"steps": 2}), rewards=letters, console=quiet, run_folder=tmp_path / "run")
    assert learnt == [not ahead] * 2
    assert asleep == [True]
    assert not backend.asleep, "the last weights were pushed"


@pytest.mark.parametrize("engine", ["vllm", "builtin"])
def test_only_an_engine_that_reads_the_trainer_s_weights_has_them_gathered(
    engine, server, small_config, letters, quiet, tmp_path, monkeypatch
):
    """Where they are divided, whole ones would fill every GPU, for nothing."""
    entered = []
    monkeypatch.setattr(Replicas, "whole", lambda self: entered.append(1) or nullcontext())
    asked = {"vllm": {"url": server.url}} if engine == "vllm" else {}
    config = small_config(rollout={"engine": engine, **asked}, training={"steps": 2}, data={"holdout": 2})
    train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run")
    assert bool(entered) == (engine == "builtin")


def give_up_soon(patch):
    """A server that is away is waited for no longer than a moment; one that answers slowly is."""
    made = pushing.RetryLimit.__init__
    patch.setattr(pushing.RetryLimit, "__init__", lambda retries, seconds, *heed: made(retries, 0.3, *heed))


@pytest.fixture
def closes_after_step_2(server, monkeypatch):
    """Have the server go away when the second step is learnt."""
    learn, learnt = Learner.learn, []

    def learn_and_close(*given, **named):
        found = learn(*given, **named)
        learnt.append(0)
        if len(learnt) == 2:
            server.close()
        return found

    monkeypatch.setattr(Learner, "learn", learn_and_close)
    return server


@pytest.mark.parametrize("warned", [True, False], ids=["a signal", "nobody comes"])
def test_what_was_learnt_is_saved_where_the_server_is_away(
    warned, closes_after_step_2, tiny_folder, small_config, letters, quiet, tmp_path, monkeypatch
):
    """... and is gone on with from there, by a server at another address."""

    def config(url):
        return small_config(rollout={"engine": "vllm", "vllm": {"url": url, "patience_s": 20.0}}, training={"steps": 3})

    def signalled(retries, *given, wait=pushing.RetryLimit.wait):
        os.kill(os.getpid(), signal.SIGTERM)
        return wait(retries, *given)

    with monkeypatch.context() as patch:
        if warned:
            patch.setattr(pushing.RetryLimit, "wait", signalled)
        else:
            give_up_soon(patch)
        said = "after step 2, which is saved" if warned else r"the weights cannot be pushed: .*; step 2 is saved in .*step-2"
        with pytest.raises(StoppedError if warned else TrainingError, match=said):
            train(config(closes_after_step_2.url), rewards=letters, console=quiet, run_folder=tmp_path / "run")
    other = Server(Service(ModelBackend(AutoModelForCausalLM.from_pretrained(tiny_folder)), spool=tmp_path))
    train(config(other.url), rewards=letters, console=quiet, run_folder=tmp_path / "run", resume=True)
    other.close()
    kept = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in kept] == [1, 2, 3]


@pytest.mark.parametrize(
    "sections", [{}, {"rollout": {"ahead": 1}}, {"evaluation": {"every": 2}}], ids=["a step", "ahead", "judging"]
)
def test_what_was_learnt_is_saved_where_the_server_breaks_down_while_it_samples(
    sections, server, small_config, letters, quiet, tmp_path, monkeypatch
):
    """The third request of many completions is for step 3, or for the evaluation before it."""
    backend = server.service.backend

    def break_down(count):
        if sum(jobs > 1 for jobs in backend.asked) > 2:
            raise Broken("vLLM broke down")

    rollout = {"engine": "vllm", "vllm": {"url": server.url}, **sections.get("rollout", {})}
    training, output = {"steps": 3}, {"checkpoint_every": 0}
    config = small_config(**{**sections, "rollout": rollout}, training=training, output=output)
    backend.before_row = break_down
    with monkeypatch.context() as patch:
        give_up_soon(patch)
        with pytest.raises(TrainingError, match=r"vLLM cannot be reached: .*; step 2 is saved in .*step-2"):
            train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run")
    backend.before_row = lambda count: None
    assert comes(lambda: server.service.hello()["used_by"] is None)
    train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run", resume=True)
    kept = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in kept] == [1, 2, 3]


@pytest.mark.slow
def test_models_are_judged_one_after_the_other_by_one_server(server, tiny_folder, small_config):
    config = small_config(rollout={"engine": "vllm", "vllm": {"url": server.url}}, evaluation={"problems": 3})
    for loads in (1, 2):
        (judged,) = evaluate_model(str(tiny_folder), config)
        assert judged.n == 3
        assert server.service.backend.loads == loads
        assert comes(lambda: server.service.hello()["used_by"] is None), "it is free once it has seen the connection's end"


def test_a_context_that_is_vllm_s_is_called_so(server, small_config, letters):
    server.service.backend.max_model_tokens = 60
    for sections in ({"rollout": {"max_completion_tokens": 60}}, {"evaluation": {"max_completion_tokens": 60}}):
        rollout = {"engine": "vllm", "vllm": {"url": server.url}, **sections.pop("rollout", {})}
        taken = r"vLLM takes 60 tokens of prompt and completion \(--max-model-tokens\): start it with more, or lower"
        with pytest.raises(ConfigError, match=rf"max_completion_tokens is 60, but {taken}"):
            prepare(small_config(rollout=rollout, **sections), rewards=letters)


def test_a_server_of_a_narrower_dtype_is_told_before_weights_are_read(server, small_config, letters):
    about = server.service.backend.about()
    server.service.backend.about = lambda: {**about, "dtype": "bfloat16"}
    config = small_config(rollout={"engine": "vllm", "vllm": {"url": server.url}}, model={"dtype": "float32"})
    with pytest.raises(ConfigError, match="computes in bfloat16, but float32 weights are trained: start it with --dtype float32"):
        prepare(config, rewards=letters)


def test_a_server_that_is_not_there_is_told_before_weights_are_read(small_config, letters, quiet, tmp_path):
    config = small_config(rollout={"engine": "vllm", "vllm": {"url": "http://127.0.0.1:9"}})
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.url .*nobody answers"):
        train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
