"""Weights to vLLM on other GPUs of this machine: broadcast from the trainer's GPU to the server's workers (NCCL; gloo between CPUs).

The trainer opens a group, itself as rank 0 and behind it each worker of the server, and offers it over HTTP, where the secret is asked for:

    trainer                                        worker
    offer: port, key, names, types, shapes  --->   joins the group
    broadcasts every tensor                 --->   loads them                  "again 0"
    broadcasts every tensor once more       --->   compares what it loaded     "again 1"
    has the answer                          <---   "done"

The group stays from one push to the next. So nothing but the tensor in hand is there twice on the server's GPUs.
"""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from groupwise.engines.vllm.transfer import Adapter, Named, Offer, Source, open_handles

__all__ = ["Received", "Wire", "nccl_version", "opened"]

_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_LOOK_S, _GRACE_S = 2e-4, 2.0


def nccl_version() -> str:
    """The library's version, which has to be the same at both ends; empty where there is no GPU."""
    return ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else ""


class Wire:
    """The trainer's end.

    Args:
        device: where the trainer's weights are.
        workers: how many there are at the other end, each on a GPU of its own.
        timeout_s: how long the other end may take to join.
    """

    def __init__(self, device: torch.device, workers: int, timeout_s: float = 60.0) -> None:
        from torch.distributed import TCPStore

        door = socket.socket()
        door.bind(("127.0.0.1", 0))  # torch's own store would listen to the network
        door.listen(workers)
        self._port, self._key = door.getsockname()[1], secrets.token_hex(8)
        self._device, self._size, self._limit = device, 1 + workers, timedelta(seconds=timeout_s)
        self._store = TCPStore(
            "127.0.0.1", self._port, None, True, self._limit, wait_for_workers=False, master_listen_fd=door.detach()
        )
        self._group: Any = None
        self._pushes = 0

    def push(self, named: Named, commit: Callable[[Offer], dict[str, Any]]) -> dict[str, Any]:
        """Send ``named`` to whoever ``commit`` tells about it; its answer. After an exception of ``commit``, or RuntimeError where the
        group broke, this wire is good for nothing more."""
        self._pushes += 1
        offer: Offer = {
            "port": self._port, "key": self._key, "size": self._size, "push": self._pushes, "limit_s": self._limit.total_seconds(),
            "tensors": [[name, str(tensor.dtype), list(tensor.shape)] for name, tensor in named()],
        }  # fmt: skip
        with ThreadPoolExecutor(1) as beside:
            answer = beside.submit(commit, offer)
            try:
                self._send(named, answer)
            except RuntimeError:
                self.close()
                answer.result()  # says why, if the other end knows
                raise
            return answer.result()

    def close(self) -> None:
        """Break the group off, also in the middle of a broadcast."""
        group, self._group = self._group, None
        if group is not None and self._device.type == "cuda":
            group.abort()

    def _send(self, named: Named, answer: Future[Any]) -> None:
        if self._group is None:
            if not self._told([f"here/{rank}" for rank in range(1, self._size)], answer):
                return
            self._group = _group(self._store, self._key, 0, self._size, self._limit, self._device)
        for count in itertools.count():
            key = f"{self._pushes}/{count}"
            if not self._told([key], answer) or self._store.get(key) == b"done":
                return
            for _, tensor in named():
                self._wait(_broadcast(self._group, tensor.to(self._device)), answer)

    def _told(self, keys: list[str], answer: Future[Any]) -> bool:
        """Whether the other end has set these keys; False where it has answered before."""
        while not self._store.check(keys):
            if answer.done():
                return False
            time.sleep(_LOOK_S)
        return True

    @staticmethod
    def _wait(work: Any, answer: Future[Any]) -> None:
        ends = float("inf")
        while not work.is_completed():
            if answer.done():  # whoever has the last tensor may be quicker than the news that it was sent
                ends = min(ends, time.monotonic() + _GRACE_S)
            if time.monotonic() > ends:
                raise RuntimeError("the server answered before it had all weights")
            time.sleep(_LOOK_S)
        work.wait()


class Received:
    """A worker's end of an offer: a source of named tensors, each time it is called. ``rank``: the worker's, from 0.

    Raises ValueError for a dtype that does not travel, RuntimeError where the group cannot be joined.
    """

    def __init__(self, offer: Offer, rank: int, device: torch.device) -> None:
        if odd := sorted({dtype for _, dtype, _ in offer["tensors"]} - set(_DTYPES)):
            raise ValueError(f"{odd[0]} does not travel between GPUs")
        self._offer, self._speaks, self._device = offer, rank == 0, device
        self._store, self._group = _joined(offer, 1 + rank, device)
        self._count = itertools.count()
        self._round: Iterator[Any] = iter(())

    def __call__(self) -> Iterator[tuple[str, Tensor]]:
        self._finish()
        self._round = self._tensors()
        return self._round

    def close(self) -> None:
        """The trainer has nothing more to send."""
        self._finish()
        self._say("done")

    def _finish(self) -> None:
        """Whoever reads may stop in the middle; the others of the group do not."""
        for _ in self._round:
            pass

    def _say(self, word: str) -> None:
        if self._speaks:
            self._store.set(f"{self._offer['push']}/{next(self._count)}", word)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        self._say("again")
        for name, dtype, shape in self._offer["tensors"]:
            tensor = torch.empty(shape, dtype=_DTYPES[dtype], device=self._device)
            _broadcast(self._group, tensor).wait()
            yield name, tensor


@contextmanager
def opened(source: Source, rank: int, device: torch.device) -> Iterator[Sequence[str] | Named]:
    """The source as `read` takes it, as often as it likes, for the worker of this ``rank``. Handles are opened here, once: each is good for
    one opening.

    Raises ValueError for handles that are none, or lead nowhere, and as `Received`.
    """
    if isinstance(source, dict):
        received = Received(source, rank, device)
        try:
            yield received
        finally:
            received.close()
    elif isinstance(source, bytes):
        tensors = open_handles(source)
        yield lambda: tensors
    else:
        assert not isinstance(source, Adapter), "vLLM has a way of its own for those"
        yield source


_last: dict[str, tuple[Any, Any]] = {}
"""Store and group of the wire that this process has joined last, by its key."""


def _joined(offer: Offer, rank: int, device: torch.device) -> tuple[Any, Any]:
    from torch.distributed import TCPStore

    key, limit = offer["key"], timedelta(seconds=offer["limit_s"])
    if key not in _last:
        _last.clear()
        store = TCPStore("127.0.0.1", offer["port"], None, False, limit)
        store.set(f"here/{rank}", "")
        _last[key] = store, _group(store, key, rank, offer["size"], limit, device)
        atexit.register(_last.clear)  # gloo's threads abort a process that they outlive
    return _last[key]


def _group(store: Any, key: str, rank: int, size: int, limit: timedelta, device: torch.device) -> Any:
    """A group beside the default one, which each end has, or has not, for itself."""
    import torch.distributed as dist

    store = dist.PrefixStore(key, store)
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, limit)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    if rank == 0:  # a worker that dies shall not end the trainer with it; a worker whose trainer died may go
        os.environ[name] = "0"
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if rank == 0:
            os.environ.pop(name)
            os.environ |= {} if before is None else {name: before}


def _broadcast(group: Any, tensor: Tensor) -> Any:
    from torch.distributed import BroadcastOptions

    options = BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([tensor], options)
