"""The report: one self-contained HTML page about one run or several, from their folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from groupwise.errors import ConfigError
from groupwise.report.page import GENERATOR, render_page
from groupwise.report.payload import build_payload
from groupwise.tracking.files import write_text
from groupwise.tracking.reading import RunRecord, read_run

__all__ = ["ReportFile", "default_path", "write_report"]

HEAD_BYTES = 2000


@dataclass(frozen=True)
class ReportFile:
    """What was written."""

    path: Path
    size_bytes: int
    text_bytes: int
    """Bytes of it that are packed completions and answers."""
    runs: tuple[str, ...]
    completions: int


def write_report(paths: Sequence[Path | str], out: Path | None = None, *, completions: bool = True) -> ReportFile:
    """Write one page about the runs in ``paths``. ``completions=False`` leaves out what models and data sets wrote.

    Raises:
        ConfigError: a folder is no run's, or the file cannot be written, or is there already and no report.
    """
    runs = unique_names([read_run(path) for path in paths])
    target = (out or default_path(runs)).expanduser()
    try:
        check_target(target)
    except PermissionError as error:
        raise not_written(target, error) from error
    payload, blocks = build_payload(runs, completions=completions)
    page = render_page(payload, blocks, "groupwise: " + ", ".join(run.name for run in runs))
    try:
        write_text(target, page)
    except OSError as error:
        raise not_written(target, error) from error
    count = sum(len(run.completions) for run in runs) if completions else 0
    text_bytes = sum(map(len, blocks.values()))
    return ReportFile(target, target.stat().st_size, text_bytes, tuple(run.name for run in runs), count)


def default_path(runs: Sequence[RunRecord]) -> Path:
    """``report.html`` in the run's own folder; about several runs, in the working directory."""
    return runs[0].path / "report.html" if len(runs) == 1 else Path("report.html")


def not_written(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"the report {str(path)!r} cannot be written ({error.strerror or error}): name another place with --out")


def check_target(path: Path) -> None:
    """A report may be written again; any other file stays. Raises PermissionError where it may not be looked at."""
    if path.is_dir():
        raise ConfigError(f"the report {str(path)!r} is a folder: name a file with --out")
    if not path.exists():
        return
    if not path.is_file():  # reading a pipe would wait for ever
        raise ConfigError(f"the report {str(path)!r} is a pipe or a device: name a file with --out")
    with path.open("rb") as file:
        ours = f'name="generator" content="{GENERATOR}"'.encode() in file.read(HEAD_BYTES)
    if not ours:
        raise ConfigError(f"{str(path)!r} exists and is no report of ours: name another file with --out")


def unique_names(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Runs in folders of one name are told apart by the folders above, and one that is named twice by a number."""
    places = [run.path.absolute().parts for run in runs]
    names = [run.name for run in runs]
    for depth in range(2, max(map(len, places), default=0) + 1):
        shared = Counter(name for name, _ in set(zip(names, places, strict=True)))
        names = [str(Path(*own[-depth:])) if shared[name] > 1 else name for name, own in zip(names, places, strict=True)]
    numbered = [f"{name} ({names[: i + 1].count(name)})" if names.count(name) > 1 else name for i, name in enumerate(names)]
    return [replace(run, name=name) for run, name in zip(runs, numbered, strict=True)]
