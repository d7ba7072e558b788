"""A process that fails tells the others why, and all end with its error: none waits for one that will not come."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import hmac
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from groupwise.distributed.launch import SAVING
from groupwise.errors import GroupwiseError, RankError, printable

__all__ = ["Board", "Failure", "LostTouch", "RankLost", "Seal", "Watch", "as_error", "exchanging"]

_KEY = "failure"
_LONGEST = 4000
"""Characters of a failure's message."""
_LOOK_EVERY_S = 0.5
_GRACE_S = 20.0
"""How long the main thread may take to come out by itself once another process has failed."""
_WAIT_FOR_WORD_S = 5.0
"""How long to look for the other's error after a connection broke."""
_LAST_LOOK_S = 60.0
"""How long the board may take to answer what it was asked last; only a machine that disappears without a word takes longer."""


class LostTouch(RuntimeError):
    """A message to or from another process failed, or waited too long."""


_SIGNS = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe", "Timed out waiting")
"""In what torch says when another process does not answer."""


@contextlib.contextmanager
def exchanging() -> Iterator[None]:
    """Around computation that talks to other processes on its way: raises LostTouch where that is what failed."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__.startswith("Dist") or any(sign.lower() in str(error).lower() for sign in _SIGNS):
            raise LostTouch(str(error)) from error
        raise


class RankLost(BaseException):
    """Raised inside whatever the main thread does when another process has failed. Not an Exception: nobody swallows it."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a process that failed left for the others."""

    rank: int
    message: str
    exit_code: int


class Seal:
    """What a message of this run's own processes carries: a code that takes their secret to make (HMAC, SHA-256)."""

    size = hashlib.sha256().digest_size

    def __init__(self, secret: str, run: str) -> None:
        assert secret
        self._secret, self._run = secret.encode(), run

    def closed(self, body: bytes, what: str) -> bytes:
        """``what``: what the message is, so that none can be sent again as another."""
        return self._code(body, what) + body

    def opened(self, message: bytes, what: str) -> bytes | None:
        """The body, or None where nobody of this run can have written it."""
        code, body = message[: self.size], message[self.size :]
        return body if hmac.compare_digest(code, self._code(body, what)) else None

    def _code(self, body: bytes, what: str) -> bytes:
        return hmac.new(self._secret, f"{self._run}, {what}\n".encode() + body, hashlib.sha256).digest()


class Board:
    """A place that all processes can read, where the first failure is written: the key-value store of torch.distributed.

    What stands there is believed if it is sealed, in the form of a failure, and no longer than a message should be.
    """

    def __init__(self, store: Any, rank: int, size: int, seal: Seal) -> None:
        self.store, self.rank, self.size, self.seal = store, rank, size, seal

    def post(self, error: BaseException) -> None:
        known = isinstance(error, GroupwiseError)
        message = str(error) if known else f"{type(error).__name__}: {error}"
        code = error.exit_code if isinstance(error, GroupwiseError) else 130 if isinstance(error, KeyboardInterrupt) else 1
        with contextlib.suppress(RuntimeError):  # the process that keeps the store has ended: there is nobody left to tell
            written = json.dumps(asdict(Failure(self.rank, message[:_LONGEST], code))).encode()
            self.store.compare_set(_KEY, "", self.seal.closed(written, _KEY).hex())

    def read(self) -> Failure | None:
        """The failure that was written first, or None; its message cannot act on a terminal. Raises RuntimeError without the store."""
        if not self.store.check([_KEY]):
            return None
        try:
            body = self.seal.opened(bytes.fromhex(self.store.get(_KEY).decode()), _KEY)
            record = {} if body is None else json.loads(body)
            rank, message, code = record["rank"], record["message"], record["exit_code"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        if type(rank) is not int or not 0 <= rank < self.size or type(message) is not str:
            return None
        shown = printable(message[:_LONGEST])
        return Failure(rank, shown, code if type(code) is int and 0 < code < 256 else 1)

    def wait(self, seconds: float = _WAIT_FOR_WORD_S) -> Failure | None:
        """Like ``read``, for a failure of another process that may be a moment late."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                failure = self.read()
            except RuntimeError:
                return None
            if failure is not None and failure.rank != self.rank:
                return failure
            time.sleep(_LOOK_EVERY_S / 5)
        return None


def as_error(failure: Failure | None, size: int, why: str) -> RankError:
    """What a process says when another one's failure ends it."""
    if failure is None:
        return RankError(
            f"another of the {size} processes ended or did not answer in time{why and f' ({why})'}: look for what ended it, "
            "such as the system's out-of-memory killer, or raise training.process_timeout_s",
            1,
        )
    return RankError(f"process {failure.rank} of {size} failed: {failure.message}", failure.exit_code)


class Watch(threading.Thread):
    """Looks at the board beside the main thread, and brings it out of whatever it does when another process has failed, or the
    board has ended with the one that kept it.

    The main thread gets ``RankLost``. Where it does not come out (a collective of a GPU that waits), the process is ended. It is
    ended, too, when the launcher has ended. A checkpoint that is being written, as ``saving`` says, is waited for.
    """

    def __init__(self, board: Board, size: int, launcher: int | None, saving: Callable[[], bool] = lambda: False) -> None:
        super().__init__(daemon=True, name="groupwise-watch")
        self.board, self.size, self.launcher, self.saving = board, size, launcher, saving
        self.main = threading.get_ident()
        self.over = threading.Event()
        self._lock = threading.Lock()

    def run(self) -> None:
        lost: float | None = None
        while not self.over.wait(_LOOK_EVERY_S):
            if self.launcher is not None and os.getppid() != self.launcher:
                os._exit(1)
            self._is_saving()
            try:
                failure, lost = self.board.read(), None
            except RuntimeError as error:  # the main thread finds out by itself, unless it waits on a GPU
                lost = lost or time.monotonic()
                if time.monotonic() - lost > _WAIT_FOR_WORD_S:
                    self._bring_out(None, str(error).partition("\n")[0])
                    return
                continue
            if failure is not None and failure.rank != self.board.rank:
                self._bring_out(failure)
                return

    def _bring_out(self, failure: Failure | None, why: str = "") -> None:
        with self._lock:
            if self.over.is_set():
                return
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.main), ctypes.py_object(RankLost))
        ends = time.monotonic() + _GRACE_S
        while not self.over.wait(min(_LOOK_EVERY_S, _GRACE_S)):
            if self._is_saving():
                ends = time.monotonic() + _GRACE_S
            elif time.monotonic() > ends:
                error = as_error(failure, self.size, why)
                if self.board.rank == 0 or failure is None:
                    sys.stderr.write(f"groupwise: {error}\n")
                    sys.stderr.flush()
                os._exit(error.exit_code)

    def _is_saving(self) -> bool:
        """Whether a checkpoint is being written. Then the launcher is told, which waits as well."""
        saving = self.saving()
        if saving and SAVING in os.environ:
            with contextlib.suppress(OSError):
                os.utime(os.environ[SAVING])
        return saving

    def finish(self) -> None:
        """No more interruptions of the main thread, one that is under way included; and the thread is over.

        It is waited for: torch's call for the board, coming back while the interpreter is being taken down, aborts a process that was
        done. The process that keeps the board may be slow to answer, while this one is on its way out.
        """
        try:
            self._finish()
        except RankLost:
            self._finish()
        if self.is_alive():
            self.join(_LAST_LOOK_S)

    def _finish(self) -> None:
        with self._lock:
            self.over.set()
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.main), None)
