"""Two sides that take turns: each lives in a process of its own and works only when it is told to.

So neither side's memory, allocator or threads touch the other's, and slow drifts of the machine hit both alike. A worker is a module
with ``main()`` that calls ``serve``. Commands and answers are one JSON line each. No torch here, and nothing of groupwise: a worker
may run in another environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

__all__ = ["KEEP_MEMORY", "REST_S", "Commands", "Worker", "WorkerDied", "serve"]

KEEP_MEMORY = (
    "glibc.malloc.mmap_threshold=17179869184:glibc.malloc.trim_threshold=17179869184:"
    "glibc.malloc.mmap_max=0:glibc.malloc.hugetlb=1"
)
"""``GLIBC_TUNABLES`` that make glibc keep freed memory. Groupwise sets nearly the same by itself; here all sides are given it."""
REST_S = 5.0
"""After a call of vLLM, before another side's: its worker goes on asking for work for two seconds, on one of the cores."""


class WorkerDied(RuntimeError):
    """A worker's process ended without an answer; the message holds the end of what it printed."""


class Worker:
    """The parent's end of one worker process.

    Args:
        module: such as ``benchmarks.trl_worker``.
        settings: handed over as JSON, the first argument of the module's ``main``.
        threads: for OpenMP and PyTorch.
        keep_memory: start it with ``KEEP_MEMORY``; otherwise with the C library's own defaults.
        python: interpreter of another environment.
        checkout: another checkout of groupwise, whose sources and benchmarks it runs.
    """

    def __init__(
        self, module: str, settings: dict[str, Any], *, threads: int, keep_memory: bool = True, python: str = sys.executable,
        checkout: Path | None = None,
    ) -> None:  # fmt: skip
        self.module = module
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        environment.pop("GLIBC_TUNABLES", None)
        if keep_memory:
            environment["GLIBC_TUNABLES"] = KEEP_MEMORY
        home = Path(__file__).resolve().parents[1]
        if checkout is not None:
            home = checkout.resolve()
            environment["PYTHONPATH"] = os.pathsep.join([str(home / "src"), str(home)])
        self._log = tempfile.NamedTemporaryFile(prefix=f"{module}-", suffix=".log")  # noqa: SIM115  # closed with the worker
        self._process = subprocess.Popen(
            [python, "-m", module, json.dumps({**settings, "threads": threads})],
            cwd=home, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._log, text=True,
        )  # fmt: skip
        self.hello = self._answer()
        """What the worker says once it is ready."""

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send one command and wait for its answer. Raises ``WorkerDied``."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerDied(self._obituary()) from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerDied(self._obituary())
        return json.loads(line)

    def _obituary(self) -> str:
        code = self._process.wait()
        tail = deque(Path(self._log.name).read_text(encoding="utf-8", errors="replace").splitlines(), maxlen=15)
        return f"{self.module} ended with code {code}; the last it printed:\n" + "\n".join(tail)

    def close(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Commands:
    """A worker's end: iterate over commands, and answer each one."""

    def __init__(self, stdin: IO[str], answers: IO[str]) -> None:
        self._stdin, self._answers = stdin, answers

    def answer(self, **reply: Any) -> None:
        self._answers.write(json.dumps(reply) + "\n")
        self._answers.flush()

    def next(self) -> dict[str, Any] | None:
        """The next command, or ``None`` when the parent has closed."""
        line = self._stdin.readline()
        return json.loads(line) if line else None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.next, None)


def serve(main: Callable[[Commands, dict[str, Any]], None]) -> None:
    """Run a worker's ``main(commands, settings)``. Whatever libraries print goes to standard error, not among the answers."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(Commands(sys.stdin, answers), json.loads(sys.argv[1]))
