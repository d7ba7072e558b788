"""A random model learns toy tasks by the real loop: what no unit test can promise."""

import statistics

import pytest

from groupwise.training.loop import train


def letters(completions, **columns):
    """The share of a completion's characters that are lower-case letters."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(x.isascii() and x.islower() for x in text) / max(1, len(text)) for text in texts]


def early(finish_reason, **columns):
    """1 for a completion that ends by itself."""
    return [float(reason == "stop") for reason in finish_reason]


def run(small_config, quiet, folder, reward, steps, **sections):
    config = small_config(
        rewards={"functions": [{"function": "goal"}]},
        rollout={"prompts_per_step": 4, "completions_per_prompt": 8, "max_completion_tokens": 10, **sections.pop("rollout", {})},
        training={"steps": steps, "seed": 5},
        evaluation={"problems": 2, "modes": ["greedy"]},
        **sections,
    )
    seen = []
    train(config, rewards={"goal": reward}, console=quiet, run_folder=folder, on_step=lambda r: seen.append(r.metrics))
    return seen


def mean(steps, name):
    return statistics.mean(metrics[name] for metrics in steps)


def slow(value):
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kl": None},
        slow({"kl": {"beta": 0.02}, "updates_per_batch": 2}),
        slow({"preset": "rloo"}),
        slow({"preset": "ppo", "kl": None, "value": {"learning_rate": 1e-2}, "updates_per_batch": 2}),
        slow({"kl": None, "entropy": {"bonus": 1e-3}, "mask_truncated": False, "correction": {"level": "token"}}),
    ],
    ids=["grpo", "two updates and a leash", "rloo", "ppo", "with an entropy bonus and a correction"],
)
def test_reward_rises_where_letters_are_asked_for(small_config, quiet, tmp_path, algorithm):
    """A tenth of the bytes are lower-case letters, so that is where a random model starts."""
    seen = run(small_config, quiet, tmp_path / "run", letters, 40, algorithm=algorithm, optimizer={"learning_rate": 1e-2})
    assert mean(seen[:3], "reward/mean") < 0.2
    assert mean(seen[-5:], "reward/mean") > 0.8


@pytest.mark.slow
def test_reward_rises_a_step_ahead_too(small_config, quiet, tmp_path):
    seen = run(small_config, quiet, tmp_path / "run", letters, 40, optimizer={"learning_rate": 1e-2}, rollout={"ahead": 1})
    assert mean(seen[:3], "reward/mean") < 0.2
    assert mean(seen[-5:], "reward/mean") > 0.8


@pytest.mark.slow
def test_a_model_that_is_paid_for_stopping_learns_to_stop(small_config, quiet, tmp_path):
    """Pad and end are one token. Where training took it for padding, this could not be learnt."""
    seen = run(small_config, quiet, tmp_path / "run", early, 40, optimizer={"learning_rate": 1e-2})
    assert mean(seen[:3], "completions/stop_rate") < 0.2
    assert mean(seen[-5:], "completions/stop_rate") > 0.9
    assert mean(seen[-5:], "completions/tokens_mean") < 5


def test_without_anything_to_learn_nothing_drifts(small_config, quiet, tmp_path):
    """The control: equal rewards leave the policy as it was, so the rises above are not the loop's own doing."""
    seen = run(small_config, quiet, tmp_path / "run", lambda completions, **columns: [1.0] * len(completions), 6)
    assert mean(seen, "groups/zero_variance") == 1
    assert seen[-1]["progress/policy_version"] == 0


def every_letter(completions, **columns):
    """Process supervision: every character is a step, which earns 1 where it is a lower-case letter."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [[(i + 1, float(x.isascii() and x.islower())) for i, x in enumerate(text)] for text in texts]


@pytest.mark.slow
def test_steps_teach_what_they_are_paid_for(small_config, quiet, tmp_path):
    seen = run(small_config, quiet, tmp_path / "run", every_letter, 25, algorithm={"kl": None}, optimizer={"learning_rate": 1e-2})
    assert mean(seen[:3], "steps/reward_goal") < 0.2
    assert mean(seen[-5:], "steps/reward_goal") > 0.8
