"""The processes that train together, as an object that is passed where it is needed. A world of one does nothing and costs nothing.

Every process holds a replica of the policy and knows the step's whole batch (its texts and numbers are small); sampling, scoring and
the passes are divided. What is decided from the batch is decided alike everywhere, from the same numbers.
"""

from __future__ import annotations

import heapq
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from groupwise.distributed.failures import Board, LostTouch, RankLost, Seal, Watch, as_error
from groupwise.errors import GroupwiseError, RankError
from groupwise.limits import GRADIENT_BUCKET
from groupwise.metrics import Metric, Sum, merge

__all__ = ["Notices", "World", "partition"]


def partition(costs: Sequence[float], parts: int) -> list[list[int]]:
    """Indices of ``costs`` for each of ``parts`` processes, ascending: greedy longest-first partition.

    A function of the costs alone, so that all processes agree without a message. The largest load is at most 4/3 of the best
    possible (R. L. Graham (1969), "Bounds on multiprocessing timing anomalies").

    >>> partition([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    assert parts > 0
    loads = [(0.0, part) for part in range(parts)]
    chosen: list[list[int]] = [[] for _ in range(parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, part = heapq.heappop(loads)
        chosen[part].append(index)
        heapq.heappush(loads, (load + costs[index], part))
    return [sorted(part) for part in chosen]


T = TypeVar("T")
_PRINTED = 2**22
"""Numbers of a tensor that are looked at together: bounds the copies."""
_FIRST_MESSAGE_S = 30.0
"""After so long it is said what is waited for: connecting takes seconds."""


class World:
    """This process among ``size`` of them. Every process must call a method that is a collective call, in one order."""

    def __init__(
        self, rank: int = 0, size: int = 1, *, control: Any = None, board: Board | None = None, device: torch.device | None = None,
        seal: Seal | None = None,
    ) -> None:  # fmt: skip
        """``control``: the process group for Python objects, on CPUs whatever computes. ``device``: this process's part of the group
        in which tensors are added up; None where that takes tensors wherever they are. ``seal``: by which objects are known."""
        self.rank, self.size = rank, size
        self._seal, self._gathered = seal, 0
        self._control, self._board, self._device = control, board, device
        self.is_saving: Callable[[], bool] = lambda: False
        """Whether this process is writing a checkpoint: a failure elsewhere does not end it before."""

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def assigned(self, costs: Sequence[float]) -> list[int]:
        """Indices of the pieces of work assigned to this process; see ``partition``."""
        return list(range(len(costs))) if self.size == 1 else partition(costs, self.size)[self.rank]

    def all_gather_object(self, value: T) -> list[T]:
        """Every process's value, in the order of the processes. A collective call. Raises RankError for one without this run's seal."""
        if self.size == 1:
            return [value]
        assert self._seal is not None
        self._gathered += 1
        what = [f"value {self._gathered} of process {rank}" for rank in range(self.size)]
        objects = []
        for rank, message in enumerate(self._gather_bytes(self._seal.closed(pickle.dumps(value), what[self.rank]))):
            body = self._seal.opened(message, what[rank])
            if body is None:
                raise RankError(
                    f"a message of process {rank} of {self.size} is not sealed with this run's secret: some other program sent it, or "
                    "GROUPWISE_SECRET is not the same for all processes",
                    1,
                )
            objects.append(pickle.loads(body))
        return objects

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        """Every process's bytes. Torch's own collective for objects unpickles what it gets before it can be checked."""
        with _in_touch():
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(mine)]), group=self._control)
            longest = int(max(lengths))
            padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(parts, padded, group=self._control)
        return [part.numpy().tobytes()[: int(length)] for part, length in zip(parts, lengths, strict=True)]

    def first_difference(self, values: Sequence[object]) -> tuple[int, int] | None:
        """The first process whose ``values`` are not those of process 0, and the place of the first such value, which one of the two may
        lack; None where all have the same. A collective call."""
        first, *others = self.all_gather_object(list(values))
        for rank, other in enumerate(others, 1):
            if other != first:
                same = zip(first, other, strict=False)
                return rank, next((i for i, (a, b) in enumerate(same) if a != b), min(len(first), len(other)))
        return None

    def on_rank0(self, action: Callable[[], T]) -> T:
        """Run ``action`` in the first process; its result, or its exception, in all of them. A collective call."""
        if self.size == 1:
            return action()
        outcome: tuple[Any, GroupwiseError | None] = (None, None)
        if self.is_first:
            try:
                outcome = (action(), None)
            except GroupwiseError as error:
                outcome = (None, error)
        result, failed = self.all_gather_object(outcome)[0]
        if failed is not None:
            raise failed
        return result  # type: ignore[no-any-return]

    def reduce(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """Metrics of the whole from each process's metrics of its share, each reduced by its own rule. A collective call.

        Times of ``time/`` are those of the slowest: the processes wait for each other.
        """
        if self.size == 1:
            return dict(metrics)
        parts = self.all_gather_object(dict(metrics))
        merged = merge(parts)
        for name in merged:
            if name.startswith("time/"):
                merged[name] = Sum(max(part[name].value for part in parts if name in part))
        return merged

    @torch.no_grad()
    def sum_gradients(self, gradients: Sequence[Tensor | None], make_zero: Callable[[int], Tensor]) -> None:
        """Replace every gradient, in place, by the sum over processes: in fp32, the same bits everywhere. A collective call.

        One that no process has stays None. Where some have it, ``make_zero(index)`` makes one for those that do not.
        """
        if self.size == 1 or not gradients:
            return
        there = torch.tensor([g is not None for g in gradients], dtype=torch.int32)
        self._all_reduce(there, self._control)
        wanted = [i for i, holders in enumerate(there.tolist()) if holders]
        pairs = [(i, gradients[i]) for i in wanted]
        for bucket in _buckets([make_zero(i) if gradient is None else gradient for i, gradient in pairs]):
            self._sum(bucket)

    def assemble(self, own: Tensor, places: Tensor, size: int) -> Tensor:
        """``size`` numbers in float64 on the CPU, of which each process gives ``own`` at ``places``; else 0. A collective call."""
        whole = torch.zeros(size, dtype=torch.float64)
        whole[places] = own.detach().double().cpu()
        if self.size > 1:
            self._all_reduce(whole, self._control)
        return whole

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace ``tensor``, in place, by the sum over processes. A collective call."""
        if self.size > 1:
            there = self._within_reach(tensor)
            self._all_reduce(there)
            if there is not tensor:
                tensor.copy_(there)

    def try_gpus(self) -> None:
        """Send the first message between the processes' GPUs, whose connections NCCL makes then: else that would be at the end of the first
        step. A collective call. Raises RankError where it fails, or a sum is wrong."""
        if self.size > 1 and self._device is not None and self._device.type != "cpu":
            self._first_message(self._device)

    def _first_message(self, device: torch.device) -> None:
        remedy = "NCCL_DEBUG=INFO shows what it tries, NCCL_P2P_DISABLE=1 has it go around the links between GPUs"
        if os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE"):  # on one machine the run sets the loopback
            remedy += ", NCCL_SOCKET_IFNAME=NAME has it take another network"
        ones = torch.ones(2**20, device=device)
        late = threading.Timer(_FIRST_MESSAGE_S, _say_late, [self.size, remedy])
        late.daemon = True
        if self.is_first:
            late.start()
        try:
            self._all_reduce(ones)
            right = bool((ones == self.size).all())  # waits for it
        except RuntimeError as error:  # LostTouch too
            board = self._board if isinstance(error, LostTouch) else None
            if board is not None and (failure := board.wait()) is not None:  # another process ended: no link is to blame
                raise as_error(failure, self.size, "") from error
            why = str(error).partition("\n")[0]
            raise RankError(f"the first message between the GPUs of {self.size} processes failed ({why}): {remedy}", 1) from error
        finally:
            late.cancel()
        if not right:
            raise RankError(
                f"the GPUs of {self.size} processes add up ones to another number: a link between them does not work. {remedy}",
                1,
            )

    def broadcast(self, tensor: Tensor) -> None:
        """Copy the first process's ``tensor`` into every other process's, bit for bit. A collective call."""
        if self.size > 1:
            with _in_touch():
                dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)

    def _all_reduce(self, tensor: Tensor, group: Any = None) -> None:
        with _in_touch():
            dist.all_reduce(tensor, group=group)

    def _within_reach(self, tensor: Tensor) -> Tensor:
        """Itself, or a copy on the GPU of one on the CPU (``optimizer.offload``): NCCL has no way from one CPU to another, and gloo's
        is slow for whole gradients."""
        return tensor if self._device is None or tensor.device.type == self._device.type else tensor.to(self._device)

    def _sum(self, bucket: list[Tensor]) -> None:
        flat = self._within_reach(torch.cat([g.reshape(-1).float() for g in bucket]))
        self._all_reduce(flat)
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def check_equal(self, what: str, tensors: Sequence[Tensor]) -> None:
        """Raise RankError where a tensor is not the same on all processes, bit for bit. A collective call."""
        if self.size == 1:
            return
        prints = self.all_gather_object([_fingerprint(t) for t in tensors])
        for rank, other in enumerate(prints):
            if other != prints[0]:
                raise RankError(
                    f"{what} of process {rank} are no longer those of process 0, so that the processes train different models: use "
                    "the same hardware and software for all, and resume from the last checkpoint",
                    1,
                )

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a whole run: when one process fails, all of them end, each with that one's error.

        Raises RankError in the others.
        """
        if self._board is None:
            yield
            return
        launcher = os.environ.get("GROUPWISE_LAUNCHER")
        watch = Watch(self._board, self.size, int(launcher) if launcher else None, lambda: self.is_saving())
        watch.start()
        try:
            yield
        except BaseException as error:
            watch.finish()
            raise self._verdict(error) from error
        finally:
            watch.finish()

    def _verdict(self, error: BaseException) -> BaseException:
        """The exception that this process ends with; its own is told to the others."""
        assert self._board is not None
        if isinstance(error, (RankLost, LostTouch)):
            failure = self._board.wait()
            error = as_error(failure, self.size, str(error).partition("\n")[0])
        self._board.post(error)
        if isinstance(error, GroupwiseError):
            error.told = not self.is_first  # the first process says it
        return error


@contextmanager
def _in_touch() -> Iterator[None]:
    """Name what fails in talking to the others, so that it is not taken for a fault of this process."""
    try:
        yield
    except RuntimeError as error:  # DistBackendError and its like are RuntimeErrors
        raise LostTouch(str(error)) from error


def _say_late(processes: int, remedy: str) -> None:
    sys.stderr.write(
        f"groupwise: the first message between the GPUs of {processes} processes is not through after {_FIRST_MESSAGE_S:.0f} s; the run "
        f"waits for training.process_timeout_s. {remedy}\n"
    )
    sys.stderr.flush()


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours together, up to a size; the same cuts on every process."""
    bucket: list[Tensor] = []
    elements = 0
    for gradient in gradients:
        if bucket and elements + gradient.numel() > GRADIENT_BUCKET:
            yield bucket
            bucket, elements = [], 0
        bucket.append(gradient)
        elements += gradient.numel()
    if bucket:
        yield bucket


