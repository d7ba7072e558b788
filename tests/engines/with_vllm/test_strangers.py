"""Who does not know the secret gets no answer, and who does can claim neither memory nor threads nor another run's place."""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import os
import socket
import stat
import time
from pathlib import Path

import pytest
import torch

from groupwise import listening
from groupwise.config.schema import RolloutConfig
from groupwise.engines.vllm import __main__ as command
from groupwise.engines.vllm import protocol
from groupwise.engines.vllm import server as serving
from groupwise.engines.vllm import service as service_module
from groupwise.engines.vllm.client import Client
from groupwise.engines.vllm.engine import check_vllm
from groupwise.engines.vllm.protocol import SECRET, BeginAgain, NotTrusted, Unreachable, find_secret
from groupwise.engines.vllm.pushing import named_weights, packed_buckets
from groupwise.engines.vllm.service import Service
from groupwise.errors import ConfigError
from tests.engines.with_vllm.model_backend import ModelBackend
from tests.waiting import comes

GOOD = {"Authorization": "Bearer " + os.environ[SECRET], "Content-Type": "application/json"}
ENDPOINTS = [
    ("GET", "/groupwise"), ("POST", "/groupwise/hold"), ("POST", "/groupwise/begin"), ("POST", "/groupwise/commit"),
    ("POST", "/groupwise/bucket?id=run:1&index=0&sha256=0"), ("POST", "/groupwise/sample"), ("GET", "/"), ("POST", "/"),
]  # fmt: skip


