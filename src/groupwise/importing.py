"""Python functions and classes that a config names by place: ``path/to/file.py:name`` or ``package.module:name``."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from groupwise.errors import GroupwiseError

__all__ = ["import_member", "in_one_line", "looks_like_file", "nearest", "shown"]


def import_member(spec: str, what: str, error: type[GroupwiseError]) -> tuple[Any, str]:
    """The object that ``spec`` names, and the file or module that it came from.

    A file that was edited since is imported again, while all names of one file share one module and its state, whatever they are
    named for. ``what``: the word for it in errors, such as "reward". Raises ``error`` for a place or a name that does not exist, and for
    code that fails while it is imported.
    """
    place, _, name = spec.rpartition(":")
    module = _import_file(place, what, error) if looks_like_file(place) else _import_module(place, what, error)
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        listed = f"it has {', '.join(functions)}" if functions else "it has no Python functions"
        raise error(f"there is no function {name!r} in {place}{nearest(name, functions)}: {listed}")
    return getattr(module, name), place


def looks_like_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place or "\\" in place


def nearest(word: str, known: Iterable[str]) -> str:
    """``" (did you mean 'format'?)"`` or nothing."""
    close = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def in_one_line(error: BaseException, longest: int = 300) -> str:
    """``ValueError: too short``: type and message, cut and without line breaks, to stand inside a sentence."""
    try:
        text = " ".join(str(error).split())
    except Exception as unreadable:  # its own code makes the text
        text = f"its message cannot be read ({type(unreadable).__name__})"
    if len(text) > longest:
        text = text[: longest - 3] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shown(value: object, longest: int = 80) -> str:
    """Its ``repr``, cut, to stand inside a sentence."""
    try:
        return f"{value!r:.{longest}}"
    except Exception as unreadable:  # its own code makes the text
        return f"<{type(value).__name__}, whose repr raises {type(unreadable).__name__}>"


def _import_file(place: str, what: str, error: type[GroupwiseError]) -> ModuleType:
    path = Path(place).expanduser()
    if not path.is_file():
        raise error(
            f"{what} file {place!r} does not exist (looked in {Path.cwd()}); give a path relative to that folder or an absolute one"
        )
    path = path.resolve()
    stat = path.stat()
    key = hashlib.sha256(f"{path}:{stat.st_mtime_ns}:{stat.st_size}".encode()).hexdigest()[:12]
    module_name = f"groupwise_{path.stem}_{key}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise error(f"{what} file {place!r} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    _make_importable(path.parent)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as failure:
        del sys.modules[module_name]
        raise error(
            f"{what} file {place!r} could not be imported: {in_one_line(failure)}; fix the file and try again"
        ) from failure
    except BaseException:  # Ctrl-C: half a module
        del sys.modules[module_name]
        raise
    return module


def _import_module(place: str, what: str, error: type[GroupwiseError]) -> ModuleType:
    _make_importable(Path.cwd())
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as failure:
        remedy = "install it, or name a file as path/to/file.py:name" if isinstance(failure, ModuleNotFoundError) else "fix it"
        raise error(f"{what} module {place!r} could not be imported: {in_one_line(failure)}; {remedy}") from failure


def _make_importable(folder: Path) -> None:
    """A file may import its neighbours. At the end of the path, so that it cannot hide an installed package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
