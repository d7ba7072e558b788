"""The learned value: GAE against the textbook's sum, the outcome return without a critic, whitening, and the clipped loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from nested import explained_variance, inputs_of, value_advantages
from slow_objectives import gae_by_the_sum, ppo_token_rewards, ppo_value, random_batch

from groupwise.algorithm import Objective, value_loss
from groupwise.algorithm.advantages import gae_advantage
from groupwise.config.schema import AlgorithmConfig
from groupwise.errors import RewardError


def penalties_of(b, beta=0.02):
    return [[(beta * (o - r)).tolist() for o, r in zip(og, rg, strict=True)] for og, rg in zip(b.old, b.ref, strict=True)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (0.99, 0.0)])
def test_advantages_and_returns_are_the_sum_of_the_paper(gamma, lam):
    b = random_batch(3, 0.2)
    advantages, returns = value_advantages(b.rewards, b.values, penalties_of(b), gamma=gamma, lam=lam)
    for g, group in enumerate(ppo_token_rewards(b)):
        for i, rewards in enumerate(group):
            slow = gae_by_the_sum(rewards, b.values[g][i], gamma, lam)
            np.testing.assert_allclose(advantages[g][i], slow, rtol=1e-12, atol=1e-13)
            np.testing.assert_allclose(returns[g][i], slow + b.values[g][i], rtol=1e-12, atol=1e-13)


def test_without_a_critic_and_without_discount_every_token_has_the_outcome():
    b = random_batch(1, 0.2)
    nothing = [[np.zeros_like(v) for v in group] for group in b.values]
    advantages, returns = value_advantages(b.rewards, nothing, gamma=1.0, lam=1.0)
    assert advantages == returns == [[[r] * len(b.lp[g][i]) for i, r in enumerate(group)] for g, group in enumerate(b.rewards)]
    settings = AlgorithmConfig(advantage={"baseline": "none", "scale": "none"}, kl=None)
    plain = inputs_of(b.rewards).by_group(Objective.from_config(settings).advantages(inputs_of(b.rewards)).advantages_N)
    assert [[tokens[0] for tokens in group] for group in advantages] == plain


def test_with_lambda_one_the_value_is_only_a_baseline():
    b = random_batch(2, 0.2)
    advantages, returns = value_advantages(b.rewards, b.values, gamma=1.0, lam=1.0)
    for g, group in enumerate(b.rewards):
        for i, r in enumerate(group):
            np.testing.assert_allclose(advantages[g][i], r - b.values[g][i], rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(returns[g][i], r, rtol=1e-12, atol=1e-12)


def test_a_perfect_value_leaves_nothing_to_learn():
    rewards, values = [[1.0, 0.0]], [[[1.0, 1.0, 1.0], [0.0, 0.0]]]
    for lam in (0.0, 0.5, 1.0):
        advantages, returns = value_advantages(rewards, values, lam=lam)
        assert np.abs(np.concatenate([a for g in advantages for a in g])).max() < 1e-15
        assert explained_variance(values, returns) == 1.0


def test_whitening_is_over_all_tokens_of_the_batch_and_spares_the_returns():
    b = random_batch(5, 0.2)
    raw, returns = value_advantages(b.rewards, b.values)
    white, again = value_advantages(b.rewards, b.values, whiten=True, epsilon=1e-6)
    flat = np.array([x for g in raw for c in g for x in c])
    whitened = np.array([x for g in white for c in g for x in c])
    np.testing.assert_allclose(whitened, (flat - flat.mean()) / (flat.std(ddof=1) + 1e-6), rtol=1e-12, atol=1e-13)
    assert returns == again
    assert value_advantages([[1.0]], [[[0.5]]], whiten=True)[0] == [[[0.0]]]


def test_a_completion_of_given_tokens_alone_takes_nothing_from_its_neighbours():
    assert value_advantages([[7.0, 2.0, 9.0]], [[[], [0.5], []]]) == ([[[], [1.5], []]], [[[], [2.0], []]])


def test_a_reward_that_is_no_number_is_refused():
    with pytest.raises(RewardError, match="finite"):
        value_advantages([[math.nan]], [[[0.0]]])


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("seed", range(3))
def test_value_loss_and_gradient_are_the_slow_loops(clip, seed):
    rng = np.random.default_rng(seed)
    values, old, returns = rng.standard_normal((3, 40))
    values = old + 0.4 * (values - old)
    weights = rng.uniform(0.01, 0.1, 40)
    tensors = [torch.tensor(x) for x in (values, old, returns, weights)]
    tensors[0].requires_grad_()
    named = dict(zip(("values_T", "old_values_T", "returns_T", "weights_T"), tensors, strict=True))
    loss, metrics = value_loss(**named, clip=clip)
    loss.backward()
    assert loss.item() == pytest.approx(ppo_value(values, old, returns, weights, clip), rel=1e-12)
    for t, h in ((t, 1e-6) for t in range(40)):
        moved = np.eye(40)[t] * h
        slope = (
            ppo_value(values + moved, old, returns, weights, clip) - ppo_value(values - moved, old, returns, weights, clip)
        ) / (2 * h)
        assert tensors[0].grad[t].item() == pytest.approx(slope, rel=1e-5, abs=1e-9)
    still = int((tensors[0].grad == 0).sum())
    assert metrics["value_clipped"].total == still
    assert (0 < still < 40) == (clip is not None)
    assert metrics["value_loss"].value == loss.item()
    assert metrics["value_error"].value == pytest.approx((values - returns).mean())


def test_value_loss_of_half_precision_is_computed_in_fp32_and_no_token_is_no_loss():
    x = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    loss, _ = value_loss(values_T=x, old_values_T=x, returns_T=x + 1, weights_T=torch.ones(2))
    assert loss.dtype == torch.float32
    assert loss.item() == 1.0
    empty = torch.zeros(0)
    assert value_loss(values_T=empty, old_values_T=empty, returns_T=empty, weights_T=empty, clip=0.2)[0].item() == 0


def test_explained_variance():
    assert explained_variance([[[0.5, 0.5]]], [[[0.0, 1.0]]]) == 0.0
    assert explained_variance([[[1.0, 0.0]]], [[[0.0, 1.0]]]) == -3.0
    assert math.isnan(explained_variance([[[1.0, 0.0]]], [[[1.0, 1.0]]]))
    assert math.isnan(explained_variance([[[]]], [[[]]]))


@pytest.mark.parametrize("reward", [0.2, 0.0])
def test_returns_that_differ_by_rounding_do_not_vary(reward):
    """Returns are advantages + values: of equal rewards they come out a bit apart, where values are of another size."""
    values = [[[0.3, 0.75, 0.3], [0.75, 0.3, 0.75, 0.1, 0.7]]]
    inputs = inputs_of([[reward, reward]], values=values)
    outputs = gae_advantage(inputs, gamma=1.0, lam=1.0)
    if reward:
        assert 0 < float(outputs.returns_T.var()) < 1e-30
    assert "value/explained_variance" not in outputs.metrics
    same = [[[0.8] * 1001]]
    assert math.isnan(explained_variance([[[0.3, 0.75] * 500 + [0.3]]], same))
    assert explained_variance([[[0.5, 0.5]]], [[[1000.0, 1000.0001]]]) == pytest.approx(0, abs=1e-6), "small, and no rounding"
