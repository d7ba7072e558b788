"""Weights that are read where they lie: by handles to another process's memory, and as tensors of the same one."""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch.multiprocessing import reductions

from groupwise.engines.base import SamplingSettings
from groupwise.engines.vllm import pushing, transfer
from groupwise.engines.vllm.engine import VllmEngine
from groupwise.engines.vllm.protocol import StaleWeights
from groupwise.engines.vllm.service import Service
from groupwise.engines.vllm.transfer import handles_to
from groupwise.engines.vllm.wire import opened
from groupwise.errors import TrainingError
from groupwise.models.load import Policy
from tests.engines.with_vllm.model_backend import ModelBackend

SAMPLED = SamplingSettings(max_tokens=6)
_READER = """
import sys
from groupwise.engines.vllm.transfer import read
from groupwise.engines.vllm.wire import opened
import torch
with opened(sys.stdin.buffer.read(), 0, torch.device("cpu")) as source:
    assert len(list(read(source))) == 3, "what is open can be read again"
    for name, tensor in read(source):
        print(name, tensor.dtype, tuple(tensor.shape), float(tensor.double().sum()))
        tensor.zero_()
"""


def test_another_process_reads_the_very_memory():
    """No copy: what it writes there is here."""
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(6, 4, generator=generator)
    tensors = {"a": torch.randn(3, 5, generator=generator).bfloat16(), "b": whole[2:4], "c": torch.nn.Parameter(torch.ones(2))}
    expected = [f"{n} {t.dtype} {tuple(t.shape)} {float(t.detach().double().sum())}" for n, t in tensors.items()]
    handles, kept = handles_to(tensors.items())
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", _READER], input=handles, capture_output=True, env=environment, check=True)
    assert done.stdout.decode().splitlines() == expected
    assert all(not tensor.any() for tensor in kept)
    assert whole[0].any()
    assert not whole[2:4].any()


@pytest.mark.parametrize("payload", [os.system, torch.load, subprocess.run])
def test_handles_open_memory_and_call_nothing_else(payload):
    class Call:
        def __reduce__(self):
            return payload, ("true",)

    with pytest.raises(ValueError, match=r"cannot be opened .*opens no memory"):
        opened(pickle.dumps([("a", Call())]), 0, torch.device("cpu")).__enter__()


def test_the_card_is_the_seventh_argument_of_what_opens_its_memory(monkeypatch):
    """Its index is that of the process that opens; PyTorch's own signature says where it stands."""
    names = list(inspect.signature(reductions.rebuild_cuda_tensor).parameters)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    given = transfer._on_this_card(lambda *arguments: arguments)(*names)
    assert given == tuple(3 if name == "storage_device" else name for name in names)


@pytest.fixture
def beside(tokenizer, tiny_llama, tmp_path):
    """``beside(model, **backend)``: an engine over vLLM's stand-in in this process."""
    engines = []

    def make(model, kind=ModelBackend, **options):
        service = Service(kind(tiny_llama(), **options), spool=tmp_path)
        policy = Policy(model, tokenizer, (2, *range(5, 20)), context_length=256, name="some/model")
        engines.append(VllmEngine(policy, service, patience_s=5))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def same(model, backend):
    held = dict(backend.model.named_parameters())
    return all(torch.equal(parameter, held[name]) for name, parameter in model.named_parameters())


def test_in_one_process_no_weights_are_packed(beside, tiny_llama, make_prompts, shifted, scored, monkeypatch):
    def never(*_):
        raise AssertionError("weights were packed")

    monkeypatch.setattr(pushing, "packed_buckets", never)
    model, prompts = tiny_llama(), make_prompts([4])
    engine = beside(model)
    backend = engine.link.backend
    for version in (1, 2):
        shifted(model)
        engine.refresh(version)
        assert same(model, backend)
        ((one, _),) = engine.sample(prompts, 2, SAMPLED, seed=1, scope="s")
        torch.testing.assert_close(torch.tensor(one.logprobs), scored(model, prompts[0], one), atol=1e-4, rtol=1e-4)
    assert engine.link.commit(engine.weights, 2, [])["digest"] == engine.link.digest


