"""Process supervision against the paper's own words in slow loops (DeepSeekMath, section 4.1.3), and what it must reduce to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nested import inputs_of, process_advantages

from groupwise.algorithm import group_advantages, to_go
from groupwise.config.presets import PRESETS
from groupwise.errors import RewardError

quick = settings(max_examples=60, deadline=None)
number = st.floats(-10, 10).map(lambda x: round(x, 3))


@st.composite
def batches(draw, least=0):
    """Ragged groups of ragged completions with ragged steps: (steps, lengths)."""
    steps, lengths = [], []
    for _ in range(draw(st.integers(1, 3))):
        sizes = draw(st.lists(st.integers(1, 12), min_size=2, max_size=5))
        lengths.append(sizes)
        steps.append(
            [[(draw(st.integers(0, size - 1)), draw(number)) for _ in range(draw(st.integers(least, 4)))] for size in sizes]
        )
    return steps, lengths


def slow_process_advantages(group, lengths, epsilon=1e-4):
    """ "We also normalize these rewards with the average and the standard deviation [of R] ... the process supervision calculates the
    advantage of each token as the sum of the normalized rewards from the following steps": sum over index(j) >= t."""
    rewards = np.array([r for completion in group for _, r in completion])
    if not len(rewards):
        return [[0.0] * length for length in lengths]
    spread = np.std(rewards, ddof=1) if len(rewards) > 1 else 0.0
    advantages = []
    for completion, length in zip(group, lengths, strict=True):
        normalised = [(index, (r - np.mean(rewards)) / (spread + epsilon)) for index, r in completion]
        advantages.append([sum(r for index, r in normalised if index >= t) for t in range(length)])
    return advantages


def flat(nested):
    return [x for group in nested for completion in group for x in completion]


@quick
@given(batches())
def test_it_is_the_papers_equation(batch):
    steps, lengths = batch
    expected = [slow_process_advantages(group, sizes) for group, sizes in zip(steps, lengths, strict=True)]
    np.testing.assert_allclose(flat(process_advantages(steps, lengths)), flat(expected), rtol=1e-8, atol=1e-8)


def test_closed_form():
    # R = {1, 0, 1}: mean 2/3, sample std sqrt(1/3); two steps in the first completion, one in the second
    found = process_advantages([[[(1, 1.0), (3, 0.0)], [(2, 1.0)]]], [[5, 3]], epsilon=0.0)
    up, down = (1 / 3) * 3**0.5, (-2 / 3) * 3**0.5
    assert found[0][0] == pytest.approx([up + down, up + down, down, down, 0.0])
    assert found[0][1] == pytest.approx([up] * 3)


@quick
@given(
    st.lists(st.lists(st.tuples(number, st.integers(1, 9)), min_size=2, max_size=5), min_size=1, max_size=3),
    st.sampled_from(["group_mean", "leave_one_out", "batch_mean", "none"]),
    st.sampled_from(["group_std", "batch_std", "centred_std", "none"]),
)
def test_one_step_at_the_last_token_is_outcome_supervision(batch, baseline, scale):
    rewards = [[r for r, _ in group] for group in batch]
    lengths = [[length for _, length in group] for group in batch]
    steps = [[[(length - 1, r)] for r, length in group] for group in batch]
    outcome = group_advantages(rewards, baseline, scale)
    expected = [[[a] * n for a, n in zip(*pair, strict=True)] for pair in zip(outcome, lengths, strict=True)]
    assert process_advantages(steps, lengths, baseline, scale) == expected


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"ppo", "gdpo"}))
def test_the_reduction_holds_for_every_preset(name):
    from groupwise.algorithm import Objective
    from groupwise.config.schema import AlgorithmConfig

    objective = Objective.from_config(AlgorithmConfig(preset=name))
    rewards, lengths = [[1.0, 0.0, 0.5], [2.0, 2.0, 2.0]], [[2, 1, 3], [1, 1, 2]]
    steps = [[[(n - 1, r)] for r, n in zip(*pair, strict=True)] for pair in zip(rewards, lengths, strict=True)]
    outcome = inputs_of(rewards, lengths)
    of_steps = inputs_of([[0.0] * 3] * 2, lengths, steps)
    expected, found = (objective.advantages(x).per_token(x) for x in (outcome, of_steps))
    assert torch.equal(found, expected)


