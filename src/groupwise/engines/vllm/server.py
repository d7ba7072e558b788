"""A sampling server over HTTP, by the standard library alone: ``protocol`` says what it understands.

Nothing of a request is read before its secret was seen to be the server's. A browser that a stranger's page sends here has none, and is
refused besides: by its ``Origin``, by a ``Host`` that is not this machine's (where only this machine is served), and by its
``Content-Type``.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from groupwise.engines.vllm.protocol import BeginAgain, Broken, Job, Refused, StaleWeights, find_secret, settings_from
from groupwise.engines.vllm.service import MOST_BYTES, Service

__all__ = ["Server"]

_MOST_JSON_BYTES = 2**29
_PIECE_BYTES = 2**20
_MOST_CONNECTIONS = 512
"""At once: of each trainer process one that holds the server, and one for each request."""
_SILENCE_S = 60.0
"""How long a peer may say nothing in the middle of a message, or take nothing of an answer."""
_ALIVE = {"TCP_KEEPIDLE": 20, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 4}
"""A trainer's machine that disappears without a word is noticed after a minute. (Seconds; names as in ``socket``.)"""


class Server:
    """Answers in threads of its own from construction until ``close``, to those who know the secret. It travels as it is: on a network
    where others listen, put a tunnel around it."""

    def __init__(self, service: Service | None, host: str = "127.0.0.1", port: int = 0, *, secret: str | None = None) -> None:
        """Port 0 takes a free one. ``secret``: by default that of `find_secret`, which makes one. Without a ``service`` it asks for
        patience until ``open`` brings one. Raises OSError where the port is taken, ConfigError for what is no secret."""
        self.service, self._holders = service, set[socket.socket]()
        own = {"service": service, "holders": self._holders, "secret": secret or find_secret(make=True), "host": host}
        self._handler: Any = type("Handler", (_Handler,), own)
        self._http = _Bounded((host, port), self._handler)
        self.port = self._http.server_address[1]
        self.url = f"http://{host}:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.1,), name="groupwise-server", daemon=True)
        self._thread.start()

    def open(self, service: Service) -> None:
        self.service = self._handler.service = service

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        for connection in list(self._holders):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self.service is not None:
            self.service.close()


