"""A script of TRL's in two processes: the run of one process with the same global batch, and TRL's own run in two."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from groupwise.distributed.launch import launch
from groupwise.errors import ConfigError
from groupwise.trl import GRPOConfig, GRPOTrainer
from groupwise.trl.parts import check_division, check_launch, model_config
from groupwise.trl.steps import split
from tests.coming_from_trl.run_script import run_case
from tests.warm import python

pytestmark = pytest.mark.filterwarnings("ignore")
HERE = Path(__file__).parent
COMMON = {
    "num_generations": 4, "max_completion_length": 8, "max_steps": 3, "learning_rate": 2e-2, "logging_steps": 1, "use_cpu": True,
    "bf16": False, "disable_tqdm": True, "save_strategy": "no", "gradient_checkpointing": False, "adam_epsilon": 1e-3,
    "per_device_train_batch_size": 4,
}  # fmt: skip
CASES = {  # each with what one process has in place of a batch twice as large per device
    "defaults, a KL": {"beta": 0.2, "num_iterations": 2},
    "a group in two processes": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "loss_type": "grpo"},
    "a generation over two steps": {
        "steps_per_generation": 4,
        "gradient_accumulation_steps": 2,
        "loss_type": "dr_grpo",
        "beta": 0.1,
    },
    "tokens of high entropy": {"top_entropy_quantile": 0.4, "gradient_accumulation_steps": 2},
}
AGAINST_TRL = {
    "dapo and a KL": {"beta": 0.2, "num_iterations": 2},
    "bnpo": {"loss_type": "bnpo", "mask_truncated_completions": True},
    "an entropy bonus": {"entropy_coef": 0.3, "top_entropy_quantile": 0.4, "loss_type": "grpo"},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_coef": 0.1, "entropy_coef_delta": 0.05, "entropy_target": 5.0},
    "batch statistics": {"scale_rewards": "batch", "gradient_accumulation_steps": 2, "num_generations": 8, "loss_type": "luspo"},
}
CLOCKS = ("step_time", "train_runtime", "train_samples_per_second", "train_steps_per_second", "total_flos", "process",
          "eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "eval_process")  # fmt: skip


def in_two(cases, folder, script="run_script.py", **environment):
    """The exit code of two processes that run ``cases`` one after the other."""
    spec = folder / f"{Path(script).stem}.json"
    spec.write_text(json.dumps(cases))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | environment
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return launch([python(), str(HERE / script), str(spec)], 2, environment)


def case_of(name, model, folder, arguments, **more):
    return {"name": name, "model": str(model), "folder": str(folder), "arguments": {**COMMON, **arguments}, **more}


def found(folder, rank=0):
    return json.loads((folder / f"found-{rank}.json").read_text())


def calls(folder, rank=0):
    return json.loads((folder / f"calls-{rank}.json").read_text())


def assert_same_log(one, two, without=CLOCKS, rel=1e-4, abs=2e-6):
    for row, other in zip(one, two, strict=True):
        names = [name for name in row if name not in without and row[name] is not None]
        assert {n: other[n] for n in names} == pytest.approx({n: row[n] for n in names}, rel=rel, abs=abs)


def assert_same_weights(one, two):
    assert one.keys() == two.keys()
    for name, values in one.items():
        torch.testing.assert_close(two[name], values, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


def weights(folder):
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def runs(tiny_folder, tmp_path_factory):
    """The folder in which two processes left all cases, a run that was stopped and resumed, an adapter's, and TRL's cases."""
    folder = tmp_path_factory.mktemp("two")
    cases = [case_of(name, tiny_folder, folder, changes, evaluate=True) for name, changes in CASES.items()]
    saving = {"save_strategy": "steps", "save_steps": 1, "beta": 0.1, "log_completions": True, "logging_steps": 2}
    cases.append(case_of("whole", tiny_folder, folder, saving))
    cases.append(case_of("resumed", tiny_folder, folder, saving, resume=str(folder / "whole" / "checkpoint-2")))
    cases.append(case_of("adapter", tiny_folder, folder, {"beta": 0.1}, adapter=find_spec("peft") is not None))
    cases.append(
        case_of("environments", tiny_folder, folder, {"per_device_train_batch_size": 6}, environment=True, evaluate=True)
    )
    cases += [case_of(name, tiny_folder, folder, changes) for name, changes in AGAINST_TRL.items()]
    assert in_two(cases, folder) == 0
    return folder


@pytest.mark.slow
def test_environments_are_scored_by_the_process_that_has_them(runs, tiny_folder, tmp_path):
    """Three prompts in two processes: whole groups, 1 and 2 of them. The reward function finds each completion's own environment."""
    changes = {"per_device_train_batch_size": 12, "per_device_eval_batch_size": 16}
    run_case(**case_of("environments", tiny_folder, tmp_path, changes, environment=True, evaluate=True))
    one, two = found(tmp_path / "environments"), found(runs / "environments")
    assert_same_log(one["log"], two["log"])
    assert_same_log([one["eval"]], [two["eval"]])
    assert_same_weights(weights(tmp_path / "environments"), weights(runs / "environments"))
    assert [sum(map(len, calls(runs / "environments", rank)[:1])) for rank in (0, 1)] == [4, 8]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_processes_are_one_of_twice_the_batch(name, runs, tiny_folder, tmp_path):
    """Losses, gradients' norms, rewards and weights after three steps; each process scores its own half of the completions."""
    changes = {**COMMON, **CASES[name], "per_device_eval_batch_size": 16}
    changes["per_device_train_batch_size"] *= 2
    run_case(**case_of(name, tiny_folder, tmp_path, changes, evaluate=True))
    one, two = found(tmp_path / name), found(runs / name)
    assert_same_log(one["log"], two["log"])
    assert_same_log([one["eval"]], [two["eval"]])
    assert_same_weights(weights(tmp_path / name), weights(runs / name))
    whole, first, second = calls(tmp_path / name), calls(runs / name), calls(runs / name, 1)
    assert [a + b for a, b in zip(first, second, strict=True)] == whole
    assert all(len(a) == len(b) for a, b in zip(first, second, strict=True))


