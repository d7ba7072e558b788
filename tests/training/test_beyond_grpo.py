"""What stands around the objective: a learned value, masks of tokens and completions, entropy, the sampler's correction, a KL that is
steered, a reference that moves. Each against a slow loop in float64, and each the same however the batch is cut."""

import copy
import math
from dataclasses import replace
from types import SimpleNamespace

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
)  # fmt: skip

from groupwise.algorithm import Objective
from groupwise.batch import Batch, everyone
from groupwise.config.schema import Config
from groupwise.distributed import World
from groupwise.errors import ConfigError
from groupwise.models.merging import round_dithered_
from groupwise.training.advantages import StepAdvantages
from groupwise.training.critic import Critic
from groupwise.training.entropy import EntropyTerms

REWARDS = [[2.8, 0.2, 1.7, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.4, 0.0, 2.0]]
EVERYTHING = {
    "mask_truncated": {"mask_truncated": True, "loss": {"aggregation": "token_mean"}},
    "entropy": {"entropy": {"bonus": 0.1}},
    "top_entropy": {"entropy": {"top_share": 0.3}},
    "correction": {"correction": {"level": "token", "cap": 1.05}},
    "correction_of_completions": {"correction": {"level": "sequence", "mode": "mask", "cap": 1.2}},
    "value": {"preset": "ppo", "value": {"trains_trunk": True}},
    "value_masked": {"preset": "ppo", "mask_truncated": True},
    "steered": {"kl": {"beta": 0.2, "target": 0.05, "skip_zero_variance": False}},
}


def slow_logits(model, prompt_ids, completion_ids, temperature=1.0):
    """``[T, V]`` log-probabilities of all tokens, for one completion."""
    ids = torch.tensor([[*prompt_ids, *completion_ids]])
    return torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1] / temperature, -1)


def each(groups):
    """Every completion with its group's prompt and its own advantage."""
    for group in groups:
        for completion, advantage in zip(group.completions, slow_advantages(group.rewards), strict=True):
            yield group.prompt.token_ids, completion, advantage


def one_gradient(model, groups, config, **changes):
    learner, _ = learner_of(copy.deepcopy(model), config)
    for name, value in changes.items():
        setattr(learner, name, value)
    seen = watch_gradients(learner)
    _, metrics = learner.learn(groups)
    return seen[0], metrics


def perturbed(groups, size=0.2):
    """As if another engine had sampled: its log-probabilities are off."""
    generator = torch.Generator().manual_seed(8)
    out = []
    for group in groups:
        completions = []
        for c in group.completions:
            noise = size * torch.randn(len(c.logprobs), generator=generator)
            completions.append(
                replace(c, logprobs=tuple(min(-1e-4, x + n) for x, n in zip(c.logprobs, noise.tolist(), strict=True)))
            )
        out.append(replace(group, completions=tuple(completions)))
    return out


@pytest.mark.parametrize("name", EVERYTHING)
def test_how_the_batch_is_cut_changes_nothing(name, tiny_llama):
    model = tiny_llama(seed=3)
    groups = perturbed(make_groups(copy.deepcopy(model).double(), REWARDS))
    found = [
        one_gradient(model, groups, config_of(algorithm=dict(EVERYTHING[name]), training={"micro_batch_tokens": budget}))
        for budget in (10_000, 40, 1)
    ]
    for gradient, metrics in found[1:]:
        assert distance(gradient, found[0][0]) < 1e-5
        assert metrics["policy/loss"].value == pytest.approx(found[0][1]["policy/loss"].value, abs=1e-5)
        for metric in ("value/loss", "policy/full_entropy", "policy/tokens_kept", "policy/correction", "policy/correction_cut"):
            if metric in metrics:
                assert metrics[metric].value == pytest.approx(found[0][1][metric].value, rel=1e-4), metric


@pytest.mark.parametrize(
    "name", sorted(EVERYTHING.keys() - {"steered"})
)  # which only acts on later batches, as a test below shows
def test_each_of_them_changes_the_gradient(name, tiny_llama):
    """Or a test of invariance would pass for a setting that does nothing."""
    model = tiny_llama(seed=3)
    groups = perturbed(make_groups(copy.deepcopy(model).double(), REWARDS))
    plain = {key: EVERYTHING[name][key] for key in ("preset", "kl", "loss") if key in EVERYTHING[name]}
    if name.startswith("value"):
        plain = {"preset": "reinforce++"}
    with_it, _ = one_gradient(model, groups, config_of(algorithm=dict(EVERYTHING[name])))
    without, _ = one_gradient(model, groups, config_of(algorithm=plain))
    assert distance(with_it, without) > 1e-3


