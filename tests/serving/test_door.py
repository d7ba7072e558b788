"""Who may ask, how much is read, and how mistakes are answered."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import ExitStack

import pytest

from groupwise import listening
from groupwise.errors import ConfigError
from groupwise.serving import KEY, answering, find_key, server
from tests.serving.conftest import asking, call
from tests.waiting import LONG_S

SECRET = "0123456789abcdef0123456789abcdef"
WITH_KEY = {"Authorization": f"Bearer {SECRET}"}


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer wrong", SECRET, f"Basic {SECRET}", "Bearer é"])
def test_nobody_is_answered_without_the_key(serving, given):
    where = serving("x", key=SECRET)
    headers = {} if given is None else {"Authorization": given.encode("latin-1")}
    for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/"), ("POST", "/")):
        status, answer = call(where, asking(), method, path, headers)
        assert (path, status, answer["error"]["code"]) == (path, 401, "invalid_api_key")
        assert SECRET not in str(answer)
    assert not where.service.engine.requests


def test_with_the_key_one_is(serving):
    assert call(serving("x", key=SECRET), asking(), headers=WITH_KEY)[0] == 200


def test_the_key_is_compared_in_constant_time(serving, monkeypatch):
    compared, real = [], listening.hmac.compare_digest
    monkeypatch.setattr(listening.hmac, "compare_digest", lambda a, b: (compared.append((a, b)), real(a, b))[1])
    assert call(serving("x", key=SECRET), asking(), headers={"Authorization": "Bearer x"})[0] == 401
    assert compared == [(b"Bearer x", f"Bearer {SECRET}".encode())]


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "https://evil.example"}, 403),
        ({"Host": "evil.example:8000"}, 403),
        ({"Host": "[bad"}, 403),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/json; charset=utf-8"}, 200),
        ({"Host": "localhost:8000"}, 200),
    ],
)
def test_a_stranger_s_page_in_a_browser_is_refused(serving, headers, status):
    assert call(serving("x"), asking(), headers=headers)[0] == status


def test_other_machines_may_know_it_by_any_name(serving):
    where = serving("x", key=SECRET, host="0.0.0.0")
    assert call(where, asking(), headers={**WITH_KEY, "Host": "node-17:8000"})[0] == 200
    assert call(where, asking())[0] == 401


@pytest.mark.parametrize(
    ("raw", "headers", "status", "words"),
    [
        (b"{", {}, 400, "no JSON"),
        (b"[" * 100_000, {}, 400, "no JSON"),
        (b"\xff", {}, 400, "no JSON"),
        (b"7", {}, 400, "must be a JSON object"),
        (b'{"messages": [{"role": ["user"], "content": "x"}], "model": "x"}', {}, 400, "cannot be read (TypeError: "),
        (
            b'{"messages": [{"role": "user", "content": "x"}], "model": "x", "temperature": 1%s}' % (b"0" * 400),
            {},
            400,
            "cannot be read",
        ),
        (b"", {"Content-Length": str(2**30)}, 413, "is more than"),
        (b"", {"Content-Length": "-1"}, 413, "is more than"),
        (b"", {"Content-Length": "many"}, 411, "must say its length"),
        (b"0\r\n\r\n", {"Transfer-Encoding": "chunked"}, 411, "must say its length"),
    ],
)
def test_nonsense_is_an_error_in_openai_s_form(serving, raw, headers, status, words):
    got, answer = call(serving("x"), raw=raw, headers=headers)
    assert (got, set(answer["error"])) == (status, {"message", "type", "param", "code"})
    assert words in answer["error"]["message"]


def test_another_path_or_model_is_not_there(serving):
    where = serving("x")
    assert call(where, asking(), path="/v1/completions")[0] == 404
    status, answer = call(where, {**asking(), "model": "gpt"})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
    assert "ask for 'tiny'" in answer["error"]["message"]


def test_who_announces_and_never_sends_is_hung_up_on(serving, monkeypatch):
    monkeypatch.setattr(server.ChatHandler, "timeout", 1.0)
    where = serving("x")
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", where.port), timeout=20) as idle:
        idle.sendall(head + b"x")
        assert idle.recv(1000) == b""


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({**WITH_KEY, "Origin": "https://a.example"}, 403),
        ({**WITH_KEY, "Content-Length": str(2**30)}, 413),
        ({**WITH_KEY, "Content-Type": "text/plain"}, 415),
        (WITH_KEY, 200),
    ],
)
def test_a_connection_that_is_closed_is_said_to_be(serving, headers, status):
    connection = http.client.HTTPConnection("127.0.0.1", serving("x", key=SECRET).port, timeout=LONG_S)
    connection.request("POST", "/v1/chat/completions", json.dumps(asking()), {"Content-Type": "application/json", **headers})
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("Connection")) == (status, None if status == 200 else "close")
    connection.close()


def test_a_connection_without_a_thread_takes_no_place(monkeypatch):
    def fail(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(listening.ThreadingHTTPServer, "process_request", fail)
    with listening.BoundedServer(("127.0.0.1", 0), listening.Handler, 1) as full:
        for _ in range(2):
            with pytest.raises(RuntimeError):
                full.process_request(None, None)


def test_many_may_connect_at_once():
    """Before the first is accepted."""
    waiting = listening.BoundedServer(("127.0.0.1", 0), listening.Handler, 1)
    with ExitStack() as ends:
        ends.callback(waiting.server_close)
        for _ in range(64):
            ends.enter_context(socket.create_connection(waiting.server_address, timeout=1))


def test_an_address_of_ipv6_is_served(serving):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    where = serving("x", host="::1")
    assert where.url.startswith("http://[::1]:")
    assert call(where, path="/v1/models", method="GET")[0] == 200


def test_messages_that_the_template_refuses_are_the_client_s_mistake(serving, byte_tokenizer, monkeypatch):
    where = serving("x")
    monkeypatch.setattr(where.service._tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    status, answer = call(where, asking())
    assert (status, answer["error"]["param"]) == (400, "messages")
    assert "roles must alternate" in answer["error"]["message"]


@pytest.mark.parametrize("where_it_fails", ["begin", "whole"])
def test_what_nobody_foresaw_is_an_answer_and_a_line_in_the_log(serving, monkeypatch, caplog, where_it_fails):
    def fail(*_):
        raise KeyError("b")

    where = serving("x")
    place = where.service if where_it_fails == "begin" else answering.Answer
    monkeypatch.setattr(place, where_it_fails, fail)
    status, answer = call(where, asking())
    assert (status, answer["error"]["type"]) == (500, "server_error")
    (line,) = [record.message for record in caplog.records]
    assert line.startswith("a request failed: KeyError: 'b' (test_door.py, line ")


def test_what_nobody_foresaw_within_a_stream_is_its_last_event(serving, monkeypatch):
    def fail(*_):
        raise KeyError("b")

    where = serving("x")
    monkeypatch.setattr(answering.Answer, "usage_piece", fail)
    said = raw_answer(where, asking(stream=True, stream_options={"include_usage": True}), "HTTP/1.1")
    assert b'"type": "server_error"' in said.rpartition(b"data: ")[2]
    assert said.endswith(b"0\r\n\r\n")


def test_a_tool_that_requires_what_it_does_not_describe_is_no_failure(serving):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["b"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    status, answer = call(serving("<call>f(1 +)</call>"), asking(tools=tools))
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")


def raw_answer(where, body, version):
    """All that is sent until the connection is closed, which the client asks for."""
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions {version}\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with socket.create_connection(("127.0.0.1", where.port), timeout=LONG_S) as client:
        client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return b"".join(iter(lambda: client.recv(65536), b""))


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(serving):
    where = serving("Hello there")
    head, _, events = raw_answer(where, asking(stream=True), "HTTP/1.0").partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")
    assert b"chunked" in raw_answer(where, asking(stream=True), "HTTP/1.1")


def test_a_name_that_is_not_this_machine_s_is_told_what_to_do(serving):
    message = call(serving("x"), asking(), headers={"Host": "host.docker.internal:8000"})[1]["error"]["message"]
    assert "'host.docker.internal:8000' is no name: ask for 127.0.0.1, or start it with --host" in message
    assert "no browsers" in call(serving("x"), asking(), headers={"Origin": "https://a.example"})[1]["error"]["message"]


class TestKey:
    """Where the key comes from."""

    @pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
    def test_this_machine_alone_needs_none(self, host, monkeypatch):
        monkeypatch.delenv(KEY, raising=False)
        assert find_key(host) == (None, False)

    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "node-17", ""])
    def test_any_other_address_has_one_made(self, host, monkeypatch):
        monkeypatch.delenv(KEY, raising=False)
        (first, made), (second, _) = find_key(host), find_key(host)
        assert made
        assert first is not None
        assert len(first) == 64
        assert first != second

    @pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
    def test_the_environment_s_is_taken_and_a_poor_one_refused(self, host, monkeypatch):
        monkeypatch.setenv(KEY, SECRET)
        assert find_key(host) == (SECRET, False)
        monkeypatch.setenv(KEY, "short")
        with pytest.raises(ConfigError, match=KEY):
            find_key(host)
