"""Presets in the config: which value wins, what is refused, and that no torch is needed."""

from __future__ import annotations

import inspect
import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from nested import inputs_of

from groupwise.algorithm import KL, BatchCounts, Objective, kl_in_reward, kl_penalty, policy_loss
from groupwise.algorithm.advantages import ADVANTAGES, BASELINES, SCALES
from groupwise.algorithm.aggregate import AGGREGATIONS
from groupwise.algorithm.kl import ESTIMATORS
from groupwise.algorithm.losses import LOSSES
from groupwise.config.algorithm import KLConfig
from groupwise.config.objective import ADVANTAGE_TYPES, LOSS_TYPES, ClipLoss, GroupAdvantage, LossSection, ValueConfig
from groupwise.config.presets import PRESETS
from groupwise.config.schema import AlgorithmConfig, Config, CorrectionConfig, OptimizerConfig
from groupwise.errors import ConfigError

CLIP = {"ratio": "token", "epsilon": 0.2, "epsilon_high": None, "dual_clip": None}
GROUP = {"baseline": "group_mean", "scale": "group_std", "epsilon": 1e-4, "discount": 1.0}
FORMER_ROWS = {
    "grpo": {"kl": KL(0.04, "k3", "loss")},
    "dr_grpo": {"advantage": ("group", GROUP | {"scale": "none"}), "aggregation": "fixed"},
    "dapo": {"loss": ("clip", CLIP | {"epsilon_high": 0.28}), "aggregation": "token_mean"},
    "gspo": {"loss": ("clip", CLIP | {"ratio": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4})},
    "cispo": {"loss": ("cispo", {"ratio": "token", "epsilon": 1.0, "epsilon_high": 4.0}), "aggregation": "token_mean"},
    "rloo": {
        "advantage": ("group", GROUP | {"baseline": "leave_one_out", "scale": "none"}), "loss": ("reinforce", {}),
        "aggregation": "sequence_sum", "kl": KL(0.03, "k1", "reward"),
    },
    "reinforce++": {
        "advantage": ("group", GROUP | {"baseline": "batch_mean", "scale": "batch_std"}), "aggregation": "token_mean",
        "kl": KL(0.01, "k1", "token_reward"),
    },
    "bnpo": {"aggregation": "token_mean"},
    "ppo": {
        "advantage": ("gae", {"gamma": 1.0, "lam": 0.95, "whiten": True, "epsilon": 1e-4}), "aggregation": "token_mean",
        "kl": KL(0.02, "k1", "token_reward"),
    },
}  # fmt: skip
"""What each preset's flat row of version 0.1 made of the objective, where it is not GRPO without a KL."""


def parts(objective: Objective) -> dict[str, object]:
    """An objective by the names and settings of its functions."""
    names = {function: name for table in (LOSSES, ADVANTAGES) for name, function in table.items()}
    return {
        "advantage": (names[objective.advantage.func], objective.advantage.keywords),
        "loss": (names[objective.loss.func], objective.loss.keywords),
        "aggregation": objective.aggregation,
        "kl": objective.kl,
    }


@pytest.mark.parametrize("name", FORMER_ROWS)
def test_every_preset_does_what_its_flat_row_did(name):
    config = AlgorithmConfig(preset=name)
    plain = {"advantage": ("group", GROUP), "loss": ("clip", CLIP), "aggregation": "sequence_mean", "kl": None}
    assert parts(Objective.from_config(config)) == plain | FORMER_ROWS[name]
    assert (config.updates_per_batch, config.mask_truncated, config.correction, config.entropy) == (1, False, None, None)
    assert config.value == (ValueConfig(clip=0.2, loss_weight=0.1) if name == "ppo" else None)
    rest = KLConfig(reference_updates=1, reference_every=None, reference_mixing=1.0, skip_zero_variance=True, target=None)
    assert config.kl is None or config.kl == rest.model_copy(
        update={n: getattr(config.kl, n) for n in ("beta", "estimator", "placement")}
    )