@quick
@given(batches(), st.floats(0, 1))
def test_a_discount_lessens_later_steps_once_for_each_step_between(batch, discount):
    """Steps that end with one token follow each other in the order in which they are given."""
    steps, lengths = batch
    found = process_advantages(steps, lengths, "none", "none", discount=discount)
    for group, sizes, tokens in zip(steps, lengths, found, strict=True):
        for completion, size, got in zip(group, sizes, tokens, strict=True):
            ordered = sorted(completion, key=lambda step: step[0])
            left = [[r for end, r in ordered if end >= t] for t in range(size)]
            expected = [sum(discount**k * r for k, r in enumerate(rewards)) for rewards in left]
            np.testing.assert_allclose(got, expected, rtol=1e-8, atol=1e-6)


@quick
@given(batches(least=1), st.floats(-100, 100))
def test_a_constant_added_to_all_steps_changes_nothing_under_a_mean(batch, shift):
    steps, lengths = batch
    moved = [[[(end, r + shift) for end, r in completion] for completion in group] for group in steps]
    for baseline in ("group_mean", "leave_one_out", "batch_mean"):
        one, other = (flat(process_advantages(s, lengths, baseline, "none")) for s in (steps, moved))
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("baseline", ["group_mean", "leave_one_out"])
def test_equal_steps_teach_nothing_however_many_there_are(baseline):
    steps = [[[(0, 0.1), (3, 0.1), (4, 0.1)], [(1, 0.1)], []]]
    assert flat(process_advantages(steps, [[5, 2, 4]], baseline)) == [0.0] * 11


def test_leave_one_out_leaves_out_the_completion_and_not_the_step():
    found = process_advantages([[[(0, 1.0), (1, 2.0)], [(0, 5.0)], [(0, 3.0)]]], [[2, 1, 1]], "leave_one_out", "none")
    assert found == [[[(1 - 4) + (2 - 4), 2 - 4], [5 - 2.0], [3 - (1 + 2 + 5) / 3]]]
    # A completion alone with its steps has nobody to be judged by.
    assert process_advantages([[[(0, 1.0), (1, 3.0)], []]], [[2, 1]], "leave_one_out", "none") == [[[0.0, 1.0], [0.0]]]


def test_steps_that_end_together_add_up_and_later_tokens_get_nothing():
    assert to_go(torch.tensor([0.0, 3.0, 0.0, 4.0, 0.0, 5.0]), torch.tensor([5, 1])).tolist() == [7.0, 7.0, 4.0, 4.0, 0.0, 5.0]
    assert process_advantages([[[(1, 1.0), (1, 2.0), (3, 4.0)]]], [[5]], "none", "none") == [[[7.0, 7.0, 4.0, 4.0, 0.0]]]
    assert to_go(torch.zeros(0), torch.zeros(0, dtype=torch.long)).tolist() == []


@pytest.mark.parametrize(
    "advantages", [group_advantages, lambda rewards: process_advantages([[[(0, r)] for r in rewards[0]]], [[1, 1]])]
)
def test_a_reward_whose_square_would_leave_fp32_is_refused(advantages):
    with pytest.raises(RewardError, match=r"a reward of 1e\+200, but rewards must be of at most 1e\+12 in size"):
        advantages([[1e200, 0.0]])
    assert advantages([[1e12, 0.0]])


def test_a_reward_that_is_not_finite_is_refused():
    with pytest.raises(RewardError, match="must be finite"):
        process_advantages([[[(0, float("nan"))], []]], [[1, 1]])
