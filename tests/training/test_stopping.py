"""Signals that ask several processes to stop."""

import os
import signal
from types import SimpleNamespace

import pytest

from groupwise.training import stopping
from groupwise.training.run import Run
from groupwise.training.stopping import StopSignals


def test_a_signal_that_comes_while_the_processes_ask_each_other_is_heard_the_next_time():
    said = []

    class World:
        size, comes_within = 2, True

        def all_gather_object(self, own):
            if self.comes_within:
                os.kill(os.getpid(), signal.SIGTERM)
            return [own, None]

    world = World()
    with StopSignals(at_once=False, say=said.append) as signals:
        run = SimpleNamespace(signals=signals, world=world)
        assert not Run._asked_to_stop(run), "the other process was told of none"
        world.comes_within = False
        assert Run._asked_to_stop(run)
    assert signals.received == signal.SIGTERM
    assert len(said) == 1


def test_a_signal_that_another_process_got_is_this_one_s_too():
    world = SimpleNamespace(size=2, all_gather_object=lambda own: [own, signal.SIGTERM])
    run = SimpleNamespace(signals=StopSignals(at_once=False), world=world)
    assert Run._asked_to_stop(run)
    assert run.signals.received == signal.SIGTERM


def test_a_sigterm_that_is_sent_twice_at_once_is_one(monkeypatch):
    """As by timeout(1), to its command and to its group. Later ones, and a Ctrl-C, are second ones."""
    now, ended = [0.0], []
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stopping.os, "_exit", ended.append)
    for late, number, expected in ((0.9, signal.SIGTERM, []), (1.1, signal.SIGTERM, [143]), (0.0, signal.SIGINT, [130])):
        ended.clear()
        with StopSignals(say=lambda sentence: None) as signals:
            for now[0], sent in ((100.0, signal.SIGTERM), (100.0 + late, number)):
                os.kill(os.getpid(), sent)
            assert ended == expected
        assert signals.received == signal.SIGTERM


def test_a_second_interrupt_may_raise_and_a_sigterm_ends_the_process_all_the_same(monkeypatch):
    ended = []
    monkeypatch.setattr(stopping.os, "_exit", ended.append)
    signals = StopSignals(say=lambda sentence: None)
    signals.interruptible = True
    with signals:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert ended == []
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended == [143]
