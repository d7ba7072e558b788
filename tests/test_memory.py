"""Memory: freed blocks stay with the process where that was asked for, and peaks are of the right size."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from groupwise import memory
from groupwise.config.schema import Config
from groupwise.memory import keep_freed_memory, peak_memory_bytes, use_expandable_segments
from groupwise.models.devices import computes_bf16
from groupwise.training import start

MIB = 2**20
FREE_AND_LOOK = """
import psutil
from groupwise.memory import keep_freed_memory
made, resident = keep_freed_memory(), psutil.Process().memory_info
block = bytearray(64 * 2**20)
full = resident().rss
del block
print(made, (full - resident().rss) // 2**20)
"""

glibc = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the allocator's settings are glibc's")


def freed_mib(monkeypatch, setting):
    """Whether the setting was made, and how much of 64 MiB went back to the system when it was freed."""
    monkeypatch.setenv("GROUPWISE_KEEP_MEMORY", setting)
    out = subprocess.run([sys.executable, "-c", FREE_AND_LOOK], capture_output=True, text=True, check=True, timeout=60)
    made, mib = out.stdout.split()
    return made == "True", int(mib)


@glibc
def test_freed_memory_is_kept(monkeypatch):
    made, mib = freed_mib(monkeypatch, "1")
    if not made:
        pytest.skip("this C library has no mallopt")
    assert mib < 4


@glibc
def test_the_allocator_is_left_alone_on_request(monkeypatch):
    assert freed_mib(monkeypatch, "0") == (False, pytest.approx(64, abs=4))


MANY_SHAPES = """
import sys, torch
from groupwise import memory
memory._COMPILED_KERNELS = int(sys.argv[1])
memory.keep_freed_memory()
torch.set_num_threads(1)
weight = torch.zeros(576, 576, dtype=torch.bfloat16)
def products(shapes):
    for rows in shapes:
        torch.zeros(rows, 576, dtype=torch.bfloat16) @ weight
        memory.release_freed_memory()
import psutil
products(range(1, 9))
before = psutil.Process().memory_info().rss
products(range(9, 209))
print((psutil.Process().memory_info().rss - before) // 2**20)
"""


@glibc
@pytest.mark.slow
def test_kernels_of_shapes_that_do_not_come_again_are_let_go_of():
    """200 shapes of one product: what was compiled for each is kept by default."""
    if not computes_bf16():
        pytest.skip("without bf16 instructions nothing is compiled")
    without = {
        name: value for name, value in os.environ.items() if "CACHE_CAPACITY" not in name
    }  # a test before may have set it here
    few, many = (
        int(
            subprocess.run(
                [sys.executable, "-c", MANY_SHAPES, str(kept)], env=without, capture_output=True, text=True, check=True
            ).stdout
        )
        for kept in (8, 1024)
    )
    assert many > 10
    assert few < many / 4


IN_BETWEEN = """
import psutil
from groupwise.memory import blocks_of_their_own, keep_freed_memory
made, resident = keep_freed_memory(), psutil.Process().memory_info
def given_back():
    blocks = [bytearray(2**18) for _ in range(512)]
    full = resident().rss
    del blocks
    return (full - resident().rss) // 2**20
with blocks_of_their_own():
    between = given_back()
print(made, between, given_back())
"""


@glibc
def test_blocks_of_caches_that_grow_are_given_back_at_once_and_others_are_kept(monkeypatch):
    monkeypatch.setenv("GROUPWISE_KEEP_MEMORY", "1")
    out = subprocess.run([sys.executable, "-c", IN_BETWEEN], capture_output=True, text=True, check=True, timeout=60)
    made, between, after = out.stdout.split()
    if made != "True":
        pytest.skip("this C library has no mallopt")
    assert int(between) > 128 - 64 - 8, "of 128 MiB; what the heap has room for, 64 MiB at most, is taken from there"
    assert int(after) < 4


HOLES = """
import psutil
from groupwise.memory import give_back_freed_memory
made, resident = give_back_freed_memory(), psutil.Process().memory_info
first = bytearray(20 * 2**20)
del first  # from here on glibc by itself takes blocks of this size from its heap
pairs = [(bytearray(8 * 2**20), bytearray(2**16)) for _ in range(8)]
full = resident().rss
kept = [small for _, small in pairs]
del pairs
print(made, (full - resident().rss) // 2**20)
"""


@glibc
@pytest.mark.parametrize("setting", ["1", "0"])
def test_blocks_between_what_stays_go_back_where_weights_come_and_go(monkeypatch, setting):
    """64 MiB in eight blocks, with something that stays after each. Left alone, the heap keeps all but the last."""
    monkeypatch.setenv("GROUPWISE_KEEP_MEMORY", setting)
    out = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True, timeout=60)
    made, mib = out.stdout.split()
    assert (made == "True") is (setting == "1")
    assert (int(mib) > 60) is (setting == "1")


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.delenv("GROUPWISE_KEEP_MEMORY", raising=False)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False


def test_the_peak_is_in_bytes_and_grows_with_what_is_used():
    import psutil

    held = psutil.Process().memory_info().rss
    assert held * 0.9 < peak_memory_bytes() < psutil.virtual_memory().total
    block = bytearray(peak_memory_bytes() - psutil.Process().memory_info().rss + 80 * MIB)
    peak = peak_memory_bytes()
    assert peak >= held + len(block) // 2
    del block
    assert peak_memory_bytes() >= peak - MIB  # it was reached, so it stays; the kernel counts pages by core, in batches


PHASES = """
import json
from groupwise import memory
MIB = 2**20
peaks = memory.PeakByPhase()
with peaks.phase("large"):
    block = bytearray(96 * MIB)
    del block
    memory.release_freed_memory()
with peaks.phase("small"):
    pass
between = bytearray(128 * MIB)
del between
memory.release_freed_memory()
with peaks.phase("small"):
    pass
found = peaks.by_name()
print(json.dumps([found["large"], found["small"], peaks.highest, [name for name, _ in peaks.measured]]))
"""


@glibc
def test_the_peak_of_each_phase_is_its_own():
    """The first takes 96 MiB more than the second, and what is between them 32 MiB more than either.

    In a process of its own: in this one other tests have left memory that may be given back within a phase.
    """
    ran = subprocess.run([sys.executable, "-c", PHASES], capture_output=True, text=True, check=True)
    large, small, highest, names = json.loads(ran.stdout)
    assert large - small == pytest.approx(96 * MIB, abs=16 * MIB)
    assert highest - large == pytest.approx(32 * MIB, abs=16 * MIB)
    assert names == ["large", "small", "small"]


def steps(monkeypatch, resident):
    """Whether anything was given back after each of steps that leave ``resident`` with the process."""
    left = iter(resident)
    monkeypatch.setattr(memory, "_kept", True)
    monkeypatch.setattr(memory, "release_freed_memory", lambda: True)
    kept = memory.KeptMemory(lambda: next(left))
    return [kept.after_step() for _ in resident]


def test_kept_memory_that_creeps_is_given_back_and_what_a_step_needs_is_kept(monkeypatch):
    assert steps(monkeypatch, [100, 101, 102, 100]) == [False] * 4
    assert steps(monkeypatch, [100, 103, 100, 101, 103, 100]) == [False, True, False, False, True, False]


def test_kept_memory_is_looked_at_only_where_it_is_kept(monkeypatch):
    monkeypatch.setattr(memory, "_kept", False)
    assert not memory.KeptMemory(lambda: 1 / 0).after_step()


MAPPED = """
import re, sys, torch
from safetensors.torch import load_file, save_file
from groupwise.memory import keep_freed_memory, own_memory
def now(what):
    return int(re.search(what + r":\\s+(\\d+)", open("/proc/self/status").read())[1]) // 1024
save_file({f"t{i}": torch.full((4 * 2**20,), float(i)) for i in range(12)}, sys.argv[1])
keep_freed_memory()
tensors = load_file(sys.argv[1])
assert sorted(float(t.max()) for t in tensors.values()) == list(range(12))
tied = tensors["t3"].view(-1)
before = now("RssFile"), now("RssAnon"), now("VmRSS")
open("/proc/self/clear_refs", "w").write("5")
own_memory([*tensors.values(), tied])
print(now("RssFile") - before[0], now("RssAnon") - before[1], now("VmHWM") - before[2])
assert sorted(float(t.max()) for t in tensors.values()) == list(range(12))
assert tied.data_ptr() == tensors["t3"].data_ptr()
tensors.clear()
del tied
print(now("RssAnon") - before[1])
"""


@glibc
def test_weights_move_from_their_file_into_memory_one_at_a_time_and_go_back_at_once(tmp_path):
    """192 MiB in twelve tensors: never more than one of them twice, and all given back when they are let go of."""
    command = [sys.executable, "-c", MAPPED, str(tmp_path / "a.safetensors")]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert out.returncode == 0, out.stderr
    file, own, twice, left = map(int, out.stdout.split())
    assert file < -180
    assert own > 180
    assert twice < 24
    assert left < 64 + 8, "what the heap had room for, 64 MiB at most, was taken from there"


def test_blocks_of_a_gpu_s_memory_may_grow_unless_somebody_has_said_how_they_are_taken(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_set_allocator_settings", asked.append)
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    assert use_expandable_segments()
    assert use_expandable_segments(False), "a run before in this process may have let them"
    assert asked == ["expandable_segments:True", "expandable_segments:False"]
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        with monkeypatch.context() as said:
            said.setenv(name, "max_split_size_mb:64")
            assert not use_expandable_segments()
    monkeypatch.delattr(torch.cuda.memory, "_set_allocator_settings")
    assert not use_expandable_segments(), "a PyTorch that has no such setting"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not use_expandable_segments()
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("engine", "grown"), [("auto", True), ("builtin", True), ("vllm", False), ("my_engine.py:MyEngine", False)]
)
def test_where_others_may_open_a_run_s_memory_its_blocks_stay_as_they_are(engine, grown, monkeypatch):
    asked = []
    monkeypatch.setattr(start, "use_expandable_segments", asked.append)
    monkeypatch.setattr(start, "keep_freed_memory", lambda: True)
    start._set_up_process(Config.model_validate({"rollout": {"engine": engine}}), SimpleNamespace(size=1))
    assert asked == [grown]
