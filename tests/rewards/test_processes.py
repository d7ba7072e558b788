"""Isolated functions: whatever they do, the run goes on. Async ones: side by side, but not more than were asked for."""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from groupwise.config.schema import RewardFunctionConfig, RewardsConfig
from groupwise.data.algebra import BUDGET_S
from groupwise.distributed import World
from groupwise.errors import RewardError
from groupwise.metrics import values
from groupwise.rewards import RewardSuite, calling, sandbox
from groupwise.rewards.calling import Background
from groupwise.rewards.processes import _Worker
from groupwise.rollout import Sampled, score
from groupwise.training.seeds import seed_generators
from groupwise.types import number_occurrences
from tests.waiting import comes

from .conftest import make_completions, make_prompt

MISCHIEF = '''
"""One reward function that does what the completion says."""
import os, re, subprocess, sys, time
import numpy as np

def obey(completions, folder=None, **columns):
    text = completions[0][0]["content"]
    if text == "loop":
        while True:
            pass
    if text == "hang in C":
        re.match(r"(a+)+$", "a" * 40 + "b")  # holds the interpreter's lock for years
    if text == "begets":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        open(os.path.join(folder, "child"), "w").write(str(child.pid))
    if text == "sleeps":
        time.sleep(600)
    if text == "crash":
        os.kill(os.getpid(), 11)
    if text == "exit":
        os._exit(3)
    if text == "raise":
        raise ValueError("no")
    if text == "print":
        print("x" * 100_000)
        os.write(1, b"raw")
        assert sys.stdin.read() == ""
    if text == "array":
        return np.array([0.5], dtype=np.float32)
    if text == "masked":
        return np.ma.array([0.5], mask=[1])
    if text == "strange":
        return [lambda: 0]
    if text == "pid":
        return [float(os.getpid())]
    return [1.0]
'''


@pytest.fixture
def mischief(reward_file, tmp_path):
    """``mischief(timeout_s=..., processes=...)``: a suite that skips failures, one completion to a call."""
    path, suites = reward_file(MISCHIEF), []

    def make(timeout_s=60.0, scope="completion", on_error="skip", **settings):
        entry = RewardFunctionConfig(
            function=f"{path}:obey", isolate=True, timeout_s=timeout_s, scope=scope, arguments={"folder": str(tmp_path)}
        )
        suites.append(RewardSuite.from_config(RewardsConfig(functions=[entry], on_error=on_error, **settings), "xml"))
        return suites[-1]

    yield make
    for suite in suites:
        suite.close()


CHANCE = """
import random
import numpy as np
import torch

def chance(completions, **columns):
    return [random.random() + np.random.rand() + torch.rand(1).item() for _ in completions]
"""


@pytest.mark.parametrize("isolate", ["process", "sandbox"])
def test_what_it_draws_follows_from_the_run_s_seed_and_the_step(reward_file, isolate):
    """Whichever process makes a call; and calls differ from each other, though each in a sandbox begins from the same state."""
    if isolate == "sandbox" and sandbox.refusal():
        pytest.skip(f"no sandbox on this machine: {sandbox.refusal()}")
    entry = RewardFunctionConfig(function=f"{reward_file(CHANCE)}:chance", isolate=isolate, scope="completion")
    two, one = (RewardSuite.from_config(RewardsConfig(functions=[entry], processes=n), "xml") for n in (2, 1))

    def drawn(suite, seed, number):
        seed_generators(seed, number)
        return [reward for group in step(suite, *"abcdef").groups for reward in group.rewards]

    try:
        first = drawn(two, 3, 5)
        assert len(set(first)) == len(first) == 6
        assert drawn(one, 3, 5) == first
        assert not set(first) & {*drawn(two, 3, 6), *drawn(one, 4, 5)}
        assert drawn(two, 3, 5) == first, "whatever was drawn before"
    finally:
        two.close()
        one.close()


