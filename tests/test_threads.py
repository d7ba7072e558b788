"""Threads give way to other programs: the rule on made-up times, and that it leaves what is computed as it is."""

from __future__ import annotations

import pytest
import torch

from groupwise import threads
from groupwise.models.decoder import Decoder


class Machine:
    """Cores, and how much of them this process and others keep busy."""

    def __init__(self) -> None:
        self.now, self.busy, self.own = 0.0, 0.0, 0.0

    def run(self, seconds: float, *, own: float, others: float) -> float:
        """Let time go by: cores used by this process, and by others."""
        self.now += seconds
        self.own += own * seconds
        self.busy += (own + others) * seconds
        return self.now


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    monkeypatch.setattr(threads.time, "monotonic", lambda: made.now)
    return made


def watch(machine: Machine, cores: int = 2, most: int | None = None) -> threads.Watch:
    return threads.Watch(most or cores, cores, lambda: (machine.busy, machine.own))


def test_a_neighbour_on_one_of_two_cores_leaves_one_thread(machine):
    """With two threads it gets about half of its core; with one it has the whole."""
    found = watch(machine)
    assert found.look(machine.run(0.6, own=1.5, others=0.5)) == 1
    assert found.look(machine.run(0.6, own=1.0, others=1.0)) == 1


def test_threads_come_back_when_the_neighbour_has_been_gone_for_two_looks(machine):
    found = watch(machine)
    found.look(machine.run(0.6, own=1.0, others=1.0))
    assert found.look(machine.run(0.6, own=1.0, others=0.0)) == 1
    assert found.look(machine.run(0.6, own=1.0, others=0.0)) == 2


def test_small_disturbances_and_looks_too_early_change_nothing(machine):
    found = watch(machine)
    assert found.look(machine.run(0.6, own=1.7, others=0.3)) == 2
    assert found.look(machine.run(0.1, own=0.0, others=2.0)) == 2, "a tenth of a second says nothing"


@pytest.mark.parametrize(("others", "left"), [(0.0, 8), (1.0, 8), (8.0, 8), (9.0, 7), (15.9, 1), (30.0, 1)])
def test_of_many_cores_only_those_in_demand_are_given_up(machine, others, left):
    """8 threads on 16 cores, as where each core shows as two: others may take eight before one is missed."""
    assert watch(machine, cores=16, most=8).look(machine.run(1.0, own=8.0, others=others)) == left


def test_a_fixed_number_is_kept(monkeypatch):
    before = torch.get_num_threads()
    try:
        threads.fix_threads(before)
        monkeypatch.setattr(threads, "Watch", None)  # would be called
        threads.adapt_threads()
        assert threads.threads_in_use() == (before, before)
    finally:
        torch.set_num_threads(before)


def test_a_number_that_was_fixed_is_set_back(monkeypatch):
    """To the most there are, also where a busy moment had left fewer when it was fixed."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "_fixed", False)
    try:
        for wanted, fixed in ((None, 2), (3, 3)):
            monkeypatch.setattr(threads, "_watch", threads.Watch(2, 2, lambda: (0.0, 0.0)))
            torch.set_num_threads(1)
            undo = threads.fix_threads(wanted)
            assert (threads.threads_in_use(), threads._fixed) == ((fixed, fixed), True)
            undo()
            assert (threads.threads_in_use(), threads._fixed) == ((2, 2), False)
    finally:
        torch.set_num_threads(before)


def test_the_program_looks_by_itself(monkeypatch, tiny_llama):
    """A forward and backward pass asks; without a fixed number a busy machine leaves it one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    busy = Machine()
    monkeypatch.setattr(threads, "_fixed", False)
    monkeypatch.setattr(threads, "_EVERY_S", 0.0)
    monkeypatch.setattr(threads, "_busy_s", lambda cores: (busy.run(1e6, own=0, others=1) and busy.busy, busy.own))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    try:
        decoder = Decoder(tiny_llama())
        decoder.logprobs(decoder.prepare([([1, 5, 9], [[7, 8, 2]])])).sum().backward()
        assert threads.threads_in_use() == (1, 2)
    finally:
        threads.fix_threads(before)
