"""The process behind ``processes.py``: loads the reward functions that it is told, and calls them one at a time.

Messages are pickles behind their length in 8 bytes. Run as a script: the first message brings the parent's ``sys.path``, and only then
is groupwise imported. The parent kills it when it is late, whatever it is doing.
"""

import math
import os
import pickle
import signal
import struct
import sys
from typing import Any, BinaryIO

GRACE_S = 10.0
"""How long past its limit a call may outlive a parent that was killed itself."""


def read_message(stream: BinaryIO) -> Any:
    """Raises EOFError when the other side has ended."""
    header = stream.read(8)
    if len(header) < 8:
        raise EOFError
    (length,) = struct.unpack("!Q", header)
    body = stream.read(length)
    if len(body) < length:
        raise EOFError
    return pickle.loads(body)


def write_message(stream: BinaryIO, message: Any) -> None:
    body = pickle.dumps(message)
    stream.write(struct.pack("!Q", len(body)) + body)
    stream.flush()


def die_after(seconds: float | None) -> None:
    """The default action ends even a loop in C; None disarms."""
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(0 if seconds is None else math.ceil(seconds))


def plain(result: Any) -> Any:
    """Arrays and tensors as lists of numbers, so that the parent needs none of their libraries."""
    if hasattr(result, "tolist"):
        return result.tolist()
    if isinstance(result, (list, tuple)):
        return [one.item() if hasattr(one, "item") and getattr(one, "shape", None) == () else one for one in result]
    return result


def load(entries: dict[str, dict[str, Any]]) -> dict[str, Any]:
    from groupwise.config.rewards import RewardFunctionConfig
    from groupwise.rewards.load import load_reward

    return {name: load_reward(RewardFunctionConfig(**entry)).function for name, entry in entries.items()}


def answer(function: Any, keywords: dict[str, Any]) -> tuple[str, Any]:
    from groupwise.rewards.calls import CallRaised, call_with_limit

    try:
        reply = "returned", plain(call_with_limit(function, keywords, None))
        pickle.dumps(reply)
    except CallRaised as raised:
        return "raised", str(raised)
    except Exception as error:
        return "raised", f"{type(error).__name__} while its result was sent: {error}"
    return reply


def main() -> None:
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a function that asks for input must not get our requests
    os.dup2(2, 1)  # what it prints must not end up among the replies
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)):
        signal.signal(number, signal.SIG_IGN)  # for the parent, which finishes its step and closes our input when it ends
    path, entries = read_message(requests)
    sys.path[:] = path
    try:
        functions = load(entries)
    except Exception as error:
        write_message(replies, ("failed", f"{type(error).__name__}: {error}"))
        return
    write_message(replies, ("ready", None))
    while True:
        try:
            name, keywords, timeout_s = read_message(requests)
        except EOFError:
            return
        die_after(None if timeout_s is None else timeout_s + GRACE_S)
        reply = answer(functions[name], keywords)
        die_after(None)
        write_message(replies, reply)


if __name__ == "__main__":
    main()
