"""Surrogates, ratios, weights and the policy loss, piece by piece."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.algorithm import KL, BatchCounts, Objective, policy_loss, token_weights
from groupwise.algorithm.aggregate import AGGREGATIONS
from groupwise.algorithm.losses import (
    LOSSES,
    Loss,
    LossInputs,
    cispo_loss,
    clip,
    clip_loss,
    dual_clipped,
    product_ratio,
    sapo_loss,
    sequence_ratio,
    token_ratio,
    vespo_loss,
)

ratios = st.floats(0.01, 20)
advantages = st.floats(-5, 5)
SIGMOID_1, E_HALF = 1 / (1 + math.exp(-1)), math.exp(-0.5)


def scalar(f, ratio: float, advantage: float, *bounds: float) -> tuple[float, float, bool]:
    """Loss, its slope in the ratio, and the mask."""
    r = torch.tensor(ratio, dtype=torch.float64, requires_grad=True)
    loss, mask = f(r, torch.tensor(advantage, dtype=torch.float64), *bounds)
    loss.backward()
    return loss.item(), r.grad.item(), bool(mask)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.5, 2.0, -2.56, 0.0),  # already likelier by more than 28%: no more push
        (0.5, 2.0, -1.0, -2.0),  # less likely than it was: pushed as ever
        (0.5, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 2.0),
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_clip_by_hand(ratio: float, advantage: float, loss: float, slope: float):
    value, gradient, clipped = scalar(clip, ratio, advantage, 0.2, 0.28)
    assert (value, gradient) == pytest.approx((loss, slope))
    assert clipped == (slope == 0 and advantage != 0)


@settings(max_examples=100, deadline=None)
@given(ratios, advantages, st.floats(1.5, 6))
def test_dual_clip_is_intellect_2s_delta_and_only_caps_bad_tokens(ratio: float, advantage: float, cap: float):
    """-min(min(r, delta) A, clip(r) A): arXiv 2505.07291, section 3.4."""

    def two_sided(r, a, low, high, delta):
        loss, clipped = clip(r.clamp(max=delta), a, low, high)
        return loss, clipped | ((a < 0) & (r > delta))

    dual, sided = scalar(dual_clipped, ratio, advantage, 0.2, 0.28, cap), scalar(two_sided, ratio, advantage, 0.2, 0.28, cap)
    assert dual[0] == pytest.approx(sided[0], rel=1e-12)
    assert dual[2] == sided[2]
    assert dual[0] <= max(0.0, -cap * advantage) + 1e-12
    if advantage > 0 or ratio < cap:
        assert dual == pytest.approx(scalar(clip, ratio, advantage, 0.2, 0.28))
    elif advantage < 0 and ratio > cap:
        assert (dual[1], sided[1]) == (0, 0)


def test_cispo_cuts_the_weight_and_keeps_the_gradient():
    lp = torch.tensor([-1.0, -1.0], dtype=torch.float64, requires_grad=True)
    old = lp.detach() - torch.tensor([2.0, 9.0], dtype=torch.float64).log()
    found = cispo_loss(LossInputs(lp, old, torch.tensor([1.0, -1.0]), torch.tensor([0, 0]), 1), epsilon=1.0, epsilon_high=4.0)
    found.loss_T.sum().backward()
    assert lp.grad.tolist() == pytest.approx([-2.0, 5.0], rel=1e-14)
    assert found.clipped_T.tolist() == [False, True]


def of_ratios(loss: Loss, ratios: list[float], advantage: float) -> tuple[list[float], list[float]]:
    """Of one completion, whose tokens have a log-probability of -1: each token's loss, and its slope in that."""
    lp = torch.full((len(ratios),), -1.0, dtype=torch.float64, requires_grad=True)
    old, sequence_T = lp.detach() - torch.tensor(ratios, dtype=torch.float64).log(), torch.zeros(len(ratios), dtype=torch.long)
    found = loss(LossInputs(lp, old, torch.full_like(old, advantage), sequence_T, 1))
    found.loss_T.sum().backward()
    return found.loss_T.tolist(), lp.grad.tolist()


