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
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Kernels", "kernels"]

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC", "-fno-math-errno", "-fno-trapping-math")
_TIME_LIMIT_S = 120


@dataclass(frozen=True, slots=True)
class Kernels:
    """The loaded library, or why there is none."""

    library: ctypes.CDLL | None
    description: str
    """The compiler, such as ``cc (Debian 12.2.0) 12.2.0``, or the reason for doing without."""


@functools.cache
def kernels() -> Kernels:
    """The compiled kernels of this machine; compiles them if nobody has yet (about a second)."""
    if os.environ.get("GROUPWISE_NATIVE_KERNELS", "1") == "0":
        return Kernels(None, "off (GROUPWISE_NATIVE_KERNELS=0)")
    if platform.system() != "Linux":
        return Kernels(None, f"not built on {platform.system()}")  # there PyTorch's OpenMP is not the compiler's
    compiler = _compiler()
    if compiler is None:
        return Kernels(None, "no C compiler found (cc, gcc or clang)")
    try:
        version = _run([*compiler, "--version"]).splitlines()[0]
        return Kernels(ctypes.CDLL(str(_built(compiler, version))), version)
    except (OSError, subprocess.SubprocessError, IndexError) as error:
        return Kernels(None, f"could not be compiled: {_last_line(error)}")


def _compiler() -> list[str] | None:
    given = shlex.split(os.environ.get("CC", ""))
    if given:
        return given if shutil.which(given[0]) else None
    found = next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None)
    return [found] if found else None


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=True, stdin=subprocess.DEVNULL)
    return done.stdout


def _last_line(error: Exception) -> str:
    text = (getattr(error, "stderr", None) or str(error)).strip()
    return text.splitlines()[-1] if text else type(error).__name__


def _built(compiler: list[str], version: str) -> Path:
    """The shared library for this source, compiler and processor: a cached one, or a new one that is renamed into place."""
    identity = "\n".join([SOURCE.read_text(encoding="utf-8"), *compiler, version, *FLAGS, _processor()])
    name = f"kernels-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.so"
    folder = _cache_folder()
    if not (folder / name).exists():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            aside = Path(scratch) / name
            _run([*compiler, *FLAGS, "-o", str(aside), str(SOURCE), "-lm"])
            aside.replace(folder / name)
    return folder / name


def _processor() -> str:
    """What ``-march=native`` depends on: a home folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _cache_folder() -> Path:
    """The user's own cache. What is loaded from there runs as the user, so nobody else may be able to write it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "groupwise"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    except OSError:
        pass
    return _temporary_folder()


@functools.cache
def _temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="groupwise-kernels-"))
