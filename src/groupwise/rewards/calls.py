"""Call somebody else's function without trusting it: it may raise, hang, or be ``async``.

Plain functions with a time limit run in a thread of their own, which is daemonic: one that hangs is left behind, later calls
get a new thread, and the interpreter can still exit. ``async`` functions share one event loop for the life of the process, so
that a client object made at import time keeps its connections from call to call; there a time limit really cancels.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from groupwise.importing import in_one_line

__all__ = ["CallRaised", "CallTimedOut", "call_with_limit", "is_async"]


class CallRaised(Exception):
    """The function raised; the original exception is the ``__cause__``."""


class CallTimedOut(Exception):
    """The function did not return within its time limit. The message, where there is one, says what held it up."""


def call_with_limit(function: Callable[..., Any], keywords: Mapping[str, Any], timeout_s: float | None) -> Any:
    """``function(**keywords)``, or ``CallRaised`` / ``CallTimedOut``.

    Without a limit a plain function runs in the caller's thread, where code that needs the main thread (signals) works too.
    """
    if is_async(function):
        return _call_async(function, keywords, timeout_s)
    if timeout_s is None:
        try:
            return function(**keywords)
        except (Exception, SystemExit) as error:
            raise CallRaised(_told(error)) from error
    return _call_in_thread(function, keywords, timeout_s)


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine: an ``async def``, or an object whose ``__call__`` is one."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _call_in_thread(function: Callable[..., Any], keywords: Mapping[str, Any], timeout_s: float) -> Any:
    outcome: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def work() -> None:
        try:
            outcome.set_result(function(**keywords))
        except BaseException as error:  # whatever it is, the waiting thread must hear of it
            outcome.set_exception(error)

    threading.Thread(target=work, name=f"reward {getattr(function, '__name__', 'function')}", daemon=True).start()
    return _await(outcome, timeout_s)


def _call_async(function: Callable[..., Any], keywords: Mapping[str, Any], timeout_s: float | None) -> Any:
    async def work() -> Any:
        try:
            return await function(**keywords)
        except (Exception, SystemExit) as error:
            # Wrapped here already: a SystemExit would end the loop, and asyncio passes on a TimeoutError without its traceback.
            raise CallRaised(_told(error)) from error

    loop = _LOOP.running()
    outcome = asyncio.run_coroutine_threadsafe(work(), loop)
    try:
        return _await(outcome, timeout_s)
    except CallTimedOut:
        outcome.cancel()
        if _LOOP.replace_if_blocked(loop):
            raise CallTimedOut("some async function held up all others by computing or sleeping without await") from None
        raise


def _await(outcome: concurrent.futures.Future[Any], timeout_s: float | None) -> Any:
    # wait() and not result(): a function's own TimeoutError (a socket's, say) must not pass for ours.
    done, _ = concurrent.futures.wait([outcome], timeout=timeout_s)
    if not done:
        raise CallTimedOut
    try:
        return outcome.result()
    except CallRaised:
        raise
    except (Exception, SystemExit) as error:
        raise CallRaised(_told(error)) from error


def _told(error: BaseException) -> str:
    """``ValueError: too short (rewards.py, line 12)``: where the user should look first."""
    told = in_one_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [i for i, frame in enumerate(frames) if frame.filename == __file__]
    # The frame below our last one is the reward function itself; deeper ones are usually a library's.
    place = frames[ours[-1] + 1 :] if ours else frames
    return f"{told} ({Path(place[0].filename).name}, line {place[0].lineno})" if place else told


class _BackgroundLoop:
    """One event loop in one daemon thread, started at the first use and replaced if a coroutine blocks it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="async rewards", daemon=True).start()
            return self._loop

    def replace_if_blocked(self, loop: asyncio.AbstractEventLoop, patience_s: float = 0.5) -> bool:
        """A coroutine that computes or sleeps without ``await`` cannot be cancelled and would hold up every later call.

        Whether there was one; it may be another than the one that was waited for.
        """
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)
        if answered.wait(patience_s):
            return False
        with self._lock:
            if self._loop is loop:
                self._loop = None
        return True


_LOOP = _BackgroundLoop()
