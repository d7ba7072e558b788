"""``python -m groupwise.engines.vllm``: what can be wrong is said in a sentence, before anything is loaded."""

from __future__ import annotations

import json
import re
import socket
import threading

import pytest

from groupwise.config import load_config
from groupwise.config.schema import RolloutConfig
from groupwise.engines.vllm import __main__ as command
from groupwise.engines.vllm import protocol
from groupwise.engines.vllm.client import Client
from groupwise.engines.vllm.engine import check_vllm
from groupwise.engines.vllm.protocol import Starting
from groupwise.engines.vllm.server import Server
from groupwise.engines.vllm.service import Service
from groupwise.errors import ConfigError
from tests.engines.with_vllm.model_backend import ModelBackend


@pytest.fixture
def folder(tmp_path, tiny_llama):
    """A model folder that vLLM would take."""
    tiny_llama().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


@pytest.fixture
def say(monkeypatch, capsys):
    """``say(*words)``: exit code of the command, and what it says; vLLM seems to be there, and must not be started."""
    monkeypatch.setattr(protocol, "check_versions", lambda: None)
    monkeypatch.setattr(command, "_start_vllm", lambda args, model: pytest.fail("vLLM was started"))
    monkeypatch.setattr(command.signal, "signal", lambda number, what: None)

    def run(*words):
        capsys.readouterr()  # what saving the folder said
        code = command.main([str(word) for word in words])
        told = capsys.readouterr()
        return code, told.out + told.err

    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "the following arguments are required: MODEL: `python -m groupwise.engines.vllm --help` has the options"),
        (["MODEL", "--ports", "1"], "unrecognized arguments: --ports 1"),
        (["MODEL", "--port", "x"], "argument --port: invalid int value: 'x'"),
        (["MODEL", "--port", "65536"], "--port is 65536, but ports end at 65535"),
        (["MODEL", "--port", "-1"], "--port is -1, but it must be at least 0"),
        (["MODEL", "--gpu-memory-share", "90"], "--gpu-memory-share is 90.0, but it is a share"),
        (["MODEL", "--cache-gib", "0"], "--cache-gib is 0.0, but it must be above 0"),
        (["MODEL", "--tensor-parallel", "0"], "--tensor-parallel is 0, but it must be at least 1"),
        (["MODEL", "--shared-folder", "/no/such/folder"], "'/no/such/folder', which is no folder: make it"),
        (["MODEL", "--host", "192.0.2.1"], "nothing can listen at 192.0.2.1, port 8300"),
        (["MODEL", "--host", "no such host"], "nothing can listen at no such host"),
        (["/no/such/model"], "the model folder /no/such/model does not exist"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(words, said, say, folder):
    code, told = say(*(folder if word == "MODEL" else word for word in words))
    assert code == 2
    assert told.startswith("groupwise: ")
    assert said in told
    assert len(told.splitlines()) == 1


def test_a_port_that_is_taken_is_found_before_vllm_starts(say, folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert say(folder, "--port", port) == (
            2, f"groupwise: the port {port} of 127.0.0.1 is taken, by another server perhaps: choose another with --port\n",
        )  # fmt: skip


def test_a_quantised_model_and_one_without_weights_are_refused(say, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    assert "is quantised, but plain weights are what the trainer sends" in say(folder)[1]
    (folder / "model.safetensors").unlink()
    assert "has no weights" in say(folder)[1]


def test_without_vllm_its_name_is_told_first(say, monkeypatch):
    def missing():
        raise ConfigError("vLLM is not installed")

    monkeypatch.setattr(protocol, "check_versions", missing)
    assert say("/no/such/model", "--port", "-1") == (2, "groupwise: vLLM is not installed\n")


def test_the_help_shows_both_ends(capsys):
    with pytest.raises(SystemExit) as left:
        command.main(["--help"])
    assert left.value.code == 0
    told = capsys.readouterr().out
    assert "rollout.engine=vllm rollout.vllm.url=http://127.0.0.1:8300" in told
    assert "--tensor-parallel" in told
    served = re.search(r"^examples:\n  python -m groupwise\.engines\.vllm (\S+)$", told, re.MULTILINE)[1]
    assert load_config(re.search(r"groupwise train (\S+) ", told)[1]).model.name == served


def test_it_serves_until_vllm_breaks_down(say, folder, tiny_llama, monkeypatch):
    backend = ModelBackend(tiny_llama())
    backend.broken = threading.Event()
    backend.broken.set()
    backend.end = "vLLM broke down (RuntimeError: no memory)"
    monkeypatch.setattr(command, "_start_vllm", lambda args, model: backend)
    code, told = say(folder, "--port", "0")
    assert code == 1
    lines = told.splitlines()
    assert lines[0].startswith(f"groupwise: vLLM loads {folder}; until it has, http://127.0.0.1:")
    assert lines[1].startswith("groupwise: transformers samples some/model (float32) at http://127.0.0.1:")
    assert lines[2] == (
        "groupwise: vLLM broke down (RuntimeError: no memory), as its own lines above say: start this server again, the trainer waits "
        "for it"
    )


def test_a_signal_is_a_good_end(say, folder, monkeypatch):
    monkeypatch.setattr(command, "_start_vllm", lambda args, model: command._stop(15, None))
    code, told = say(folder, "--port", "0")
    assert (code, told.splitlines()[-1]) == (0, "groupwise: the server was stopped by SIGTERM")


def test_a_server_that_is_still_loading_asks_for_patience(tiny_llama, tmp_path):
    server = Server(None)
    try:
        client = Client(server.url)
        for ask in (client.hello, lambda: client.hold("run", "a test"), lambda: client.begin("run:1")):
            with pytest.raises(Starting, match="is still loading its model"):
                ask()
        rollout = RolloutConfig(engine="vllm", vllm={"url": server.url})
        with pytest.raises(ConfigError, match="still loading its model: start the run when it says that it samples"):
            check_vllm(rollout, tiny_llama().config, "a/b")
        server.open(Service(ModelBackend(tiny_llama()), spool=tmp_path))
        assert check_vllm(rollout, tiny_llama().config, "a/b") == 256
    finally:
        server.close()
