"""Weights over a group of processes, as to vLLM on other GPUs: here between CPUs, by gloo in place of NCCL."""

from __future__ import annotations

import gc
import json
import logging
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import Future
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from groupwise.engines.base import SamplingSettings
from groupwise.engines.vllm import pushing, wire
from groupwise.engines.vllm.protocol import Broken, Unreachable
from groupwise.engines.vllm.pushing import why_no_wire
from groupwise.engines.vllm.transfer import read
from groupwise.engines.vllm.wire import Wire, opened
from tests.engines.with_vllm.test_transfer import same
from tests.engines.with_vllm.test_which_weights import start_anew
from tests.engines.with_vllm.test_worker import FULL, Fused, Worker

CPU = torch.device("cpu")
SAMPLED = SamplingSettings(max_tokens=6)


@pytest.fixture
def tensors():
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed.weight": (6, 4), "layer.q_proj.weight": (4, 4), "layer.k_proj.weight": (2, 4), "layer.v_proj.weight": (2, 4)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def as_between_gpus(monkeypatch):
    """Sampling servers are held for ones on other GPUs, and no file may be sent to them."""
    sent = []
    monkeypatch.setattr(pushing, "why_no_wire", lambda link, found, device: None)
    packed = pushing.packed_buckets
    monkeypatch.setattr(pushing, "packed_buckets", lambda *given: sent.append(given) or packed(*given))
    return sent


def test_a_server_elsewhere_has_the_weights_without_a_file(
    serve, engine_over, tiny_llama, make_prompts, shifted, scored, as_between_gpus
):
    model, server, prompts = tiny_llama(), serve(tiny_llama()), make_prompts([4])
    engine = engine_over(server, model)
    group = engine._way.wire._group
    for version in (1, 2):
        shifted(model)
        engine.refresh(version)
        assert same(model, server.backend)
        ((one, _),) = engine.sample(prompts, 2, SAMPLED, seed=1, scope="s")
        torch.testing.assert_close(torch.tensor(one.logprobs), scored(model, prompts[0], one), atol=1e-4, rtol=1e-4)
    assert engine._way.wire._group is group, "the group is made once"
    assert not as_between_gpus


_WORKERS = """
import json, sys, torch
from groupwise.engines.vllm.transfer import read
from groupwise.engines.vllm.wire import opened

def load(rank, offer):  # in a function, as a worker does: who keeps the source keeps gloo's threads, and is aborted with them at its end
    with opened(offer, rank, torch.device("cpu")) as source:
        first = {name: tensor.double().sum().item() for name, tensor in read(source)}
        assert first == {name: tensor.double().sum().item() for name, tensor in read(source)}
        return [list(first), first]

print(json.dumps(load(int(sys.argv[1]), json.loads(sys.stdin.read()))))
"""


def test_workers_in_processes_of_their_own_have_what_the_trainer_has(tensors):
    """Two of them, as with tensor parallelism; one asks, and both get."""
    tensors["layer.q_proj.weight"] = tensors["layer.q_proj.weight"].bfloat16().t()  # not contiguous
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def commit(offer):
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", _WORKERS, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
            )
            for rank in range(2)
        ]
        for worker in workers:
            worker.stdin.write(json.dumps(offer).encode())
            worker.stdin.close()
        return {"said": [json.loads(worker.stdout.read()) for worker in workers], "codes": [worker.wait() for worker in workers]}

    told = Wire(CPU, 2).push(lambda: ((name, t.contiguous()) for name, t in tensors.items()), commit)
    expected = {name: tensor.double().sum().item() for name, tensor in tensors.items()}
    assert told == {"said": [[list(tensors), expected]] * 2, "codes": [0, 0]}


def loaded(model, offer):
    return Worker(model).groupwise_load(offer)


def test_vllm_s_worker_compares_with_what_is_sent_a_second_time(tensors):
    model = Fused()
    assert Wire(CPU, 1).push(lambda: tensors.items(), lambda offer: loaded(model, offer)) == FULL
    assert torch.equal(model.layer.qkv_proj.weight[4:6], tensors["layer.k_proj.weight"])


