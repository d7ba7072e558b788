"""Compiling ``kernels.c`` once per machine, and loading it.

No compiler, or one that fails, is no error: everything the kernels do, PyTorch operations do too, in more time. What was decided is in
``environment.json`` of every run. ``GROUPWISE_NATIVE_KERNELS=0`` rules them out.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from groupwise.durable import sync

__all__ = ["Kernels", "kernels", "processor"]

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_TIME_LIMIT_S = 120
_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Kernels:
    """The loaded library, or why there is none."""

    library: ctypes.CDLL | None
    description: str
    """The compiler, such as ``cc (Debian 12.2.0) 12.2.0``, or the reason for doing without."""
    failed: bool = False
    """Whether it was tried: there is no compiler, or one that fails, or what it makes cannot be loaded."""


class _NotLoaded(OSError):
    """A sound library that the loader does not take."""


@functools.cache
def kernels(fp32: bool = False) -> Kernels:
    """The compiled kernels of this machine, for bf16 or for fp32; compiles them if nobody has yet (about a second)."""
    if os.environ.get("GROUPWISE_NATIVE_KERNELS", "1") == "0":
        return Kernels(None, "off (GROUPWISE_NATIVE_KERNELS=0)")
    if platform.system() != "Linux":
        return Kernels(None, f"not built on {platform.system()}")  # there PyTorch's OpenMP is not the compiler's
    compiler = _compiler()
    if compiler is None:
        return Kernels(None, "no C compiler found (cc, gcc or clang)", failed=True)
    try:
        version = _run([*compiler, "--version"]).splitlines()[0]
        return Kernels(_loaded([*compiler, *FLAGS, *(["-DFP32"] if fp32 else [])], version), version)
    except _NotLoaded as error:
        return Kernels(None, f"could not be loaded: {_last_line(error)}", failed=True)
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return Kernels(None, f"could not be compiled: {_last_line(error)}", failed=True)


def _compiler() -> list[str] | None:
    given = shlex.split(os.environ.get("CC", ""))
    if given:
        return given if shutil.which(given[0]) else None
    compiler = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    return [compiler] if compiler else None


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=True, stdin=subprocess.DEVNULL)
    return done.stdout


def _last_line(error: Exception) -> str:
    text = (getattr(error, "stderr", None) or str(error)).strip()
    return text.splitlines()[-1] if text else type(error).__name__


def _loaded(command: list[str], version: str) -> ctypes.CDLL:
    """The shared library for this source, compiler, its options and the processor: a cached one that is sound, else a new one in its place.

    A library that is cut short ends the process when it is loaded (SIGBUS), and one of somebody else runs as the user: so the file ends in
    a digest of itself, is the user's own, and what was looked at is what is loaded.
    """
    identity = "\n".join([SOURCE.read_text(encoding="utf-8"), *command, version, processor()])
    name = f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"
    try:
        return _from_file(command, _cache_folder() / name)
    except (OSError, subprocess.CalledProcessError):  # the cache may be full, or lie where nothing may be executed (noexec)
        return _from_file(command, Path(_temporary_folder().name) / name)


def _from_file(command: list[str], path: Path) -> ctypes.CDLL:
    """The library at ``path``, built there where there is none that is sound. Raises _NotLoaded where the loader does not take it."""
    for last in (False, True):
        try:
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            if last:
                raise
        else:
            if _is_sound(handle):
                # It stays open: the loader knows libraries by their names, and would take a second one at this number for the first.
                try:
                    return ctypes.CDLL(f"/proc/self/fd/{handle}")
                except OSError as error:
                    os.close(handle)
                    raise _NotLoaded(f"{path}: {error}") from error
            os.close(handle)
        if not last:
            _build(command, path)
    raise OSError(f"{path} is not what was written there")


def _build(command: list[str], path: Path) -> None:
    """Compile, with the digest at the end, where the linker does not look; on disk before it has its name."""
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        aside = Path(scratch) / path.name
        _run([*command, "-o", str(aside), str(SOURCE), "-lm"])
        with aside.open("r+b") as file:
            digest = hashlib.sha256(file.read()).digest()
            file.write(digest)
            file.flush()
            os.fchmod(file.fileno(), 0o700)
            os.fsync(file.fileno())
        aside.replace(path)
        sync(path.parent)


def _is_sound(handle: int) -> bool:
    """Whether an open file is the user's own, nobody else can write it, and it is whole."""
    if not _is_own(os.fstat(handle)):
        return False
    with os.fdopen(os.dup(handle), "rb") as file:
        content = file.read()
    return len(content) > _DIGEST_BYTES and hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _is_own(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def processor() -> str:
    """What ``-march=native`` depends on: a home folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _cache_folder() -> Path:
    """The user's own cache. What is loaded from there runs as the user, so nobody else may be able to write it."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "groupwise" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and _is_own(folder.stat()):
            return folder
    except (OSError, RuntimeError):  # the second: nothing says where the user's home is
        pass
    return Path(_temporary_folder().name)


@functools.cache
def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="groupwise-kernels-")
