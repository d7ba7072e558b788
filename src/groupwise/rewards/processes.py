"""Reward functions in processes of their own, where a time limit is hard: a call that is late is killed with its process, in a loop
of Python, in C code or asleep, and a new process takes its place.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from groupwise.rewards.calls import CallRaised, CallTimedOut
from groupwise.rewards.process_worker import read_message, write_message

__all__ = ["ProcessPool"]

START_LIMIT_S = 300.0
"""For starting Python and importing the reward files, which may import much."""


class _Gone(Exception):
    """The process ended by itself."""


class _Worker:
    """One process running ``process_worker.py``."""

    def __init__(self, entries: Mapping[str, Mapping[str, Any]]) -> None:
        script = Path(__file__).with_name("process_worker.py")
        # -P: otherwise this folder heads sys.path. A session of its own: Ctrl-C does not reach it, and what it started dies with it.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self.owner = os.getpid()
        self._replies: queue.SimpleQueue[tuple[str, Any] | None] = queue.SimpleQueue()
        # A thread that blocks on the pipe, because no portable call reads a message with a time limit.
        threading.Thread(target=self._read, name="reward process", daemon=True).start()
        try:
            self._send((list(sys.path), {name: dict(entry) for name, entry in entries.items()}))
            kind, said = self._receive(START_LIMIT_S)
        except (_Gone, CallTimedOut):
            kind, said = "failed", f"it ended, or was not ready after {START_LIMIT_S:g} seconds"
        if kind != "ready":
            self.kill()
            raise CallRaised(f"an error when its process was started: {said}")

    def _read(self) -> None:
        with contextlib.suppress(Exception):
            while self.process.stdout is not None:
                self._replies.put(read_message(self.process.stdout))  # type: ignore[arg-type]
        self._replies.put(None)

    def _send(self, message: Any) -> None:
        assert self.process.stdin is not None
        try:
            write_message(self.process.stdin, message)  # type: ignore[arg-type]
        except OSError as error:
            raise _Gone from error

    def _receive(self, timeout_s: float | None) -> tuple[str, Any]:
        try:
            reply = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            raise CallTimedOut from None
        if reply is None:
            raise _Gone
        return reply

    def ask(self, name: str, keywords: Mapping[str, Any], timeout_s: float | None) -> Any:
        self._send((name, dict(keywords), timeout_s))
        kind, value = self._receive(timeout_s)
        if kind == "raised":
            raise CallRaised(value)
        return value

    def kill(self) -> int | None:
        """End it and everything that it started; its exit status."""
        if self.owner != os.getpid():  # inherited through a fork: it belongs to the parent
            return None
        with contextlib.suppress(OSError):
            if hasattr(os, "killpg"):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()
        status = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()
        return status


class ProcessPool:
    """Up to ``size`` processes, started when they are first needed, in each of which every function is loaded.

    ``entries``: for each component, what ``RewardFunctionConfig`` needs to find its function again.
    """

    def __init__(self, entries: Mapping[str, Mapping[str, Any]], size: int) -> None:
        self.size = size
        self.killed: Counter[str] = Counter()
        """Processes that were killed because a call was late, or that ended under it, by component."""
        self._entries = entries
        self._workers: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._workers.put(None)
        self._alive: set[_Worker] = set()
        self._finalizer = weakref.finalize(self, _kill_all, self._alive)  # at exit too

    def call(self, name: str, keywords: Mapping[str, Any], timeout_s: float | None) -> Any:
        """What the function returned. Waits for a free process first; that and its start do not count to the limit.

        Raises ``CallTimedOut``, or ``CallRaised`` where the function raised, ended its process, or could not be sent its keywords.
        """
        try:
            pickle.dumps(dict(keywords))
        except Exception as error:
            raise CallRaised(f"an error before it began: its keywords cannot be sent to a process ({error})") from error
        worker = self._workers.get()
        try:
            if worker is None or worker.owner != os.getpid() or worker.process.poll() is not None:
                worker = self._start(worker)
            return worker.ask(name, keywords, timeout_s)
        except CallTimedOut:
            self.killed[name] += 1
            self._drop(worker)
            worker = None
            raise
        except _Gone:
            self.killed[name] += 1
            status = self._drop(worker)
            worker = None
            how = f"signal {-status}" if status is not None and status < 0 else f"status {status}"
            raise CallRaised(f"nothing, but its process ended with {how}") from None
        finally:
            self._workers.put(worker)

    def start(self) -> None:
        """Start a first process if there is something to call. Raises ``CallRaised`` where it cannot load the functions."""
        if not self._entries:
            return
        worker = self._workers.get()
        try:
            worker = self._start(worker) if worker is None else worker
        finally:
            self._workers.put(worker)

    def close(self) -> None:
        """End the processes. A call that comes later starts new ones."""
        _kill_all(self._alive)

    def _start(self, old: _Worker | None) -> _Worker:
        self._drop(old)
        worker = _Worker(self._entries)
        self._alive.add(worker)
        return worker

    def _drop(self, worker: _Worker | None) -> int | None:
        if worker is None:
            return None
        self._alive.discard(worker)
        return worker.kill()


def _kill_all(workers: set[_Worker]) -> None:
    while workers:
        workers.pop().kill()
