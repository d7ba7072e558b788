"""A server works for one run at a time, for as long as that run is there, and no longer."""

from __future__ import annotations

import queue
import subprocess
import sys

import pytest

from groupwise.config.schema import RolloutConfig
from groupwise.engines.base import SamplingSettings
from groupwise.engines.vllm.client import Client
from groupwise.engines.vllm.engine import check_vllm
from groupwise.engines.vllm.protocol import BeginAgain, Refused
from groupwise.engines.vllm.service import Service
from groupwise.errors import ConfigError, TrainingError
from tests.engines.with_vllm.model_backend import ModelBackend

SAMPLED = SamplingSettings(max_tokens=8)
ANOTHER = """
import http.client, os, sys
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
headers = {"Authorization": "Bearer " + os.environ["GROUPWISE_VLLM_SECRET"], "Content-Type": "application/json"}
connection.request("POST", "/groupwise/hold", body='{"owner": "another", "who": "another run"}', headers=headers)
print(connection.getresponse().readline().decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def told():
    """What a server says of who comes and goes, as ``told.put`` is told it."""
    return queue.Queue()


def test_a_second_run_is_refused_and_the_first_goes_on(serve, engine_over, tiny_llama, make_prompts, ids_of, monkeypatch):
    server, prompts = serve(tiny_llama()), make_prompts([4])
    engine = engine_over(server, tiny_llama())
    first = ids_of(engine.sample(prompts, 2, SAMPLED, seed=1, scope="s"))
    with pytest.raises(TrainingError, match=r"it works for process \d+ on \S+ since .*: end that run, or start another server"):
        engine_over(server, tiny_llama())
    rollout = RolloutConfig(engine="vllm", vllm={"url": server.url})
    with pytest.raises(ConfigError, match=r"works for process \d+ .*let rollout.vllm.url name it"):
        check_vllm(rollout, tiny_llama().config, "a/b")
    monkeypatch.setenv("RANK", "1")  # another process of the run that has it
    assert check_vllm(rollout, tiny_llama().config, "a/b") == 256
    assert ids_of(engine.sample(prompts, 2, SAMPLED, seed=1, scope="s")) == first
    engine.refresh(1)
    assert server.backend.loads == 2


def test_a_run_that_ends_lets_the_next_one_have_the_server(serve, engine_over, tiny_llama, make_prompts, told):
    server = serve(tiny_llama())
    server.service.tell = told.put
    engine = engine_over(server, tiny_llama())
    engine.refresh(1)
    assert told.get(timeout=60).startswith("working for process")
    engine.close()
    assert told.get(timeout=60).endswith("has disconnected")
    second = engine_over(server, tiny_llama())
    assert len(second.sample(make_prompts([4]), 2, SAMPLED, seed=1, scope="s")[0]) == 2
    with pytest.raises(TrainingError, match="another run has pushed its weights"):
        engine.sample(make_prompts([4]), 2, SAMPLED, seed=1, scope="s")
    assert server.service.weights == second.weights


def test_a_run_that_could_not_begin_does_not_keep_the_server(serve, engine_over, tiny_llama, told):
    server = serve(tiny_llama())
    server.service.tell = told.put
    server.backend.takes = False
    model = tiny_llama()
    for parameter in model.parameters():
        parameter.data.mul_(8)
    with pytest.raises(TrainingError, match="computes something else") as failed:
        engine_over(server, model)
    assert failed.tb is not None  # which keeps all of it alive
    assert [told.get(timeout=60)[:7], told.get(timeout=60)[-12:]] == ["working", "disconnected"]


def test_a_process_that_is_killed_does_not_keep_the_server(serve, engine_over, tiny_llama, told):
    server = serve(tiny_llama())
    server.service.tell = told.put
    process = subprocess.Popen(
        [sys.executable, "-c", ANOTHER, str(server.port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == '{"holds": "another"}\n'
        with pytest.raises(TrainingError, match="it works for another run since"):
            engine_over(server, tiny_llama())
    finally:
        process.kill()
        process.communicate()
    assert [told.get(timeout=60), told.get(timeout=60)] == ["working for another run", "another run has disconnected"]
    engine_over(server, tiny_llama())
    assert server.backend.loads == 1


def test_half_an_update_goes_with_the_run_that_sent_it(tiny_llama, tmp_path):
    service = Service(ModelBackend(tiny_llama()), spool=tmp_path)
    with pytest.raises(BeginAgain, match="does not know of this run"):
        service.begin("one:1")
    let_go, again = service.hold("one", "one"), service.hold("one", "one")  # as each push does
    assert service.begin("one:1") is None
    let_go()
    assert service.begin("one:2") is None  # the same run may start over
    with pytest.raises(Refused, match="it works for one since"):
        service.hold("two", "two")
    with pytest.raises(BeginAgain, match="does not know of this run"):
        service.begin("two:1")
    assert len(list(tmp_path.iterdir())) == 1
    again()
    assert list(tmp_path.iterdir()) == []
    service.hold("two", "two")
    assert service.begin("two:1") is None


def test_a_server_that_ends_lets_go_of_its_connections(serve, tiny_llama, told):
    server = serve(tiny_llama())
    server.service.tell = told.put
    let_go = Client(server.url).hold("one", "one")
    assert told.get(timeout=60) == "working for one"
    server.close()
    assert told.get(timeout=60) == "one has disconnected"
    let_go()
