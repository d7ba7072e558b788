"""SIGTERM, Ctrl-C and SIGHUP: the step is finished, or abandoned where nothing has been learnt from it yet; then the run saves itself.

A second SIGTERM or Ctrl-C ends the process at once. That is safe: checkpoints are never half, and records are cut back when a run
carries on. SIGHUP, which says that the terminal is gone, comes from shell and system both, and often beside a SIGTERM: it is no
second signal, and none comes second to it. Where it is ignored, as under nohup, it stays so.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from groupwise.distributed.signals import HANGUP, stop_signals

__all__ = ["AbandonStep", "StopSignals"]


class AbandonStep(BaseException):
    """Raised by a signal inside the sampling of a step. Not an Exception: a reward function's ``except`` must not swallow it."""


class StopSignals:
    """While entered, such signals are noted instead of ending the process. Outside the main thread it does nothing."""

    def __init__(self, at_once: bool = True) -> None:
        """``at_once``: nothing is abandoned and no batch left half learnt where it is False: several processes stop together."""
        self.at_once = at_once
        self.received: signal.Signals | None = None
        self.may_abandon = False
        """Whether the step has changed nothing yet, so that it can be dropped on the spot."""
        self._asked = 0
        """How often somebody asked, SIGHUP apart."""
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

    def at_once_and_received(self) -> bool:
        return self.at_once and self.received is not None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._asked += number != HANGUP
        if self._asked > 1:
            os._exit(128 + number)
        if self.received is not None:
            return
        self.received = signal.Signals(number)
        if self.may_abandon:
            self.may_abandon = False
            raise AbandonStep
