"""``--num-processes N``: several processes of the same command on this machine.

They find each other as under torchrun, by RANK, WORLD_SIZE and the rest in the environment. When one ends badly, the others get a
moment to end with its error, and as long as a checkpoint takes that is being written, and are then ended; the exit code is that
of the first to fail.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType

__all__ = [
    "LAUNCHER", "SAVING", "SECRET", "cores_per_process", "held_port", "launch", "on_this_machine", "stop_signals",
]  # fmt: skip

LAUNCHER = "GROUPWISE_LAUNCHER"
"""In the environment of the processes: the launcher's process id. They end when it does."""
SECRET = "GROUPWISE_SECRET"
"""In the environment of all processes of a run, by which they know each other's messages; see secret.py."""
SAVING = "GROUPWISE_SAVING"
"""In the environment of the processes: a file that one of them touches while it writes a checkpoint."""
_GRACE_S = 30.0
_LOOK_EVERY_S = 0.2


def launch(command: Sequence[str], processes: int, environment: Mapping[str, str] | None = None) -> int:
    """Run ``command`` as ``processes`` processes and wait. Returns 0, or the exit code of the first that failed."""
    with held_port() as port, tempfile.NamedTemporaryFile(prefix="groupwise-") as saving:
        os.utime(saving.name, (0, 0))
        shared = {**(os.environ if environment is None else environment), SAVING: saving.name}
        return _launch(command, processes, shared, port, saving.fileno())


def _launch(command: Sequence[str], processes: int, environment: Mapping[str, str], port: int, saving: int) -> int:
    shared = {
        **environment, "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), LAUNCHER: str(os.getpid()), SECRET: secrets.token_hex(32),
    }  # fmt: skip
    shared |= on_this_machine()
    shared.setdefault("OMP_NUM_THREADS", str(cores_per_process(processes)))
    children: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {number: signal.signal(number, forward) for number in stop_signals()}
    try:
        for rank in range(processes):
            # Each in a session of its own: a Ctrl-C, or the terminal's end, reaches it once, through here.
            own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            children.append(subprocess.Popen(command, env=own, start_new_session=True))
            if received:  # while they were being started; the others have had it
                children[-1].send_signal(received[-1])
        return _wait(children, saving)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
                child.wait()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(children: Sequence[subprocess.Popen[bytes]], saving: int) -> int:
    """Wait until all are done, or one has failed and the others have had their time to say why, and to write what they had begun.

    ``saving``: an open handle of the file that is touched meanwhile.
    """
    deadline: float | None = None
    code = 0
    while running := [child for child in children if child.poll() is None]:
        failed = [c for c in children if c.returncode not in (None, 0)]
        if failed and deadline is None:
            deadline, code = time.monotonic() + _GRACE_S, _as_shells_have_it(failed[0])
            if failed[0].returncode < 0:  # it could not say so itself
                name, rank = signal.Signals(-failed[0].returncode).name, children.index(failed[0])
                sys.stderr.write(f"groupwise: process {rank} of {len(children)} was ended by {name}\n")
        if deadline is not None and time.monotonic() > deadline and time.time() - os.fstat(saving).st_mtime > _GRACE_S:
            for child in running:
                child.kill()
        time.sleep(_LOOK_EVERY_S)
    return code or next((_as_shells_have_it(c) for c in children if c.returncode), 0)


def _as_shells_have_it(child: subprocess.Popen[bytes]) -> int:
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def on_this_machine() -> dict[str, str]:
    """The environment in which nothing that this machine's processes say to each other is for its network."""
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo") if sys.platform.startswith("linux") else {}


def cores_per_process(processes: int) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // processes)


@contextmanager
def held_port() -> Iterator[int]:
    """A port that is given to nobody else until the first process, which asks for it by its number, listens there.

    It takes that one seconds, and any other program may ask the system for some free port meanwhile. On Linux a socket that is bound and
    does not listen keeps the port, and lets those have it who, as torch does, reuse addresses. Elsewhere it is only free at first.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = int(holder.getsockname()[1])
        if not sys.platform.startswith("linux"):
            holder.close()
        yield port


def stop_signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT, and SIGHUP unless whoever started this process had it ignored, as nohup does."""
    hung_up = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN else []
    return [signal.SIGTERM, signal.SIGINT, *hung_up]
