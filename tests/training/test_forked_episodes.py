"""Episodes whose history was rewritten in their middle: several samples for the passes, one completion for everything else."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from slow_grpo import (
    config_of,
    distance,
    forked,
    learner_of,
    make_groups,
    present_model,
    slow_advantages,
    slow_episode,
    slow_gradient,
    watch_gradients,
)

from groupwise.batch import Batch
from groupwise.training.ahead import _numbers, _pairs, _texts
from groupwise.training.loop import train
from groupwise.training.microbatches import cut
from groupwise.training.window import _group_of, _group_values
from groupwise.types import Completion, Group, Problem, Prompt, Turn
from tests.tiny import final_weights, forking, rows, tiny_config, write_tiny_llama

REWARDS = [[2.8, 0.2, 1.7, 0.0], [1.0, 0.0, 0.3, 0.2], [0.0, 0.4, 0.0, 2.0]]
FORK = Completion(
    "", (5, 6, 7, 8, 9, 10, 11, 12), (-0.5, -0.25, 0.0, 0.0, -1.0, 0.0, -2.0, -3.0), "stop",
    turns=(
        Turn("assistant", "", 2), Turn("user", "", 2, rewritten=True), Turn("assistant", "", 1), Turn("user", "", 1),
        Turn("assistant", "", 2),
    ),
)  # fmt: skip
PLAIN = Completion("", (20, 21), (-0.1, -0.2), "stop", 1)


@pytest.fixture(params=["decoder", "module"])
def model(request, tiny_llama):
    """The second has biases that the lean decoder does not know, so it is computed by its own module."""
    return tiny_llama(seed=3, mlp_bias=request.param == "module")


def episodes(model, seed=0):
    groups = forked(make_groups(model, REWARDS, seed, longest=24), model, seed)
    assert sum(turn.rewritten for g in groups for c in g.completions for turn in c.turns[:-1]) > 3, "the test needs forks"
    return groups


def test_a_batch_has_a_row_for_an_episode_and_a_prompt_for_each_of_its_samples():
    group = Group(Prompt(Problem("p", "?", "1"), "?", (1, 2, 3)), (FORK, PLAIN), (1.0, 0.0))
    assert FORK.segments == (0, 0, 1, 1, 1, 1, 1, 1)
    assert FORK.sampled_tokens == 5
    batch = Batch.of([group], [(0, 0), (0, 1)], torch.device("cpu"))
    assert (len(batch), batch.lengths_N.tolist(), batch.span_N.tolist()) == (2, [5, 2], [8, 2])
    assert batch.packing() == [((1, 2, 3), [[5, 6], [20, 21]]), ((7, 8), [[9, 10, 11, 12]])]
    assert batch.sequence_T.tolist() == [0] * 5 + [1] * 2
    assert batch.sampler_logprobs_T.tolist() == pytest.approx([-0.5, -0.25, -1.0, -2.0, -3.0, -0.1, -0.2])
    assert batch.view(range(1, 2)).packing() == [((1, 2, 3), [[20, 21]])]


def test_a_pass_predicts_each_sampled_token_once_and_in_the_order_of_the_batch(model):
    learner, before = learner_of(model, config_of())
    groups = episodes(before)
    batch = Batch.of(groups, [(g, m) for g in range(3) for m in range(4)], torch.device("cpu"))
    everyone = [c for g in groups for c in g.completions]
    own = [[t for t, s in zip(c.token_ids, c.sampled, strict=True) if s] for c in everyone]
    expected = [x for c in everyone for x, s in zip(c.logprobs, c.sampled, strict=True) if s]
    for budget in (1, 30, 10_000):
        parts = cut(batch, learner.scorer, budget)
        assert [n for part in parts for n in part.rows] == list(range(12))
        for part in parts:
            assert part.packed.targets_T.tolist() == [t for n in part.rows for t in own[n]]
            assert torch.equal(part.packed.lengths_N, part.view.lengths_N)
            assert torch.equal(part.packed.sequence_T, part.view.sequence_T)
            assert part.tokens <= budget or len(part.rows) == 1
        found = torch.cat([learner.scorer.logprobs(part.packed) for part in parts])
        assert found.tolist() == pytest.approx(expected, abs=1e-5)


WEIGHTS = {
    "sequence_mean": lambda c, tokens, count, longest: 1 / (c.sampled_tokens * count),
    "token_mean": lambda c, tokens, count, longest: 1 / tokens,
    "sequence_sum": lambda c, tokens, count, longest: 1 / count,
    "fixed": lambda c, tokens, count, longest: 1 / (count * longest),
}
"""Of each sampled token of an episode, which is one completion however many samples it has."""


@pytest.mark.parametrize("aggregation", WEIGHTS)
def test_the_gradient_is_the_slow_loop_s_with_every_aggregation(model, aggregation):
    config = config_of(algorithm={"loss": {"type": "clip", "aggregation": aggregation}}, optimizer={"max_grad_norm": None})
    learner, before = learner_of(model, config)
    groups = episodes(before)
    everyone = [c for g in groups for c in g.completions]
    counts = sum(c.sampled_tokens for c in everyone), len(everyone), config.rollout.max_completion_tokens
    seen = watch_gradients(learner)
    _, metrics = learner.learn(groups)
    loss = 0.0
    for group in groups:
        for completion, advantage in zip(group.completions, slow_advantages(group.rewards), strict=True):
            logprobs = slow_episode(before, group.prompt.token_ids, completion)[torch.tensor(completion.sampled)]
            loss = loss - WEIGHTS[aggregation](completion, *counts) * advantage * logprobs.sum()
    assert distance(seen[0], slow_gradient(loss, before)) < 1e-5
    assert metrics["speed/learnt_tokens"].value == counts[0]
    assert metrics["policy/sampler_mismatch"].value < 1e-5


def test_a_ratio_of_whole_completions_is_the_episode_s(tiny_llama):
    """GSPO in its second update: the geometric mean over the sampled tokens of all its samples."""
    config = config_of(
        algorithm={"updates_per_batch": 2, "loss": {"type": "clip", "ratio": "sequence", "epsilon": 0.1}},
        optimizer={"learning_rate": 3e-4, "max_grad_norm": None}, training={"micro_batch_tokens": 30},
    )  # fmt: skip
    learner, before = learner_of(tiny_llama(seed=4), config)
    groups = episodes(before, seed=1)
    models, step = [], learner.optimizer.step

    def watched(rate):
        models.append(present_model(learner, before))
        return step(rate)

    learner.optimizer.step = watched
    seen = watch_gradients(learner)
    learner.learn(groups)
    now, loss, count = models[1], 0.0, sum(map(len, REWARDS))
    for group in groups:
        for completion, advantage in zip(group.completions, slow_advantages(group.rewards), strict=True):
            own = torch.tensor(completion.sampled)
            new, old = (slow_episode(m, group.prompt.token_ids, completion)[own] for m in (now, before))
            s = (new - old.detach()).mean().exp()
            loss = loss - torch.min(s * advantage, s.clamp(1 - 0.1, 1 + 0.1) * advantage) / count
    assert distance(seen[1], slow_gradient(loss, now)) < 1e-4


@pytest.mark.parametrize("critic", [False, True])
def test_how_the_batch_is_cut_does_not_matter(model, critic):
    algorithm = {"preset": "ppo", "value": {"critic": "copy"}} if critic else {}
    gradients = []
    for tokens in (1, 17, 8192):
        learner, before = learner_of(
            copy.deepcopy(model), config_of(training={"micro_batch_tokens": tokens}, algorithm=algorithm)
        )
        seen = watch_gradients(learner)
        learner.learn(episodes(before))
        gradients.append(seen[0])
    assert distance(gradients[0], gradients[2]) < 1e-5
    assert distance(gradients[1], gradients[2]) < 1e-5


def test_forks_survive_a_checkpoint(tiny_llama):
    group = replace(make_groups(tiny_llama().double(), REWARDS)[0], completions=(FORK, PLAIN), rewards=(1.0, 0.0))
    assert _group_of(json.loads(json.dumps(_group_values(group))), group.prompt).completions == group.completions
    pairs = [(0, group.completions)]
    assert _pairs(json.loads(json.dumps(_texts(pairs))), *_numbers(pairs).values()) == pairs


def test_learning_goes_on_between_two_updates_to_the_same_bit(tiny_llama):
    def learner():
        config = config_of(algorithm={"updates_per_batch": 2, "kl": {"beta": 0.1}}, training={"micro_batch_tokens": 40})
        return learner_of(tiny_llama(seed=4), config)

    (whole, before), (halted, _) = learner(), learner()
    groups = episodes(before)
    whole.learn(groups)
    halted.learn(groups, stop=lambda: True)
    assert halted.paused is not None
    tensors, values = halted.paused.state()
    values = json.loads(json.dumps(values))
    again = [_group_of(row, group.prompt) for row, group in zip(values["groups"], groups, strict=True)]
    halted.learn(again, held=(tensors, values))
    assert whole.updates == halted.updates == 2
    for (_, one), (_, other) in zip(whole.scorer.named_parameters(), halted.scorer.named_parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("ahead", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_whose_episodes_fork_resumes_to_the_same_weights(sums, tmp_path, ahead):
    shape = {"tie_word_embeddings": False, "max_position_embeddings": 512}
    model = forking(write_tiny_llama(tmp_path / "tiny", stop_weight=60.0, **shape))
    played = {
        "environment": "tests.survival.game:Talk",
        "max_turns": 4,
        "max_completion_tokens": 400,
        "rewritten_history": "fork",
    }
    config = tiny_config(
        model, sums, rollout={**played, "ahead": ahead}, rewards={"functions": [{"function": "environment"}]}, training={"steps": 4},
        output={"checkpoint_every": 1, "keep_checkpoints": 4, "log_completions": 9, "log_tokens": 9},
    )  # fmt: skip
    quiet = Console(quiet=True)
    whole = train(config, console=quiet, run_folder=tmp_path / "whole").folder
    logged = rows(whole, "completions")
    turns = [turn for row in logged for turn in row["turns"]]
    assert sum(turn["rewritten"] for turn in turns) > 20, "the test needs forks"
    assert any(turn["role"] == "user" and not turn["rewritten"] for turn in turns), "and turns that are appended"
    assert all(sum(turn["tokens"] for turn in row["turns"]) == row["tokens"] == len(row["token_ids"]) for row in logged)
    metrics = rows(whole, "metrics")
    assert metrics[0]["policy/sampler_mismatch"] < 1e-4
    per_step = len([row for row in logged if row["step"] == 1])
    first = [turn for row in logged if row["step"] == 1 for turn in row["turns"] if turn["role"] == "assistant"]
    assert metrics[0]["episodes/turns"] == pytest.approx(len(first) / per_step), "an episode is counted once"
    again = train(config, console=quiet, run_folder=tmp_path / "again", resume_from=whole / "checkpoints" / "step-2").folder
    ours, theirs = final_weights(whole), final_weights(again)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [row["turns"] for row in rows(again, "completions")] == [row["turns"] for row in logged if row["step"] > 2]
