"""A device that is too small: passes are halved until they fit, and the step has the numbers it would have had."""

import copy

import pytest
import torch
from slow_grpo import config_of, distance, learner_of, make_groups, watch_gradients

REWARDS = [[2.8, 0.2, 1.7, 0.0], [1.0, 0.3, 1.0, 1.0], [0.0, 0.4, 0.0, 2.0]]


def shortage():
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class SmallDevice:
    """A scorer with room for so many inputs in one pass; the pass fails on its way back where ``in_backward``."""

    def __init__(self, scorer, room, in_backward=False):
        self.scorer, self.room, self.in_backward, self.failures = scorer, room, in_backward, 0

    def __getattr__(self, name):
        return getattr(self.scorer, name)

    def logprobs(self, batch, temperature=1.0):
        return self.score(batch, temperature).logprobs_T

    def score(self, batch, *args, **kwargs):
        scored = self.scorer.score(batch, *args, **kwargs)
        if len(batch.token_ids_R) > self.room:
            self.failures += 1
            if not (self.in_backward and scored.logprobs_T.requires_grad):
                raise shortage()

            def fail(_):
                raise shortage()

            scored.logprobs_T.register_hook(fail)
        return scored


def learn(model, groups, config, room=None, in_backward=False):
    """Gradients of every update, the learner's metrics, what was told, and the failures."""
    learner, _ = learner_of(copy.deepcopy(model), config)
    seen, told = watch_gradients(learner), []
    devices = []
    if room is not None:
        devices = [SmallDevice(learner.scorer, room, in_backward)]
        learner.scorer = devices[0]
        if learner.moving_reference:
            devices.append(SmallDevice(learner.moving_reference.scorer, room))
            learner.moving_reference.scorer = devices[1]
    learner.budget.tell = told.append
    _, metrics = learner.learn(groups)
    return seen, metrics, told, learner, sum(device.failures for device in devices)


@pytest.mark.parametrize("in_backward", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "algorithm",
    [
        {}, {"kl": {"beta": 0.1}}, {"updates_per_batch": 3, "kl": {"beta": 0.05}},
        {"preset": "ppo", "updates_per_batch": 2, "correction": {"level": "token"}, "entropy": {"top_share": 0.5}},
        {"preset": "ppo", "value": {"critic": "copy"}, "updates_per_batch": 2},
        {"preset": "rloo", "mask_truncated": True},
    ],
    ids=["plain", "reference", "three updates", "critic, corrected", "critic of its own", "KL of what is masked"],
)  # fmt: skip
def test_the_same_gradients_on_a_device_that_is_too_small(tiny_llama, algorithm, in_backward):
    model, config = tiny_llama(seed=5), config_of(algorithm=algorithm)
    _, before = learner_of(copy.deepcopy(model), config)
    groups = make_groups(before, REWARDS)
    enough, numbers, silent, _, _ = learn(model, groups, config)
    found, metrics, told, learner, failures = learn(model, groups, config, room=30, in_backward=in_backward)
    assert failures >= 1
    assert metrics["memory/halvings"].value == len(told) >= 1
    assert "micro_batch_tokens is" in told[0]
    assert learner.budget.tokens < 60, "the batch is about 90 tokens, and 8,192 were allowed"
    assert silent == []
    assert numbers["memory/halvings"].value == 0
    assert len(found) == len(enough)
    assert all(distance(a, b) < 1e-5 for a, b in zip(found, enough, strict=True))
    for name in numbers.keys() - {"memory/halvings"}:
        if not name.startswith("time/"):
            assert metrics[name].value == pytest.approx(numbers[name].value, rel=1e-3, abs=1e-5), name
    failed_before = failures
    learner.learn(groups)
    assert learner.scorer.failures <= failed_before, "the next batch is cut to what fits from the start"


@pytest.mark.slow
def test_a_shortage_in_a_later_pass_drops_what_the_earlier_ones_left(tiny_qwen2):
    """The second of two micro-batches fails once, when the gradient of the first has been added up already."""
    model, config = tiny_qwen2(seed=1), config_of(algorithm={"updates_per_batch": 2}, training={"micro_batch_tokens": 60})
    _, before = learner_of(copy.deepcopy(model), config)
    groups = make_groups(before, REWARDS)
    enough, *_ = learn(model, groups, config)
    for failing in range(1, 5):
        learner, _ = learner_of(copy.deepcopy(model), config)
        seen, calls, score = watch_gradients(learner), [], learner.scorer.score

        def once(batch, *args, calls=calls, score=score, failing=failing, **kwargs):
            calls.append(batch)
            if len(calls) == failing:
                raise shortage()
            return score(batch, *args, **kwargs)

        learner.scorer.score = once
        learner.learn(groups)
        assert learner.budget.halvings == 1
        assert all(distance(a, b) < 1e-5 for a, b in zip(seen, enough, strict=True))


def test_single_completions_that_do_not_fit_are_an_error(tiny_llama):
    model, config = tiny_llama(), config_of()
    _, before = learner_of(copy.deepcopy(model), config)
    with pytest.raises(torch.OutOfMemoryError):
        learn(model, make_groups(before, REWARDS), config, room=1)
