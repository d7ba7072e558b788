from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nested import token_advantages

from groupwise.algorithm import gae, group_advantages
from groupwise.algorithm.advantages import AdvantageInputs, FunctionScores, StepRewards, gdpo_advantage
from groupwise.errors import RewardError
from groupwise.types import Completion, Group, Problem, Prompt

reward = st.floats(-10, 10).map(lambda x: round(x, 3))
groups = st.lists(st.lists(reward, min_size=2, max_size=6), min_size=1, max_size=4)
quick = settings(max_examples=60, deadline=None)


def test_closed_form():
    # one right in four: mean 0.25, sample std 0.5
    assert group_advantages([[1, 0, 0, 0]])[0] == pytest.approx([0.75 / 0.5001] + [-0.25 / 0.5001] * 3, rel=1e-12)


@quick
@given(groups)
def test_grpo_is_torch_mean_and_std(rewards: list[list[float]]):
    for group, advantages in zip(rewards, group_advantages(rewards), strict=True):
        r = torch.tensor(group, dtype=torch.float64)
        expected = (r - r.mean()) / (r.std() + 1e-4)
        np.testing.assert_allclose(advantages, expected.numpy(), rtol=1e-9, atol=1e-9)


@quick
@given(
    groups, st.sampled_from(["group_mean", "leave_one_out"]), st.sampled_from(["group_std", "batch_std", "centred_std", "none"])
)
def test_group_baselines_sum_to_zero_and_ignore_a_constant(rewards: list[list[float]], baseline: str, scale: str):
    advantages = group_advantages(rewards, baseline, scale)
    shifted = group_advantages([[r + 3 for r in group] for group in rewards], baseline, scale)
    for a, b, group in zip(advantages, shifted, rewards, strict=True):
        assert math.fsum(a) == pytest.approx(0, abs=1e-8)
        assert b == pytest.approx(a, abs=1e-8)
        assert [a[i] < a[j] for i in range(len(a)) for j in range(len(a))] == [
            group[i] < group[j] for i in range(len(a)) for j in range(len(a))
        ]


def test_a_weight_on_all_that_differs_in_a_group_is_divided_out_by_its_deviation_alone():
    tags, right = [0.2, 0.8, 0.8, 0.4], [0.0, 2.0, 2.8, 0.8]  # a group without a right answer, paid for tags, and one with two
    for weight in (0.25, 4.0):
        weighted = [[weight * r for r in tags], right]
        assert group_advantages(weighted)[0] == pytest.approx(group_advantages([tags, right])[0], rel=2e-3)
        ratios = np.divide(group_advantages(weighted, scale="none")[0], group_advantages([tags, right], scale="none")[0])
        assert ratios == pytest.approx([weight] * 4, rel=1e-9)
    small = group_advantages([[0.25 * r for r in tags], right], scale="batch_std")[0]
    assert max(map(abs, small)) < max(map(abs, group_advantages([tags, right], scale="batch_std")[0])) / 2


@quick
@given(groups)
def test_leave_one_out_is_the_stretched_group_mean(rewards: list[list[float]]):
    for mean, loo in zip(
        group_advantages(rewards, "group_mean", "none"), group_advantages(rewards, "leave_one_out", "none"), strict=True
    ):
        assert loo == pytest.approx([a * len(mean) / (len(mean) - 1) for a in mean], abs=1e-9)


@quick
@given(st.floats(-1e6, 1e6), st.integers(1, 9), st.sampled_from(["group_mean", "leave_one_out"]))
def test_equal_rewards_give_exactly_zero(value: float, size: int, baseline: str):
    assert group_advantages([[value] * size], baseline) == [[0.0] * size]


def test_a_kl_in_equal_rewards_loses_its_weight_where_the_groups_deviation_divides():
    """beta cancels out of a group whose completions all scored the same; with the batch's deviation, or none, it does not."""
    kl = [0.5, 1.0, 2.0, 4.5]

    def advantages(beta, scale):
        return group_advantages([[1 - beta * x for x in kl], [1.0, 0.0, 1.0, 0.0]], "group_mean", scale)[0]

    weak, strong = (advantages(beta, "group_std") for beta in (0.01, 0.1))
    np.testing.assert_allclose(weak, strong, rtol=0.01, atol=1e-9)
    assert strong[0] == pytest.approx(1.5 / math.sqrt(9.5 / 3), rel=0.01), "of size 1, whatever beta is"
    for scale in ("batch_std", "none"):
        assert advantages(0.1, scale)[0] > 9 * advantages(0.01, scale)[0]


def test_batch_choices_look_at_the_whole_batch():
    rewards = [[0.0, 1.0], [2.0, 2.0, 5.0]]
    flat = np.array([0, 1, 2, 2, 5.0])
    expected = (flat - flat.mean()) / (flat.std(ddof=1) + 1e-4)
    assert [a for group in group_advantages(rewards, "batch_mean", "batch_std") for a in group] == pytest.approx(list(expected))
    assert group_advantages(rewards, "none", "none") == rewards
    assert group_advantages(rewards, "group_mean", "batch_std")[1] == pytest.approx(
        [x / (flat.std(ddof=1) + 1e-4) for x in (-1, -1, 2)]
    )


