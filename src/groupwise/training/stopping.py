"""SIGTERM, Ctrl-C and SIGHUP: it is said at once, what has changed nothing yet is abandoned, and the run saves itself.

Sampling is abandoned on the spot, and so are the passes of an update, in between two of them: until the optimiser's step nothing has been
learnt from them, and a scheduler gives 30 s, in which the passes of a large model would not end. What was abandoned is done again, with
the same numbers, when the run is resumed.

A second SIGTERM or Ctrl-C ends the process at once; from Python a second Ctrl-C raises KeyboardInterrupt, as soon as a checkpoint that is
being written is whole, and a notebook keeps its variables. That is safe: checkpoints are never half, and records are cut back when a run
resumes. A SIGTERM within a second of another is the same one: timeout(1) sends it to its command and then to its group. SIGHUP, which
says that the terminal was closed, comes from shell and system both, and often beside a SIGTERM: it is no second signal, and none comes
second to it. Where it is ignored, as under nohup, it stays so.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from groupwise.distributed.launch import stop_signals

__all__ = ["AbandonStep", "StopSignals"]

_SAME_S = 1.0
"""A SIGTERM that comes so soon after another is no second one."""


def say_now(sentence: str) -> None:
    """Write to standard error, past every buffer: a handler may have interrupted whoever holds a stream's lock."""
    with suppress(OSError):  # the terminal may be closed
        os.write(2, f"\n{sentence}\n".encode())


class AbandonStep(BaseException):
    """Raised by a signal inside the sampling of a step. Not an Exception: a reward function's ``except`` must not swallow it."""


class StopSignals:
    """While entered, such signals are noted instead of ending the process. Outside the main thread it does nothing."""

    def __init__(self, at_once: bool = True, say: Callable[[str], object] = say_now) -> None:
        """``say``: hears of the first signal, inside its handler.

        ``at_once``: nothing is abandoned and no batch left half learnt where it is False: several processes stop together.
        """
        self.at_once = at_once
        self.received: signal.Signals | None = None
        self.interruptible = False
        """Whether a second Ctrl-C raises KeyboardInterrupt instead of ending the process."""
        self.may_abandon = False
        """Whether the step has changed nothing yet, so that it can be dropped on the spot."""
        self._say = say
        self._asked = 0
        """How often somebody asked, SIGHUP apart."""
        self._terminated = -math.inf
        """When SIGTERM came, repetitions apart."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in stop_signals()}
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """A signal raises AbandonStep here at once: what happens inside changes nothing that has been learnt."""
        if self.at_once_and_received():
            raise AbandonStep
        self.may_abandon = self.at_once
        try:
            yield
        finally:
            self.may_abandon = False

    def finishing(self) -> str:
        """What is done before the process ends."""
        if self.may_abandon:
            return "what is under way is abandoned, and the run is saved."
        if self.at_once:
            return "the pass or the file that is under way is finished, and the run is saved."
        return "the step that is under way is finished by all processes, and the run is saved."

    def at_once_and_received(self) -> bool:
        return self.at_once and self.received is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            now = time.monotonic()
            if now - self._terminated < _SAME_S:
                return
            self._terminated = now
        self._asked += number != signal.SIGHUP
        if self._asked > 1:
            if number == signal.SIGINT and self.interruptible:
                raise KeyboardInterrupt
            os._exit(128 + number)
        if self.received is not None:
            return
        self.received = signal.Signals(number)
        self._say(f"{self.received.name}: {self.finishing()} A second signal ends it at once, and what was saved before stays.")
        if self.may_abandon:
            self.may_abandon = False
            raise AbandonStep
