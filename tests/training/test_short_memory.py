"""Short memory: foreseen where the planner says so, and told where it ran out."""

import re

import pytest
import torch

from groupwise.config import load_config
from groupwise.errors import TrainingError
from groupwise.memory import available_memory_bytes
from groupwise.training import short_memory
from groupwise.training.loop import train
from groupwise.training.setup import prepare

CPU = torch.device("cpu")


def test_what_will_not_fit_is_said_before_the_run(small_config, letters, monkeypatch):
    config = small_config()
    assert short_memory.memory_note(config, CPU) is None
    monkeypatch.setattr(short_memory, "available_memory_bytes", lambda: 2**20)
    monkeypatch.setattr(short_memory.psutil.Process, "memory_info", lambda process: type("Memory", (), {"rss": 0}))
    (note,) = [n for n in prepare(config, letters).notes if "GiB of memory" in n]
    needed, free = map(float, re.search(r"about ([\d.]+) GiB of memory .* and ([\d.]+) GiB are free", note).groups())
    assert needed > free == 0.0
    assert "groupwise plan" in note


def test_the_note_grows_with_the_run(small_config, monkeypatch):
    monkeypatch.setattr(short_memory, "available_memory_bytes", lambda: 0)
    monkeypatch.setattr(short_memory.psutil.Process, "memory_info", lambda process: type("Memory", (), {"rss": 0}))

    def needed(**model):
        return float(re.search(r"about ([\d.]+)", short_memory.memory_note(small_config(model=model), CPU))[1])

    small, large = (
        needed(name="smollm2-135m-instruct", dtype="bfloat16"),
        needed(name="Qwen/Qwen2.5-0.5B-Instruct", dtype="bfloat16"),
    )
    assert 494 / 135 * 0.6 < large / small < 494 / 135 * 1.2


def test_a_divided_run_is_judged_by_what_one_process_holds(monkeypatch):
    """7B over eight GPUs of 80 GB, as its recipe has it: one process holds 47 GiB, and one alone would need 155."""
    config = load_config("gsm8k-7b-8gpu")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 * 2**30, 80 * 2**30))
    gpu = torch.device("cuda")
    assert short_memory.memory_note(config, gpu, processes=8) is None
    assert "155" in (short_memory.memory_note(config, gpu, processes=1) or "")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "0")
    assert short_memory.memory_note(config, gpu) is None, "as many as were started"
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    by_launcher = load_config("gsm8k-7b-8gpu", ["training.sharding=auto"])
    assert short_memory.memory_note(by_launcher, gpu) is None, "or as the launcher divides it"


def test_processes_of_one_machine_share_its_memory(small_config, monkeypatch):
    monkeypatch.setattr(short_memory.psutil.Process, "memory_info", lambda process: type("Memory", (), {"rss": 0}))
    config, free = small_config(), 0
    monkeypatch.setattr(short_memory, "available_memory_bytes", lambda: free)

    def needed(processes):
        note = short_memory.memory_note(config, CPU, processes=processes)
        return None if note is None else float(re.search(r"about ([\d.]+)", note)[1])

    one = needed(1)
    assert needed(4) == pytest.approx(4 * one, rel=0.3)
    free = int(1.5 * one * 2**30)
    assert needed(1) is None
    assert needed(4) is not None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # each on a machine of its own
    assert needed(4) is None


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to ..."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_memory_that_ran_out_is_one_sentence(small_config, letters, quiet, tmp_path, error):
    def fail(report):
        if report.step == 2:
            raise error

    with pytest.raises(TrainingError, match=r"memory ran out .*micro_batch_tokens.*the last checkpoint is .*step-1"):
        train(
            small_config(output={"checkpoint_every": 1}),
            rewards=letters,
            console=quiet,
            run_folder=tmp_path / "run",
            on_step=fail,
        )


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="shape"), short_memory.explain_short_memory(lambda: ""):
        raise RuntimeError("the shape is wrong")


def test_a_container_has_less_than_the_machine(tmp_path):
    (tmp_path / "memory.max").write_text("max\n")
    assert available_memory_bytes(tmp_path) > 2**20
    (tmp_path / "memory.max").write_text(f"{3 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{2**20}\n")
    assert available_memory_bytes(tmp_path) == 2 * 2**20
