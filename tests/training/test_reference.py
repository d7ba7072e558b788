"""The leash: a reference that stays put, is renewed when it should be, and a KL that acts where the config places it."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from slow_grpo import config_of, distance, learner_of, make_groups, present_model, slow_gradient, slow_logprobs, watch_gradients

from groupwise.algorithm import AdvantageOutputs, needs
from groupwise.errors import RewardError
from groupwise.models.merging import round_dithered_
from groupwise.training.reference import Reference
from groupwise.training.run import Run

REWARDS = [[2.0, 0.0, 1.0], [0.5, 0.5, 0.5], [0.0, 1.0, 0.0]]


def weights_of(scorer):
    return {name: p.detach().clone() for name, p in scorer.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_beta_0_copies_nothing(tiny_llama, monkeypatch):
    monkeypatch.setattr("groupwise.training.reference.make_reference", lambda scorer: pytest.fail("a reference was made"))
    learner, before = learner_of(tiny_llama(), config_of(algorithm={"kl": None}))
    assert learner.reference is None
    learner.renew_reference()
    _, metrics = learner.learn(make_groups(before, REWARDS))
    assert "policy/kl" not in metrics
    assert "time/reference_s" not in metrics


def test_the_reference_stays_while_the_policy_moves_and_is_renewed_exactly(tiny_qwen2):
    learner, before = learner_of(tiny_qwen2(), config_of(algorithm={"kl": {"beta": 0.1}}, optimizer={"learning_rate": 1e-3}))
    groups = make_groups(before, REWARDS)
    start = weights_of(learner.scorer)
    assert same(weights_of(learner.reference), start)
    assert not any(p.requires_grad for _, p in learner.reference.named_parameters())
    first = learner.learn(groups)[1]["policy/kl"].value
    second = learner.learn(groups)[1]["policy/kl"].value
    assert first == 0
    assert second > 1e-4
    assert same(weights_of(learner.reference), start)
    assert not same(weights_of(learner.scorer), start)
    learner.renew_reference()
    moved = weights_of(learner.scorer)
    assert same(weights_of(learner.reference), moved)
    assert learner.learn(groups)[1]["policy/kl"].value == 0
    assert same(weights_of(learner.reference), moved), "the copy shares no memory with the policy"


def test_the_kl_metric_is_the_mean_of_k3_over_tokens(tiny_llama):
    settings = {"kl": {"beta": 0.1, "skip_zero_variance": False}}
    learner, before = learner_of(tiny_llama(), config_of(algorithm=settings, optimizer={"learning_rate": 3e-3}))
    groups = make_groups(before, REWARDS)
    learner.learn(groups)
    moved = present_model(learner, before)
    found = learner.learn(groups)[1]["policy/kl"].value
    with torch.no_grad():
        pairs = [(g.prompt.token_ids, c.token_ids) for g in groups for c in g.completions]
        d = torch.cat([slow_logprobs(before, *ids) - slow_logprobs(moved, *ids) for ids in pairs])
    assert found == pytest.approx(float((d.exp() - d - 1).mean()), rel=1e-4)


@pytest.mark.parametrize(
    ("outer", "steps", "due"),
    [(1, 6, []), (2, 6, [3]), (3, 6, [2, 4]), (6, 6, [1, 2, 3, 4, 5]), (3, 7, [3, 5]), (2, 5, [3]), (4, 100, [25, 50, 75])],
)
def test_the_reference_is_renewed_at_the_start_of_each_outer_iteration(outer, steps, due):
    """Steps from 0; the first iteration begins with the reference that was just made."""
    renewed = []
    config = config_of(algorithm={"kl": {"beta": 0.1, "reference_updates": outer}}, training={"steps": steps})
    learner, writer = SimpleNamespace(renew_reference=renewed.append), SimpleNamespace(finish=lambda *, copies: None)
    run = SimpleNamespace(config=config, learner=learner, writer=writer)
    for step in range(steps):
        Run.renew_reference_if_due(run, step)
    assert renewed == due


def nudge(scorer, size=0.02):
    """Move all weights a little."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, parameter in scorer.named_parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def off_reference(model, algorithm, rewards):
    """A learner whose reference is not its policy, and groups sampled from the policy; the slow policy and reference too."""
    learner, policy = learner_of(model, config_of(algorithm=algorithm, optimizer={"max_grad_norm": None}))
    nudge(learner.reference)
    reference = present_model(SimpleNamespace(scorer=learner.reference), policy)
    return learner, policy, reference, make_groups(policy, rewards)


