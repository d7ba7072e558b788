"""Arguments and options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["AsJson", "Model", "Overrides", "ProgressAside", "Source"]

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
