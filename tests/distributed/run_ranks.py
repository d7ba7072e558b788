"""One of several processes: ``python run_ranks.py CONFIG.yaml FOLDER [sound]``. Three runs, one after the other, the last of which
fails. Where sound ones are asked for it is left out, and at the very end ``threads-RANK.txt`` has the names of the threads that are left of
exchanges.

``whole``: all steps, with a checkpoint on the way; ``gradient-RANK.safetensors`` has the first gradient as the optimiser got it.
``resumed``: from that checkpoint to the end. ``failing``: the reward raises in the last process, in step 2.
"""

import atexit
import os
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from safetensors.torch import save_file

from groupwise import load_config
from groupwise.errors import GroupwiseError
from groupwise.training.loop import train
from groupwise.training.optimizer import MasterAdamW

__all__ = ["letters", "note_first_gradient"]


def letters(completions, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(x.islower() and x.isascii() for x in text) / max(1, len(text)) for text in texts]


def note_first_gradient(path):
    """Write the gradient of the next optimiser step to ``path``."""
    step = MasterAdamW.step

    def noting(self, rate):
        if not path.exists():
            grads = {n: g.clone() for n, g in zip(self.names, self.gradients(), strict=True) if g is not None}
            save_file(grads, path)
        return step(self, rate)

    MasterAdamW.step = noting


def note_threads(path):
    """Of exchanges alone; what has ended may be in the kernel's list for a moment yet."""
    for _ in range(100):
        found = [name for task in Path("/proc/self/task").glob("*") if "gloo" in (name := name_of(task))]
        if not found:
            break
        time.sleep(0.1)
    path.write_text("".join(found))


def name_of(task):
    try:
        return (task / "comm").read_text()
    except OSError:
        return ""


class Failing:
    def __init__(self, fails):
        self.calls, self.fails = 0, fails

    def __call__(self, completions, **columns):
        self.calls += 1
        if self.fails and self.calls > 2:
            raise ValueError("out of luck")
        return letters(completions)


if __name__ == "__main__":
    torch.set_num_threads(1)
    config, folder = load_config(Path(sys.argv[1])), Path(sys.argv[2])
    rank, last = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
    quiet = {"console": Console(quiet=True)}
    sound = sys.argv[3:] == ["sound"]
    if sound and Path("/proc/self/task").exists():
        atexit.register(note_threads, folder / f"threads-{rank}.txt")  # before groupwise registers anything: so after that
    note_first_gradient(folder / f"gradient-{rank}.safetensors")
    train(config, rewards={"letters": letters}, run_folder=folder / "whole", **quiet)
    train(
        config,
        rewards={"letters": letters},
        run_folder=folder / "resumed",
        resume_from=folder / "whole/checkpoints/step-3",
        **quiet,
    )
    if sound:
        sys.exit()
    try:
        train(config, rewards={"letters": Failing(rank == last)}, run_folder=folder / "failing", **quiet)
    except GroupwiseError as error:
        (folder / f"error-{rank}.txt").write_text(f"{type(error).__name__} {error.exit_code} {error.told}\n{error}")
        sys.exit(error.exit_code)
