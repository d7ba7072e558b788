"""A Python that has torch and groupwise imported already: what tests start in a process of its own begins at once.

``[python(), "script.py", ...]`` is a command like ``[sys.executable, "script.py", ...]``, with ``-m`` and ``-c`` too: a real process with
its own environment, output, signals and exit code. It is forked from a server that all workers of the test session share. Use the plain
`sys.executable` where a test is about imports, memory, the end of the interpreter, or whose child a process is. It is all there is on other
systems than Linux.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

__all__ = ["python"]

_CLIENT = """#!{python} -IS
import json, os, select, signal, socket, sys
words = sys.argv[1:]
if not words or (words[0].startswith("-") and words[0] not in ("-m", "-c")):
    os.execv({python!r}, [{python!r}, *words])
passed_on = {{signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}}
signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)  # until the process is known
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
told = dict(words=words, folder=os.getcwd(), environment=dict(os.environ), executable=__file__, parent=os.getppid())
socket.send_fds(server, [b"."], [0, 1, 2])
server.sendall(json.dumps(told).encode() + b"\\n")
answers = server.makefile()
process = int(answers.readline() or sys.exit("the server of warm processes has ended"))
for number in passed_on:
    signal.signal(number, lambda number, frame: os.kill(process, number))
signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
while not select.select([server], [], [], 0.05)[0]:
    pass  # a signal that comes just before a call that waits is handled after it: so none waits for long
code = int(answers.readline() or sys.exit("the server of warm processes has ended"))
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@functools.cache
def python() -> str:
    """The command to put before a script, ``-m`` or ``-c``. The first that asks starts the server; it ends with the test session."""
    if sys.platform != "linux":
        return sys.executable
    worker = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    folder = Path(tempfile.gettempdir()) / f"groupwise-tests-{worker or os.getpid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    client, address = folder / "python", folder / "socket"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not client.exists():
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(address))
            listener.listen(64)
            listener.set_inheritable(True)
            owner = os.getppid() if worker else os.getpid()
            subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(listener.fileno()), str(owner), str(folder)],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
            listener.close()
            client.write_text(_CLIENT.format(python=sys.executable, address=str(address)))
            client.chmod(0o700)
    return str(client)


def _serve(listener: socket.socket, owner: int) -> Callable[[], Any] | None:
    """Fork a process for each that asks, until the test session ``owner`` is over. Returns in each of them: what it has to do."""
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not select.select([listener], [], [], 1.0)[0]:
            if not Path(f"/proc/{owner}").exists():
                return None
            continue
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return _attend(client)
        client.close()


def _attend(client: socket.socket) -> Callable[[], Any]:
    """Start the client's process, and tell it how that ends; it is killed when the client is. Returns in that process alone."""
    _, handles, _, _ = socket.recv_fds(client, 1, 3)
    asked = json.loads(client.makefile().readline())
    process = os.fork()
    if process == 0:
        client.close()
        return _begin(asked, handles)
    for handle in (0, 1, 2, *handles):
        os.close(handle)  # who reads what the process writes waits until nobody can
    client.sendall(f"{process}\n".encode())
    ended, waited = os.pidfd_open(process), client.fileno()
    if ended not in select.select([waited, ended], [], [])[0]:
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(OSError):
        client.sendall(f"{code}\n".encode())
    os._exit(0)


def _begin(asked: dict[str, Any], handles: list[int]) -> Callable[[], Any]:
    """Make this process look like a fresh one of that command; what runs it."""
    import numpy
    import torch

    os.setsid()
    for target, handle in enumerate(handles):
        os.dup2(handle, target)
        os.close(handle)
    for name, number in (("stdout", 1), ("stderr", 2)):  # what they write to is another kind of thing now, perhaps
        stream = open(number, "w", buffering=-1 if name == "stdout" else 1, closefd=False)  # noqa: SIM115
        setattr(sys, name, stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    if os.environ.get("GROUPWISE_LAUNCHER") == str(asked["parent"]):  # whose end ends this one: see failures.py
        os.environ["GROUPWISE_LAUNCHER"] = str(os.getppid())
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    numpy.random.seed()
    sys.executable = asked["executable"]
    words = asked["words"]
    first = words[0] if words[0] in ("-m", "-c") else "script"
    name, arguments = (words[0], words[1:]) if first == "script" else (words[1], words[2:])
    given = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    place = str(Path(name).resolve().parent) if first == "script" else "" if first == "-c" else asked["folder"]
    sys.path[:] = list(dict.fromkeys([place, *given, *sys.path]))
    sys.argv = [name if first == "script" else first, *arguments]
    if first == "-m":
        return lambda: runpy.run_module(name, run_name="__main__", alter_sys=True)
    if first == "-c":
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        return lambda: exec(compile(name, "<string>", "exec"), main.__dict__)
    return lambda: runpy.run_path(name, run_name="__main__")


def _run(work: Callable[[], Any]) -> NoReturn:
    """Run it and leave as an interpreter does, but for taking everything apart: that would copy every page that was imported."""
    code, by = 0, None
    try:
        work()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException as error:
        traceback.print_exc()
        code, by = 1, signal.SIGINT if isinstance(error, KeyboardInterrupt) else None
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if by is not None:
        signal.signal(by, signal.SIG_DFL)
        os.kill(os.getpid(), by)
    os._exit(code)


def _import_everything() -> None:
    for name in (
        "torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "transformers.models.qwen2.modeling_qwen2",
        "groupwise.cli.app", "groupwise.evaluation.models", "groupwise.training.loop",
    ):  # fmt: skip
        importlib.import_module(name)


if __name__ == "__main__":
    listener, owner, folder = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3])
    _import_everything()
    gc.collect()
    gc.freeze()  # else the first collection in each process copies the pages of all that was imported
    work = _serve(listener, owner)
    if work is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        _run(work)
