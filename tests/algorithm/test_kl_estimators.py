from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.algorithm import KL, AdaptiveKL, Objective, kl_in_reward, kl_penalty, kl_per_token, policy_loss
from groupwise.algorithm.kl import MAX_LOG_DIFFERENCE
from groupwise.algorithm.losses import clip_loss, reinforce_loss


def family(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy over six symbols, and the log-probabilities of a reference."""
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(6, generator=generator, dtype=torch.float64).requires_grad_()
    return theta, torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)


def expected_gradient_as_loss(theta: torch.Tensor, reference: torch.Tensor, estimator: str) -> torch.Tensor:
    """E over symbols of the gradient of the per-sample estimate, exactly: every symbol weighted by its probability."""
    logprobs = theta.log_softmax(0)
    estimate = kl_per_token(logprobs, reference, estimator)
    return torch.autograd.grad((logprobs.exp().detach() * estimate).sum(), theta)[0]


def gradient_of_kl(theta: torch.Tensor, reference: torch.Tensor, forward: bool) -> torch.Tensor:
    p, q = theta.log_softmax(0), reference
    kl = (q.exp() * (q - p)).sum() if forward else (p.exp() * (p - q)).sum()
    return torch.autograd.grad(kl, theta)[0]


@pytest.mark.parametrize("seed", range(3))
def test_what_each_estimator_does_as_a_loss(seed: int):
    theta, reference = family(seed)
    reverse, forward = gradient_of_kl(theta, reference, False), gradient_of_kl(theta, reference, True)
    torch.testing.assert_close(expected_gradient_as_loss(theta, reference, "k1"), torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(expected_gradient_as_loss(theta, reference, "k2"), reverse)
    torch.testing.assert_close(expected_gradient_as_loss(theta, reference, "k3"), forward)
    assert (reverse - forward).abs().max() > 1e-2  # the two directions are told apart by this test


@pytest.mark.parametrize("seed", range(3))
def test_k1_in_the_reward_is_the_gradient_of_the_kl(seed: int):
    theta, reference = family(seed)
    logprobs = theta.log_softmax(0)
    penalty = kl_penalty(logprobs, reference, beta=1.0)
    assert not penalty.requires_grad
    gradient = torch.autograd.grad((logprobs.exp().detach() * penalty * logprobs).sum(), theta)[0]
    torch.testing.assert_close(gradient, gradient_of_kl(theta, reference, False))


@pytest.mark.parametrize("old_seed", [None, 7])
def test_times_the_ratio_k3_has_the_gradient_of_the_kl_off_policy_too(old_seed: int | None):
    """arXiv 2512.02556: samples are of the old policy, the expectation over them is that of the new one's KL to the reference."""
    theta, reference = family(0)
    old = (theta if old_seed is None else family(old_seed)[0]).detach().log_softmax(0)
    objective = Objective(loss=reinforce_loss, kl=KL(1.0, importance="token"))
    zeros = torch.zeros(6, dtype=torch.float64)
    loss, _ = policy_loss(
        objective, logprobs_T=theta.log_softmax(0), old_logprobs_T=old, sequence_T=torch.arange(6), weights_T=old.exp(),
        advantages_N=zeros, reference_logprobs_T=reference,
    )  # fmt: skip
    torch.testing.assert_close(torch.autograd.grad(loss, theta)[0], gradient_of_kl(theta, reference, False))


def test_of_a_whole_completion_the_ratio_that_corrects_the_kl_runs_into_every_token():
    theta = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64, requires_grad=True)
    old, reference = torch.tensor([-1.1, -1.0, -0.5]).double(), torch.tensor([-1.0, -1.5, -0.7]).double()
    sequence_T, weights_T = torch.tensor([0, 0, 1]), torch.tensor([0.25, 0.25, 0.5]).double()
    objective = Objective(loss=partial(clip_loss, ratio="sequence"), kl=KL(1.0, importance="sequence"))
    loss, _ = policy_loss(
        objective, logprobs_T=theta, old_logprobs_T=old, sequence_T=sequence_T, weights_T=weights_T,
        advantages_N=torch.zeros(2).double(), reference_logprobs_T=reference,
    )  # fmt: skip
    d = reference - theta
    k3 = d.exp() - d - 1
    first, second = ((theta - old)[:2].mean()).exp(), ((theta - old)[2]).exp()
    expected = first * 0.25 * k3[:2].sum() + second * 0.5 * k3[2]
    torch.testing.assert_close(torch.autograd.grad(loss, theta)[0], torch.autograd.grad(expected, theta)[0])


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(estimator: str):
    theta, reference = family(0)
    p = theta.detach().log_softmax(0)
    kl = (p.exp() * (p - reference)).sum()
    torch.testing.assert_close((p.exp() * kl_per_token(p, reference, estimator)).sum(), kl)


