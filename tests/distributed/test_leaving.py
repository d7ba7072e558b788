"""A process that is done ends well, however late the one that keeps the board answers."""

import sys
import threading

import pytest

from groupwise.distributed.failures import Board, Seal, Watch
from groupwise.distributed.launch import launch

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
