"""What every HTTP server here has in common, by the standard library alone: who may ask, how much, and for how long.

Nothing of a request is read before its secret was seen to be the server's. A browser that a stranger's page sends here is refused: by its
``Origin``, by a ``Host`` that is not this machine's (where only this machine is served), and by its ``Content-Type``.
"""

from __future__ import annotations

import errno
import hmac
import ipaddress
import json
import socket
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import urlsplit

from groupwise.errors import ConfigError

__all__ = ["BoundedServer", "Handler", "TooMuch", "checked_secret", "http_address", "is_loopback", "listening_error"]

PIECE_BYTES = 2**20
SILENCE_S = 60.0
"""How long a peer may say nothing in the middle of a message, or take nothing of an answer; and how long the head of a request may
take as a whole."""
_SHORTEST_SECRET = 16


class TooMuch(Exception):
    """A message is longer than is read; the argument is its length in bytes, or what was announced for it."""


def http_address(host: str, port: int) -> str:
    """Where something listens, as a URL.

    >>> http_address("127.0.0.1", 80), http_address("::1", 80)
    ('http://127.0.0.1:80', 'http://[::1]:80')
    """
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class BoundedServer(ThreadingHTTPServer):
    """A server with a limit to its connections at once, each of which has a thread; one too many is closed."""

    daemon_threads = True
    request_queue_size = 128  # many agents begin at once

    def __init__(self, address: tuple[str, int], handler: Any, connections: int) -> None:
        self._host, self._free = address[0], threading.BoundedSemaphore(connections)
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, handler)

    @property
    def url(self) -> str:
        return http_address(self._host, self.server_port)

    def begin(self) -> None:
        """Answer in threads of its own until ``end``."""
        threading.Thread(target=self.serve_forever, args=(0.1,), name="groupwise-server", daemon=True).start()

    def end(self) -> None:
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread can be started, which would have released it
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a peer that disconnected, or was silent, is no news."""


class Handler(BaseHTTPRequestHandler):
    """One connection. Derive from it, and define ``refuse`` and the methods."""

    secret: str | None
    """None where everybody who reaches the server may ask."""
    host: str
    """The address that is listened at."""
    content_types: ClassVar[tuple[str, ...]] = ("application/json",)
    timeout: ClassVar[float] = SILENCE_S
    protocol_version = "HTTP/1.1"
    server_version = "groupwise"
    disable_nagle_algorithm = True

    def refuse(self, status: int, words: str) -> None:
        """Answer with an error in the protocol's own form."""
        raise NotImplementedError

    def handle_one_request(self) -> None:
        """Bounds the time of a head as a whole: a byte now and then is no silence."""
        self._head_limit = threading.Timer(self.timeout, self._hang_up)
        self._head_limit.daemon = True
        with suppress(RuntimeError):  # no further thread can be started: then the limit of silence alone holds
            self._head_limit.start()
        try:
            super().handle_one_request()
        finally:
            self._head_limit.cancel()

    def _hang_up(self) -> None:
        with suppress(OSError):  # it is closed already
            self.connection.shutdown(socket.SHUT_RDWR)

    def is_trusted(self) -> bool:
        """Whether the request may be read; what it is refused with is answered, and its body is not read."""
        headers, refusal = self.headers, None
        if headers.get("Origin") is not None:
            refusal = 403, "this server answers no browsers"
        elif not self._is_host(given := headers.get("Host", "")):
            words = f"this server is for its own machine alone, of which {given!r:.80} is no name: ask for {self.host}, or start it with"
            refusal = 403, f"{words} --host and an address that others reach"
        elif not self.knows(headers.get("Authorization", "").encode("utf-8", errors="replace")):
            refusal = 401, "the secret is missing, or is not this server's"
        elif self.command == "POST" and headers.get_content_type() not in self.content_types:
            refusal = 415, f"the content type of a message must be {' or '.join(self.content_types)}"
        if refusal is not None:
            self.close_connection = True
            self.refuse(*refusal)
        else:
            self._head_limit.cancel()
        return refusal is None

    def knows(self, authorization: bytes) -> bool:
        """Whether a request with this header may ask."""
        return self.secret is None or hmac.compare_digest(authorization, f"Bearer {self.secret}".encode())

    def _is_host(self, given: str) -> bool:
        """Whether a client that wants this machine may have said so. A page whose name was made to lead here says its own name."""
        if not is_loopback(self.host):
            return True
        try:
            name = urlsplit(f"//{given}").hostname or ""
        except ValueError:
            return False
        return name == self.host or is_loopback(name)

    def body(self, most: int) -> bytearray:
        """What was sent. Memory is taken for what came, and not for what was announced. Raises TooMuch, and ValueError for no length."""
        length = int(self.headers.get("Content-Length") or 0)
        if not 0 <= length <= most:
            self.close_connection = True
            raise TooMuch(length)
        body = bytearray()
        while len(body) < length:
            piece = self.rfile.read1(min(PIECE_BYTES, length - len(body)))  # type: ignore[attr-defined]
            if not piece:
                raise TimeoutError
            body += piece
        return body

    def answer(self, status: int, values: Any, **headers: str) -> None:
        body = json.dumps(values).encode()
        known = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        if self.close_connection:  # else a client sends the next request into it
            known["Connection"] = "close"
        self.send_response(status)
        for name, value in {**known, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def begin_pieces(self, content_type: str) -> None:
        """An answer whose length is not known yet. A client of HTTP/1.0 knows no chunks: there it ends with the connection."""
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        if self._knows_chunks:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.send_header("Connection", "close")  # which also closes it, when the answer is done
        self.end_headers()

    def piece(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data) if self._knows_chunks else data)
        self.wfile.flush()

    def end_pieces(self) -> None:
        if self._knows_chunks:
            self.wfile.write(b"0\r\n\r\n")

    @property
    def _knows_chunks(self) -> bool:
        return self.request_version >= "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a run asks thousands of times."""


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def checked_secret(secret: str, place: str) -> str:
    """``secret`` without blanks around it. Raises ConfigError, naming its ``place``, for what could be guessed or no header can carry."""
    text = secret.strip()
    if len(text) < _SHORTEST_SECRET or not (text.isascii() and text.isprintable()) or " " in text:
        raise ConfigError(
            f"{place} holds no secret: it must be {_SHORTEST_SECRET} or more letters and digits that nobody can guess, such as those of "
            "`openssl rand -hex 32`"
        )
    return text


def listening_error(error: Exception, host: str, port: int) -> ConfigError:
    """What to do where nothing could listen at an address."""
    number = getattr(error, "errno", None)
    if number == errno.EADDRINUSE:
        return ConfigError(f"the port {port} of {host} is taken, by another server perhaps: choose another with --port")
    if number in (errno.EACCES, errno.EPERM):
        return ConfigError(f"the port {port} is not for everybody: choose one from 1024 on with --port")
    return ConfigError(
        f"nothing can listen at {host}, port {port} ({error}): name an address of this machine, or 0.0.0.0, with --host"
    )
