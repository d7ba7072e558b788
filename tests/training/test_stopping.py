"""Signals that ask several processes to stop."""

import os
import signal
from types import SimpleNamespace

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
