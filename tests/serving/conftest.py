"""Servers over an engine that says what it is told to, and over a tiny random model."""

from __future__ import annotations

import http.client
import json
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
import torch

from groupwise.config.schema import PromptConfig
from groupwise.engines.base import Engine
from groupwise.serving import Server, Service
from groupwise.types import Completion
from tests.tiny import write_tiny_tokenizer
from tests.waiting import LONG_S


class Script(Engine):
    """Says ``say(prompt's text)``, a token (here: a byte) a step, all of a request side by side; -0.5 nats each. Knows ``drawn``."""

    shows_tokens = True

    def __init__(self, tokenizer, say):
        self.tokenizer, self.say, self.requests = tokenizer, say, []
        self.breathe = lambda: None
        """Called after each step."""

    def refresh(self, policy_version):
        pass

    def serve(self, request, on_progress=None):
        self.requests.append(request)
        left = []
        for prompt, drawn in zip(request.prompts, request.drawn, strict=True):
            asked = self.tokenizer.decode(prompt.token_ids[: len(prompt.token_ids) - drawn])
            ids = [*self.tokenizer(self.say(asked), add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
            left.append(ids[drawn:])
        lengths, open_ones = [0] * len(left), set(range(len(left)))
        while open_ones:
            for index in sorted(open_ones):
                lengths[index] += 1
                n = lengths[index]
                goes_on = request.watch(index, 0, left[index][:n], [-0.5] * n)
                if not goes_on or n == len(left[index]) or n == request.settings.max_tokens:
                    open_ones.discard(index)
            self.breathe()
            on_progress(len(left) - len(open_ones), sum(lengths))
        return [(Completion("", tuple(ids[:n]), (-0.5,) * n, "stop"),) for ids, n in zip(left, lengths, strict=True)]


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory):
    return write_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def serving(byte_tokenizer):
    """``serving(say, key=None, **service)``: a server whose model says ``say`` of the prompt's text, or just that."""
    opened = []

    def start(
        say, *, key=None, context_length=2000, system=None, max_tokens=200, call_format="auto", host="127.0.0.1", rows=10_000
    ):
        engine = Script(byte_tokenizer, say if callable(say) else lambda _: say)
        policy = SimpleNamespace(
            tokenizer=byte_tokenizer,
            end_token_ids=(byte_tokenizer.eos_token_id,),
            context_length=context_length,
            name="tiny",
            device=torch.device("cpu"),
            rows=rows,
        )
        service = Service(policy, engine, PromptConfig(), system, name="tiny", max_tokens=max_tokens, call_format=call_format)
        server = Server(service, host, key=key)
        opened.append(server)
        return server

    yield start
    for server in opened:
        server.close()


def call(server, body=None, method="POST", path="/v1/chat/completions", headers=(), raw=None):
    """Status and JSON of the answer."""
    connection = http.client.HTTPConnection(urlsplit(server.url).hostname, server.port, timeout=LONG_S)
    try:
        data = raw if raw is not None else json.dumps(body).encode() if method == "POST" else None
        given = {"Content-Type": "application/json"} if method == "POST" else {}
        connection.request(method, path, body=data, headers={**given, **dict(headers)})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def asking(text="Hello", **more):
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], **more}


def streamed(server, body):
    """Every event of a stream, the last of which must be [DONE]."""
    connection = http.client.HTTPConnection(urlsplit(server.url).hostname, server.port, timeout=LONG_S)
    try:
        connection.request(
            "POST", "/v1/chat/completions", json.dumps({**body, "stream": True}), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        assert answer.getheader("Content-Type") == "text/event-stream"
        events = [part.removeprefix("data: ") for part in answer.read().decode().split("\n\n") if part]
    finally:
        connection.close()
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]