def test_truncated_completions_leave_the_loss_and_its_count_of_tokens(tiny_llama):
    model = tiny_llama(seed=3)
    groups = make_groups(copy.deepcopy(model).double(), REWARDS)
    assert {c.stopped for g in groups for c in g.completions} == {True, False}
    gradient, _ = one_gradient(
        model, groups, config_of(algorithm={"mask_truncated": True, "loss": {"aggregation": "token_mean"}})
    )
    before, loss = copy.deepcopy(model).double(), 0.0
    tokens = sum(len(c.token_ids) for _, c, _ in each(groups) if c.stopped)
    for prompt, completion, advantage in each(groups):  # advantages are the whole group's
        if completion.stopped:
            loss = loss - advantage * slow_logprobs(before, prompt, completion.token_ids).sum() / tokens
    assert distance(gradient, slow_gradient(loss, before)) < 1e-5


def test_a_batch_that_was_cut_off_whole_teaches_nothing(tiny_llama):
    learner, before = learner_of(tiny_llama(), config_of(algorithm={"mask_truncated": True}))
    groups = [
        replace(g, completions=tuple(replace(c, finish_reason="length") for c in g.completions))
        for g in make_groups(before, REWARDS)
    ]
    assert learner.learn(groups)[1] == {}
    assert learner.updates == 0


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_entropy_bonus_is_the_slow_loop_s(temperature, tiny_qwen2):
    """Of all completions: a group that scored the same throughout is where exploration is to be kept alive."""
    model = tiny_qwen2(seed=3)
    before = copy.deepcopy(model).double()
    groups = make_groups(before, REWARDS, temperature=temperature)
    config = config_of(algorithm={"entropy": {"bonus": 0.3}}, rollout={"temperature": temperature})
    gradient, metrics = one_gradient(model, groups, config)
    loss, entropies = 0.0, []
    for prompt, completion, advantage in each(groups):
        scores = slow_logits(before, prompt, completion.token_ids, temperature)
        chosen = scores[torch.arange(len(scores)), torch.tensor(completion.token_ids)]
        entropy = -(scores.exp() * scores).sum(-1)
        loss = loss - (advantage * chosen + 0.3 * entropy).mean() / 12
        entropies += entropy.tolist()
    assert distance(gradient, slow_gradient(loss, before)) < 1e-5
    assert metrics["policy/full_entropy"].value == pytest.approx(sum(entropies) / len(entropies), abs=1e-5)


def test_the_entropy_bonus_acts_where_no_group_varies(tiny_llama):
    learner, _ = learner_of(tiny_llama(), config_of(algorithm={"entropy": {"bonus": 0.3}}))
    _, before = learner_of(tiny_llama(), config_of())
    _, metrics = learner.learn(make_groups(before, [[1.0, 1.0], [0.0, 0.0]]))
    assert metrics["optimizer/grad_norm"].value > 0
    assert learner.updates == 1


@pytest.mark.parametrize("sampler", [{"top_p": 0.9}, {"engine": "vllm"}])
def test_the_floor_is_held_against_the_policy_s_entropy_whatever_the_sampler_says(sampler, tiny_llama):
    """What a nucleus leaves out looks like entropy that was lost; policy/entropy is the number that the floor is set by."""
    model = tiny_llama(seed=3)
    groups = make_groups(copy.deepcopy(model).double(), REWARDS)
    _, metrics = one_gradient(model, groups, config_of(algorithm={"kl": {"skip_zero_variance": False, "beta": 0.1}}))
    shown = metrics["policy/entropy"].value
    sampled = [
        replace(g, completions=tuple(replace(c, logprobs=tuple(x / 2 for x in c.logprobs)) for c in g.completions))
        for g in groups
    ]
    for floor, acts in ((shown + 0.01, True), (shown - 0.01, False)):
        config = config_of(algorithm={"entropy": {"bonus": 0.3, "floor": floor}, "correction": None}, rollout=sampler)
        _, metrics = one_gradient(model, sampled, config)
        assert metrics["policy/entropy_bonus"].value == (0.3 if acts else 0)
        assert metrics["policy/entropy"].value == pytest.approx(shown, abs=1e-5)
        assert ("policy/full_entropy" in metrics) is acts