def ask(server, method="POST", path="/groupwise/begin", headers=GOOD, body=b'{"id": "run:1"}'):
    """Status and object of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    try:
        connection.request(method, path, body=body, headers=headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Bearer é", os.environ[SECRET], "Basic x"])
def test_no_endpoint_answers_without_the_secret(serve, tiny_llama, given):
    server = serve(tiny_llama())
    authorization = {} if given is None else {"Authorization": given.encode("latin-1")}
    for method, path in ENDPOINTS:
        status, said = ask(server, method, path, {"Content-Type": "application/json", **authorization})
        assert (path, status, list(said)) == (path, 401, ["refused"])
        assert os.environ[SECRET] not in str(said)


def test_the_secret_is_compared_in_constant_time(serve, tiny_llama, monkeypatch):
    compared = []
    real = listening.hmac.compare_digest
    monkeypatch.setattr(listening.hmac, "compare_digest", lambda a, b: (compared.append((a, b)), real(a, b))[1])
    assert ask(serve(tiny_llama()), headers={**GOOD, "Authorization": "Bearer x"})[0] == 401
    assert compared == [(b"Bearer x", GOOD["Authorization"].encode())]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "evil.example:8300"}, 403),
        ({"Host": "127.0.0.1.evil.example"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Host": "localhost:8300"}, 409),
        ({}, 409),
    ],
)
def test_a_browser_s_page_is_refused_even_with_the_secret(serve, tiny_llama, headers, status):
    assert ask(serve(tiny_llama()), headers={**GOOD, **headers})[0] == status


def test_a_server_for_other_machines_takes_whatever_name_they_know_it_by(tiny_llama, tmp_path):
    server = serving.Server(Service(ModelBackend(tiny_llama()), spool=tmp_path), host="0.0.0.0")
    try:
        assert ask(server, "GET", "/groupwise", {**GOOD, "Host": "node-17:8300"})[0] == 200
        assert ask(server, "GET", "/groupwise", {})[0] == 401
    finally:
        server.close()


def test_what_is_announced_and_never_sent_takes_no_memory_and_no_thread_for_long(serve, tiny_llama, monkeypatch):
    monkeypatch.setattr(serving._Handler, "timeout", 1.0)
    monkeypatch.setattr(listening, "PIECE_BYTES", 1000)
    server = serve(tiny_llama())
    taken = []
    monkeypatch.setattr(serving._Handler, "_body", noting(taken, serving._Handler._body))
    head = f"POST /groupwise/bucket?id=a&index=0&sha256=0 HTTP/1.1\r\nHost: localhost\r\nContent-Length: {4 * 2**30}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in GOOD.items()) + "\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as idle:
        idle.sendall(head.encode() + b"x" * 100)
        assert idle.recv(1000) == b"", "the server hangs up"
    assert taken == [1000]
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as silent:
        assert silent.recv(1000) == b""


def test_a_stranger_who_sends_a_byte_now_and_then_is_hung_up_on(serve, tiny_llama, monkeypatch):
    monkeypatch.setattr(serving._Handler, "timeout", 1.0)
    server = serve(tiny_llama())
    let_go, until = Client(server.url).hold("run", "a run"), time.monotonic() + 20
    with socket.create_connection(("127.0.0.1", server.port), timeout=0.3) as slow:
        while time.monotonic() < until:
            try:
                slow.send(b"x")
                if not slow.recv(1):
                    break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            pytest.fail("the server goes on reading")
    assert server.service.hello()["used_by"], "who was seen to know the secret may take longer"
    let_go()


def noting(taken, body):
    def read(handler, most):
        real = handler.rfile.read1
        handler.rfile.read1 = lambda count: (taken.append(count) if not taken else None, real(count))[1]
        return body(handler, most)

    return read


def test_a_stranger_s_body_is_not_read(serve, tiny_llama):
    server = serve(tiny_llama())
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as stranger:
        stranger.sendall(b"POST /groupwise/begin HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4294967296\r\n\r\n")
        assert stranger.recv(1000).startswith(b"HTTP/1.1 401")


def test_messages_have_a_largest_size(serve, tiny_llama):
    server = serve(tiny_llama())
    status, said = ask(server, headers={**GOOD, "Content-Length": str(2**30)}, body=b"")
    assert status == 400
    assert "is more than" in said["refused"]


def test_a_tensor_of_several_gib_is_read(serve, tiny_llama):
    """Here as far as it comes."""
    server = serve(tiny_llama())
    head = f"POST /groupwise/bucket?id=a&index=0&sha256=0 HTTP/1.1\r\nHost: localhost\r\nContent-Length: {5 * 2**30}\r\n"
    head += "".join(f"{name}: {value}\r\n" for name, value in GOOD.items()) + "\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as trainer:
        trainer.sendall(head.encode())
        trainer.shutdown(socket.SHUT_WR)
        assert trainer.recv(1000) == b"", "it is not refused for its length"


def test_connections_are_bounded_and_come_free_again(serve, tiny_llama, monkeypatch):
    monkeypatch.setattr(serving, "_MOST_CONNECTIONS", 3)
    server = serve(tiny_llama())
    held = [Client(server.url).hold("run", f"process {i}") for i in range(3)]
    with pytest.raises((http.client.HTTPException, OSError)):
        ask(server, "GET", "/groupwise")
    held[0]()
    client = Client(server.url)

    def is_free():
        try:
            return client.hello()["used_by"]
        except Unreachable:
            return None

    assert comes(is_free)


def test_nonsense_in_a_message_is_refused_in_words(serve, tiny_llama):
    server = serve(tiny_llama())
    for body in (b"[" * 100_000, b"7", b"{}", b"\xff", b""):
        status, said = ask(server, body=body)
        assert (status, "not understood" in said["refused"]) == (400, True), body[:10]


def test_a_push_needs_the_run_s_own_lease_from_its_beginning_to_its_end(tiny_llama, tmp_path):
    service = Service(ModelBackend(tiny_llama()), spool=tmp_path)
    sha256 = hashlib.sha256(b"x").hexdigest()
    let_go = service.hold("mine", "my run")
    service.begin("mine:1")
    for push in (
        lambda: service.begin("theirs:1"), lambda: service.bucket("theirs:1", 0, b"x", sha256), lambda: service.commit("theirs:1", 1, []),
    ):  # fmt: skip
        with pytest.raises(BeginAgain, match="does not know of this run"):
            push()
    service.bucket("mine:1", 0, b"x", sha256)
    let_go()
    for push in (lambda: service.bucket("mine:1", 0, b"x", sha256), lambda: service.commit("mine:1", 1, [sha256])):
        with pytest.raises(BeginAgain, match="does not know of this run"):
            push()
    assert not any(path.name.startswith("groupwise-weights") for path in tmp_path.iterdir())


def test_whose_weights_are_held_is_not_told(tiny_llama, tmp_path):
    service = Service(ModelBackend(tiny_llama()), spool=tmp_path)
    service.hold("the-owner", "a run")
    service.weights = "the-owner:3"
    assert "the-owner" not in str(service.hello())


def test_a_file_that_is_replaced_after_its_check_is_not_what_is_loaded(tiny_llama, tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    read = []
    backend = ModelBackend(tiny_llama())
    backend.load = lambda files, label: read.extend(Path(file).read_bytes() for file in files) or {}
    service = Service(backend, spool=tmp_path, shared=shared)
    service.hold("run", "a run")
    service.begin("run:1")
    (shared / "part").write_bytes(b"good")
    sha256 = hashlib.sha256(b"good").hexdigest()
    service.bucket_in_file("run:1", 0, "part", sha256)
    (shared / "part").write_bytes(b"evil")
    service.commit("run:1", 1, [sha256])
    assert read == [b"good"]


class TestSecret:
    """Where it comes from."""

    @pytest.fixture(autouse=True)
    def home(self, tmp_path, monkeypatch):
        monkeypatch.delenv(SECRET)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        self.path = tmp_path / "cache" / "groupwise" / "vllm-secret"

    def test_a_server_makes_one_that_only_its_user_reads_and_a_run_finds_it(self, tiny_llama, tmp_path, capsys):
        assert find_secret() is None
        client = Client("http://127.0.0.1:1")
        server = serving.Server(Service(ModelBackend(tiny_llama()), spool=tmp_path))
        try:
            assert stat.S_IMODE(self.path.stat().st_mode) == 0o600
            made = self.path.read_text().strip()
            assert len(made) == 64
            assert find_secret() == find_secret(make=True) == made
            client._port = server.port
            assert client.hello()["version"] == 0
        finally:
            server.close()
        assert made not in "".join(capsys.readouterr())

    def test_servers_that_start_at_once_share_the_first_one_s(self, monkeypatch):
        real, others = protocol.secrets.token_hex, []

        def meanwhile(size):
            if not others:
                others.append(None)
                others.append(find_secret(make=True))
            return real(size)

        monkeypatch.setattr(protocol.secrets, "token_hex", meanwhile)
        assert find_secret(make=True) == others[1] == find_secret()
        assert list(self.path.parent.iterdir()) == [self.path]

    @pytest.mark.parametrize("harm", ["mode", "link", "short", "bytes"])
    def test_a_file_that_keeps_no_secret_is_refused(self, tmp_path, harm):
        find_secret(make=True)
        if harm == "mode":
            self.path.chmod(0o640)
        elif harm == "link":
            self.path.rename(tmp_path / "elsewhere")
            self.path.symlink_to(tmp_path / "elsewhere")
        else:
            self.path.write_bytes(b"short" if harm == "short" else b"\xff" * 40)
        with pytest.raises(ConfigError, match="secret"):
            find_secret()

    @pytest.mark.parametrize("value", ["", "short", "with a space in it 1234", "é" * 32, "line\nbreak" * 4])
    def test_an_environment_variable_that_is_no_secret_is_refused(self, monkeypatch, value):
        monkeypatch.setenv(SECRET, value)
        with pytest.raises(ConfigError, match=SECRET):
            find_secret()

    def test_another_secret_is_told_with_the_remedy(self, serve, tiny_llama, monkeypatch):
        server = serve(tiny_llama())
        with pytest.raises(NotTrusted, match="started with another secret"):
            Client(server.url, secret="another" * 4).hello()
        monkeypatch.setenv(SECRET, "another" * 4)
        rollout = RolloutConfig(engine="vllm", vllm={"url": server.url})
        with pytest.raises(ConfigError, match=rf"was started with another secret: put the same into {SECRET} on both sides"):
            check_vllm(rollout, tiny_llama().config, "a/b")


def test_weights_for_which_memory_has_no_room_wait_on_the_disk(tmp_path, tiny_llama, monkeypatch):
    """As in a container, whose /dev/shm has 64 MB."""
    memory, disk, told = tmp_path / "shm", tmp_path / "disk", []
    memory.mkdir()
    disk.mkdir()
    monkeypatch.setattr(service_module, "_MEMORY", memory)
    monkeypatch.setattr(service_module.tempfile, "gettempdir", lambda: str(disk))
    real = service_module._new_file

    def small(folder, prefix, data):
        if folder.parent == memory and any(folder.iterdir()):
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(folder, prefix, data)

    monkeypatch.setattr(service_module, "_new_file", small)
    model, sent = tiny_llama(seed=1), tiny_llama(seed=2)
    service = Service(ModelBackend(model), tell=told.append)
    service.hold("run", "a run")
    buckets = list(packed_buckets(named_weights(sent), 2**14))  # with their SHA-256
    assert len(buckets) > 2
    for version in (1, 2):
        service.begin(f"run:{version}")
        for index, (bucket, checksum) in enumerate(buckets):
            service.bucket(f"run:{version}", index, bucket, checksum)
        where = [len(list(place.rglob("*.safetensors"))) for place in (memory, disk)]
        assert where == ([1, len(buckets) - 1] if version == 1 else [0, len(buckets)])
        service.commit(f"run:{version}", version, [checksum for _, checksum in buckets])
        assert not [*memory.iterdir(), *disk.iterdir()]
    assert told[1:] == [f"{memory} has no room for the weights: further parts wait in {disk}"]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), sent.parameters(), strict=True))


def test_what_a_killed_server_left_goes_when_another_starts(tiny_llama, tmp_path):
    left = tmp_path / "groupwise-weights-left"
    left.mkdir()
    (left / "00000-.safetensors").write_bytes(b"x")
    os.utime(left, (0, 0))
    living = Service(ModelBackend(tiny_llama()), spool=tmp_path)
    assert not left.exists()
    living.hold("run", "a run")
    living.begin("run:1")
    Service(ModelBackend(tiny_llama()), spool=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1, "the first one lives"
    living.close()
    assert not list(tmp_path.iterdir())


def test_a_hangup_ends_the_server_and_its_spool_with_it(tmp_path, tiny_llama, monkeypatch):
    import signal

    spool = tmp_path / "spool"
    spool.mkdir()
    service = Service(ModelBackend(tiny_llama()), spool=spool)
    service.hold("run", "a run")
    service.begin("run:1")
    assert len(list(spool.iterdir())) == 1
    server = serving.Server(service)

    def serve_until_the_terminal_closes(args):
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            server.close()

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    monkeypatch.setattr(command, "_serve", serve_until_the_terminal_closes)
    try:
        assert command.main(["some/model"]) == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert not list(spool.iterdir())


def test_who_comes_and_goes_cannot_command_the_server_s_terminal(capsys):
    command._say("working for \x1b]0;title\x07 on \x9b31m")
    assert capsys.readouterr().out == "groupwise: working for \\x1b]0;title\\x07 on \\x9b31m\n"
