"""A process that is done ends well, however late the one that keeps the board answers; one that writes a checkpoint, after it."""

import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from groupwise.distributed import failures
from groupwise.distributed import launch as launcher
from groupwise.distributed.failures import Board, Seal, Watch
from groupwise.distributed.launch import SAVING, launch

SLOW_TO_ANSWER = """
import os, signal, subprocess, sys, threading, time
from pathlib import Path
from groupwise.distributed import failures, open_world

asking, read, finish = threading.Event(), failures.Board.read, failures.Watch.finish
pids = []

def noting_read(board):
    asking.set()
    return read(board)

def late_finish(watch):
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif not watch.over.is_set():
        while Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        for _ in range(2):  # the first question may have been answered before; the second one is not
            asking.clear()
            asking.wait(2)
        subprocess.Popen(["sh", "-c", f"sleep 0.5; kill -CONT {pids[0]}"])
    finish(watch)

failures.Board.read, failures.Watch.finish = noting_read, late_finish
with open_world(True, 600) as world:
    pids.extend(world.all_gather_object(os.getpid()))
Path(sys.argv[1], f"done-{world.rank}").touch()
"""


class AnswersLate:
    """A store that answers when ``finish`` is under way, and notes whether that had come back before."""

    def __init__(self):
        self.watch, self.returned, self.was_left = None, threading.Event(), None
        self.asked = threading.Event()

    def check(self, keys):
        self.asked.set()
        assert self.watch.over.wait(60)
        self.was_left = self.returned.wait(0.3)
        return False


def test_nobody_leaves_while_the_board_is_asked():
    store = AnswersLate()
    watch = store.watch = Watch(Board(store, 0, 2, Seal("secret", "run 1")), 2, None)
    watch.start()
    assert store.asked.wait(60)
    watch.finish()
    store.returned.set()
    watch.join()
    assert store.was_left is False


@pytest.mark.soak
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
def test_a_process_that_is_done_ends_well_where_the_first_answers_late(tmp_path, monkeypatch):
    """The first process stands still just before it ends, and goes on while the second one would be taking its interpreter down."""
    script = tmp_path / "leaves.py"
    script.write_text(SLOW_TO_ANSWER)
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    assert launch([sys.executable, str(script), str(tmp_path)], 2) == 0
    assert {path.name for path in tmp_path.glob("done-*")} == {"done-0", "done-1"}


def test_a_process_is_not_ended_while_it_writes_a_checkpoint(monkeypatch, tmp_path):
    """Nobody brings its main thread out here; the launcher hears that it is writing."""
    ended, saving, sign = threading.Event(), threading.Event(), tmp_path / "saving"
    monkeypatch.setattr(failures, "_GRACE_S", 0.1)
    monkeypatch.setattr(failures, "_LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(failures.os, "_exit", lambda code: ended.set())
    monkeypatch.setenv(SAVING, str(sign))
    sign.touch()
    os.utime(sign, (0, 0))
    saving.set()
    board = SimpleNamespace(rank=1, read=lambda: failures.Failure(0, "out of luck", 3))
    watch = Watch(board, 2, None, saving.is_set)
    watch.main = 0
    watch.start()
    assert not ended.wait(0.5)
    assert sign.stat().st_mtime > 0
    saving.clear()
    assert ended.wait(60)
    watch.finish()


def test_a_process_ends_where_the_board_is_gone_for_good(monkeypatch, capsys):
    """As where the first one was killed, and this one waits on a GPU. A board that answers again counts as there."""
    ended, reads = threading.Event(), []
    monkeypatch.setattr(failures, "_GRACE_S", 0.1)
    monkeypatch.setattr(failures, "_LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(failures, "_WAIT_FOR_WORD_S", 0.3)
    monkeypatch.setattr(failures.os, "_exit", lambda code: ended.set())

    def read():
        reads.append(0)
        if answers.is_set() and len(reads) % 2:
            return None
        raise RuntimeError("Connection reset by peer")

    answers = threading.Event()
    answers.set()
    watch = Watch(SimpleNamespace(rank=1, read=read), 2, None)
    watch.main = 0
    watch.start()
    assert not ended.wait(1)
    answers.clear()
    assert ended.wait(60)
    watch.finish()
    assert "another of the 2 processes ended or did not answer in time (Connection reset by peer)" in capsys.readouterr().err


@pytest.mark.parametrize(("writes_s", "killed"), [(100.0, False), (0.0, True)])
def test_the_launcher_waits_for_a_checkpoint(monkeypatch, tmp_path, writes_s, killed):
    """Process 1 has failed; process 0 is there for 100 s more."""
    now, kills = [1000.0], []

    def sleep(seconds):
        now[0] += seconds
        if now[0] < 1000 + writes_s:
            os.utime(tmp_path / "saving", (now[0], now[0]))

    class Writing:
        returncode = None

        def poll(self):
            self.returncode = -9 if kills else 1 if now[0] > 1100 else None
            return self.returncode

        def kill(self):
            kills.append(now[0])

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: now[0], time=lambda: now[0])
    monkeypatch.setattr(launcher, "time", clock)
    with (tmp_path / "saving").open("w") as file:
        os.utime(file.name, (0, 0))
        assert launcher._wait([Writing(), SimpleNamespace(returncode=3, poll=lambda: 3)], file.fileno()) == 3
    assert bool(kills) == killed


@pytest.mark.soak
def test_a_checkpoint_that_is_being_written_is_whole_when_another_process_has_failed(tmp_path):
    """With next to no time for what outlives a failed one."""
    script, program = tmp_path / "writes.py", tmp_path / "launches.py"
    script.write_text(
        "import threading, time\n"
        "from pathlib import Path\n"
        "from groupwise.distributed import failures, open_world\n"
        "failures._GRACE_S = 0.2\n"
        "def write():\n"
        "    time.sleep(6)\n"
        f"    Path({str(tmp_path / 'whole')!r}).touch()\n"
        "with open_world(True, 600) as world:\n"
        "    if world.rank == 0:\n"
        "        thread = threading.Thread(target=write)\n"
        "        world.is_saving = thread.is_alive\n"
        "        thread.start()\n"
        "    world.all_gather_object(None)\n"
        "    if world.rank == 1: raise ValueError('out of luck')\n"
        "    try:\n"
        "        world.all_gather_object(None)\n"
        "    finally:\n"
        "        thread.join()\n"
    )
    program.write_text(
        "import sys; from groupwise.distributed import launch; launch._GRACE_S = 2.0\n"
        f"sys.exit(launch.launch([sys.executable, {str(script)!r}], 2))\n"
    )
    done = subprocess.run([sys.executable, program], env={**os.environ, "PYTHONPATH": ":".join(sys.path)}, timeout=600)
    assert done.returncode == 1
    assert (tmp_path / "whole").exists()
