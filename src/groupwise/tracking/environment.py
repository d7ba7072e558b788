"""What a run needs to be understood later: versions, machine, code revision, and the command, without secrets."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

import psutil

from groupwise.models.native.build import kernels
from groupwise.tracking.text import hide_secrets_in_command

__all__ = ["code_revision", "describe_environment", "installed_version", "processor_name", "usable_cpus"]


class Revision(TypedDict):
    """The commit that groupwise runs from."""

    revision: str
    dirty: bool
    """Whether the package differs from it."""


PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "datasets", "numpy", "pydantic", "accelerate", "peft", "vllm")


def describe_environment(command: Sequence[str] | None = None) -> dict[str, object]:
    """Versions, machine and code revision as plain values; imports neither torch nor transformers."""
    return {
        "groupwise": installed_version("groupwise"),
        "python": platform.python_version(),
        **{name: version for name in PACKAGES if (version := installed_version(name))},
        "platform": platform.platform(),
        "processor": processor_name(),
        "cpus": os.cpu_count(),
        "usable_cpus": usable_cpus(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerators": accelerators(),
        "native_kernels": kernels().description,
        "code": code_revision(),
        "command": hide_secrets_in_command(sys.argv if command is None else command),
    }


@functools.cache
def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def processor_name() -> str:
    """The processor's name where Linux tells it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names and names[0] else platform.machine()


def usable_cpus() -> int | None:
    """Cores that this process may run on, which in a container or under ``taskset`` is fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def accelerators() -> list[str]:
    """Names of the CUDA devices, where something has imported torch already; asking is not worth importing it."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def code_revision(folder: Path | None = None) -> Revision | None:
    """Commit of the checkout that groupwise runs from and whether its package differs from it; ``None`` outside one.

    The package's own ``__init__.py`` must be tracked there: an installed copy inside somebody's project is not that project.
    """
    return _own_revision() if folder is None else _revision(folder)


@functools.cache
def _own_revision() -> Revision | None:
    """The revision that this process has imported, asked for once: later changes of the files are not what runs."""
    return _revision(Path(__file__).resolve().parents[1])


def _revision(package: Path) -> Revision | None:
    if git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    revision = git(package, "rev-parse", "HEAD")
    changes = git(package, "status", "--porcelain", "--", ".")
    if revision is None or changes is None:
        return None
    return {"revision": revision, "dirty": bool(changes)}


def git(folder: Path, *words: str) -> str | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=10, env=environment, check=True
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout.strip()