def slow_k1(policy, reference, groups):
    """log policy - log reference by group and completion, ``[T]`` each."""
    with torch.no_grad():
        return [
            [
                slow_logprobs(policy, g.prompt.token_ids, c.token_ids) - slow_logprobs(reference, g.prompt.token_ids, c.token_ids)
                for c in g.completions
            ]
            for g in groups
        ]


@pytest.mark.parametrize("budget", [8192, 25])
def test_rloo_takes_the_kl_off_the_reward_and_judges_by_the_others(tiny_llama, budget):
    """arXiv 2402.14740: R = r - beta log(policy / reference), less the mean of the others' R; tokens summed, completions averaged."""
    learner, policy, reference, groups = off_reference(tiny_llama(), {"preset": "rloo", "kl": {"beta": 0.3}}, REWARDS)
    learner.config.training.micro_batch_tokens = budget
    seen = watch_gradients(learner)
    advantages, _ = learner.learn(groups)
    kl, expected, loss = slow_k1(policy, reference, groups), [], 0.0
    for group, kls in zip(groups, kl, strict=True):
        returns = [r - 0.3 * float(k.sum()) for r, k in zip(group.rewards, kls, strict=True)]
        expected.append([r - (sum(returns) - r) / 2 for r in returns])
        for completion, advantage in zip(group.completions, expected[-1], strict=True):
            loss = loss - advantage * slow_logprobs(policy, group.prompt.token_ids, completion.token_ids).sum() / 9
    for found, wanted in zip(advantages, expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)
    assert max(map(abs, advantages[1])) > 0.01, "a group of equal rewards is told apart by its KL"
    assert distance(seen[0], slow_gradient(loss, policy)) < 1e-4


@pytest.mark.parametrize("budget", [8192, 25])
def test_reinforce_plus_plus_gives_every_token_the_kl_still_to_come(tiny_llama, budget):
    """arXiv 2501.03262: A_t = r - beta sum_{i >= t} KL_i, normalised over all tokens of the batch, which weigh the same."""
    learner, policy, reference, groups = off_reference(tiny_llama(), {"preset": "reinforce++", "kl": {"beta": 0.3}}, REWARDS)
    learner.config.training.micro_batch_tokens = budget
    seen = watch_gradients(learner)
    advantages, _ = learner.learn(groups)
    kl = slow_k1(policy, reference, groups)
    returns = [
        [r - 0.3 * torch.flip(torch.cumsum(torch.flip(k, [0]), 0), [0]) for r, k in zip(g.rewards, kls, strict=True)]
        for g, kls in zip(groups, kl, strict=True)
    ]
    everything = torch.cat([x for group in returns for x in group])
    mean, std = everything.mean(), everything.std()
    loss = 0.0
    for group, group_returns, found in zip(groups, returns, advantages, strict=True):
        for completion, x, shown in zip(group.completions, group_returns, found, strict=True):
            advantage_T = (x - mean) / (std + 1e-4)
            assert shown == pytest.approx(float(advantage_T.mean()), abs=1e-4)
            logprobs = slow_logprobs(policy, group.prompt.token_ids, completion.token_ids)
            loss = loss - (advantage_T * logprobs).sum() / len(everything)
    assert distance(seen[0], slow_gradient(loss, policy)) < 1e-4


def test_kl_in_the_reward_is_measured_from_the_policy_that_sampled(tiny_llama):
    """The penalty uses the sampling logprobs, so what the sampler recorded shows in the advantages."""
    learner, _, _, groups = off_reference(tiny_llama(), {"preset": "rloo", "kl": {"beta": 1.0}}, [[1.0, 0.0]])
    (group,) = groups
    first, other = group.completions
    raised = replace(first, logprobs=tuple(x + 0.5 / len(first.logprobs) for x in first.logprobs))
    plain, _ = learner.learn([group])
    learner, _, _, _ = off_reference(tiny_llama(), {"preset": "rloo", "kl": {"beta": 1.0}}, [[1.0, 0.0]])
    changed, _ = learner.learn([replace(group, completions=(raised, other))])
    assert changed[0][0] == pytest.approx(plain[0][0] - 0.5, abs=1e-4)


SAMPLERS = {"top_p": {"top_p": 0.9}, "top_k": {"top_k": 5}, "ahead": {"ahead": 1}, "vllm": {"engine": "vllm"}}


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("preset", ["rloo", "reinforce++", "ppo"])
def test_kl_in_the_reward_is_the_policy_s_whatever_the_sampler_says(tiny_llama, preset, sampler):
    """A sampler that cuts its distribution, has other weights or other numbers puts none of that into the KL."""
    found = []
    for rollout, off in (({}, 0.0), (SAMPLERS[sampler], 0.4)):
        config = config_of(algorithm={"preset": preset, "kl": {"beta": 0.3}}, rollout=rollout)
        learner, policy = learner_of(tiny_llama(), config)
        nudge(learner.reference)
        groups = [
            replace(g, completions=tuple(replace(c, logprobs=tuple(x + off for x in c.logprobs)) for c in g.completions))
            for g in make_groups(policy, REWARDS)
        ]
        found.append((learner.learn(groups)[0], learner.critic and learner.critic.weight.detach().clone()))
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert other == pytest.approx(one, abs=1e-4)
    if preset == "ppo":
        torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("preset", ["rloo", "reinforce++"])