@pytest.mark.parametrize("isolate", [False, "process"])
def test_what_a_group_draws_does_not_depend_on_who_scores_which(reward_file, isolate):
    """Each process of a run scores its share: shares that draw the same numbers would be noise of fewer groups than there are."""
    entry = RewardFunctionConfig(function=f"{reward_file(CHANCE)}:chance", isolate=isolate)
    prompts = [replace(make_prompt(), problem=replace(make_prompt().problem, id=name)) for name in "pqrs"]
    prompts = number_occurrences([*prompts, prompts[0]])
    suite = RewardSuite.from_config(RewardsConfig(functions=[entry]), "xml")

    def drawn(*places, seed=7, step=2, refill=0):
        share = Sampled([(place, tuple(make_completions("a", "b"))) for place in places], 0.0)
        return [group.rewards for group in score(prompts, share, suite, World(), seed=seed, step=step, refill=refill).groups]

    try:
        whole = drawn(0, 1, 2, 3, 4)
        assert len({number for numbers in whole for number in numbers}) == 10
        assert [*drawn(0, 2), *drawn(1, 3, 4)] == [whole[place] for place in (0, 2, 1, 3, 4)]
        others = [*drawn(0, seed=8), *drawn(0, step=3), *drawn(0, refill=1)]
        assert len({*others, whole[0]}) == 4
    finally:
        suite.close()


def test_what_a_group_draws_does_not_depend_on_what_looks_at_all(reward_file):
    """A function of the whole batch is called first, and draws as many numbers as there are completions."""
    file = reward_file(f"{CHANCE}\ndef of_all(completions, **columns):\n    return chance(completions)\n")
    entries = [RewardFunctionConfig(function=f"{file}:of_all", scope="batch"), RewardFunctionConfig(function=f"{file}:chance")]
    suite = RewardSuite.from_config(RewardsConfig(functions=entries), "xml")
    batch = [(make_prompt(), make_completions("a", "b")) for _ in range(2)]
    try:
        alone, beside = (suite.score_all(some, seeds=[5, 6][: len(some)]).groups[0] for some in (batch[:1], batch))
    finally:
        suite.close()
    assert alone.components["chance"] == beside.components["chance"]


def step(suite, *texts):
    return suite.score_all([(make_prompt(), make_completions(text)) for text in texts])


def call_counts(scoring):
    return {name: value for name, value in values(scoring.metrics).items() if name.startswith("calls/")}


def is_alive(pid):
    """A zombie is not: whoever inherits it need not be quick to bury it."""
    try:
        os.kill(pid, 0)
        return sys.platform != "linux" or "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (ProcessLookupError, FileNotFoundError):
        return False


@pytest.fixture
def limits_only_for(monkeypatch):
    """``limits_only_for("loop", ...)``: calls about other completions have all the time they need, however busy the machine is."""

    def change(*texts):
        ask = _Worker.ask

        def ask_with_patience(worker, name, keywords, timeout_s, seed):
            assert timeout_s is not None
            text = pickle.loads(keywords)["completions"][0][0]["content"]
            return ask(worker, name, keywords, timeout_s if text in texts else None, seed)

        monkeypatch.setattr(_Worker, "ask", ask_with_patience)

    return change


@pytest.mark.slow
def test_calls_that_hang_are_killed_and_the_run_goes_on(mischief, limits_only_for):
    limits_only_for("loop", "hang in C", "sleeps")
    suite = mischief(timeout_s=1.0, processes=2)
    scoring = step(suite, "fine", "loop", "hang in C", "sleeps", "fine")
    assert [group.rewards for group in scoring.groups] == [(1.0,), (1.0,)]
    assert [failure.kind for failure in scoring.failures] == ["timed_out"] * 3
    said = (
        f"reward 'obey' on completion 0 of problem '{make_prompt().problem.id}' did not return within its timeout_s = 1 seconds"
    )
    assert scoring.failures[0].message == said
    assert call_counts(scoring) == {"calls/killed_obey": 3, "calls/failed_obey": 3}
    assert call_counts(step(suite, "fine")) == {"calls/killed_obey": 0, "calls/failed_obey": 0}


def test_what_a_killed_process_has_started_ends_with_it(mischief, limits_only_for, tmp_path):
    limits_only_for("sleeps")
    suite = mischief(timeout_s=0.2, processes=1)
    scoring = step(suite, "begets", "sleeps")
    assert [failure.kind for failure in scoring.failures] == ["timed_out"]
    child = int((tmp_path / "child").read_text())
    assert comes(lambda: not is_alive(child)), "it is killed, but not waited for"