def test_every_row_is_a_valid_config():
    assert set(get_args(AlgorithmConfig.model_fields["preset"].annotation)) == set(PRESETS)
    for name, row in PRESETS.items():
        followed = AlgorithmConfig(preset=name)
        assert AlgorithmConfig(preset=name, **row.values) == followed
        for path, value in row.settings.items():
            found = followed
            for part in path.split("."):
                found = getattr(found, part)
            assert found == value
        assert followed.model_fields_set == {"preset"}


def test_defaults_are_grpos():
    assert AlgorithmConfig(preset="grpo") == AlgorithmConfig() == Config().algorithm
    assert AlgorithmConfig().loss == ClipLoss()
    assert AlgorithmConfig().advantage == GroupAdvantage()
    assert AlgorithmConfig().kl == KLConfig()


def choices(section, name):
    return set(get_args(section.model_fields[name].annotation))


def test_every_choice_has_its_function():
    assert choices(GroupAdvantage, "baseline") == set(BASELINES)
    assert choices(GroupAdvantage, "scale") == set(SCALES)
    assert set(ADVANTAGES) == set(ADVANTAGE_TYPES)
    assert set(LOSSES) == set(LOSS_TYPES)
    for types, table in ((ADVANTAGE_TYPES, ADVANTAGES), (LOSS_TYPES, LOSSES)):
        for name, section in types.items():
            settings = set(section.model_fields) - {"type", "aggregation"}
            assert settings <= set(inspect.signature(table[name]).parameters), name
    assert choices(LossSection, "aggregation") == set(AGGREGATIONS)
    assert choices(KLConfig, "estimator") == set(ESTIMATORS)


@pytest.mark.parametrize(("functions", "sections"), [(LOSSES, LOSS_TYPES), (ADVANTAGES, ADVANTAGE_TYPES)])
def test_a_function_called_directly_computes_what_its_section_says(functions: dict, sections: dict):
    for name, section in sections.items():
        shared = inspect.signature(functions[name]).parameters.keys() & section.model_fields.keys()
        given = {key: inspect.signature(functions[name]).parameters[key].default for key in shared}
        assert given == {key: section.model_fields[key].default for key in shared}, name


def test_explicit_keys_win_and_stay_explicit():
    config = AlgorithmConfig(preset="dapo", loss={"epsilon_high": 0.5}, advantage={"scale": "none"})
    assert (config.loss.epsilon_high, config.advantage.scale, config.loss.aggregation) == (0.5, "none", "token_mean")
    assert config.model_fields_set == {"preset", "loss", "advantage"}
    assert config.loss.model_fields_set == {"epsilon_high"}
    config.preset = "gspo"
    assert config.loss == ClipLoss(ratio="sequence", epsilon=3e-4, epsilon_high=0.5)
    assert config.advantage.scale == "none"
    config.preset = "grpo"
    assert (config.loss.epsilon, config.loss.ratio) == (0.2, "token")


def test_nothing_of_a_former_preset_stays_behind():
    config = AlgorithmConfig(preset="dapo")
    config.preset = "grpo"
    assert config.loss.epsilon_high is None
    assert config == AlgorithmConfig()


def test_another_divergence_brings_its_own_threshold():
    for divergence, limit in (("tv", 0.15), ("kl", 0.05)):
        assert AlgorithmConfig(preset="dppo", loss={"divergence": divergence}).loss.limit == limit
    assert AlgorithmConfig(preset="dppo", loss={"divergence": "kl", "threshold": 0.3}).loss.limit == 0.3


def test_an_explicit_default_wins_over_the_preset():
    assert AlgorithmConfig(preset="dapo", kl={"beta": 0.04}).beta == 0.04
    assert AlgorithmConfig(preset="dapo", loss={"epsilon_high": None}).loss.epsilon_high is None


