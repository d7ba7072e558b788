"""The objective's sections: what lies under what is written, what cannot be written, and where former keys have gone."""

import re
from typing import Any

import pytest
import yaml

from groupwise.config import Config, build_config, build_known, dump_config, load_config
from groupwise.config.algorithm import AlgorithmConfig, EntropyConfig, KLConfig
from groupwise.config.fields import field_paths, sections
from groupwise.config.former import FORMER
from groupwise.config.load import load_run_config
from groupwise.config.objective import (
    LOSS_TYPES,
    CispoLoss,
    ClipLoss,
    DppoLoss,
    GaeAdvantage,
    GroupAdvantage,
    OwnLoss,
    ReinforceLoss,
    ValueConfig,
)
from groupwise.config.presets import PRESETS
from groupwise.config.section import REGISTERED
from groupwise.errors import ConfigError
from groupwise.evaluation.judging import sampling_settings
from groupwise.rollout import rollout_settings


def chosen(*overrides: str) -> AlgorithmConfig:
    return load_config(None, overrides).algorithm


def refusals(settings: dict) -> list[str]:
    """What is said of ``settings`` of the algorithm as YAML, as overrides, as Python's arguments and by assignment."""
    flat = {f"{section}.{name}" if name else section: value for section, name, value in _pairs(settings)}
    words = [f"algorithm.{path}={'null' if value is None else value}" for path, value in flat.items()]

    def assign() -> None:
        config = Config()
        for name, value in settings.items():
            setattr(config.algorithm, name, value)

    said = []
    for attempt in (
        lambda: build_config({"algorithm": settings}),
        lambda: load_config(None, words),
        lambda: load_config(None, {f"algorithm.{path}": value for path, value in flat.items()}),
        lambda: Config(algorithm=settings),
        assign,
    ):
        with pytest.raises(ConfigError) as caught:
            attempt()
        said.append(str(caught.value))
    return said


def _pairs(settings):
    for section, value in settings.items():
        if isinstance(value, dict):
            yield from ((section, name, inner) for name, inner in value.items())
        else:
            yield section, "", value


# What lies under what is written.


def test_unwritten_settings_of_a_section_follow_the_preset():
    algorithm = chosen("preset=dapo", "loss.epsilon=0.1", "kl.beta=0.02")
    assert algorithm.loss == ClipLoss(epsilon=0.1, epsilon_high=0.28, aggregation="token_mean")
    assert algorithm.kl == KLConfig(beta=0.02), "DAPO has none, so that the rest are the section's own defaults"
    assert chosen("preset=ppo", "kl.beta=0.5").kl == KLConfig(beta=0.5, estimator="k1", placement="token_reward")


def test_of_another_type_only_the_aggregation_follows():
    algorithm = chosen("preset=dapo", "loss.type=cispo")
    assert algorithm.loss == CispoLoss(aggregation="token_mean"), "not DAPO's clip range"
    assert chosen("preset=ppo", "kl=null", "advantage.type=group").advantage == GroupAdvantage()
    assert chosen("preset=rloo", "loss.type=clip", "loss.epsilon=0.3").loss == ClipLoss(epsilon=0.3, aggregation="sequence_sum")


def test_null_takes_the_presets_section_away():
    assert chosen("kl=null").kl is None
    assert chosen("preset=ppo", "algorithm.kl=null").kl is None


@pytest.mark.parametrize("section", ["null", "{}"])
def test_a_value_is_there_exactly_where_one_is_learned(section):
    assert chosen("preset=ppo").value == ValueConfig(clip=0.2)
    assert chosen("advantage.type=gae").value == ValueConfig()
    assert chosen("preset=ppo", "value.critic=copy").value == ValueConfig(critic="copy", clip=0.2)
    assert chosen("preset=ppo", f"algorithm.value={section}").value == ValueConfig(clip=0.2)
    assert chosen("preset=ppo", "kl=null", "advantage.type=group").value is None
    assert chosen().value is None
    for said in refusals({"value": {"critic": "copy"}}):
        assert said.startswith("algorithm.value is set, but a value is learned only with algorithm.advantage.type=gae")


