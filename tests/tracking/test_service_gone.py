"""The services' own clients, in a process of its own each, while what they talk to is taken away in the middle of a run."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.waiting import comes

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import logging, os, subprocess, sys, time
logging.basicConfig(format="WARNED %(message)s", level=logging.WARNING)
from pathlib import Path
from groupwise.config import load_config
from groupwise.tracking import RunFolder, make_trackers
folder, name, taken = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
config = load_config("quickstart", [f"output.trackers=[jsonl, {name}]", "evaluation.problems=4"])
made = RunFolder.create(config, folder, "x", command=["x"])
if "SMALL_DISK" in os.environ:
    (folder / "tensorboard").mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder / "tensorboard")], check=True)
trackers = make_trackers(config, made, None)
assert len(trackers.sinks) == 2, trackers.sinks
slowest = 0.0
for step in range(1, 41):
    begun = time.monotonic()
    trackers.step(step, {"reward/mean": step / 2, **{f"reward/part{i}": float(i) for i in range(40)}})
    slowest = max(slowest, time.monotonic() - begun)
    if step == 12:
        print("now", flush=True)
        while not taken.exists():
            time.sleep(0.01)
    time.sleep(0.02)
trackers.close()
print("slowest", slowest, flush=True)
"""


def run_and_take_away(name, tmp_path, take_away, environment):
    """(seconds that the rest took, what was written on stderr, the slowest call in seconds)."""
    taken = tmp_path / "taken"
    words = [sys.executable, "-c", RUN, str(tmp_path / "run"), name, str(taken)]
    surroundings = {
        **os.environ,
        **environment,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    process = subprocess.Popen(words, env=surroundings, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path)
    for line in process.stdout:
        if line.strip() == "now":
            break
    take_away()
    begun = time.monotonic()
    taken.touch()
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return time.monotonic() - begun, err, float(out.split()[-1])


def nothing_was_waited_for(seconds, slowest):
    """Ten times what it takes, and less than a client's own attempts at a service that is gone."""
    assert seconds < 120
    assert slowest < 20


def every_step_is_kept(tmp_path):
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 41))


@pytest.mark.slow
def test_a_wandb_server_that_dies_in_mid_run(tmp_path):
    pytest.importorskip("wandb")
    requests = tmp_path / "requests"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.tracking.stand_in", str(requests)], cwd=ROOT, text=True, stdout=subprocess.PIPE
    )
    address = f"http://127.0.0.1:{server.stdout.readline().strip()}"

    def take_away():
        assert comes(lambda: b"reward" in requests.read_bytes()), "the client sends now and then"
        server.kill()
        server.wait()

    try:
        key = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "a" * 40, "WANDB_ERROR_REPORTING": "false"}
        seconds, err, slowest = run_and_take_away("wandb", tmp_path, take_away, key)
    finally:
        server.kill()
    nothing_was_waited_for(seconds, slowest)
    assert err.count("WARNED wandb failed") == 1
    assert "metrics.jsonl has every number" in err
    every_step_is_kept(tmp_path)


@pytest.mark.slow
def test_a_trackio_data_base_that_goes_away(tmp_path):
    pytest.importorskip("trackio")
    home = tmp_path / "trackio"

    def take_away():
        assert comes(lambda: list(home.glob("*.db"))), "it is written now and then"
        while not home.is_file():  # it may be made again between the two, in the middle of a record
            with contextlib.suppress(OSError):
                home.rename(tempfile.mkdtemp(dir=tmp_path))
                home.write_text("no folder any more")

    seconds, err, slowest = run_and_take_away("trackio", tmp_path, take_away, {"TRACKIO_DIR": str(home)})
    nothing_was_waited_for(seconds, slowest)
    assert err.count("WARNED") <= 1
    every_step_is_kept(tmp_path)


@pytest.mark.slow
def test_a_tensorboard_folder_on_a_disk_that_fills_up(tmp_path):
    pytest.importorskip("tensorboard")
    disk = tmp_path / "run" / "tensorboard"
    tried = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("this process may not mount a disk")
    subprocess.run(["umount", str(tmp_path)], check=True)

    def take_away():
        with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))

    try:
        seconds, err, slowest = run_and_take_away("tensorboard", tmp_path, take_away, {"SMALL_DISK": "1"})
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)
    nothing_was_waited_for(seconds, slowest)
    assert err.count("WARNED") == 1
    assert "metrics.jsonl has every number" in err
    every_step_is_kept(tmp_path)
