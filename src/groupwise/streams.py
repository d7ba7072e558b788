"""Standard output and error that tolerate a broken pipe: a closed pipe or terminal ends no run, and no command with a traceback.

A disk that does not take a command's output is told at its end (`lost_output`). What a command prints as JSON has standard output for
itself (`keep_stdout`).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import sys
from collections.abc import Iterator
from typing import Any, TextIO

__all__ = ["give_stdout_back", "keep_stdout", "lost_output", "make_output_safe", "tolerate_broken_pipe"]

logger = logging.getLogger("groupwise")

CLOSED = {errno.EPIPE, errno.EIO, errno.ENXIO, errno.ECONNRESET}
"""What the system says of a pipe without a reader, and of a terminal that was closed. (A full disk may have room again.)"""
NAMES = {"stdout": "standard output", "stderr": "standard error"}


class BrokenPipeSafe:
    """A wrapper of a text stream that drops what cannot be written instead of raising."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self.stream, self.name = stream, name
        self.lost = False
        self.warns = False
        """Whether to warn when it is lost: in a run, and not in a command that prints a table."""
        self.failure: str | None = None
        """Why what a command printed is incomplete; None where nobody was left to read it."""

    def write(self, text: str) -> int:
        try:
            return int(self.stream.write(text))
        except OSError as error:
            self.lose(error)
            return len(text)

    def flush(self) -> None:
        try:
            self.stream.flush()
        except OSError as error:
            self.lose(error)

    def lose(self, error: OSError) -> None:
        closed = self.is_closed(error)
        if closed:  # what is buffered goes where everything goes from now on, libraries' own writing included
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self.stream.fileno())
                os.close(nowhere)
        if not self.lost:
            self.lost = True
            reason = error.strerror or str(error)
            if not self.warns:
                self.failure = None if closed else reason
            else:
                logger.warning(
                    "%s cannot be written (%s): the run goes on, and its folder has every number", NAMES[self.name], reason
                )

    def is_closed(self, error: OSError) -> bool:
        """Whether nobody reads any more. A file has no reader: what fails there is the disk."""
        try:
            return error.errno in CLOSED and not stat.S_ISREG(os.fstat(self.stream.fileno()).st_mode)
        except (OSError, ValueError):  # no stream of the system's
            return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def make_output_safe() -> None:
    """Replace ``sys.stdout`` and ``sys.stderr`` for the rest of the process, so that `print` never fails."""
    for name in NAMES:
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, BrokenPipeSafe):
            setattr(sys, name, BrokenPipeSafe(stream, name))


def lost_output() -> str | None:
    """Why standard output did not take all that a command printed, after flushing it; None where it did, or where nobody reads it."""
    stream = sys.stdout
    if not isinstance(stream, BrokenPipeSafe):
        return None
    stream.flush()
    return stream.failure


_kept: int | None = None
"""A copy of standard output's descriptor, while that leads to standard error."""


def keep_stdout() -> None:
    """Until `give_stdout_back`, what anyone writes to standard output goes to standard error: reward functions, libraries in C."""
    global _kept
    if _kept is not None or sys.stdout is None:  # None: it was closed from the start, and another file may have its number
        return
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        kept = os.dup(1)
        aside = 2 if sys.stderr is not None else os.open(os.devnull, os.O_WRONLY)
        os.dup2(aside, 1)
        if aside != 2:
            os.close(aside)
        _kept = kept


def give_stdout_back() -> None:
    global _kept
    if _kept is not None:
        sys.stdout.flush()
        os.dup2(_kept, 1)
        os.close(_kept)
        _kept = None


@contextlib.contextmanager
def tolerate_broken_pipe() -> Iterator[None]:
    """Replace ``sys.stdout`` and ``sys.stderr`` for a while, and warn once if one of them is lost."""
    before = {name: getattr(sys, name) for name in NAMES}
    make_output_safe()
    made = {name: stream for name in NAMES if isinstance(stream := getattr(sys, name), BrokenPipeSafe)}
    warned = {name: stream.warns for name, stream in made.items()}
    for stream in made.values():
        stream.warns = True
        if stream.failure:  # a run comes to its end all the same, and warns of it
            stream.lost, stream.failure = False, None
    try:
        yield
    finally:
        for name, stream in made.items():
            stream.flush()
            stream.warns = warned[name]
            if getattr(sys, name) is stream:
                setattr(sys, name, before[name])
