"""Rows of several turns: what an engine asks when a row's turn has ended, and how long it waits for the answer.

An engine that keeps what it computed for a row from turn to turn is a ``TurnEngine``. Any other plays by ``serve_by_prefixes``: each turn
is a request whose prompt is the whole of the row's tokens so far. Both name a turn's randomness alike, so that their tokens are the same
as far as their numbers are.

The rule of waiting (``Patience``). Where turns ended, their answers are awaited for ``GRACE_S``. Rows that are answered by then sample on
at once; a row that is not leaves the batch, and comes back when it is answered, so that a slow tool holds nobody up. Of a call's time at
most ``LOST_SHARE`` is spent on waiting in vain: beyond that nobody is waited for. So what is sampled together, and with it the last bit
of every number, does not depend on time as long as tools answer within the grace. With ``grace_s`` None it never does: all are awaited.

An engine that plays in rounds takes about as long for one row as for many. Where nobody was answered within the grace, the first
answer begins no round of its own: others are awaited with it, for ``ROUND_SHARE`` of the time that the last round took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

from groupwise.engines.base import Engine, Progress, SampleRequest, Watch
from groupwise.types import Completion, Prompt

__all__ = ["GRACE_S", "Answer", "Patience", "TurnEngine", "Turns", "serve_by_prefixes", "turn_name"]

GRACE_S = 0.2
"""Seconds for which answers are awaited before rows leave."""
LOST_SHARE = 0.05
"""Most of a call's time that is spent on waiting for answers that came later all the same."""
ROUND_SHARE = 0.5
"""Of the time of a round, how long further answers are awaited before a round begins where no row is left to sample meanwhile."""
_LOOK_EVERY_S = 0.1

Answer = Future[Sequence[int] | None]
"""The tokens that a row is given before its next turn, at least one; None where it has ended."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Who answers the turns of a request."""

    answer: Callable[[int, Completion], Answer]
    """Called with a prompt's place and a turn of one of its rows, in the engine's thread. It returns at once; the answer may take its time.

    A row has ``SamplingSettings.max_tokens`` in all, what it is given included. What it is given leaves room for a token at least. Of a
    turn that is longer than its row has room for, the rest is nobody's."""
    grace_s: float | None = GRACE_S
    """See the rule of waiting above."""


@runtime_checkable
class TurnEngine(Protocol):
    """An engine whose rows come back."""

    def serve_turns(self, request: SampleRequest, turns: Turns, on_progress: Progress | None = None) -> None:
        """Sample every row turn by turn until its answer is None. Progress counts rows that have ended, and sampled tokens.

        A row's first turn is what ``Engine.serve`` would sample. A later one has the randomness of ``turn_name``.
        """


def turn_name(problem_id: str, sample: int, turn: int) -> tuple[str, int]:
    """Problem and sample by which the randomness of a row's turn is named; ``turn`` counts from 0."""
    return (f"{problem_id}\x1fsample={sample}\x1fturn={turn}", 0) if turn else (problem_id, sample)


class Patience:
    """Waits for the answers of one call, by the rule above. ``look`` is called now and then meanwhile, and may raise."""

    def __init__(self, grace_s: float | None, look: Callable[[], None]) -> None:
        self._grace_s, self._look = grace_s, look
        self._begun, self._lost_s = time.monotonic(), 0.0

    def grace(self, answers: Collection[Answer]) -> None:
        """Wait until all are there, or their grace is over."""
        started = time.monotonic()
        hopeful = self._lost_s <= LOST_SHARE * (started - self._begun)
        grace_s = self._grace_s if hopeful or self._grace_s is None else 0.0
        if not self._wait(answers, grace_s, ALL_COMPLETED):
            self._lost_s += time.monotonic() - started

    def first(self, answers: Collection[Answer], round_s: float = 0.0) -> None:
        """Wait until one is there: nothing else is left to do. ``round_s``: seconds of the engine's last round, if it plays in such."""
        self._wait(answers, None, FIRST_COMPLETED)
        if round_s:
            self._wait(answers, max(self._grace_s or 0.0, ROUND_SHARE * round_s), ALL_COMPLETED)

    def _wait(self, answers: Collection[Answer], limit_s: float | None, until: str) -> bool:
        """Whether what was waited for is there."""
        started = time.monotonic()
        while True:  # short waits, so that signals and ``look`` get through
            left = _LOOK_EVERY_S if limit_s is None else min(_LOOK_EVERY_S, started + limit_s - time.monotonic())
            there, late = wait(answers, max(0.0, left), until)
            if not late or (there and until == FIRST_COMPLETED):
                return True
            if left <= 0:
                return False
            self._look()


@dataclass(eq=False)
class _Prefix:
    """A row of an engine that knows no turns."""

    place: int
    prompt: Prompt
    sample: int
    turn: int = 0
    tokens: list[int] = field(default_factory=list)

    def so_far(self) -> Prompt:
        name, _ = turn_name(self.prompt.problem.id, self.sample, self.turn)
        problem = replace(self.prompt.problem, id=name)
        return Prompt(problem, "", (*self.prompt.token_ids, *self.tokens), None, self.prompt.occurrence)


def _watch_of(request: SampleRequest, rows: Sequence[tuple[int, int]]) -> Watch | None:
    """``request.watch`` for another request, whose prompts are ``rows`` of this one by place and sample, each with a single sample."""
    watch = request.watch
    return None if watch is None else lambda index, _, token_ids, logprobs: watch(*rows[index], token_ids, logprobs)


def serve_by_prefixes(engine: Engine, request: SampleRequest, turns: Turns, on_progress: Progress | None = None) -> None:
    """Like ``TurnEngine.serve_turns``, by any engine: in rounds, each of which computes the whole of its rows again.

    Rows that are answered late join a later round.
    """
    ended = sampled = 0

    def progress(_: int, tokens: int) -> None:
        if on_progress is not None:
            on_progress(ended, sampled + tokens)

    patience = Patience(turns.grace_s, lambda: progress(0, 0))
    absent: dict[_Prefix, Answer] = {}
    started = time.monotonic()
    groups = engine.serve_checked(request, progress)
    round_s = time.monotonic() - started
    heard = [
        (_Prefix(i, prompt, sample), replace(turn, sample=sample))
        for i, (prompt, group) in enumerate(zip(request.prompts, groups, strict=True))
        for sample, turn in enumerate(group)
    ]
    while heard or absent:
        for row, turn in heard:
            sampled += len(turn.token_ids)
            row.tokens += turn.token_ids
            absent[row] = turns.answer(row.place, turn)
        patience.grace([absent[row] for row, _ in heard])
        back = []
        for row in [row for row, answer in absent.items() if answer.done()]:
            given = absent.pop(row).result()
            if given is None:
                ended += 1
            else:
                row.tokens += given
                row.turn += 1
                back.append(row)
        progress(0, 0)
        heard = []
        if back:
            limits = [request.limit_of(row.place) - len(row.tokens) for row in back]
            settings, prompts = replace(request.settings, max_tokens=max(limits)), [row.so_far() for row in back]
            watch = _watch_of(request, [(row.place, row.sample) for row in back])
            further = SampleRequest(prompts, 1, settings, request.seed, request.scope, watch, limits=limits)
            started = time.monotonic()
            sampled_again = engine.serve_checked(further, progress)
            round_s = time.monotonic() - started
            heard = [(row, replace(turn, sample=row.sample)) for row, (turn,) in zip(back, sampled_again, strict=True)]
        elif absent:
            patience.first(absent.values(), round_s)
