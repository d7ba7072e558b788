"""A setting that would do nothing beside the others is refused; one of the file, beside overrides, is left out."""

import logging

import pytest
import yaml

from groupwise.config import load_config
from groupwise.config.load import build_config, build_known, dump_config, load_run_config
from groupwise.config.schema import Config
from groupwise.errors import ConfigError

INERT = {
    "data.prompt_column": (
        "q",
        "data.source is arithmetic, whose generator has no such thing: leave it out, or name another source",
    ),
    "data.split": ("test", "data.source is arithmetic"),
    "data.eval_split": ("test", "the generator makes the held-out problems"),
    "data.folder": ("/data", "data.source is arithmetic, whose generator has no such thing"),
    "rewards.processes": (4, "no reward function has isolate: leave it out, or set isolate in an entry of rewards.functions"),
    "algorithm.stale_samples": ("uncorrected", "rollout.ahead is 0, so every batch is sampled by the newest weights"),
    "optimizer.final_fraction": (0.1, "optimizer.schedule is constant: leave it out, or set schedule to linear or cosine"),
    "output.project": ("mine", "output.trackers does not name wandb or trackio: leave it out, or add it there"),
    "output.offline": (True, "output.trackers does not name wandb"),
    "output.adapter_only": (True, "model.lora is null, so there is no adapter"),
    "model.max_memory": (
        {0: "20GiB"},
        "model.device_map is null, so the model lies on one device: leave it out, or set device_map",
    ),
}
ACTS = {
    "data.prompt_column": {"data": {"source": "gsm8k"}},
    "data.split": {"data": {"source": "gsm8k"}},
    "data.eval_split": {"data": {"source": "gsm8k"}},
    "data.folder": {"data": {"source": "gsm8k"}},
    "rewards.processes": {"rewards": {"functions": [{"function": "accuracy", "isolate": "process", "timeout_s": 1}]}},
    "algorithm.stale_samples": {"rollout": {"ahead": 1}},
    "optimizer.final_fraction": {"optimizer": {"schedule": "linear"}},
    "output.project": {"output": {"trackers": ["trackio"]}},
    "output.offline": {"output": {"trackers": ["jsonl", "wandb"]}},
    "output.adapter_only": {"model": {"lora": {}}},
    "model.max_memory": {"model": {"device_map": "auto"}},
}
"""What makes each act."""


def settings(path, value, more=None):
    section, name = path.split(".")
    more = more or {}
    return {**more, section: {**more.get(section, {}), name: value}}


@pytest.mark.parametrize("path", INERT)
def test_a_setting_that_would_do_nothing_is_refused(path):
    value, reason = INERT[path]
    written = {True: "true"}.get(value, repr(value)) if isinstance(value, bool) else repr(value)
    for refused in (lambda: build_config(settings(path, value)), lambda: Config(**settings(path, value)),
                    lambda: load_config(None, {path: value})):  # fmt: skip
        with pytest.raises(ConfigError) as error:
            refused()
        assert str(error.value).startswith(f"{path} is {written}, but {reason}")


def test_arguments_of_a_template_that_is_not_asked_are_refused():
    given = {"template_arguments": {"enable_thinking": False}}
    with pytest.raises(
        ConfigError, match=r"prompt\.style is plain, which asks no chat template: leave it out, or set style to chat"
    ):
        Config(prompt={"style": "plain", **given})
    assert Config(prompt=given).prompt.template_arguments == {"enable_thinking": False}


def test_a_server_that_nobody_would_ask_is_refused():
    server = {"vllm": {"url": "http://127.0.0.1:8300"}}
    with pytest.raises(
        ConfigError, match=r"rollout\.vllm is set, but rollout\.engine is auto: leave it out, or set engine to vllm"
    ):
        Config(rollout=server)
    assert Config(rollout={**server, "engine": "vllm"}).rollout.vllm.url == "http://127.0.0.1:8300"


VLLM = {"gpu_memory_share": 0.4, "cache_gib": 2, "max_model_tokens": 512, "eager": True, "sleep_mode": False}


