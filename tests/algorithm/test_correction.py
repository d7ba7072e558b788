"""The importance weight between sampler and trainer, and the factor on the surrogate."""

from __future__ import annotations

import math

import pytest
import torch

from groupwise.algorithm import KL, Objective, policy_loss, sampler_correction

SEQUENCE = torch.tensor([0, 0, 1, 1, 1])
SAMPLED = torch.log(torch.tensor([0.5, 0.5, 0.2, 0.8, 0.5], dtype=torch.float64))
OLD = torch.log(torch.tensor([0.6, 0.25, 0.8, 0.8, 0.1], dtype=torch.float64))
RATIOS = [1.2, 0.5, 4.0, 1.0, 0.2]


@pytest.mark.parametrize(
    ("level", "mode", "low", "high", "expected", "cut"),
    [
        ("token", "truncate", None, 2.0, [1.2, 0.5, 2.0, 1.0, 0.2], 1),
        ("token", "mask", 0.3, 2.0, [1.2, 0.5, 0.0, 1.0, 0.0], 2),
        ("token", "truncate", 0.3, None, [1.2, 0.5, 4.0, 1.0, 0.3], 1),
        ("sequence", "truncate", None, 0.7, [0.6, 0.6, 0.7, 0.7, 0.7], 3),
        ("sequence", "mask", None, 0.7, [0.6, 0.6, 0.0, 0.0, 0.0], 3),
        ("token", "truncate", None, None, RATIOS, 0),
    ],
)
def test_by_hand(level, mode, low, high, expected, cut):
    factor, metrics = sampler_correction(OLD, SAMPLED, SEQUENCE, 2, level=level, mode=mode, low=low, high=high)
    assert factor.tolist() == pytest.approx(expected, rel=1e-12)
    assert metrics["correction_cut"].total == cut
    assert metrics["correction"].value == pytest.approx(sum(expected) / 5)


def test_uncut_it_makes_the_expectation_right():
    """E_mu[pi / mu x f] = E_pi[f], summed over a vocabulary of three."""
    mu, pi, f = ([0.2, 0.3, 0.5], [0.6, 0.1, 0.3], [1.0, -2.0, 0.5])
    factor, _ = sampler_correction(torch.tensor(pi).log(), torch.tensor(mu).log(), torch.arange(3), 3, high=None)
    assert sum(m * w * x for m, w, x in zip(mu, factor.tolist(), f, strict=True)) == pytest.approx(
        sum(p * x for p, x in zip(pi, f, strict=True)), rel=1e-6
    )


def test_one_policy_needs_no_correction_and_a_far_one_stays_finite():
    assert sampler_correction(OLD, OLD, SEQUENCE, 2, level="sequence", high=None)[0].tolist() == [1.0] * 5
    assert math.isfinite(sampler_correction(OLD + 200, SAMPLED, SEQUENCE, 2, high=None)[0].sum())


def test_the_factor_is_on_the_surrogate_and_not_on_the_kl():
    objective = Objective(kl=KL(0.1))
    given = {
        "logprobs_T": OLD.clone().requires_grad_(),
        "reference_logprobs_T": SAMPLED,
        "advantages_N": torch.tensor([1.0, -1.0]),
        "sequence_T": SEQUENCE,
        "weights_T": torch.full((5,), 0.2),
    }
    plain, parts = policy_loss(objective, **given)
    none, without = policy_loss(objective, **given, factor_T=torch.zeros(5))
    doubled, twice = policy_loss(objective, **given, factor_T=torch.full((5,), 2.0))
    assert without["loss_policy"].value == 0
    assert none.item() == without["loss_kl"].value == pytest.approx(parts["loss_kl"].value)
    assert parts["loss_kl"].value > 0
    assert twice["loss_policy"].value == pytest.approx(2 * parts["loss_policy"].value)
    assert doubled.item() - plain.item() == pytest.approx(parts["loss_policy"].value)
