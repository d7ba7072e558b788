"""A service on this machine that says yes to what the wandb client asks, for as long as it is let live.

python -m tests.tracking.stand_in LOG     # prints its port; LOG gets a line for every request
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["Answering"]

RUN = {
    "id": "x", "name": "r", "displayName": "r", "description": "", "config": "{}", "sweepName": None, "historyLineCount": 0,
    "project": {"name": "p", "id": "2", "entity": {"name": "me", "id": "1"}},
}  # fmt: skip
DATA = {
    "viewer": {"id": "1", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}, "apiKeys": {"edges": []}},
    "serverInfo": {"cliVersionInfo": {}, "latestLocalVersionInfo": None, "exposesExplicitRunVersions": True, "features": []},
    "upsertBucket": {"bucket": RUN, "inserted": True},
    "createRunFiles": {"runID": "x", "uploadHeaders": [], "files": []},
    "entity": {"organization": None},
    "model": None,
    "project": {"bucket": None},
}


class Answering(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    log = Path("requests")

    def do_GET(self) -> None:
        self.answer({})

    def do_POST(self) -> None:
        self.answer({"data": DATA} if "graphql" in self.path else {})

    do_PUT = do_POST

    def answer(self, found: dict[str, Any]) -> None:
        asked = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        with self.log.open("ab") as file:
            file.write(self.path.encode() + b" " + asked + b"\n")
        body = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """The file has it."""


if __name__ == "__main__":
    Answering.log = Path(sys.argv[1])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    print(server.server_address[1], flush=True)
    server.serve_forever()