@settings(max_examples=80, deadline=None)
@given(st.floats(-60, 0), st.floats(-60, 0), st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
def test_k3_is_finite_never_negative_and_pulls_back(logprob: float, reference: float, dtype: torch.dtype):
    lp = torch.tensor([logprob], dtype=dtype).requires_grad_()
    ref = torch.tensor([reference], dtype=dtype)
    value = kl_per_token(lp, ref, "k3")
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(lp.grad).all()
    d = ref.item() - lp.item()
    assert value.item() >= -1e-7 * abs(d)  # expm1's own rounding
    assert lp.grad.item() * d <= 0  # descent moves the policy towards the reference
    if 0.01 < abs(d) <= MAX_LOG_DIFFERENCE:
        assert value.item() == pytest.approx(math.expm1(d) - d, rel=1e-4)


def test_k3_keeps_its_digits_near_the_reference():
    lp = torch.tensor([-1.0], dtype=torch.float64)
    assert kl_per_token(lp, lp + 1e-6, "k3").item() == pytest.approx(5e-13, rel=1e-3)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_gradient_survives_fp32(estimator: str):
    """Training computes in fp32. Near the reference the pull is small, and must not drown in the tangent's slope of 5e8."""
    d = torch.tensor([-8.0, -1.0, -1e-2, 1e-3, 0.3, 2.0, 19.0])
    logprobs = torch.full_like(d, -20.0).requires_grad_()
    found = torch.autograd.grad(kl_per_token(logprobs, d - 20, estimator).sum(), logprobs)[0]
    expected = {"k1": torch.ones_like(d), "k2": -d, "k3": -torch.expm1(d.double()).float()}[estimator]
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-5)


def test_k3_goes_on_along_its_tangent():
    at = torch.tensor([-MAX_LOG_DIFFERENCE, -MAX_LOG_DIFFERENCE - 1, -2000.0], dtype=torch.float64)
    value = kl_per_token(at, torch.zeros(3, dtype=torch.float64), "k3")
    slope = math.expm1(MAX_LOG_DIFFERENCE)
    assert (value[1] - value[0]).item() == pytest.approx(slope)
    assert (value[2] - value[0]).item() == pytest.approx(slope * (2000 - MAX_LOG_DIFFERENCE))


def test_the_reference_gets_no_gradient():
    ref = torch.zeros(2, requires_grad=True)
    assert not kl_per_token(torch.ones(2), ref, "k3").requires_grad


def test_kl_in_reward_sums_each_completion():
    lp, ref = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -2.0, 0.0])
    penalty_N = kl_in_reward(lp, ref, torch.tensor([0, 0, 1]), 3, beta=0.1)
    torch.testing.assert_close(penalty_N, torch.tensor([0.05, -0.05, 0.0]))


# adaptive coefficient


def test_the_controller_is_the_papers():
    controller = AdaptiveKL(beta=0.1, target=6.0)
    assert controller.update(6.0).beta == pytest.approx(0.1)
    assert controller.update(6.6).beta == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    assert controller.update(600.0).beta == pytest.approx(0.1 * 1.02)
    assert controller.update(0.0).beta == pytest.approx(0.1 * 0.98)
    assert controller.update(math.nan) == controller


@pytest.mark.parametrize("target", [0.05, 0.4])
@pytest.mark.parametrize("start", [0.01, 10.0])
def test_the_controller_reaches_its_target_on_a_toy(target: float, start: float):
    """A categorical policy climbs E[reward] - beta KL by exact gradient; beta is steered until the KL is the target."""
    theta, reward = (
        torch.zeros(4, dtype=torch.float64, requires_grad=True),
        torch.tensor([1.0, 0.5, 0.0, 0.0], dtype=torch.float64),
    )
    reference = torch.full((4,), math.log(0.25), dtype=torch.float64)
    controller = AdaptiveKL(beta=start, target=target)
    for _ in range(1500):
        p = theta.log_softmax(0)
        kl = (p.exp() * (p - reference)).sum()
        (gradient,) = torch.autograd.grad((p.exp() * reward).sum() - controller.beta * kl, theta)
        with torch.no_grad():
            theta += min(1.0, 1 / controller.beta) * gradient
        controller = controller.update(kl.item())
    assert kl.item() == pytest.approx(target, rel=0.05)


@pytest.mark.parametrize("field", ["beta", "target", "gain"])
def test_the_controller_refuses_what_is_not_positive(field: str):
    with pytest.raises(ValueError, match=f"AdaptiveKL.{field} is 0"):
        AdaptiveKL(**({"beta": 0.1, "target": 1.0} | {field: 0}))
