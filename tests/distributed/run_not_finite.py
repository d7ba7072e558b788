"""One of two processes: ``python run_not_finite.py CONFIG.yaml FOLDER``. A run in ``FOLDER/run``, in which one pass of the last process
gives no gradient but NaN, in the second update. ``same.json``: whether that update left masters and moments as they were."""

import json
import os
import sys
from pathlib import Path

import torch
from rich.console import Console

from groupwise import load_config
from groupwise.training.loop import train
from groupwise.training.sharding.zero import Zero, ZeroAdamW
from tests.distributed.run_ranks import letters

__all__ = ["spoil"]


def spoil(folder):
    """Let the first pass of the second update fail, in the last process, and look at the update."""
    backward, step, updates, spoilt = Zero.backward, ZeroAdamW.step, [], []
    last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def failing(self, loss):
        if last and len(updates) == 1 and not spoilt:
            spoilt.append(True)
            loss = loss * torch.nan
        backward(self, loss)

    def noting(self, rate):
        before, told, after = self.state(), step(self, rate), self.state()
        updates.append(told)
        if len(updates) == 2 and self.world.is_first:
            same = all(torch.equal(value, after[name]) for name, value in before.items())
            (folder / "same.json").write_text(json.dumps(same))
        return told

    Zero.backward, ZeroAdamW.step = failing, noting


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    spoil(folder)
    train(load_config(Path(sys.argv[1])), rewards={"letters": letters}, run_folder=folder / "run", console=Console(quiet=True))
