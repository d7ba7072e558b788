"""Servers of the real protocol over HTTP, with a tiny model in place of vLLM."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch

from groupwise.engines.vllm import pushing
from groupwise.engines.vllm.client import Client
from groupwise.engines.vllm.engine import VllmEngine
from groupwise.engines.vllm.server import Server
from groupwise.engines.vllm.service import Service
from groupwise.models.load import Policy
from tests.distributed.conftest import in_threads
from tests.engines.with_vllm.model_backend import ModelBackend

__all__ = ["in_threads"]


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Whoever waits for a server that is away tries again soon."""
    nap = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(min(seconds, 0.02)))
    monkeypatch.setattr(pushing, "time", nap)


@pytest.fixture
def serve(tmp_path):
    """``serve(model, port=0, shared=None, **backend)``: a server; ``server.backend`` is what computes."""
    servers = []

    def start(model, port=0, shared=None, **options):
        backend = ModelBackend(model, **options)
        server = Server(Service(backend, spool=tmp_path, shared=shared), port=port)
        server.backend = backend
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def engine_over(tokenizer):
    """``engine_over(server, model)``: the trainer's engine; ``ends`` are its end tokens."""

    def make(server, model, ends=(2, *range(5, 20)), patience_s=120.0, shared=None, **options):
        policy = Policy(model, tokenizer, ends, context_length=256, name="some/model")
        return VllmEngine(policy, Client(server.url, patience_s=patience_s, shared=shared), patience_s=patience_s, **options)

    return make


@pytest.fixture
def scored():
    """``scored(model, prompt, completion)``: the log-probabilities that the module itself gives the completion's tokens."""

    def score(model, prompt, completion):
        ids = torch.tensor([[*prompt.token_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, len(prompt.token_ids) - 1 : -1].float()
        return logits.log_softmax(-1).gather(1, ids[0, len(prompt.token_ids) :, None])[:, 0]

    return score


@pytest.fixture
def shifted():
    """``shifted(model)``: change every weight in place by a fifth, as a very large update would."""

    def shift(model):
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.2 * (parameter.abs().mean() + 0.05) * torch.randn(parameter.shape, generator=generator))

    return shift