def test_an_override_goes_into_a_section_that_a_file_left_out_or_wrote(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("algorithm: {kl: null, loss: {epsilon: 0.1}, entropy: {bonus: 0.01}}\n")
    algorithm = load_config(path, ["algorithm.kl.beta=0.02", "algorithm.loss={epsilon_high: 0.3}", "entropy=null"]).algorithm
    assert algorithm.kl == KLConfig(beta=0.02)
    assert algorithm.loss == ClipLoss(epsilon=0.1, epsilon_high=0.3)
    assert algorithm.entropy is None


@pytest.mark.parametrize(
    ("written", "overrides", "expected", "left"),
    [
        ("loss: {epsilon: 0.1}", ["algorithm.preset=rloo"], {"preset": "rloo"}, "loss.epsilon left out: .* type clip, .* is reinforce"),
        ("loss: {epsilon: 0.1, aggregation: fixed}", ["algorithm.loss.type=reinforce"],
         {"loss": {"type": "reinforce", "aggregation": "fixed"}}, "loss.epsilon left out"),
        ("loss: {epsilon: 0.1}", ["algorithm.loss.type=cispo", "algorithm.loss.epsilon=0.5"],
         {"loss": {"type": "cispo", "epsilon": 0.5}}, None),
        ("loss: {type: 'a.py:f', settings: {x: 1}}", ["algorithm.loss={type: 'b.py:g'}"], {"loss": {"type": "b.py:g"}}, None),
        ("loss: {type: 'a.py:f', settings: {x: 1}}", ["algorithm.loss.type=b.py:g"], {"loss": {"type": "b.py:g"}}, "loss.settings left"),
        ("loss: {type: 'a.py:f', settings: {x: 1}}", ["algorithm.loss.settings.y=2", "algorithm.loss.type=b.py:g"],
         {"loss": {"type": "b.py:g", "settings": {"y": 2}}}, None),
        ("loss: {type: 'a.py:f', settings: {x: 1}}", ["algorithm.loss.settings.y=2"],
         {"loss": {"type": "a.py:f", "settings": {"x": 1, "y": 2}}}, None),
        ("loss: {epsilon: 0.1}", ["algorithm.loss={type: clip, epsilon_high: 0.3}"], {"loss": {"epsilon_high": 0.3}}, None),
        ("loss: {epsilon: 0.1}", {"algorithm": {"loss": {"type": "reinforce"}}}, {"loss": {"type": "reinforce"}}, None),
        ("advantage: {scale: none}", ["algorithm.advantage.type=maxrl"], {"advantage": {"type": "maxrl"}}, "advantage.scale left out"),
        ("preset: ppo\n  value: {critic: copy}", ["algorithm.preset=grpo"], {}, "algorithm.value left out"),
        ("preset: ppo\n  value: {critic: copy}", ["algorithm.preset=dapo", "advantage.type=gae"],
         {"preset": "dapo", "advantage": {"type": "gae"}, "value": {"critic": "copy"}}, None),
    ],
)  # fmt: skip
def test_a_files_settings_of_another_type_do_not_survive_an_override(tmp_path, caplog, written, overrides, expected, left):
    path = tmp_path / "run.yaml"
    path.write_text(f"algorithm:\n  {written}\n")
    if isinstance(overrides, list):
        overrides = [one if one.startswith("algorithm.") else f"algorithm.{one}" for one in overrides]
    assert load_config(path, overrides).algorithm == AlgorithmConfig(**expected)
    assert re.search(left, caplog.text) if left else not caplog.text


def test_a_section_made_in_python_is_taken_whole():
    assert AlgorithmConfig(preset="ppo", kl=KLConfig(beta=0.1)).kl == KLConfig(beta=0.1)
    assert AlgorithmConfig(loss=CispoLoss()).loss == CispoLoss()
    assert AlgorithmConfig(preset="dapo", loss=ClipLoss()).loss.aggregation == "sequence_mean"
    given = KLConfig(beta=0.1)
    Config(algorithm={"kl": given}).algorithm.kl.beta = 0.2
    assert given.beta == 0.1


# Assignment.


def test_what_was_assigned_stays_and_the_rest_follows_the_preset():
    config = Config()
    config.algorithm.kl.beta = 0.02
    config.algorithm.loss.epsilon = 0.11
    config.algorithm.preset = "dapo"
    assert config.algorithm.loss == ClipLoss(epsilon=0.11, epsilon_high=0.28, aggregation="token_mean")
    assert config.algorithm.kl == KLConfig(beta=0.02)
    config.algorithm.kl = None
    config.algorithm.advantage = {"type": "gae", "lam": 1.0}
    assert config.algorithm.advantage == GaeAdvantage(lam=1.0)
    assert config.algorithm.value == ValueConfig()
    config.algorithm.preset = "grpo"
    assert config.algorithm.kl is None
    assert config.algorithm.needs_values
    config.algorithm.loss = {"type": "reinforce"}
    assert config.algorithm.loss == ReinforceLoss()


def test_samples_of_rounded_weights_are_corrected_for_and_say_nothing_of_the_policy():
    plain, rounded = load_config(None, []), load_config(None, ["rollout.quantization=8bit"])
    assert (plain.correction_level, plain.samples_are_the_policys) == ("none", True)
    assert (rounded.correction_level, rounded.samples_are_the_policys) == ("token", False)
    assert load_config(None, ["rollout.quantization=8bit", "algorithm.correction=null"]).correction_level == "none"
    assert build_config(yaml.safe_load(dump_config(rounded))) == rounded
    for engine in ("vllm", "transformers", "mine.py:Mine"):
        with pytest.raises(ConfigError, match=f"quantization is 8bit, but engine is {engine}, and the built-in engine alone"):
            load_config(None, ["rollout.quantization=8bit", f"rollout.engine={engine}"])


@pytest.mark.parametrize("sampler", ["engine=auto", "engine=vllm", "engine=mine.py:Mine", "quantization=8bit"])
def test_nothing_is_weighted_where_samples_are_to_stay_uncorrected(sampler):
    sampler = f"rollout.{sampler}"
    config = load_config(None, [sampler, "rollout.ahead=1", "algorithm.stale_samples=uncorrected"])
    assert (config.correction_level, config.algorithm.correction) == ("none", None)
    assert build_config(yaml.safe_load(dump_config(config))) == config
    assert load_config(None, [sampler, "rollout.ahead=1"]).correction_level == "token"


def test_rounded_weights_are_for_training_alone():
    """What is judged is the policy."""
    config = load_config(None, ["rollout.quantization=8bit"])
    assert rollout_settings(config.rollout).in_8_bits
    assert not rollout_settings(load_config(None, []).rollout).in_8_bits
    assert not any(sampling_settings(config, mode).in_8_bits for mode in ("greedy", "sampled"))


def test_what_the_engine_wants_corrected_outlives_an_assignment():
    config = load_config(None, ["rollout.engine=vllm"])
    assert config.correction_level == "token"
    config.algorithm.mask_truncated = True
    config.algorithm.preset = "dapo"
    assert config.correction_level == "token"
    config.algorithm.correction = None
    config.algorithm.updates_per_batch = 2
    assert config.correction_level == "none"


def test_a_refused_assignment_changes_nothing():
    config = Config(algorithm={"loss": {"epsilon": 0.1}})
    before = config.model_copy(deep=True)
    with pytest.raises(ConfigError, match="set baseline to 'group_mean'"):
        config.algorithm.advantage.baseline = "none"
    assert config.algorithm.advantage.model_fields_set == before.algorithm.advantage.model_fields_set
    for name, value in (("loss", {"type": "reinforce", "epsilon": 0.2}), ("kl", {"beta": 0}), ("preset", "ppg")):
        with pytest.raises(ConfigError):
            setattr(config.algorithm, name, value)
    with pytest.raises(ConfigError, match=re.escape("assign a whole section, such as config.algorithm.loss = {'type': 'cispo'}")):
        config.algorithm.loss.type = "cispo"
    with pytest.raises(ConfigError, match=re.escape("algorithm.loss.tau_positive is not a setting of type clip, but of sapo")):
        config.algorithm.loss.tau_positive = 2.0
    assert config == before


def test_a_copy_with_a_section_changed_is_that_config():
    config = Config(algorithm={"preset": "ppo"})
    copied = config.algorithm.model_copy(update={"kl": None})
    assert copied == AlgorithmConfig(preset="ppo", kl=None)
    assert config.algorithm.kl is not None


# What cannot be written.


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"loss": {"type": "reinforce", "epsilon": 0.1}}, "loss.epsilon is not a setting of type reinforce, but of clip, cispo, gmpo"),
        ({"loss": {"type": "cispo", "dual_clip": 3.0}}, "loss.dual_clip is not a setting of type cispo, but of clip: leave it out"),
        ({"loss": {"type": "gmpo", "ratio": "token"}}, "loss.ratio is not a setting of type gmpo, but of clip, cispo"),
        ({"advantage": {"type": "gae", "scale": "none"}}, "algorithm.advantage.scale is not a setting of type gae, but of group"),
        ({"advantage": {"gamma": 0.9}}, "algorithm.advantage.gamma is not a setting of type group, but of gae"),
        ({"loss": {"type": "clop"}}, f"loss.type is 'clop', but must be one of {', '.join(LOSS_TYPES)} (did"),
        ({"loss": {"type": "my_loss.py"}}, "or a function of your own, such as my_loss.py:loss"),
        ({"advantage": {"type": "groop"}}, "(did you mean group?)"),
        ({"loss": {"type": "my_loss.py:loss", "epsilon": 0.1}}, "is not a setting of a function of your own, whose settings are"),
        ({"kl": {"beta": 0}}, "algorithm.kl.beta is 0, but a KL has a weight above 0: write algorithm.kl=null for none"),
        ({"kl": {"beta": -1.0}}, "algorithm.kl.beta is -1.0, but must be greater than 0"),
        ({"kl": {"gain": 0.5}}, "algorithm.kl.gain is 0.5, but without algorithm.kl.target beta stays as it is"),
        ({"kl": {"importance_weighted": True, "placement": "reward"}}, "algorithm.kl.importance_weighted is true, but placement is reward"),
        ({"kl": {"reference_mixing": 0.5}}, "the reference is never renewed; set reference_every"),
        ({"advantage": {"scale": "none", "epsilon": 1e-3}}, "algorithm.advantage.epsilon is 0.001, but scale is none"),
        ({"advantage": {"type": "gae", "whiten": False, "epsilon": 1e-3}}, "epsilon is 0.001, but whiten is false"),
        ({"kl": {"placement": "reward", "skip_zero_variance": False}}, "algorithm.kl.skip_zero_variance is false, but placement is rew"),
        ({"kl": {"reference_every": 1, "reference_updates": 2}}, "reference_updates is 2, but with reference_every 1"),
        ({"kl": {"reference_every": 1}}, "so the reference is the policy itself wherever the KL is measured, and it is always 0"),
        ({"kl": {"reference_every": 1, "placement": "reward"}, "updates_per_batch": 4}, "and placement 'reward', so the reference is"),
        ({"kl": {"target": 0.05, "gain": 5}}, "algorithm.kl.gain is 5, but must be less than 5"),
        ({"loss": {"delta": 4.0}}, "algorithm.loss.delta is not a setting: write algorithm.loss.dual_clip, which is the same cap"),
        ({"loss": {"surrogate": "clip"}}, "algorithm.loss.surrogate is not a setting: write algorithm.loss.type"),
        ({"advantage": {"gae_lambda": 0.9}}, "algorithm.advantage.gae_lambda is not a setting: write algorithm.advantage.lam"),
        ({"entropy": {"floor": 0.2}}, "nothing would lift the entropy; set bonus"),
        ({"entropy": {"bonus": 0.0}}, "it would do nothing: set one of them, or write algorithm.entropy=null"),
        ({"preset": "ppo", "value": {"critic_learning_rate": 1e-3}}, "critic is shared, so no second model is learned"),
        ({"preset": "ppo", "value": {"critic": "copy", "trains_trunk": True}}, "which the value's error always reaches"),
        ({"advantage": {"type": "maxrl"}, "kl": {"placement": "reward"}}, "is for rewards without a KL in them; set placement to 'loss'"),
        ({"loss": 0.2}, "algorithm.loss is 0.2, but must be a section of settings, such as {type: clip}"),
        ({"kl": 0.04}, "algorithm.kl is 0.04, but must be a section of settings"),
    ],
)  # fmt: skip
def test_what_would_do_nothing_or_means_nothing_gets_one_sentence(settings, said):
    for sentence in refusals(settings):
        assert said in sentence
        assert "\n" not in sentence


