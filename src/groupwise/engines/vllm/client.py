"""The trainer's end of the wire: ``protocol.Link`` over HTTP, by the standard library alone."""

from __future__ import annotations

import http.client
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

from groupwise.engines.base import SamplingSettings
from groupwise.engines.vllm.protocol import (
    SECRET,
    BeginAgain,
    Job,
    NotTrusted,
    Refused,
    StaleWeights,
    Starting,
    Unreachable,
    find_secret,
    settings_values,
)
from groupwise.engines.vllm.transfer import Adapter, Source
from groupwise.errors import ConfigError
from groupwise.importing import in_one_line

__all__ = ["Client"]

_CONNECT_S = 10.0


class Client:
    """One connection per call: a server that was restarted in between is simply found again."""

    in_process = False

    def __init__(self, url: str, *, patience_s: float = 300.0, shared: Path | None = None, secret: str | None = None) -> None:
        """``patience_s``: how long the server may be silent within a call. ``shared``: a folder that both see, for weights. ``secret``:
        the server's, by default that of `find_secret`.

        Raises ConfigError for what is no HTTP address, and for what is no secret.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port or 80
        except ValueError:  # no such port, or half an IPv6 address
            parts, host = None, None
        if parts is None or host is None or parts.scheme != "http":
            raise ConfigError(f"rollout.vllm.url is {url!r}, but it must be an address such as http://127.0.0.1:8300")
        self.where, self.patience_s = url, patience_s
        self._host, self._port = host, port
        self.on_this_machine = host in ("localhost", "127.0.0.1", "::1")
        self._shared = None if shared is None else shared.expanduser().resolve()
        self._files: list[Path] = []
        self._secret = secret or find_secret()

    def hello(self) -> dict[str, Any]:
        """Who answers. Raises Unreachable, also for a server of another kind."""
        with self._call("GET", "/groupwise", b"", _CONNECT_S) as answer:
            return self._values(answer)

    def hold(self, owner: str, who: str) -> Callable[[], None]:
        """The server is this run's until what is returned is called, or this process ends."""
        answer = self._call("POST", "/groupwise/hold", json.dumps({"owner": owner, "who": who}).encode(), self.patience_s)
        if answer.status != 200:
            with answer:
                self._values(answer)
        try:
            told = answer.readline()
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.where} broke off ({in_one_line(error)})") from error
        if not told:
            raise Unreachable(f"{self.where} broke off before it answered")
        return answer.close

    def begin(self, weights: str) -> str | None:
        self._forget_files()
        held = self._post("/groupwise/begin", {"id": weights})["held"]
        return None if held is None else str(held)

    def bucket(self, weights: str, index: int, data: bytes, sha256: str) -> None:
        asked = {"id": weights, "index": str(index), "sha256": sha256}
        if self._shared is not None:
            asked["file"], data = self._put(data), b""
        with self._call("POST", f"/groupwise/bucket?{urlencode(asked)}", data, self.patience_s) as answer:
            told = self._values(answer).get("sha256")
        if told != sha256:
            raise Refused(f"{self.where} read part {index} of the weights as {told}, but {sha256} was sent")

    def _put(self, data: bytes) -> str:
        """Write a file into the shared folder and return its name there. It lies there until the server has loaded it, or the next update
        begins."""
        assert self._shared is not None
        try:
            handle, name = tempfile.mkstemp(prefix="groupwise-", suffix=".safetensors", dir=self._shared)
            self._files.append(Path(name))
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).chmod(0o644)
        except OSError as error:
            raise Refused(
                f"rollout.vllm.shared_folder is {str(self._shared)!r}, which does not take the weights ({error})"
            ) from error
        return Path(name).name

    def _forget_files(self) -> None:
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files.clear()

    def commit(self, weights: str, version: int, sha256s: Sequence[str], source: Source | None = None) -> dict[str, Any]:
        if isinstance(source, dict):
            return self._post("/groupwise/wire", {"id": weights, "version": version, "offer": source})
        if source is not None and not isinstance(source, Adapter):
            assert isinstance(source, bytes), "tensors and files of this process mean nothing to another"
            asked = urlencode({"id": weights, "version": version})
            with self._call("POST", f"/groupwise/handles?{asked}", source, self.patience_s) as answer:
                return self._values(answer)
        try:
            adapter = {"adapter": source.config} if source else {}
            return self._post("/groupwise/commit", {"id": weights, "version": version, "sha256s": list(sha256s), **adapter})
        finally:
            self._forget_files()

    def release_memory(self, weights: str) -> None:
        self._post("/groupwise/release", {"id": weights})

    def sample(
        self, weights: str, settings: SamplingSettings, jobs: Sequence[Job], *, stop: Sequence[int], stream: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Rows as they come. Raises Unreachable where the stream ends before its end was told."""
        asked = {
            "weights": weights, "settings": settings_values(settings), "stop": list(stop), "stream": stream,
            "jobs": [{"prompt": list(job.prompt), "seed": job.seed, "max_tokens": job.max_tokens} for job in jobs],
        }  # fmt: skip
        body = json.dumps(asked).encode()
        with self._call("POST", "/groupwise/sample", body, self.patience_s) as answer:
            if answer.status != 200:
                self._values(answer)
            for line in self._lines(answer):
                row = self._row(line)
                if "stale" in row:
                    raise StaleWeights(row["stale"], row["held"])
                if "failed" in row:
                    raise Refused(row["failed"])
                if row.get("done"):
                    return
                yield row
        raise Unreachable(f"{self.where} broke off before all completions were there")

    def close(self) -> None:
        self._forget_files()

    def _lines(self, answer: http.client.HTTPResponse) -> Iterator[bytes]:
        try:
            yield from answer
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.where} broke off ({in_one_line(error)})") from error

    def _row(self, line: bytes) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Unreachable(f"{self.where} broke off in the middle of a line") from error
        if not isinstance(row, dict):
            raise Refused(f"{self.where} answers with {row!r:.60}, which is no row of a sampling server of groupwise")
        return row

    def _post(self, path: str, values: dict[str, Any]) -> dict[str, Any]:
        with self._call("POST", path, json.dumps(values).encode(), self.patience_s) as answer:
            return self._values(answer)

    def _call(self, method: str, path: str, body: bytes, timeout_s: float) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=min(timeout_s, _CONNECT_S))
        try:
            connection.connect()
            connection.sock.settimeout(timeout_s)
            connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.request(method, path, body=body, headers=self._headers(method, path))
            return connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise Unreachable(f"{self.where} does not answer ({in_one_line(error)})") from error

    def _headers(self, method: str, path: str) -> dict[str, str]:
        """The secret is found again where a server has made one meanwhile."""
        self._secret = self._secret or find_secret()
        told = {"Authorization": f"Bearer {self._secret}"} if self._secret else {}
        kind = "application/octet-stream" if path.startswith(("/groupwise/bucket", "/groupwise/handles")) else "application/json"
        return {"Connection": "close", **told, **({"Content-Type": kind} if method == "POST" else {})}

    def _values(self, answer: http.client.HTTPResponse) -> dict[str, Any]:
        """The answer's object; the exceptions of ``protocol`` for the others."""
        try:
            values = json.loads(answer.read())
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable(f"{self.where} broke off ({in_one_line(error)})") from error
        except (ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise Refused(f"{self.where} answers, but is no sampling server of groupwise (status {answer.status})")
        if answer.status == 401:
            why = "was started with another secret" if self._secret else "wants a secret, and this run has none"
            raise NotTrusted(
                f"the server at {self.where} {why}: put the same into {SECRET} on both sides, or copy the server's "
                "~/.cache/groupwise/vllm-secret"
            )
        if "starting" in values:
            raise Starting(f"{self.where} is still loading its model")
        if "stale" in values:
            raise StaleWeights(values["stale"], values["held"])
        if "again" in values:
            raise BeginAgain(str(values["again"]))
        if "refused" in values or answer.status != 200:
            raise Refused(str(values.get("refused", f"{self.where} answered with status {answer.status}")))
        return values