def test_what_was_damaged_on_its_way_is_named(tensors):
    rounds = []

    def named():
        rounds.append(None)
        for name, tensor in tensors.items():
            yield name, tensor + (len(rounds) == 2 and name == "layer.v_proj.weight")  # the first round is for the offer

    with pytest.raises(ValueError, match=r"layer\.qkv_proj\.weight does not hold what was sent"):
        Wire(CPU, 1).push(named, lambda offer: loaded(Fused(), offer))
    assert len(rounds) == 3


def test_whoever_stops_reading_leaves_the_group_in_step(tensors):
    """The worker fails at the second of four tensors; the next push over the same wire goes well."""

    class Stops(Fused):
        def load_weights(self, weights):
            next(iter(weights))
            raise ValueError("no room")

    made = Wire(CPU, 1, timeout_s=20)
    with pytest.raises(ValueError, match="no room"):
        made.push(lambda: tensors.items(), lambda offer: loaded(Stops(), offer))
    assert made.push(lambda: tensors.items(), lambda offer: loaded(Fused(), offer)) == FULL


def read_one_and_die(offer):
    """As a worker whose process ends: its connections are closed."""
    received = wire.Received(offer, 0, CPU)
    next(received())
    received._round.close()  # its frame holds the group
    wire._last.clear()
    del received
    gc.collect()


@pytest.mark.parametrize("when", ["before it joins", "in the middle"])
def test_a_server_that_goes_away_is_noticed_at_once(tensors, when):
    def commit(offer):
        if when == "in the middle":
            read_one_and_die(offer)
        raise Unreachable("it broke off")

    made, began = Wire(CPU, 1, timeout_s=20), time.monotonic()
    with pytest.raises(Unreachable, match="broke off"):
        made.push(lambda: tensors.items(), commit)
    assert time.monotonic() - began < 10, "long before the limit"


def test_after_a_broken_wire_the_push_begins_again_with_another(
    serve, engine_over, tiny_llama, shifted, as_between_gpus, monkeypatch
):
    monkeypatch.setattr(Wire.__init__, "__defaults__", (20.0,))  # seconds that the other end may take
    model, server = tiny_llama(), serve(tiny_llama())
    engine = engine_over(server, model)
    load, failed = server.backend.load, []

    def breaks(source, label):
        if not failed:
            failed.append(source["key"])
            read_one_and_die(source)
            raise Broken("gone")
        assert source["key"] not in failed
        return load(source, label)

    server.backend.load = breaks
    shifted(model)
    began = time.monotonic()
    engine.refresh(1)
    assert time.monotonic() - began < 10, "long before the limit"
    assert failed
    assert same(model, server.backend)
    assert not as_between_gpus


@pytest.mark.parametrize("found", ["while sampling", "at the next push"])
def test_a_server_that_starts_anew_gets_a_wire_of_its_own(
    found, serve, engine_over, tiny_llama, make_prompts, shifted, as_between_gpus
):
    """Its workers are other processes: a broadcast to the group with the old ones would wait for those."""
    model, server = tiny_llama(), serve(tiny_llama())
    server.backend.load = told_as_value_error(server.backend.load)
    engine = engine_over(server, model)
    before = engine._way.wire
    start_anew(server)
    wire._last.clear()
    if found == "while sampling":
        engine.sample(make_prompts([4]), 2, SAMPLED, seed=1, scope="s")
    else:
        shifted(model)
        engine.refresh(1)
    assert same(model, server.backend)
    assert engine._way.wire is not before
    assert not as_between_gpus


def test_where_no_group_comes_about_the_weights_are_sent(
    serve, engine_over, tiny_llama, shifted, as_between_gpus, monkeypatch, caplog
):
    def alone(*_):
        raise RuntimeError("no way to the other")

    model, server = tiny_llama(), serve(tiny_llama())
    monkeypatch.setattr(wire, "_joined", alone)
    server.backend.load = told_as_value_error(server.backend.load)
    with caplog.at_level(logging.WARNING, "groupwise"):
        engine = engine_over(server, model)
        shifted(model)
        engine.refresh(1)
    assert same(model, server.backend)
    assert len(caplog.records) == 1
    assert "no way to the other): they are sent to it from here on" in caplog.text
    assert as_between_gpus