def test_the_hint_is_that_of_the_type():
    of_cispo, of_gmpo = ({"loss": {"type": kind, "epsilon": -1}} for kind in ("cispo", "gmpo"))
    assert all(
        said.endswith("the weight is at least 1 - epsilon; at 1 or more there is no lower bound") for said in refusals(of_cispo)
    )
    assert all("clip range of each token's log-ratio" in said for said in refusals(of_gmpo))


# Functions of one's own.


def test_a_function_of_ones_own_has_settings_of_its_own():
    loss = chosen("loss.type=my_loss.py:loss", "algorithm.loss.settings.tau=2", "algorithm.loss.settings.sides=[1, 2]").loss
    assert loss == OwnLoss(type="my_loss.py:loss", settings={"tau": 2, "sides": [1, 2]})
    config = Config(algorithm={"advantage": {"type": "package.module:advantage", "settings": {"a": {"b": 1}}}})
    assert Config.model_validate(yaml.safe_load(dump_config(config))) == config


def test_a_registered_name_is_a_type(monkeypatch):
    monkeypatch.setitem(REGISTERED, "loss", {"mine": print})
    assert chosen("loss.type=mine", "loss.settings={x: 1}").loss == OwnLoss(type="mine", settings={"x": 1})
    with pytest.raises(ConfigError, match=re.escape(", mine (did you mean mine?)")):
        chosen("loss.type=mime")
    with pytest.raises(ConfigError, match=r"algorithm\.advantage\.type is 'mine'"):
        chosen("advantage.type=mine")


