"""A critic with a model of its own: its values and gradients against transformers' module with a linear head, what its steps touch,
what a checkpoint keeps of it, and what is refused before any weights are read."""

import copy

import pytest
import torch
from slow_grpo import (
    by_module_name,
    config_of,
    distance,
    learner_of,
    make_groups,
    slow_gradient,
    slow_logprobs,
    watch_gradients,
)  # fmt: skip

from groupwise.errors import ConfigError, ModelError
from groupwise.metrics import Max
from groupwise.training.loop import train
from groupwise.training.setup import prepare
from tests.tiny import write_tiny_llama, write_tiny_qwen2

REWARDS = [[2.8, 0.2, 1.7, 0.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.4, 0.0, 2.0]]
VALUE = {"critic": "copy", "loss_weight": 0.5}
OWN = {"preset": "ppo", "value": VALUE, "advantage": {"whiten": False, "gamma": 1.0, "lam": 1.0}, "kl": None}


def own_critic(**value):
    return {**OWN, "value": {**VALUE, **value}}


def with_own_critic(model, budget=10_000, **algorithm):
    """A learner whose critic is not the policy any more, and float64 copies of both models; the head is not 0."""
    config = config_of(algorithm={**OWN, **algorithm}, optimizer={"max_grad_norm": None}, training={"micro_batch_tokens": budget})
    learner, before = learner_of(model, config)
    with torch.no_grad():
        for p in learner.critic.trunk.module.parameters():
            p.mul_(1.2)
        learner.critic.weight.copy_(torch.linspace(-0.5, 0.5, len(learner.critic.weight)))
        learner.critic.bias.fill_(0.3)
    slow = copy.deepcopy(before)
    slow.load_state_dict(learner.critic.trunk.module.state_dict())
    return learner, before, slow


def slow_values(model, weight, group, completion):
    """The states that chose each token of one completion, alone in its batch, times the head."""
    ids = torch.tensor([[*group.prompt.token_ids, *completion.token_ids]])
    states = model.model(input_ids=ids, use_cache=False).last_hidden_state[0, len(group.prompt.token_ids) - 1 : -1]
    return states @ weight + 0.3


def watch_critic(learner):
    """Each step's gradient of the critic's model, by the module's names, and of its head."""
    seen, optimizer = [], learner.critic.optimizer
    step = optimizer.step

    def watched(rate):
        assert rate == learner.config.algorithm.value.critic_learning_rate
        seen.append((by_module_name(learner.critic.trunk), learner.critic.weight.grad.clone()))
        return step(rate)

    optimizer.step = watched
    return seen


@pytest.mark.parametrize("budget", [10_000, 40], ids=["one micro-batch", "several"])
@pytest.mark.parametrize("family", ["tiny_llama", "tiny_qwen2"])
def test_values_and_gradients_are_those_of_the_module_with_a_linear_head(family, budget, request):
    learner, before, slow = with_own_critic(request.getfixturevalue(family)(seed=3), budget)
    groups = make_groups(before, REWARDS)
    weight = learner.critic.weight.detach().double().clone().requires_grad_()
    of_policy, of_critic, policy, value = watch_gradients(learner), watch_critic(learner), 0.0, 0.0
    tokens = sum(len(c.token_ids) for g in groups for c in g.completions)
    learner.learn(groups)
    for group in groups:
        for completion, reward in zip(group.completions, group.rewards, strict=True):
            values = slow_values(slow, weight, group, completion)
            new = slow_logprobs(before, group.prompt.token_ids, completion.token_ids)
            policy = policy - ((reward - values.detach()) * new).sum() / tokens
            value = value + (values - reward).square().sum() / tokens / 2
    (slow_head,) = torch.autograd.grad(0.5 * value, weight, retain_graph=True)
    trunk_names = {name for name, _ in slow.named_parameters() if not name.startswith("lm_head")}
    trunk = dict(slow.named_parameters())
    wanted = dict(zip(trunk_names, torch.autograd.grad(0.5 * value, [trunk[name] for name in trunk_names]), strict=True))
    found, head = of_critic[0]
    assert trunk_names <= found.keys()
    assert distance({name: found[name] for name in trunk_names}, wanted) < 1e-5
    assert torch.linalg.vector_norm(head.double() - slow_head) < 1e-5 * torch.linalg.vector_norm(slow_head)
    assert distance(of_policy[0], slow_gradient(policy, before)) < 1e-5, (
        "the value's error reached the policy, or the values are off"
    )


