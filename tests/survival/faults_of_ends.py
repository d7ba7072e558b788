"""Faults of how a run ends, and of what is done to one that has ended: signals, kills, a lost output, and ``--resume`` afterwards."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.survival.place import Place
from tests.survival.trying import Outcome, begun_and_held, digest, fault, goes_on, stopped, told

__all__: list[str] = []


@fault("SIGTERM")
def terminated(place: Place) -> Outcome:
    said = told(stopped(place), place, "stopped by SIGTERM", "--resume")
    goes_on(place)
    return Outcome(re.sub(r"step(.)\d", r"step\1N", said), 143, "everything; `--resume` went on to the end")


@fault("Ctrl-C, and again while it saves (a slow disk, injected)")
def interrupted_twice(place: Place) -> Outcome:
    def patch() -> None:
        from groupwise.training import checkpoint

        write = checkpoint._write

        def slow(aside: Path, snapshot: checkpoint.Snapshot) -> None:
            write(aside, snapshot)
            while True:  # one long sleep would not see a signal that comes just before it
                time.sleep(0.05)

        checkpoint._write = slow

    place.write("held", output={"checkpoint_every": 0})
    going = place.begin(before=patch)
    going.wait_for(lambda: going.log.is_file() and "step 2/5" in going.log.read_text(errors="replace"))
    os.kill(going.process, signal.SIGINT)
    place.let_go()
    going.wait_for(lambda: any(place.folder.glob("checkpoints/.step-*.partial/manifest.json")))
    os.kill(going.process, signal.SIGINT)
    ended = going.wait()
    assert ended.exit_code == 130
    assert "Traceback" not in ended.said, ended.said
    assert not list(place.folder.glob("checkpoints/step-*"))
    goes_on(place)
    assert not list(place.folder.glob("checkpoints/.*"))
    return Outcome(
        "the process ended at once; what was half written is no checkpoint",
        130,
        "what was saved before; `--resume` went on to the end",
    )


@fault("SIGKILL")
def killed(place: Place) -> Outcome:
    going = begun_and_held(place)
    os.kill(going.process, signal.SIGKILL)
    assert going.wait().exit_code == -signal.SIGKILL
    place.let_go()
    goes_on(place)
    return Outcome("the process ended", 137, "every checkpoint; `--resume` went on to the end")


@fault("terminal: closed under a run (a real pseudo-terminal)")
def terminal_closed(place: Place) -> Outcome:
    master, slave = os.openpty()

    def onto_terminal() -> None:
        import fcntl
        import termios

        os.close(master)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the faults themselves are tried under nohup
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for number in (0, 1, 2):
            os.dup2(slave, number)
        os.close(slave)

    place.write("held")
    going = place.begin(before=onto_terminal, environment={"TERM": "xterm"})
    os.close(slave)
    shown = drained(master, lambda: (place.folder / "checkpoints" / "step-2").is_dir() or not going.is_alive())
    assert going.is_alive(), shown
    os.close(master)  # the system sends SIGHUP, and nothing can be written any more
    place.let_go()
    ended = going.wait()
    assert ended.exit_code == 128 + signal.SIGHUP, ended.exit_code
    goes_on(place)
    return Outcome("as SIGTERM: the step was abandoned or finished, and saved; what it had to say went nowhere", 129,
                   "everything; `--resume` went on to the end")  # fmt: skip


def drained(terminal: int, enough: Callable[[], bool]) -> str:
    """What a run shows until ``enough()``, read: a terminal that nobody reads holds up whoever writes to it."""
    os.set_blocking(terminal, False)
    shown = b""
    while not enough():
        try:
            shown += os.read(terminal, 65536)
        except OSError:  # nothing there at the moment, or nobody
            time.sleep(0.01)
    return shown.decode(errors="replace")


@fault("output: nobody reads it any more (`| head -3`)")
def pipe_closed(place: Place) -> Outcome:
    reader, writer = os.pipe()

    def into_pipe() -> None:
        os.close(reader)
        os.dup2(writer, 1)
        os.close(writer)

    place.write("held", output={"checkpoint_every": 0})
    going = place.begin(before=into_pipe)
    os.close(writer)
    with os.fdopen(reader) as lines:
        for _ in range(3):
            lines.readline()
    place.let_go()
    ended = going.wait()
    told(ended, place, "standard output cannot be written (Broken pipe): the run goes on")
    assert "Exception ignored" not in ended.said, ended.said
    assert ended.exit_code == 0, ended.said
    assert place.steps() == [1, 2, 3, 4, 5]
    assert place.done
    return Outcome("one warning on standard error, as far as that is there; the run went on to its end", 0, "everything")


@fault("finished run: `--resume`, with and without checkpoints")
def finished(place: Place) -> Outcome:
    for every in (0, 2):
        place.folder = place.path / f"run-{every}"
        place.write(output={"checkpoint_every": every})
        assert place.run().exit_code == 0
        before = digest(place.folder)
        ended = place.run("--resume")
        told(ended, place, "finished after step 5: nothing to resume.")
        assert ended.exit_code == 0
        assert digest(place.folder) == before
    return Outcome("'run finished after step 5: nothing to resume.'", 0, "everything as it was")


@fault("finished run: `--resume` to more steps, without checkpoints")
def no_way_on(place: Place) -> Outcome:
    place.write(output={"checkpoint_every": 0})
    assert place.run().exit_code == 0
    before = digest(place.folder)
    ended = place.run("--resume", "training.steps=9")
    said = told(ended, place, "kept no checkpoint", "model.name=")
    assert ended.exit_code == 2
    assert digest(place.folder) == before
    return Outcome(said, 2, "everything as it was")


@fault("finished run: SIGKILL while it is continued to more steps")
def killed_beyond(place: Place) -> Outcome:
    place.write("held", training={"steps": 2}, output={"checkpoint_every": 2})
    assert place.run().exit_code == 0
    model = digest(place.folder / "final_model")
    going = place.begin("--resume", "training.steps=5")
    going.wait_for(lambda: (place.folder / "summary-step-2.json").is_file())
    os.kill(going.process, signal.SIGKILL)
    assert going.wait().exit_code == -signal.SIGKILL
    assert digest(place.folder / "final_model") == model
    place.let_go()
    place.write("held", output={"checkpoint_every": 2})
    goes_on(place)
    assert digest(place.folder / "final_model") != model
    return Outcome("the process ended", 137,
                   "the model and the summary that the run had finished with; `--resume` went on to the end")  # fmt: skip


@fault("SIGKILL while the final model is judged, without checkpoints (a slow evaluation, injected)")
def killed_while_judged(place: Place) -> Outcome:
    def patch() -> None:
        from groupwise.training import run

        def slow(*words: Any, **named: Any) -> None:
            Path("judging").touch()
            time.sleep(900)

        run.evaluate_stage = slow  # type: ignore[assignment]

    place.write(output={"checkpoint_every": 0})
    going = place.begin(before=patch)
    going.wait_for((place.path / "judging").exists)
    os.kill(going.process, signal.SIGKILL)
    assert going.wait().exit_code == -signal.SIGKILL
    model = digest(place.folder / "final_model")
    goes_on(place)
    assert digest(place.folder / "final_model") == model
    return Outcome("the process ended", 137, "the model, written before it is judged; `--resume` judged it")
