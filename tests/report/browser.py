"""A headless Chromium driven over its debugging pipe: enough to open a page, click, look, and hear what it complains of."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")


def find_chromium() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One page. ``problems`` collects everything the page or its policy complains of."""

    def __init__(self, profile: Path) -> None:
        binary = find_chromium()
        if binary is None:
            pytest.skip("needs a Chromium (such as Debian's package chromium)")
        to_browser, ours_out = os.pipe()
        ours_in, from_browser = os.pipe()
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run",
                 "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]  # fmt: skip

        def as_three_and_four() -> None:
            spare_in, spare_out = os.dup(to_browser), os.dup(from_browser)
            os.dup2(spare_in, 3)
            os.dup2(spare_out, 4)

        self.scratch = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # whose path is short: a socket lies there
        self.process = subprocess.Popen(
            [binary, *words], preexec_fn=as_three_and_four, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": self.scratch.name},
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self.out, self.into, self.waiting = ours_out, ours_in, b""
        self.number, self.session = 0, None
        self.problems: list[str] = []
        target = next(t for t in self.ask("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]

    def read(self) -> dict[str, Any]:
        while b"\0" not in self.waiting:
            more = os.read(self.into, 1 << 20)
            assert more, "the browser is gone"
            self.waiting += more
        line, _, self.waiting = self.waiting.partition(b"\0")
        message = json.loads(line)
        self.note(message.get("method"), message.get("params", {}))
        return message

    def note(self, method: str | None, parameters: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"].get("exception", parameters["exceptionDetails"])))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not parameters["request"]["url"].startswith(("file:", "blob:", "about:")):
            self.problems.append("asked the network for " + parameters["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.problems.append("dialog: " + parameters["message"])

    def open(self, path: Path, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.look(width, height, dark)
        self.run("delete document.documentElement.dataset.ready")  # the page before may still answer for a moment
        self.ask("Page.navigate", url=path.absolute().as_uri())
        self.until("document.documentElement?.dataset.ready === 'true'")

    def look(self, width: int, height: int, dark: bool = False) -> None:
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.ask("Emulation.setEmulatedMedia", features=features)

    def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise."""
        found = self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, condition: str, timeout_s: float = 120) -> None:
        """Wait: the machine may be busy with other things."""
        give_up = time.monotonic() + timeout_s
        while not self.run(f"Boolean({condition})"):
            assert time.monotonic() < give_up, f"never true: {condition}; {self.problems}"
            time.sleep(0.05)

    def picture(self, path: Path, whole: bool = False) -> None:
        found = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(found["data"]))

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.out)
        os.close(self.into)
        self.scratch.cleanup()
