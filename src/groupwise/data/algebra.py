"""Asking math-verify whether two expressions are equal, with a time limit that holds anywhere.

math-verify limits its own time with ``signal.alarm``, which works on the main thread only, and an expression such as
``9^{9^{9^9}}`` cannot be interrupted from Python at all. So it runs in worker processes, started when they are first needed, and
killed when they do not answer in time.

No verdict is never "unequal": a question that was not answered is asked once more of a new worker, and then raises.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from groupwise.errors import UncheckedAnswerError

__all__ = ["equivalent", "failures", "renew_budget"]

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0
BUDGET_S = 30.0
"""Seconds that questions without an answer, and the workers that they cost, may take between two calls of ``renew_budget``. Once they are
spent no question is asked, so that a step or a problem ends whatever is written in it."""
START_LIMIT_S = 60.0
"""Importing sympy takes seconds on a busy machine."""
STARTS_ALLOWED = 3
"""Failed starts in a row after which no more are tried: math-verify is missing or broken."""
WORKERS = 2
"""Most workers at a time: one slow question does not hold up other threads. A second is started only where two ask at once."""
CACHED_VERDICTS = 20_000

Failure = Literal["timeout", "error", "crash", "unavailable", "spent"]
REASONS: Mapping[Failure, str] = {
    "timeout": "it found no answer in time",
    "error": "it raised an error",
    "crash": "its process ended, or ran out of memory",
    "unavailable": "its process does not start; is the package math-verify installed?",
    "spent": f"other questions took the {BUDGET_S:.0f} seconds that there are for those without an answer",
}


def equivalent(answer: str, reference: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether math-verify finds ``answer`` equal to ``reference``, both LaTeX without dollar signs. Safe on any thread.

    A question that is not answered within ``timeout_s`` seconds is asked again with three times as many, or what is left of the budget.
    Raises UncheckedAnswerError where that gave no verdict either, where math-verify raises an error, or the budget is spent; a time-out and
    an error are remembered, so that the same question raises at once, and the rest is not.
    """
    return _CHECKER.equivalent(answer, reference, timeout_s)


def failures() -> Mapping[str, int]:
    """How many questions had no verdict since this process began: ``timeout``, ``error``, ``crash``, ``unavailable``, ``spent``."""
    return dict(_CHECKER.failures)


def renew_budget() -> None:
    """A new step begins, or a new problem of an evaluation: questions without an answer may take ``BUDGET_S`` seconds again."""
    _CHECKER.left_s = BUDGET_S


class _WorkerTimeout(Exception):
    pass


class _WorkerGone(Exception):
    pass


class _Worker:
    """One process running ``algebra_worker.py``, spoken to in lines of JSON."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("algebra_worker.py")
        # -P: otherwise this folder heads sys.path, and our inspect.py hides the standard library's.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.owner = os.getpid()
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        # A thread that blocks on the pipe, because no portable call reads a line with a time limit.
        threading.Thread(target=self._read, name="groupwise-algebra", daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self.process.stdout or ():
                self._lines.put(line)
        self._lines.put(b"")

    def receive(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise _WorkerTimeout from None
        if not line.endswith(b"\n"):
            raise _WorkerGone
        reply: dict[str, Any] = json.loads(line)
        return reply

    def ask(self, answer: str, reference: str, timeout_s: float) -> bool | Literal["error"]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([answer, reference, timeout_s]).encode() + b"\n")
            self.process.stdin.flush()
        except (OSError, ValueError):
            raise _WorkerGone from None
        reply = self.receive(timeout_s)
        if "error" in reply:
            if reply["error"] == "MemoryError":
                raise _WorkerGone
            log.debug("math-verify raised %s", reply["error"])
            return "error"  # as any worker would say
        return bool(reply["equal"])

    def kill(self) -> None:
        if self.owner != os.getpid():  # inherited through a fork: the worker belongs to the parent
            return
        with contextlib.suppress(OSError):
            self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()


class _Checker:
    """Owns the workers and the verdicts already given."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self.left_s = BUDGET_S
        self._lock = threading.Lock()
        self._idle: list[_Worker] = []
        self._places = threading.BoundedSemaphore(WORKERS)
        self._alive: set[_Worker] = set()
        self._failed_starts = 0
        self._verdicts: OrderedDict[tuple[str, str], bool | Failure] = OrderedDict()

    def equivalent(self, answer: str, reference: str, timeout_s: float) -> bool:
        key = (answer, reference)
        with self._lock:
            known = self._verdicts.get(key)
            if known is not None:
                self._verdicts.move_to_end(key)
        verdict = self._asked(answer, reference, timeout_s) if known is None else known
        with self._lock:
            if verdict in (True, False, "timeout", "error"):
                self._verdicts[key] = verdict
                if len(self._verdicts) > CACHED_VERDICTS:
                    self._verdicts.popitem(last=False)
            if isinstance(verdict, bool):
                return verdict
            self.failures[verdict] += 1
            count = self.failures[verdict]
        message = f"math-verify gave no verdict on the answer {answer!r:.80} against {reference!r:.80}: {REASONS[verdict]}"
        if count in (1, 10, 100) or count % 1000 == 0:
            log.warning("%s (%s %d of this process)", message, verdict, count)
        raise UncheckedAnswerError(message)

    def _asked(self, answer: str, reference: str, timeout_s: float) -> bool | Failure:
        if self.left_s <= 0:
            return "spent"
        verdict = self._ask_once(answer, reference, timeout_s)
        if isinstance(verdict, bool) or verdict in ("error", "unavailable") or self.left_s <= 0:
            return verdict
        return self._ask_once(answer, reference, min(3 * timeout_s, self.left_s))

    def _ask_once(self, answer: str, reference: str, timeout_s: float) -> bool | Failure:
        with self._places:
            started = time.monotonic()
            worker = self._taken()
            if worker is None:
                return "unavailable"
            failure: Failure = "crash"
            try:
                verdict = worker.ask(answer, reference, timeout_s)
            except _WorkerTimeout:
                failure = "timeout"
            except Exception:
                log.debug("math-verify's process failed", exc_info=True)
            except BaseException:  # Ctrl-C between question and reply: the reply must not answer the next question
                self._drop(worker)
                raise
            else:
                with self._lock:
                    self._idle.append(worker)
                return verdict
            self._drop(worker)
            self.left_s -= time.monotonic() - started
            return failure

    def _taken(self) -> _Worker | None:
        with self._lock:
            while self._idle:
                worker = self._idle.pop()
                if worker.process.poll() is None:
                    return worker
                self._drop(worker)
            if self._failed_starts >= STARTS_ALLOWED:
                return None
        started = None
        try:
            started = _Worker()
            self._alive.add(started)
            started.receive(START_LIMIT_S)
        except Exception:
            self._failed_starts += 1
            if started is not None:
                self._drop(started)
            return None
        self._failed_starts = 0
        return started

    def _drop(self, worker: _Worker) -> None:
        self._alive.discard(worker)
        worker.kill()

    def close(self) -> None:
        self._idle.clear()
        while self._alive:
            self._alive.pop().kill()


_CHECKER = _Checker()
atexit.register(lambda: _CHECKER.close())


def _renew_after_fork() -> None:
    """A forked child must not wait for a lock that a thread of its parent held, nor talk to its parent's workers."""
    global _CHECKER
    _CHECKER = _Checker()


os.register_at_fork(after_in_child=_renew_after_fork)