def _fingerprint(tensor: Tensor) -> tuple[int, int]:
    """Two sums over the tensor's bits; replicas that differ anywhere are all but sure to differ here."""
    flat = tensor.detach().contiguous().view(-1)
    numbers = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    places = torch.arange(min(_PRINTED, len(numbers)), device=flat.device) % 65521
    total = placed = 0
    for index, part in enumerate(numbers.split(_PRINTED)):
        bits = part.long()
        total += int(bits.sum())
        placed += int((bits * places[: len(bits)]).sum()) * (index + 1)
    return total, placed


class Notices:
    """Sentences from whichever process: the first one's are said at once, the others' when all come together."""

    def __init__(self, world: World, say: Callable[[str], object]) -> None:
        self.world, self.say = world, say
        self._unsaid: list[str] = []

    def note(self, sentence: str) -> None:
        """Say a sentence of this process: at once in the first one, else at the next ``exchange``."""
        if self.world.size > 1:
            sentence = f"process {self.world.rank} of {self.world.size}: {sentence}"
        if self.world.is_first:
            self.say(sentence)
        else:
            self._unsaid.append(sentence)

    def exchange(self) -> None:
        """Say in the first process what the others have noted. A collective call."""
        unsaid, self._unsaid = self._unsaid, []
        for sentence in (s for part in self.world.all_gather_object(unsaid) for s in part):
            if self.world.is_first:
                self.say(sentence)