@pytest.mark.parametrize("name", VLLM)
def test_what_a_server_is_started_with_is_refused_beside_its_address(name, tmp_path):
    own, server = {"engine": "vllm", "vllm": {name: VLLM[name]}}, {"rollout.vllm.url": "http://127.0.0.1:8300"}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"rollout": own}), encoding="utf-8")
    assert load_config(file, server) == load_config(None, {"rollout.engine": "vllm", **server}), "the file's is left out"
    assert getattr(load_config(file).rollout.vllm, name) == VLLM[name]
    told = rf"^rollout\.vllm\.{name} is .*, but rollout\.vllm\.url names a server, .*: leave it out, or"
    for asked in ({f"rollout.vllm.{name}": VLLM[name]}, {"rollout": own}, {"rollout.vllm": own["vllm"]}):
        with pytest.raises(ConfigError, match=told):
            load_config(file, {**asked, **server})


def test_a_folder_that_is_shared_with_no_server_is_refused():
    vllm = {"engine": "vllm", "vllm": {"shared_folder": "/shared"}}
    with pytest.raises(ConfigError, match=r"shared_folder is '/shared', but .* process: leave it out, or set url$"):
        Config(rollout=vllm)
    vllm["vllm"]["url"] = "http://127.0.0.1:8300"
    assert Config(rollout=vllm).rollout.vllm.shared_folder == "/shared"


def test_one_device_is_refused_where_the_model_is_laid_over_all(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"model\.device is 'cuda:1', but model\.device_map is auto, which takes every device there is: leave it out, or limit",
    ):
        Config(model={"device": "cuda:1", "device_map": "auto"})
    assert Config(model={"device": "cpu", "device_map": "auto"}).model.device == "cpu", "bf16 or not and the attention go by it"
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({"model": {"device": "cuda:1"}}), encoding="utf-8")
    assert load_config(file, {"model.device_map": "auto"}).model.device == "auto", (
        "a file's setting beside an override is left out"
    )


@pytest.mark.parametrize("intervals", [(0, 0), (4, 0), (0, 4), (4, 4)])
def test_the_best_is_kept_of_checkpoints_that_are_judged(intervals):
    saved, judged = intervals
    settings = {"output": {"keep_best": True, "checkpoint_every": saved}, "evaluation": {"every": judged}}
    if saved and judged:
        assert Config(**settings).output.keep_best
        return
    with pytest.raises(
        ConfigError, match=r"^output\.keep_best is true, but no checkpoint is judged .*: leave it out, or set both$"
    ):
        Config(**settings)


@pytest.mark.parametrize("shaping", [{"clip": (-1, 1)}, {"normalise": "std"}])
def test_the_sum_of_rewards_is_not_shaped_where_nobody_adds_them_up(shaping):
    by_function = {"algorithm": {"preset": "gdpo"}}
    with pytest.raises(
        ConfigError, match="is gdpo, which never adds the functions' scores up as they are: leave it out, or set it in"
    ):
        Config(**by_function, rewards=shaping)
    Config(**by_function, rewards={"functions": [{"function": "accuracy", **shaping}]})


def test_a_loss_of_ones_own_may_have_a_reference_to_offload():
    own, offloaded = {"loss": {"type": "mine.py:loss"}, "kl": None}, {"offload_reference": True}
    assert Config(algorithm=own, training=offloaded).training.offload_reference
    with pytest.raises(ConfigError, match="keeps no copy of the policy as its reference"):
        Config(algorithm={"kl": None}, training=offloaded)
    with pytest.raises(ConfigError, match="keeps no copy of the policy as its reference"):
        Config(algorithm=own, training=offloaded, model={"lora": {}})


def test_steps_beside_epochs_are_refused(tmp_path):
    """The steps are counted from the epochs, so those that somebody asks for would not be made."""
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"training": {"epochs": 3}}), encoding="utf-8")
    told = (
        r"^training\.steps is 3, but training\.epochs is 3, from which the steps are counted: leave it out, or set training"
        r"\.epochs to null$"
    )
    for refused in (lambda: load_config(file, ["training.steps=3"]), lambda: Config(training={"epochs": 3, "steps": 3})):
        with pytest.raises(ConfigError, match=told):
            refused()
    assert load_config(file, ["training.steps=3", "training.epochs=null"]).training.steps == 3
    whole = load_config(file)
    assert build_config(yaml.safe_load(dump_config(whole))) == whole, "steps at their default are nobody's"
    file.write_text(yaml.safe_dump({"training": {"steps": 7}}), encoding="utf-8")
    assert load_config(file, ["training.epochs=3"]) == whole


