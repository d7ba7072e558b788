"""Call reward functions without trusting them: they may raise, hang, or be ``async``.

``plan_calls`` lists a batch's calls, `RewardArguments` what each is given, and `RewardCaller` makes them. Plain functions run in turn;
one with a time limit has a thread of its own, which is daemonic: one that hangs is left behind, later calls get a new thread, and the
interpreter can still exit. ``async`` functions run side by side in one event loop for the life of the process, so that a client object
made at import time keeps its connections from call to call; there a time limit really cancels. Isolated ones run in processes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import copy
import inspect
import queue
import random
import threading
import traceback
from collections.abc import Callable, Container, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from groupwise.errors import RewardError
from groupwise.importing import in_one_line
from groupwise.rewards.load import LoadedReward, RewardFunction, layers
from groupwise.rewards.processes import ProcessPool
from groupwise.rewards.scores import BadResult, CallRaised, CallTimedOut, Decode, Score, StepRewards, read_scores, to_token_steps
from groupwise.types import Completion, Problem, Prompt

__all__ = [
    "Ask",
    "Background",
    "Batch",
    "Call",
    "CallRaised",
    "CallTimedOut",
    "RewardArguments",
    "RewardCaller",
    "call_with_limit",
    "is_async",
    "own_copy",
    "plan_calls",
    "require_columns",
]

Batch = Sequence[tuple[Prompt, Sequence[Completion]]]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one function, and the completions, as (group, completion), that it gives scores to."""

    reward: LoadedReward
    targets: tuple[tuple[int, int], ...]

    @property
    def groups(self) -> list[int]:
        return list(dict.fromkeys(group for group, _ in self.targets))

    def where(self, batch: Batch) -> str:
        """The subject of a sentence about this call."""
        if self.reward.scope == "batch":
            return f"reward {self.reward.name!r} on the batch of {len(self.targets)} completions"
        group, member = self.targets[0]
        which = f"completion {member} of " if self.reward.scope == "completion" else ""
        return f"reward {self.reward.name!r} on {which}problem {batch[group][0].problem.id!r}"


def plan_calls(rewards: Sequence[LoadedReward], batch: Batch, left_out: Container[int] = ()) -> Iterator[Call]:
    """Every call that the batch takes without the groups ``left_out``: those that see all of it first, then group by group, in the
    order of ``rewards``."""
    sound = [(g, completions) for g, (_, completions) in enumerate(batch) if g not in left_out]
    members = [tuple((g, m) for m in range(len(completions))) for g, completions in sound]
    for reward in rewards:
        if reward.scope == "batch" and members:
            yield Call(reward, tuple(target for group in members for target in group))
    for group in members:
        for reward in rewards:
            if reward.scope == "group":
                yield Call(reward, group)
            elif reward.scope == "completion":
                yield from (Call(reward, (target,)) for target in group)


