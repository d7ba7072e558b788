"""The tiny model and data of the training tests, and worlds whose processes are threads: quick, and with nothing to launch."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from rich.console import Console

from groupwise.distributed import World
from groupwise.training import loop
from groupwise.training import start as start_module
from groupwise.training.loop import train
from tests.training.conftest import letters, quiet, small_config, sums, tiny_folder

__all__ = ["letters", "quiet", "small_config", "sums", "tiny_folder"]


class ThreadWorld(World):
    """One of several threads of this process; what they tell each other is pickled, as between processes."""

    def __init__(self, rank, size, slots, barrier):
        super().__init__(rank, size)
        self.slots, self.barrier = slots, barrier

    def all_gather_object(self, value):
        self.slots[self.rank] = pickle.dumps(value)
        self.barrier.wait()
        everywhere = [pickle.loads(slot) for slot in self.slots]
        self.barrier.wait()
        return everywhere

    def broadcast(self, tensor):
        tensor.copy_(self.all_gather_object(tensor)[0])

    def _all_reduce(self, tensor, group=None):
        total = sum(self.all_gather_object(tensor))
        tensor.copy_(total)


@pytest.fixture
def in_threads():
    """``in_threads(2, work)``: the results of ``work(world)`` in each thread. When one fails, none of them waits for it."""

    def run(size, work):
        barrier, slots = threading.Barrier(size, timeout=300), [b""] * size

        def one(rank):
            threading.current_thread().name = f"process {rank} of {size}"
            try:
                return work(ThreadWorld(rank, size, slots, barrier))
            except BaseException:
                barrier.abort()
                raise

        with ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(one, rank) for rank in range(size)]
            errors = [f.exception() for f in futures if f.exception()]
            for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
                raise error
            return [f.result() for f in futures]

    return run


@pytest.fixture
def train_in(in_threads, monkeypatch, letters, tmp_path):
    """``train_in(size, name, config)`` trains in a world of ``size`` threads: each one's steps, as callbacks see them, and folder.

    ``console``: what the first process says is shown there.
    """
    here = threading.local()

    @contextmanager
    def world_of_this_thread(on_cpu, timeout_s):
        yield here.world

    loading, load_policy = threading.Lock(), start_module.load_policy

    def load_one_at_a_time(*which):  # transformers' loading is not for threads
        with loading:
            return load_policy(*which)

    monkeypatch.setattr(loop, "open_world", world_of_this_thread)
    monkeypatch.setattr(start_module, "load_policy", load_one_at_a_time)

    def run(size, name, config, console=None, **more):
        def work(world):
            here.world, steps = world, []
            shown = console or Console(quiet=True)
            result = train(config, rewards=letters, console=shown, run_folder=tmp_path / name, on_step=steps.append, **more)
            return steps, result

        return (in_threads(size, work) if size > 1 else [work(World())])[0]

    return run