@pytest.mark.parametrize(
    ("loss", "ratios", "advantage", "value", "slope"),
    [
        (partial(cispo_loss, epsilon=0.2, epsilon_high=0.3), [0.5], 3.0, 0.8 * 3, -0.8 * 3),
        (partial(cispo_loss, epsilon=0.2, epsilon_high=0.3), [1.5], 3.0, 1.3 * 3, -1.3 * 3),
        (partial(cispo_loss, epsilon=0.2, epsilon_high=None), [1.5], 3.0, 1.2 * 3, -1.2 * 3),
        (partial(sapo_loss, tau_positive=2.0), [1.5], 3.0, -2 * SIGMOID_1 * 3, -4 * SIGMOID_1 * (1 - SIGMOID_1) * 1.5 * 3),
        (partial(sapo_loss, tau_negative=2.0), [1.5], -3.0, 2 * SIGMOID_1 * 3, 4 * SIGMOID_1 * (1 - SIGMOID_1) * 1.5 * 3),
        (partial(vespo_loss, k_positive=1.0, lambda_positive=0.5), [4.0, 0.5], 3.0, 2 * E_HALF * 3, -2 * E_HALF * 3),
        (partial(vespo_loss, k_negative=1.0, lambda_negative=0.5), [4.0, 0.5], -3.0, -2 * E_HALF * 3, 2 * E_HALF * 3),
    ],
)
def test_losses_with_other_settings_by_hand(loss: Loss, ratios: list[float], advantage: float, value: float, slope: float):
    """The completion's whole ratio, by which VESPO goes, is 2; there phi is 2^k exp(-lambda)."""
    values, slopes = of_ratios(loss, ratios, advantage)
    assert values == pytest.approx([value] * len(ratios))
    assert slopes == pytest.approx([slope] * len(ratios))


@pytest.mark.parametrize(("moved", "ratio"), [((0.2,) * 500, math.exp(20)), ((-0.2,) * 500, 1e-8), ((30.0, -21.0), 1.0)])
def test_the_ratio_of_a_whole_completion_is_bounded_and_so_is_each_token_s(moved: tuple[float, ...], ratio: float):
    lp, sequence_T = torch.tensor([*moved, 0.5]) - 1, torch.tensor([0] * len(moved) + [1])
    expected = [ratio] * len(moved) + [math.exp(0.5)]
    assert product_ratio(lp, torch.full_like(lp, -1), sequence_T, 2).tolist() == pytest.approx(expected, rel=1e-5)


def test_ratios_by_hand():
    lp = torch.log(torch.tensor([0.2, 0.4, 0.9], dtype=torch.float64)).requires_grad_()
    old = torch.log(torch.tensor([0.1, 0.4, 0.3], dtype=torch.float64))
    sequence_T = torch.tensor([0, 0, 1])
    assert token_ratio(lp, old, sequence_T, 2).tolist() == pytest.approx([2, 1, 3])
    s = sequence_ratio(lp, old, sequence_T, 2)
    assert s.tolist() == pytest.approx([math.sqrt(2), math.sqrt(2), 3])
    (s * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert lp.grad.tolist() == pytest.approx([math.sqrt(2), 10 * math.sqrt(2), 300])  # each token's own, s grad log pi


def test_weights_by_hand():
    lengths_N, sequence_T = torch.tensor([2, 4]), torch.tensor([0, 0, 1, 1, 1, 1])
    counts = BatchCounts(completions=5, tokens=20, max_tokens=8)
    expected = {
        "sequence_mean": [1 / 10] * 2 + [1 / 20] * 4,
        "token_mean": [1 / 20] * 6,
        "sequence_sum": [1 / 5] * 6,
        "fixed": [1 / 40] * 6,
    }
    assert set(expected) == set(AGGREGATIONS)
    for aggregation, weights in expected.items():
        assert token_weights(lengths_N, sequence_T, aggregation, counts).tolist() == pytest.approx(weights)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=12), st.sampled_from(["sequence_mean", "token_mean"]))
def test_means_have_weights_that_add_up_to_one(lengths: list[int], aggregation: str):
    lengths_N = torch.tensor(lengths)
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), lengths_N)
    weights_T = token_weights(lengths_N, sequence_T, aggregation, BatchCounts(len(lengths), sum(lengths), 30), torch.float64)
    assert weights_T.sum().item() == pytest.approx(1, rel=1e-12)