def told_as_value_error(load):
    """As ``backend._Load`` tells whatever a worker raises."""

    def loading(source, label):
        try:
            return load(source, label)
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    return loading


def test_the_meeting_point_is_reached_from_this_machine_alone():
    made = Wire(CPU, 1)
    addresses = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    socket.create_connection(("127.0.0.1", made._port), 2).close()
    for address in addresses or {"127.0.0.2"}:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection((address, made._port), 2)


@pytest.mark.parametrize(
    ("found", "local", "reason"),
    [
        ({"devices": ["b"], "nccl": "2.27"}, True, None),
        ({"devices": ["b", "c"], "nccl": "2.27"}, True, None),
        ({"devices": [""], "nccl": ""}, True, ""),
        ({}, True, ""),
        ({"devices": ["b"], "nccl": "2.27"}, False, "it is on another machine"),
        ({"devices": ["a", "b"], "nccl": "2.27"}, True, "some of its GPUs are the trainer's, or have several workers"),
        ({"devices": ["b", "b"], "nccl": "2.27"}, True, "some of its GPUs are the trainer's, or have several workers"),
        ({"devices": ["b"], "nccl": "2.26"}, True, "NCCL is 2.26 there and 2.27 here: install the same torch on both sides"),
        ({"devices": ["b"]}, True, "NCCL is missing there and 2.27 here: install the same torch on both sides"),
    ],
)
def test_who_is_reached_by_a_wire(found, local, reason, monkeypatch):
    monkeypatch.setattr(pushing, "device_id", lambda device: "a")
    monkeypatch.setattr(pushing, "nccl_version", lambda: "2.27")
    link = SimpleNamespace(on_this_machine=local)
    assert why_no_wire(link, found, torch.device("cuda")) == reason
    assert why_no_wire(link, found, CPU) == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    if all(found.get("devices") or [""]):
        assert "divided weights" in why_no_wire(link, found, CPU), "a run on GPUs is told why"


def test_why_files_are_sent_to_gpus_is_said_once(serve, engine_over, tiny_llama, shifted, monkeypatch, caplog):
    monkeypatch.setattr(pushing, "why_no_wire", lambda link, found, device: "NCCL is another")
    model, server = tiny_llama(), serve(tiny_llama())
    with caplog.at_level(logging.WARNING, "groupwise"):
        engine = engine_over(server, model)
        engine.refresh(1)
    assert [record.getMessage().split(": ")[-1] for record in caplog.records] == ["NCCL is another"]


def test_numbers_of_other_kinds_do_not_travel():
    with (
        pytest.raises(ValueError, match=r"torch\.int8 does not travel"),
        opened({"tensors": [["a", "torch.int8", [1]]]}, 0, CPU) as source,
    ):
        list(read(source))


@pytest.mark.parametrize(("rank", "handled", "before"), [(0, "0", None), (0, "0", "3"), (1, "3", "3")])
def test_between_gpus_the_group_is_nccl_s_and_outlives_a_worker(rank, handled, before, monkeypatch):
    """By a stand-in: there is no NCCL here. What ends a process whose peer died is off at the trainer's end alone."""
    import torch.distributed as dist

    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False) if before is None else monkeypatch.setenv(name, before)
    made = []

    class Group:
        Options = SimpleNamespace

        def __init__(self, store, rank, size, options):
            made.append((rank, size, options._timeout.total_seconds(), os.environ.get(name)))

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Group, raising=False)
    wire._group(dist.HashStore(), "key", rank, 3, timedelta(seconds=7), torch.device("cuda"))
    assert made == [(rank, 3, 7.0, handled)]
    assert os.environ.get(name) == before


def test_an_answer_that_comes_too_early_ends_the_waiting():
    answer = Future()
    answer.set_result({})
    with pytest.raises(RuntimeError, match="before it had all"):
        Wire._wait(SimpleNamespace(is_completed=lambda: False), answer)
