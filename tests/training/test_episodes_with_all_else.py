"""Episodes together with what else a run may have: rewards by turn, presets, refills, masks of truncated ones. The environment is
``tests.survival.game``, whose answers are a function of the problem and of what was said."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from rich.console import Console

from groupwise.config.presets import PRESETS
from groupwise.training.loop import train
from tests.tiny import final_weights, rows, tiny_config, write_tiny_llama

QUIET = Console(quiet=True)
TALK = {"environment": "tests.survival.game:Talk", "max_turns": 4, "max_completion_tokens": 200}
EARNED = {"functions": [{"function": "environment"}]}


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    """A random model that ends its turns."""
    shape = {"tie_word_embeddings": False, "max_position_embeddings": 512}
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", stop_weight=60.0, **shape)


@pytest.fixture
def played(talkative, sums, tmp_path):
    """``played(name, section={...})``: the folder of a run."""

    def run(name="run", /, **sections):
        sections = {"rollout": {**TALK, **sections.pop("rollout", {})}, "rewards": EARNED, **sections}
        config = tiny_config(talkative, sums, output={"log_completions": 9, "log_tokens": 9}, **sections)
        return train(config, console=QUIET, run_folder=tmp_path / name).folder

    return run


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_each_turn_is_paid_by_itself_where_rewards_are_by_turn(played):
    """DeepSeekMath's process supervision over turns, by hand: a token has the normalised rewards of its own turn and of those to come."""
    folder = played(rewards={"functions": [{"function": "environment_turns"}]}, training={"steps": 1})
    groups = {}
    for row in rows(folder, "completions"):
        groups.setdefault(row["problem"], []).append(row)
    assert len(groups) == 3
    different = 0
    for group in groups.values():
        paid = [[turn["reward"] for turn in row["turns"] if turn["role"] == "assistant"] for row in group]
        paid = [[reward or 0.0 for reward in turns] for turns in paid]
        pool = [reward for turns in paid for reward in turns]
        mean, spread = statistics.mean(pool), statistics.stdev(pool) + 1e-4
        for row, rewards in zip(group, paid, strict=True):
            assert row["components"]["environment_turns"] == pytest.approx(math.fsum(rewards))
            expected, turn = [], 0
            for one in row["turns"]:
                own = one["role"] == "assistant"
                worth = sum((reward - mean) / spread for reward in rewards[turn:]) if own else 0.0
                expected += [worth] * one["tokens"]
                turn += own
            found = row.get("token_advantages") or [row["advantage"] * own for own in map(bool, expected)]
            assert found == pytest.approx(expected, abs=2e-3)
            different += len({round(x, 6) for x in expected if x}) > 1
    assert different > 5, "the test needs episodes whose turns differ"


def test_one_number_for_the_episode_where_the_whole_is_paid(played):
    for row in rows(played(training={"steps": 1}), "completions"):
        assert "token_advantages" not in row
        assert row["reward"] == pytest.approx(math.fsum(turn["reward"] or 0.0 for turn in row["turns"]))


def test_groups_are_refilled_with_episodes_of_their_own(played):
    """Nobody is right, so that every round of refilling plays further problems; none has another's tokens."""
    folder = played(
        rollout={"refill_rounds": 2, "completions_per_prompt": 2, "max_completion_tokens": 60},
        rewards={"functions": [{"function": "accuracy"}]},
    )
    assert [row["groups/sampled"] for row in rows(folder, "metrics")] == [9, 9]
    completions = rows(folder, "completions")
    assert any(len(row["turns"]) > 1 for row in completions)
    assert len({tuple(row["token_ids"]) for row in completions}) == len(completions)


def test_a_truncated_episode_teaches_nothing_where_it_is_masked(played):
    """Two turns of three: all end at rollout.max_turns."""
    cut = {"max_turns": 2}
    masked = played("masked", rollout=cut, algorithm={"mask_truncated": True, "kl": None})
    learnt = played("learnt", rollout=cut, algorithm={"mask_truncated": False, "kl": None})
    assert {row["finish_reason"] for row in rows(learnt, "completions")} <= {"max_turns", "length", "context_full"}
    before = played("before", rollout=cut, training={"steps": 0})
    assert same(final_weights(masked), final_weights(before))
    assert not same(final_weights(learnt), final_weights(before))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "by"),
    [
        *((preset, "environment") for preset in sorted(PRESETS)),
        *((preset, "environment_turns") for preset in ("grpo", "reinforce++", "ppo")),
    ],
)
def test_every_preset_learns_from_episodes(played, preset, by):
    """On the tokens that were sampled: what the passes say of these is what the sampler said."""
    folder = played(algorithm={"preset": preset}, rewards={"functions": [{"function": by}]})
    metrics = rows(folder, "metrics")
    assert all(math.isfinite(row["policy/loss"]) for row in metrics)
    assert metrics[0]["policy/sampler_mismatch"] < 1e-4
    assert any(row["optimizer/grad_norm"] > 0 for row in metrics)
