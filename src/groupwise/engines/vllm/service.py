"""What the server decides, without HTTP: which weights are held, and who may sample. Used over HTTP, and directly where trainer and
sampler share a process. Needs nothing of vLLM: what computes is a ``Backend``.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from groupwise import __version__
from groupwise.engines.base import SamplingSettings
from groupwise.engines.vllm.protocol import PROTOCOL, BeginAgain, Job, Refused, StaleWeights, digest_of, owner_of
from groupwise.engines.vllm.transfer import Adapter, Source

__all__ = ["MOST_BYTES", "Backend", "Service"]

MOST_BYTES = 64 * 2**30
"""Most bytes of one part of an update. A tensor is never cut, and an embedding, or all experts of a layer, may have several GiB."""


class Backend(Protocol):
    """What computes."""

    def about(self) -> dict[str, Any]:
        """``backend`` (name and version), ``model``, ``shape`` (see `shape_of`), ``dtype``, ``max_model_tokens``; ``devices``, the GPU of
        each worker (`device_id`), ``nccl``, the version there, ``sleeps``, whether memory can be handed back, and ``adapter_rank``, the
        largest of an adapter alone."""
        ...

    def load(self, source: Source, label: str) -> dict[str, Any]:
        """Replace the weights, and forget what was computed from the old ones. Nothing is being sampled meanwhile. Raises ValueError
        where the tensors do not fit, or are not what the model holds afterwards."""
        ...

    def release_memory(self) -> None:
        """Hand back the GPU's memory, weights included, until the next ``load``; nothing where it cannot. Nothing is being sampled."""
        ...

    def sample(
        self, settings: SamplingSettings, jobs: Sequence[Job], stop: Sequence[int], stream: bool
    ) -> Iterator[dict[str, Any]]:
        """``{job, tokens, logprobs, cached, weights}`` as completions end, in any order; ``{progress: tokens}`` now and then;
        with ``stream`` also ``{piece: tokens}``."""
        ...

    def close(self) -> None: ...


@dataclass
class _Update:
    """Weights on their way."""

    id: str
    folders: list[Path]
    """Where parts are written: the last of them."""
    locks: list[int]
    """Of each folder, which go with this process, however that ends."""
    arrived: dict[int, tuple[Path, str]] = field(default_factory=dict)
    """The parts: files, and their SHA-256."""

    def remove(self) -> None:
        for folder in self.folders:
            shutil.rmtree(folder, ignore_errors=True)
        while self.locks:
            os.close(self.locks.pop())


@dataclass
class _Lease:
    """The run that the server works for. Several connections may hold it: each process of a run, and the old one beside the new."""

    owner: str
    who: str
    since: str
    connections: int = 0


_MEMORY = Path("/dev/shm")
_PREFIX = "groupwise-weights-"
_OLD_S = 3600.0
"""Folders younger than this may be of a server that has not locked its own yet, or of a version that locks none."""


def _new_folder(parent: Path) -> tuple[Path, int]:
    """A folder for parts of an update, and the lock on it."""
    path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    lock = os.open(path, os.O_RDONLY)
    with suppress(OSError):  # some network file systems lock no folders: there none is removed by others
        fcntl.flock(lock, fcntl.LOCK_EX)
    return path, lock