def test_a_resolved_config_reads_back_the_same():
    for name in PRESETS:
        config = Config(algorithm={"preset": name, "loss": {"aggregation": "fixed"}})
        again = Config.model_validate(config.model_dump())
        assert parts(Objective.from_config(again.algorithm)) == parts(Objective.from_config(config.algorithm))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"loss": {"epsilon": 0}}, "greater than 0"),
        ({"loss": {"epsilon": -0.1}}, "greater than 0"),
        ({"loss": {"epsilon_high": 0}}, "greater than 0"),
        ({"kl": {"beta": -1}}, "greater than 0"),
        ({"kl": {"beta": 0}}, "write algorithm.kl=null for none"),
        ({"loss": {"dual_clip": 1.0}}, "greater than 1"),
        ({"preset": "ppg"}, "grpo"),
        ({"loss": {"dual_clip": 1.1}}, "above the upper clip bound 1.2"),
        ({"preset": "dapo", "loss": {"dual_clip": 1.25}}, "above the upper clip bound 1.28"),
        ({"delta": 4}, "algorithm.delta has moved: write algorithm.loss.dual_clip, which is the same cap"),
        ({"preset": "cispo", "loss": {"dual_clip": 8}}, "algorithm.loss.dual_clip is not a setting of type cispo, but of clip"),
        ({"advantage": {"baseline": "none"}}, "divided by about 0; set baseline to 'group_mean'"),
        (
            {"preset": "ppo", "advantage": {"scale": "group_std"}},
            "algorithm.advantage.scale is not a setting of type gae, but of group",
        ),
        ({"advantage": {"baseline": "none", "scale": "batch_std"}}, "divided by about 0; set baseline to 'batch_mean'"),
        ({"advantage": {"baseline": "none", "scale": "centred_std"}}, "divided by about 0; set baseline to 'batch_mean'"),
        ({"kl": {"placement": "token_reward"}}, "the KL would be divided by about 0"),
        ({"preset": "rloo", "updates_per_batch": 2}, "after the first update the batch is off-policy"),
        ({"preset": "ppo", "advantage": {"gamma": 0}}, "greater than 0"),
        ({"preset": "ppo", "advantage": {"lam": 1.5}}, "algorithm.advantage.lam is 1.5, but must be at most 1"),
        ({"preset": "ppo", "value": {"clip": 0}}, "greater than 0"),
    ],
)
def test_bad_settings_are_refused(settings: dict, sentence: str):
    with pytest.raises(ConfigError, match=sentence):
        AlgorithmConfig(**settings)


@pytest.mark.parametrize(
    ("section", "settings", "sentence"),
    [
        (AlgorithmConfig, {"beta": 0}, "algorithm.beta has moved: write algorithm.kl.beta, and in place of 0 algorithm.kl=null"),
        (KLConfig, {"kl_target": 0.1}, "algorithm.kl.kl_target is not a setting: write algorithm.kl.target"),
        (ClipLoss, {"epsilon": 0}, "algorithm.loss.epsilon is 0, but must be greater than 0: "),
        (
            ClipLoss,
            {"delta": 4.0},
            "algorithm.loss.delta is not a setting: write algorithm.loss.dual_clip, which is the same cap",
        ),
        (CorrectionConfig, {"cap": 0.5}, "algorithm.correction.cap is 0.5, but must be at least 1: largest weight"),
        (OptimizerConfig, {"lr": 1e-6}, "optimizer.lr is not a setting: did you mean optimizer.learning_rate?"),
    ],
)
def test_a_section_built_in_python_answers_as_yaml_does(section: type, settings: dict, sentence: str):
    with pytest.raises(ConfigError) as refused:
        section(**settings)
    assert str(refused.value).startswith(sentence)


def every_combination(estimator: str) -> Iterator[dict[str, dict[str, object]]]:
    options = lambda section, name: get_args(section.model_fields[name].annotation)  # noqa: E731
    advantages = [
        *({"baseline": b, "scale": s} for b in options(GroupAdvantage, "baseline") for s in options(GroupAdvantage, "scale")),
        *({"type": "gae", "whiten": whiten} for whiten in (True, False)),
    ]  # fmt: skip
    losses = [
        *({"type": kind, "ratio": r, "epsilon": 0.2, "epsilon_high": 0.3} for kind in ("clip", "cispo") for r in ("token", "sequence")),
        *({"type": kind} for kind in ("reinforce", "sapo", "vespo")),
    ]  # fmt: skip
    kls = [{"beta": 0.1, "estimator": estimator, "placement": p} for p in options(KLConfig, "placement")]
    for advantage, loss, aggregation, kl in itertools.product(advantages, losses, options(LossSection, "aggregation"), kls):
        yield {"advantage": advantage, "loss": loss | {"aggregation": aggregation}, "kl": kl}