@dataclass
class RewardArguments:
    """The keyword arguments of reward functions: the data's columns and our own."""

    answer_style: str
    max_completion_tokens: int | None = None
    """The run's limit on a completion; None where nobody said, and then it is not offered."""

    def names(self, problem: Problem) -> list[str]:
        """The keywords that a function may ask for on this problem."""
        return list(self._keywords([], list(problem.columns)))

    def keywords(self, call: Call, batch: Batch) -> dict[str, object]:
        """The call's keywords, as fresh lists with one entry per completion: a function that changes them disturbs no other.

        Our own keywords win over columns of the same name; so ``answer`` is the extracted reference, whatever the row calls so.
        """
        named = dict.fromkeys(name for group in call.groups for name in batch[group][0].problem.columns)
        columns = [name for name in named if call.reward.takes(name)]
        for group in call.groups:
            require_columns(call.reward, self.names(batch[group][0].problem))
        offered = self._keywords([(g, batch[g][0], batch[g][1][m]) for g, m in call.targets], columns)
        return call.reward.select(offered)

    def _keywords(self, chosen: Sequence[tuple[int, Prompt, Completion]], columns: Sequence[str]) -> dict[str, object]:
        offered: dict[str, object] = {name: [own_copy(p.problem.columns.get(name)) for _, p, _ in chosen] for name in columns}
        offered |= {
            "prompts": [p.text if p.messages is None else [dict(m) for m in p.messages] for _, p, _ in chosen],
            "completions": [c.text if p.messages is None else [dict(m) for m in c.messages] for _, p, c in chosen],
            "answer": [p.problem.answer for _, p, _ in chosen],
            "accepted_answers": [p.problem.accepted for _, p, _ in chosen],
            "answer_style": [self.answer_style for _ in chosen],
            "completion_ids": [list(c.token_ids) for _, _, c in chosen],
            "finish_reason": [c.finish_reason for _, _, c in chosen],
            "environment_reward": [c.reward for _, _, c in chosen],
            "calls": [[asdict(call) for call in c.calls] for _, _, c in chosen],
            "turns": [[asdict(turn) for turn in c.turns] for _, _, c in chosen],
            "group_index": [g for g, _, _ in chosen],
        }
        if self.max_completion_tokens is not None:
            offered["max_completion_tokens"] = [self.max_completion_tokens for _ in chosen]
        return offered


def own_copy(value: object) -> object:
    """A row's value, what can be changed in it copied: the row is there for all completions of the problem, functions and
    environments. Arrays and tensors too; objects of any other type are shared."""
    changes = isinstance(value, (list, tuple, dict, set, bytearray)) or hasattr(value, "__array__")
    return copy.deepcopy(value) if changes else value


def require_columns(reward: LoadedReward, offered: Sequence[str]) -> None:
    """Raise ``RewardError`` where the function needs a keyword that is not among ``offered``."""
    missing = reward.missing(offered)
    if missing:
        raise RewardError(
            f"reward {reward.name!r} needs {missing[0]!r}, but the data has no such column "
            f"(offered are {', '.join(sorted(offered))}); give the parameter a default, set it under the function's arguments, "
            "or use data with that column"
        )


Answers = list[Score | BadResult]
Ask = Callable[[int], Answers]
"""A function from a call's index among those planned to its answers, one for each target."""


class RewardCaller:
    """Calls functions and reads their scores. A call that fails gives a ``BadResult`` for each of its completions."""

    def __init__(
        self, arguments: RewardArguments, timeout_s: float | None, concurrent_calls: int, processes: ProcessPool
    ) -> None:
        self.arguments, self.timeout_s = arguments, timeout_s
        self.concurrent_calls, self.processes = concurrent_calls, processes

    @contextmanager
    def begin(
        self, calls: Sequence[Call], batch: Batch, decode: Decode | None, seeds: Sequence[int] = ()
    ) -> Generator[tuple[Ask, Callable[[int], None]]]:
        """Start the async and isolated calls. Yields two functions of a call's index: ``ask`` returns its answers, and makes a plain
        call only then; ``forget`` cancels it if it has not begun. Leaving the block cancels all that have not begun.

        ``seeds``: one for each group, from which those of isolated calls are drawn; without them, from this process's generator.
        """
        started: dict[int, Future[object]] = {}
        generators = [random.Random(f"isolated/{seed}") for seed in seeds]
        own_seeds: dict[int, int] = {}  # in the order of calls, whichever process makes one
        for index, call in enumerate(calls):
            if call.reward.isolate:
                draw = generators[call.groups[0]].getrandbits if generators else random.getrandbits
                own_seeds[index] = draw(56)

        def invoke(index: int) -> object:
            return self._invoke(calls[index], self.arguments.keywords(calls[index], batch), own_seeds.get(index))

        def ask(index: int) -> Answers:
            result = started[index].result if index in started else lambda: invoke(index)
            return _read(calls[index], result, self.timeout_s, batch, decode)

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

    def _invoke(self, call: Call, keywords: Mapping[str, object], seed: int | None) -> object:
        limit = time_limit(call, self.timeout_s)
        if call.reward.isolate:
            return self.processes.call(call.reward.name, keywords, limit, seed)
        return call_with_limit(call.reward.function, keywords, limit)