# Former keys.


@pytest.mark.parametrize("name", sorted(FORMER))
def test_a_former_key_is_answered_with_its_place(name):
    for said in refusals({name: 0.5}):
        assert said.startswith(f"algorithm.{name} has moved: write algorithm.")
    place = re.match(r"[\w.]+", FORMER[name]).group()
    assert place in field_paths()


def test_a_former_key_without_its_section_is_answered_too():
    with pytest.raises(ConfigError, match=re.escape("algorithm.kl_target has moved: write algorithm.kl.target")):
        load_config(None, ["kl_target=0.1"])
    assert chosen("beta=0.3").kl.beta == 0.3, "whose last part is still unique"


OLDER = {  # of 0.1, which wrote all of them
    "preset": "grpo", "epsilon": 0.2, "epsilon_high": None, "beta": 0.04, "skip_zero_variance": True, "updates_per_batch": 1,
    "reference_updates": 1, "advantage_epsilon": 1e-4, "baseline": "group_mean", "scale": "group_std", "ratio_level": "token",
    "surrogate": "clip", "dual_clip": None, "delta": None, "aggregation": "sequence_mean", "kl_estimator": "k3", "kl_placement": "loss",
    "kl_correction": False, "gamma": 1.0, "gae_lambda": 0.95, "value_clip": None, "value_loss_weight": 0.1, "value_learning_rate": 1e-3,
    "critic": "shared", "critic_learning_rate": 1e-5, "value_trains_trunk": False, "mask_truncated": False, "entropy_bonus": 0.0,
    "entropy_floor": None, "top_entropy_share": 1.0, "sampler_correction": "none", "sampler_correction_mode": "truncate",
    "sampler_correction_cap": 2.0, "stale_samples": "decoupled", "kl_target": None, "kl_gain": 0.1, "reference_every": None,
    "reference_mixing": 1.0,
}  # fmt: skip
RLOO = {
    "baseline": "leave_one_out",
    "scale": "none",
    "surrogate": "reinforce",
    "aggregation": "sequence_sum",
    "kl_estimator": "k1",
}
CRITIC = {"critic": "copy", "critic_learning_rate": 1e-3}
PPO = {
    "baseline": "value",
    "scale": "batch_std",
    "aggregation": "token_mean",
    "kl_estimator": "k1",
    "kl_placement": "token_reward",
}