def test_what_ends_or_fills_its_process_is_told_apart_from_what_works(mischief):
    suite = mischief(processes=1)
    scoring = step(suite, "crash", "exit", "raise", "strange", "masked", "print", "array")
    assert [group.rewards for group in scoring.groups] == [(1.0,), (0.5,)]
    said = [failure.message.partition(" raised ")[2] for failure in scoring.failures]
    assert said[0] == "nothing, but its process ended with signal 11"
    assert said[1] == "nothing, but its process ended with status 3"
    assert said[2].startswith("ValueError: no (mine.py, line ")
    assert "while its result was sent" in said[3]
    assert said[4] == "TypeError: a masked number is no score while its result was sent"
    assert call_counts(scoring) == {"calls/killed_obey": 2, "calls/failed_obey": 5}


def test_a_process_is_used_again_and_ends_with_the_suite(mischief):
    suite = mischief(processes=1)
    pids = {group.rewards[0] for group in step(suite, "pid", "pid", "pid").groups}
    assert len(pids) == 1
    pid = int(pids.pop())
    assert pid != os.getpid()
    assert is_alive(pid)
    suite.close()
    assert not is_alive(pid)
    assert int(step(suite, "pid").groups[0].rewards[0]) != pid  # closed for now, not for ever


PRINTS = """
import time
print("imported", end=" ")

def prints(completions, **columns):
    text = completions[0][0]["content"]
    print("scored", text, end="" if text == "short" else "\\n")
    if text == "late":
        time.sleep(600)
    return [1.0]
"""


@pytest.mark.parametrize("isolate", ["process", "sandbox"])
def test_what_a_function_prints_is_shown(reward_file, isolate, capfd, monkeypatch, limits_only_for):
    if isolate == "sandbox" and sandbox.refusal():
        pytest.skip(f"no sandbox on this machine: {sandbox.refusal()}")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    limits_only_for("late")
    entry = RewardFunctionConfig(function=f"{reward_file(PRINTS)}:prints", isolate=isolate, scope="completion", timeout_s=2.0)
    suite = RewardSuite.from_config(RewardsConfig(functions=[entry], processes=1, on_error="skip"), "xml")
    try:
        scoring = step(suite, "short", "late")
    finally:
        suite.close()
    assert [group.rewards for group in scoring.groups] == [(1.0,)]
    printed = capfd.readouterr().err
    assert [printed.count(said) for said in ("imported", "scored short", "scored late\n")] == [1, 1, 1], printed


def test_killing_a_process_again_closes_nobody_else_s_file(reward_file):
    worker = _Worker({"f": {"function": f"{reward_file(PRINTS)}:prints"}}, sandbox=False)
    assert worker.kill() is not None
    reader, writer = os.pipe()  # which takes the number that is free again
    worker.kill()
    os.close(reader)
    os.close(writer)


def test_with_on_error_stop_a_late_call_ends_the_run(mischief):
    with pytest.raises(RewardError, match=r"did not return within its timeout_s = 0.5 seconds; make it faster"):
        step(mischief(timeout_s=0.5, on_error="stop"), "loop")


def test_keywords_that_cannot_be_sent_are_told(mischief):
    suite = mischief()
    prompt = make_prompt(columns={"lock": threading.Lock()})
    scoring = suite.score_all([(prompt, make_completions("fine"))])
    assert "its keywords cannot be sent to a process" in scoring.failures[0].message


def test_keywords_are_pickled_once(mischief):
    pickled = []

    class Counted:
        def __reduce__(self):
            pickled.append(self)
            return int, ()

    scoring = mischief().score_all([(make_prompt(columns={"counted": Counted()}), make_completions("fine"))])
    assert len(scoring.groups) == 1
    assert len(pickled) == 1


def test_a_function_that_no_process_could_find_is_refused_before_the_run():
    entry = RewardFunctionConfig(function="mine", isolate=True)
    with pytest.raises(RewardError, match="'mine' is isolated, but a new process could not find it: put it into a file"):
        RewardSuite.from_config(RewardsConfig(functions=[entry]), "xml", {"mine": lambda completions: [0.0]})


