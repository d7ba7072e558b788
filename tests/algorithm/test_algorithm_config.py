"""Presets in the config: which value wins, what is refused, and that no torch is needed."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from pydantic import ValidationError

from groupwise.algorithm import BatchCounts, Objective, kl_in_reward, kl_penalty, policy_loss
from groupwise.algorithm.advantages import BASELINES, SCALES
from groupwise.algorithm.aggregate import AGGREGATIONS
from groupwise.algorithm.kl import ESTIMATORS
from groupwise.algorithm.ratio import RATIOS
from groupwise.algorithm.surrogate import SURROGATES
from groupwise.config.presets import PRESETS
from groupwise.config.schema import AlgorithmConfig, Config


def test_every_row_is_a_valid_config():
    assert set(get_args(AlgorithmConfig.model_fields["preset"].annotation)) == set(PRESETS)
    for name, row in PRESETS.items():
        explicit = AlgorithmConfig(preset=name, **row.values)  # validated, as values out of the table are not
        followed = AlgorithmConfig(preset=name)
        assert explicit == followed.model_copy(update={})
        assert {f: getattr(followed, f) for f in row.values} == dict(row.values)


def test_defaults_are_grpos():
    assert dict(PRESETS["grpo"].values).items() <= {n: f.default for n, f in AlgorithmConfig.model_fields.items()}.items()


def test_every_choice_has_its_function():
    tables = {
        "baseline": {**BASELINES, "value": None},  # of the learned value, not of rewards: values.value_advantages
        "scale": SCALES,
        "ratio_level": RATIOS.keys() - {"whole_sequence", "product"},  # groupwise.trl's alone
        "surrogate": SURROGATES,
        "aggregation": AGGREGATIONS,
        "kl_estimator": ESTIMATORS,
    }
    for name, table in tables.items():
        assert set(get_args(AlgorithmConfig.model_fields[name].annotation)) == set(table)


def test_explicit_keys_win_and_stay_explicit():
    config = AlgorithmConfig(preset="dapo", epsilon_high=0.5, scale="none")
    assert (config.epsilon_high, config.scale, config.aggregation) == (0.5, "none", "token_mean")
    assert config.model_fields_set == {"preset", "epsilon_high", "scale"}
    config.preset = "gspo"
    assert (config.epsilon, config.epsilon_high, config.scale, config.ratio_level) == (3e-4, 0.5, "none", "sequence")
    config.preset = "grpo"
    assert (config.epsilon, config.ratio_level) == (0.2, "token")


def test_nothing_of_a_former_preset_stays_behind():
    config = AlgorithmConfig(preset="dapo")
    config.preset = "grpo"
    assert config.epsilon_high is None
    assert config == AlgorithmConfig()


def test_an_explicit_default_wins_over_the_preset():
    assert AlgorithmConfig(preset="dapo", beta=0.04).beta == 0.04
    assert AlgorithmConfig(preset="dapo", epsilon_high=None).epsilon_high is None


def test_a_resolved_config_reads_back_the_same():
    for name in PRESETS:
        config = Config(algorithm={"preset": name, "epsilon": 0.11})
        again = Config.model_validate(config.model_dump())
        assert Objective.from_config(again.algorithm) == Objective.from_config(config.algorithm)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"epsilon": 0}, "greater than 0"),
        ({"epsilon": -0.1}, "greater than 0"),
        ({"epsilon_high": 0}, "greater than 0"),
        ({"beta": -1}, "greater than or equal to 0"),
        ({"dual_clip": 1.0}, "greater than 1"),
        ({"preset": "ppg"}, "grpo"),
        ({"delta": 1.1}, "above the upper clip bound 1.2"),
        ({"preset": "dapo", "dual_clip": 1.25}, "above the upper clip bound 1.28"),
        ({"dual_clip": 3, "delta": 4}, "set only one"),
        ({"preset": "cispo", "delta": 8}, "has no effect"),
        ({"baseline": "none"}, "divided by about 0; set baseline to 'group_mean'"),
        ({"preset": "ppo", "scale": "group_std"}, "divided by about 0"),
        ({"baseline": "none", "scale": "batch_std"}, "divided by about 0; set baseline to 'batch_mean'"),
        ({"baseline": "none", "scale": "centred_std"}, "divided by about 0; set baseline to 'batch_mean'"),
        ({"preset": "ppo", "scale": "centred_std"}, "use 'batch_std', which does the same there"),
        ({"kl_placement": "token_reward"}, "the KL would be divided by about 0"),
        ({"preset": "rloo", "updates_per_batch": 2}, "after the first update the batch is off-policy"),
        ({"preset": "ppo", "gamma": 0}, "greater than 0"),
        ({"gae_lambda": 1.5}, "less than or equal to 1"),
        ({"value_clip": 0}, "greater than 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict, sentence: str):
    with pytest.raises(ValidationError, match=sentence):
        AlgorithmConfig(**settings)


CHOICES = ("baseline", "scale", "ratio_level", "surrogate", "aggregation", "kl_estimator", "kl_placement")


def every_combination() -> Iterator[dict[str, str]]:
    options = [get_args(AlgorithmConfig.model_fields[name].annotation) for name in CHOICES]
    return (dict(zip(CHOICES, values, strict=True)) for values in itertools.product(*options))


def test_every_combination_works_or_is_refused():
    """Two groups, one without variance: advantages of a size that can be learnt from, a finite loss, and a gradient."""
    sequence_T = torch.tensor([0, 0, 1, 2, 3, 3, 3])
    old_T, reference_T = -torch.rand(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.1
    rewards, values = [[1.0, 0.0], [1.0, 1.0]], [[[0.5, 0.1], [0.2]], [[0.3], [0.1, 0.9, 0.4]]]
    worked = refused = 0
    for chosen in every_combination():
        try:
            objective = Objective.from_config(AlgorithmConfig(**chosen, beta=0.1, epsilon_high=0.3))
        except ValidationError:  # for what, the test above says
            refused += 1
            continue
        advantages_T = advantages_as_trained(objective, rewards, values, old_T, reference_T, sequence_T)
        assert advantages_T.abs().max() < 10, chosen
        logprobs_T = (old_T + 0.1 * advantages_T).requires_grad_()
        counts = BatchCounts(completions=4, tokens=7, max_tokens=4)
        loss, _ = policy_loss(
            objective,
            logprobs_T=logprobs_T,
            old_logprobs_T=old_T,
            advantages_T=advantages_T,
            reference_logprobs_T=reference_T,
            sequence_T=sequence_T,
            weights_T=objective.weights(torch.bincount(sequence_T), sequence_T, counts, torch.float64),
        )
        loss.backward()
        assert loss.isfinite()
        assert 0 < logprobs_T.grad.abs().max() < 50, chosen
        worked += 1
    # per 72 choices of the rest: group_std for 3 baselines x 3 placements, and 2 x token_reward; batch_std for none x 3 placements;
    # centred_std for none and value x 3 placements
    assert (worked, refused) == (4320 - 20 * 72, 20 * 72)


def advantages_as_trained(objective, rewards, values, old_T, reference_T, sequence_T) -> torch.Tensor:
    """By the way that the objective's properties prescribe, for the batch of the test above."""
    cut = {"beta": objective.beta, "estimator": objective.kl_estimator}
    penalties = None
    if objective.kl_in_reward:
        taken = kl_in_reward(old_T, reference_T, sequence_T, 4, **cut).tolist()
        rewards = [[r - taken[2 * g + i] for i, r in enumerate(group)] for g, group in enumerate(rewards)]
    elif objective.kl_in_token_reward:
        a, b, c, d = kl_penalty(old_T, reference_T, **cut).split([2, 1, 1, 3])
        penalties = [[a.tolist(), b.tolist()], [c.tolist(), d.tolist()]]
    if objective.needs_values:
        nested, _ = objective.value_advantages(rewards, values, penalties)
    elif penalties is not None:
        nested = objective.token_advantages(rewards, penalties)
    else:
        return torch.tensor([a for group in objective.advantages(rewards) for a in group], dtype=torch.float64)[sequence_T]
    return torch.tensor([x for group in nested for tokens in group for x in tokens], dtype=torch.float64)


def test_objective_takes_every_setting():
    config = AlgorithmConfig(preset="rloo", surrogate="clip", epsilon=0.1, epsilon_high=0.3, delta=4.0, advantage_epsilon=1e-6)
    objective = Objective.from_config(config)
    assert (objective.bounds.low, objective.bounds.high, objective.bounds.delta, objective.bounds.dual) == (0.1, 0.3, 4.0, None)
    assert (objective.baseline, objective.scale, objective.aggregation) == ("leave_one_out", "none", "sequence_sum")
    assert (objective.kl_estimator, objective.kl_placement, objective.beta) == ("k1", "reward", 0.03)
    assert objective.advantage_epsilon == 1e-6
    assert Objective.from_config(AlgorithmConfig()).bounds.high == 0.2
    assert Objective.from_config(AlgorithmConfig()) == Objective()


def test_the_table_needs_no_torch():
    code = "import sys, groupwise.config.schema, groupwise.config.presets; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