def test_above_its_floor_there_is_no_entropy_bonus(tiny_llama):
    model = tiny_llama(seed=3)
    groups = make_groups(copy.deepcopy(model).double(), REWARDS)
    shown = [-x for g in groups for c in g.completions for x in c.logprobs]
    shown = sum(shown) / len(shown)
    for floor, acts in ((shown + 0.01, True), (shown - 0.01, False)):
        gradient, metrics = one_gradient(model, groups, config_of(algorithm={"entropy": {"bonus": 0.3, "floor": floor}}))
        reference, _ = one_gradient(model, groups, config_of(algorithm={"entropy": {"bonus": 0.3}} if acts else {}))
        assert distance(gradient, reference) == 0
        assert metrics["policy/entropy_bonus"].value == (0.3 if acts else 0)
        assert ("policy/full_entropy" in metrics) is acts


@pytest.mark.parametrize("sampler", [{}, {"top_k": 1000}], ids=["exact", "as if other"])
def test_what_a_cut_completion_shows_of_entropy_counts_only_where_it_is_learnt(sampler, tiny_llama):
    """Whether the samples' log-probabilities say it, or a pass: 1,000 of 128 tokens leave nothing out."""
    model = tiny_llama(seed=3)
    groups = make_groups(copy.deepcopy(model).double(), REWARDS)
    whole = [c for g in groups for c in g.completions]
    stopped = [c for c in whole if c.stopped]
    mean = [-sum(x for c in cs for x in c.logprobs) / sum(len(c.logprobs) for c in cs) for cs in (whole, stopped)]
    assert abs(mean[0] - mean[1]) > 1e-3
    floor = sum(mean) / 2
    for masked, shown in ((False, mean[0]), (True, mean[1])):
        config = config_of(algorithm={"entropy": {"bonus": 0.01, "floor": floor}, "mask_truncated": masked}, rollout=sampler)
        _, metrics = one_gradient(model, groups, config)
        assert metrics["policy/entropy_bonus"].value == (0.01 if shown < floor else 0)


def test_tokens_of_one_entropy_are_kept_or_left_out_together_however_a_pass_rounds_it():
    config = config_of(algorithm={"entropy": {"top_share": 0.5}})
    masks = []
    for rounding in (0.0, 1e-7, -1e-7):
        entropies = torch.tensor([1.0, 1.0 + rounding, 1.0, 1.0 - rounding, 0.2, 0.3])
        batch = SimpleNamespace(
            weights_T=torch.ones(6), entropy_T=entropies, learnt=6, tokens=lambda rows: slice(0, 6), mask_T=None
        )
        metrics = EntropyTerms(config, World()).choose_tokens(batch)
        masks.append((batch.mask_T.tolist(), metrics["policy/tokens_kept"].value))
    assert masks == [([1, 1, 1, 1, 0, 0], 4 / 6)] * 3


def test_only_the_tokens_of_most_entropy_are_learnt(tiny_llama):
    """A share of the whole batch's tokens, those of groups without variance among them."""
    model = tiny_llama(seed=3)
    before = copy.deepcopy(model).double()
    groups = make_groups(before, REWARDS)
    gradient, metrics = one_gradient(model, groups, config_of(algorithm={"entropy": {"top_share": 0.4}}))
    rows = [slow_logits(before, prompt, c.token_ids) for prompt, c, _ in each(groups)]
    entropies = [-(scores.exp() * scores).sum(-1).detach() for scores in rows]
    flat = torch.cat(entropies).sort(descending=True).values
    kept = math.ceil(0.4 * len(flat))
    loss = 0.0
    for scores, entropy, (_, completion, advantage) in zip(rows, entropies, each(groups), strict=True):
        chosen = scores[torch.arange(len(scores)), torch.tensor(completion.token_ids)]
        loss = loss - advantage * (chosen * (entropy >= flat[kept - 1])).mean() / 12
    assert distance(gradient, slow_gradient(loss, before)) < 1e-5
    assert metrics["policy/tokens_kept"].value == kept / len(flat)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_correction_for_the_sampler_is_the_slow_loop_s(level, mode, tiny_llama):
    model = tiny_llama(seed=3)
    before = copy.deepcopy(model).double()
    groups = perturbed(make_groups(before, [REWARDS[0], REWARDS[2]]))
    settings = {"correction": {"level": level, "mode": mode, "cap": 1.1}}
    gradient, metrics = one_gradient(model, groups, config_of(algorithm=settings))
    loss, weights = 0.0, []
    for prompt, completion, advantage in each(groups):
        new = slow_logprobs(before, prompt, completion.token_ids)
        difference = new.detach() - torch.tensor(completion.logprobs, dtype=torch.float64)
        raw = (difference if level == "token" else difference.sum().expand(len(new))).exp()
        weight = raw.clamp(max=1.1) if mode == "truncate" else raw * (raw <= 1.1)
        loss = loss - (advantage * weight * new).mean() / 8
        weights += weight.tolist()
    assert distance(gradient, slow_gradient(loss, before)) < 1e-5
    assert metrics["policy/correction"].value == pytest.approx(sum(weights) / len(weights), abs=1e-5)
    assert metrics["policy/sampler_mismatch"].value > 0.1, "logged whether it is corrected or not"