def time_limit(call: Call, timeout_s: float | None) -> float | None:
    """Seconds that the call may take: its function's own limit, or the run's."""
    return timeout_s if call.reward.takes_the_run_s_limit else call.reward.timeout_s


def _read(
    call: Call, result: Callable[[], object], timeout_s: float | None, batch: Batch, decode: Decode | None
) -> list[Score | BadResult]:
    """The call's scores, with steps in tokens; or, for every completion, what went wrong."""
    try:
        scores = read_scores(result(), [member for _, member in call.targets])
        return [_in_tokens(score, batch[g][1][m], m, decode) for score, (g, m) in zip(scores, call.targets, strict=True)]
    except CallRaised as raised:
        remedy = _SIGNALS if _wants_signals(call, raised.__cause__, timeout_s) else ""
        bad = BadResult("raised", f"{remedy}raised {raised}", raised.__cause__)
    except CallTimedOut as late:
        limit = time_limit(call, timeout_s)
        setting = "rewards.timeout_s" if call.reward.timeout_s is None else "its timeout_s"
        why = f" ({late})" if str(late) else ""
        bad = BadResult("timed_out", f"did not return within {setting} = {limit:g} seconds{why}", late)
    except BadResult as wrong:
        bad = wrong
    return [bad] * len(call.targets)


_SIGNALS = (
    "uses signals, which the main thread alone can, but functions with a time limit run in another thread: set rewards.timeout_s=null "
    "and no timeout_s of its own, or isolate: process; it "
)


def _wants_signals(call: Call, error: BaseException | None, timeout_s: float | None) -> bool:
    """Whether it failed since it was called in a thread, as math-verify's functions do. Async ones are in one whatever the limit."""
    in_thread = time_limit(call, timeout_s) is not None and not call.reward.isolate and not is_async(call.reward.function)
    return in_thread and isinstance(error, ValueError) and "signal" in in_one_line(error, longest=2000)


def _in_tokens(
    score: float | StepRewards | BadResult | None, completion: Completion, member: int, decode: Decode | None
) -> Score | BadResult:
    if not isinstance(score, StepRewards):
        return score
    steps = to_token_steps(score, completion, decode)
    return BadResult("bad_step", f"returned {steps}, for completion {member}") if isinstance(steps, str) else tuple(steps)


class Background:
    """Run calls in at most ``workers`` threads, in the order they were submitted, for the length of a ``with`` block.

    With no workers each call is made where it is submitted, at once: for code that is safe in one thread only. The threads are daemonic:
    a call that hangs does not keep Python from ending.
    """

    def __init__(self, workers: int, name: str) -> None:
        self._workers, self._name = workers, name
        self._threads = 0
        self._work: queue.SimpleQueue[tuple[Future[object], Callable[[], object]] | None] = queue.SimpleQueue()
        self._waiting: list[Future[object]] = []

    def submit(self, work: Callable[[], object]) -> Future[object]:
        """Queue a call. The future gives its result, or what it raised."""
        future: Future[object] = Future()
        if not self._workers:
            self._make(future, work)
            return future
        self._waiting.append(future)
        self._work.put((future, work))
        if self._threads < self._workers:
            self._threads += 1
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return future

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            self._make(*item)

    def _make(self, future: Future[object], work: Callable[[], object]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:  # whatever it is, the waiting thread must hear of it
            future.set_exception(error)

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *error: object) -> None:
        """Cancel queued calls; discard the results of running ones."""
        for future in self._waiting:
            future.cancel()
        for _ in range(self._threads):
            self._work.put(None)


