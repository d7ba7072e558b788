"""Clipping and normalising by running statistics: numpy's numbers, in checkpoints exactly, and learnt from nothing but steps."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from groupwise.algorithm import Objective
from groupwise.config.schema import Config, RewardFunctionConfig, RewardsConfig
from groupwise.errors import ConfigError
from groupwise.metrics import values
from groupwise.rewards import RewardSuite
from groupwise.rewards.scores import RunningStatistics, Shaper
from groupwise.training.advantages import StepAdvantages

from .conftest import make_completions, make_prompt


def suite_of(functions, entries=None, **settings):
    listed = [RewardFunctionConfig(function=name, **(entries or {}).get(name, {})) for name in functions]
    return RewardSuite.from_config(RewardsConfig(functions=listed, **settings), "xml", functions)


def by_text(completions):
    return [float(completion[0]["content"]) for completion in completions]


def step(suite, *groups, **more):
    """Scores a step whose completions are numbers; the rewards by group."""
    scoring = suite.score_all([(make_prompt(), make_completions(*map(str, group))) for group in groups], **more)
    return [group.rewards for group in scoring.groups], values(scoring.metrics)


def test_statistics_are_those_of_the_whole_stream_however_it_is_cut():
    rng = random.Random(0)
    stream = [1e6 + rng.gauss(0, 3) for _ in range(500)]
    whole, cut, rest = RunningStatistics(), RunningStatistics(), list(stream)
    whole.update(stream)
    while rest:
        size = rng.randint(0, 7)
        cut.update(rest[:size])
        rest = rest[size:]
    for statistics in (whole, cut):
        assert statistics.count == 500
        assert statistics.mean == pytest.approx(np.mean(stream), rel=1e-14)
        assert statistics.std == pytest.approx(np.std(stream, ddof=1), rel=1e-9)
    assert RunningStatistics().std == RunningStatistics(1, 5.0).std == 0.0


def test_scores_are_divided_by_the_std_of_the_run_so_far_the_step_included():
    suite = suite_of(
        {"f": by_text, "g": lambda completions: [1.0] * len(completions)}, {"f": {"normalise": "std", "weight": 3.0}}
    )
    first, second = [[1.0, 2.0], [4.0, 8.0]], [[100.0, -5.0]]
    rewards, _ = step(suite, *first)
    std = np.std(np.concatenate(first), ddof=1)
    np.testing.assert_allclose(rewards, 3 * np.array(first) / std + 1, rtol=1e-14)
    rewards, logged = step(suite, *second)
    everything = np.concatenate([*first, *second])
    np.testing.assert_allclose(rewards, 3 * np.array(second) / np.std(everything, ddof=1) + 1, rtol=1e-14)
    assert logged["shaping/mean_f"] == pytest.approx(everything.mean())
    assert logged["shaping/std_f"] == pytest.approx(np.std(everything, ddof=1))
    assert not any(name.endswith("_g") for name in logged)


def test_components_stay_as_the_function_gave_them_and_the_mean_is_taken_off():
    suite = suite_of({"f": by_text}, {"f": {"normalise": "mean_std"}})
    scoring = suite.score_all([(make_prompt(), make_completions("1", "2", "6"))])
    assert scoring.groups[0].components == {"f": (1.0, 2.0, 6.0)}
    assert scoring.groups[0].shaped == {"f": scoring.groups[0].rewards}
    np.testing.assert_allclose(scoring.groups[0].rewards, (np.array([1, 2, 6]) - 3) / np.std([1, 2, 6], ddof=1), rtol=1e-14)


def test_gdpo_compares_what_is_left_after_a_clip():
    config = Config.model_validate({"algorithm": {"preset": "gdpo"}})
    batch = [(make_prompt(), make_completions("0", "1", "9"))]
    found = {}
    for name, settings in (("plain", {}), ("clipped", {"f": {"clip": (0.0, 1.0)}})):
        scoring = suite_of({"f": by_text}, settings).score_all(batch)
        [found[name]] = StepAdvantages.of(scoring.groups, Objective.from_config(config.algorithm)).by_group
    assert found["plain"][1] < 0 < found["plain"][2]
    np.testing.assert_allclose(found["clipped"], np.array([-2, 1, 1]) / np.sqrt(3), atol=2e-3)


def test_clip_comes_after_normalising_and_before_the_weight_and_is_counted():
    suite = suite_of({"f": by_text}, {"f": {"clip": (-1, 2), "weight": 10.0}}, clip=(-5.0, 15.0))
    rewards, logged = step(suite, [-3, 0.5, 1.2, 7])
    assert rewards == [(-5.0, 5.0, 12.0, 15.0)]
    assert (logged["shaping/clipped_f"], logged["shaping/clipped_total"]) == (0.5, 0.5)
    suite = suite_of({"f": by_text}, {"f": {"normalise": "std", "clip": (-1.0, 1.0)}})
    rewards, logged = step(suite, [10, 20, 60])
    std = np.std([10, 20, 60], ddof=1)
    np.testing.assert_allclose(rewards[0], [10 / std, 20 / std, 1.0])
    assert logged["shaping/clipped_f"] == pytest.approx(1 / 3)


def test_the_sum_can_be_normalised_as_a_whole():
    suite = suite_of({"f": by_text, "g": by_text}, normalise="mean_std")
    rewards, logged = step(suite, [1, 2], [5, 9])
    sums = 2 * np.array([[1, 2], [5, 9]])
    np.testing.assert_allclose(rewards, (sums - sums.mean()) / np.std(sums, ddof=1), rtol=1e-14)
    assert logged["shaping/mean_total"] == sums.mean()


@pytest.mark.parametrize("normalise", ["std", "mean_std"])
def test_scores_that_never_vary_are_not_divided_by_rounding(normalise):
    suite = suite_of({"f": by_text}, {"f": {"normalise": normalise}})
    for _ in range(3):
        rewards, _ = step(suite, [0.1, 0.1, 0.1])
        assert rewards[0] == pytest.approx([0.1] * 3 if normalise == "std" else [0.0] * 3, abs=1e-12)


def test_a_function_that_does_not_apply_adds_nothing_to_the_statistics():
    suite = suite_of({"f": lambda completions: [None, 4.0], "g": by_text}, {"f": {"normalise": "std"}})
    step(suite, [1, 2])
    assert suite.state_dict() == {"f": [1, 4.0, 0.0]}


def test_only_a_step_teaches_the_statistics():
    suite = suite_of({"f": by_text}, {"f": {"normalise": "mean_std", "clip": (-1, 1)}})
    pair = (make_prompt(), make_completions("10", "30"))
    assert suite.score(*pair).rewards == (10.0, 30.0)  # nothing is known yet: a trial before the run is scored as it is
    assert suite.state_dict() == {"f": [0, 0.0, 0.0]}
    step(suite, [1, 2, 3])
    before = suite.state_dict()
    assert suite.score(*pair).rewards == (1.0, 1.0)
    suite.score_each([pair, pair])
    assert suite.state_dict() == before


def test_a_group_that_could_not_be_scored_teaches_nothing():
    def picky(completions):
        scores = by_text(completions)
        return [float("nan") if score == 13 else score for score in scores]

    suite = suite_of({"f": picky}, {"f": {"normalise": "std"}}, on_error="skip")
    step(suite, [1, 2], [5, 13])
    assert suite.state_dict()["f"][:2] == [2, 1.5]


def test_restored_statistics_go_on_bit_for_bit():
    rng = random.Random(1)
    steps = [[[rng.gauss(3, 50) for _ in range(4)] for _ in range(3)] for _ in range(6)]
    entries = {"f": {"normalise": "mean_std", "clip": (-1.5, 1.5)}}
    one = suite_of({"f": by_text}, entries, normalise="std")
    straight = [step(one, *groups) for groups in steps]
    first = suite_of({"f": by_text}, entries, normalise="std")
    found = [step(first, *groups) for groups in steps[:3]]
    tensors, state = first.checkpoint_state()
    second = suite_of({"f": by_text}, entries, normalise="std")
    second.load_checkpoint_state(tensors, json.loads(json.dumps(state)))
    assert found + [step(second, *groups) for groups in steps[3:]] == straight
    second.load_checkpoint_state({}, {})  # a checkpoint from before: what is there stays
    assert second.has_state


def test_without_either_nothing_changes_and_nothing_is_kept():
    suite = suite_of({"f": by_text})
    assert step(suite, [1, 2]) == ([(1.0, 2.0)], {"answers/unchecked": 0.0})
    assert (suite.has_state, suite.state_dict()) == (False, {})
    assert Shaper()(1e300) == 1e300


@pytest.mark.parametrize("clip", [(1.0, 1.0), (2.0, -2.0)])
def test_a_clip_the_wrong_way_round_is_refused(clip):
    with pytest.raises(ConfigError, match="its lower end must be below its upper one"):
        RewardsConfig(clip=clip)
    with pytest.raises(ConfigError, match="its lower end must be below its upper one"):
        RewardFunctionConfig(function="length", clip=clip)


def test_components_have_no_names_that_metrics_have_already():
    suite = suite_of({"mean": by_text, "total": by_text})
    assert suite.names == ("mean_2", "total_2")


def test_one_batch_has_one_divisor_however_many_rounds_it_is_sampled_in():
    """Refills join groups that are scored already: what a score is worth must not depend on the round. Later steps know them all."""
    own, refill, later = [[1.0, 2.0], [4.0, 8.0]], [[100.0, -50.0]], [[3.0, 5.0]]
    suite = suite_of({"f": by_text}, {"f": {"normalise": "mean_std"}}, normalise="std")
    rounds = [step(suite, *own)[0], step(suite, *refill, more=True)[0]]
    std, mean = np.std(np.concatenate(own), ddof=1), np.mean(np.concatenate(own))
    whole = np.std((np.concatenate(own) - mean) / std, ddof=1)
    for scores, rewards in zip((own, refill), rounds, strict=True):
        np.testing.assert_allclose(rewards, (np.array(scores) - mean) / std / whole, rtol=1e-12)
    known = json.loads(json.dumps(suite.state_dict()))
    resumed = suite_of({"f": by_text}, {"f": {"normalise": "mean_std"}}, normalise="std")
    resumed.load_state_dict(known)
    everything = np.concatenate([*own, *refill, *later])
    assert step(suite, *later)[0] == step(resumed, *later)[0]
    assert suite.rewards[0].shaper.statistics.std == pytest.approx(np.std(everything, ddof=1))
