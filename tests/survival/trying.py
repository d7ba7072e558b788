"""What faults are made of: a table of them, what came of one, and what each has to keep."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.survival.door import Ended, Going
from tests.survival.place import Place

__all__ = ["FAULTS", "Outcome", "begun_and_held", "digest", "fault", "goes_on", "stopped", "told"]


@dataclass(frozen=True)
class Outcome:
    """A row of the table."""

    happened: str
    exit_code: int
    kept: str


FAULTS: dict[str, Callable[[Place], Outcome]] = {}


def fault(name: str) -> Callable[[Callable[[Place], Outcome]], Callable[[Place], Outcome]]:
    def enter(function: Callable[[Place], Outcome]) -> Callable[[Place], Outcome]:
        FAULTS[name] = function
        return function

    return enter


def told(ended: Ended, place: Place, *signs: str) -> str:
    """The sentence that the command ended with, without this machine's folders. It has the signs, and there is no traceback."""
    said = " ".join(ended.said.split())
    assert "Traceback" not in said, ended.said
    for sign in signs:
        assert sign in said, (sign, ended.said)
    sentence = next((line for line in reversed(ended.said.splitlines()) if line.startswith("groupwise:")), "")
    return shortened(sentence.removeprefix("groupwise: ").replace("`", "'"), place)


def shortened(sentence: str, place: Place) -> str:
    return " ".join(sentence.replace(f"{place.folder.parent}/", "").replace(f"{place.path}/", "").split())


def goes_on(place: Place) -> None:
    """`--resume` brings the run to its end, every step once."""
    ended = place.run("--resume")
    assert ended.exit_code == 0, ended.said
    assert place.done
    assert place.steps() == [1, 2, 3, 4, 5]


def digest(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def begun_and_held(place: Place) -> Going:
    """A run that is in its third step, with two saved, until `Place.let_go` or a signal that it does not outlive."""
    place.write("held")
    going = place.begin()
    going.wait_for(lambda: (place.folder / "checkpoints" / "step-2").is_dir())
    return going


def stopped(place: Place) -> Ended:
    """A run that SIGTERM stopped in its third step."""
    going = begun_and_held(place)
    os.kill(going.process, signal.SIGTERM)
    place.let_go()
    ended = going.wait()
    assert ended.exit_code == 128 + signal.SIGTERM, ended.said
    return ended
