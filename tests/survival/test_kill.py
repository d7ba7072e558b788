"""A run killed with SIGKILL at random moments, and resumed, ends where the uninterrupted run ends, bit for bit."""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.survival import forked
from tests.survival.kills import KINDS
from tests.warm import python

ROOT = Path(__file__).resolve().parents[2]


def kill(kinds, kills, seed):
    """In a process of its own: the runs are forked from it, and here are threads."""
    words = [python(), "-m", "tests.survival.kills", "--kills", str(kills), "--seed", str(seed), "--kinds", *kinds]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize(("command", "code", "hung"), [(["sleep", "600"], -signal.SIGKILL, True), (["false"], 1, False)])
def test_a_run_that_does_not_end_is_no_killed_one(command, code, hung, monkeypatch):
    monkeypatch.setattr(forked, "_LONGEST_S", 0.5 if hung else 60.0)
    going = forked.Forked([os.posix_spawnp(command[0], command, os.environ)])
    assert (going.end(60), going.hung) == (code, hung)


@pytest.mark.slow
def test_a_killed_run_ends_where_the_uninterrupted_one_ends():
    kill(["mu 3, micro-batches", "lora with dropout"], kills=1, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kills"), [("episodes", 3), ("episodes that fork", 1)])
def test_a_run_killed_in_the_middle_of_an_episode_ends_there_too(kind, kills):
    kill([kind], kills=kills, seed=1)


@pytest.mark.soak
def test_a_hundred_kills_in_mid_episode_lose_nothing():
    kill(["episodes"], kills=100, seed=3)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_many_kills_lose_nothing(kind):
    """10 of each kind: more than 100 together."""
    kill([kind], kills=10, seed=2)
