"""A run in processes that are forked from this one, which has everything imported; and the signals that end them."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from groupwise.config.schema import Config
from groupwise.distributed.launch import held_port
from groupwise.errors import StoppedError
from groupwise.training.loop import train
from tests.tiny import lower_case_share

__all__ = ["Forked", "begin"]

_LOOK_EVERY_S = 0.002
_LONGEST_S = 300.0
"""A run that takes longer hangs: it is ended, and that is a loss."""


@dataclass
class Forked:
    """The processes of one run, by rank."""

    running: list[int]
    codes: list[int] = field(default_factory=list)
    """How they ended, in the order in which they did: an exit code, or minus the signal."""
    hung: bool = False
    """Whether none ended for so long that they were ended."""

    @property
    def code(self) -> int:
        """That of the first that ended badly, as a launcher has it; 0 without."""
        return next((code for code in self.codes if code), 0)

    def look(self) -> None:
        for process in [*self.running]:
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                self.running.remove(process)
                self.codes.append(os.waitstatus_to_exitcode(status))

    def wait(self, limit_s: float) -> bool:
        """Until all have ended, or one has badly, or the time is over; whether none is left."""
        until = time.monotonic() + limit_s
        while self.running and not self.code and time.monotonic() < until:
            self.look()
            time.sleep(_LOOK_EVERY_S)
        return not self.running

    def end(self, grace_s: float) -> int:
        """Wait until all have ended; once one has ended badly, the others have so long before they are killed."""
        self.hung = not self.wait(_LONGEST_S) and not self.code
        until = time.monotonic() + (0.0 if self.hung else grace_s)
        while self.running and time.monotonic() < until:
            self.look()
            time.sleep(_LOOK_EVERY_S)
        for process in self.running:
            os.kill(process, signal.SIGKILL)
        while self.running:
            self.look()
        return self.code

    def stop_after(self, delay_s: float, number: signal.Signals, chance: random.Random) -> int:
        """Send the signal after ``delay_s`` unless the run has ended by then; how it ended.

        SIGKILL meets one process or all, SIGTERM all of them, as a launcher passes it on. What the one that is left does is its own
        affair for some seconds.
        """
        if not self.wait(delay_s) and not self.code:
            alone = number is signal.SIGKILL and chance.random() < 0.7
            for process in [chance.choice(self.running)] if alone else self.running:
                os.kill(process, number)
        return self.end(chance.uniform(0, 6) if number is signal.SIGKILL else 60)


def begin(config: Config, folder: Path, processes: int = 1) -> Forked:
    """Start the run, or resume it. What it says goes beside the folder."""
    sys.stdout.flush()
    with held_port() as port:  # the processes inherit what holds it
        return Forked([_fork(config, folder, rank, processes, port) for rank in range(processes)])


def _fork(config: Config, folder: Path, rank: int, size: int, port: int) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        log = os.open(folder.with_suffix(f".{rank}.log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        if size > 1:
            told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
            here = {"MASTER_ADDR": "127.0.0.1", "XDG_RUNTIME_DIR": str(folder.parent)}
            os.environ.update({**here, **{name: str(value) for name, value in told.items()}})
        train(config, rewards={"letters": lower_case_share}, console=Console(quiet=True), run_folder=folder, resume=True)
        code = 0
    except StoppedError as stopped:
        code = stopped.exit_code
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