@pytest.mark.parametrize("estimator", [pytest.param(e, marks=[pytest.mark.slow] * (e != "k3")) for e in ESTIMATORS])
def test_every_combination_works_or_is_refused(estimator):
    """Two groups, one without variance: advantages of a size that can be learnt from, a finite loss, and a gradient."""
    sequence_T = torch.tensor([0, 0, 1, 2, 3, 3, 3])
    old_logprobs_T, reference_logprobs_T = (
        -torch.rand(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) - 0.1
    )
    rewards, values = [[1.0, 0.0], [1.0, 1.0]], [[[0.5, 0.1], [0.2]], [[0.3], [0.1, 0.9, 0.4]]]
    worked = refused = 0
    for chosen in every_combination(estimator):
        try:
            objective = Objective.from_config(AlgorithmConfig(**chosen))
        except ConfigError:  # for what, the test above says
            refused += 1
            continue
        advantages_T = advantages_as_trained(objective, rewards, values, old_logprobs_T, reference_logprobs_T, sequence_T)
        assert advantages_T.abs().max() < 10, chosen
        logprobs_T = (old_logprobs_T + 0.1 * advantages_T).requires_grad_()
        counts = BatchCounts(completions=4, tokens=7, max_tokens=4)
        loss, _ = policy_loss(
            objective,
            logprobs_T=logprobs_T,
            old_logprobs_T=old_logprobs_T,
            advantages_T=advantages_T,
            reference_logprobs_T=reference_logprobs_T,
            sequence_T=sequence_T,
            weights_T=objective.weights(torch.bincount(sequence_T), sequence_T, counts, torch.float64),
        )
        loss.backward()
        assert loss.isfinite()
        assert 0 < logprobs_T.grad.abs().max() < 50, chosen
        worked += 1
    # per 28 losses with their sums: group_std for 2 baselines x 3 placements, and 2 x token_reward; batch_std and
    # centred_std for none x 3 placements
    assert (worked, refused) == ((18 * 3 - 14) * 28, 14 * 28)


def advantages_as_trained(objective, rewards, values, old_logprobs_T, reference_logprobs_T, sequence_T) -> torch.Tensor:
    """By the way that the objective's properties prescribe, for the batch of the test above."""
    cut = {"beta": objective.beta, "estimator": objective.kl.estimator}
    penalties = None
    if objective.kl_in_reward:
        taken = kl_in_reward(old_logprobs_T, reference_logprobs_T, sequence_T, 4, **cut).tolist()
        rewards = [[r - taken[2 * g + i] for i, r in enumerate(group)] for g, group in enumerate(rewards)]
    elif objective.kl_in_token_reward:
        a, b, c, d = kl_penalty(old_logprobs_T, reference_logprobs_T, **cut).split([2, 1, 1, 3])
        penalties = [[a.tolist(), b.tolist()], [c.tolist(), d.tolist()]]
    inputs = inputs_of(rewards, [[2, 1], [1, 3]], penalties=penalties, values=values)
    return objective.advantages(inputs).per_token(inputs)


def test_objective_takes_every_setting():
    loss = {"type": "clip", "epsilon": 0.1, "epsilon_high": 0.3, "dual_clip": 4.0}
    objective = Objective.from_config(
        AlgorithmConfig(preset="rloo", loss=loss, advantage={"scale": "batch_std", "epsilon": 1e-6})
    )
    assert parts(objective) == {
        "advantage": ("group", {"baseline": "leave_one_out", "scale": "batch_std", "epsilon": 1e-6, "discount": 1.0}),
        "loss": ("clip", {"ratio": "token", "epsilon": 0.1, "epsilon_high": 0.3, "dual_clip": 4.0}),
        "aggregation": "sequence_sum",
        "kl": KL(0.03, "k1", "reward"),
    }
    weighted = Objective.from_config(AlgorithmConfig(preset="gspo", kl={"importance_weighted": True}))
    assert weighted.kl == KL(0.04, "k3", "loss", "sequence")


def test_the_table_needs_no_torch():
    code = "import sys, groupwise.config.schema, groupwise.config.presets; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
