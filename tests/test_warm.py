"""A process that begins warm is one like any other: its words, input, environment, folder, output, exit code and signals are its own."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from groupwise.models.embedded import cache_folder
from tests.waiting import comes
from tests.warm import python

TELLS = "import os, sys; print(sys.argv, sys.stdin.read(), os.environ['TOLD'], os.getcwd(), 'torch' in sys.modules)"


def test_it_has_what_it_was_given(tmp_path):
    told = {**os.environ, "TOLD": "yes"}
    done = subprocess.run([python(), "-c", TELLS, "a"], input="b", text=True, capture_output=True, env=told, cwd=tmp_path)
    warm = sys.platform == "linux"
    assert (done.returncode, done.stdout, done.stderr) == (0, f"['-c', 'a'] b yes {tmp_path} {warm}\n", "")


@pytest.mark.parametrize(
    ("code", "ends"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.exit('why')", 1),
        ("1 / 0", 1),
        ("import atexit, os; atexit.register(os._exit, 5)", 5),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 15)", -15),
    ],
)
def test_it_ends_as_it_would(code, ends):
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True)
    assert done.returncode == ends
    assert ("why" in done.stderr) == ("why" in code)
    assert ("ZeroDivisionError" in done.stderr) == ("1 / 0" in code)


def test_a_signal_reaches_it_and_it_does_not_outlive_a_kill(tmp_path):
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(3))\n"
        "pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))\n"
        "while True: time.sleep(0.05)\n"  # one long sleep would not see a signal that comes just before it
    )
    for number, ends in ((signal.SIGTERM, 3), (signal.SIGKILL, -9)):
        place = tmp_path / number.name
        process = subprocess.Popen([python(), str(script), str(place)])
        assert comes(lambda place=place: place.is_file() and place.read_text())
        process.send_signal(number)
        assert process.wait(60) == ends
        assert comes(lambda place=place: not is_alive(int(place.read_text())))


def is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_what_tests_and_their_processes_keep_is_not_in_the_user_s_cache():
    code = "from groupwise.models.embedded import cache_folder; print(cache_folder())"
    done = subprocess.run([python(), "-c", code], capture_output=True, text=True, check=True)
    kept = cache_folder()
    assert Path(done.stdout.strip()) == kept
    assert (kept / "user").is_symlink(), "beside a link to it"
    assert not (kept / "fast-paths").is_symlink()
