"""Python programs that a policy wrote, run in the sandbox of reward functions (``sandbox.py``): the tool ``python``."""

from __future__ import annotations

import ast
import contextlib
import io
import traceback
from collections.abc import Sequence
from typing import Any

from groupwise.rewards.processes import ProcessPool
from groupwise.rewards.scores import CallRaised

__all__ = ["Programs", "run"]

LONGEST_OUTPUT = 1500
"""Characters of what a program prints that are kept; an error's text comes behind them."""
_LONGEST_ERROR = 300


class _Kept(io.StringIO):
    """Keeps the first characters that are written, and counts the others."""

    forgotten = 0

    def write(self, text: str) -> int:
        room = max(0, LONGEST_OUTPUT - self.tell())
        super().write(text[:room])
        self.forgotten += max(0, len(text) - room)
        return len(text)


def run(completions: Sequence[str]) -> list[str]:
    """What each program prints, then the value of its last line where that is an expression, as in a notebook, or what went wrong.

    It is called inside of the sandbox, as a reward function would be, and runs there whatever it is given.
    """
    return [_output(code) for code in completions]


def _output(code: str) -> str:
    printed, error = _Kept(), ""
    names = {"__name__": "__main__"}
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            tree = ast.parse(code, "program")
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "program", "exec"), names)
            if isinstance(last, ast.Expr):
                value = eval(compile(ast.Expression(last.value), "program", "eval"), names)
                if value is not None:
                    print(repr(value))
        except SystemExit as ended:
            error = ended.code[:_LONGEST_ERROR] if isinstance(ended.code, str) else ""
        except BaseException as raised:
            frames = [f for f in traceback.extract_tb(raised.__traceback__) if f.filename == "program"]
            place = f" (line {frames[-1].lineno})" if frames else ""
            error = f"{type(raised).__name__}: {raised}"[:_LONGEST_ERROR] + place
    more = f" ... ({printed.forgotten:,} more characters)\n" if printed.forgotten else ""
    return printed.getvalue() + more + error


class Programs:
    """Runs programs, each in a sandbox of its own, at most ``processes`` at a time.

    Args:
        timeout_s: seconds that a program may take; then it is killed.
    """

    def __init__(self, processes: int, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._pool = ProcessPool({"python": {"function": f"{__name__}:run", "arguments": {}}}, processes, {"python"})

    def __call__(self, code: str) -> str:
        """What ``run`` says. Raises CallTimedOut, or RuntimeError where the sandbox ended the program."""
        try:
            answer: Any = self._pool.call("python", {"completions": [code]}, self.timeout_s)
            return str(answer[0])
        except CallRaised as ended:
            raise RuntimeError(f"the program gave {ended}") from ended
        except (TypeError, LookupError) as other:  # a program can forge its reply
            raise RuntimeError("the program gave something else than text") from other

    def close(self) -> None:
        """End the processes."""
        self._pool.close()
