"""One of two processes runs out of the accelerator's memory: it makes its passes again in smaller ones, and the log says which it was.

The processes are threads, and the shortage is one that is raised once in a pass of the second.
"""

import io
import threading

import pytest
import torch
from rich.console import Console
from test_same_curve import assert_same_run

from groupwise.engines.builtin.cache import Cache
from groupwise.errors import TrainingError
from groupwise.models.decoder import Decoder

SECTIONS = {
    "algorithm": {"kl": {"beta": 0.04}, "updates_per_batch": 2, "entropy": {"top_share": 0.5}},
    "warm_start": {"steps": 2, "examples_per_step": 6},
}


def raise_shortage(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def is_sweep(scored):
    return scored.logprobs_T.requires_grad


def is_pass_ahead(scored):
    return not scored.logprobs_T.requires_grad


@pytest.fixture
def short_in(monkeypatch):
    """``short_in({process: [(which, number), ...]})``: from here on, those passes of the process fail; a sweep in its backward pass."""
    score = Decoder.score

    def set_up(failing):
        seen = {}

        def scarce(self, *args, **kwargs):
            scored = score(self, *args, **kwargs)
            process = threading.current_thread().name
            for which, number in failing.get(process, ()):
                if which(scored):
                    seen[process, which] = seen.get((process, which), 0) + 1
                    if seen[process, which] == number:
                        scored.logprobs_T.register_hook(raise_shortage) if is_sweep(scored) else raise_shortage()
            return scored

        monkeypatch.setattr(Decoder, "score", scarce)

    return set_up


@pytest.mark.slow
def test_it_halves_its_passes_and_the_first_process_says_so(train_in, small_config, short_in):
    """In the warm start, the reference's passes, those for entropies, and the first and the second update."""
    config = small_config(**SECTIONS)
    one = train_in(1, "one", config)
    for name, size, failing, halvings in (
        ("warm start, alone", 1, {"MainThread": [(is_sweep, 2)]}, 0),
        ("warm start, reference", 2, {"process 1 of 2": [(is_sweep, 1), (is_pass_ahead, 1)]}, 1),
        ("entropies, an update", 2, {"process 1 of 2": [(is_pass_ahead, 2)], "process 0 of 2": [(is_sweep, 3)]}, 2),
        ("second update", 2, {"process 1 of 2": [(is_sweep, 4)]}, 1),
    ):
        short_in(failing)
        said = io.StringIO()
        other = train_in(size, name, config, console=Console(file=said, width=1000))
        short_in({})
        assert_same_run(one, other)
        told = [line for line in said.getvalue().splitlines() if "memory ran out in a pass of" in line]
        assert len(told) == sum(len(passes) for passes in failing.values()), name
        for process in failing:
            assert size == 1 or any(f"{process}: memory ran out" in line for line in told), name
        assert [step.metrics["memory/halvings"] for step in other[0]] == [halvings, 0], name


@pytest.fixture
def no_cache_once(monkeypatch):
    """``no_cache_once(thread)``: from here on, the third table of keys and values that is asked for there is not to be had."""
    make = Cache._pair

    def set_up(thread):
        asked = []

        def scarce(self, sequences, positions):
            if threading.current_thread().name == thread:
                asked.append(sequences)
                if len(asked) == 3:
                    raise_shortage()
            return make(self, sequences, positions)

        monkeypatch.setattr(Cache, "_pair", scarce)

    return set_up


def test_fewer_sequences_at_once_are_the_same_run(train_in, small_config, no_cache_once):
    config = small_config()
    one = train_in(1, "one", config)
    no_cache_once("process 1 of 2")
    said = io.StringIO()
    two = train_in(2, "two", config, console=Console(file=said, width=1000))
    assert_same_run(one, two)
    told = [line for line in said.getvalue().splitlines() if "sequences were sampled at once" in line]
    assert len(told) == 1
    assert "process 1 of 2: memory ran out while 4 sequences" in told[0]
    assert "max_concurrent_sequences is 2 from here on instead of 256" in told[0]
    assert [step.metrics["memory/sampling_halvings"] for step in two[0]] == [1, 1]


def test_what_the_sampling_ahead_learns_the_evaluations_know(train_in, small_config, no_cache_once):
    no_cache_once("groupwise-sampling")
    said = io.StringIO()
    config = small_config(rollout={"ahead": 1}, training={"steps": 3})
    steps, _ = train_in(1, "ahead", config, console=Console(file=said, width=1000))
    assert said.getvalue().count("memory ran out while 12 sequences were sampled at once") == 1
    assert steps[-1].metrics["memory/sampling_halvings"] == 1


def test_a_single_completion_that_does_not_fit_is_a_sentence_of_its_own(train_in, small_config, monkeypatch):
    monkeypatch.setattr(Decoder, "score", raise_shortage)
    with pytest.raises(
        TrainingError, match=r"a single completion did not fit, .* set model.gradient_checkpointing=true"
    ) as caught:
        train_in(1, "one", small_config())
    assert "lower training.micro_batch_tokens" not in str(caught.value)
