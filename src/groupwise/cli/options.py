"""Arguments and options that several commands share."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

__all__ = [
    "AsJson",
    "DeviceMap",
    "Model",
    "NumProcesses",
    "Overrides",
    "ProgressAside",
    "Source",
    "TrustRemoteCode",
    "check_device_map",
    "start_processes",
]


def _count_processes(text: str | int) -> int:
    """``auto``, or a number of at least 1."""
    if text == "auto":
        import torch

        return max(1, torch.cuda.device_count())
    if not str(text).isdecimal() or int(text) < 1:
        raise typer.BadParameter(f"{text!r} is neither auto nor a number of processes from 1 on")
    return int(text)


def _keep_stdout(context: typer.Context, asked: bool) -> bool:
    if asked:
        from groupwise.streams import give_stdout_back, keep_stdout

        keep_stdout()
        context.find_root().call_on_close(give_stdout_back)  # click does not close a command's own where a later option is wrong
    return asked


Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings to change, as in rollout.temperature=0.8; `groupwise config` lists them."),
]
AsJson = Annotated[bool, typer.Option("--json", callback=_keep_stdout, help="Print JSON instead of text.")]
ProgressAside = Annotated[
    bool, typer.Option("--json", callback=_keep_stdout, help="Print the result as JSON; progress goes to standard error.")
]
DeviceMap = Annotated[
    str | None,
    typer.Option(
        "--device-map",
        metavar="auto",
        help="Lay a large model over all GPUs, the machine's memory and the disk.",
    ),
]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A model folder, a run's folder, a Hub name, or smollm2-135m-instruct.")
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option("--trust-remote-code", help="Run Python code that comes with the model."),
]
Source = Annotated[
    str, typer.Argument(metavar="SOURCE", help="gsm8k, polaris, arithmetic, a data file, a save_to_disk folder, or a Hub name.")
]
NumProcesses = Annotated[
    int,
    typer.Option(
        "--num-processes",
        parser=_count_processes,
        metavar="N|auto",
        help="Processes on this machine that share the work, one for each GPU; auto: as many as it has GPUs.",
    ),
]


def check_device_map(device_map: str | None, processes: int) -> None:
    """Raise ConfigError where one model over all devices is asked for, and several processes with one each too."""
    if not device_map:
        return
    from groupwise.distributed import world_size
    from groupwise.errors import ConfigError

    if processes > 1 or world_size() > 1:
        raise ConfigError(
            f"model.device_map is {device_map}, which lays one model over all devices, but several processes take one each: leave one "
            "of the two out"
        )


def start_processes(count: int) -> None:
    """Run this very command ``count`` times, as one run, and exit with its code; does nothing in one of so many processes.

    Raises ConfigError in one of another number of processes.
    """
    if count == 1:
        return
    from groupwise.distributed import world_size
    from groupwise.distributed.launch import launch
    from groupwise.errors import ConfigError
    from groupwise.streams import give_stdout_back

    if "RANK" in os.environ:
        if world_size() == count:
            return
        raise ConfigError(
            f"--num-processes is {count}, but RANK and WORLD_SIZE in the environment say that a launcher started {world_size()}: "
            "leave --num-processes out, or, where no launcher did, `unset RANK WORLD_SIZE`"
        )
    give_stdout_back()  # to the first of them
    # -P, unless this was started by -m too: a file in the working directory must not hide a package from the others alone.
    own = [] if getattr(sys.modules["__main__"], "__spec__", None) and not sys.flags.safe_path else ["-P"]
    raise typer.Exit(launch([sys.executable, *own, "-m", "groupwise", *sys.argv[1:]], count))