def test_a_server_on_the_policy_s_device_opens_handles(serve, engine_over, tiny_llama, make_prompts, shifted, monkeypatch):
    """Over HTTP, with shared memory in place of the GPU's."""
    monkeypatch.setattr(pushing, "device_id", lambda device: "this one")
    monkeypatch.setattr(pushing, "shares_device", lambda found, device: found["devices"] == ["this one"])
    model, server = tiny_llama(), serve(tiny_llama(), devices=["this one"])
    sent = []
    bucket = server.service.bucket
    server.service.bucket = lambda *part: sent.append(part) or bucket(*part)
    engine = engine_over(server, model)
    shifted(model)
    engine.refresh(1)
    assert not sent
    assert same(model, server.backend)
    assert len(engine.sample(make_prompts([4]), 2, SAMPLED, seed=1, scope="s")[0]) == 2


def test_only_a_server_with_this_gpu_and_no_other_shares_it(monkeypatch):
    monkeypatch.setattr(pushing, "device_id", lambda device: f"gpu {device.index}")
    here = torch.device("cuda", 1)
    assert pushing.shares_device({"devices": ["gpu 1"]}, here)
    for others in (["gpu 0"], ["gpu 1", "gpu 0"], [""], []):
        assert not pushing.shares_device({"devices": others}, here)
    assert not pushing.shares_device({}, here)
    assert not pushing.shares_device({"devices": [""]}, torch.device("cpu"))


class ReadsFilesOnly(ModelBackend):
    def load(self, source, label):
        if not isinstance(source, list):
            raise ValueError("no memory can be opened")
        return super().load(source, label)


def test_weights_are_sent_where_they_cannot_be_read_in_place(beside, tiny_llama, shifted, caplog):
    model = tiny_llama()
    with caplog.at_level(logging.WARNING, "groupwise"):
        engine = beside(model, ReadsFilesOnly)
        shifted(model)
        engine.refresh(1)
    assert same(model, engine.link.backend)
    assert [r.getMessage() for r in caplog.records] == [
        "vLLM at this process does not read the weights in place (the weights "
        + engine.weights[:-1]
        + "1 were not loaded: no memory "
        "can be opened): they are sent to it from here on"
    ]


def test_memory_goes_while_the_policy_learns_and_comes_with_the_next_weights(beside, tiny_llama, make_prompts, shifted):
    model, prompts = tiny_llama(), make_prompts([4])
    engine = beside(model, sleeps=True)
    backend = engine.link.backend
    engine.sample(prompts, 2, SAMPLED, seed=1, scope="s")
    engine.release_memory()
    assert backend.asleep
    assert not any(p.any() for p in backend.model.parameters()), "the stand-in forgets its weights, as vLLM does at level 2"
    with pytest.raises(StaleWeights):
        list(engine.link.sample(engine.weights, SAMPLED, [], stop=[]))
    shifted(model)
    engine.refresh(1)
    assert not backend.asleep
    assert same(model, backend)


def test_an_engine_that_was_asked_to_hand_memory_back_too_early_has_its_weights_again(beside, tiny_llama, make_prompts):
    """Asked to sample before the next update, it gets the weights that the policy still has."""
    model = tiny_llama()
    engine = beside(model, sleeps=True)
    engine.release_memory()
    assert len(engine.sample(make_prompts([4]), 2, SAMPLED, seed=1, scope="s")[0]) == 2
    assert same(model, engine.link.backend)


def test_one_that_does_not_sleep_is_not_asked(beside, tiny_llama):
    engine = beside(tiny_llama())
    engine.release_memory()
    assert engine.link.weights == engine.weights
    assert engine.link.backend.loads == 1


def test_memory_that_is_not_handed_back_is_no_reason_to_stop(beside, tiny_llama, shifted, caplog):
    class Insomniac(ModelBackend):
        def release_memory(self):
            raise ValueError("memory usage increased after sleeping")

    model = tiny_llama()
    engine = beside(model, Insomniac, sleeps=True)
    with caplog.at_level(logging.WARNING, "groupwise"):
        engine.release_memory()
        shifted(model)
        engine.refresh(1)
        engine.release_memory()
    assert same(model, engine.link.backend)
    assert len(caplog.records) == 1
    assert "did not hand back its memory" in caplog.text


def test_weights_that_nobody_takes_end_the_run(beside, tiny_llama):
    class Takes(ModelBackend):
        def load(self, source, label):
            raise ValueError("no")

    with pytest.raises(TrainingError, match="does not take the weights"):
        beside(tiny_llama(), Takes)
