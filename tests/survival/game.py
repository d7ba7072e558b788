"""An environment whose episodes last some turns, and which ends its own process in the middle of one when it is told to."""

from __future__ import annotations

import os
import signal

__all__ = ["LAST", "Talk"]

LAST: dict[str, int | None] = {"turn": None}
"""After so many turns of all its episodes a process kills itself; set before it is forked. None: never."""
TURNS = {"played": 0}


class Talk:
    """Three turns, each answered with a number that the problem's seed and what was said decide; lower-case letters earn."""

    def reset(self, seed: int, **row: object) -> str:
        self.state, self.turn = seed, 0
        return f" Say something about {seed % 7}."

    def step(self, text: str) -> tuple[str, float, bool, dict[str, object]]:
        TURNS["played"] += 1
        if TURNS["played"] == LAST["turn"]:
            os.kill(os.getpid(), signal.SIGKILL)
        self.turn += 1
        self.state = (self.state * 31 + sum(map(ord, text))) % 1009
        return str(self.state), sum(map(str.islower, text)) / 100, self.turn == 3, {}