def test_every_token_of_a_completion_has_its_value(tiny_llama):
    learner, before, slow = with_own_critic(tiny_llama(seed=3), budget=40)
    groups = make_groups(before, REWARDS)
    window = learner.window(groups)
    learner._score_by_policy(window)
    found = {member: piece.tolist() for member, piece in window.batch.by_member(window.batch.values_T)}
    weight = learner.critic.weight.detach().double()
    for g, group in enumerate(groups):
        for m, completion in enumerate(group.completions):
            assert found[g, m] == pytest.approx(slow_values(slow, weight, group, completion).tolist(), abs=1e-5)


def test_a_critic_packed_another_way_says_the_same(tiny_llama):
    """As when the policy goes by the lean decoder and the critic by its module, over padded rows."""
    from groupwise.models.module_scorer import ModuleScorer

    learner, before, _ = with_own_critic(tiny_llama(seed=3), budget=40)
    groups, module = make_groups(before, REWARDS), copy.deepcopy(learner.critic.trunk.module)
    packed = learner.window(groups)
    learner._score_by_policy(packed)
    learner.critic.trunk = ModuleScorer(module)
    padded = learner.window(groups)
    learner._score_by_policy(padded)
    torch.testing.assert_close(packed.batch.values_T, padded.batch.values_T, rtol=1e-5, atol=1e-5)


def test_it_starts_as_the_policy_and_shares_no_memory_with_it(tiny_llama):
    learner, before = learner_of(tiny_llama(seed=3), config_of(algorithm=OWN))
    policy, critic = dict(learner.scorer.named_parameters()), dict(learner.critic.trunk.named_parameters())
    assert policy.keys() == critic.keys()
    assert all(torch.equal(policy[name], critic[name]) for name in policy)
    assert not {p.data_ptr() for p in policy.values()} & {p.data_ptr() for p in critic.values()}
    start = {name: p.detach().clone() for name, p in critic.items()}
    learner.learn(make_groups(before, REWARDS))
    assert all(torch.equal(start[name], p) for name, p in critic.items()), "with a head of 0 nothing reaches the layers yet"
    learner.learn(make_groups(before, REWARDS))
    assert not all(torch.equal(start[name], p) for name, p in critic.items())


def test_an_untied_output_head_has_no_moments(tiny_llama):
    learner, _ = learner_of(tiny_llama(seed=3, tie_word_embeddings=False), config_of(algorithm=OWN))
    assert "head" in {name for name, _ in learner.critic.trunk.named_parameters()}
    assert "head" not in learner.critic.optimizer.names


@pytest.mark.parametrize("broken", ["policy", "critic"])
def test_where_either_gradient_is_not_finite_the_critic_stays(broken, tiny_llama):
    learner, before, _ = with_own_critic(tiny_llama(seed=3))
    start = {name: p.detach().clone() for name, p in learner.critic.trunk.named_parameters()}
    groups, step = make_groups(before, REWARDS), learner.step
    learner.step = lambda rate: {"optimizer/learning_rate": Max(0.0)}  # the gradients stay
    learner.learn(groups)
    learner.step = step
    chosen = learner.scorer if broken == "policy" else learner.critic.trunk
    chosen.named_parameters()[0][1].grad[0, 0] = float("nan")
    weight = learner.critic.weight.detach().clone()
    found = learner.step(1e-3)
    assert ("value/grad_norm" in found) is (broken == "critic"), "where the policy's is dropped nobody looks at the critic's"
    assert found["optimizer/dropped_updates"].value == (broken == "policy")
    assert all(torch.equal(start[name], p) for name, p in learner.critic.trunk.named_parameters())
    assert torch.equal(learner.critic.weight, weight)
    assert all(p.grad is None for _, p in learner.critic.trunk.named_parameters())


