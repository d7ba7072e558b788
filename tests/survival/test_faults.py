"""Faults tried by the command line; the table in benchmarks/TRIALS.md has the same ones."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.survival.faults import FAULTS
from tests.survival.page import PAGE, section
from tests.warm import python

ROOT = Path(__file__).resolve().parents[2]


def attempt(*names):
    """In a process of its own: the commands are forked from it, and here are threads."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    words = [python(), "-m", "tests.survival.faults", "--only", *names]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_some_faults_are_as_the_page_says():
    names = ["gradient: NaN and", "disk: full in", "checkpoint: the newest", "secrets", "model: brings"]
    said = attempt(*names)
    tried = [name for name in FAULTS if name.startswith(tuple(names))]
    assert said.count(": as promised") + said.count(": not tried") == len(tried) == 5


@pytest.mark.soak
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_as_the_page_says(name):
    attempt(name)


def test_the_page_has_every_fault():
    rows = section("faults", PAGE.read_text(encoding="utf-8")).splitlines()
    listed = [row.removeprefix("- ") for row in rows if row.startswith("- ")]
    assert len(listed) == len(FAULTS)
    assert all(row.startswith(f"{fault}: ") for row, fault in zip(listed, FAULTS, strict=True))


def test_the_page_has_more_than_a_hundred_kills_and_no_loss():
    (row,) = [row for row in section("kills", PAGE.read_text(encoding="utf-8")).splitlines() if row.startswith("Together: ")]
    killed, _, _, losses = map(int, re.findall(r"\d+", row))
    assert killed >= 100
    assert losses == 0
