"""A sampling server over HTTP: ``protocol`` says what it understands, and ``groupwise.listening`` who may ask."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qs, urlsplit

from groupwise.engines.vllm.protocol import BeginAgain, Broken, Job, Refused, StaleWeights, find_secret, settings_from
from groupwise.engines.vllm.service import MOST_BYTES, Service
from groupwise.engines.vllm.transfer import Adapter
from groupwise.listening import BoundedServer, Handler, TooMuch

__all__ = ["Server"]

_MOST_JSON_BYTES = 2**29
_MOST_CONNECTIONS = 512
"""At once: of each trainer process one that holds the server, and one for each request."""
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
        self._http = BoundedServer((host, port), self._handler, _MOST_CONNECTIONS)
        self.port, self.url = self._http.server_port, self._http.url
        self._http.begin()

    def open(self, service: Service) -> None:
        self.service = self._handler.service = service

    def close(self) -> None:
        self._http.end()
        for connection in list(self._holders):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if self.service is not None:
            self.service.close()


class _Handler(Handler):
    service: Any
    """A `Service`; None until there is one."""
    holders: set[socket.socket]
    content_types = ("application/json", "application/octet-stream")

    def refuse(self, status: int, words: str) -> None:
        self.answer(status, {"refused": words})

    def do_GET(self) -> None:
        if not self.is_trusted():
            return
        if urlsplit(self.path).path.rstrip("/") != "/groupwise":
            self.answer(404, {"refused": f"there is nothing at {self.path}"})
            return
        if self.service is None:
            self.answer(503, {"starting": True})
            return
        try:
            self.answer(200, self.service.hello())
        except Broken:
            self.close_connection = True

    def do_POST(self) -> None:
        if not self.is_trusted():
            return
        path = urlsplit(self.path)
        try:
            body = self._body(MOST_BYTES if path.path == "/groupwise/bucket" else _MOST_JSON_BYTES)
            if self.service is None:
                self.answer(503, {"starting": True})
            elif path.path == "/groupwise/sample":
                self._sample(json.loads(body))
            elif path.path == "/groupwise/hold":
                self._hold(json.loads(body))
            else:
                self.answer(200, self._act(path.path, path.query, body))
        except StaleWeights as stale:
            self.answer(409, {"stale": stale.wanted, "held": stale.held})
        except BeginAgain as again:
            self.answer(409, {"again": str(again)})
        except Broken:
            self.close_connection = True
        except Refused as refused:
            self.answer(400, {"refused": str(refused)})
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            self.answer(400, {"refused": f"the request is not understood ({type(error).__name__}: {error})"})
        except TimeoutError:
            self.close_connection = True
        except OSError as error:
            self.answer(500, {"refused": f"the server could not keep what it got ({error})"})

    def _body(self, most: int) -> bytearray:
        try:
            return self.body(most)
        except TooMuch as long:
            raise Refused(
                f"a message of {long} bytes is more than {most}: send smaller parts (rollout.vllm.bucket_mib)"
            ) from long

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
        if path == "/groupwise/handles":
            asked = {name: values[0] for name, values in parse_qs(query).items()}
            return service.commit(asked["id"], int(asked["version"]), [], bytes(body))
        values = json.loads(body)
        if path == "/groupwise/wire":
            return service.commit(values["id"], int(values["version"]), [], dict(values["offer"]))
        if path == "/groupwise/release":
            service.release_memory(values["id"])
            return {"released": values["id"]}
        if path == "/groupwise/begin":
            return {"held": service.begin(values["id"])}
        if path == "/groupwise/commit":
            adapter = Adapter(dict(values["adapter"])) if values.get("adapter") else None
            return service.commit(values["id"], int(values["version"]), list(values["sha256s"]), adapter)
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
            self.begin_pieces("application/x-ndjson")
            self._chunk({"holds": values["owner"]})
            self.connection.settimeout(None)
            self.rfile.read(1)  # nothing more is ever sent
        except OSError:
            pass  # disconnected, and not in good order
        finally:
            self.holders.discard(self.connection)
            let_go()

    def _sample(self, values: dict[str, Any]) -> None:
        jobs = [Job(tuple(job["prompt"]), int(job["seed"]), int(job["max_tokens"])) for job in values["jobs"]]
        rows = self.service.sample(
            values["weights"], settings_from(values["settings"]), jobs, stop=tuple(values["stop"]), stream=bool(values["stream"])
        )
        first = next(rows, None)  # what is wrong with the request comes to light here
        self.begin_pieces("application/x-ndjson")
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
        self.end_pieces()

    def _chunk(self, row: dict[str, Any]) -> None:
        self.piece(json.dumps(row).encode() + b"\n")
