"""One run in a process of its own, to be killed: ``python run_once.py CONFIG.yaml FOLDER``."""

import sys
from pathlib import Path

import torch
from rich.console import Console

from groupwise import load_config, train


def letters(completions, **columns):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(x.islower() and x.isascii() for x in text) / max(1, len(text)) for text in texts]


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(
        load_config(Path(sys.argv[1])), rewards={"letters": letters}, console=Console(quiet=True), run_folder=Path(sys.argv[2]),
        resume=True,
    )  # fmt: skip
