"""One of several processes: ``python run_finished.py CONFIG.yaml FOLDER`` trains, keeps a copy of what there is then, and resumes.

FOLDER: ``run``, ``before`` (the copy, made by the first process), and ``told-RANK.json``: what each call of ``train`` returned.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import torch
from rich.console import Console

from groupwise import load_config
from groupwise.training.loop import train
from tests.distributed.run_ranks import letters

if __name__ == "__main__":
    torch.set_num_threads(1)
    config, folder, rank = load_config(Path(sys.argv[1])), Path(sys.argv[2]), os.environ["RANK"]
    told = []
    for resume in (False, True):
        done = train(config, rewards={"letters": letters}, run_folder=folder / "run", resume=resume, console=Console(quiet=True))
        told.append([str(done.folder), done.summary])
        if rank == "0" and not resume:  # the other one waits for it at the second run's beginning
            shutil.copytree(done.folder, folder / "before")
    (folder / f"told-{rank}.json").write_text(json.dumps(told))
