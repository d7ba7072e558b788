"""Sampling in a thread of its own, beside what the main thread does.

PyTorch and the native kernels let go of the interpreter while they compute, so that sampling and learning share the machine's cores,
or its GPU, whose own stream the thread has. Requests are served one after another, in the order in which they were given.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from groupwise.engines.base import Engine, SampleRequest
from groupwise.types import Completion

__all__ = ["QueuedRequest", "SamplingThread"]

_LOOK_EVERY_S = 0.1
_LAST_TOKEN_S = 20.0
"""How long a sampler that was told to stop may take to notice."""


class _Stopped(Exception):
    """Raised inside an engine when nobody wants its samples any more."""


@dataclass
class QueuedRequest:
    """A request that the thread shall have ``engine`` serve, and what came of it."""

    engine: Engine
    request: SampleRequest
    progress: tuple[int, int] = (0, 0)
    """Completions that are finished, and tokens."""
    completions: list[tuple[Completion, ...]] = field(default_factory=list)
    error: BaseException | None = None
    seconds: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)
    ready: Any = None
    """On a GPU, the event after which the engine's weights are those to sample from."""


class SamplingThread:
    """Serves requests. The thread begins with the first one, and none outlives ``close``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._queue: queue.SimpleQueue[QueuedRequest | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._unwanted = False

    def put(self, queued: QueuedRequest) -> None:
        """Have it sampled after those before it. The engine's weights must stay as they are until it is over."""
        if self._thread is None:
            # A daemon: where an engine never comes back, the process can still end.
            self._thread = threading.Thread(target=self._serve, daemon=True, name="groupwise-sampling")
            self._thread.start()
        if self.device.type == "cuda":
            # The weights are written on another stream than the thread's. It waits for them alone: a wait for the whole device would break
            # a graph that the thread is capturing.
            queued.ready = torch.cuda.Event()
            queued.ready.record(torch.cuda.current_stream(self.device))
        self._queue.put(queued)

    def wait(self, queued: QueuedRequest, on_progress: Callable[[int, int], None] | None = None) -> list[tuple[Completion, ...]]:
        """Its completions; what the engine raised is raised here."""
        while not queued.over.wait(_LOOK_EVERY_S):  # short waits, so that a signal, or another process's failure, gets through
            if on_progress is not None:
                on_progress(*queued.progress)
            if self._thread is None or not self._thread.is_alive():
                raise RuntimeError("the sampling thread has ended")
        if queued.error is not None:
            raise queued.error
        return queued.completions

    def close(self) -> None:
        """Drop what is not sampled yet. An engine is stopped where it next tells of its progress."""
        self._unwanted = True
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_LAST_TOKEN_S)
            self._thread = None

    def _serve(self) -> None:
        with _own_stream(self.device):
            while (queued := self._queue.get()) is not None:
                started = time.perf_counter()
                try:
                    queued.completions = self._sample(queued)
                except BaseException as error:  # it is raised where the samples are waited for
                    queued.error = error
                queued.seconds = time.perf_counter() - started
                queued.over.set()

    def _sample(self, queued: QueuedRequest) -> list[tuple[Completion, ...]]:
        def note(finished: int, tokens: int) -> None:
            queued.progress = (finished, tokens)
            if self._unwanted:
                raise _Stopped

        if self._unwanted:
            raise _Stopped
        if queued.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(queued.ready)
        return queued.engine.serve(queued.request, note) if queued.request.prompts else []


def _own_stream(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()