def test_an_empty_batch_has_no_denominator():
    with pytest.raises(ValueError, match="at least one completion"):
        BatchCounts(completions=0, tokens=0, max_tokens=8)


# policy loss


def inputs(dtype: torch.dtype = torch.float64, **changes: object) -> dict:
    given = {
        "logprobs_T": torch.tensor([-1.0, -2.0, -0.5], dtype=dtype, requires_grad=True),
        "old_logprobs_T": torch.tensor([-1.1, -1.0, -0.5], dtype=dtype),
        "reference_logprobs_T": torch.tensor([-1.0, -1.5, -0.7], dtype=dtype),
        "sequence_T": torch.tensor([0, 0, 1]),
        "advantages_N": torch.tensor([1.0, -0.5], dtype=dtype),
        "weights_T": torch.tensor([0.25, 0.25, 0.5], dtype=dtype),
    }
    return given | changes


def test_closed_form_with_its_metrics():
    loss, metrics = policy_loss(Objective(kl=KL(0.1)), **inputs())
    r = [math.exp(0.1), math.exp(-1), 1.0]
    policy = -(0.25 * r[0] + 0.25 * r[1] - 0.5 * 0.5 * r[2])
    kl = [math.exp(d) - 1 - d for d in (0.0, 0.5, -0.2)]
    leash = 0.25 * kl[0] + 0.25 * kl[1] + 0.5 * kl[2]
    assert loss.item() == pytest.approx(policy + 0.1 * leash)
    found = {name: metric.value for name, metric in metrics.items()}
    assert found == pytest.approx(
        {
            "loss": policy + 0.1 * leash,
            "loss_policy": policy,
            "loss_kl": 0.1 * leash,
            "ratio_deviation_max": 1 - r[1],
            "ratio": sum(r) / 3,
            "entropy": -sum(x * lp for x, lp in zip(r, inputs()["logprobs_T"].tolist(), strict=True)) / 3,
            "clip_low": 0.0,
            "clip_high": 0.0,
            "clip_low_min": 0.0,
            "clip_high_max": 0.0,
            "kl": sum(kl) / 3,
        }
    )
    assert metrics["ratio"].count == 3


def test_the_numbers_of_a_micro_batch_are_read_at_once(monkeypatch):
    """Each read waits for all that a GPU was told to do."""
    reads = []
    for name in ("tolist", "item", "__float__", "__int__", "__bool__"):
        real = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda tensor, name=name, real=real: reads.append(name) or real(tensor))
    _, metrics = policy_loss(Objective(kl=KL(0.1, importance="token")), **inputs())
    assert reads == ["tolist"]
    assert {"loss", "kl_corrected", "clip_low_min", "clip_high_max", "ratio_deviation_max"} <= set(metrics)


def test_clip_shares_are_told_apart():
    lp = torch.tensor([0.5, -0.5, 0.5, -0.5]) - 2
    given = inputs(
        torch.float32,
        logprobs_T=lp,
        old_logprobs_T=torch.full((4,), -2.0),
        reference_logprobs_T=None,
        sequence_T=torch.tensor([0, 1, 2, 3]),
        advantages_N=torch.tensor([1.0, -1.0, -1.0, 1.0]),
        weights_T=torch.full((4,), 0.25),
    )
    _, metrics = policy_loss(Objective(kl=None), **given)
    assert (metrics["clip_high"].value, metrics["clip_low"].value) == (0.25, 0.25)
    _, metrics = policy_loss(Objective(kl=None, loss=partial(clip_loss, dual_clip=1.5)), **given)
    assert metrics["clip_high"].value == 0.5  # the bad token that became 1.65 times likelier is capped too


def test_beta_zero_needs_no_reference_and_a_missing_one_is_named():
    loss, metrics = policy_loss(Objective(kl=None), **inputs(reference_logprobs_T=None))
    assert "kl" not in metrics
    assert policy_loss(Objective(kl=KL(0.3)), **inputs(reference_logprobs_T=None), beta=0.0)[0].item() == loss.item()
    with pytest.raises(ValueError, match="no reference logprobs"):
        policy_loss(Objective(kl=KL(0.3)), **inputs(reference_logprobs_T=None))