@pytest.mark.parametrize(
    ("older", "now"),
    [
        ({}, {}),
        ({"beta": 0.0, "epsilon": 0.1}, {"kl": None, "loss": {"epsilon": 0.1}}),
        ({"delta": 4.0}, {"loss": {"dual_clip": 4.0}}),
        ({"preset": "rloo", "beta": 0.03, "kl_placement": "reward", **RLOO}, {"preset": "rloo"}),
        ({"preset": "ppo", "beta": 0.02, "value_clip": 0.2, **PPO}, {"preset": "ppo"}),
        ({"preset": "ppo", "beta": 0.0, "value_clip": None, **PPO, "scale": "none", "gamma": 0.9, **CRITIC},
         {"preset": "ppo", "kl": None, "advantage": {"whiten": False, "gamma": 0.9}, "value": {**CRITIC, "clip": None}}),
        ({"preset": "cispo", "surrogate": "cispo", "epsilon": 1.0, "epsilon_high": 4.0, "aggregation": "token_mean", "beta": 0.0},
         {"preset": "cispo"}),
        ({"scale": "none", "advantage_epsilon": 1e-6, "kl_placement": "reward", "kl_estimator": "k1", "skip_zero_variance": False},
         {"advantage": {"scale": "none"}, "kl": {"placement": "reward", "estimator": "k1"}}),
        ({"reference_every": 1, "reference_updates": 3, "reference_mixing": 0.5},
         {"kl": {"reference_every": 1, "reference_mixing": 0.5}}),
        ({"entropy_bonus": 0.1, "entropy_floor": 2.0, "sampler_correction": "sequence", "kl_target": 0.1, "kl_gain": 0.5},
         {"entropy": {"bonus": 0.1, "floor": 2.0}, "correction": {"level": "sequence"}, "kl": {"target": 0.1, "gain": 0.5}}),
    ],
)  # fmt: skip
def test_the_folder_of_an_older_run_is_read(older, now, tmp_path):
    settings = {"algorithm": OLDER | older, "training": {"steps": 7}}
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(settings))
    known, left_out = build_known(settings)
    assert known == load_run_config(path) == Config(algorithm=now, training={"steps": 7})
    assert left_out == []
    with pytest.raises(ConfigError, match="has moved: write"):
        load_config(path)


