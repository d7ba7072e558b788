"""What every benchmark shares: options, the machine's description, tables, and the JSON line at the end."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from groupwise.tracking.environment import git

__all__ = ["ROOT", "Result", "cores", "described", "finish", "median", "parser", "print_table", "quotient", "seconds"]

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("groupwise", "torch", "transformers", "trl", "accelerate")


@dataclass
class Result:
    """What the JSON line says. ``ratio`` above 1 means that groupwise is better, whatever the unit; of ``memory``
    it is measured / planned."""

    name: str
    ratio: float | None
    """``None`` where there was nothing to compare with."""
    ours: float | None
    theirs: float | None
    unit: str
    settings: dict[str, Any]
    details: dict[str, Any]
    versions: dict[str, str] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    date: str = ""


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """An argument parser with the options that every benchmark has."""
    options = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}", description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--output", type=Path, help="also write the JSON line to this file")
    options.add_argument("--threads", type=int, default=cores(), help="CPU threads, the same for every side")
    return options


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def seconds(action: Callable[[], Any]) -> float:
    """Wall-clock seconds of one call."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))


def quotient(above: float | None, below: float | None) -> float | None:
    """``above / below``, or ``None`` where one of them was not measured."""
    return above / below if above and below else None


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Plain text, numbers to three significant figures and aligned on the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells)) for i, name in enumerate(columns)]
    print(f"\n{title}")
    for line in [list(columns), ["-" * width for width in widths], *cells]:
        first, *rest = (
            text.ljust(width) if i == 0 else text.rjust(width) for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        print("  ".join([first, *rest]))


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def described() -> dict[str, Any]:
    """Versions, machine and date of what begins now; the checkout may change before it ends."""
    return {"versions": _versions(), "machine": _machine(), "date": datetime.now(UTC).isoformat(timespec="seconds")}


def finish(measure: Callable[[], Result], output: Path | None) -> Result:
    """Measure, fill in when and with what it began, print the JSON as the last line, and write it to ``output`` if given."""
    begun = described()
    result = measure()
    result.versions |= begun["versions"]
    result.machine |= begun["machine"]
    result.date = begun["date"]
    line = json.dumps(_rounded(asdict(result)), ensure_ascii=False)
    if output:
        output.write_text(line + "\n", encoding="utf-8")
    print(f"\n{line}", flush=True)
    return result


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {str(key): _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if revision := git(ROOT, "rev-parse", "--short", "HEAD"):
        changed = git(ROOT, "status", "--porcelain", "--untracked-files=no", "--", "src", "*.py")
        found["commit"] = revision + ("-dirty" if changed else "")
    return found


def _machine() -> dict[str, Any]:
    import torch

    described: dict[str, Any] = {"system": f"{platform.system()} {platform.machine()}", "cpu": _cpu_name(), "cores": cores()}
    if torch.cuda.is_available():
        described |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return described


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    fields = dict(line.partition(":")[::2] for line in reversed(lines) if ":" in line)
    named = {key.strip(): value.strip() for key, value in fields.items()}
    fast = [flag for flag in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if flag in named.get("flags", "").split()]
    return f"{named.get('model name', platform.machine())} ({fast[0] if fast else 'no wide vectors known'})"
