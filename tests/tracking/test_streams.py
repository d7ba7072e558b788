"""Output whose reader goes away: a run goes on, and a command ends without a word. A full disk is told."""

import errno
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from groupwise.streams import BrokenPipeSafe, lost_output, tolerate_broken_pipe
from groupwise.tracking import ConsoleTracker, Trackers
from tests.warm import python

ROOT = Path(__file__).resolve().parents[2]


class Gone(io.StringIO):
    """A pipe without a reader."""

    def write(self, text=""):
        raise BrokenPipeError(32, "Broken pipe")

    flush = write


def test_what_cannot_be_written_is_dropped_and_told_once(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stdout", Gone())
    gone = sys.stdout
    with tolerate_broken_pipe():
        print("one")
        print("two", flush=True)
        Console().print("three")
    assert sys.stdout is gone
    (record,) = caplog.records
    assert (
        record.getMessage() == "standard output cannot be written (Broken pipe): the run goes on, and its folder has every number"
    )


class Failing(io.StringIO):
    """A file or a terminal that takes nothing, for the reason ``number``."""

    def __init__(self, number, descriptor=None):
        super().__init__()
        self.number, self.descriptor = number, descriptor

    def write(self, text=""):
        raise OSError(self.number, os.strerror(self.number))

    flush = write

    def fileno(self):
        return super().fileno() if self.descriptor is None else self.descriptor


def test_on_a_full_disk_a_command_s_output_is_incomplete_and_a_run_only_warns(monkeypatch, caplog):
    monkeypatch.setattr(sys, "stdout", BrokenPipeSafe(Failing(errno.ENOSPC), "stdout"))
    print("before the run")
    assert lost_output() == "No space left on device"
    with tolerate_broken_pipe():
        print("in the run")
    print("after it")
    assert lost_output() is None
    assert [record.getMessage() for record in caplog.records] == [
        "standard output cannot be written (No space left on device): the run goes on, and its folder has every number"
    ]


def test_a_broken_disk_is_told_from_a_terminal_that_was_closed(monkeypatch, tmp_path):
    """The system says the same of both."""
    with (tmp_path / "out").open("w") as file:
        for descriptor, lost in ((file.fileno(), "Input/output error"), (None, None)):
            monkeypatch.setattr(sys, "stdout", BrokenPipeSafe(Failing(errno.EIO, descriptor), "stdout"))
            print("one")
            assert lost_output() == lost


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_command_whose_output_finds_no_room_says_so_and_exits_with_1():
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "groupwise", "recipes", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
    said = "groupwise: standard output cannot be written (No space left on device): what was printed is incomplete\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_other_mistakes_are_not_swallowed(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    with tolerate_broken_pipe(), pytest.raises(TypeError):
        sys.stdout.write(b"bytes")


def test_a_console_of_one_s_own_that_lost_its_pipe_is_done_without(caplog):
    """rich answers a closed pipe with SystemExit, after which nothing would have been saved."""
    read, write = os.pipe()
    os.close(read)
    stream = os.fdopen(write, "w")
    trackers = Trackers([ConsoleTracker(Console(file=stream), live=False)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)  # which rich points at nothing
        trackers.say("anything")
    assert trackers.sinks == []
    trackers.say("more")


@pytest.mark.parametrize(
    "words",
    [
        ["config"],
        pytest.param(["--help"], marks=pytest.mark.slow),
        pytest.param(["train", "no-such-recipe"], marks=pytest.mark.slow),
    ],
)
def test_short_commands_end_quietly(words):
    """Standard output and error go into a pipe that nobody reads."""
    read, write = os.pipe()
    os.close(read)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "groupwise", *words]
    try:
        alone = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, env=environment)
        both = subprocess.run(command, stdout=write, stderr=write, env=environment)
    finally:
        os.close(write)
    expected = 2 if words[0] == "train" else 0
    assert (alone.returncode, both.returncode) == (expected, expected)
    assert "Exception ignored" not in alone.stderr
    assert "Traceback" not in alone.stderr
    assert (alone.stderr == "") == (expected == 0)


def test_a_closed_terminal_is_not_a_second_signal():
    """Shell and system both send SIGHUP, and an end of the session SIGTERM beside it: none of it cuts the saving short."""
    from groupwise.training.stopping import StopSignals

    before = signal.getsignal(signal.SIGHUP)
    signals = StopSignals()
    with signals:
        for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP):
            os.kill(os.getpid(), number)
        assert signals.received is signal.SIGHUP
    assert signal.getsignal(signal.SIGHUP) is before


def test_an_ignored_hangup_stays_ignored():
    from groupwise.training.stopping import StopSignals

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_launcher_hands_a_hangup_on():
    """Each process says what it got; the launcher's exit code is theirs."""
    program = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGHUP, lambda number, frame: sys.exit(129))\n"
        "os.write(1, b'ready\\n')\n"  # at once: the two share the pipe
        "while True: time.sleep(0.05)\n"  # a call that waits for long would not see a signal that comes just before it
    )
    launcher = (
        f"import sys\nfrom groupwise.distributed.launch import launch\nsys.exit(launch([sys.executable, '-c', {program!r}], 2))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with subprocess.Popen([python(), "-c", launcher], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert [process.stdout.readline(), process.stdout.readline()] == ["ready\n", "ready\n"]
            process.send_signal(signal.SIGHUP)
            assert process.wait(300) == 129
        finally:
            process.kill()
