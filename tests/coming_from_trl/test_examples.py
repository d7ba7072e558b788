"""The scripts in examples/trl run as they are: TRL's documented first steps."""

import json
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "trl"
SCRIPTS = sorted(path.stem for path in EXAMPLES.glob("*.py"))
COMMON = ["--max_steps", "2", "--logging_steps", "1", "--disable_tqdm", "True", "--use_cpu", "True", "--save_strategy", "steps"]


def run(name, folder, monkeypatch, *arguments):
    """Run a script in this process, and return what its trainer logged."""
    monkeypatch.setattr(sys, "argv", [name, "--output_dir", str(folder), *COMMON, *arguments])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return json.loads((folder / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]


def test_there_are_the_four():
    assert SCRIPTS == ["accuracy_reward", "length_reward", "peft_adapter", "reward_model"]


@pytest.mark.filterwarnings("ignore")  # a new head on a reward model, and what scripts do besides
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_runs_on_a_tiny_model(name, tiny_folder, tmp_path, monkeypatch):
    sizes = ["--per_device_train_batch_size", "8", "--num_generations", "4", "--max_completion_length", "8", "--bf16", "False"]
    rows = run(name, tmp_path, monkeypatch, "--model", str(tiny_folder), "--per_device_eval_batch_size", "8", *sizes)
    assert [row["step"] for row in rows if "reward" in row] == [1, 2]
    saved = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
    assert ("adapter_model.safetensors" if name == "peft_adapter" else "model.safetensors") in saved


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "peft_adapter" else pytest.mark.soak) for name in SCRIPTS]
)
def test_a_script_runs_on_the_small_model(name, embedded_model_folder, tmp_path, monkeypatch):
    """One of them in the fast suite, that of the least memory: that the others run at all, their runs on a tiny model have shown."""
    sizes = ["--per_device_train_batch_size", "8", "--num_generations", "4", "--max_completion_length", "16"]
    rows = run(name, tmp_path, monkeypatch, "--gradient_checkpointing", "False", "--per_device_eval_batch_size", "80", *sizes)
    found = [row for row in rows if "reward" in row]
    assert [row["step"] for row in found] == [1, 2]
    assert all(1 <= row["completions/mean_length"] <= 16 for row in found)
    assert all(0 < row["entropy"] < 6 for row in found if "entropy" in row), "a language model's own words"
