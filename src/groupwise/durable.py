"""Files that are on the disk when a function returns, and never half there."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

__all__ = ["put_back", "put_back_all", "sync", "sync_folder", "sync_tree", "try_folder", "write_bytes"]


def write_bytes(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Replace ``path`` as a whole or not at all: written beside it, forced to disk, then renamed over it. A symbolic link stays, and the
    file that it leads to is replaced. Content larger than memory may come in parts.

    Raises:
        OSError: the disk is full, the folder is read-only or missing; ``path`` is then what it was before.
    """
    path = Path(os.path.realpath(path))
    # The name's end alone, so that a name as long as a file's may be is not too long with what is added.
    descriptor, aside = tempfile.mkstemp(prefix=f".{path.name[-48:]}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.writelines([content] if isinstance(content, bytes) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(aside, 0o666 & ~current_umask())
        os.replace(aside, path)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def try_folder(path: Path) -> None:
    """Look whether files can be written in a folder at ``path``, which may have to be made; leave nothing.

    Raises:
        OSError: they cannot; ``filename`` is then the nearest folder that is there.
    """
    place = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=place) as trial:
            trial.write(b"anything")  # a full disk may still take an empty file, or a folder
    except OSError as error:
        error.filename = str(place)
        raise


def put_back(target: Path) -> Path:
    """Where the folder ``target`` lies while another takes its place; what a kill left there has its name again."""
    earlier = target.with_name(f".{target.name}.earlier.partial")
    if earlier.is_dir() and not target.exists():
        earlier.rename(target)
    return earlier


def put_back_all(folder: Path, names: str = "*") -> None:
    """``put_back`` for each folder in ``folder`` of such ``names``, a pattern."""
    for earlier in folder.glob(f".{names}.earlier.partial"):
        put_back(earlier.with_name(earlier.name.removeprefix(".").removesuffix(".earlier.partial")))


def sync(path: Path) -> None:
    """See that a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """``sync`` of ``folder`` and all that is in it. Weights that a library wrote get the rights of the other files, as the umask has it."""
    for place in (folder, *(path for path in folder.rglob("*") if path.is_dir())):
        files = [path for path in place.iterdir() if path.is_file()]
        usual = next((path.stat().st_mode & 0o777 for path in files if path.suffix == ".json"), None)
        for file in files:
            if file.suffix == ".safetensors" and usual is not None:
                file.chmod(usual)
            sync(file)
        sync(place)


def sync_folder(folder: Path) -> None:
    """Make a rename in ``folder`` durable; a file system that cannot sync a folder is left as it is."""
    with contextlib.suppress(OSError):
        sync(folder)


def current_umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