class _Bounded(ThreadingHTTPServer):
    """With a limit to the connections at once, each of which has a thread; one too many is closed."""

    daemon_threads = True

    def __init__(self, *given: Any) -> None:
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        super().__init__(*given)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a peer that disconnected, or was silent, is no news."""


class _Handler(BaseHTTPRequestHandler):
    service: Any
    """A `Service`; None until there is one."""
    holders: set[socket.socket]
    secret: str
    host: str
    timeout = _SILENCE_S
    protocol_version = "HTTP/1.1"
    server_version = "groupwise"
    disable_nagle_algorithm = True

    def _is_trusted(self) -> bool:
        """Whether the request is one of ours; what it is refused with is answered, and its body is not read."""
        headers, refusal = self.headers, None
        given = headers.get("Authorization", "").encode("utf-8", errors="replace")
        if headers.get("Origin") is not None or not self._is_host(headers.get("Host", "")):
            refusal = 403, "this server answers no browsers"
        elif not hmac.compare_digest(given, f"Bearer {self.secret}".encode()):
            refusal = 401, "the secret is missing, or is not this server's"
        elif self.command == "POST" and headers.get("Content-Type") not in ("application/json", "application/octet-stream"):
            refusal = 415, "a message is application/json, and a part of weights application/octet-stream"
        if refusal is not None:
            self.close_connection = True
            self._answer(refusal[0], {"refused": refusal[1]})
        return refusal is None

    def _is_host(self, given: str) -> bool:
        """Whether a client that wants this machine may have said so. A page whose name was made to lead here says its own name."""
        if not _is_loopback(self.host):
            return True
        name = urlsplit(f"//{given}").hostname or ""
        return name in (self.host, "localhost") or _is_loopback(name)

    def do_GET(self) -> None:
        if not self._is_trusted():
            return
        if urlsplit(self.path).path.rstrip("/") != "/groupwise":
            self._answer(404, {"refused": f"there is nothing at {self.path}"})
            return
        if self.service is None:
            self._answer(503, {"starting": True})
            return
        try:
            self._answer(200, self.service.hello())
        except Broken:
            self.close_connection = True

    def do_POST(self) -> None:
        if not self._is_trusted():
            return
        path = urlsplit(self.path)
        try:
            body = self._body(MOST_BYTES if path.path == "/groupwise/bucket" else _MOST_JSON_BYTES)
            if self.service is None:
                self._answer(503, {"starting": True})
            elif path.path == "/groupwise/sample":
                self._sample(json.loads(body))
            elif path.path == "/groupwise/hold":
                self._hold(json.loads(body))
            else:
                self._answer(200, self._act(path.path, path.query, body))
        except StaleWeights as stale:
            self._answer(409, {"stale": stale.wanted, "held": stale.held})
        except BeginAgain as again:
            self._answer(409, {"again": str(again)})
        except Broken:
            self.close_connection = True
        except Refused as refused:
            self._answer(400, {"refused": str(refused)})
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            self._answer(400, {"refused": f"the request is not understood ({type(error).__name__}: {error})"})
        except TimeoutError:
            self.close_connection = True
        except OSError as error:
            self._answer(500, {"refused": f"the server could not keep what it got ({error})"})

    def _body(self, most: int) -> bytearray:
        """What was sent. Memory is taken for what came, and not for what was announced."""
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= most:
            self.close_connection = True
            raise Refused(f"a message of {length} bytes is more than {most}: send smaller parts (rollout.vllm.bucket_mib)")
        body = bytearray()
        while len(body) < length:
            piece = self.rfile.read1(min(_PIECE_BYTES, length - len(body)))  # type: ignore[attr-defined]
            if not piece:
                raise TimeoutError
            body += piece
        return body

    def _act(self, path: str, query: str, body: bytearray) -> dict[str, Any]:
        service = self.service
        if path == "/groupwise/bucket":
            asked = {name: values[0] for name, values in parse_qs(query).items()}
            index = int(asked["index"])
            if "file" in asked:
                service.bucket_in_file(asked["id"], index, asked["file"], asked["sha256"])
            else:
                service.bucket(asked["id"], index, body, asked["sha256"])
            return {"sha256": asked["sha256"]}
        values = json.loads(body)
        if path == "/groupwise/begin":
            return {"held": service.begin(values["id"])}
        if path == "/groupwise/commit":
            return service.commit(values["id"], int(values["version"]), list(values["sha256s"]))
        raise Refused(f"there is nothing at {path}")

    def _hold(self, values: dict[str, Any]) -> None:
        """The connection is the lease: it ends with the trainer, however that ends."""
        let_go = self.service.hold(values["owner"], values["who"])
        self.close_connection = True
        self.holders.add(self.connection)
        try:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _ALIVE.items():
                if hasattr(socket, name):
                    self.connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
            self._begin_rows()
            self._chunk({"holds": values["owner"]})
            self.connection.settimeout(None)
            self.rfile.read(1)  # nothing more is ever sent
        except OSError:
            pass  # disconnected, and not in good order
        finally:
            self.holders.discard(self.connection)
            let_go()

    def _begin_rows(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/x-ndjson")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _sample(self, values: dict[str, Any]) -> None:
        jobs = [Job(tuple(job["prompt"]), int(job["seed"])) for job in values["jobs"]]
        rows = self.service.sample(
            values["weights"], settings_from(values["settings"]), jobs, stop=tuple(values["stop"]), stream=bool(values["stream"])
        )
        first = next(rows, None)  # what is wrong with the request comes to light here
        self._begin_rows()
        try:
            self._write_rows(first, rows)
        except (BrokenPipeError, ConnectionResetError, TimeoutError, Broken):
            self.close_connection = True
        finally:
            rows.close()  # type: ignore[attr-defined]

    def _write_rows(self, first: dict[str, Any] | None, rows: Iterator[dict[str, Any]]) -> None:
        try:
            if first is not None:
                self._chunk(first)
            for row in rows:
                self._chunk(row)
            self._chunk({"done": True})
        except (BrokenPipeError, ConnectionResetError, TimeoutError, Broken):
            raise
        except StaleWeights as stale:
            self._chunk({"stale": stale.wanted, "held": stale.held})
        except Exception as error:  # too late for a status: it is told as a row
            self._chunk({"failed": f"{type(error).__name__}: {error}"})
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, row: dict[str, Any]) -> None:
        line = json.dumps(row).encode() + b"\n"
        self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()

    def _answer(self, status: int, values: dict[str, Any]) -> None:
        body = json.dumps(values).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a run asks thousands of times."""


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
