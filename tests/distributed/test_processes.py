"""Two real processes over gloo: the same numbers as one, resuming bit for bit, and one that fails ends both with its error."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from groupwise.errors import ConfigError
from groupwise.training.loop import train
from tests.distributed.run_ranks import letters, note_first_gradient
from tests.distributed.two_processes import assert_same_bits, assert_same_run, launch_two
from tests.warm import python

STEPS = {"training": {"steps": 5}, "output": {"checkpoint_every": 3, "log_completions": 100}, "algorithm": {"kl": {"beta": 0.04}}}


@pytest.fixture(scope="module")
def module_config(tiny_folder, sums):
    """The small config of the training tests, once for the module."""
    from tests.training import conftest

    return conftest.small_config.__wrapped__(tiny_folder, sums)(**STEPS)


@pytest.fixture(scope="module")
def two_processes(module_config, tmp_path_factory):
    """The folder in which two processes left what run_ranks.py says, and the exit code."""
    folder = tmp_path_factory.mktemp("two")
    return folder, launch_two(module_config, folder)


def test_two_processes_are_one(two_processes, module_config, tmp_path, monkeypatch):
    """Completions token for token; losses, the first gradient and the weights after five steps to fp32 rounding."""
    from groupwise.training.optimizer import MasterAdamW

    monkeypatch.setattr(MasterAdamW, "step", MasterAdamW.step)  # put back afterwards
    note_first_gradient(tmp_path / "gradient.safetensors")
    one = train(module_config, rewards={"letters": letters}, run_folder=tmp_path / "one", console=Console(quiet=True)).folder
    folder = two_processes[0]
    assert_same_run(one, folder / "whole")
    gradient = load_file(tmp_path / "gradient.safetensors")
    for rank in range(2):
        other = load_file(folder / f"gradient-{rank}.safetensors")
        assert gradient.keys() == other.keys()
        for name, values in gradient.items():
            torch.testing.assert_close(other[name], values, rtol=1e-4, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")


def test_two_processes_carry_on_bit_for_bit(two_processes):
    assert_same_bits(two_processes[0])


def test_the_gradient_is_the_same_on_both_to_the_bit(two_processes):
    first, second = (load_file(two_processes[0] / f"gradient-{rank}.safetensors") for rank in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_process_that_fails_ends_the_run_with_its_error(two_processes):
    """Process 1's reward raises: process 0 says so, both leave with its exit code, and the run's folder is there to be looked at."""
    folder, code = two_processes
    assert code == 2
    head, message = (folder / "error-0.txt").read_text().splitlines()
    assert head == "RankError 2 False"
    assert message.startswith("process 1 of 2 failed: reward 'letters' on problem")
    assert "ValueError: out of luck" in message
    head, message = (folder / "error-1.txt").read_text().splitlines()
    assert head == "RewardError 2 True", "who failed does not say it a second time"
    assert not (folder / "failing" / "summary.json").exists()


@pytest.mark.soak
def test_a_process_that_is_killed_ends_the_others(tmp_path):
    """What is left waits in a collective, or for nobody: either way it ends soon, with an exit code that is not 0."""
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "from groupwise.distributed import open_world\n"
        "with open_world(True, 600) as world:\n"
        "    world.all_gather_object(world.rank)\n"
        "    if world.rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    world.all_gather_object(world.rank)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = (
        f"import sys; from groupwise.distributed.launch import launch; sys.exit(launch([sys.executable, {str(script)!r}], 2))"
    )
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 128 + signal.SIGKILL
    assert "process 1 of 2 was ended by SIGKILL" in done.stderr
    assert "another of the 2 processes ended" in done.stderr


def test_the_launcher_hands_a_signal_on_and_sets_no_time_for_what_is_done_about_it(tmp_path):
    """With no time at all for processes that outlive a failed one, two that end well after a SIGTERM are waited for."""
    script, program = tmp_path / "saves.py", tmp_path / "launches.py"
    script.write_text(
        "import os, signal, sys, time, pathlib\n"
        f"folder, rank = pathlib.Path({str(tmp_path)!r}), os.environ['RANK']\n"
        "def save(number, frame):\n"
        "    time.sleep(1 + int(rank))\n"
        "    (folder / f'saved-{rank}').touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "(folder / f'ready-{rank}').touch()\n"
        "while True: time.sleep(0.05)\n"  # one long sleep would not see a signal that comes just before it
    )
    program.write_text(
        "import sys; from groupwise.distributed import launch; launch._GRACE_S = 0.0\n"
        f"sys.exit(launch.launch([sys.executable, {str(script)!r}], 2))\n"
    )
    launcher = subprocess.Popen([python(), program], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    while len(list(tmp_path.glob("ready-*"))) < 2:
        assert launcher.poll() is None
        time.sleep(0.05)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(600) == 0
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_half_a_launch_is_refused(module_config, monkeypatch, tmp_path):
    """What `accelerate launch --num_processes 2` makes on a machine without GPUs: one process that would train alone."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    with pytest.raises(ConfigError, match="--multi_gpu"):
        train(module_config, rewards={"letters": letters}, run_folder=tmp_path / "run", console=Console(quiet=True))
    assert not (tmp_path / "run").exists()
