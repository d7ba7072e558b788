"""The signals that ask a run for its end."""

from __future__ import annotations

import signal

__all__ = ["HANGUP", "stop_signals"]

HANGUP: signal.Signals | None = getattr(signal, "SIGHUP", None)  # Windows has none
"""The terminal was closed: its window was closed, or the connection to the machine broke."""


def stop_signals() -> list[signal.Signals]:
    """SIGTERM, SIGINT, and SIGHUP unless whoever started this process had it ignored, as nohup does."""
    heard = HANGUP is not None and signal.getsignal(HANGUP) is not signal.SIG_IGN
    return [signal.SIGTERM, signal.SIGINT, *([HANGUP] if heard and HANGUP is not None else [])]
