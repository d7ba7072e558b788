"""Rewards of steps in an update: against a slow loop, against outcome supervision where they must agree, and in a real run."""

import copy
import json
import os
import random
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from slow_grpo import config_of, distance, learner_of, make_groups, slow_advantages, slow_gradient, slow_logprobs, watch_gradients

from groupwise.algorithm import Objective
from groupwise.errors import StoppedError
from groupwise.rewards import StepRewards
from groupwise.training.advantages import StepAdvantages
from groupwise.training.learner import Learner
from groupwise.training.loop import train
from groupwise.training.window import _group_of, _group_values
from groupwise.types import Completion, StepScores, ToolCall, Turn

FLAT = [[0.0] * 4] * 3


def with_steps(groups, name="p", weight=1.0, seed=0, rewards=(0.0, 0.5, 1.0), only=None):
    rng, out = random.Random(seed), []
    for index, group in enumerate(groups):
        if only is not None and index not in only:
            out.append(group)
            continue
        steps = []
        for c in group.completions:
            ends = sorted(rng.sample(range(len(c.token_ids)), rng.randint(1, min(3, len(c.token_ids)))))
            steps.append(tuple((end, rng.choice(rewards)) for end in ends))
        process = {**group.process, name: StepScores(weight, tuple(steps))}
        out.append(replace(group, process=process, outcome_rewards=group.rewards))
    return out


def slow_token_advantages(group):
    """DeepSeekMath, section 4.1.3, function by function, and the outcome's beside them."""
    outcome = slow_advantages(group.rewards)
    per_token = [[a] * len(c.token_ids) for a, c in zip(outcome, group.completions, strict=True)]
    for scores in group.process.values():
        pool = torch.tensor([r for steps in scores.steps for _, r in steps], dtype=torch.float64)
        for tokens, steps in zip(per_token, scores.steps, strict=True):
            for t in range(len(tokens)):
                later = [(r - pool.mean()) / (pool.std() + 1e-4) for end, r in steps if end >= t]
                tokens[t] += scores.weight * float(sum(later))
    return per_token


def slow_process_loss(model, groups):
    count, loss = sum(len(group.completions) for group in groups), 0.0
    for group in groups:
        for completion, advantages in zip(group.completions, slow_token_advantages(group), strict=True):
            logprobs = slow_logprobs(model, group.prompt.token_ids, completion.token_ids)
            loss = loss - (torch.tensor(advantages, dtype=logprobs.dtype) * logprobs).mean() / count
    return loss


def gradient(model, groups, **algorithm):
    learner, _ = learner_of(copy.deepcopy(model), config_of(algorithm=algorithm))
    seen = watch_gradients(learner)
    advantages, metrics = learner.learn(groups)
    return seen[0] if seen else None, advantages, metrics


@pytest.mark.parametrize(
    "rewards", [FLAT, [[2.8, 0.2, 1.7, 0.0], [1.0] * 4, [0.0, 0.4, 0.0, 2.0]]], ids=["steps alone", "beside outcomes"]
)
def test_the_gradient_is_the_slow_loop_s(tiny_llama, rewards):
    model = tiny_llama(seed=3)
    before = copy.deepcopy(model).double()
    groups = with_steps(with_steps(make_groups(before, rewards), weight=1.5), "q", weight=-0.5, seed=1, only=[0, 2])
    found, advantages, _ = gradient(model, groups)
    assert distance(found, slow_gradient(slow_process_loss(before, groups), before)) < 1e-5
    for group, means in zip(groups, advantages, strict=True):
        assert means == pytest.approx([sum(tokens) / len(tokens) for tokens in slow_token_advantages(group)], abs=1e-9)


