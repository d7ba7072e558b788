"""math-verify behind a worker process: right on real cases, and never late, on any thread."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from groupwise.data import algebra
from groupwise.data.answers import grade
from groupwise.data.latex import latex_equivalent, latex_failures, too_expensive
from groupwise.errors import UncheckedAnswerError
from tests.waiting import takes_linear_time

LONG_S = 120.0
"""More than any answer takes, however busy the machine is."""


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        (r"\frac{2}{4}", "0.5", True),
        ("x=5", "5", True),
        (r"\sqrt{25}", "5", True),
        ("6-5i", "-5i+6", True),
        (r"\left(3,\frac{\pi}{2}\right)", r"(3, \pi/2)", True),
        (r"2\sqrt{3}", r"\sqrt{12}", True),
        ("x^2+2x+1", "(x+1)^2", True),
        (r"\text{Evelyn}", "Evelyn", True),
        (r"$\frac12$", r"\dfrac{1}{2}", True),
        ("p - q", "q - p", False),
        ("1,2", "12", False),
        (r"\frac{1}{3}", "0.5", False),
        ("", "5", False),
        ("}{", "5", False),
        ("\x00", "5", False),
        ("a line\nbreak", "5", False),
    ],
)
def test_equivalence(answer: str, reference: str, equal: bool) -> None:
    assert latex_equivalent(answer, reference, timeout_s=LONG_S) is equal


def test_it_works_on_other_threads() -> None:
    verdicts: dict[int, bool] = {}

    def ask(number: int) -> None:
        verdicts[number] = latex_equivalent(rf"\sqrt{{{number**2}}} + 1", str(number + 1 + number % 2), timeout_s=LONG_S)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(2, 8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert verdicts == {n: n % 2 == 0 for n in range(2, 8)}


class FakeWorker:
    """Says ``True`` to everything but ``x + 10``, on which it raises ``failure``."""

    def __init__(self, failure: type[Exception] = algebra._WorkerTimeout) -> None:
        self.failure = failure
        self.asked: list[float] = []
        """Time limits of the questions that it did not answer."""
        self.process = SimpleNamespace(poll=lambda: None)

    def ask(self, answer: str, reference: str, timeout_s: float) -> bool:
        if answer == "x + 10":
            self.asked.append(timeout_s)
            raise self.failure
        return True

    def kill(self) -> None:
        pass


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> FakeWorker:
    worker = FakeWorker()
    monkeypatch.setattr(algebra, "_CHECKER", algebra._Checker())
    monkeypatch.setattr(algebra._Checker, "_taken", lambda self: worker)
    return worker


def test_what_is_not_answered_is_asked_again_and_then_raises_and_is_counted(
    stuck: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(
        UncheckedAnswerError, match=r"no verdict on the answer 'x \+ 10' against '10 - x': it found no answer in time"
    ):
        latex_equivalent("x + 10", "10 - x", timeout_s=2.0)
    assert stuck.asked == [2.0, 6.0]
    assert latex_failures() == {"timeout": 1}
    assert "no verdict on the answer 'x + 10'" in caplog.text
    with pytest.raises(UncheckedAnswerError):
        latex_equivalent("x + 10", "10 - x", timeout_s=2.0)
    assert stuck.asked == [2.0, 6.0], "a time-out is remembered, as what it is"
    assert latex_failures() == {"timeout": 2}
    assert latex_equivalent("x + 11", "11 + x", timeout_s=2.0)


def test_once_the_budget_of_a_step_is_spent_nothing_is_asked(stuck: FakeWorker) -> None:
    algebra._CHECKER.left_s = 0.0
    for _ in range(2):
        with pytest.raises(UncheckedAnswerError, match="other questions took the 30 seconds"):
            latex_equivalent("x + 10", "11 - x", timeout_s=2.0)
    assert stuck.asked == []
    assert latex_failures() == {"spent": 2}
    algebra.renew_budget()
    with pytest.raises(UncheckedAnswerError, match="no answer in time"):
        latex_equivalent("x + 10", "11 - x", timeout_s=2.0)
    assert stuck.asked == [2.0, 6.0], "it was not remembered"


def test_the_second_question_takes_no_more_than_is_left(stuck: FakeWorker) -> None:
    algebra._CHECKER.left_s = 4.0
    with pytest.raises(UncheckedAnswerError):
        latex_equivalent("x + 10", "12 - x", timeout_s=2.0)
    assert stuck.asked == [2.0, pytest.approx(4.0, abs=0.5)]


def test_starting_the_worker_of_a_question_without_an_answer_counts(stuck: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def start(_: algebra._Checker) -> FakeWorker:
        now[0] += 20.0
        return stuck

    monkeypatch.setattr(algebra._Checker, "_taken", start)
    monkeypatch.setattr(algebra, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with pytest.raises(UncheckedAnswerError):
        algebra.equivalent("x + 10", "b", 2.0)
    assert algebra._CHECKER.left_s == algebra.BUDGET_S - 40.0


def test_time_without_an_answer_is_taken_from_the_budget(stuck: FakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 7.0, 7.0, 28.0])
    monkeypatch.setattr(algebra, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with pytest.raises(UncheckedAnswerError):
        algebra.equivalent("x + 10", "b", 7.0)
    assert algebra._CHECKER.left_s == algebra.BUDGET_S - 28.0


def test_a_crash_is_counted_and_not_remembered(stuck: FakeWorker) -> None:
    stuck.failure = algebra._WorkerGone
    for times in (1, 2):
        with pytest.raises(UncheckedAnswerError, match="its process ended"):
            latex_equivalent("x + 10", "10 - x")
        assert latex_failures() == {"crash": times}
        assert len(stuck.asked) == 2 * times, "asked twice each time"


def test_an_error_of_math_verify_is_remembered_and_costs_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "_CHECKER", algebra._Checker())
    assert latex_equivalent(r"\sqrt{36}+0", "6", timeout_s=LONG_S)
    (worker,) = algebra._CHECKER._idle
    replies = iter([{"error": "TypeError"}])
    monkeypatch.setattr(worker, "receive", lambda _: next(replies))
    for times in (1, 2):
        with pytest.raises(UncheckedAnswerError, match="it raised an error"):
            latex_equivalent("x + 10", "10 - x", timeout_s=LONG_S)
        assert latex_failures() == {"error": times}
    assert algebra._CHECKER._idle == [worker]


def test_no_worker_at_all_is_a_failure_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "_CHECKER", algebra._Checker())
    monkeypatch.setattr(algebra, "_Worker", lambda: (_ for _ in ()).throw(OSError("no process")))
    for _ in range(algebra.STARTS_ALLOWED + 1):
        with pytest.raises(UncheckedAnswerError, match="is the package math-verify installed"):
            latex_equivalent("x + 10", "10 - x")
    assert latex_failures() == {"unavailable": algebra.STARTS_ALLOWED + 1}


BOMBS = [
    "9^{9^{9^9}}",
    "9^{9^9}",
    "((9!)!)!",
    "9!!",
    "(9^9)!",
    "9^{9!}",
    "((9^{99})^{99})^{99}",
    "9^{99999999}",
    "9^{9999*9999}",
    "(10^6)!",
    "99999!",
    r"\binom{1000000}{500000}",
    r"\prod_{i=1}^{99999999} i",
    r"\sum_{i=1}^{99999999} i",
    "2^{2^{2^{2^{2^2}}}}",
    "9^(9^(9^9))",
    "9^9^9^9",
    "{{9^9}^{999}}^{999}",
    "(x+y+z+w)^{2000}",
    "(x+y+z+w)^(60)",
    "((x+y)^{50}+1)^{50}",
    "(x+y+z)^{40}(a+b+c)^{40}",
    "{(x+y+z)^{99}}",
]


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_unequal_without_being_computed(bomb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algebra, "equivalent", lambda *_: pytest.fail("asked"))
    assert too_expensive(bomb)
    assert not latex_equivalent(bomb, "3")
    assert latex_equivalent(bomb, f" {bomb} "), "equal as text"


@pytest.mark.parametrize(
    "text",
    ["(x^2+5x+2)(x^2 + 5x + 9)", "(x-1)^3(x+1)^3", "2^{27} - 2^{11}", "11z^{17}(5+11z^{17})", "e^{x^2}", "10!", r"\binom{10}{3}",
     "((x+1)^2+1)^2", "2^{2014}", r"45^\circ", "(-9x^2+x+2)(9x^2+x+2)", "x^{2n}", "2^{-3}", "5! + 4!",
     "(2+3+4+5)^{2000}", "(-x)^{3000}", "(x+1)^{100}", "(x+y+z)^{10}", "(x+1)(x+2)(x+3)(x+4)(x+5)(x+6)^2", r"(\frac{1}{2})^{2000}"],
)  # fmt: skip
def test_what_people_write_is_no_bomb(text: str) -> None:
    assert not too_expensive(text)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "piece", ["^{", "(", "9^", "!", "{9}^", "\\binom", "x^2+", "(x)^2+"]
)  # the last three pass the first look
def test_looking_for_bombs_takes_linear_time(piece: str) -> None:
    assert takes_linear_time(lambda count: too_expensive(piece * count))


def test_a_worker_that_dies_is_replaced_and_the_question_asked_again() -> None:
    assert latex_equivalent(r"\sqrt{36}+0", "6", timeout_s=LONG_S)
    before = latex_failures().get("crash", 0)
    assert algebra._CHECKER._idle
    for worker in algebra._CHECKER._idle:
        worker.process.kill()
        worker.process.wait()
    assert latex_equivalent(r"\sqrt{49}+0", "7", timeout_s=LONG_S)
    assert latex_failures().get("crash", 0) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_for_the_run_does_not_reach_the_worker(number: signal.Signals) -> None:
    """A terminal, and Slurm, signal all processes of a run: it finishes its step, and a right answer stays right."""
    assert latex_equivalent(rf"\sqrt{{81}}+{int(number)}", f"{9 + number}", timeout_s=LONG_S)
    failed, before = latex_failures().get("crash", 0), list(algebra._CHECKER._idle)
    assert before
    for worker in before:
        worker.process.send_signal(number)
    assert latex_equivalent(rf"\sqrt{{100}}+{int(number)}", f"{10 + number}", timeout_s=LONG_S)
    assert latex_failures().get("crash", 0) == failed
    assert algebra._CHECKER._idle == before, "none was replaced"
    assert all(worker.process.poll() is None for worker in before)


def test_a_worker_whose_parent_is_gone_ends_itself() -> None:
    script = Path(algebra.__file__).with_name("algebra_worker.py")
    question = json.dumps(["9^{9^{9^{9}}}", "9^{9^{9^{8}}}", -4.5])  # the worker allows five seconds more than it is told
    done = subprocess.run([sys.executable, "-P", str(script)], input=question + "\n", capture_output=True, text=True, timeout=280)
    assert done.returncode == -signal.SIGALRM


def test_prose_never_starts_the_worker_and_nothing_is_left_behind() -> None:
    code = (
        "from groupwise.data import algebra, latex; import os\n"
        "assert not latex.latex_equivalent('the answer is seventy', '70'); assert not algebra._CHECKER._alive\n"
        "assert latex.latex_equivalent(r'\\sqrt{4}', '2', timeout_s=120); print(*(w.process.pid for w in algebra._CHECKER._alive))\n"
        "assert 'torch' not in __import__('sys').modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int(done.stdout), 0)


OPERATORS = [
    "=",
    ">=",
    "<=",
    "!=",
    ":=",
    "\\=",
    "==",
    "=>",
    "<",
    ">",
    "+",
    "-",
    "*",
    "/",
    "^",
    "_",
    "!",
    "±",
    "€",
    "$",
    "%",
    ":",
    "|",
    "&",
]
COMMANDS = [
    "\\frac",
    "\\sqrt",
    "\\text",
    "\\ge ",
    "\\ne ",
    "\\not",
    "\\pm ",
    "\\times ",
    "\\sin ",
    "\\overline",
    "\\{",
    "\\}",
    "\\boxed{",
    "\\",
]
MATHS = [*OPERATORS, *COMMANDS, *"(){}[]", *",;. '~", "0", "5", "1,234", "2.5", "9" * 400, "x", "X", "km", " and ", "π", "\n"]


@settings(max_examples=600, deadline=None)
@given(*[st.lists(st.sampled_from(MATHS), max_size=12).map("".join)] * 2)
@example("x >= 5", "5")
@example("5 >= 4", "5")
@example("x != 5", "5")
@example("x := 5", "5")
@example("5", "x != 5")
@example("5", "\\=")
@example("9^{" + "9" * 400 + "}", "x")
@example("€" * 490 + "5", "x")
def test_grading_never_raises(answer: str, reference: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(algebra, "equivalent", lambda *_: False)  # which has tests of its own, and may say that it does not know
        for style in ("xml", "boxed", "plain"):
            for text in (f"<answer>{answer}</answer> \\boxed{{{answer}}}\n#### {answer}", answer):
                grade(text, reference, style)  # type: ignore[arg-type]
        latex_equivalent(answer, reference)
