"""Each preset against the slow loop written from its paper, forward and gradient, and what must not change either."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from nested import inputs_of, nest
from slow_objectives import DRIFT, SLOW, VARIANTS, Batch, gradient, random_batch, slow_loss

from groupwise.algorithm import KL, BatchCounts, FunctionScores, Objective, kl_in_reward, kl_penalty, policy_loss
from groupwise.algorithm.losses import reinforce_loss
from groupwise.config.presets import PRESETS
from groupwise.config.schema import AlgorithmConfig
from groupwise.metrics import Metric, merge

SEEDS = range(4)
WITHOUT_CLIP = ("rloo", "sapo", "vespo")


def flat(ragged: list[list[np.ndarray]], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(np.concatenate([x for group in ragged for x in group]), dtype=dtype)


def completions_of(b: Batch) -> list[tuple[int, int]]:
    return [(g, i) for g, group in enumerate(b.lp) for i in range(len(group))]


def advantages_per_token(objective: Objective, b: Batch) -> list[list[np.ndarray]]:
    """As a trainer does it, on whole groups: KL into the rewards where the method says so, then advantages."""
    rewards, lengths = [list(r) for r in b.rewards], [[len(x) for x in group] for group in b.lp]
    kl, penalties = objective.kl, None
    if objective.kl_in_token_reward:
        taken = kl_penalty(flat(b.old), flat(b.ref), beta=objective.beta, estimator=kl.estimator)
        penalties = nest(taken, lengths)
    if objective.kl_in_reward:
        order = completions_of(b)
        sequence_T = torch.tensor([n for n, (g, i) in enumerate(order) for _ in b.lp[g][i]])
        penalty_N = kl_in_reward(flat(b.old), flat(b.ref), sequence_T, len(order), beta=objective.beta, estimator=kl.estimator)
        for (g, i), penalty in zip(order, penalty_N.tolist(), strict=True):
            rewards[g][i] -= penalty
    functions = {
        name: FunctionScores(weight, torch.tensor([x for group in scores for x in group], dtype=torch.float64))
        for name, weight, scores in (("first", 1.0, b.rewards), ("second", 0.5, b.second))
    }
    values = [[v.tolist() for v in group] for group in b.values]
    inputs = inputs_of(rewards, lengths, penalties=penalties, values=values, functions=functions)
    found = nest(objective.advantages(inputs).per_token(inputs), lengths)
    return [[np.array(x) for x in group] for group in found]


def fast(
    objective: Objective, b: Batch, parts: list[list[tuple[int, int]]], dtype: torch.dtype = torch.float64, per_token: bool = True
) -> tuple[float, dict[tuple[int, int], np.ndarray], dict[str, Metric]]:
    """Loss, gradient by completion and metrics, with the batch cut into ``parts`` (lists of completions)."""
    advantages = advantages_per_token(objective, b)
    order = completions_of(b)
    counts = BatchCounts(len(order), sum(len(b.lp[g][i]) for g, i in order), b.max_tokens)
    loss, grads, metrics = 0.0, {}, []
    for part in parts:
        take = lambda ragged, part=part: torch.tensor(np.concatenate([ragged[g][i] for g, i in part]), dtype=dtype)  # noqa: E731
        lengths_N = torch.tensor([len(b.lp[g][i]) for g, i in part])
        sequence_T = torch.repeat_interleave(torch.arange(len(part)), lengths_N)
        advantages_T = take(advantages)
        given = {"advantages_T": advantages_T}
        if not per_token:
            given = {"advantages_N": advantages_T[lengths_N.cumsum(0) - 1]}
        logprobs_T = take(b.lp).requires_grad_()
        part_loss, part_metrics = policy_loss(
            objective,
            logprobs_T=logprobs_T,
            old_logprobs_T=take(b.old),
            reference_logprobs_T=take(b.ref) if objective.needs_reference else None,
            sequence_T=sequence_T,
            weights_T=objective.weights(lengths_N, sequence_T, counts, dtype),
            **given,
        )
        part_loss.backward()
        loss += part_loss.item()
        grads |= dict(zip(part, (x.numpy() for x in logprobs_T.grad.split(lengths_N.tolist())), strict=True))
        metrics.append(part_metrics)
    return loss, grads, merge(metrics)


def objective_of(name: str) -> Objective:
    settings = {"preset": name} if name in SLOW else VARIANTS[name][0]
    return Objective.from_config(AlgorithmConfig(**settings))


def test_every_preset_has_a_slow_reference():
    assert set(SLOW) == set(PRESETS)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [*SLOW, *VARIANTS])
def test_loss_and_gradient_are_the_papers(name: str, seed: int):
    b = random_batch(seed, DRIFT.get(name, 0.3))
    loss, grads, metrics = fast(objective_of(name), b, [completions_of(b)])
    assert loss == pytest.approx(slow_loss(name)(b, b.lp, b.lp), rel=1e-12, abs=1e-14)
    slow = gradient(name, b)
    for (g, i), grad in grads.items():
        np.testing.assert_allclose(grad, slow[g][i], rtol=1e-5, atol=1e-8)
    assert any(np.abs(grad).max() > 1e-4 for grad in grads.values())
    if seed == 0 and name not in WITHOUT_CLIP:  # the batches reach the clip range: otherwise the test above would prove little
        assert 0 < metrics["clip_low"].total + metrics["clip_high"].total < metrics["ratio"].count


def test_a_completion_that_the_policy_has_left_teaches_nothing_bad():
    """DeepSeek-V3.2's mask: only negative advantages, only beyond the limit, whole completions, and not their KL."""
    logprobs = torch.tensor([-1.0, -3.0, -1.0, -3.0, -0.5, -0.5], dtype=torch.float64, requires_grad=True)
    given = {
        "old_logprobs_T": torch.full((6,), -1.0, dtype=torch.float64), "reference_logprobs_T": torch.full((6,), -1.0, dtype=torch.float64),
        "sequence_T": torch.tensor([0, 0, 1, 1, 2, 2]), "weights_T": torch.full((6,), 1 / 6, dtype=torch.float64),
        "advantages_N": torch.tensor([1.0, -1.0, -1.0], dtype=torch.float64),
    }  # fmt: skip
    gradients = []
    for beta, limit in ((0.0, 0.9), (0.0, 1.1), (0.1, 0.9)):
        objective = Objective(loss=reinforce_loss, kl=KL(beta) if beta else None, off_policy_limit=limit)
        loss, _ = policy_loss(objective, logprobs_T=logprobs, **given)
        gradients.append(torch.autograd.grad(loss, logprobs)[0] * 6)
    assert gradients[0].tolist() == pytest.approx([-1, -1, 0, 0, 1, 1])
    assert gradients[1].tolist() == pytest.approx([-1, -1, 1, 1, 1, 1])
    assert gradients[2][3] != 0, "the KL still pulls"


