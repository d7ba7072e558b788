"""Tokens that the policy was given, by a tool or an environment: context for what it samples, and no part of any loss, mean or count."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from slow_grpo import (
    config_of,
    distance,
    divided_in_turns,
    learner_of,
    make_groups,
    present_model,
    slow_advantages,
    slow_gradient,
    slow_logprobs,
    slow_loss,
    watch_gradients,
)

from groupwise.batch import Batch
from groupwise.tracking.jsonl import completion_rows, token_columns
from groupwise.training.ahead import _numbers, _pairs, _texts
from groupwise.training.microbatches import cut
from groupwise.training.window import _group_of, _group_values
from groupwise.types import Completion, StepScores, ToolCall, Turn

REWARDS = [[2.8, 0.2, 1.7, 0.0], [1.0, 0.0, 0.3, 0.2], [0.0, 0.4, 0.0, 2.0]]
CALLED = ToolCall("calculator", {"expression": "6 * 7"}, "42")
EPISODE = Completion(
    "<call>calculator(6 * 7)</call>tool\n42assistant\n42",
    (5, 6, 7, 8, 9, 10),
    (-0.5, -0.25, 0.0, 0.0, 0.0, -1.0),
    "stop",
    turns=(Turn("assistant", "<call>calculator(6 * 7)</call>", 2, (CALLED,)), Turn("tool", "42", 3), Turn("assistant", "42", 1)),
)


@pytest.fixture(params=["decoder", "module"])
def model(request, tiny_llama):
    """The second has biases that the lean decoder does not know, so it is computed by its own module."""
    return tiny_llama(seed=3, mlp_bias=request.param == "module")


def test_an_episode_knows_whose_its_tokens_are():
    assert EPISODE.sampled == (True, True, False, False, False, True)
    assert EPISODE.sampled_tokens == 3
    assert EPISODE.answer == "42"
    assert EPISODE.calls == (CALLED,)
    assert [m["role"] for m in EPISODE.messages] == ["assistant", "tool", "assistant"]
    plain = replace(EPISODE, turns=())
    assert (plain.sampled, plain.sampled_tokens, plain.answer) == ((True,) * 6, 6, plain.text)
    assert plain.messages == [{"role": "assistant", "content": plain.text}]


@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_the_gradient_is_the_slow_loop_s(model, beta):
    learner, before = learner_of(model, config_of(algorithm={"kl": {"beta": beta} if beta else None}))
    groups = divided_in_turns(make_groups(before, REWARDS))
    assert any(not all(c.sampled) for g in groups for c in g.completions)
    seen = watch_gradients(learner)
    _, metrics = learner.learn(groups)
    loss, _ = slow_loss(before, groups, reference=copy.deepcopy(before), beta=beta)
    assert distance(seen[0], slow_gradient(loss, before)) < 1e-5
    own = [x for g in groups for c in g.completions for x, sampled in zip(c.logprobs, c.sampled, strict=True) if sampled]
    assert metrics["speed/learnt_tokens"].value == len(own)
    assert metrics["policy/entropy"].value == pytest.approx(-sum(own) / len(own), rel=1e-4)
    assert metrics["policy/sampler_mismatch"].value < 1e-5


def test_the_second_update_is_measured_over_sampled_tokens_alone(tiny_llama):
    """GSPO: one ratio for a completion, the geometric mean over its sampled tokens."""
    config = config_of(
        algorithm={"updates_per_batch": 2, "loss": {"type": "clip", "ratio": "sequence", "epsilon": 0.1}},
        optimizer={"learning_rate": 3e-4, "max_grad_norm": None},
    )
    learner, before = learner_of(tiny_llama(seed=4), config)
    groups = divided_in_turns(make_groups(before, REWARDS), seed=1)
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
            new, old = (slow_logprobs(m, group.prompt.token_ids, completion.token_ids)[own] for m in (now, before))
            s = (new - old.detach()).mean().exp()
            loss = loss - torch.min(s * advantage, s.clamp(1 - 0.1, 1 + 0.1) * advantage) / count
    assert distance(seen[1], slow_gradient(loss, now)) < 1e-4


@pytest.mark.parametrize("aggregation", ["sequence_mean", "token_mean", "sequence_sum", "fixed"])
def test_denominators_count_sampled_tokens(tiny_llama, aggregation):
    learner, before = learner_of(tiny_llama(), config_of(algorithm={"loss": {"type": "clip", "aggregation": aggregation}}))
    groups = divided_in_turns(make_groups(before, REWARDS))
    everyone = [c for g in groups for c in g.completions]
    tokens = sum(c.sampled_tokens for c in everyone)
    weight = {
        "sequence_mean": lambda c: 1 / (c.sampled_tokens * len(everyone)),
        "token_mean": lambda c: 1 / tokens,
        "sequence_sum": lambda c: 1 / len(everyone),
        "fixed": lambda c: 1 / (len(everyone) * learner.config.rollout.max_completion_tokens),
    }[aggregation]
    batch = learner.window(groups).batch
    assert batch.weights_T.tolist() == pytest.approx([weight(c) for c in everyone for _ in range(c.sampled_tokens)])


def test_nothing_changes_where_every_token_was_sampled(tiny_llama):
    def gradient(change):
        learner, before = learner_of(tiny_llama(), config_of())
        groups = make_groups(before, REWARDS)
        seen = watch_gradients(learner)
        learner.learn([replace(g, completions=tuple(map(change, g.completions))) for g in groups])
        return seen[0]

    one = gradient(lambda c: c)
    other = gradient(lambda c: replace(c, turns=(Turn("assistant", c.text, len(c.token_ids)),)))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("budget", [1, 17, 10_000])
def test_how_the_batch_is_cut_does_not_matter(model, budget):
    gradients = []
    for tokens in (budget, 8192):
        learner, before = learner_of(copy.deepcopy(model), config_of(training={"micro_batch_tokens": tokens}))
        seen = watch_gradients(learner)
        learner.learn(divided_in_turns(make_groups(before, REWARDS)))
        gradients.append(seen[0])
    assert distance(*gradients) < 1e-5


def test_a_batch_keeps_given_tokens_as_context(tiny_llama):
    learner, before = learner_of(tiny_llama(), config_of())
    groups = divided_in_turns(make_groups(before, REWARDS))
    members = [(g, m) for g in range(3) for m in range(4)]
    batch = Batch.of(groups, members, torch.device("cpu"))
    everyone = [c for g in groups for c in g.completions]
    assert batch.packing() == [(g.prompt.token_ids, [list(c.token_ids) for c in g.completions]) for g in groups]
    assert batch.lengths_N.tolist() == [c.sampled_tokens for c in everyone]
    own = [[t for t, s in zip(c.token_ids, c.sampled, strict=True) if s] for c in everyone]
    assert len(batch.sampler_logprobs_T) == sum(map(len, own))
    for part in cut(batch, learner.scorer, 30):
        assert part.packed.targets_T.tolist() == [t for n in part.rows for t in own[n]]
        assert torch.equal(part.packed.lengths_N, part.view.lengths_N)
        assert torch.equal(part.packed.sequence_T, part.view.sequence_T)


def test_a_step_that_ends_in_given_tokens_rewards_what_was_sampled_before(tiny_llama):
    """Steps at every token of an episode come to the same as steps at its sampled tokens with the same sums."""
    _, before = learner_of(tiny_llama(), config_of())
    groups = divided_in_turns(make_groups(before, [[0.0] * 4] * 2), seed=2)

    def scored(at_sampled_alone):
        out = []
        for group in groups:
            steps = []
            for n, c in enumerate(group.completions):
                ends = [(t, 0.1 * (n + 1) * (t + 1)) for t in range(len(c.token_ids))]
                if at_sampled_alone:
                    moved = {}
                    for t, reward in ends:
                        own = max(s for s in range(t + 1) if c.sampled[s])
                        moved[own] = moved.get(own, 0.0) + reward
                    ends = sorted(moved.items())
                steps.append(tuple(ends))
            out.append(replace(group, process={"p": StepScores(1.0, tuple(steps))}, outcome_rewards=group.rewards))
        return out

    ours, by_hand = (
        learner_of(tiny_llama(), config_of(algorithm={"advantage": {"type": "group", "scale": "none", "baseline": "none"}}))[0]
        for _ in "ab"
    )
    found, expected = (one.learn(scored(alone)) for one, alone in ((ours, False), (by_hand, True)))
    for one, other in zip(found.advantages, expected.advantages, strict=True):
        assert one == pytest.approx(other)
    tokens = sum(c.sampled_tokens for c in groups[0].completions)
    assert sum(map(len, ours.token_advantages.values())) <= tokens


def test_an_episode_that_was_cut_is_masked_like_any_other(tiny_llama):
    learner, before = learner_of(tiny_llama(), config_of(algorithm={"mask_truncated": True}))
    groups = divided_in_turns(make_groups(before, REWARDS))
    ends = ("stop", "max_turns", "context_full", "length")
    groups = [
        replace(g, completions=tuple(replace(c, finish_reason=end) for c, end in zip(g.completions, ends, strict=True)))
        for g in groups
    ]
    assert learner.counts(groups).tokens == sum(g.completions[0].sampled_tokens for g in groups)


def test_turns_survive_a_checkpoint(tiny_llama):
    groups = divided_in_turns(make_groups(tiny_llama().double(), REWARDS))
    group = replace(groups[0], completions=(EPISODE, *groups[0].completions[1:]))
    assert _group_of(json.loads(json.dumps(_group_values(group))), group.prompt).completions == group.completions
    pairs = [(0, group.completions)]
    assert _pairs(json.loads(json.dumps(_texts(pairs))), *_numbers(pairs).values()) == pairs


def test_records_show_turns_and_give_no_advantage_to_given_tokens(tiny_llama):
    group = replace(make_groups(tiny_llama().double(), [[1.0]])[0], completions=(EPISODE,))
    (row,) = completion_rows(1, group, [0.5], "plain")
    assert [turn["role"] for turn in row["turns"]] == ["assistant", "tool", "assistant"]
    assert row["turns"][0]["calls"][0]["result"] == "42"
    assert token_columns(EPISODE, [1.0, 2.0, 3.0])["token_advantages"] == [1.0, 2.0, 0.0, 0.0, 0.0, 3.0]