def test_nucleus_sampling_from_the_reference_itself_costs_no_kl(tiny_llama, preset):
    """Policy and reference are one, so the KL is 0 however the nucleus renormalised: advantages are those without any KL."""
    advantages = []
    for beta in (0.0, 1.0):
        config = config_of(algorithm={"preset": preset, "kl": {"beta": beta} if beta else None}, rollout={"top_p": 0.9})
        learner, policy = learner_of(tiny_llama(), config)
        groups = []
        for group in make_groups(policy, [[1.0, 0.0, 1.0], [0.0, 0.0, 1.0]]):
            cut = [tuple(min(0.0, x + 0.1 * (1 + t % 3)) for t, x in enumerate(c.logprobs)) for c in group.completions]
            completions = tuple(replace(c, logprobs=x) for c, x in zip(group.completions, cut, strict=True))
            groups.append(replace(group, completions=completions))
        found, _ = learner.learn(groups)
        if (
            preset == "reinforce++"
        ):  # without a KL the batch is normalised over completions, with one over tokens: compare signs' sizes
            found = [[round(a, 6) for a in group] for group in found]
            assert len({a for group in found for a in group}) == 2, "two rewards, two advantages"
        advantages.append(found)
    if preset == "rloo":
        for one, other in zip(*advantages, strict=True):
            assert other == pytest.approx(one, abs=1e-5)


@pytest.mark.parametrize("budget", [8192, 25])
@pytest.mark.parametrize("preset", ["rloo", "reinforce++"])
def test_truncated_completions_pay_their_kl_in_the_baseline(tiny_llama, preset, budget):
    """Left out of the loss, they still count in the mean of their group, or of the batch: with the reward that all others have too."""
    learner, policy, reference, groups = off_reference(
        tiny_llama(),
        {"preset": preset, "kl": {"beta": 0.3}, "mask_truncated": True},
        [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.5]],
    )
    learner.config.training.micro_batch_tokens = budget
    assert {c.stopped for g in groups for c in g.completions} == {True, False}
    seen = watch_gradients(learner)
    advantages, _ = learner.learn(groups)
    kl, loss = slow_k1(policy, reference, groups), 0.0
    if preset == "rloo":
        returns = [
            [r - 0.3 * float(k.sum()) for r, k in zip(g.rewards, kls, strict=True)] for g, kls in zip(groups, kl, strict=True)
        ]
        by_token = [
            [torch.full((len(c.token_ids),), r - (sum(rs) - r) / 3) for c, r in zip(g.completions, rs, strict=True)]
            for g, rs in zip(groups, returns, strict=True)
        ]
        size = sum(len(g.completions) for g in groups)
    else:
        to_go = [
            [r - 0.3 * k.flip(0).cumsum(0).flip(0) for r, k in zip(g.rewards, kls, strict=True)]
            for g, kls in zip(groups, kl, strict=True)
        ]
        everything = torch.cat([x for group in to_go for x in group])
        by_token = [[(x - everything.mean()) / (everything.std() + 1e-4) for x in group] for group in to_go]
        size = sum(len(c.token_ids) for g in groups for c in g.completions if c.stopped)
    for group, shown, wanted in zip(groups, advantages, by_token, strict=True):
        assert shown == pytest.approx([float(x.mean()) for x in wanted], abs=1e-4)
        for c, advantage_T in zip(group.completions, wanted, strict=True):
            if c.stopped:
                loss = loss - (advantage_T * slow_logprobs(policy, group.prompt.token_ids, c.token_ids)).sum() / size
    assert distance(seen[0], slow_gradient(loss, policy)) < 1e-4