@pytest.mark.slow
def test_the_first_process_writes_and_all_log_the_same(runs):
    one, two = (found(runs / "whole", rank) for rank in range(2))
    assert (one["first"], two["first"]) == (True, False)
    assert_same_log(one["log"], two["log"], rel=0, abs=0)
    assert one["log"][0]["process"] == 0.5, "what reward functions log is a mean over all processes"
    table = list((runs / "whole" / "completions").iterdir())
    assert len(table) == 2, "one for each log, by one process"
    from pyarrow import parquet

    rows = parquet.read_table(table[0]).to_pylist()
    assert len(rows) == 8
    assert all("doubled" in row for row in rows)
    state = json.loads((runs / "whole" / "trainer_state.json").read_text())
    assert state["is_world_process_zero"] is True


@pytest.mark.slow
def test_a_resumed_run_of_two_processes_is_the_run_that_was_never_stopped(runs):
    whole, resumed = weights(runs / "whole"), weights(runs / "resumed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    logs = [[row for row in found(runs / name)["log"] if row["step"] > 2] for name in ("whole", "resumed")]
    assert ["reward" in row for row in logs[0]] == [True], "the last row has the numbers of the third step"
    assert_same_log(*logs, (*CLOCKS, "train_loss"), rel=0, abs=0)


@pytest.mark.slow
def test_an_adapter_learns_in_two_processes_as_in_one(runs, tiny_folder, tmp_path):
    pytest.importorskip("peft")
    changes = {"beta": 0.1, "per_device_train_batch_size": 8}
    run_case(**case_of("adapter", tiny_folder, tmp_path, changes, adapter=True))
    assert_same_log(found(tmp_path / "adapter")["log"], found(runs / "adapter")["log"])
    one, two = (load_file(folder / "adapter" / "model" / "adapter_model.safetensors") for folder in (tmp_path, runs))
    assert_same_weights(one, two)


@pytest.mark.slow
def test_two_processes_of_trl_are_ours(runs, tiny_folder):
    """Given our completions: TRL's own logs and weights, those of loss types that average over processes included."""
    pytest.importorskip("trl", exc_type=ImportError)
    cases = [case_of(name, tiny_folder, runs, changes) for name, changes in AGAINST_TRL.items()]
    assert in_two(cases, runs, "run_trl.py", ACCELERATE_USE_CPU="true") == 0
    for name in AGAINST_TRL:
        ours, theirs = found(runs / name)["log"], json.loads((runs / f"{name}-0.json").read_text())
        several = AGAINST_TRL[name].get("gradient_accumulation_steps", 1) > 1
        left_out = (*CLOCKS, "entropy", *(("clip_ratio/low_min", "clip_ratio/high_max") if several else ()))
        assert_same_log(theirs, ours, left_out, rel=2e-3, abs=2e-5)
        assert_same_weights(load_file(runs / f"{name}.safetensors"), weights(runs / name))


@pytest.mark.slow
def test_a_reward_that_fails_in_one_process_ends_both_with_its_error(tiny_folder, tmp_path):
    assert in_two([case_of("failing", tiny_folder, tmp_path, {}, failing=True)], tmp_path) != 0
    said = [(tmp_path / "failing" / f"error-{rank}.txt").read_text() for rank in range(2)]
    assert said[1].startswith("RewardError: reward 'letters' on the batch of 4 completions raised ValueError: out of luck")
    assert said[0].startswith("RankError: process 1 of 2 failed: reward 'letters'")


@pytest.mark.slow
@pytest.mark.parametrize("way", [pytest.param("ddp", marks=pytest.mark.soak), "fsdp2", "zero3"])
def test_accelerate_launches_it(way, tiny_folder, tmp_path):
    """Two processes that divide the weights are one, too, and so is a run of theirs that is resumed, by them or by one."""
    if way == "zero3":
        pytest.importorskip("deepspeed")
    saving = {"save_strategy": "steps", "save_steps": 2, "beta": 0.1}
    still = {"reward_weights": [0.0], "weight_decay": 0.1, "max_steps": 2}
    cases = [
        case_of("whole", tiny_folder, tmp_path, saving, evaluate=True),
        case_of("nothing to learn", tiny_folder, tmp_path, still),
    ]
    if way != "ddp":
        cases.append(case_of("resumed", tiny_folder, tmp_path, saving, resume=str(tmp_path / "whole" / "checkpoint-2")))
        if find_spec("peft"):
            cases.append(case_of("adapter", tiny_folder, tmp_path, saving, adapter=True))
            resume = str(tmp_path / "adapter" / "checkpoint-2")
            cases.append(case_of("adapter resumed", tiny_folder, tmp_path, saving, adapter=True, resume=resume))
    (tmp_path / "spec.json").write_text(json.dumps(cases))
    config = HERE.parents[1] / "launch" / f"{way}-cpu.yaml"
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "XDG_RUNTIME_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    command += ["--log_dir", str(tmp_path / "log"), str(HERE / "run_script.py")]
    done = subprocess.run([*command, str(tmp_path / "spec.json")], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    run_case(**case_of("still alone", tiny_folder, tmp_path, {**still, "per_device_train_batch_size": 8}))
    assert_same_weights(weights(tmp_path / "still alone"), weights(tmp_path / "nothing to learn"))
    alone = {**saving, "per_device_train_batch_size": 8, "per_device_eval_batch_size": 16}
    run_case(**case_of("alone", tiny_folder, tmp_path, alone, evaluate=True))
    assert_same_log(found(tmp_path / "alone")["log"], found(tmp_path / "whole")["log"])
    assert_same_log([found(tmp_path / "alone")["eval"]], [found(tmp_path / "whole")["eval"]])
    assert_same_weights(weights(tmp_path / "alone"), weights(tmp_path / "whole"))
    if way != "ddp":
        assert_same_weights(weights(tmp_path / "whole"), weights(tmp_path / "resumed"))
        one = {**saving, "per_device_train_batch_size": 8}
        run_case(**case_of("one", tiny_folder, tmp_path, one, resume=str(tmp_path / "whole" / "checkpoint-2")))
        assert_same_weights(weights(tmp_path / "whole"), weights(tmp_path / "one"))
    if any(case["name"] == "adapter resumed" for case in cases):  # whose reference is still the model without an adapter
        logs = [found(tmp_path / name)["log"] for name in ("adapter", "adapter resumed")]
        assert_same_log(*([row for row in log if "loss" in row] for log in logs))


def test_what_the_launcher_asks_for_and_is_not_honoured_is_said(monkeypatch):
    args = GRPOConfig("out", bf16=False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    with pytest.raises(ConfigError, match="bf16 and fp16 of GRPOConfig"):
        check_launch(args, 2)
    assert check_launch(GRPOConfig("out"), 2) == "none"


def test_what_cannot_be_divided_is_refused_before_weights_are_read(
    monkeypatch, tiny_folder, tmp_path, prompts, letters, settings
):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    args = GRPOConfig("out", optim="adamw_8bit")
    assert check_launch(args, 2) == "fsdp2"
    model = model_config(args, str(tiny_folder))
    launch = "the launcher's configuration is fsdp2, which does not go with"
    with pytest.raises(ConfigError, match=f"{launch} the 8-bit moments of optim: use optim='adamw_torch', or a launch that"):
        check_division(args, model, None, 2)
    with pytest.raises(ConfigError, match=f"{launch} repetition_penalty: leave it out"):
        check_division(GRPOConfig("out", repetition_penalty=1.1), model, None, 2)
    with pytest.raises(ConfigError, match=rf"{launch} peft_config's lora_dropout=0\.1: set it to 0"):
        check_division(GRPOConfig("out"), model, SimpleNamespace(lora_dropout=0.1), 2)
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "quantised"))
    values = json.loads((folder / "config.json").read_text())
    how = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": how}))
    with pytest.raises(ConfigError, match=f"{launch} weights stored in 8bit: .*: name the model that is not quantised"):
        check_division(GRPOConfig("out"), model.model_copy(update={"name": str(folder)}), SimpleNamespace(lora_dropout=0.0), 2)
    monkeypatch.setattr("groupwise.trl.trainer.check_launch", lambda *_: "fsdp2")
    for named, given in ((None, how), ({"quantization_config": how}, None)):
        with pytest.raises(ConfigError, match=r"fsdp2 divides a base .*: leave quantization_config out"):
            GRPOTrainer(str(tiny_folder), letters, settings(model_init_kwargs=named), prompts, quantization_config=given)


def test_batch_sizes_count_over_processes_as_in_trl(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    args = GRPOConfig("out", per_device_train_batch_size=4, gradient_accumulation_steps=3)
    assert (args.generation_batch_size, args.steps_per_generation, args.world_size, args.process_index) == (24, 3, 2, 1)
    assert (args.should_save, args.should_log) == (False, False)
    with pytest.raises(ConfigError, match=r"per_device_train_batch_size x 2 processes \(8\)"):
        GRPOConfig("out", per_device_train_batch_size=4, generation_batch_size=12)


def test_processes_divide_a_sweep_and_do_not_change_it():
    for steps in (1, 3):
        one, two = split(24, steps, 7, 1), split(24, steps, 7, 1, units=2)
        assert [two[2 * s] + two[2 * s + 1] for s in range(steps)] == one
    assert split(8, 1, 7, 1, units=2) == [[0, 1, 2, 3], [4, 5, 6, 7]], "each its own completions, as in TRL"
