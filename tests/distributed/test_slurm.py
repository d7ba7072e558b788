"""The scripts for Slurm, their real text, on a stand-in for Slurm: two nodes of one process each, on CPUs."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from groupwise.config.schema import Config
from tests.distributed.slurm_stand_in import directives, submit
from tests.distributed.two_processes import rows
from tests.waiting import free_port

LAUNCH = Path(__file__).parents[2] / "launch"
LONG_S = 600.0
"""More than any of this takes, however busy the machine is."""


@pytest.fixture
def folder(small_config, tmp_path):
    """A folder to submit from: settings of a run that goes on until it is stopped, and a reward."""
    (tmp_path / "letters.py").write_text("from tests.tiny import lower_case_share as letters\n")
    config = small_config(
        training={"steps": 100_000}, rewards={"functions": [{"function": "letters.py:letters"}]}, output={"checkpoint_every": 0}
    )
    (tmp_path / "long.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    return tmp_path


@pytest.fixture
def environment():
    outside = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("SLURM", "MASTER")) and k not in ("RANK", "WORLD_SIZE", "GROUPWISE_SECRET")
    }
    return {**outside, "PYTHONPATH": os.pathsep.join(sys.path)}


def wait_for(what, job):
    end = time.monotonic() + LONG_S
    while not what():
        assert job.script.poll() is None, f"the job ended by itself, with {job.script.returncode}"
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.slow
def test_a_warning_before_the_time_is_up_lets_all_nodes_finish_their_step_and_save_it(folder, environment):
    job = submit(
        LAUNCH / "slurm.sh",
        ["long.yaml"],
        folder,
        environment,
        nodes="2",
        ntasks_per_node="1",
        cpus_per_task="1",
        job_name="first",
    )
    run = folder / "runs/first"  # the next job of this name resumes it
    wait_for(lambda: (run / "metrics.jsonl").is_file() and "\n" in (run / "metrics.jsonl").read_text(), job)
    environments = [Path(f"/proc/{process}/environ").read_bytes() for step in job.steps() for process in step["processes"]]
    secrets = {re.search(rb"\0GROUPWISE_SECRET=([0-9a-f]{64})\0", each)[1] for each in environments}
    assert len(secrets) == 1, "by which the processes know each other's messages"
    job.time_is_nearly_up()
    assert job.script.wait(LONG_S) == 143
    done = rows(run / "metrics.jsonl")[-1]["step"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{done}"]
    (step,) = job.steps()
    assert step["options"]["cpus-per-task"] == "1", "srun does not take it over from sbatch"


@pytest.mark.soak
def test_a_node_samples_by_vllm_until_the_others_have_saved_their_step(folder, environment, tiny_folder):
    """A transformers model is in vLLM's place, behind the same server."""
    vllm = folder / "vllm-python"
    vllm.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("vllm_stand_in.py")} "$@"\n')
    vllm.chmod(0o755)
    job = submit(
        LAUNCH / "slurm-vllm.sh", [str(tiny_folder), "long.yaml"], folder,
        {**environment, "VLLM_PYTHON": str(vllm), "VLLM_PORT": str(free_port()), "RUN_FOLDER": "runs/mine"},
        nodes="3", ntasks_per_node="1", cpus_per_task="1",
    )  # fmt: skip
    run = folder / "runs/mine"
    wait_for(lambda: (run / "metrics.jsonl").is_file() and "\n" in (run / "metrics.jsonl").read_text(), job)
    job.time_is_nearly_up()
    assert job.script.wait(LONG_S) == 143
    done = rows(run / "metrics.jsonl")[-1]["step"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == [f"step-{done}"]
    server, trainers = job.steps()
    assert (len(server["processes"]), len(trainers["processes"])) == (1, 2)
    assert trainers["options"]["cpus-per-task"] == "1"


def commands_that(folder, **bodies):
    """Shell commands of these bodies, in a folder for PATH; ``$NOTES`` is where they leave what they were told."""
    (folder / "bin").mkdir()
    for name, body in bodies.items():
        (folder / "bin" / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / "bin" / name).chmod(0o755)
    return {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "NOTES": str(folder / "notes")}


VLLM_JOB = {
    "SLURM_JOB_NAME": "first",
    "SLURM_JOB_ID": "41",
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_CPUS_PER_TASK": "1",
    "VLLM_PYTHON": "p",
}
SCONTROL = "printf 'a\\nb\\n'"
SRUN = 'echo "$@" >> $NOTES; case "$*" in *groupwise.engines.vllm*) exec /bin/sleep 60;; esac'


@pytest.mark.parametrize(
    ("given", "listens", "asked"), [(None, "a", "a"), ("10.0.0.7", "10.0.0.7", "10.0.0.7"), ("0.0.0.0", "0.0.0.0", "a")]
)
def test_the_server_is_asked_where_it_listens(tmp_path, given, listens, asked):
    """By itself at its node's address alone; by the script and by the trainers."""
    curl = 'grep -qs -- --host $NOTES && echo "$@" >> $NOTES'
    commands = commands_that(tmp_path, scontrol=SCONTROL, srun=SRUN, curl=curl, sleep="exec /bin/sleep 0.1")
    command = ["bash", LAUNCH / "slurm-vllm.sh", "model", "recipe"]
    subprocess.run(command, env=VLLM_JOB | commands | ({"VLLM_HOST": given} if given else {}), check=True, timeout=60)
    notes = (tmp_path / "notes").read_text()
    assert re.findall(r"--host (\S+)", notes) == [listens]
    assert sorted(re.findall(r"http://\S+", notes)) == [f"http://{asked}:8300", f"http://{asked}:8300/groupwise"]


def test_a_server_that_nobody_reaches_ends_the_job(tmp_path):
    commands = commands_that(tmp_path, scontrol=SCONTROL, srun=SRUN, curl="exit 7", sleep="exit 0")
    command = ["bash", LAUNCH / "slurm-vllm.sh", "model", "recipe"]
    ended = subprocess.run(command, env=VLLM_JOB | commands, stderr=subprocess.PIPE, text=True, timeout=300)
    assert ended.returncode == 1
    assert "nobody samples at http://a:8300" in ended.stderr


def test_a_job_that_is_put_back_into_the_queue_keeps_its_log():
    options = directives(LAUNCH / "slurm.sh")
    assert "requeue" in options
    assert options["open-mode"] == "append"


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_processes_have_as_long_to_end_as_they_wait_for_each_other(script):
    """One that writes a checkpoint is not killed because another has failed."""
    assert re.findall(r"--wait=(\d+)", script.read_text()) == [f"{Config().training.process_timeout_s:.0f}"]


@pytest.mark.parametrize("script", sorted(LAUNCH.glob("*.sh")), ids=lambda path: path.name)
def test_the_scripts_are_shell(script):
    assert subprocess.run([shutil.which("bash"), "-n", script]).returncode == 0