def test_an_advantage_of_ones_own_is_given_value_and_kl_of_truncated_completions(tiny_llama, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from groupwise.algorithm import needs\n\n@needs('values')\ndef advantage(inputs):\n    raise AssertionError\n"
    )
    algorithm = {"advantage": {"type": f"{tmp_path / 'mine.py'}:advantage"}, "value": {}, "mask_truncated": True}
    kl = {"beta": 0.3, "placement": "reward"}
    learner, _, _, groups = off_reference(tiny_llama(), algorithm | {"kl": kl}, [[1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 1.0, 0.5]])
    completions = [c for group in groups for c in group.completions]
    assert {c.stopped for c in completions} == {True, False}
    seen = []

    @needs("values")
    def surprise(inputs):
        seen.append(inputs)
        rewards_T = inputs.rewards_N[inputs.sequence_T]
        return AdvantageOutputs(advantages_T=rewards_T - inputs.values_T, returns_T=rewards_T)

    learner.objective = replace(learner.objective, advantage=surprise)
    with torch.no_grad():
        learner.critic.weight.fill_(0.1)
    _, metrics = learner.learn(groups)
    (inputs,) = seen
    assert (inputs.values_T != 0).all()
    assert (inputs.rewards_N != torch.tensor([r for group in groups for r in group.rewards]).double()).all()
    assert inputs.taking_part_N.tolist() == [c.stopped for c in completions]
    assert metrics["speed/learnt_tokens"].value == sum(len(c.token_ids) for c in completions if c.stopped)


@pytest.mark.parametrize("far", [math.nan, 1e14])
@pytest.mark.parametrize("preset", ["rloo", "ppo"])
def test_a_kl_that_ran_away_drops_the_update(tiny_llama, preset, far):
    """It is no fault of the reward function. A reward that is not finite is."""
    config = config_of(algorithm={"preset": preset, "kl": {"beta": 0.3, "placement": "reward"}})
    learner, policy = learner_of(tiny_llama(), config)
    groups, score = make_groups(policy, REWARDS), learner._score_by_reference

    def score_far(window):
        metrics = score(window)
        window.batch.reference_logprobs_T[0] = far
        return metrics

    learner._score_by_reference = score_far
    start = weights_of(learner.scorer)
    _, metrics = learner.learn(groups)
    assert metrics["optimizer/dropped_updates"].value == 1
    assert learner.updates == 0
    assert same(weights_of(learner.scorer), start)
    with pytest.raises(RewardError, match="group 0 has a reward of nan"):
        learner.learn([replace(groups[0], rewards=(1.0, math.nan, 0.0)), *groups[1:]])


def test_an_average_takes_in_the_weights_that_compute_and_not_their_masters():
    """FSDP2 keeps rows as fp32 masters, and rounds them where it gathers them: its reference is that of whole weights."""
    generator = torch.Generator().manual_seed(3)
    masters, weights = torch.randn(6, 8, generator=generator), torch.empty(6, 8, dtype=torch.bfloat16)
    round_dithered_(weights, masters)

    def over(tensor):
        return SimpleNamespace(named_parameters=lambda: [("layer", tensor)])

    whole, divided = (Reference(over(policy), 0.3, copied=lambda _: over(weights.clone())) for policy in (weights, masters))
    for _ in range(2):
        masters += 0.01 * torch.randn(6, 8, generator=generator)
        round_dithered_(weights, masters)
        whole.renew()
        divided.renew()
    assert same(divided.state(), whole.state())
    assert same(weights_of(divided.scorer), weights_of(whole.scorer))


@pytest.mark.parametrize("family", ["tiny_qwen2", "module"])
@pytest.mark.parametrize("mixing", [1.0, 0.3])
def test_a_parked_reference_says_the_same_and_is_renewed_where_it_lies(request, tiny_llama, family, mixing):
    """Here the machine's memory is the device's too, so what is held is the swapping of weights, not the transfer."""
    model = tiny_llama(seed=3, mlp_bias=True) if family == "module" else request.getfixturevalue(family)(seed=3)
    learner, _ = learner_of(model, config_of(algorithm={"kl": {"beta": 0.1}}))
    plain, parked = Reference(learner.scorer, mixing), Reference(learner.scorer, mixing, offload=True)
    own = {id(p) for _, p in parked.scorer.named_parameters()}
    assert all(p.numel() == 0 for p in parked.scorer.module.parameters() if id(p) not in own), "no view holds on to the device"
    batch = learner.scorer.prepare([([5, 6, 7], [[8, 9], [10]])])
    for _ in range(2):
        lying = {name: p.data_ptr() for name, p in parked.scorer.named_parameters()}
        with torch.no_grad(), plain.present() as one, parked.present() as other:
            assert all(p.data_ptr() != lying[name] for name, p in parked.scorer.named_parameters())
            assert torch.equal(one.logprobs(batch), other.logprobs(batch))
        assert all(p.data_ptr() == lying[name] for name, p in parked.scorer.named_parameters())
        with torch.no_grad():
            for _, parameter in learner.scorer.named_parameters():
                parameter.add_(0.1)
        plain.renew()
        parked.renew()
    assert all(torch.equal(a, parked.state()[name]) for name, a in plain.state().items())
