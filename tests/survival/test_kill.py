"""A run killed with SIGKILL at random moments, and resumed, ends where the uninterrupted run ends, bit for bit."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from groupwise.config import dump_config

WORKER = Path(__file__).with_name("run_once.py")
KINDS = {
    "plain": {},
    "several updates": {"algorithm": {"beta": 0.0, "updates_per_batch": 3, "epsilon": 0.01}},
    "renewed reference": {"algorithm": {"beta": 0.1, "reference_updates": 3}},
    "micro-batches": {"training": {"steps": 8, "micro_batch_tokens": 60}},
    "epochs": {"data": {"limit": 11, "holdout": 4}},
}


def write_config(small_config, kind, path):
    sections = {"training": {"steps": 8}, "output": {"checkpoint_every": 1}, **KINDS[kind]}
    path.write_text(dump_config(small_config(**sections)), encoding="utf-8")
    return path


def begin(config, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(WORKER), str(config), str(folder)], env=environment, stderr=subprocess.PIPE)


def complete(config, folder):
    process = begin(config, folder)
    _, told = process.communicate()
    assert process.returncode == 0, told.decode()
    return folder


def kill_after(config, folder, delay_s):
    """True if the kill came before the end. ``delay_s`` counts from the moment at which the run's folder has settings."""
    process = begin(config, folder)
    while process.poll() is None and not (folder / "config.yaml").exists():
        time.sleep(0.01)
    time.sleep(delay_s)
    alive = process.poll() is None
    process.kill()
    _, told = process.communicate()
    assert alive or process.returncode == 0, told.decode()
    return alive


def facts_of(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    numbers = [{k: v for k, v in row.items() if not k.startswith(("time", "speed", "memory"))} for row in rows]
    said = (folder / "completions.jsonl").read_text(encoding="utf-8")
    return numbers, said


def assert_same(one, other):
    first, second = (load_file(f / "final_model" / "model.safetensors") for f in (one, other))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert facts_of(one) == facts_of(other)


def kill_and_compare(small_config, tmp_path, kind, kills, seed):
    config = write_config(small_config, kind, tmp_path / "config.yaml")
    started = time.monotonic()
    whole = complete(config, tmp_path / "whole")
    longest, chance, killed = time.monotonic() - started, random.Random(seed), 0
    folder, round_ = tmp_path / "killed-0", 0
    while killed < kills:
        if kill_after(config, folder, chance.uniform(0, longest)):
            killed += 1
        else:  # it came through: compare, and go on in a fresh folder
            assert_same(whole, folder)
            round_ += 1
            folder = tmp_path / f"killed-{round_}"
    assert_same(whole, complete(config, folder))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["several updates", "renewed reference"])
def test_a_killed_run_ends_where_the_uninterrupted_one_ends(small_config, tmp_path, kind):
    kill_and_compare(small_config, tmp_path, kind, kills=2, seed=1)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_kills_lose_nothing(small_config, tmp_path, kind):
    """20 kills of each kind: 100 together."""
    kill_and_compare(small_config, tmp_path, kind, kills=20, seed=2)
