"""The HTTP side of a served model: OpenAI's paths, errors and streams. ``groupwise.listening`` says who may ask.

POST /v1/chat/completions    an answer, whole or as server-sent events
GET  /v1/models              the model's name, and with it at the end of the path what is known of it
GET  /health                 whether it samples; nobody needs a key for this
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import select
import socket
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from groupwise.config.schema import Config
from groupwise.errors import TrainingError
from groupwise.importing import in_one_line
from groupwise.listening import BoundedServer, Handler, TooMuch, checked_secret, is_loopback, listening_error
from groupwise.serving.asking import Refused
from groupwise.serving.service import Exchange, open_service

__all__ = ["KEY", "Answering", "ChatHandler", "Server", "find_key", "open_server"]

logger = logging.getLogger("groupwise")

KEY = "GROUPWISE_SERVE_KEY"

MOST_BYTES = 2**22
"""The limit of a message: more than the longest context takes."""
MOST_CONNECTIONS = 256
_LOOK_EVERY_S = 0.5
"""How often it is seen whether a client still waits."""
_CODES = {401: "invalid_api_key"}


class Answering(Protocol):
    """What a server answers by."""

    @property
    def name(self) -> str:
        """What clients call the model."""

    @property
    def is_alive(self) -> bool:
        """Whether it samples."""

    def begin(self, body: object) -> Exchange:
        """Have an answer sampled. Raises Refused."""

    def close(self) -> None:
        """End what is still being answered."""


class Server:
    """Answers in threads of its own from construction until ``close``.

    Args:
        key: what clients must know; None where everybody who reaches the address may ask.
        handler: of one connection.
    """

    def __init__(
        self, service: Answering, host: str = "127.0.0.1", port: int = 0, *, key: str | None = None,
        handler: type[ChatHandler] | None = None, connections: int = MOST_CONNECTIONS,
    ) -> None:  # fmt: skip
        """Port 0 takes a free one. Raises OSError where the port is taken."""
        own = {"service": service, "secret": key, "host": host, "began": int(time.time())}
        self.service = service
        self._http = BoundedServer((host, port), type("Handler", (handler or ChatHandler,), own), connections)
        self.port, self.url = self._http.server_port, f"{self._http.url}/v1"
        self._http.begin()

    def close(self) -> None:
        self._http.end()
        self.service.close()

    def wait(self) -> None:
        """Until it does not sample any more; a signal gets through. Raises TrainingError."""
        while self.service.is_alive:
            time.sleep(_LOOK_EVERY_S)
        raise TrainingError("the sampling thread has ended: start the server again")


def find_key(host: str) -> tuple[str | None, bool]:
    """The key that clients of a server at ``host`` must know, and whether it was made here: None where nobody else reaches the address and
    GROUPWISE_SERVE_KEY is not set. Raises ConfigError for what is no key."""
    given = os.environ.get(KEY)
    if given is not None:
        return checked_secret(given, KEY), False
    return (None, False) if is_loopback(host) else (secrets.token_hex(32), True)


def open_server(config: Config, max_tokens: int, name: str, host: str, port: int, key: str | None) -> Server:
    """Load the model of ``config`` and serve it. The address is tried before the weights are loaded. Raises ConfigError for one that cannot
    be had."""
    try:
        BoundedServer((host, port), Handler, 1).server_close()
    except (OSError, OverflowError) as error:
        raise listening_error(error, host, port) from error
    service = open_service(config, max_tokens, name)
    try:
        return Server(service, host, port, key=key)
    except OSError as error:  # taken meanwhile
        service.close()
        raise listening_error(error, host, port) from error


@contextmanager
def _failures_told() -> Iterator[None]:
    """What nobody foresaw is a line in the log and an error for the client, and not a connection that closes without a word."""
    try:
        yield
    except (Refused, OSError):
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        logger.error("a request failed: %s (%s, line %s)", in_one_line(error), Path(place.filename).name, place.lineno)
        raise Refused("the server failed, and its log says where: this is a bug", status=500) from error


class ChatHandler(Handler):
    """One connection of a client."""

    service: Answering
    began: int

    def refuse(self, status: int, words: str) -> None:
        self._refuse(Refused(words, status=status, code=_CODES.get(status)))

    def _refuse(self, refused: Refused) -> None:
        again = {"Retry-After": "1"} if refused.status == 429 else {}
        self.answer(refused.status, refused.body, **again)

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/health":
            alive = self.service.is_alive
            self.answer(200 if alive else 503, {"status": "ok" if alive else "ended"})
            return
        if not self.is_trusted():
            return
        about = {"id": self.service.name, "object": "model", "created": self.began, "owned_by": "groupwise"}
        name = unquote(path.removeprefix("/v1/models").removeprefix("/"))
        if not path.startswith("/v1/models") or name not in ("", self.service.name):
            self._refuse(Refused(f"there is nothing at {path}: see /v1/models", status=404))
        else:
            self.answer(200, about if name else {"object": "list", "data": [about]})

    def do_POST(self) -> None:
        if not self.is_trusted():
            return
        path = urlsplit(self.path).path
        try:
            body = self._read()
            if path != "/v1/chat/completions":
                raise Refused(f"{path} is not served, only /v1/chat/completions", status=404)
            try:
                asked = json.loads(body)
            except (ValueError, RecursionError):
                raise Refused("the body is no JSON") from None
            with _failures_told():
                exchange = self.service.begin(asked)
        except Refused as refused:
            self._refuse(refused)
            return
        except OSError:
            self.close_connection = True
            return
        try:
            self._tell(exchange)
        except OSError:  # disconnected
            self.close_connection = True
        finally:
            exchange.abandon()

    def _read(self) -> bytearray:
        try:
            if "Transfer-Encoding" in self.headers or "Content-Length" not in self.headers:
                raise ValueError
            return self.body(MOST_BYTES)
        except TooMuch as long:
            raise Refused(f"a body of {long} bytes is more than the {MOST_BYTES} that are read", status=413) from None
        except ValueError:
            self.close_connection = True
            raise Refused("a body must say its length (Content-Length)", status=411) from None

    def _tell(self, exchange: Exchange) -> None:
        begun = False
        try:
            with _failures_told():
                while not (exchange.wait(_LOOK_EVERY_S) and (exchange.is_finished or exchange.ask.stream)):
                    if not self._is_there():
                        raise ConnectionError
                if not exchange.ask.stream:
                    self.answer(200, exchange.answer.whole())
                    return
                self.begin_pieces("text/event-stream")
                begun = True
                self._stream(exchange)
        except Refused as refused:
            if not begun:
                self._refuse(refused)
                return
            self._event(refused.body)  # too late for a status
        self.end_pieces()

    def _stream(self, exchange: Exchange) -> None:
        while True:
            finished = exchange.is_finished
            for piece in exchange.answer.pieces():
                self._event({**piece, "usage": None} if exchange.ask.stream_usage else piece)
            if finished:
                break
            while not exchange.wait(_LOOK_EVERY_S):
                if not self._is_there():
                    raise ConnectionError
        if exchange.ask.stream_usage:
            self._event(exchange.answer.usage_piece())
        self.piece(b"data: [DONE]\n\n")

    def _event(self, values: dict[str, Any]) -> None:
        self.piece(b"data: " + json.dumps(values).encode() + b"\n\n")

    def _is_there(self) -> bool:
        """Whether the client has not hung up."""
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return not poll.poll(0) or self.connection.recv(1, socket.MSG_PEEK) != b""