@pytest.mark.parametrize(
    "algorithm", [{}, {"preset": "dr_grpo"}, {"preset": "gspo"}, {"preset": "dapo"}, {"preset": "rloo", "kl": None}]
)
def test_one_step_at_the_last_token_is_outcome_supervision(tiny_llama, algorithm):
    model = tiny_llama(seed=3)
    rewards = [[2.8, 0.2, 1.7, 0.0], [1.0] * 4, [0.0, 0.4, 0.0, 2.0]]
    outcome = make_groups(copy.deepcopy(model).double(), rewards)
    steps = []
    for group in outcome:
        at_the_end = tuple(((len(c.token_ids) - 1, r),) for c, r in zip(group.completions, group.rewards, strict=True))
        steps.append(replace(group, process={"p": StepScores(1.0, at_the_end)}, outcome_rewards=(0.0,) * 4))
    one, a, _ = gradient(model, outcome, **algorithm)
    other, b, _ = gradient(model, steps, **algorithm)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert a == [pytest.approx(group, abs=1e-12) for group in b]


def test_groups_whose_steps_vary_take_part_and_others_do_not(tiny_llama):
    model = tiny_llama(seed=3)
    groups = make_groups(copy.deepcopy(model).double(), FLAT)
    assert gradient(model, groups)[0] is None
    alike = with_steps(groups, rewards=(0.5,))
    assert not any(group.has_variance for group in alike)
    assert gradient(model, alike)[0] is None
    some = with_steps(groups, only=[1])
    assert [group.has_variance for group in some] == [False, True, False]
    _, _, metrics = gradient(model, some)
    assert metrics["speed/learnt_tokens"].value == sum(len(c.token_ids) for c in groups[1].completions)


def test_a_learned_value_sums_steps_up_as_rewards_of_tokens(tiny_llama):
    """With gamma = lambda = 1 the returns are the rewards still to come, whatever the value says."""
    model = tiny_llama(seed=3)
    groups = with_steps(make_groups(copy.deepcopy(model).double(), [[1.0, 0.0, 2.0, 0.5]]), weight=2.0)
    settings = {"preset": "ppo", "kl": None, "advantage": {"gamma": 1.0, "lam": 1.0}}
    learner, _ = learner_of(model, config_of(algorithm=settings))
    kept, accumulate = [], learner.accumulate
    learner.accumulate = lambda sweeps, stop: kept.extend(sweeps) or accumulate(sweeps, stop)
    learner.learn(groups)
    batch = kept[0].window.batch
    found = {member: returns.tolist() for member, returns in batch.by_member(batch.returns_T)}
    for i, (reward, steps) in enumerate(zip(groups[0].outcomes, groups[0].process["p"].steps, strict=True)):
        length = len(groups[0].completions[i].token_ids)
        expected = [reward + sum(2.0 * r for end, r in steps if end >= t) for t in range(length)]
        assert found[0, i] == pytest.approx(expected, abs=1e-5)


def test_the_kl_in_token_rewards_and_steps_add_up(tiny_llama):
    model = tiny_llama(seed=3)
    groups = with_steps(make_groups(copy.deepcopy(model).double(), [[1.0, 0.0, 2.0, 0.5], [0.0, 0.0, 1.0, 0.0]]))
    bare = [replace(group, process={}, outcome_rewards=None) for group in groups]
    settings = {"preset": "reinforce++", "kl": {"beta": 0.05}}
    both, advantages, _ = gradient(model, groups, **settings)
    outcome, without, _ = gradient(model, bare, **settings)
    flat = [replace(group, rewards=(0.0,) * 4, outcome_rewards=(0.0,) * 4) for group in groups]
    steps, only, _ = gradient(model, flat, **{**settings, "kl": None})
    summed = {name: outcome[name] + steps[name] for name in both}
    assert distance(both, summed) < 1e-5
    for a, b, c in zip(advantages, without, only, strict=True):
        assert a == pytest.approx([x + y for x, y in zip(b, c, strict=True)], abs=1e-6)


