"""What is put around an engine: sampling in a thread of its own, sampling divided among processes, and a limit on sequences at once.

PyTorch and the native kernels release the interpreter while they compute, so that sampling and learning share the machine's cores, or its
GPU, where the thread has a stream of its own. Requests are served one after another, in the order in which they were given.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch

from groupwise.distributed import World
from groupwise.engines.base import Engine, Progress, SampleRequest, SamplingSettings
from groupwise.errors import TrainingError
from groupwise.memory import ran_out_on_device, reclaim_memory
from groupwise.metrics import Metric, Sum
from groupwise.types import Completion, Prompt

__all__ = ["DealtEngine", "QueuedRequest", "RowLimit", "SamplingThread", "check_same", "for_all", "sampling_costs"]

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
        return queued.engine.serve_checked(queued.request, note) if queued.request.prompts else []


def _own_stream(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext()


def check_same(prompts: Sequence[Prompt], world: World) -> None:
    """Raise TrainingError where processes rendered different prompts: what one samples, all learn from. A collective call."""
    if world.size == 1:
        return
    other = world.first_difference([hash(prompt.token_ids) for prompt in prompts])  # numbers hash alike in every process
    if other is not None:
        rank, place = other
        which = f"for problem {prompts[place].problem.id}" if place < len(prompts) else f"in place {place}"
        raise TrainingError(
            f"process {rank} of {world.size} has another prompt {which} than process 0, but all "
            "processes must render the same: give them the same data, have reset of an environment draw from an argument seed, and "
            "leave host names, times, paths of temporary files and the order of sets out of what it returns, or an agent asks first"
        )


def sampling_costs(prompts: Sequence[Prompt], samples_per_prompt: int, settings: SamplingSettings) -> list[float]:
    """Estimated tokens of each prompt's group: the prompt once, and completions of half the limit, since nobody knows them yet."""
    return [len(prompt.token_ids) + samples_per_prompt * settings.max_tokens / 2 for prompt in prompts]


def for_all(on_progress: Progress | None, prompts: int, own: int) -> Progress | None:
    """``on_progress`` of a process that samples ``own`` of all ``prompts``: told what all have done, if the others are as far."""
    if on_progress is None:
        return None
    times = prompts / max(1, own)
    return lambda finished, tokens: on_progress(round(finished * times), round(tokens * times))


class DealtEngine(Engine):
    """Divides the prompts among the processes, each with its ``engine``; all know all completions.

    Every process must call it with the same arguments. The completions are those of one process: seeds have names. ``in_order``: each
    process has the prompts that follow those of the process before it, whatever they cost.
    """

    def __init__(self, engine: Engine, world: World, in_order: bool = False) -> None:
        self.engine, self.world, self.in_order = engine, world, in_order

    def serve(self, request: SampleRequest, on_progress: Progress | None = None) -> list[tuple[Completion, ...]]:
        """See ``Engine.serve``; while this process samples, progress is an estimate from its own."""
        by_place = (request.watch, request.drawn, request.limits)
        assert not any(by_place), "they go by the places of all prompts"
        check_same(request.prompts, self.world)
        if self.in_order:
            first, last = (len(request.prompts) * rank // self.world.size for rank in (self.world.rank, self.world.rank + 1))
            own = list(range(first, last))
        else:
            own = self.world.assigned(sampling_costs(request.prompts, request.samples_per_prompt, request.settings))
        estimated = for_all(on_progress, len(request.prompts), len(own))
        sampled = self.engine.serve_checked(replace(request, prompts=[request.prompts[i] for i in own]), estimated)
        everywhere = self.world.all_gather_object(list(zip(own, sampled, strict=True)))
        groups = [completions for _, completions in sorted((pair for part in everywhere for pair in part), key=lambda p: p[0])]
        if on_progress is not None and self.world.size > 1:
            on_progress(sum(map(len, groups)), sum(c.sampled_tokens for group in groups for c in group))
        return groups

    def refresh(self, policy_version: int) -> None:
        self.engine.refresh(policy_version)


T = TypeVar("T")
logger = logging.getLogger("groupwise")


class RowLimit:
    """``rollout.max_concurrent_sequences`` as it is now, for every engine of a run. Once halved it stays so.

    What a completion's randomness is derived from does not depend on it, so what is sampled again is the same.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.halvings = 0
        """Since the run began."""
        self.tell: Callable[[str], object] = logger.warning
        """Who hears of it."""
        self.launches = False
        """Whether decode steps are launched one by one, since a graph could not be captured."""

    def give_up_graphs(self, sentence: str) -> None:
        """Capture none from here on: a second try costs as much, and says the same. ``sentence``: why."""
        self.launches = True
        self.tell(sentence)

    def metrics(self) -> dict[str, Metric]:
        return {"memory/sampling_halvings": Sum(self.halvings)}

    @contextmanager
    def lowered(self, rows: int) -> Iterator[None]:
        """Allow at most ``rows`` inside this context. Where memory ran out all the same, what was halved stays so."""
        before, self.rows = self.rows, rows
        try:
            yield
        finally:
            if self.rows == rows:
                self.rows = before

    def attempt(self, action: Callable[[], T], at_once: Callable[[], int]) -> T:
        """``action``; while it runs out of the accelerator's memory, again with half the rows. It keeps by itself what it has finished.

        Args:
            at_once: sequences that the last attempt still had to sample; where those are fewer than the limit, they are what is halved.
        Raises the error, with a note on what to set, where it was one.
        """
        while True:
            try:
                return action()
            except RuntimeError as error:
                if not ran_out_on_device(error):
                    raise
                tried = min(at_once(), self.rows)
                if tried <= 1:
                    error.add_note(
                        "there was no room to sample a single sequence: lower the limit on completions (rollout.max_completion_tokens, "
                        "evaluation.max_completion_tokens), or see what else takes the memory"
                    )
                    raise
            reclaim_memory()  # only now, since the error's frames hold on to the cache
            before, self.rows = self.rows, tried // 2
            self.halvings += 1
            self.tell(
                f"memory ran out while {tried:,} sequences were sampled at once: rollout.max_concurrent_sequences is {self.rows:,} from "
                f"here on instead of {before:,}; what was finished is kept, the rest is sampled again, and the completions stay the same"
            )
