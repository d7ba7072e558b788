"""The command ``groupwise`` in a forked process: as a user runs it, but without the seconds that imports take."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import groupwise.training.loop  # noqa: F401 - imported before the forks
from groupwise.cli import main

__all__ = ["Ended", "Going", "begin", "run"]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    exit_code: int
    """Minus the signal's number where one ended it."""
    said: str
    """Standard output and error, together."""

    @property
    def last_line(self) -> str:
        lines = [line for line in self.said.splitlines() if line.strip()]
        return lines[-1] if lines else ""


@dataclass(frozen=True)
class Going:
    """A command that is going on."""

    process: int
    log: Path

    def wait(self, limit_s: float = 900.0) -> Ended:
        """Its end; after ``limit_s`` it is killed."""
        until = time.monotonic() + limit_s
        while True:
            found, status = os.waitpid(self.process, os.WNOHANG)
            if found:
                return Ended(os.waitstatus_to_exitcode(status), self.log.read_text(errors="replace"))
            if time.monotonic() > until:
                os.kill(self.process, signal.SIGKILL)
            time.sleep(0.01)

    def wait_for(self, there: Callable[[], bool], limit_s: float = 900.0) -> None:
        """Until ``there()``, or the command has ended."""
        until = time.monotonic() + limit_s
        while not there() and time.monotonic() < until and self.is_alive():
            time.sleep(0.01)

    def is_alive(self) -> bool:
        return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def begin(
    words: Sequence[str],
    log: Path,
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    memory_bytes: int | None = None,
    before: Callable[[], None] | None = None,
) -> Going:
    """``groupwise WORDS`` in ``folder``; ``memory_bytes`` is a limit on the address space, ``before`` is called in the new process."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return Going(process, log)
    code = 1
    try:
        _in_child(words, log, folder, environment or {}, memory_bytes, before)
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _in_child(
    words: Sequence[str], log: Path, folder: Path | None, environment: Mapping[str, str], memory_bytes: int | None,
    before: Callable[[], None] | None,
) -> None:  # fmt: skip
    handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.environ.update({"COLUMNS": "200", **environment})
    if folder is not None:
        os.chdir(folder)
    sys.argv = ["groupwise", *words]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it, and their children with them
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    if before is not None:
        before()
    for name, number in (("stdout", 1), ("stderr", 2)):  # what they write to is another kind of thing now, perhaps
        setattr(sys, name, os.fdopen(os.dup(number), "w", buffering=1))
    main()
    raise SystemExit(0)


def run(words: Sequence[str], log: Path, **named: object) -> Ended:
    """`begin`, and wait for the end."""
    return begin(words, log, **named).wait()  # type: ignore[arg-type]