@pytest.mark.parametrize("name", [*SLOW, *VARIANTS])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_cutting_and_reordering_the_batch_changes_nothing(name: str, dtype: torch.dtype, tolerance: float):
    b = random_batch(7, DRIFT.get(name, 0.3), groups=5)
    order = completions_of(b)
    whole, grads, metrics = fast(objective_of(name), b, [order], dtype)
    shuffled = [order[k] for k in np.random.default_rng(1).permutation(len(order))]
    for parts in ([shuffled], [[c] for c in order], [shuffled[:3], shuffled[3:4], shuffled[4:]]):
        loss, again, again_metrics = fast(objective_of(name), b, parts, dtype)
        size = sum(np.abs(g).sum() for g in grads.values())  # the scale that the sum's rounding refers to
        assert abs(loss - whole) <= tolerance * max(abs(whole), size)
        for key in grads:
            np.testing.assert_allclose(again[key], grads[key], rtol=tolerance, atol=tolerance * np.abs(grads[key]).max())
        for metric in metrics:
            assert again_metrics[metric].value == pytest.approx(metrics[metric].value, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "dapo"])
def test_one_advantage_per_completion_equals_the_same_for_each_token(name: str):
    b = random_batch(3, DRIFT.get(name, 0.3))
    parts = [completions_of(b)]
    loss, grads, _ = fast(objective_of(name), b, parts)
    again, again_grads, _ = fast(objective_of(name), b, parts, per_token=False)
    assert loss == again
    assert all((grads[key] == again_grads[key]).all() for key in grads)


@pytest.mark.parametrize("name", [n for n in SLOW if n != "rloo"])
def test_at_ratio_one_the_gradient_is_reinforces(name: str):
    """pi = pi_old: d(-sum w A r)/d log pi = -w A, whatever the clip; with the KL weight at 0."""
    b = random_batch(5, 0.0)
    config, unclipped = (AlgorithmConfig(preset=name, kl=None, **more) for more in ({}, {"loss": {"type": "reinforce"}}))
    clipped, plain = Objective.from_config(config), Objective.from_config(unclipped)
    parts = [completions_of(b)]
    _, grads, _ = fast(clipped, b, parts)
    _, reinforce, _ = fast(plain, b, parts)
    for key in grads:
        np.testing.assert_allclose(grads[key], reinforce[key], rtol=1e-12, atol=1e-15)
