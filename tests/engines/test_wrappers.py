"""Sampling in a thread beside learning on a GPU: what CUDA forbids while a graph is captured. With CUDA's calls stood in for."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from contextlib import contextmanager, nullcontext
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from groupwise.config.schema import OptimizerConfig
from groupwise.engines.base import SampleRequest, SamplingSettings
from groupwise.engines.builtin import runner as runner_module
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.engines.builtin.runner import Runner
from groupwise.engines.wrappers import QueuedRequest, SamplingThread
from groupwise.memory import DEVICE_WIDE, reclaim_memory
from groupwise.models.decoder import Decoder
from groupwise.training.optimizer import MasterAdamW
from groupwise.types import Problem, Prompt


@pytest.fixture
def cuda(monkeypatch):
    """What was asked of CUDA, in order, with the thread that asked; a wait for the whole device fails."""
    asked = []

    def note(what):
        asked.append((what, threading.current_thread().name))

    class Event:
        def record(self, stream):
            note(f"record on {stream.name}")

    def stream_of(device):
        name = threading.current_thread().name
        return SimpleNamespace(name=name, wait_event=lambda event: note("wait for the event"))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", stream_of)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: pytest.fail("the whole device was waited for"))
    return asked


def held_elsewhere():
    """Whether another thread could not take the lock now."""
    found = []

    def look():
        found.append(DEVICE_WIDE.acquire(blocking=False))
        if found[0]:
            DEVICE_WIDE.release()

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return not found[0]


def test_the_thread_waits_for_the_weights_and_for_nothing_else(cuda):
    class Engine:
        def serve_checked(self, request, on_progress):
            cuda.append(("sample", threading.current_thread().name))
            return []

    thread = SamplingThread(torch.device("cuda"))
    order = QueuedRequest(Engine(), SampleRequest([Prompt(Problem("p", "", ""), "", (1,))], 2, SamplingSettings(4), 0, "s"))
    thread.put(order)
    thread.wait(order)
    thread.close()
    here, there = threading.current_thread().name, "groupwise-sampling"
    assert cuda == [(f"record on {here}", here), ("wait for the event", there), ("sample", there)]


def stand_in(monkeypatch, graph, capture):
    """For CUDA's graphs."""
    handles = itertools.count(100)
    for name, value in {
        "CUDAGraph": graph, "graph": capture, "graph_pool_handle": lambda: next(handles), "current_stream": lambda: None,
        "stream": lambda stream: nullcontext(), "current_device": lambda: 0, "Stream": lambda device: f"a stream of {device}",
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(runner_module, "_capture_stream", cache(runner_module._capture_stream.__wrapped__))


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_where_no_graph_can_be_captured_steps_are_launched(monkeypatch, kind):
    """The graph's memory runs out when it is made. The allocator of torch 2.11 would go on as if the capture had not ended.
    Errors of Triton are no RuntimeError."""
    seen, told, ended = [], [], []

    @contextmanager
    def capture(graph, pool, stream, capture_error_mode):
        seen.append("begin")
        yield
        raise kind("CUDA error: out of memory\nwhen the graph was instantiated")

    stand_in(monkeypatch, lambda: None, capture)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda device, pool: ended.append((device, pool)), raising=False)
    runner = Runner(None, None, None, None, told.append)

    def once(step):
        seen.append("step")
        step.last_tokens, step.last_logprobs = torch.tensor([len(seen)]), torch.zeros(1)

    monkeypatch.setattr(runner, "_once", once)
    first, second = (SimpleNamespace(last_tokens=torch.zeros(1, dtype=torch.long)) for _ in range(2))
    runner._replay(first)
    assert seen == ["begin", "step", "step"], "what was recorded was not computed, so it is launched"
    assert told == ["a CUDA graph could not be captured (CUDA error: out of memory): steps are launched one by one instead"]
    assert len(ended) == 1
    assert runner._launches
    monkeypatch.setattr(runner, "_replay", lambda step: pytest.fail("it tried again"))
    assert len(runner.run(second, 3)[0]) == 3


def test_a_graph_that_could_not_be_captured_is_not_tried_again_by_the_next_call(tiny_llama, tokenizer, make_prompts, monkeypatch):
    """Each call of a run tried, and told it again."""
    tried, told = [], []

    def fail(runner, step):
        tried.append(step)
        raise RuntimeError("CUDA error: operation not permitted")

    monkeypatch.setattr(runner_module, "GRAPHS", {"cpu"})
    monkeypatch.setitem(runner_module.BURSTS, "cpu", 4)
    monkeypatch.setattr(Runner, "_capture", fail)
    engine = BuiltinEngine(Decoder(tiny_llama()), tokenizer, ())
    engine.limit.tell = told.append
    for scope in ("one", "two"):
        engine.sample(make_prompts([5]), 2, SamplingSettings(8), seed=0, scope=scope)
        assert len(tried) == len(told) == 1
    assert "steps are launched one by one" in told[0]


