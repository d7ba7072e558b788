"""A Slurm of one machine, for scripts: ``srun`` and ``scontrol`` as commands, and what ``sbatch`` and the controller do as functions.

It keeps to what matters for launching and stopping: the variables that tasks get; that srun hands ``--cpus-per-task`` on only when it is
told; that a TERM to srun kills its tasks (``_srun_signal_mgr`` of Slurm's srun_job.c); and that ``--signal`` without ``B:`` goes to
the tasks of all steps, those that srun started and not their children, and not to the batch script.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

__all__ = ["Job", "directives", "submit"]


def directives(script: Path) -> dict[str, str]:
    """The script's ``#SBATCH`` options."""
    lines = [line.split()[1] for line in script.read_text().splitlines() if line.startswith("#SBATCH ")]
    return {name: value for name, _, value in (line.removeprefix("--").partition("=") for line in lines)}


class Job:
    """A batch script under way; its steps' tasks leave their process ids in ``folder``."""

    def __init__(self, script: subprocess.Popen[bytes], folder: Path, signal_option: str) -> None:
        self.script, self.folder, self.signal_option = script, folder, signal_option

    def steps(self) -> list[dict]:
        """What each srun was told, in the order in which they were started."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("step-*.json"))]

    def time_is_nearly_up(self) -> None:
        """What ``--signal`` asked for."""
        who, _, what = self.signal_option.rpartition(":")
        number = signal.Signals[f"SIG{what.partition('@')[0]}"]
        if who == "B":
            self.script.send_signal(number)
            return
        for step in self.steps():
            for process in step["processes"]:
                os.kill(process, number)


def submit(
    script: Path, arguments: list[str], folder: Path, environment: dict[str, str], number: int = 41, **options: str
) -> Job:
    """Run a script as ``sbatch --OPTIONS SCRIPT ARGUMENTS`` would; ``options`` come before its own."""
    from tests.warm import python  # here, as the commands are this file too

    chosen = {**directives(script), **{name.replace("_", "-"): value for name, value in options.items()}}
    nodes, per_node = int(chosen["nodes"]), int(chosen["ntasks-per-node"])
    steps = folder / f"job-{number}"
    steps.mkdir()
    commands = folder / "commands"
    commands.mkdir(exist_ok=True)
    for name in ("srun", "scontrol", "scancel"):
        command = commands / name
        command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {shlex.quote(__file__)} {name} "$@"\n')
        command.chmod(0o755)
    variables = {
        "SLURM_JOB_ID": str(number), "SLURM_JOB_NAME": chosen["job-name"], "SLURM_JOB_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NNODES": str(nodes), "SLURM_NTASKS": str(nodes * per_node),
        "SLURM_NTASKS_PER_NODE": str(per_node), "SLURM_CPUS_PER_TASK": chosen["cpus-per-task"], "STAND_IN_STEPS": str(steps),
        "PATH": os.pathsep.join([str(commands), *(str(Path(one).parent) for one in (python(), sys.executable)), environment["PATH"]]),
    }  # fmt: skip
    process = subprocess.Popen(["bash", str(script), *arguments], cwd=folder, env={**environment, **variables})
    return Job(process, steps, chosen["signal"])


def _srun(words: list[str]) -> int:
    """Start the tasks of one step, wait for them, and leave with the largest exit code."""
    options = {}
    while words and words[0].startswith("-"):
        name, _, value = words.pop(0).removeprefix("--").partition("=")
        options[name] = value
    nodes = int(options.get("nodes", os.environ["SLURM_NNODES"]))
    per_node = int(options.get("ntasks-per-node", os.environ["SLURM_NTASKS_PER_NODE"]))
    shared = {name: value for name, value in os.environ.items() if name != "SLURM_CPUS_PER_TASK"}
    shared |= {"SLURM_NTASKS": str(nodes * per_node), "SLURM_NTASKS_PER_NODE": str(per_node), "SLURM_NNODES": str(nodes)}
    if "cpus-per-task" in options:
        shared["SLURM_CPUS_PER_TASK"] = options["cpus-per-task"]
    tasks = [
        subprocess.Popen(
            words, env={**shared, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % per_node)}, start_new_session=True
        )
        for rank in range(nodes * per_node)
    ]  # fmt: skip

    def force_termination(number: int, frame: object) -> None:
        for task in tasks:
            task.kill()

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, force_termination)
    folder = Path(os.environ["STAND_IN_STEPS"])
    told = {"options": options, "words": words, "processes": [task.pid for task in tasks]}
    place = folder / f"step-{len(list(folder.glob('step-*.json')))}.json"
    place.with_suffix(".partial").write_text(json.dumps(told))
    place.with_suffix(".partial").rename(place)
    codes = [task.wait() for task in tasks]
    return max(code if code >= 0 else 128 - code for code in codes)


def _scancel(words: list[str]) -> int:
    """``scancel --signal=NAME JOB.STEP``."""
    number = signal.Signals[f"SIG{words[0].removeprefix('--signal=')}"]
    step = Path(os.environ["STAND_IN_STEPS"]) / f"step-{words[1].partition('.')[2]}.json"
    for process in json.loads(step.read_text())["processes"]:
        os.kill(process, number)
    return 0


def _scontrol(words: list[str]) -> int:
    assert words[:2] == ["show", "hostnames"]
    nodes = os.environ["SLURM_NNODES"]
    print("\n".join(words[2:] * int(nodes)))
    return 0


if __name__ == "__main__":
    sys.exit({"srun": _srun, "scancel": _scancel, "scontrol": _scontrol}[sys.argv[1]](sys.argv[2:]))
