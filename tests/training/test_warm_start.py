"""The warm start: plain supervised steps on worked answers, their end token included."""

import copy
import json
import re
from types import SimpleNamespace

import pytest
import torch
from slow_grpo import config_of, slow_logprobs

from groupwise.distributed import World
from groupwise.episodes import worked_episode
from groupwise.errors import DataError
from groupwise.models.load import load_policy
from groupwise.models.scorer import make_scorer
from groupwise.training.batches import Batches
from groupwise.training.setup import prepare
from groupwise.training.warm_start import _examples, warm_start
from groupwise.types import Problem, Prompt


@pytest.fixture
def begin(small_config):
    """``begin(**warm_start settings)`` -> config, prompts, policy, scorer."""

    def make(**settings):
        config = small_config(warm_start=settings, rewards={"functions": [{"function": "correctness"}]})
        prepared = prepare(config)
        policy = load_policy(config.model)
        return config, prepared, policy, make_scorer(policy, config.model)

    return make


def run(begin, **settings):
    config, prepared, policy, scorer = begin(**{"steps": 4, "examples_per_step": 4, "learning_rate": 3e-3, **settings})
    seen = []
    warm_start(scorer, prepared.train_prompts, policy.tokenizer, prepared.answer_style, config, lambda *told: seen.append(told))
    return seen, {name: p.detach().clone() for name, p in scorer.named_parameters()}


def test_refills_do_not_come_in_the_order_of_the_warm_start():
    """They would be the problems whose answers were just taught."""

    class Prompts(list):
        def take(self, indices):
            return [self[i] for i in indices]

    prompts = Prompts(Prompt(Problem(str(i), "?", "1"), "?", (5,)) for i in range(50))
    for seed in range(64):
        config = config_of(
            training={"seed": seed},
            rollout={"prompts_per_step": 8, "refill_rounds": 1},
            warm_start={"steps": 1, "examples_per_step": 8},
        )
        refills = Batches(config, SimpleNamespace(train_prompts=prompts), World()).refill_prompts(0, 1, 8)
        assert [int(prompt.problem.id) for prompt in refills] != _examples(config, len(prompts), 0), seed


def test_the_loss_falls_and_is_told_after_each_step(begin):
    seen, _ = run(begin, steps=30)
    assert [step for step, _ in seen] == list(range(1, 31))
    assert seen[0][1] == pytest.approx(torch.tensor(264.0).log().item(), abs=0.2), "a model of small weights is near uniform"
    assert seen[-1][1] < seen[0][1] - 1


def test_the_first_loss_is_the_mean_over_the_step_s_tokens(begin, monkeypatch):
    """Also when the budget cuts the step into many passes."""
    config, prepared, policy, scorer = begin(steps=1, examples_per_step=4)
    before = copy.deepcopy(policy.model).double()
    config.training.micro_batch_tokens = 1
    used, losses = [], []
    monkeypatch.setattr("groupwise.training.warm_start.worked_episode", lambda *a: used.append(a[0]) or worked_episode(*a))
    warm_start(scorer, prepared.train_prompts, policy.tokenizer, "xml", config, lambda step, loss: losses.append(loss))
    with torch.no_grad():
        logprobs = [slow_logprobs(before, *worked_episode(p, "xml", policy.tokenizer, None)[0][:2]) for p in used]
    assert len(used) == 4
    assert losses == [pytest.approx(-torch.cat(logprobs).mean().item(), abs=1e-5)]


def test_the_end_token_is_a_target(begin):
    """The worked answer ends with the end token, and the model becomes likelier to give it there."""
    config, prepared, policy, scorer = begin(steps=60, examples_per_step=4, learning_rate=1e-2)
    prompt, tokenizer = prepared.train_prompts[0], policy.tokenizer
    ((_, worked, _),) = worked_episode(prompt, "xml", tokenizer, None)
    assert worked[-1] == tokenizer.eos_token_id == tokenizer.pad_token_id
    assert tokenizer.decode(worked[:-1]) == f"<answer>\n{prompt.problem.answer}\n</answer>"

    def chance():
        with torch.no_grad():
            return scorer.logprobs(scorer.prepare([(prompt.token_ids, [worked])]))[-1].exp().item()

    before = chance()
    warm_start(scorer, prepared.train_prompts, tokenizer, "xml", config)
    assert before < 0.02
    assert chance() > 0.2


def test_the_seed_decides(begin, small_config):
    one, weights = run(begin)
    again, same = run(begin)
    assert one == again
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    config, prepared, policy, scorer = begin(steps=4, examples_per_step=4, learning_rate=3e-3)
    config.training.seed = 1
    losses = []
    warm_start(scorer, prepared.train_prompts, policy.tokenizer, "xml", config, lambda step, loss: losses.append((step, loss)))
    assert losses != one


def test_no_gradient_and_no_hook_is_left_behind(begin):
    config, prepared, policy, scorer = begin(steps=1, examples_per_step=2)
    warm_start(scorer, prepared.train_prompts, policy.tokenizer, "xml", config)
    assert all(p.grad is None for _, p in scorer.named_parameters())
    assert not any(p._post_accumulate_grad_hooks for _, p in scorer.named_parameters())


def test_a_worked_answer_beyond_the_context_is_refused_before_anything_is_loaded(small_config, tmp_path):
    """The prompt fits beside a completion, and its worked answer does not: the model would have ended in an IndexError."""
    row = {"question": "x" * 150 + " = ?", "answer": "1", "solution": "word " * 40}
    data = tmp_path / "long.jsonl"
    data.write_text((json.dumps(row) + "\n") * 4)
    settings = {"data": {"source": str(data), "holdout": 0}, "rewards": {"functions": [{"function": "correctness"}]}}
    prepare(small_config(**settings))
    with pytest.raises(DataError, match=r"warm start.* context of .* is 256 tokens.*data\.max_prompt_tokens") as error:
        prepare(small_config(warm_start={"steps": 1, "examples_per_step": 2}, **settings))
    prompt, worked = (int(n) for n in re.findall(r"(\d+) tokens", str(error.value))[:2])
    assert prompt + worked > 256
    assert f"{256 - worked} or less" in str(error.value)