def test_the_correction_is_that_of_the_first_update_throughout(tiny_llama):
    settings = {"correction": {"level": "token"}, "updates_per_batch": 2, "loss": {"epsilon": 5.0}}
    learner, before = learner_of(
        tiny_llama(), config_of(algorithm=settings, optimizer={"learning_rate": 1e-4, "max_grad_norm": None})
    )
    groups = perturbed(make_groups(before, [REWARDS[0], REWARDS[2]]))
    models, seen, step = [], watch_gradients(learner), learner.optimizer.step

    def watched(rate):
        models.append(present_model(learner, before))
        return step(rate)

    learner.optimizer.step = watched
    learner.learn(groups)
    loss = 0.0
    for prompt, completion, advantage in each(groups):
        old, new = (slow_logprobs(model, prompt, completion.token_ids) for model in (before, models[1]))
        weight = (old.detach() - torch.tensor(completion.logprobs, dtype=torch.float64)).exp().clamp(max=2.0)
        loss = loss - (advantage * weight * (new - old.detach()).exp()).mean() / 8
    assert distance(seen[1], slow_gradient(loss, models[1])) < 1e-5


def test_beta_is_steered_by_the_kl_of_each_batch(tiny_llama):
    settings = {"kl": {"beta": 0.2, "target": 0.05, "gain": 0.5}}
    learner, before = learner_of(tiny_llama(), config_of(algorithm=settings, optimizer={"learning_rate": 3e-3}))
    groups = make_groups(before, REWARDS)
    beta, seen = 0.2, []
    for _ in range(6):
        _, metrics = learner.learn(groups)
        assert metrics["policy/beta"].value == pytest.approx(beta)
        kl = metrics["policy/kl"].value
        seen.append(kl)
        beta *= 1 + 0.5 * max(-0.2, min(0.2, (kl - 0.05) / 0.05))
        assert learner.beta == pytest.approx(beta)
    assert seen[0] < 0.05 < max(seen), "it was to fall first and to rise later"


def test_a_moving_average_of_the_policy_is_kept_in_fp32(tiny_llama):
    settings = {"kl": {"beta": 0.1, "reference_every": 1, "reference_mixing": 1e-3}}
    config = config_of(algorithm=settings, model={"dtype": "bfloat16"}, optimizer={"learning_rate": 1e-2})
    learner, before = learner_of(tiny_llama().to(torch.bfloat16), config)
    average = {name: p.detach().float().clone() for name, p in learner.scorer.named_parameters()}
    groups = make_groups(before, REWARDS)
    for _ in range(5):
        learner.learn(groups)
        learner.renew_reference()
        for name, p in learner.scorer.named_parameters():
            average[name] = 0.999 * average[name] + 0.001 * p.detach().float()
    moved = 0.0
    for name, found in learner.moving_reference.state().items():
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, average[name], rtol=1e-6, atol=1e-7)
        rounded = torch.empty_like(found, dtype=torch.bfloat16)
        round_dithered_(rounded, found)
        assert torch.equal(dict(learner.reference.named_parameters())[name], rounded)
        moved += float((found - found.to(torch.bfloat16).float()).abs().sum())
    assert moved > 0, "in bf16 alone it would have been lost"


def slow_gae(rewards, values, gamma, lam):
    """Schulman et al. (arXiv 1506.02438), by its definition: a sum of discounted errors, not by recursion."""
    values = [*values, 0.0]
    errors = [r + gamma * values[t + 1] - values[t] for t, r in enumerate(rewards)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))]


