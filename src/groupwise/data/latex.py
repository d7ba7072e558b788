"""Mathematical equivalence through math-verify, with a time limit that holds anywhere.

math-verify limits its own time with ``signal.alarm``, which works on the main thread only, and an expression such as
``9^{9^{9^9}}`` cannot be interrupted from Python at all. So it runs in one worker process, started when it is first needed,
and killed when it does not answer in time.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import queue
import re
import subprocess
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["latex_equivalent", "latex_equivalent_in_text", "latex_failures"]

LONGEST_EXPRESSION = 500
"""Characters; a longer text is prose or noise, and never worth a computer algebra system's time."""
LONGEST_TEXT = 4000
"""Characters at the end of a completion in which math-verify looks for a final answer."""
START_LIMIT_S = 60.0
"""Importing sympy takes seconds on a busy machine."""
STARTS_ALLOWED = 3
"""Failed starts in a row after which no more are tried: math-verify is missing or broken."""
CACHED_VERDICTS = 20_000

MATHS_MARK = re.compile(r"[\\^_=+*/()\[\]{}<>|,\-0-9]")
COMMAND = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|operatorname)\{[^{}]*\}|\\(?:begin|end)\{[^{}]*\}|\\[A-Za-z]+")
LONG_WORD = re.compile(r"[A-Za-z]{4,}")
FUNCTION = re.compile("sqrt|frac|infty|infinity|sinh|cosh|tanh|arcsin|arccos|arctan|theta|alpha|beta|gamma|floor|ceil")
WHOLLY_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf)\{([^{}]*)\}")


def latex_equivalent(answer: str, reference: str, timeout_s: float = 5.0) -> bool:
    """Whether math-verify finds ``answer`` equal to ``reference`` (``\\frac{1}{2}`` and ``0.5``, ``x=3`` and ``3``).

    Prose and over-long texts are not handed over: they are equal only as text. Safe on any thread, and back after about
    ``timeout_s`` seconds whatever the texts are (the worker's first start, a few seconds, comes on top). Never raises: a
    time-out or a crash is ``False`` and is counted in ``latex_failures``.
    """
    answer, reference = _plain(answer), _plain(reference)
    if answer == reference:
        return True
    if not (_is_maths(answer) and _is_maths(reference)) or not (MATHS_MARK.search(answer) or MATHS_MARK.search(reference)):
        return False
    return _CHECKER.equivalent(answer, reference, timeout_s)


def latex_equivalent_in_text(text: str, reference: str, timeout_s: float = 5.0) -> bool:
    """Whether the final answer that math-verify itself finds in ``text`` equals ``reference``: its own extraction, of LaTeX between
    dollar signs or in ``\\boxed`` and of plain numbers. Time, safety and failures are as for ``latex_equivalent``."""
    reference = _plain(reference)
    if not _is_maths(reference) or not MATHS_MARK.search(text):
        return False
    return _CHECKER.equivalent(text[-LONGEST_TEXT:], reference, timeout_s, in_text=True)


def latex_failures() -> Mapping[str, int]:
    """How often math-verify could not be asked since this process began: ``timeout``, ``crash``, ``unavailable``."""
    return dict(_CHECKER.failures)


def _plain(text: str) -> str:
    text = text.strip()
    while len(text) > 1 and text.startswith("$") and text.endswith("$"):
        text = text[1:-1].strip()
    whole = WHOLLY_TEXT.fullmatch(text)
    return whole.group(1).strip() if whole else text


def _is_maths(text: str) -> bool:
    if not text or len(text) > LONGEST_EXPRESSION:
        return False
    return all(FUNCTION.fullmatch(word) for word in LONG_WORD.findall(COMMAND.sub(" ", text)))


class _WorkerTimeout(Exception):
    pass


class _WorkerGone(Exception):
    pass


class _Worker:
    """One process running ``latex_worker.py``, spoken to in lines of JSON."""

    def __init__(self) -> None:
        script = Path(__file__).with_name("latex_worker.py")
        # -P: otherwise this folder heads sys.path, and our inspect.py hides the standard library's.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.owner = os.getpid()
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        # A thread that blocks on the pipe, because no portable call reads a line with a time limit.
        threading.Thread(target=self._read, name="groupwise-latex", daemon=True).start()

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

    def ask(self, answer: str, reference: str, timeout_s: float, in_text: bool) -> bool:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps([answer, reference, timeout_s, in_text]).encode() + b"\n")
            self.process.stdin.flush()
        except (OSError, ValueError):
            raise _WorkerGone from None
        reply = self.receive(timeout_s)
        if "error" in reply:
            raise _WorkerGone
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
    """Owns the worker, the lock around it, and the verdicts already given."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._worker: _Worker | None = None
        self._failed_starts = 0
        self._verdicts: OrderedDict[tuple[str, str, bool], bool] = OrderedDict()

    def equivalent(self, answer: str, reference: str, timeout_s: float, in_text: bool = False) -> bool:
        key = (answer, reference, in_text)
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                return self._verdicts[key]
            worker = self._started()
            if worker is None:
                self.failures["unavailable"] += 1
                return False
            verdict = self._ask(worker, answer, reference, timeout_s, in_text)
            # A time-out is remembered too: the same expression would cost its full limit again and again.
            self._verdicts[key] = verdict
            if len(self._verdicts) > CACHED_VERDICTS:
                self._verdicts.popitem(last=False)
            return verdict

    def _ask(self, worker: _Worker, answer: str, reference: str, timeout_s: float, in_text: bool) -> bool:
        try:
            return worker.ask(answer, reference, timeout_s, in_text)
        except _WorkerTimeout:
            self.failures["timeout"] += 1
        except Exception:
            self.failures["crash"] += 1
        except BaseException:  # Ctrl-C between question and reply: the reply must not answer the next question
            self._stop()
            raise
        self._stop()
        return False

    def _started(self) -> _Worker | None:
        if self._worker is not None and self._worker.owner != os.getpid():
            self._worker = None
        if self._worker is None and self._failed_starts < STARTS_ALLOWED:
            try:
                self._worker = _Worker()
                self._worker.receive(START_LIMIT_S)
                self._failed_starts = 0
            except Exception:
                self._failed_starts += 1
                self._stop()
        return self._worker

    def _stop(self) -> None:
        if self._worker is not None:
            self._worker.kill()
            self._worker = None

    def close(self) -> None:
        if self._lock.acquire(timeout=1.0):
            try:
                self._stop()
            finally:
                self._lock.release()


_CHECKER = _Checker()
atexit.register(lambda: _CHECKER.close())


def _renew_after_fork() -> None:
    """A forked child must not wait for a lock that a thread of its parent held, nor talk to its parent's worker."""
    global _CHECKER
    _CHECKER = _Checker()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_after_fork)
