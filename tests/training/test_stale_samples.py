"""Learning from samples of older weights: the gradient against a slow loop over single tokens, and why the correction is right."""

import copy
import itertools
import math

import pytest
import torch
from slow_grpo import (
    config_of,
    distance,
    learner_of,
    make_groups,
    present_model,
    slow_advantages,
    slow_gradient,
    slow_logprobs,
    watch_gradients,
)

from groupwise.algorithm import sampler_correction
from groupwise.config.combinations import notes

REWARDS = [[2.8, 0.2, 1.7, 0.0], [0.0, 0.4, 0.0, 2.0]]
CAP, EPSILON = 1.05, 0.02  # so narrow that both act


@pytest.fixture
def policy(tiny_llama):
    return tiny_llama(seed=3)


@pytest.fixture
def older(policy):
    """The weights that sampled: the policy's, moved a little."""
    model = copy.deepcopy(policy)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    return model.double()


def slow_stale_loss(model, before, groups, kind):
    """-(1/N) sum_i (1/|o_i|) sum_t w_it min(ratio A, clip(ratio) A).

    ``decoupled``: w is pi_before / pi_sampler cut at the cap, the ratio is pi / pi_before (arXiv 2110.00641, eq. 7; 2505.24298, eq. 5).
    ``behaviour``: w is 1, the ratio is pi / pi_sampler. ``uncorrected``: w is 1, the ratio is pi / pi_before.
    """
    total, cut, clipped = 0.0, 0, 0
    for group in groups:
        for completion, advantage in zip(group.completions, slow_advantages(group.rewards), strict=True):
            ids = group.prompt.token_ids, completion.token_ids
            new = slow_logprobs(model, *ids)
            with torch.no_grad():
                old = slow_logprobs(before, *ids)
            for t, sampled in enumerate(completion.logprobs):
                weight = math.exp(float(old[t]) - sampled) if kind == "decoupled" else 1.0
                cut += weight > CAP
                ratio = torch.exp(new[t] - (sampled if kind == "behaviour" else old[t]))
                bound = torch.clamp(ratio, 1 - EPSILON, 1 + EPSILON) * advantage
                clipped += int(bound < ratio * advantage)
                total = total - min(weight, CAP) * torch.min(ratio * advantage, bound) / len(new)
    return total / sum(len(group.completions) for group in groups), cut, clipped


def config_for(kind, **algorithm):
    settings = {"stale_samples": kind, "loss": {"epsilon": EPSILON}, **algorithm}
    if kind == "decoupled":
        settings["correction"] = {"cap": CAP}
    return config_of(rollout={"ahead": 1}, algorithm=settings, optimizer={"learning_rate": 1e-2})


@pytest.mark.parametrize("kind", ["decoupled", "behaviour", "uncorrected"])
def test_the_gradients_of_both_updates_are_the_slow_loop_s(policy, older, kind):
    groups = make_groups(older, REWARDS)
    learner, before = learner_of(policy, config_for(kind, updates_per_batch=2))
    seen, models = watch_gradients(learner), [before]
    step = learner.optimizer.step
    learner.optimizer.step = lambda rate: (step(rate), models.append(present_model(learner, before)))[0]
    _, metrics = learner.learn(groups)
    cuts = []
    for found, model in zip(seen, models[:2], strict=True):
        model = copy.deepcopy(model)
        loss, cut, clipped = slow_stale_loss(model, before, groups, kind)
        assert distance(found, slow_gradient(loss, model)) < 1e-4
        cuts.append((cut, clipped))
    tokens = sum(len(c.token_ids) for g in groups for c in g.completions)
    assert metrics["policy/clip_share"].value == pytest.approx((cuts[0][1] + cuts[1][1]) / (2 * tokens))
    assert cuts[1][1] > 0
    assert (cuts[0][1] > 0) is (kind == "behaviour")
    if kind == "decoupled":
        assert 0 < cuts[0][0] < tokens
        assert metrics["policy/correction_cut"].value == pytest.approx(cuts[0][0] / tokens)
    else:
        assert "policy/correction" not in metrics


def test_fresh_samples_need_no_correction(policy):
    """Whatever corrects, samples of the very weights that are trained give the gradient without it."""
    gradients = []
    for kind in ("uncorrected", "decoupled", "behaviour"):
        learner, before = learner_of(copy.deepcopy(policy), config_for(kind))
        seen = watch_gradients(learner)
        learner.learn(make_groups(before, REWARDS))
        gradients += seen
    assert distance(gradients[1], gradients[0]) < 1e-5
    assert distance(gradients[2], gradients[0]) < 1e-5


@pytest.mark.parametrize("loss", ["vespo", "topr", "dppo", "cispo"])
def test_a_ratio_that_says_nothing_of_age_is_told(loss):
    """With one update the ratio to the weights before it is 1, however old the samples are."""

    def said(ahead, **algorithm):
        return [note for note in notes(config_of(rollout={"ahead": ahead}, algorithm=algorithm)) if f"loss.type={loss}" in note]

    (note,) = said(2, loss={"type": loss})
    assert "algorithm.stale_samples=behaviour" in note
    assert not said(0, loss={"type": loss})
    assert not said(2, loss={"type": loss}, stale_samples="behaviour")
    assert not said(2, loss={"type": loss}, updates_per_batch=2)


def test_a_clip_that_never_acts_on_stale_samples_is_told_with_its_remedy():
    (note,) = [n for n in notes(config_of(rollout={"ahead": 1}, algorithm={"loss": {"epsilon": 0.1}})) if "epsilon" in n]
    assert "algorithm.stale_samples=behaviour" in note
    assert "the very weights" not in note


def test_the_expectation_over_stale_samples_is_that_over_fresh_ones():
    """All pairs of tokens from four, weighted by how often older weights sample them: exact without a cap, in closed form."""
    generator = torch.Generator().manual_seed(0)
    logits, stale = (torch.randn(4, generator=generator, dtype=torch.float64) for _ in range(2))
    reward = torch.tensor([0.0, 1.0, 3.0, -2.0], dtype=torch.float64)
    now, then = torch.log_softmax(logits, 0), torch.log_softmax(stale, 0)
    score_of = torch.eye(4, dtype=torch.float64) - now.exp()  # row a: gradient of log pi(a)
    fresh, corrected, biased = (torch.zeros(4, dtype=torch.float64) for _ in range(3))
    for a, b in itertools.product(range(4), repeat=2):  # two completions of one token; each is compared with the other
        tokens = torch.tensor([a, b])
        advantage = torch.stack([reward[a] - reward[b], reward[b] - reward[a]])
        factor, _ = sampler_correction(now[tokens], then[tokens], torch.arange(2), 2, high=None)
        terms = (advantage[:, None] * score_of[tokens]).sum(0)
        # the other completion is a baseline, which needs no weight: only a completion's own token does
        fresh += (now[a] + now[b]).exp() * terms
        biased += (then[a] + then[b]).exp() * terms
        corrected += (then[a] + then[b]).exp() * ((factor * advantage)[:, None] * score_of[tokens]).sum(0)
    assert corrected == pytest.approx(fresh, abs=1e-12)
    assert distance({"": biased}, {"": fresh}) > 0.1


def test_what_has_an_effect_is_not_said_to_have_none():
    assert not any("epsilon" in n for n in notes(config_for("behaviour")) if "clipped" in n)
