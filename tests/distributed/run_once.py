"""One of several processes: ``python run_once.py CONFIG.yaml FOLDER`` trains once."""

import sys
from pathlib import Path

import torch
from rich.console import Console

from groupwise import load_config
from groupwise.training.loop import train
from tests.distributed.run_ranks import letters

if __name__ == "__main__":
    torch.set_num_threads(1)
    train(load_config(Path(sys.argv[1])), rewards={"letters": letters}, run_folder=Path(sys.argv[2]), console=Console(quiet=True))
