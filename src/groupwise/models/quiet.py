"""Suppress what libraries print while they load something."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import transformers

__all__ = ["quiet", "quieten_bitsandbytes"]


def quieten_bitsandbytes() -> None:
    """Set up bitsandbytes before its first import: on CPUs it asks for another package's 4-bit product, which nothing here computes
    with."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


_LOCK = threading.Lock()
_OPEN: list[tuple[int, bool]] = []
"""What was set when each block that is open now began, the first one's first: a thread that writes a checkpoint may be in one too."""


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and warnings of transformers for as long as this lasts, in any thread; a failure still raises."""
    log = transformers.utils.logging
    with _LOCK:
        _OPEN.append((log.get_verbosity(), log.is_progress_bar_enabled()))
        log.set_verbosity_error()
        log.disable_progress_bar()
    try:
        yield
    finally:
        with _LOCK:
            verbosity, bars = _OPEN[0]
            _OPEN.pop()
            if not _OPEN:
                log.set_verbosity(verbosity)
                if bars:
                    log.enable_progress_bar()