def test_kl_in_the_reward_is_not_in_the_loss_too():
    objective = Objective(kl=KL(0.3, placement="reward"))
    assert policy_loss(objective, **inputs())[0].item() == policy_loss(Objective(kl=None), **inputs())[0].item()
    assert objective.kl_in_reward
    assert not Objective(kl=None).kl_in_reward


def test_on_policy_is_ratio_one_without_old_logprobs():
    given = inputs(old_logprobs_T=None)
    loss, metrics = policy_loss(Objective(kl=None), **given)
    loss.backward()
    assert given["logprobs_T"].grad.tolist() == [-0.25, -0.25, 0.25]
    assert (metrics["ratio"].value, metrics["ratio_deviation_max"].value) == (1, 0)


def test_half_precision_is_computed_in_fp32():
    half = inputs(torch.bfloat16)
    loss, _ = policy_loss(Objective(kl=KL(0.1)), **half)
    loss.backward()
    same = {k: v.float() if v.is_floating_point() else v for k, v in ((k, v.detach()) for k, v in half.items())}
    assert loss.dtype == torch.float32
    assert loss.item() == policy_loss(Objective(kl=KL(0.1)), **same)[0].item()
    assert half["logprobs_T"].grad.dtype == torch.bfloat16


OTHERS = {
    f"{name}, {level}": partial(LOSSES[name], ratio=level)
    for name in ("clip", "cispo", "sapo")
    for level in ("sequence", "whole_sequence")
} | {"dppo, KL": partial(LOSSES["dppo"], divergence="kl")}


@pytest.mark.parametrize("name", [*LOSSES, *OTHERS])
@pytest.mark.parametrize("moved", [(0.0, -300.0), (0.0, 300.0), (-0.2,) * 600, (0.2,) * 600], ids=["-300", "300", "-120", "120"])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_a_policy_that_ran_away_gives_finite_numbers(name: str, moved: tuple[float, ...], advantage: float):
    """By one token, and by 0.2 nats in each of many."""
    moved_T, count = torch.tensor([*moved, 0.0]), len(moved)
    lp, other = (-1 + moved_T.clamp(max=0)).requires_grad_(), -1 - moved_T.clamp(min=0)
    given = inputs(
        torch.float32, logprobs_T=lp, old_logprobs_T=other, reference_logprobs_T=-2 - other,
        sequence_T=torch.tensor([0] * count + [1]), weights_T=torch.full_like(other, 1 / (count + 1)),
        advantages_N=torch.tensor([advantage, -0.5]),
    )  # fmt: skip
    loss, metrics = policy_loss(Objective(loss={**LOSSES, **OTHERS}[name]), **given)
    loss.backward()
    assert torch.isfinite(lp.grad).all()
    assert all(math.isfinite(m.value) for m in metrics.values())


def test_nothing_but_the_policy_gets_a_gradient():
    given = inputs()
    for name in ("old_logprobs_T", "reference_logprobs_T", "advantages_N", "weights_T"):
        given[name].requires_grad_()
    policy_loss(Objective(), **given)[0].backward()
    assert all(given[n].grad is None for n in ("old_logprobs_T", "reference_logprobs_T", "advantages_N", "weights_T"))


@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
def test_a_masked_token_of_a_sequence_ratio_still_moves_the_ratio(surrogate):
    """One ratio for five tokens of which the mask keeps two: the loss is 2/5 s A, and s is moved by every token, 1/5 s each. CISPO's
    weight carries no gradient, so there a token that is masked has none."""
    objective = Objective(loss=partial(LOSSES[surrogate], ratio="whole_sequence", epsilon=0.2), kl=None)
    old = torch.linspace(-2, -1, 5, dtype=torch.float64)
    logprobs = old.clone().requires_grad_()
    loss, _ = policy_loss(
        objective, logprobs_T=logprobs, old_logprobs_T=old, sequence_T=torch.zeros(5, dtype=torch.long),
        weights_T=torch.full((5,), 0.2, dtype=torch.float64), advantages_N=torch.ones(1, dtype=torch.float64),
        factor_T=torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0]),
    )  # fmt: skip
    loss.backward()
    expected = [-0.08] * 5 if surrogate == "clip" else [-0.2, 0.0, 0.0, -0.2, 0.0]
    assert logprobs.grad.tolist() == pytest.approx(expected, abs=1e-12)