def test_what_cannot_be_read_of_a_run_is_left_out_by_type():
    config, left_out = build_known({"algorithm": {"preset": "dapo", "loss": {"type": "clop", "epsilon": 0.1}}})
    assert left_out == ["algorithm.loss"]
    assert config.algorithm == AlgorithmConfig(preset="dapo")
    assert build_known({"algorithm": {"beta": [1], "top_entropy_share": "much", "critic": {}}})[1] == [
        "algorithm.kl.beta",
        "algorithm.entropy.top_share",
    ]


# The whole.


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_reads_back_the_same(preset):
    config = Config(algorithm={"preset": preset})
    again = build_config(yaml.safe_load(dump_config(config)))
    assert again == config
    assert again.algorithm.model_fields_set == set(AlgorithmConfig.model_fields), "all of it is written now"


def test_sections_that_come_in_types_are_known_with_all_of_them():
    assert {kind.__name__ for kind in sections()["algorithm.loss"]} >= {"ClipLoss", "CispoLoss", "DppoLoss", "OwnLoss"}
    assert sections()["algorithm.kl"] == (KLConfig,)
    assert (DppoLoss().limit, DppoLoss(divergence="kl").limit, DppoLoss(threshold=0.3).limit) == (0.15, 0.05, 0.3)
    assert EntropyConfig().bonus == 0, "what a run without the section has"


@pytest.mark.parametrize(
    "rewards",
    [{"normalise": "mean_std"}, {"functions": [{"function": "correctness", "normalise": "mean_std"}]}],
    ids=["sum", "one"],
)
def test_rewards_around_zero_are_refused_where_their_mean_divides(rewards: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is maxrl, which divides by their mean: normalise by std"):
        build_config({"algorithm": {"preset": "maxrl"}, "rewards": rewards})
    build_config({"algorithm": {"preset": "maxrl"}, "rewards": {"normalise": "std"}})
    build_config({"rewards": rewards})
    build_config({"algorithm": {"preset": "maxrl"}, "rewards": {**rewards, "clip": [0, 5]}})


def test_a_reward_that_is_logged_alone_may_be_around_zero() -> None:
    functions = ["correctness", {"function": "length", "normalise": "mean_std", "weight": 0}]
    build_config({"algorithm": {"preset": "maxrl"}, "rewards": {"functions": functions}})


def test_a_correction_that_nobody_asked_for_is_not_written_where_it_would_do_nothing() -> None:
    config = load_config(None, ["rollout.engine=vllm", "rollout.ahead=1", "algorithm.stale_samples=behaviour"])
    assert config.algorithm.correction is None
    assert build_config(yaml.safe_load(dump_config(config))) == config
    assert load_config(None, ["rollout.engine=vllm", "rollout.ahead=1"]).algorithm.correction is not None
