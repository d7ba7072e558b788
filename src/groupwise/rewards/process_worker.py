"""The process behind ``processes.py``: loads the reward functions that it is told, and calls them one at a time.

Requests are two pickles, what is called and its keywords, each behind its length. Replies are JSON behind the request's number and their
length: the code that a function runs may have written them, and the parent believes them nothing but scores.

Run as a script, it is two processes. The first only waits, and when the second ends, or the parent does (whose end of the *lifeline*, a
pipe, then closes), it kills all that is left. In a sandbox the second one is the zygote of ``sandbox.py``.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import math
import numbers
import os
import pickle
import random
import resource
import select
import signal
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_DEATH_SIGNAL, _SUBREAPER = 1, 36


def read_exactly(descriptor: int, length: int) -> bytes:
    """Raises EOFError when the other side has ended."""
    parts: list[bytes] = []
    while length:
        part = os.read(descriptor, min(length, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


def read_message(descriptor: int) -> tuple[Any, int]:
    """What the parent sent, and its length. The parent is trusted."""
    (length,) = struct.unpack("!Q", read_exactly(descriptor, 8))
    return pickle.loads(read_exactly(descriptor, length)), length


def write_all(descriptor: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def write_reply(descriptor: int, number: int, body: bytes) -> None:
    write_all(descriptor, struct.pack("!QQ", number, len(body)) + body)


def written(kind: str, value: object = None) -> bytes:
    return json.dumps([kind, value], default=_plain).encode()


def _plain(value: Any) -> Any:
    """What JSON does not know: arrays and tensors, other libraries' numbers, ranges, and steps."""
    if all(hasattr(value, name) for name in ("rewards", "ends", "unit")):
        return {"StepRewards": [list(value.rewards), list(value.ends), value.unit]}
    if (ma := sys.modules.get("numpy.ma")) is not None and ma.is_masked(value):
        raise TypeError("a masked number is no score")  # its list would have None, which says that the function does not apply
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        return list(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent to another process")


def die_after(seconds: float | None) -> None:
    """The default action ends even a loop in C; None disarms."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(0 if seconds is None else math.ceil(seconds))


def load(entries: Mapping[str, Mapping[str, Any]]) -> dict[str, Callable[..., Any]]:
    from groupwise.config.rewards import RewardFunctionConfig
    from groupwise.rewards.load import load_reward

    return {name: load_reward(RewardFunctionConfig(**entry)).function for name, entry in entries.items()}


def seed_generators(seed: int | None) -> None:
    """Python's, and those of numpy and torch where they have been imported."""
    if seed is None:
        return
    random.seed(seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(seed % 2**32)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(seed)


def answer(function: Callable[..., Any], keywords: Mapping[str, object], seed: int | None) -> bytes:
    from groupwise.importing import in_one_line
    from groupwise.rewards.calling import CallRaised, call_with_limit

    try:
        seed_generators(seed)
        if (algebra := sys.modules.get("groupwise.data.algebra")) is not None:
            algebra.renew_budget()  # the suite renews that of its own process
        return written("returned", call_with_limit(function, keywords, None))
    except CallRaised as raised:
        return written("raised", str(raised))
    except (Exception, RecursionError) as error:
        return written("raised", f"{in_one_line(error)} while its result was sent")
    finally:
        show_what_was_printed()


def show_what_was_printed() -> None:
    """Write what is still in the buffers: the process is ended without, and a call in a sandbox has a copy of them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # it may be closed, or the function's own
            stream.flush()


def answer_in_walls(
    walls: ModuleType,
    function: Callable[..., Any],
    keywords: Mapping[str, object],
    timeout_s: float | None,
    seed: int | None,
    most: int,
) -> bytes:
    try:
        return bytes(walls.contained(lambda: answer(function, keywords, seed), timeout_s, most))
    except walls.Late:
        return written("late")
    except walls.Ended as ended:
        return written("ended", str(ended))
    except OSError as error:
        return written("ended", f"nothing, because its process could not be started ({error})")


def serve(requests: int, replies: int, path: Sequence[str], walls: ModuleType | None) -> None:
    sys.path[:] = path
    try:
        (entries, (grace_s, least_bytes, bytes_per_byte)), _ = read_message(requests)
        functions = load(entries)
        show_what_was_printed()
    except Exception as error:
        write_reply(replies, 0, written("failed", f"{type(error).__name__}: {error}"))
        return
    write_reply(replies, 0, written("ready"))
    while True:
        try:
            (number, name, timeout_s, seed), _ = read_message(requests)
            keywords, length = read_message(requests)
        except EOFError:
            return
        if walls is not None:
            body = answer_in_walls(walls, functions[name], keywords, timeout_s, seed, least_bytes + bytes_per_byte * length)
        else:
            die_after(None if timeout_s is None else timeout_s + grace_s)
            body = answer(functions[name], keywords, seed)
            die_after(None)
        write_reply(replies, number, body)


def control(option: int, value: int) -> None:
    """prctl(2), where there is one."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0))


def wait_and_clean_up(child: int, lifeline: int, woken: int) -> None:
    """Wait until ``child`` or the parent has ended; then kill what is left, and end as ``child`` did."""
    ended, status = 0, 0
    while not ended:
        ended, status = os.waitpid(child, os.WNOHANG)
        if not ended:
            ready, _, _ = select.select([lifeline, woken], [], [])
            if lifeline in ready:
                with contextlib.suppress(OSError):
                    os.kill(child, signal.SIGKILL)
                ended, status = os.waitpid(child, 0)
            else:
                os.read(woken, 64)
    with contextlib.suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    # What has left the group comes to us when its own parent ends, on Linux. A flood of processes may outrun this.
    for _ in range(1000):
        with contextlib.suppress(OSError):
            for own in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
                os.kill(int(own), signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            break
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def open_walls() -> ModuleType:
    """``sandbox.py`` by itself: what comes with the package may start threads, and the walls must be entered without."""
    spec = importlib.util.spec_from_file_location("groupwise_sandbox", Path(__file__).with_name("sandbox.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> None:
    lifeline = int(sys.argv[1])
    requests, replies = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a function that asks for input must not get our requests
    os.dup2(2, 1)  # what it prints must not end up among the replies
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # for a call that is killed
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        # Stop signals are for the parent, which finishes its step. A handler, since "ignored" would be inherited by what is started.
        signal.signal(number, lambda number, frame: None)
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    control(_SUBREAPER, 1)
    (path, steps), _ = read_message(requests)
    walls, first = None, os.getpid()
    try:
        if steps is None:
            child = os.fork()
        else:
            walls = open_walls()
            child = walls.enter([walls.Step(*step) for step in steps])
    except Exception as error:
        write_reply(replies, 0, written("refused", str(error)))
        os._exit(1)
    if child:
        os.close(requests)
        os.close(replies)
        wait_and_clean_up(child, lifeline, woken)
    signal.set_wakeup_fd(-1)
    for descriptor in (lifeline, woken, waker):
        os.close(descriptor)
    if walls is None:
        os.setpgid(0, 0)
        control(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != first:
            os._exit(1)
    serve(requests, replies, path, walls)


if __name__ == "__main__":
    main()