@pytest.mark.slow
def test_its_value_comes_to_explain_the_returns(tiny_llama):
    config = config_of(algorithm=own_critic(critic_learning_rate=3e-3, learning_rate=1e-2), optimizer={"learning_rate": 1e-9})
    learner, before = learner_of(tiny_llama(seed=3), config)
    groups = make_groups(before, REWARDS)
    explained = [learner.learn(groups)[1]["value/explained_variance"].value for _ in range(60)]
    assert explained[0] == 0
    assert explained[-1] > 0.6


def test_with_masters_a_checkpoint_holds_them_and_not_the_rounded_weights_too(tiny_llama):
    settings = {"algorithm": own_critic(critic_learning_rate=1e-3), "model": {"dtype": "bfloat16"}}
    learners = [learner_of(tiny_llama(seed=3).bfloat16(), config_of(**settings)) for _ in range(2)]
    (one, before), (other, _) = learners
    for _ in range(2):
        one.learn(make_groups(before, REWARDS))
    state = {name: tensor.clone() for name, tensor in one.critic.state().items()}
    assert not any(name.startswith("trunk.weights.") for name in state)
    other.critic.load_state(state)
    pairs = zip(one.critic.trunk.named_parameters(), other.critic.trunk.named_parameters(), strict=True)
    assert all(torch.equal(a, b) for (_, a), (_, b) in pairs)
    again = other.critic.state()
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], state[name]) for name in state)


def test_a_state_of_the_other_kind_is_refused(tiny_llama):
    own, _ = learner_of(tiny_llama(seed=3), config_of(algorithm=OWN))
    shared, _ = learner_of(tiny_llama(seed=3), config_of(algorithm=own_critic(critic="shared")))
    for one, other in ((own, shared), (shared, own)):
        with pytest.raises(ValueError, match="critic of its own"):
            one.critic.load_state(other.critic.state())


@pytest.mark.parametrize("lora", [None, {"rank": 4, "alpha": 8}], ids=["all weights", "adapter"])
@pytest.mark.parametrize("kind", ["copy", "qwen2"])
def test_a_miniature_run(kind, lora, small_config, letters, quiet, tmp_path):
    if lora:
        pytest.importorskip("peft")
    critic = "copy" if kind == "copy" else str(write_tiny_qwen2(tmp_path / "critic", max_position_embeddings=256))
    algorithm = {"preset": "ppo", "value": {"critic": critic}, "updates_per_batch": 2, "kl": {"beta": 0.01}}
    model = {"lora": lora} if lora else {}
    config = small_config(algorithm=algorithm, model=model, output={"checkpoint_every": 1})
    folder = train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run").folder
    assert (folder / "checkpoints" / "step-2" / "critic.safetensors").is_file()
    assert '"value/grad_norm"' in (folder / "metrics.jsonl").read_text(encoding="utf-8")


def test_what_is_refused_before_any_weights_are_read(small_config, letters, tiny_folder, tmp_path):
    with pytest.raises(ModelError, match="nowhere"):
        prepare(small_config(algorithm={"preset": "ppo", "value": {"critic": str(tmp_path / "nowhere")}}), letters)
    short = write_tiny_llama(tmp_path / "short", max_position_embeddings=16)
    with pytest.raises(ConfigError, match=r"context of 16 tokens.*data.max_prompt_tokens to 8"):
        prepare(small_config(algorithm={"preset": "ppo", "value": {"critic": str(short)}}), letters)
    other = write_tiny_llama(tmp_path / "other")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["<another>"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ConfigError, match="reads the very tokens"):
        prepare(
            small_config(model={"name": str(other)}, algorithm={"preset": "ppo", "value": {"critic": str(tiny_folder)}}), letters
        )
    prepare(small_config(algorithm={"preset": "ppo", "value": {"critic": str(tiny_folder)}}), letters)
