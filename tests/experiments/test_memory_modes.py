"""The modes are settings that exist, and the table says what the numbers say."""

import json

import pytest

from experiments import memory_modes
from experiments.common import PAGE, read_block, read_numbers
from experiments.memory_modes import MODES, NAME, carry_out, report, settings_of
from groupwise import load_config


def test_every_mode_is_a_recipe_with_other_settings_and_no_two_are_the_same():
    configs = [load_config("quickstart", settings_of(mode, 5, 20, 1024)) for mode in MODES]
    chosen = {(c.model.quantization, c.model.lora is None, c.optimizer.precision) for c in configs}
    assert len(chosen) == len(MODES) == 5
    for config in configs:
        assert (config.optimizer.learning_rate >= 1e-4) == (config.model.lora is not None)


def test_all_modes_have_the_rewards_of_the_runs_on_the_page():
    for mode in MODES:
        rewards = load_config("quickstart", settings_of(mode, 5, 20, 1024)).rewards.functions
        assert [one.function for one in rewards] == ["correctness", "format"]


def test_a_run_is_kept_as_long_as_its_recipe_is_the_same(tmp_path, monkeypatch):
    def started(*words, **named):
        raise AssertionError("a run was started")

    monkeypatch.setattr(memory_modes.subprocess, "run", started)
    monkeypatch.setattr(memory_modes, "config_hash", lambda recipe: "a")
    (tmp_path / "full.json").write_text(json.dumps({"settings": ["x=1"], "config": "a", "name": "full"}))
    assert carry_out(MODES[0], ["x=1"], tmp_path)["name"] == "full"
    monkeypatch.setattr(memory_modes, "config_hash", lambda recipe: "b")
    with pytest.raises(AssertionError, match="a run was started"):
        carry_out(MODES[0], ["x=1"], tmp_path)


def test_the_table_has_what_was_measured():
    found = {"date": "2026-01-01", "code": None, "processor": "X", "cores": 2, "torch": "2", "transformers": "5",
             "bitsandbytes": "0.50.2", "peft": "0.21"}  # fmt: skip
    run = {"name": "qlora", "accuracy": {"base": 0.0, "warm_start": 0.4, "final": 0.75}, "interval": [0.7, 0.8],
           "peak_memory_gib": 1.234, "trained_bytes": 2_000_000}  # fmt: skip
    text = report({"steps": 7, "problems": 50, "micro_batch_tokens": 2048, "runs": [run], "environment": found})
    assert "| 1.23 GiB | 2 MB | 0% | 40% | **75%** (70% to 80%) |" in text
    assert "7 steps of 8 x 8" in text
    assert "bitsandbytes 0.50.2" in text


def test_the_page_has_every_mode_as_it_was_measured_and_each_one_learnt():
    numbers = read_numbers(NAME)
    assert read_block(PAGE, NAME) == report(numbers).strip("\n")
    assert [run["name"] for run in numbers["runs"]] == [mode.name for mode in MODES]
    assert all(run["interval"][0] > run["accuracy"]["warm_start"] for run in numbers["runs"])


def test_a_mode_that_is_not_named_is_not_trained_again(tmp_path, monkeypatch):
    """... where what is kept of it was made with other settings."""
    started = []
    numbers = {"name": "qlora", "accuracy": {"base": 0.0, "warm_start": 0.4, "final": 0.75}, "interval": [0.7, 0.8], "environment": {},
               "peak_memory_gib": 1.0, "trained_bytes": 2, "seconds": 3}  # fmt: skip
    monkeypatch.setattr(memory_modes, "carry_out", lambda mode, *_: started.append(mode.name) or numbers)
    monkeypatch.setattr(memory_modes, "report", lambda numbers: "")
    for name in ("full", "lora"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"settings": ["x=1"], "config": "a", "name": name}))
    memory_modes.main(["qlora", "--work", str(tmp_path), "--out", str(tmp_path / "out")])
    assert started == ["qlora"]