def test_rewards_for_every_token_ask_once_which_were_sampled(tiny_llama, monkeypatch):
    """Asked for each step, the time would grow with the square of a completion's length."""
    (group,) = make_groups(tiny_llama(seed=3).double(), [[1.0, 0.0, 2.0]])
    steps = tuple(tuple((t, float(t)) for t in range(len(c.token_ids))) for c in group.completions)
    asked, sampled = [], Completion.sampled
    monkeypatch.setattr(Completion, "sampled", property(lambda c: asked.append(c.sample) or sampled.fget(c)))
    found = StepAdvantages.of([replace(group, process={"p": StepScores(1.0, steps)})], Objective())
    assert found.inputs.steps["p"].end_K.tolist() == list(range(sum(map(len, steps))))
    assert asked == [0, 1, 2] != [n for n, own in enumerate(steps) for _ in own]


def test_a_run_learns_from_the_steps_of_a_function(small_config, quiet, tmp_path):
    """A character is a token here: every second character is a step, rewarded for being a lower-case letter."""

    def letters(completions, **columns):
        texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
        return [[(i + 1, float(t[i].islower() and t[i].isascii())) for i in range(1, len(t), 2)] for t in texts]

    folder = train(small_config(), rewards={"letters": letters}, console=quiet, run_folder=tmp_path / "run").folder
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(row["optimizer/grad_norm"] > 0 for row in rows)
    for row in rows:
        assert row["reward/letters"] == pytest.approx(row["steps/count_letters"] * row["steps/reward_letters"])
    first = json.loads((folder / "completions.jsonl").read_text(encoding="utf-8").splitlines()[0])
    steps = first["steps"]["letters"]
    assert sum(r for _, r in steps) == first["components"]["letters"] == first["reward"]
    advantages = first["token_advantages"]
    assert sum(advantages) / len(advantages) == pytest.approx(first["advantage"], abs=1e-3)
    rises = {t for t in range(len(advantages) - 1) if advantages[t] != advantages[t + 1]}
    assert rises <= {end for end, _ in steps}, "between two ends of steps the advantage stays the same"


def test_a_batch_that_was_left_between_two_updates_keeps_its_steps(small_config, quiet, tmp_path, monkeypatch):
    def letters(completions, completion_ids, **columns):
        return [StepRewards([i % 3.0, 0.5], [1, len(ids)], "tokens") for i, ids in enumerate(completion_ids)]

    config = small_config(algorithm={"updates_per_batch": 2}, training={"steps": 2})
    whole = train(config, rewards={"letters": letters}, console=quiet, run_folder=tmp_path / "whole").folder
    update, calls = Learner.step, []

    def step(learner, rate=None):
        calls.append(0)
        if len(calls) == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(learner, rate)

    monkeypatch.setattr(Learner, "step", step)
    with pytest.raises(StoppedError, match="1 updates of the next"):
        train(config, rewards={"letters": letters}, console=quiet, run_folder=tmp_path / "run")
    folder = train(config, rewards={"letters": letters}, console=quiet, run_folder=tmp_path / "run", resume=True).folder
    first, second = (load_file(f / "final_model" / "model.safetensors") for f in (whole, folder))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_group_comes_back_from_a_checkpoint_s_json_as_it_was(tiny_llama):
    """Steps of a process, an episode's turns with calls, and what a function did not judge."""
    (plain,) = with_steps(make_groups(tiny_llama(seed=3).double(), [[1.0, 0.0]]), weight=2.0)
    first = plain.completions[0]
    call = ToolCall("search", {"words": ["a", {"b": [1]}]}, "nothing", "raised")
    turn = Turn("assistant", "x", len(first.token_ids), (call,), reward=0.5)
    episode = replace(first, turns=(turn,), reward=1.0)
    group = replace(plain, completions=(episode, plain.completions[1]), components={"f": (None, 1.0)}, weights={"f": 2.0})
    for one in (group, replace(group, outcome_rewards=None, process={})):
        assert _group_of(json.loads(json.dumps(_group_values(one))), one.prompt) == one