def test_a_graph_is_captured_with_nobody_else_at_the_device(monkeypatch):
    seen = []

    class Graph:
        def replay(self):
            seen.append(("replay", held_elsewhere()))

    @contextmanager
    def capture(graph, pool, stream, capture_error_mode):
        seen.append(("begin", held_elsewhere()))
        yield
        seen.append(("end", held_elsewhere()))

    stand_in(monkeypatch, Graph, capture)
    runner = Runner(None, None, None, None)
    monkeypatch.setattr(runner, "_once", lambda step: seen.append(("record", held_elsewhere())))
    step = object()
    runner._replay(step)
    runner._replay(step)
    assert seen == [("begin", True), ("record", True), ("end", True), ("replay", False), ("replay", False)]


def test_each_device_captures_on_a_stream_of_its_own(monkeypatch):
    """torch's belongs to the device that captured first: nothing of another one was recorded."""
    made, taken = [], []

    @contextmanager
    def capture(graph, pool, stream, capture_error_mode):
        taken.append(stream)
        yield

    stand_in(monkeypatch, lambda: None, capture)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: made.append(device) or f"a stream of {device}")
    runner = Runner(None, None, None, None)
    monkeypatch.setattr(runner, "_once", lambda step: None)
    for device in (0, 1, 0):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        runner._capture(object())
    assert taken == ["a stream of 0", "a stream of 1", "a stream of 0"]
    assert made == [0, 1]


def test_no_graph_is_captured_into_the_memory_of_one_that_was_destroyed(monkeypatch):
    """torch 2.11 fails an assertion there (vllm-project/vllm#28426)."""
    users, handles = Counter(), itertools.count()

    class Graph:
        pooled = None

        def pool(self):
            return self.pooled

        def replay(self):
            pass

        def __del__(self):
            users[self.pooled] -= 1

    @contextmanager
    def capture(graph, pool=None, stream=None, capture_error_mode="global"):
        if pool in users and users[pool] == 0:
            raise RuntimeError("it->second->use_count > 0 INTERNAL ASSERT FAILED")
        graph.pooled = next(handles) if pool is None else pool
        users[graph.pooled] += 1
        yield

    stand_in(monkeypatch, Graph, capture)
    runner = Runner(None, None, None, None)
    monkeypatch.setattr(runner, "_once", lambda step: None)
    for step in (object(), object(), object()):
        runner._replay(step)
    assert sum(users.values()) == 1, "of the graphs that nobody replays any more, none holds memory"


@pytest.mark.parametrize(("precision", "held"), [("masters-8bit", True), ("masters", False)])
def test_8_bit_moments_are_stepped_with_nobody_capturing(precision, held, monkeypatch):
    """bitsandbytes waits for the whole device after each tensor."""
    weight, seen = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16)), []
    optimizer = MasterAdamW([("w", weight)], OptimizerConfig(precision=precision))
    monkeypatch.setattr(optimizer.adamw, "step", lambda: seen.append(held_elsewhere()))
    weight.sum().backward()
    optimizer.step(1e-3)
    assert seen == [held]


def test_memory_is_given_back_with_nobody_capturing(monkeypatch):
    seen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append(held_elsewhere()))
    reclaim_memory()
    assert seen == [True]


def test_a_burst_after_the_first_replays_all_its_steps_but_where_rows_are_given_something(monkeypatch):
    """A launched step takes three times as long as a replayed one (H200, 1.5B): it was one of sixteen."""
    seen = []
    runner = Runner(None, None, None, None)
    monkeypatch.setattr(runner_module, "GRAPHS", {"cpu"})
    monkeypatch.setattr(runner, "_capture", lambda step: SimpleNamespace(replay=lambda: seen.append("replay")))
    monkeypatch.setattr(runner, "_once", lambda step, *given: seen.append(("launch", len(given))))
    step = SimpleNamespace(last_tokens=torch.zeros(2, dtype=torch.long), last_logprobs=torch.zeros(2))
    runner.run(step, 3)
    assert seen == [("launch", 0), "replay", "replay"], "kernels run before they are captured"
    seen.clear()
    runner.run(step, 2)
    assert seen == ["replay", "replay"]
    seen.clear()
    runner.run(step, 2, [object()])
    assert seen == [("launch", 1), "replay"]
    seen.clear()
    runner.run(SimpleNamespace(**vars(step)), 1)
    assert seen == [("launch", 0)], "another step than the captured one"
