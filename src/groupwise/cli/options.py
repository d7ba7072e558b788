"""Arguments and options that several commands share."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

__all__ = ["AsJson", "Model", "NumProcesses", "Overrides", "ProgressAside", "Source", "start_processes"]

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings to change, as in rollout.temperature=0.8; `groupwise config` lists them."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
ProgressAside = Annotated[bool, typer.Option("--json", help="Print the result as JSON; progress goes to standard error.")]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model folder, a run's folder, a Hub name, or smollm2-135m-instruct.")
]
Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="gsm8k, polaris, arithmetic, a data file, a save_to_disk folder, or a Hub name.")
]
NumProcesses = Annotated[
    int,
    typer.Option(
        "--num-processes",
        min=1,
        metavar="N",
        help="Processes on this machine that share the work, one for each GPU; see docs/distributed.md.",
    ),
]


def start_processes(count: int) -> None:
    """Unless this is already one of several: run this very command ``count`` times, as one, and leave with its exit code."""
    if count == 1 or "RANK" in os.environ:
        return
    from groupwise.distributed.launch import launch

    raise typer.Exit(launch([sys.executable, "-m", "groupwise", *sys.argv[1:]], count))
