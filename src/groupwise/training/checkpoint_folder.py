"""A folder of checkpoints: how one gets its name there, which one is the newest that is sound, and which ones go.

A checkpoint is written aside, synced, and renamed when it is complete, so a folder ``step-N`` is always whole. Its ``manifest.json``
has every file's size and SHA-256: a file that was damaged or changed since is refused, and so is one that was put there. (A checksum
is no signature: whoever can rewrite the manifest as well is not found out.)
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from groupwise.durable import put_back, sync, sync_tree
from groupwise.errors import CheckpointError, ModelError
from groupwise.models.saving import check_free_disk

__all__ = [
    "STATE", "damage", "find_checkpoint", "is_sound", "last_good", "latest_checkpoint", "newest_sound_checkpoint",
    "put_in_place", "read_state", "remove_old", "seal", "set_damaged_aside", "set_suspect_aside", "unreadable", "verify_checkpoint",
]  # fmt: skip

STATE = "state.json"
_MANIFEST = "manifest.json"
_NAME = re.compile(r"step-(\d+)(?:-update-(\d+))?")


def put_in_place(target: Path, write: Callable[[Path], None], needed_bytes: int) -> None:
    """A folder that ``write`` fills aside, and that has its name once it is whole and on the disk. What lies there goes only then.

    Raises CheckpointError where the disk does not take it; nothing has changed then.
    """
    aside, earlier = target.with_name(f".{target.name}.partial"), put_back(target)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        check_free_disk(aside, needed_bytes)
        write(aside)
        shutil.rmtree(earlier, ignore_errors=True)
        if target.exists():
            target.rename(earlier)
        aside.rename(target)
        sync(target.parent)
    except (OSError, SafetensorError, ModelError, CheckpointError) as error:
        shutil.rmtree(aside, ignore_errors=True)
        put_back(target)
        why = error if error.__cause__ is None or isinstance(error, OSError) else error.__cause__
        raise CheckpointError(
            f"the checkpoint {target} cannot be written ({getattr(why, 'strerror', None) or why}): free space or make the folder "
            "writable; the checkpoints before it are whole"
        ) from error
    shutil.rmtree(earlier, ignore_errors=True)


def seal(folder: Path, *changing: str) -> None:
    """Write sizes and digests of all files but ``changing`` beside them, and force everything to the disk."""
    files = {name: about for name, about in _files(folder).items() if name not in changing}
    (folder / _MANIFEST).write_text(json.dumps({"files": files}, indent=1), encoding="utf-8")
    sync_tree(folder)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in ``folder``, or None."""
    return max(_complete(folder), key=_step_of, default=None)