def test_centred_rewards_are_normalised_over_the_batch():
    """REINFORCE++ with a baseline (arXiv 2501.03262): 7 of 8 solved, and 1 of 8. The spread between the groups does not count."""
    mostly, hardly = [1.0] * 7 + [0.0], [1.0] + [0.0] * 7
    found = group_advantages([mostly, hardly], "group_mean", "centred_std", epsilon=0.0)
    std = (2 * (7 * 0.125**2 + 0.875**2) / 15) ** 0.5
    assert found[0] == pytest.approx([0.125 / std] * 7 + [-0.875 / std])
    assert found[0][0] == pytest.approx(0.366, abs=5e-4)
    assert found[0][-1] == pytest.approx(-2.562, abs=5e-4)
    assert group_advantages([[1.0, 1.0], [0.0, 0.0]], "group_mean", "centred_std") == [[0.0, 0.0], [0.0, 0.0]]


def test_filtering_afterwards_keeps_the_whole_groups_advantages():
    prompt = Prompt(Problem("p", "?", "1"), "?", (1,))
    completions = tuple(Completion("", (1,), (-1.0,), "length" if i == 2 else "stop", i) for i in range(4))
    group = Group(prompt, completions, rewards=(1.0, 0.0, 0.0, 2.0))
    whole = group_advantages([group.rewards])[0]
    kept = [a for a, c in zip(whole, group.completions, strict=True) if c.stopped]
    r = np.array(group.rewards)
    assert kept == pytest.approx([(x - r.mean()) / (r.std(ddof=1) + 1e-4) for x in (1, 0, 2)])
    survivors = group_advantages([[1.0, 0.0, 2.0]])[0]
    assert abs(kept[0] - survivors[0]) > 0.1  # what filtering first would have made of it


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused(bad: float):
    with pytest.raises(RewardError, match="group 1 has a reward of"):
        group_advantages([[1.0, 0.0], [0.0, bad]])


def test_a_lone_completion_teaches_nothing():
    assert group_advantages([[3.0], []], "leave_one_out") == [[0.0], []]
    assert group_advantages([[3.0]]) == [[0.0]]


def test_gdpo_refuses_rewards_of_steps():
    one, two = torch.tensor([0, 1]), torch.tensor([0.0, 1.0], dtype=torch.float64)
    steps = {"turns": StepRewards(one, one, two, torch.ones(2, dtype=torch.float64))}
    inputs = AdvantageInputs(two, torch.tensor([0, 0]), torch.tensor([1, 1]), {"right": FunctionScores(1.0, two)})
    assert gdpo_advantage(inputs).advantages_N.tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5], abs=1e-3)
    with pytest.raises(RewardError, match="compares completions as wholes, but turns rewarded steps: give"):
        gdpo_advantage(replace(inputs, steps=steps))


def test_token_advantages_without_penalties_are_the_group_ones():
    rewards = [[0.0, 1.0, 4.0], [2.0, 1.0]]
    free = [[[0.0, 0.0]] * len(g) for g in rewards]
    for baseline, scale in [("group_mean", "group_std"), ("leave_one_out", "none"), ("none", "group_std")]:
        expected = group_advantages(rewards, baseline, scale)
        assert token_advantages(rewards, free, baseline, scale) == [[[a, a] for a in g] for g in expected]


def test_a_tokens_penalty_counts_for_it_and_the_tokens_before():
    assert token_advantages([[1.0]], [[[0.1, 0.2, 0.4]]], "none", "none")[0][0] == pytest.approx([0.3, 0.4, 0.6])


# GAE


def slow_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = sum_l (gamma lambda)^l delta_{t+l}: the definition as a sum, not as a recursion."""
    values = [*values, 0.0]
    delta = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [sum((gamma * lam) ** (k - t) * delta[k] for k in range(t, len(delta))) for t in range(len(delta))]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (1.0, 0.5)])
def test_gae_is_the_textbook_sum(gamma: float, lam: float):
    rng = np.random.default_rng(0)
    lengths = [3, 1, 7, 2]
    rewards = [rng.standard_normal(n) for n in lengths]
    values = [rng.standard_normal(n) for n in lengths]
    sequence_T = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    advantages_T, returns_T = gae(
        torch.tensor(np.concatenate(rewards)), torch.tensor(np.concatenate(values)), sequence_T, gamma=gamma, lam=lam
    )
    expected = [a for r, v in zip(rewards, values, strict=True) for a in slow_gae(list(r), list(v), gamma, lam)]
    np.testing.assert_allclose(advantages_T.numpy(), expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(returns_T.numpy(), advantages_T.numpy() + np.concatenate(values), rtol=1e-12)


def test_gae_without_critic_or_discount_is_the_outcome_return():
    sequence_T = torch.tensor([0, 0, 0, 1, 1])
    rewards_T = torch.tensor([0.0, 0, 2.5, 0, -1])  # the outcome stands at the last token
    advantages_T, returns_T = gae(rewards_T, torch.zeros(5), sequence_T, gamma=1.0, lam=1.0)
    assert advantages_T.tolist() == returns_T.tolist() == [2.5, 2.5, 2.5, -1.0, -1.0]


def test_gae_of_nothing():
    empty = torch.zeros(0)
    assert gae(empty, empty, empty.long(), gamma=1.0, lam=1.0)[0].numel() == 0
