"""Faults tried by the command line; the table in benchmarks/TRIALS.md has the same ones."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.survival import faults
from tests.survival.faults import FAULTS, named
from tests.survival.page import PAGE, section
from tests.warm import python

ROOT = Path(__file__).resolve().parents[2]


def attempt(*names):
    """In a process of its own: the commands are forked from it, and here are threads. Skips if one could not be tried."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    words = [python(), "-m", "tests.survival.faults", "--only", *names]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.splitlines()
    rows, not_tried = [line for line in said if line.startswith("- ")], [line for line in said if ": not tried, " in line]
    assert len(rows) + len(not_tried) == len(named(names))
    assert set(rows) <= set(rows_of_the_page())
    if not_tried:
        pytest.skip("; ".join(not_tried))


def rows_of_the_page():
    return [row for row in section("faults", PAGE.read_text(encoding="utf-8")).splitlines() if row.startswith("- ")]


@pytest.mark.slow
def test_some_faults_are_as_the_page_says():
    names = ["gradient: NaN and", "disk: full in", "checkpoint: the newest", "secrets", "model: brings"]
    assert len(named(names)) == 5
    attempt(*names)


@pytest.mark.soak
@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_is_as_the_page_says(name):
    attempt(name)


def test_the_page_has_every_fault():
    assert all(row.startswith(f"- {fault}: ") for row, fault in zip(rows_of_the_page(), FAULTS, strict=True))


def test_a_name_is_no_beginning_of_others():
    assert named(["reward function: raises"]) == ["reward function: raises"]
    assert len(named(["reward function: raise"])) == 2
    assert named([""]) == list(FAULTS)


@pytest.mark.parametrize(("error", "code"), [(faults.NotTried("no disk"), 0), (FileNotFoundError("x"), 1), (AssertionError(), 1)])
def test_only_what_this_machine_does_not_allow_is_left_untried(error, code, monkeypatch, capsys):
    def attempted(place):
        raise error

    monkeypatch.setitem(FAULTS, "made up", attempted)
    monkeypatch.setattr("torch.set_num_threads", lambda count: None)  # this process keeps those that it has
    assert faults.main(["--only", "made up"]) == code
    assert ("made up: BROKEN" in capsys.readouterr().out) is (code == 1)


def test_the_page_has_more_than_a_hundred_kills_and_no_loss():
    (row,) = [row for row in section("kills", PAGE.read_text(encoding="utf-8")).splitlines() if row.startswith("Together: ")]
    killed, _, _, losses = map(int, re.findall(r"\d+", row))
    assert killed >= 100
    assert losses == 0
