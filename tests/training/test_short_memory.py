"""Short memory: foreseen where the planner says so, and told where it ran out."""

import re

import pytest
import torch

from groupwise import train
from groupwise.errors import TrainingError
from groupwise.memory import available_memory_bytes
from groupwise.training import short_memory
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
