"""Calls that run side by side while the caller does something else: at most so many at once, begun in the order they came."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

__all__ = ["Background"]


class Background:
    """A few threads for the length of a ``with`` block. They are daemonic, so that a call that hangs does not keep Python from ending."""

    def __init__(self, workers: int, name: str) -> None:
        self._workers, self._name = workers, name
        self._threads = 0
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._waiting: list[Future[Any]] = []

    def submit(self, work: Callable[[], Any]) -> Future[Any]:
        """Its result, or what it raised, by and by."""
        future: Future[Any] = Future()
        self._waiting.append(future)
        self._work.put((future, work))
        if self._threads < self._workers:
            self._threads += 1
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # whatever it is, the waiting thread must hear of it
                future.set_exception(error)

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *error: object) -> None:
        """What has not begun never will; what has begun runs out unheard."""
        for future in self._waiting:
            future.cancel()
        for _ in range(self._threads):
            self._work.put(None)