def _remove_abandoned(parent: Path) -> None:
    """Remove this user's folders whose server was killed. Their locks tell so in other containers too, unlike process numbers."""
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is locked, or another user's
            if time.time() - path.stat().st_mtime < _OLD_S:
                continue
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _new_file(folder: Path, prefix: str, data: bytes | bytearray) -> Path:
    handle, name = tempfile.mkstemp(prefix=prefix, suffix=".safetensors", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


class Service:
    """Implements ``protocol.Link`` over a backend in this process. Calls may come from several threads."""

    in_process = on_this_machine = True

    def __init__(
        self,
        backend: Backend,
        *,
        spool: Path | None = None,
        shared: Path | None = None,
        where: str = "this process",
        tell: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """``spool``: where arriving tensors wait until all are there; by default in memory where the system has /dev/shm, as long as it
        has room (containers often give it 64 MB), else on the disk.
        ``shared``: a folder that the trainer writes them to. ``tell`` is told who comes and goes."""
        self.backend, self.where, self.tell = backend, where, tell
        self.shared = None if shared is None else shared.expanduser().resolve()
        self._spool = spool or (_MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir()))
        for folder in (self._spool, Path(tempfile.gettempdir())):
            _remove_abandoned(folder)
        self._start = secrets.token_hex(8)
        """Tells this server from one before it at the same address."""
        self.weights: str | None = None
        self.version, self.digest = 0, ""
        self.base: str | None = None
        """The whole weights that are held, under an adapter or by themselves."""
        self._lease: _Lease | None = None
        self._update: _Update | None = None
        self._lock = threading.Condition()
        self._sampling = 0
        self._loading = False

    def hello(self) -> dict[str, Any]:
        with self._lock:
            lease, held = self._lease, (self.version, self.digest)
        return {
            "protocol": PROTOCOL, "groupwise": __version__, "start": self._start,
            "version": held[0], "digest": held[1], "base": self.base,
            "used_by": f"{lease.who} since {lease.since}" if lease else None,
            "shared": str(self.shared) if self.shared else None, **self.backend.about(),
        }  # fmt: skip

    def hold(self, owner: str, who: str) -> Callable[[], None]:
        """The server works for this run alone, until what is returned is called as often as this was. Raises Refused while it works for
        another."""
        with self._lock:
            if self._lease is None:
                self._lease = _Lease(owner, who, time.strftime("%Y-%m-%d %H:%M:%S"))
                self.tell(f"working for {who}")
            elif self._lease.owner != owner:
                raise Refused(
                    f"it works for {self._lease.who} since {self._lease.since}, and a server samples for one run at a time: end that "
                    "run, or start another server, with --port, and let rollout.vllm.url name it"
                )
            self._lease.connections += 1
        return self._let_go

    def _let_go(self) -> None:
        with self._lock:
            assert self._lease is not None
            self._lease.connections -= 1
            if not self._lease.connections:
                self.tell(f"{self._lease.who} has disconnected")
                self._lease = None
                self._drop()

    def begin(self, weights: str) -> str | None:
        """An update begins. Where these weights are held already, their digest. Raises BeginAgain for a run that does not hold the
        server."""
        with self._lock:
            self._lock.wait_for(lambda: not self._loading)
            self._check_lease(weights)
            if weights == self.weights:
                return self.digest
            if self._update is None or self._update.id != weights:  # else two processes of one run, which send the same
                self._drop()
                folder, lock = _new_folder(self._spool)
                self._update = _Update(weights, [folder], [lock])
            return None

    def bucket(self, weights: str, index: int, data: bytes | bytearray, sha256: str) -> None:
        """Some of the tensors. Raises BeginAgain where they are not what was sent."""
        update = self._of(weights)
        if update is None:
            return
        if hashlib.sha256(data).hexdigest() != sha256:
            raise BeginAgain(f"part {index} of the weights {weights} arrived damaged: its checksum is another")
        try:
            path = self._written(update, f"{index:05}-", data)
        except FileNotFoundError:  # the folder went: the update was given up meanwhile
            self._of(weights)
            raise
        self._arrived(update, index, path, sha256)

    def _written(self, update: _Update, prefix: str, data: bytes | bytearray) -> Path:
        """A new file with ``data`` in the update's folder: one on the disk where memory has no room for it."""
        try:
            return _new_file(update.folders[-1], prefix, data)
        except OSError as error:
            disk = Path(tempfile.gettempdir())
            if error.errno != errno.ENOSPC or update.folders[0].parent != _MEMORY:
                raise
        with self._lock:
            if self._spool == _MEMORY:  # the first part to find no room
                self.tell(f"{_MEMORY} has no room for the weights: further parts wait in {disk}")
                self._spool = disk
            if len(update.folders) == 1:  # what arrived stays where it is
                folder, lock = _new_folder(disk)
                update.folders.append(folder)
                update.locks.append(lock)
        return _new_file(update.folders[-1], prefix, data)

    def bucket_in_file(self, weights: str, index: int, name: str, sha256: str) -> None:
        """The same, out of the shared folder."""
        update = self._of(weights)
        if update is None:
            return
        if self.shared is None:
            raise Refused(
                "this server was started without --shared-folder: leave rollout.vllm.shared_folder out, or start it with one"
            )
        path = (self.shared / name).resolve()
        if self.shared not in path.parents or not path.is_file():
            raise Refused(f"{name!r} is no file in the server's shared folder {self.shared}: name the same folder on both sides")
        if path.stat().st_size > MOST_BYTES:
            raise Refused(f"{path} is larger than {MOST_BYTES} bytes: send smaller parts (rollout.vllm.bucket_mib)")
        # A copy: whatever becomes of the file, the bytes that are checked are those that will be loaded.
        self.bucket(weights, index, path.read_bytes(), sha256)

    def _arrived(self, update: _Update, index: int, path: Path, sha256: str) -> None:
        """Files are the server's own, and never written to again: whatever else arrives, one that is being loaded stays as it is."""
        with self._lock:
            update.arrived[index] = (path, sha256)

    def commit(self, weights: str, version: int, sha256s: Sequence[str], source: Source | None = None) -> dict[str, Any]:
        """Load what arrived, as soon as no completion is under way any more. All or nothing: unless exactly the parts that ``sha256s``
        names are there, the old weights stay. ``source``: what is loaded where nothing was sent in parts, or
        the adapter that they are.

        Returns the backend's report, with the ``weights`` and the ``digest`` that are held then. Raises BeginAgain where parts are missing
        or are others, Refused where the backend does not take them; in the latter case nothing is held, since some of the model may have
        changed.
        """
        with self._taken_for_loading(weights, sha256s) as update:
            if update is None:
                return {"weights": self.weights, "digest": self.digest}
            self.weights = None  # before anything changes; what is sampled from here on would be from neither
            started = time.perf_counter()
            try:
                arrived = [str(update.arrived[i][0]) for i in sorted(update.arrived)]
                if isinstance(source, Adapter):
                    report = self.backend.load(replace(source, files=arrived), weights)
                else:
                    self.base = None
                    report = self.backend.load(arrived if source is None else source, weights)
                    self.base = weights
            except ValueError as error:
                raise Refused(f"the weights {weights} were not loaded: {error}") from error
            self.weights, self.version, self.digest = weights, version, digest_of(sha256s)
            return {**report, "seconds": time.perf_counter() - started, "weights": self.weights, "digest": self.digest}

    def release_memory(self, weights: str) -> None:
        """These weights are done with: hand back the GPU's memory, as soon as no completion is under way. Others stay as they are."""
        with self._lock:
            self._lock.wait_for(lambda: not self._loading)
            if weights != self.weights:
                return
            self._loading, self.weights, self.base = True, None, None
            self._lock.wait_for(lambda: not self._sampling)
        try:
            self.backend.release_memory()
        except ValueError as error:
            raise Refused(f"vLLM did not hand back its memory: {error}") from error
        finally:
            with self._lock:
                self._loading = False
                self._lock.notify_all()

    @contextmanager
    def _taken_for_loading(self, weights: str, sha256s: Sequence[str]) -> Iterator[_Update | None]:
        """The update, with nobody sampling, and out of reach of everybody else; None where these weights are held already."""
        with self._lock:
            self._lock.wait_for(lambda: not self._loading)
            update = self._of(weights)
            if update is None:
                yield None
                return
            wrong = [i for i, sha256 in enumerate(sha256s) if update.arrived.get(i, (None, ""))[1] != sha256]
            if wrong or len(update.arrived) != len(sha256s):
                self._drop()
                raise BeginAgain(f"parts {wrong[:5]} of the weights {weights} did not arrive, or others did: nothing was changed")
            self._update, self._loading = None, True
        try:
            with self._lock:
                self._lock.wait_for(lambda: not self._sampling)
            yield update
        finally:
            update.remove()
            with self._lock:
                self._loading = False
                self._lock.notify_all()

    def sample(
        self, weights: str, settings: SamplingSettings, jobs: Sequence[Job], *, stop: Sequence[int], stream: bool = False
    ) -> Iterator[dict[str, Any]]:
        """See ``Backend.sample``; at the end ``{held: weights}``. Raises StaleWeights unless exactly these weights are held, at the
        beginning and at the end."""
        with self._admitted(weights):
            yield from self.backend.sample(settings, jobs, stop, stream)
            if self.weights != weights:
                raise StaleWeights(weights, self.weights)
            yield {"held": self.weights}

    @contextmanager
    def _admitted(self, weights: str) -> Iterator[None]:
        with self._lock:
            self._lock.wait_for(lambda: not self._loading)
            if weights != self.weights:
                raise StaleWeights(weights, self.weights)
            self._sampling += 1
        try:
            yield
        finally:
            with self._lock:
                self._sampling -= 1
                self._lock.notify_all()

    def _of(self, weights: str) -> _Update | None:
        """The update under way; None where these weights are held already, since another process of the run was quicker."""
        with self._lock:
            self._check_lease(weights)
            if weights == self.weights:
                return None
            if self._update is None or self._update.id != weights:
                raise BeginAgain(
                    f"no update to the weights {weights} is under way: it was given up, or this server was restarted"
                )
            return self._update

    def _check_lease(self, weights: str) -> None:
        """Raises BeginAgain unless the run of these weights holds the server. The lock is held."""
        if self._lease is None or self._lease.owner != owner_of(weights):
            raise BeginAgain(f"{self.where} does not know of this run: it was restarted")

    def _drop(self) -> None:
        if self._update is not None:
            self._update.remove()
            self._update = None

    def close(self) -> None:
        with self._lock:
            self._drop()
        self.backend.close()
