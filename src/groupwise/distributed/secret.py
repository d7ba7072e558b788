"""The secret by which the processes of one launch know each other's messages, where the launcher made none.

``torchrun`` and ``accelerate launch`` hand their processes no secret, and torch's own store does what anybody says who reaches its port.
Processes of one machine share a private file instead: the first one writes a secret and the port of a store that listens to this machine
alone, and removes it once all have met there. Over several machines the user sets the secret.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import socket
import stat
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from groupwise.distributed.launch import SECRET
from groupwise.errors import ConfigError

__all__ = ["handed_out", "received", "refuse_without_secret"]

_LOOK_EVERY_S = 0.05
_LONGEST = 4096
"""Bytes of the file that are read."""


def refuse_without_secret() -> None:
    """Raise ConfigError for processes on several machines that have no secret."""
    here, size = os.environ.get("LOCAL_WORLD_SIZE", ""), os.environ.get("WORLD_SIZE", "1")
    if os.environ.get(SECRET) or here == size:
        return
    raise ConfigError(
        f"{size} processes were started, {here or 'an unknown number'} of them on this machine (LOCAL_WORLD_SIZE), but {SECRET}, by which "
        f"processes of several machines know each other's messages, is not set: make one with `openssl rand -hex 32`, and "
        f"`export {SECRET}=` that same text on every machine before the launch"
    )


@contextmanager
def handed_out(port: int) -> Iterator[str]:
    """Make a secret and put it, with ``port``, where the other processes look, for as long as the block lasts."""
    secret, name = secrets.token_hex(32), _name()
    with _own_folder() as folder:
        aside = f"{name}.{os.getpid()}"
        with _explained(), contextlib.suppress(FileNotFoundError):
            os.unlink(aside, dir_fd=folder)
        with _explained():
            handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
            with os.fdopen(handle, "w") as file:
                json.dump({"secret": secret, "port": port, "writer": os.getpid(), "began": _began(os.getpid())}, file)
            os.rename(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
        try:
            yield secret
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=folder)


def received(timeout_s: float) -> tuple[str, int]:
    """The secret and the port that the first process hands out. One that a process left which is no more counts for nothing."""
    end = time.monotonic() + timeout_s
    with _own_folder() as folder:
        while time.monotonic() < end:
            with _explained(), contextlib.suppress(FileNotFoundError):
                record = _read(os.open(_name(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder))
                if record["began"] == _began(record["writer"]):
                    return record["secret"], record["port"]
            time.sleep(_LOOK_EVERY_S)
    raise ConfigError(
        f"the first process handed out no secret in {timeout_s:.0f} s in {_place()}: look for what ended it, or `export {SECRET}=` a text "
        "of `openssl rand -hex 32` for all processes"
    )


def _read(handle: int) -> dict[str, Any]:
    with os.fdopen(handle, "rb") as file:
        if not _is_private(os.fstat(handle)):
            raise PermissionError("others can read or write the file")
        return dict(json.loads(file.read(_LONGEST)))


@contextmanager
def _own_folder() -> Iterator[int]:
    """A handle of the folder, so that what is opened in it is in no other. It is made where it is missing."""
    place = _place()
    with _explained():
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _is_private(os.fstat(handle)):
            raise ConfigError(
                f"{place}, where processes of one machine share a secret, is not for this user alone: `chmod 700` it, or "
                f"`export {SECRET}=` a text of `openssl rand -hex 32` for all processes"
            )
        yield handle
    finally:
        os.close(handle)


def _place() -> Path:
    """The user's own folder of this session where there is one, else one in the user's cache."""
    session = os.environ.get("XDG_RUNTIME_DIR")
    if session and os.access(session, os.W_OK):
        return Path(session) / "groupwise-launches"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "groupwise" / "launches"


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def _name() -> str:
    """The file name of this launch: no two of a machine have one address and port of the first process at the same time. A home folder may
    be shared by machines, and by containers with networks of their own. The parent does not tell: a shell may stand between."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/net")
    about = [socket.gethostname(), space, os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")]
    return hashlib.sha256("\n".join(about).encode()).hexdigest()[:20]


def _began(process: int) -> str | None:
    """The time at which a process began, by the system's clock: a number may be given to another one later. None where there is no such
    process."""
    try:
        return Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        pass
    if Path("/proc/self/stat").exists():
        return None
    done = subprocess.run(["ps", "-o", "lstart=", "-p", str(process)], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"the secret of this launch cannot be shared in {_place()} ({error}): `export {SECRET}=` a text of `openssl rand -hex 32` for "
            "all processes"
        ) from error
