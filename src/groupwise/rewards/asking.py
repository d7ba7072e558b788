"""Put planned calls to reward functions: plain ones in turn, ``async`` ones side by side, isolated ones in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from groupwise.rewards.background import Background
from groupwise.rewards.calls import CallRaised, CallTimedOut, call_with_limit, is_async
from groupwise.rewards.plan import Batch, Call, Teller
from groupwise.rewards.processes import ProcessPool
from groupwise.rewards.results import BadResult, Score, read_scores

__all__ = ["Ask", "Asker"]

Answers = list[Score | BadResult]
Ask = Callable[[int], Answers]
"""The answers to a call, by its place among those planned: one for each of its targets."""


class Asker:
    """Calls functions and reads their answers. What goes wrong is an answer too: a ``BadResult`` for every completion it concerns."""

    def __init__(self, teller: Teller, timeout_s: float | None, concurrent_calls: int, processes: ProcessPool) -> None:
        self.teller, self.timeout_s = teller, timeout_s
        self.concurrent_calls, self.processes = concurrent_calls, processes

    @contextmanager
    def begin(self, calls: Sequence[Call], batch: Batch) -> Generator[tuple[Ask, Callable[[int], None]]]:
        """Start what can run side by side. Gives the function that answers, which makes plain calls when they are asked for, and one
        that says that nobody will ask for a call. Leaving drops what has not begun.
        """
        started: dict[int, Future[Any]] = {}

        def invoke(index: int) -> Any:
            return self._invoke(calls[index], self.teller.keywords(calls[index], batch))

        def ask(index: int) -> Answers:
            return _read(calls[index], started[index].result if index in started else lambda: invoke(index), self.timeout_s)

        def forget(index: int) -> None:
            if index in started:
                started[index].cancel()

        with (
            Background(self.concurrent_calls, "async reward") as side_by_side,
            Background(self.processes.size, "isolated reward") as apart,
        ):
            for index, call in enumerate(calls):
                if call.reward.isolate:
                    started[index] = apart.submit(lambda index=index: invoke(index))  # type: ignore[misc]
                elif is_async(call.reward.function):
                    started[index] = side_by_side.submit(lambda index=index: invoke(index))  # type: ignore[misc]
            yield ask, forget

    def _invoke(self, call: Call, keywords: Mapping[str, Any]) -> Any:
        limit = time_limit(call, self.timeout_s)
        if call.reward.isolate:
            return self.processes.call(call.reward.name, keywords, limit)
        return call_with_limit(call.reward.function, keywords, limit)


def time_limit(call: Call, timeout_s: float | None) -> float | None:
    """Seconds that the call may take: its function's own limit, or the run's.

    Our own functions need none: they bound their own work, and a group of slow comparisons is no reason to stop a run.
    """
    if call.reward.timeout_s is not None:
        return call.reward.timeout_s
    return None if call.reward.bounded and not call.reward.isolate else timeout_s


def _read(call: Call, invoke: Callable[[], Any], timeout_s: float | None) -> Answers:
    try:
        return read_scores(invoke(), [m for _, m in call.targets])
    except CallRaised as raised:
        bad = BadResult("raised", f"raised {raised}", raised.__cause__)
    except CallTimedOut as late:
        limit = time_limit(call, timeout_s)
        setting = "rewards.timeout_s" if call.reward.timeout_s is None else "its timeout_s"
        why = f" ({late})" if str(late) else ""
        bad = BadResult("timed_out", f"did not return within {setting} = {limit:g} seconds{why}", late)
    except BadResult as wrong:
        bad = wrong
    return [bad] * len(call.targets)
