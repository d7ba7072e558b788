"""The processes that train together, as an object that is passed where it is needed. A world of one does nothing and costs nothing.

Every process holds a replica of the policy and knows the step's whole batch (its texts and numbers are small); sampling, scoring and
the passes are divided. What is decided from the batch is decided alike everywhere, from the same numbers.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from groupwise.distributed.deal import deal
from groupwise.distributed.failures import Board, LostTouch, RankLost, Seal, Watch, as_error
from groupwise.errors import GroupwiseError, RankError
from groupwise.metrics import Metric, Sum, merge

__all__ = ["World"]

T = TypeVar("T")
_PRINTED = 2**22
"""Numbers of a tensor that are looked at together: bounds the copies."""
_BUCKET_ELEMENTS = 16 * 2**20
"""Gradients that are added up in one message: 64 MiB in fp32."""


class World:
    """This process among ``size`` of them. Methods that say so are for all processes at once: each must call them, in one order."""

    def __init__(
        self, rank: int = 0, size: int = 1, *, control: Any = None, board: Board | None = None, device: torch.device | None = None,
        seal: Seal | None = None,
    ) -> None:  # fmt: skip
        """``control``: the process group for Python objects, on CPUs whatever computes. ``device``: this process's part of the group
        in which tensors are added up; None where that takes tensors wherever they are. ``seal``: by which objects are known."""
        self.rank, self.size = rank, size
        self._seal, self._gathered = seal or Seal(), 0
        self._control, self._board, self._device = control, board, device

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes."""
        return self.rank == 0

    def mine(self, costs: Sequence[float]) -> list[int]:
        """Indices of the pieces of work that fall to this process; see ``deal``."""
        return list(range(len(costs))) if self.size == 1 else deal(costs, self.size)[self.rank]

    def gather(self, value: T) -> list[T]:
        """For all at once: everybody's value, in the order of the processes. Raises RankError where one is nobody's of this run."""
        if self.size == 1:
            return [value]
        self._gathered += 1
        what = [f"value {self._gathered} of process {rank}" for rank in range(self.size)]
        found = []
        for rank, message in enumerate(self._gather_bytes(self._seal.closed(pickle.dumps(value), what[self.rank]))):
            body = self._seal.opened(message, what[rank])
            if body is None:
                raise RankError(
                    f"a message of process {rank} of {self.size} is not sealed with this run's secret: some other program sent it, or "
                    "GROUPWISE_SECRET is not the same for all processes",
                    1,
                )
            found.append(pickle.loads(body))
        return found

    def _gather_bytes(self, mine: bytes) -> list[bytes]:
        """Not torch's own for objects, which opens what it gets before anybody can look at it."""
        with _in_touch():
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(mine)]), group=self._control)
            longest = int(max(lengths))
            padded = torch.frombuffer(bytearray(mine.ljust(longest, b"\0")), dtype=torch.uint8)
            parts = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(parts, padded, group=self._control)
        return [part.numpy().tobytes()[: int(length)] for part, length in zip(parts, lengths, strict=True)]

    def first_does(self, action: Callable[[], T]) -> T:
        """For all at once: only the first process acts; its result, or its exception, is everybody's."""
        if self.size == 1:
            return action()
        outcome: tuple[Any, GroupwiseError | None] = (None, None)
        if self.is_first:
            try:
                outcome = (action(), None)
            except GroupwiseError as error:
                outcome = (None, error)
        result, failed = self.gather(outcome)[0]
        if failed is not None:
            raise failed
        return result  # type: ignore[no-any-return]

    def reduce(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        """For all at once: each process's numbers about its own share as numbers about the whole, each by its own rule.

        Times of ``time/`` are those of the slowest: the processes wait for each other.
        """
        if self.size == 1:
            return dict(metrics)
        parts = self.gather(dict(metrics))
        merged = merge(parts)
        for name in merged:
            if name.startswith("time/"):
                merged[name] = Sum(max(part[name].value for part in parts if name in part))
        return merged

    @torch.no_grad()
    def sum_gradients(self, gradients: Sequence[Tensor | None], make_zero: Callable[[int], Tensor]) -> None:
        """For all at once: every gradient becomes, in place, the sum over processes, added up in fp32 and equal everywhere to the bit.

        One that no process has stays None. Where some have it, ``make_zero(index)`` makes one for those that do not.
        """
        if self.size == 1 or not gradients:
            return
        there = torch.tensor([g is not None for g in gradients], dtype=torch.int32)
        self._add_up(there, self._control)
        wanted = [i for i, holders in enumerate(there.tolist()) if holders]
        found = [(i, gradients[i]) for i in wanted]
        for bucket in _buckets([make_zero(i) if gradient is None else gradient for i, gradient in found]):
            self._sum(bucket)

    def assemble(self, own: Tensor, places: Tensor, size: int) -> Tensor:
        """For all at once: ``size`` numbers in float64 on the CPU, to which each process gives ``own`` at ``places``; 0 where none does."""
        whole = torch.zeros(size, dtype=torch.float64)
        whole[places] = own.detach().double().cpu()
        if self.size > 1:
            self._add_up(whole, self._control)
        return whole

    def add_up(self, tensor: Tensor) -> None:
        """For all at once: the sum over processes, in place."""
        if self.size > 1:
            there = self._within_reach(tensor)
            self._add_up(there)
            if there is not tensor:
                tensor.copy_(there)

    def spread(self, tensor: Tensor) -> None:
        """For all at once: the numbers of the first process's ``tensor`` become everybody's, in place, bit for bit."""
        if self.size > 1:
            with _in_touch():
                dist.broadcast(tensor.view(-1).view(torch.uint8), src=0)

    def _add_up(self, tensor: Tensor, group: Any = None) -> None:
        with _in_touch():
            dist.all_reduce(tensor, group=group)

    def _within_reach(self, tensor: Tensor) -> Tensor:
        """Itself, or a copy on the GPU of one on the CPU (``optimizer.offload``): NCCL has no way from one CPU to another, and gloo's
        is slow for whole gradients."""
        return tensor if self._device is None or tensor.device.type == self._device.type else tensor.to(self._device)

    def _sum(self, bucket: list[Tensor]) -> None:
        flat = self._within_reach(torch.cat([g.reshape(-1).float() for g in bucket]))
        self._add_up(flat)
        for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def check_equal(self, what: str, tensors: Sequence[Tensor]) -> None:
        """For all at once: raises RankError where a tensor is not the same on all processes, bit for bit."""
        if self.size == 1:
            return
        prints = self.gather([_fingerprint(t) for t in tensors])
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
        watch = Watch(self._board, self.size, int(launcher) if launcher else None)
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


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours together, up to a size; the same cuts on every process."""
    bucket: list[Tensor] = []
    elements = 0
    for gradient in gradients:
        if bucket and elements + gradient.numel() > _BUCKET_ELEMENTS:
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