def test_a_file_that_a_new_process_cannot_import_is_told_before_the_first_call(reward_file):
    path = reward_file(
        f"import os\nif os.getpid() != {os.getpid()}:\n    raise OSError('not here')\ndef f(completions):\n    return [0.0]\n"
    )
    entry = RewardFunctionConfig(function=f"{path}:f", isolate=True)
    suite = RewardSuite.from_config(RewardsConfig(functions=[entry]), "xml")
    with pytest.raises(RewardError, match=r"gave an error when its process was started: RewardError: .* OSError: not here"):
        suite.load()


def test_loading_starts_a_first_process_and_only_for_isolated_functions(mischief):
    suite = mischief(processes=2)
    suite.load()
    suite.load()
    assert len(suite._processes._alive) == 1
    assert call_counts(step(suite, "fine")) == {"calls/killed_obey": 0, "calls/failed_obey": 0}
    plain = async_suite(lambda completions: [1.0])
    plain.load()
    assert not plain._processes._alive


def test_loading_again_after_the_end_starts_anew(mischief):
    suite = mischief()
    suite.load()
    suite.close()
    suite.load()
    (worker,) = suite._processes._alive
    assert worker.process.poll() is None


def test_a_process_that_the_system_cannot_start_is_a_failed_call(mischief, monkeypatch):
    def refuses(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    suite = mischief()
    opened = len(os.listdir("/dev/fd"))
    with monkeypatch.context() as patch:
        patch.setattr("groupwise.rewards.processes.subprocess.Popen", refuses)
        with pytest.raises(RewardError, match=r"an error when its process was started: .*Resource temporarily unavailable"):
            suite.load()
        assert call_counts(step(suite, "fine")) == {"calls/killed_obey": 0, "calls/failed_obey": 1}
    assert len(os.listdir("/dev/fd")) == opened
    assert call_counts(step(suite, "fine")) == {"calls/killed_obey": 0, "calls/failed_obey": 0}


def test_questions_without_an_answer_may_take_as_long_in_every_call(reward_file):
    """A worker has a checker of LaTeX answers of its own: what is left of its seconds is renewed as in the run's process."""
    path = reward_file(
        "from groupwise.data import algebra\ndef left(completions):\n    found = algebra._CHECKER.left_s\n"
        "    algebra._CHECKER.left_s -= 20\n    return [found] * len(completions)\n"
    )
    entry = RewardFunctionConfig(function=f"{path}:left", isolate=True)
    suite = RewardSuite.from_config(RewardsConfig(functions=[entry], processes=1), "xml")
    assert [suite.score(make_prompt(), make_completions("a")).rewards for _ in range(3)] == [(BUDGET_S,)] * 3
    suite.close()


def test_a_function_of_a_module_and_a_built_in_one_can_be_isolated_too():
    from groupwise.rewards.functions import length

    entries = [
        RewardFunctionConfig(function="mine", isolate=True, arguments={"target": 4}),
        RewardFunctionConfig(function="keyword", isolate=True, arguments={"words": ["abcd"]}),
    ]
    suite = RewardSuite.from_config(RewardsConfig(functions=entries, processes=1), "xml", {"mine": length})
    group = suite.score(make_prompt(), make_completions("abcd", "abcdef"))
    assert group.components == {"mine": (0.0, -0.5), "keyword": (1.0, 0.0)}
    suite.close()


# --- async --------------------------------------------------------------------------------------------------------------


def async_suite(function, scope="completion", **settings):
    entry = RewardFunctionConfig(function="judge", scope=scope, timeout_s=settings.pop("limit", None))
    return RewardSuite.from_config(RewardsConfig(functions=[entry], **settings), "xml", {"judge": function})


class Meeting:
    """An async judge that returns only when ``size`` calls are under way together."""

    def __init__(self, size):
        self.size, self.present, self.most, self.complete = size, 0, 0, None

    async def __call__(self, completions):
        if self.complete is None:
            self.complete = asyncio.Event()
        self.present += 1
        self.most = max(self.most, self.present)
        if self.present >= self.size:
            self.complete.set()
        await self.complete.wait()
        await asyncio.sleep(0.01)
        self.present -= 1
        return [float(len(completions[0][0]["content"]))]


def test_async_calls_run_side_by_side_over_groups_and_keep_their_order():
    meeting = Meeting(size=6)
    suite = async_suite(meeting, limit=60.0)
    groups = suite.score_all(
        [(make_prompt(), make_completions("a", "bb")), (make_prompt(), make_completions("ccc", "d", "", "ff"))]
    )
    assert [group.rewards for group in groups.groups] == [(1.0, 2.0), (3.0, 1.0, 0.0, 2.0)]
    assert meeting.most == 6


def test_no_more_async_calls_run_than_were_asked_for():
    meeting = Meeting(size=3)
    step(async_suite(meeting, concurrent_calls=3, limit=60.0), *"abcdefgh")
    assert meeting.most == 3


def test_a_bound_on_async_calls_is_noted_where_there_are_none():
    async def judge(completions):
        return [1.0]

    said = ["rewards.concurrent_calls=3 has no effect here: no reward function is async"]
    assert async_suite(lambda completions: [1.0], concurrent_calls=3).notes() == said
    assert async_suite(judge, concurrent_calls=3).notes() == []


@pytest.mark.parametrize(
    ("entry", "noted"),
    [
        ({"function": "judge"}, False), ({"function": "accuracy", "isolate": True}, False),
        ({"function": "accuracy"}, True), ({"function": "judge", "timeout_s": 3}, True),
    ],
)  # fmt: skip
def test_a_time_limit_that_holds_for_no_function_is_noted(entry, noted):
    config = RewardsConfig(functions=[RewardFunctionConfig(**entry)], timeout_s=5)
    extra = {"judge": lambda completions: [1.0]} if entry["function"] == "judge" else {}
    said = ["rewards.timeout_s=5 has no effect here: it is for your own functions without a timeout_s"]
    assert RewardSuite.from_config(config, "xml", extra).notes() == said * noted


def test_an_async_call_has_its_own_time_limit_that_waiting_does_not_use_up(monkeypatch):
    """The clock of a call starts when it has a place: no more run than there are places, each with the whole limit."""
    call, lock, limits, running, most = calling._call_async, threading.Lock(), [], 0, 0

    async def judge(completions):
        await (asyncio.Event().wait() if completions[0][0]["content"] == "slow" else asyncio.sleep(0))
        return [1.0]

    def timed(function, keywords, timeout_s):
        nonlocal running, most
        with lock:
            running += 1
            limits.append(timeout_s)
            most = max(most, running)
        try:  # only the one that never ends is short of time, however busy the machine is
            return call(function, keywords, timeout_s if keywords["completions"][0][0]["content"] == "slow" else None)
        finally:
            with lock:
                running -= 1

    monkeypatch.setattr(calling, "_call_async", timed)
    scoring = step(async_suite(judge, concurrent_calls=2, limit=0.2, on_error="skip"), *["a"] * 12, "slow", "b")
    assert len(scoring.groups) == 13
    assert [failure.kind for failure in scoring.failures] == ["timed_out"]
    assert limits == [0.2] * 14
    assert most <= 2


def test_after_a_failure_that_stops_the_run_no_further_call_begins():
    """The second call may have begun before the first was heard of; it is held until the run has ended."""
    begun, gate = [], threading.Event()

    async def judge(completions):
        begun.append(0)
        if len(begun) > 1:
            gate.wait(120)
        raise ValueError("no")

    with pytest.raises(RewardError, match="raised ValueError: no"):
        step(async_suite(judge, concurrent_calls=1), *["a"] * 50)
    gate.set()
    for thread in threading.enumerate():
        if thread.name == "async reward":
            thread.join(120)
    assert len(begun) <= 2


def test_a_background_begins_in_order_and_drops_what_has_not_begun():
    order, begun, gate = [], threading.Event(), threading.Event()

    def work(i):
        order.append(i)
        begun.set()
        assert gate.wait(120)
        return i

    with Background(1, "test") as background:
        futures = [background.submit(lambda i=i: work(i)) for i in range(5)]
        assert begun.wait(120)
    gate.set()
    assert futures[0].result(120) == 0
    assert all(future.cancelled() for future in futures[1:])
    assert order == [0]