def test_outer_iterations_are_not_counted_before_the_steps_are():
    kl = {"kl": {"reference_updates": 150}}
    assert Config(algorithm=kl, training={"epochs": 10}).algorithm.kl.reference_updates == 150
    with pytest.raises(ConfigError, match=r"150, more than training\.steps"):
        Config(algorithm=kl, training={"steps": 100})


@pytest.mark.parametrize("path", INERT)
def test_it_is_taken_where_it_acts_and_where_it_is_its_default(path):
    value, section = INERT[path][0], path.split(".")[0]
    acting = build_config(settings(path, value, ACTS[path]))
    assert getattr(getattr(acting, section), path.split(".")[1]) == value
    build_config(settings(path, Config().model_dump()[section][path.split(".")[1]]))


@pytest.mark.parametrize("path", INERT)
def test_an_override_leaves_out_what_the_file_says_and_no_longer_acts(path, tmp_path, caplog):
    value = INERT[path][0]
    file, plain = tmp_path / "recipe.yaml", Config()
    file.write_text(yaml.safe_dump(settings(path, value, ACTS[path])), encoding="utf-8")
    ((switch, chosen),) = [(s, n) for s, names in ACTS[path].items() for n in names]
    off = {f"{switch}.{chosen}": plain.model_dump()[switch][chosen]}
    with caplog.at_level(logging.INFO, logger="groupwise.config.load"):
        assert load_config(file, off) == load_config(None, off)
    assert f"{path} left out: the file sets it" in caplog.text
    with pytest.raises(ConfigError, match=rf"^{path} is "):
        load_config(file, off | {path: value})


def test_a_reference_that_is_not_kept_is_not_offloaded():
    for without in ({"algorithm": {"kl": None}}, {"model": {"lora": {}}}):
        with pytest.raises(ConfigError, match=r"training\.offload_reference is true, but this run keeps no copy of the policy"):
            build_config({"training": {"offload_reference": True}, **without})
    assert build_config({"training": {"offload_reference": True}}).training.offload_reference


def test_a_correction_beside_a_ratio_to_the_sampler_is_refused():
    stale = {"rollout": {"ahead": 1}, "algorithm": {"stale_samples": "behaviour"}}
    with pytest.raises(
        ConfigError, match=r"algorithm.correction is set, but algorithm.stale_samples is behaviour, which has the sampler"
    ):
        build_config({**stale, "algorithm": {**stale["algorithm"], "correction": {"level": "token"}}})
    build_config({**stale, "rollout": {"ahead": 1, "engine": "vllm"}})  # the correction that follows the engine was not asked for


def test_a_correction_of_samples_that_are_not_to_be_weighted_is_refused():
    stale, correction = {"rollout": {"ahead": 1}}, {"correction": {"level": "token"}}
    with pytest.raises(ConfigError, match=r"correction is set, but algorithm.stale_samples is uncorrected, which weighs no"):
        build_config({**stale, "algorithm": {**correction, "stale_samples": "uncorrected"}})
    assert build_config({**stale, "algorithm": correction}).correction_level == "token"


def test_columns_of_a_held_out_source_act_beside_the_generator():
    data = {"data": {"prompt_column": "q", "eval_source": "rows.jsonl"}}
    assert build_config(data).data.prompt_column == "q"


def test_several_are_counted():
    with pytest.raises(ConfigError, match=r"optimizer.final_fraction is 0.1, .* \(1 more does nothing too\)$"):
        build_config({"optimizer": {"final_fraction": 0.1}, "output": {"adapter_only": True}})


def test_the_folder_of_an_earlier_run_is_read_without_them(tmp_path, caplog):
    old = {"optimizer": {"final_fraction": 0.1}, "output": {"adapter_only": True}, "training": {"steps": 7}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(old), encoding="utf-8")
    with caplog.at_level(logging.INFO, logger="groupwise.config.load"):
        assert load_run_config(tmp_path / "config.yaml") == build_config({"training": {"steps": 7}})
    assert not caplog.text
    known, left_out = build_known(old)
    assert known == build_config({"training": {"steps": 7}})
    assert sorted(left_out) == ["optimizer.final_fraction", "output.adapter_only"]
