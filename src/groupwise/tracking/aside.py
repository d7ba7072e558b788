"""A sink on a thread of its own: a service that is slow, hangs or is down never holds up a step."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupwise.tracking.base import EvaluationResult, TokenAdvantages, Tracker
from groupwise.types import Group

__all__ = ["Aside"]

Action = Callable[[Tracker], None]


class Aside:
    """Hands everything to ``sink`` in order, from another thread. What went wrong there is raised by the next call here.

    ``patience_s`` is how long one call may take before the sink counts as down; ``close`` waits at most ``farewell_s`` for what
    is still to be handed over. The thread dies with the process, so a service that hangs cannot keep a finished run alive.
    """

    def __init__(self, sink: Tracker, name: str, *, patience_s: float = 120.0, farewell_s: float = 30.0) -> None:
        self.name = name
        self.patience_s = patience_s
        self.farewell_s = farewell_s
        self.error: Exception | None = None
        self.busy_since: float | None = None
        self.given_up = False
        self.waiting: queue.SimpleQueue[Action | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._work, args=(sink,), name=f"groupwise-{name}", daemon=True)
        self.thread.start()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        numbers = dict(metrics)
        self._put(lambda sink: sink.step(step, numbers))

    def completions(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[float]] | None = None,
        token_advantages: TokenAdvantages | None = None,
    ) -> None:
        self._put(lambda sink: sink.completions(step, groups, advantages, token_advantages))

    def evaluation(self, result: EvaluationResult) -> None:
        self._put(lambda sink: sink.evaluation(result))

    def close(self) -> None:
        """Raises:
        TimeoutError: the sink has not taken everything in time.
        """
        if self.given_up:
            return
        self.given_up = True
        self.waiting.put(None)
        self.thread.join(self.farewell_s)
        if self.error is not None:
            raise self.error
        if self.thread.is_alive():
            raise TimeoutError(f"it had not taken everything after {self.farewell_s:g} s")

    def _put(self, action: Action) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        since = self.busy_since
        if since is not None and time.monotonic() - since > self.patience_s:
            self.given_up = True
            raise TimeoutError(f"it has not answered for {self.patience_s:g} s")
        self.waiting.put(action)

    def _work(self, sink: Any) -> None:
        while (action := self.waiting.get()) is not None:
            self.busy_since = time.monotonic()
            try:
                action(sink)
            except Exception as error:
                self.error = error
                with contextlib.suppress(Exception):
                    sink.close()
                return
            self.busy_since = None
        try:
            sink.close()
        except Exception as error:
            self.error = error