def newest_sound_checkpoint(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest checkpoint in ``folder`` whose files are what was written, or None; ``warn`` is told of each that is passed over."""
    for checkpoint in sorted(_complete(folder), key=_step_of, reverse=True):
        try:
            verify_checkpoint(checkpoint)
        except CheckpointError as error:
            warn(f"PASSED OVER: {error}")
        else:
            return checkpoint
    return None


def set_suspect_aside(folder: Path, updates: int) -> Path | None:
    """The newest checkpoint with fewer than ``updates`` updates, which is one from whose weights a sound update was made; None without.

    Newer ones have weights that gave nothing but gradients that are not finite. They are renamed to ``suspect-step-N``, so that a run
    resumes from the good one.
    """
    good = [p for p in _complete(folder) if int(read_state(p)["updates"]) < updates]
    if not good:
        return None
    last = max(good, key=_step_of)
    _set_aside(folder, last, "suspect")
    return last


def last_good(folder: Path, updates: int, resumed_from: Path | None) -> str | None:
    """A sentence on the newest checkpoint whose weights a sound update was made from, others set aside; None where there is none at all.

    ``updates``: how many the run has made. ``resumed_from``: the checkpoint of another folder that it began with.
    """
    try:
        good = set_suspect_aside(folder, updates)
    except (CheckpointError, OSError):
        good = None
    if good is not None:
        return (
            f"the last good checkpoint is {good}; later ones are set aside, so --resume with --accept-changes (in Python: "
            "resume=True, accept_changes=True) goes on from it"
        )
    # It may have been removed since, as one of more than are kept.
    if resumed_from is not None and (resumed_from / STATE).is_file() and int(read_state(resumed_from)["updates"]) < updates:
        return f"the last good checkpoint is {resumed_from}: start from it in another folder, by train(resume_from=...) of Python"
    newest = latest_checkpoint(folder)
    return f"from the weights of the checkpoints, up to {newest}, no sound update was made" if newest else None


def set_damaged_aside(folder: Path, sound: Path) -> None:
    """Rename what is newer than ``sound`` to ``damaged-step-N``: it must not count as one of those that are kept."""
    _set_aside(folder, sound, "damaged")


def _set_aside(folder: Path, sound: Path, why: str) -> None:
    for checkpoint in _complete(folder):
        if _step_of(checkpoint) > _step_of(sound):
            away = checkpoint.with_name(f"{why}-{checkpoint.name}")
            shutil.rmtree(away, ignore_errors=True)
            checkpoint.rename(away)


def find_checkpoint(path: Path, warn: Callable[[str], None] = lambda sentence: None) -> Path:
    """``path`` if it is a checkpoint, else the newest sound one in it or in the ``checkpoints`` of the run's folder that it is.

    Raises CheckpointError where there is none, and where ``path`` itself is one that is damaged.
    """
    if (path / STATE).is_file():
        verify_checkpoint(path)
        return path
    found = newest_sound_checkpoint(path, warn) or newest_sound_checkpoint(path / "checkpoints", warn)
    if found is None:
        raise CheckpointError(
            f"{path} holds no whole checkpoint: name a run's folder or its checkpoints/step-N, written with output.checkpoint_every"
        )
    return found


def verify_checkpoint(checkpoint: Path) -> None:
    """Raises CheckpointError unless the files are those of the manifest, byte for byte, and no other."""
    if (fault := damage(checkpoint)) is not None:
        raise unreadable(checkpoint, fault)


def damage(checkpoint: Path, *, others: bool = False) -> str | None:
    """What is wrong with a checkpoint's files, or None. ``others``: files that the manifest does not name may lie beside them."""
    try:
        wanted = json.loads((checkpoint / _MANIFEST).read_text(encoding="utf-8"))["files"]
        there = _files(checkpoint, set(wanted) if others else None)
        differing = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
    except (OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        return str(error)
    if not differing:
        return None
    name = differing[0]
    return f"{name} {'is missing' if name not in there else 'was put there' if name not in wanted else 'is not what was written'}"


def is_sound(checkpoint: Path) -> bool:
    """Whether ``verify_checkpoint`` would pass."""
    return damage(checkpoint) is None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What ``state.json`` says: step, updates, and what the run noted about itself.

    Raises CheckpointError when it cannot be read.
    """
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        int(state["step"]), int(state["updates"])
    except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise unreadable(checkpoint, error) from error
    return state


def unreadable(checkpoint: Path, why: object) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {checkpoint} cannot be read ({why}): it is damaged or belongs to another model; use an earlier one"
    )


def remove_old(folder: Path, keep: int, keep_best: bool) -> None:
    newest_first = sorted(_complete(folder), key=_step_of, reverse=True)
    kept = set(newest_first[:keep])
    if all(map(_is_doubtful, kept)):
        kept |= set([p for p in newest_first if not _is_doubtful(p)][:1])
    if keep_best:
        scores: dict[str, tuple[float, Any]] = {}
        for checkpoint in reversed(newest_first):
            scores |= _scores(checkpoint)
        # Those that were taken otherwise than the newest, before a resume with other settings, cannot be compared with it.
        newest = scores[max(scores, key=lambda name: _step_of(Path(name)))][1] if scores else None
        alike = {name: score for name, (score, by) in scores.items() if newest is None or by in (None, newest)}
        scored = [(alike[p.name], [-n for n in _step_of(p)], p) for p in newest_first if p.name in alike]
        kept |= {max(scored)[2]} if scored else set()
    for old in [*(p for p in newest_first if p not in kept), *folder.glob(".step-*.partial")]:
        shutil.rmtree(old, ignore_errors=True)


def _is_doubtful(checkpoint: Path) -> bool:
    """Whether the last update from its weights was dropped: it may be that none can be made."""
    try:
        return bool(read_state(checkpoint).get("dropped_in_a_row"))
    except CheckpointError:
        return True


def _scores(checkpoint: Path) -> dict[str, tuple[float, Any]]:
    """Scores of checkpoints by name, as this one knows them, and how they were taken; None for what an earlier version wrote."""
    try:
        state = read_state(checkpoint)
    except CheckpointError:
        return {}
    scores = state.get("scores")
    if scores is None:  # of an earlier version, which knew its own alone
        scores = {} if state.get("score") is None else {checkpoint.name: state["score"]}
    return {name: (float(score), state.get("scored_by", {}).get(name)) for name, score in scores.items()}


def _files(folder: Path, chosen: set[str] | None = None) -> dict[str, dict[str, Any]]:
    """Size and SHA-256 of every file below ``folder``, or of those ``chosen``, but not of the manifest itself."""
    out = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file() or p.is_symlink()):
        if path.name == _MANIFEST and path.parent == folder:
            continue
        if chosen is not None and path.relative_to(folder).as_posix() not in chosen:
            continue
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        out[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": digest}
    return out


def _complete(folder: Path) -> list[Path]:
    return [p for p in folder.glob("step-*") if (p / STATE).is_file() and _NAME.fullmatch(p.name)]


def _step_of(checkpoint: Path) -> tuple[int, int]:
    """Steps that are done, and updates of the next."""
    match = _NAME.fullmatch(checkpoint.name)
    assert match
    return int(match[1]), int(match[2] or 0)