def test_ppo_s_policy_gradient_is_the_slow_loop_s(tiny_llama):
    """A value that is not 0, a KL in the tokens' rewards, gamma and lambda below 1, and no whitening."""
    settings = {
        "preset": "ppo",
        "advantage": {"whiten": False, "gamma": 0.9, "lam": 0.8},
        "kl": {"beta": 0.1},
        "value": {"trains_trunk": False},
    }
    config = config_of(algorithm=settings, optimizer={"learning_rate": 1e-2, "max_grad_norm": None})
    learner, before = learner_of(tiny_llama(seed=3), config)
    other = copy.deepcopy(before)
    with torch.no_grad():
        for p in learner.reference.module.parameters():
            p.mul_(1.1)
        other.load_state_dict(learner.reference.module.state_dict())
        learner.critic.weight.copy_(torch.linspace(-0.5, 0.5, len(learner.critic.weight)))
        learner.critic.bias.fill_(0.3)
    groups = make_groups(before, REWARDS)
    seen = watch_gradients(learner)
    weight, bias = learner.critic.weight.detach().double().clone(), 0.3
    learner.learn(groups)
    loss, tokens = 0.0, sum(len(c.token_ids) for _, c, _ in each(groups))
    for group in groups:
        for completion, reward in zip(group.completions, group.rewards, strict=True):
            ids = group.prompt.token_ids, completion.token_ids
            new = slow_logprobs(before, *ids)
            whole = torch.tensor([[*ids[0], *ids[1]]])
            states = before.model(input_ids=whole, use_cache=False).last_hidden_state[0, len(ids[0]) - 1 : -1]
            values = (states @ weight + bias).tolist()
            penalties = (0.1 * (new - slow_logprobs(other, *ids))).tolist()
            rewards = [-p for p in penalties]
            rewards[-1] += reward
            for logprob, advantage in zip(new, slow_gae(rewards, values, 0.9, 0.8), strict=True):
                loss = loss - advantage * logprob / tokens
    assert distance(seen[0], slow_gradient(loss, before)) < 1e-5


@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_value_s_own_gradient_is_the_slow_loop_s_in_head_and_trunk(clip, tiny_llama):
    value = {"trains_trunk": True, "loss_weight": 0.5, "clip": clip}
    settings = {"preset": "ppo", "advantage": {"whiten": False, "gamma": 1.0, "lam": 1.0}, "kl": None, "value": value}
    learner, before = learner_of(tiny_llama(seed=3), config_of(algorithm=settings))
    with torch.no_grad():
        learner.critic.weight.copy_(torch.linspace(-0.5, 0.5, len(learner.critic.weight)))
    groups = make_groups(before, REWARDS)
    seen, of_head = watch_gradients(learner), []
    step = learner.critic.step
    learner.critic.step = lambda made: of_head.append(learner.critic.weight.grad.clone()) or step(made)
    weight = learner.critic.weight.detach().double().clone().requires_grad_()
    learner.learn(groups)
    policy = value = 0.0
    tokens = sum(len(c.token_ids) for _, c, _ in each(groups))
    for group in groups:
        for completion, reward in zip(group.completions, group.rewards, strict=True):
            ids = group.prompt.token_ids, completion.token_ids
            whole = torch.tensor([[*ids[0], *ids[1]]])
            values = before.model(input_ids=whole, use_cache=False).last_hidden_state[0, len(ids[0]) - 1 : -1] @ weight
            policy = policy - ((reward - values.detach()) * slow_logprobs(before, *ids)).sum() / tokens
            value = value + (values - reward).square().sum() / tokens / 2  # within the batch's first update nothing is clipped
    (slow_head,) = torch.autograd.grad(0.5 * value, weight, retain_graph=True)
    assert torch.linalg.vector_norm(of_head[0].double() - slow_head) < 1e-5 * torch.linalg.vector_norm(slow_head)
    assert distance(seen[0], slow_gradient(policy + 0.5 * value, before)) < 1e-5


def test_without_a_critic_s_opinion_ppo_is_the_outcome_return(tiny_llama):
    """lambda = gamma = 1 and a value of 0: every token's advantage is its completion's reward."""
    model = tiny_llama(seed=3)
    settings = {"preset": "ppo", "advantage": {"whiten": False, "gamma": 1.0, "lam": 1.0}, "kl": None}
    before = copy.deepcopy(model).double()
    groups = make_groups(before, REWARDS)
    ppo, _ = one_gradient(model, groups, config_of(algorithm=settings))
    plain = {"advantage": {"baseline": "none", "scale": "none"}, "loss": {"aggregation": "token_mean"}, "kl": None}
    outcome, _ = one_gradient(model, groups, config_of(algorithm=plain))
    assert distance(ppo, outcome) < 1e-6


