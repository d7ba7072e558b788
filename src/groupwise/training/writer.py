"""Writing checkpoints beside the run: a thread writes the state while the next batch is sampled.

Sampling changes neither weights nor optimiser, so on a CPU they are written from where they are, and learning waits for it (``finish``). On
a GPU a copy in the machine's memory is written.
"""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

from groupwise.errors import CheckpointError
from groupwise.memory import available_memory_bytes, release_freed_memory
from groupwise.training.checkpoint import Snapshot, write_snapshot

__all__ = ["CheckpointWriter"]

_SPARE = 1.25
"""Memory that must be there for each byte of a copy: writing needs some of its own."""


class CheckpointWriter:
    """One checkpoint at a time: the next waits for the one before. What went wrong is told by ``news``, and ends nothing."""

    def __init__(self, folder: Path, keep: int, keep_best: bool, in_background: bool) -> None:
        self.folder, self.keep, self.keep_best, self.in_background = folder, keep, keep_best, in_background
        self._thread: threading.Thread | None = None
        self._tokenizer: Any = None
        self._told_of_memory = False
        self._news: list[str] = []

    def write(self, snapshot: Snapshot) -> Path:
        """Write it here and now. Raises CheckpointError when the disk does not take it."""
        self.finish()
        return write_snapshot(self.folder, snapshot, self.keep, keep_best=self.keep_best)

    def begin(self, snapshot: Snapshot) -> None:
        """Begin and go on; without memory for what is copied, or with ``in_background`` off, wait for the disk."""
        self.finish()
        if not self.in_background or self._is_short(snapshot):
            self._try(snapshot)
            return
        if self._tokenizer is None:  # not the one in use: its Rust part refuses to be used by two threads at once
            self._tokenizer = copy.deepcopy(snapshot.policy.tokenizer)
        self._thread = threading.Thread(target=self._try, args=(snapshot.copied(self._tokenizer),), name="checkpoint")
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is on its way to the disk beside what else is done."""
        return self._thread is not None

    def finish(self) -> None:
        """Wait until nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            release_freed_memory()  # a thread's own heap is of no use to the next one

    def news(self) -> list[str]:
        """Failures since the last call, one sentence each."""
        told, self._news = self._news, []
        return told

    def _try(self, snapshot: Snapshot) -> None:
        try:
            write_snapshot(self.folder, snapshot, self.keep, keep_best=self.keep_best)
        except CheckpointError as error:
            self._news.append(f"NOT SAVED: {error}")
        except Exception as error:  # it must be heard of, and a thread has nobody to raise to
            self._news.append(f"NOT SAVED: {snapshot.name} ({type(error).__name__}: {error})")

    def _is_short(self, snapshot: Snapshot) -> bool:
        needed, there = snapshot.copied_bytes() * _SPARE, available_memory_bytes()
        if needed > there and not self._told_of_memory:
            self._told_of_memory = True
            self._news.append(
                f"Checkpoints are not written in the background: a copy needs {needed / 2**30:.1f} GiB of memory, and "
                f"{there / 2**30:.1f} are free."
            )
        return needed > there
