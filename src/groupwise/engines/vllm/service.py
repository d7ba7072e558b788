"""The server's mind, without its mouth: which weights are held, and who may sample. Used over HTTP, and directly where trainer and
sampler share a process. Needs nothing of vLLM: what computes is a ``Backend``.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from groupwise import __version__
from groupwise.engines.base import SamplingSettings
from groupwise.engines.vllm.protocol import PROTOCOL, Job, Refused, StaleWeights, owner_of

__all__ = ["Backend", "Service"]

_ABANDONED_S = 60.0
"""An update that has not moved for so long gives way to another run's."""


class Backend(Protocol):
    """What computes."""

    def about(self) -> dict[str, Any]:
        """``backend`` (name and version), ``model``, ``shape`` (see `shape_of`), ``dtype``, ``max_model_tokens``."""
        ...

    def load(self, files: Sequence[str], label: str) -> dict[str, Any]:
        """Replace the weights, and forget what was computed from the old ones. Nothing is being sampled meanwhile. Raises ValueError
        where the tensors do not fit, or are not what the model holds afterwards."""
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
    folder: Path
    arrived: dict[int, Path] = field(default_factory=dict)
    moved: float = field(default_factory=time.monotonic)


class Service:
    """Implements ``protocol.Link`` over a backend in this process. Calls may come from several threads."""

    def __init__(
        self, backend: Backend, *, spool: Path | None = None, shared: Path | None = None, where: str = "this process"
    ) -> None:
        """``spool``: where arriving tensors wait until all are there; by default in memory where the system has /dev/shm.
        ``shared``: a folder that the trainer writes them to."""
        self.backend, self.where = backend, where
        self.shared = None if shared is None else shared.expanduser().resolve()
        memory = Path("/dev/shm")
        self._spool = spool or (memory if memory.is_dir() else Path(tempfile.gettempdir()))
        self.weights: str | None = None
        self.version = 0
        self._update: _Update | None = None
        self._lock = threading.Condition()
        self._sampling = 0
        self._loading = False

    def hello(self) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL, "groupwise": __version__, "weights": self.weights, "version": self.version,
            "shared": str(self.shared) if self.shared else None, **self.backend.about(),
        }  # fmt: skip

    def begin(self, weights: str) -> bool:
        """An update begins. False where these weights are held already. Raises Refused while another run's is under way."""
        with self._lock:
            if weights == self.weights:
                return False
            other = self._update
            if other and other.id == weights:
                return True  # two processes of one run, after the server was started anew: they send the same
            if other and owner_of(other.id) != owner_of(weights) and time.monotonic() - other.moved < _ABANDONED_S:
                raise Refused("another run is pushing its weights to this server: a server samples for one run at a time")
            self._drop()
            self._update = _Update(weights, Path(tempfile.mkdtemp(prefix="groupwise-weights-", dir=self._spool)))
            return True

    def bucket(self, weights: str, index: int, data: bytes, sha256: str) -> None:
        """Some of the tensors. Raises Refused where they are not what was sent."""
        if weights == self.weights:
            return  # another process of the run was quicker
        update = self._of(weights)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise Refused(f"part {index} of the weights {weights} arrived damaged: its checksum is another")
        path = update.folder / f"{index:05}.safetensors"
        path.write_bytes(data)
        self._arrived(update, index, path)

    def bucket_in_file(self, weights: str, index: int, name: str, sha256: str) -> None:
        """The same, out of the shared folder."""
        if weights == self.weights:
            return
        update = self._of(weights)
        if self.shared is None:
            raise Refused(
                "this server was started without --shared-folder: leave rollout.vllm.shared_folder out, or start it with one"
            )
        path = (self.shared / name).resolve()
        if self.shared not in path.parents or not path.is_file():
            raise Refused(f"{name!r} is no file in the server's shared folder {self.shared}: name the same folder on both sides")
        digest = hashlib.sha256()
        with path.open("rb") as file:
            for piece in iter(lambda: file.read(1 << 24), b""):
                digest.update(piece)
        if digest.hexdigest() != sha256:
            raise Refused(f"part {index} of the weights {weights} is damaged in {path}: its checksum is another")
        self._arrived(update, index, path)

    def _arrived(self, update: _Update, index: int, path: Path) -> None:
        update.arrived[index] = path
        update.moved = time.monotonic()

    def commit(self, weights: str, version: int, buckets: int) -> dict[str, Any]:
        """Load what arrived, as soon as no completion is under way any more. All or nothing: without every part the old weights stay.

        Returns the backend's report. Raises Refused where parts are missing or the backend does not take them; in the latter case
        nothing is held, since some of the model may have changed.
        """
        if weights == self.weights:
            return {}
        update = self._of(weights)
        lacking = sorted(set(range(buckets)) - set(update.arrived))
        if lacking:
            raise Refused(f"parts {lacking[:5]} of the weights {weights} did not arrive: nothing was changed")
        with self._lock:
            self._lock.wait_for(lambda: not self._loading)
            self._loading = True
            self._lock.wait_for(lambda: not self._sampling)
        try:
            self.weights = None
            started = time.perf_counter()
            report = self.backend.load([str(path) for _, path in sorted(update.arrived.items())], weights)
            self.weights, self.version = weights, version
            return {**report, "seconds": time.perf_counter() - started}
        except ValueError as error:
            raise Refused(f"the weights {weights} were not loaded: {error}") from error
        finally:
            with self._lock:
                self._drop()
                self._loading = False
                self._lock.notify_all()

    def sample(
        self, weights: str, settings: SamplingSettings, jobs: Sequence[Job], *, stop: Sequence[int], stream: bool = False
    ) -> Iterator[dict[str, Any]]:
        """See ``Backend.sample``. Raises StaleWeights unless exactly these weights are held."""
        with self._admitted(weights):
            yield from self.backend.sample(settings, jobs, stop, stream)

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

    def _of(self, weights: str) -> _Update:
        if self._update is None or self._update.id != weights:
            raise Refused(
                f"no update to the weights {weights} is under way: it was given up, or this server started anew; begin again"
            )
        return self._update

    def _drop(self) -> None:
        if self._update is not None:
            shutil.rmtree(self._update.folder, ignore_errors=True)
            self._update = None

    def close(self) -> None:
        self._drop()
        self.backend.close()