def call_with_limit(function: RewardFunction, keywords: Mapping[str, object], timeout_s: float | None) -> Any:
    """``function(**keywords)``, what it yields as a list, or ``CallRaised`` / ``CallTimedOut``.

    Without a limit a plain function runs in the caller's thread, where code that needs the main thread (signals) works too.
    """
    if is_async(function):
        return _call_async(function, keywords, timeout_s)
    if timeout_s is None:
        try:
            return _run(function, keywords)
        except (Exception, SystemExit) as error:
            raise CallRaised(_describe_error(error)) from error
    return _call_in_thread(function, keywords, timeout_s)


def _run(function: RewardFunction, keywords: Mapping[str, object]) -> object:
    result = function(**keywords)
    return list(result) if isinstance(result, Iterator) else result  # a generator's code runs here, within the limit


def is_async(function: RewardFunction) -> bool:
    """Whether calling it gives a coroutine: an ``async def``, an object whose ``__call__`` is one, or a partial of either."""
    return any(map(inspect.iscoroutinefunction, layers(function)))


def _call_in_thread(function: RewardFunction, keywords: Mapping[str, object], timeout_s: float) -> object:
    outcome: concurrent.futures.Future[object] = concurrent.futures.Future()

    def work() -> None:
        try:
            outcome.set_result(_run(function, keywords))
        except BaseException as error:  # whatever it is, the waiting thread must hear of it
            outcome.set_exception(error)

    threading.Thread(target=work, name=f"reward {getattr(function, '__name__', 'function')}", daemon=True).start()
    return _await(outcome, timeout_s)


def _call_async(function: RewardFunction, keywords: Mapping[str, object], timeout_s: float | None) -> object:
    async def work() -> object:
        try:
            return await function(**keywords)
        except (Exception, SystemExit) as error:
            # Wrapped here already: a SystemExit would end the loop, and asyncio passes on a TimeoutError without its traceback.
            raise CallRaised(_describe_error(error)) from error

    loop = _LOOP.running()
    outcome = asyncio.run_coroutine_threadsafe(work(), loop)
    try:
        return _await(outcome, timeout_s)
    except CallTimedOut:
        outcome.cancel()
        if _LOOP.replace_if_blocked(loop):
            raise CallTimedOut("some async function held up all others by computing or sleeping without await") from None
        raise


def _await(outcome: concurrent.futures.Future[object], timeout_s: float | None) -> object:
    # wait() and not result(): a function's own TimeoutError (a socket's, say) must not pass for ours.
    done, _ = concurrent.futures.wait([outcome], timeout=timeout_s)
    if not done:
        raise CallTimedOut
    try:
        error = outcome.exception()  # not by raising it: what a signal raises here is not the function's, and ends the step
    except concurrent.futures.CancelledError as cancelled:
        error = cancelled
    if error is None:
        return outcome.result()
    if isinstance(error, (CallRaised, KeyboardInterrupt)):
        raise error
    raise CallRaised(_describe_error(error)) from error  # a panic of Rust code too, which is no Exception


def _describe_error(error: BaseException) -> str:
    """``ValueError: too short (rewards.py, line 12)``: where the user should look first."""
    told = in_one_line(error)
    frames = traceback.extract_tb(error.__traceback__)
    ours = [i for i, frame in enumerate(frames) if frame.filename == __file__]
    # The frame below our last one is the reward function itself; deeper ones are usually a library's.
    place = frames[ours[-1] + 1 :] if ours else frames
    return f"{told} ({Path(place[0].filename).name}, line {place[0].lineno})" if place else told


class _BackgroundLoop:
    """One event loop in one daemon thread, started at the first use and replaced if a coroutine blocks it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="async rewards", daemon=True).start()
            return self._loop

    def replace_if_blocked(self, loop: asyncio.AbstractEventLoop, patience_s: float = 0.5) -> bool:
        """A coroutine that computes or sleeps without ``await`` cannot be cancelled and would hold up every later call.

        Whether there was one; it may be another than the one that was waited for.
        """
        answered = threading.Event()
        loop.call_soon_threadsafe(answered.set)
        if answered.wait(patience_s):
            return False
        with self._lock:
            if self._loop is loop:
                self._loop = None
        return True


_LOOP = _BackgroundLoop()
