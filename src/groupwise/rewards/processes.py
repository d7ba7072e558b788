"""Reward functions in processes of their own, where a time limit is hard: a call that is late is killed with its process, in a loop
of Python, in C code or asleep, and a new process takes its place. In a sandbox (``sandbox.py``) the call alone is.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from groupwise.errors import printable
from groupwise.rewards import sandbox as walls
from groupwise.rewards.scores import CallRaised, CallTimedOut, StepRewards

__all__ = ["ProcessPool"]

START_LIMIT_S = 300.0
"""Time limit for starting Python and importing the reward files, which may import much."""
END_LIMIT_S = 30.0
"""Time limit for killing what a process has left behind."""
GRACE_S = 10.0
"""How long past its limit a call may outlive a parent that does not kill it."""
LEAST_BYTES, BYTES_PER_BYTE = 1 << 20, 64
"""The longest reply, whatever the request, and for each byte of the request: more than a reward and a place for each of its tokens take."""
_LONGEST_TOLD = 1000
"""Characters of what a process says went wrong."""


class _Gone(Exception):
    """The process ended by itself, or did not keep to the form of replies."""


class _Ended(CallRaised):
    """The call ended without an answer, and its process with it; the sandbox lives."""


class _Worker:
    """One process running ``process_worker.py``, with a second one in it."""

    def __init__(self, entries: Mapping[str, Mapping[str, object]], sandbox: bool) -> None:
        steps, environment = _walls() if sandbox else (None, None)
        script = Path(__file__).with_name("process_worker.py")
        try:
            ours, self._lifeline = os.pipe()
        except OSError as error:
            raise CallRaised(f"an error when its process was started: {_printable_line(error)}") from error
        try:
            # -P: otherwise this folder heads sys.path. A session of its own: Ctrl-C does not reach it.
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(script), str(ours)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                start_new_session=True, pass_fds=[ours], env=environment,
            )  # fmt: skip
        except OSError as error:  # no memory, or too many processes
            os.close(self._lifeline)
            raise CallRaised(f"an error when its process was started: {_printable_line(error)}") from error
        finally:
            os.close(ours)
        self.owner, self.sandbox, self.reusable = os.getpid(), sandbox, True
        self._number, self._most = 0, LEAST_BYTES
        self._asked = threading.Semaphore()
        self._replies: queue.SimpleQueue[tuple[str, object] | None] = queue.SimpleQueue()
        # A thread that blocks on the pipe, because no portable call reads a message with a time limit.
        threading.Thread(target=self._read, name="reward process", daemon=True).start()
        try:
            self._send(pickle.dumps(([os.path.abspath(place) for place in sys.path], steps)))
            loaded = {name: dict(entry) for name, entry in entries.items()}
            self._send(pickle.dumps((loaded, (GRACE_S, LEAST_BYTES, BYTES_PER_BYTE))))
            kind, said = self._receive(START_LIMIT_S)
        except (_Gone, CallTimedOut):
            kind, said = "failed", f"it ended, or was not ready after {START_LIMIT_S:g} seconds"
        if kind != "ready":
            self.kill()
            raise CallRaised(f"an error when its process was started: {_printable_line(said)}")

    def _read(self) -> None:
        """Read one reply for each request, and no more: what is written unasked stays in the pipe."""
        assert self.process.stdout is not None
        with contextlib.suppress(Exception, RecursionError):
            while self._asked.acquire():
                number, length = struct.unpack("!QQ", _exactly(self.process.stdout.read, 16))
                if number != self._number or length > self._most:
                    break
                body = _exactly(self.process.stdout.read, length)
                try:
                    self._replies.put(_parsed(body))
                except (ValueError, RecursionError):
                    if not self.sandbox:
                        break
                    self._replies.put(("ended", "something that is no reply"))  # of this call, and of no other
        self._replies.put(None)

    def _send(self, body: bytes) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(struct.pack("!Q", len(body)) + body)
            self.process.stdin.flush()
        except OSError as error:
            raise _Gone from error

    def _receive(self, timeout_s: float | None) -> tuple[str, object]:
        self.reusable = False
        try:
            reply = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            raise CallTimedOut from None
        if reply is None:
            raise _Gone
        self.reusable = True
        return reply

    def ask(self, name: str, keywords: bytes, timeout_s: float | None, seed: int | None) -> object:
        """What the function returned for the pickled ``keywords``. Raises CallRaised, CallTimedOut, or _Gone; ``reusable`` says whether
        the process can be used on."""
        self._number += 1
        self._most = LEAST_BYTES + BYTES_PER_BYTE * len(keywords)
        self._asked.release()
        self._send(pickle.dumps((self._number, name, timeout_s, seed)))
        self._send(keywords)
        # A sandbox kills the call by itself, and answers.
        kind, value = self._receive(None if timeout_s is None else timeout_s + GRACE_S * self.sandbox)
        if kind == "returned":
            return _scores(value)
        if kind == "late":
            raise CallTimedOut
        raise (_Ended if kind == "ended" else CallRaised)(_printable_line(value))

    def kill(self) -> int | None:
        """End it and everything that it started; its exit status. Once more does nothing."""
        if self.owner != os.getpid():  # inherited through a fork: it belongs to the parent
            return None
        lifeline, self._lifeline = self._lifeline, -1  # a descriptor's number is given again to whoever opens something
        with contextlib.suppress(OSError):
            os.close(lifeline)
        try:
            status = self.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(OSError):
                os.killpg(self.process.pid, signal.SIGKILL)
            status = self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()
        return status


class ProcessPool:
    """A pool of up to ``size`` processes of each kind, started when first needed, each with every function of its kind loaded.

    ``entries``: for each component, what ``RewardFunctionConfig`` needs to find its function again. ``sandboxed``: those of them that are
    called in a sandbox.
    """

    def __init__(self, entries: Mapping[str, Mapping[str, object]], size: int, sandboxed: Collection[str] = ()) -> None:
        self.size = size
        self.killed: Counter[str] = Counter()
        """Processes that were killed because a call was late, or that ended under it, by component."""
        self._entries = [{n: entry for n, entry in entries.items() if (n in sandboxed) == kind} for kind in (False, True)]
        self._workers: list[queue.LifoQueue[_Worker | None]] = [queue.LifoQueue(), queue.LifoQueue()]
        for _ in range(size):
            for workers in self._workers:
                workers.put(None)
        self._alive: set[_Worker] = set()
        self._finalizer = weakref.finalize(self, _kill_all, self._alive)  # at exit too

    def call(self, name: str, keywords: Mapping[str, object], timeout_s: float | None, seed: int | None = None) -> object:
        """What the function returned. Waits for a free process first; that and its start do not count to the limit.

        ``seed``: of the generators there, Python's and those of numpy and torch where its file imports them; None leaves them.

        Raises ``CallTimedOut``, or ``CallRaised`` where the function raised, ended its process, or could not be sent its keywords.
        """
        try:
            pickled = pickle.dumps(dict(keywords))
        except Exception as error:
            raise CallRaised(f"an error before it began: its keywords cannot be sent to a process ({error})") from error
        kind = name in self._entries[True]
        worker = self._workers[kind].get()
        try:
            worker = self._living(worker, kind)
            return worker.ask(name, pickled, timeout_s, seed)
        except (CallTimedOut, _Ended):
            self.killed[name] += 1
            if worker is not None and not worker.reusable:
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
            self._workers[kind].put(worker)

    def start(self) -> None:
        """Start a first process of each kind that has something to call. Raises ``CallRaised`` where it cannot load the functions."""
        for kind in (False, True):
            if self._entries[kind]:
                worker = self._workers[kind].get()
                try:
                    worker = self._living(worker, kind)
                finally:
                    self._workers[kind].put(worker)

    def close(self, sandboxes_alone: bool = False) -> None:
        """End the processes, or those of sandboxes. A call that comes later starts new ones."""
        _kill_all({one for one in self._alive if one.sandbox} if sandboxes_alone else self._alive)

    def _living(self, worker: _Worker | None, kind: bool) -> _Worker:
        """``worker``, or a new one where it has ended or is another process's."""
        if worker is not None and worker.owner == os.getpid() and worker.process.poll() is None:
            return worker
        self._drop(worker)
        worker = _Worker(self._entries[kind], kind)
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


def _walls() -> tuple[list[tuple[str, str, str]], dict[str, str]]:
    """What a sandbox shows, and its environment."""
    return [(step.path, step.kind, step.target) for step in walls.plan(*walls.readable())], walls.environment()


def _exactly(read: Callable[[int], bytes], length: int) -> bytes:
    content = read(length)
    if len(content) < length:
        raise EOFError
    return content


def _parsed(body: bytes) -> tuple[str, object]:
    """Raises ValueError or RecursionError where it is no reply. Its value may be anything that JSON can say."""
    kind, value = json.loads(body)
    if not isinstance(kind, str):
        raise ValueError
    return kind, value


def _scores(value: object) -> object:
    return [_steps(score) for score in value] if isinstance(value, list) else value


def _steps(score: object) -> object:
    """Steps as the process wrote them; whatever else it is, ``read_scores`` refuses what is no score."""
    match score:
        case {"StepRewards": [[*rewards], [*ends], str(unit)]}:
            return StepRewards(rewards, ends, unit)  # type: ignore[arg-type]
    return score


def _printable_line(said: object) -> str:
    """``said`` in one line that cannot act on a terminal."""
    text = " ".join(str(said)[:_LONGEST_TOLD].split())
    return printable(text)