@pytest.mark.slow
def test_the_value_learns_what_is_coming(tiny_llama):
    settings = {"preset": "ppo", "kl": None, "value": {"learning_rate": 0.1}}
    config = config_of(algorithm=settings, optimizer={"learning_rate": 1e-9})
    learner, before = learner_of(tiny_llama(seed=3), config)
    groups = make_groups(before, REWARDS)
    found = [learner.learn(groups)[1] for _ in range(150)]
    assert found[0]["value/explained_variance"].value == pytest.approx(0, abs=1e-6)
    assert found[-1]["value/explained_variance"].value > 0.6
    assert found[-1]["value/loss"].value < 0.5 * found[0]["value/loss"].value


@pytest.mark.parametrize("reaches", [True, False])
def test_the_value_reaches_the_trunk_only_where_it_may(reaches, tiny_llama):
    settings = {"preset": "ppo", "kl": None, "value": {"trains_trunk": reaches, "loss_weight": 5.0}}
    learner, before = learner_of(tiny_llama(seed=3), config_of(algorithm=settings))
    with torch.no_grad():
        learner.critic.weight.fill_(0.1)
    groups = [replace(g, rewards=tuple(0.0 for _ in g.rewards)) for g in make_groups(before, REWARDS)]
    light, _ = learner_of(
        tiny_llama(seed=3), config_of(algorithm={**settings, "value": {**settings["value"], "loss_weight": 1e-9}})
    )
    with torch.no_grad():
        light.critic.weight.fill_(0.1)
    gradients = []
    for one in (learner, light):
        seen = watch_gradients(one)
        one.learn(groups)
        gradients.append(seen[0])
    assert (distance(*gradients) > 1e-3) is reaches


def test_a_critic_is_fp32_whatever_the_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        critic = Critic(4, config_of(algorithm={"preset": "ppo"}).algorithm, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)
    assert critic.weight.dtype == critic.bias.dtype == torch.float32


def test_a_gradient_that_is_not_finite_leaves_the_critic_alone():
    critic = Critic(4, config_of(algorithm={"preset": "ppo"}).algorithm, torch.device("cpu"))
    critic.values(torch.full((3, 4), float("inf"))).sum().backward()
    critic.step(made=True)
    assert torch.equal(critic.weight, torch.zeros(4))
    critic.values(torch.ones(3, 4)).sum().backward()
    critic.step(made=False)
    assert torch.equal(critic.weight, torch.zeros(4))
    critic.values(torch.ones(3, 4)).sum().backward()
    critic.step(made=True)
    assert (critic.weight != 0).all()


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"entropy": {"floor": 0.2}}, "set bonus"),
        ({"kl": {"gain": 0.5}}, "kl.target"),
        ({"kl": {"reference_mixing": 0.5}}, "reference_every"),
    ],
)
def test_a_setting_whose_companion_is_missing_is_refused(settings, word):
    with pytest.raises((ConfigError, ValueError), match=word):
        Config(algorithm=settings)


@pytest.mark.parametrize("algorithm", [{"preset": "ppo"}, {"preset": "rloo"}], ids=["values and token rewards", "reward"])
def test_a_process_without_a_share_of_the_batch_finds_the_same_advantages(algorithm, tiny_llama):
    """As where there are fewer groups than processes: it makes no passes, and has the other's numbers all the same."""
    groups = make_groups(tiny_llama(seed=3).double(), [[1.0, 0.0, 0.5]])
    objective, cpu = Objective.from_config(Config(algorithm=algorithm).algorithm), torch.device("cpu")
    whole, nothing = Batch.of(groups, everyone(groups), cpu), Batch.of(groups, [], cpu)
    whole.reference_logprobs_T = whole.sampler_logprobs_T - torch.linspace(0, 1, len(whole.weights_T))
    whole.values_T = torch.linspace(-1, 1, len(whole.weights_T))
    parts = []

    class First(World):
        def assemble(self, own, places, size):
            parts.append(super().assemble(own, places, size))
            return parts[-1]

    class Second(World):
        def assemble(self, own, places, size):
            return parts.pop(0) + super().assemble(own, places, size)

    first, second = (
        StepAdvantages.of(groups, objective, batch=batch, beta=0.1, world=world)
        for batch, world in ((whole, First()), (nothing, Second()))
    )
    assert not parts
    assert first.by_group == second.by_group
    assert first.by_group != StepAdvantages.of(groups, objective, batch=nothing, beta=0.1).by_group, "the passes' numbers matter"
