"""A folder in which faults are tried: a tiny model, easy sums, reward functions that misbehave, and the command over them."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from groupwise.config import dump_config
from tests.survival.door import Ended, Going, begin
from tests.tiny import tiny_config, write_sums, write_tiny_llama

__all__ = ["NotTried", "Place", "small_disk"]

REWARDS = '''
import os
import time
from pathlib import Path

calls = 0


def letters(completions, api_key=None, **columns):
    """The share of lower-case letters. Three calls are a step."""
    global calls
    calls += 1
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(x.islower() and x.isascii() for x in text) / max(1, len(text)) for text in texts]


def late():
    return calls > 6


def raises(completions, **columns):
    scores = letters(completions)
    if late():
        raise KeyError("score")
    return scores


def raises_once(completions, **columns):
    scores = letters(completions)
    if calls == 8:
        raise KeyError("score")
    return scores


def hangs(completions, **columns):
    scores = letters(completions)
    if late():
        time.sleep(1000)
    return scores


def nan(completions, **columns):
    return [float("nan") if late() else score for score in letters(completions)]


def short(completions, **columns):
    return letters(completions)[: 3 if late() else None]


def held(completions, **columns):
    """The third step lasts until `Place.let_go`."""
    scores = letters(completions)
    while late() and not Path(__file__).with_name("go").exists():
        time.sleep(0.01)
    return scores


def fills_disk(completions, **columns):
    """In the second step, with the first one saved, the disk becomes full; with FREES there is room again in the fourth."""
    scores, ballast = letters(completions), Path(os.environ["BALLAST"])
    if calls == 4:
        while not (ballast.parent / "run" / "checkpoints" / "step-1").is_dir():  # it is written beside the run
            time.sleep(0.01)
        with ballast.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    if calls == 10 and "FREES" in os.environ:
        ballast.unlink()
    return scores


def rewrites_data(completions, **columns):
    scores, data = letters(completions), Path(os.environ["DATA"])
    if calls == 4:
        data.write_text(data.read_text().replace("= ?", "is what?"))
    return scores
'''


class Place:
    """One fault's own folder. ``run`` and ``begin`` are ``groupwise train`` over the tiny model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.model, self.data = write_tiny_llama(path / "model"), write_sums(path / "sums.jsonl")
        self.rewards = path / "mine.py"
        self.rewards.write_text(REWARDS)
        self.folder = path / "run"
        self.settings = path / "config.yaml"
        self.commands = 0

    def write(self, reward: str = "letters", **sections: Mapping[str, Any]) -> None:
        """The settings of the next command."""
        chosen = {name: dict(values) for name, values in sections.items()}
        chosen["rewards"] = {"functions": [{"function": f"{self.rewards}:{reward}"}], **chosen.get("rewards", {})}
        chosen["training"] = {"steps": 5, **chosen.get("training", {})}
        chosen["output"] = {"checkpoint_every": 1, "keep_checkpoints": 3, **chosen.get("output", {})}
        self.settings.write_text(dump_config(tiny_config(self.model, self.data, **chosen)), encoding="utf-8")

    def begin(self, *words: str, **named: Any) -> Going:
        self.commands += 1
        log = self.path / f"said-{self.commands}.txt"
        words = (
            "train",
            str(self.settings),
            "--run-folder",
            str(self.folder),
            "--no-check",
            *words,
        )  # calls of rewards are counted
        return begin(words, log, folder=self.path, **named)

    def run(self, *words: str, **named: Any) -> Ended:
        return self.begin(*words, **named).wait()

    def let_go(self) -> None:
        """Of the runs with the reward function ``held``, from now on."""
        (self.path / "go").touch()

    def checkpoints(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "checkpoints").glob("*"))

    def steps(self) -> list[int]:
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["step"] for line in lines]

    def total(self, name: str) -> float:
        lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return sum(json.loads(line).get(name) or 0 for line in lines)

    @property
    def done(self) -> bool:
        return (self.folder / "summary.json").is_file()


class NotTried(Exception):
    """A fault that this machine does not allow to be caused."""


@contextlib.contextmanager
def small_disk(place: Place, kib: int = 4096, read_only: bool = False) -> Iterator[Path]:
    """A disk of that size, on which the run's folder lies. Raises NotTried where this process may not mount one."""
    disk = place.path / "disk"
    disk.mkdir()
    options = f"size={kib}k" + (",ro" if read_only else "")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)], capture_output=True, text=True)
    if done.returncode:
        raise NotTried(f"no disk can be mounted here ({done.stderr.strip()})")
    place.folder = disk / "run"
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=False)
