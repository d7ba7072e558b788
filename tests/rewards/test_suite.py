"""Groups are scored by weighted sums, and nothing that goes wrong becomes a 0."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from groupwise.config.schema import RewardFunctionConfig, RewardsConfig
from groupwise.data import algebra
from groupwise.distributed import World
from groupwise.errors import RewardError
from groupwise.metrics import Mean, Sum
from groupwise.rewards import RewardFailure, RewardSuite, calling
from groupwise.rollout import Sampled, score
from groupwise.types import Group, ToolCall, Turn

from .conftest import RIGHT, make_completions, make_prompt, make_suite

LONG_S = 120.0
"""A limit that nothing here comes near, however busy the machine is."""


def constant(value):
    return lambda completions: [value for _ in completions]


def config(*entries, **settings):
    return RewardsConfig(functions=[RewardFunctionConfig(**entry) for entry in entries], **settings)


def test_a_function_from_python_is_not_dropped_for_a_model_of_its_name():
    suite = RewardSuite.from_config(
        config({"model": "org/judge"}), "xml", {"judge": constant(1.0)}, open_model=lambda *given, **named: constant(2.0)
    )
    assert len(suite.names) == 2


# --- sums -------------------------------------------------------------------------------------------------------------


def test_the_default_rewards_give_0_to_2_8():
    suite = RewardSuite.from_config(RewardsConfig(), "xml")
    group = suite.score(make_prompt(), make_completions(RIGHT, RIGHT.replace("72", "72.0"), "72", "<answer>72</answer>"))
    assert isinstance(group, Group)
    assert group.rewards == pytest.approx((2.8, 2.3, 0.0, 2.4), abs=1e-12)
    assert group.components == {"correctness": (2.0, 1.5, 0.0, 2.0), "format": (0.8, 0.8, 0.0, 0.4)}
    assert group.has_variance


def test_weights_multiply_and_none_is_left_out():
    suite = RewardSuite.from_config(
        config({"function": "a", "weight": 2.0}, {"function": "b", "weight": -0.5}),
        "xml",
        {"a": lambda completions: [1.0, None, 3.0], "b": lambda completions: [4, 4, None]},
    )
    group = suite.score(make_prompt(), make_completions("x", "y", "z"))
    assert group.rewards == (2.0 - 2.0, -2.0, 6.0)
    assert group.components == {"a": (1.0, None, 3.0), "b": (4.0, 4.0, None)}


def test_a_completion_that_nobody_judges_is_a_failure_and_not_0():
    functions = {"a": lambda completions: [1.0, None], "b": lambda completions: [None, None]}
    with pytest.raises(RewardError, match="no reward function applies to completion 1 of problem 'gsm8k:train:0': a, b returned"):
        make_suite(functions).score(make_prompt(), make_completions("x", "y"))
    failure = make_suite(functions, on_error="skip").score(make_prompt(), make_completions("x", "y"))
    assert isinstance(failure, RewardFailure)
    assert failure.kind == "not_a_number"


def test_a_function_of_weight_0_is_logged_but_judges_nothing():
    entries = config({"function": "a"}, {"function": "watched", "weight": 0.0})
    suite = RewardSuite.from_config(entries, "xml", {"a": constant(1.0), "watched": constant(7.0)})
    group = suite.score(make_prompt(), make_completions("x"))
    assert (group.rewards, group.components["watched"]) == ((1.0,), (7.0,))
    assert suite.notes() == ["reward 'watched' has weight 0: it is logged, but nothing is learnt from it"]
    with pytest.raises(RewardError, match="every reward has weight 0"):
        RewardSuite.from_config(config({"function": "format", "weight": 0.0}), "xml")
    with pytest.raises(RewardError, match="weight must be finite"):
        RewardSuite.from_config(config({"function": "format", "weight": math.nan}), "xml")


@pytest.mark.parametrize(
    "scores",
    [
        [1, 0], (True, False), np.array([1.0, 0.0], dtype=np.float32), torch.tensor([1.0, 0.0]), [np.float64(1), torch.tensor(0)],
        np.array([True, False]), torch.tensor([True, False]),
    ],
)  # fmt: skip
def test_any_sequence_of_numbers_will_do(scores):
    group = make_suite({"a": lambda completions: scores}).score(make_prompt(), make_completions("x", "y"))
    assert group.rewards == (1.0, 0.0)
    assert all(type(reward) is float for reward in group.components["a"])


def test_component_names_are_unique():
    twice = {"function": "length", "arguments": {"target": 5}}
    suite = RewardSuite.from_config(
        config({"function": "length"}, twice, {"function": "length_2"}), "xml", {"length_2": constant(0.0)}
    )
    assert suite.names == ("length", "length_3", "length_2")
    group = suite.score(make_prompt(), make_completions("a" * 5))
    assert group.components == {"length": (-0.975,), "length_3": (0.0,), "length_2": (0.0,)}


def test_functions_from_python_are_added_to_the_config_or_named_by_it():
    suite = RewardSuite.from_config(
        config({"function": "format"}, {"function": "a", "weight": 3.0}), "xml", {"a": constant(1), "b": constant(2)}
    )
    assert [(d.name, d.weight, d.source) for d in suite.describe()] == [
        ("format", 1.0, "built-in"),
        ("a", 3.0, "python"),
        ("b", 1.0, "python"),
    ]
    assert suite.describe()[0].summary.startswith("0.2 for each of")


def test_xml_rewards_are_noted_where_answers_are_boxed():
    suite = RewardSuite.from_config(RewardsConfig(), "boxed")
    assert [note.split(",")[0] for note in suite.notes()] == ["reward 'format' looks for XML tags"]
    assert RewardSuite.from_config(RewardsConfig(), "xml").notes() == []


# --- what functions receive --------------------------------------------------------------------------------------------


def test_chat_prompts_arrive_as_messages_with_every_column():
    seen = {}

    def spy(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return [0.0] * len(completions)

    prompt = make_prompt(columns={"difficulty": 3, "answer": "the worked solution", "completions": "a bad name for a column"})
    make_suite({"spy": spy}, style="boxed").score(prompt, make_completions("x", "y"))
    conversation = [{"role": "system", "content": "Think."}, {"role": "user", "content": "How many clips?"}]
    assert seen == {
        "prompts": [conversation, conversation],
        "completions": [[{"role": "assistant", "content": "x"}], [{"role": "assistant", "content": "y"}]],
        "difficulty": [3, 3],
        "answer": ["72", "72"],
        "accepted_answers": [("72",), ("72",)],
        "answer_style": ["boxed", "boxed"],
        "completion_ids": [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]],
        "finish_reason": ["length", "stop"],
        "calls": [[], []],
        "environment_reward": [None, None],
        "turns": [[], []],
        "group_index": [0, 0],
    }


def test_plain_prompts_arrive_as_strings():
    seen = []
    suite = make_suite({"spy": lambda prompts, completions: seen.append((prompts, completions)) or [0.0]})
    suite.score(make_prompt(chat=False), make_completions("x"))
    assert seen == [(["Think.How many clips?"], ["x"])]


@pytest.mark.parametrize(
    "function",
    [
        lambda completions: [1.0],
        lambda completions, answer: [float(answer == ["72"])],
        lambda answer, completions, prompts: [float(answer == ["72"])],
        lambda *, completions, difficulty: [float(difficulty == [3])],
        lambda completions, unknown="default": [float(unknown == "default")],
        lambda completion_ids, finish_reason: [float(finish_reason == ["length"])],
        lambda completions, *rest, **columns: [float(columns["difficulty"] == [3] and not rest)],
    ],
)
def test_signature_variants(function):
    group = make_suite({"f": function}).score(make_prompt(columns={"difficulty": 3}), make_completions("x"))
    assert group.rewards == (1.0,)


def test_arguments_win_over_columns():
    suite = RewardSuite.from_config(
        config({"function": "f", "arguments": {"difficulty": 9}}), "xml", {"f": lambda completions, difficulty: [difficulty]}
    )
    assert suite.score(make_prompt(columns={"difficulty": 3}), make_completions("x")).rewards == (9.0,)


@pytest.mark.parametrize(
    ("name", "arguments", "columns", "reward"),
    [
        ("strict_xml", {}, {"score": 0.9}, 0.5),
        ("length", {"target": 4}, {"unit": "cm", "target": "3", "bounded": None}, -1.0),
        ("accuracy", {}, {"lenient": False, "in_format": True}, 1.0),
        ("keyword", {"words": ["clips"]}, {"avoid": "24", "case_sensitive": 1}, 0.0),
        ("repetition_penalty", {"ngram": 1}, {"strength": 0.0}, None),
    ],
)
def test_a_column_is_no_setting_of_a_built_in_function(name, arguments, columns, reward):
    suite = RewardSuite.from_config(config({"function": name, "arguments": arguments}), "xml")
    with_columns = suite.score(make_prompt(columns=columns), make_completions(RIGHT))
    assert with_columns.rewards == suite.score(make_prompt(), make_completions(RIGHT)).rewards
    assert reward in (None, *with_columns.rewards)


@pytest.mark.parametrize("on_error", ["stop", "skip"])
def test_a_column_that_the_data_lacks_is_named(on_error):
    suite = make_suite({"f": lambda completions, difficulty: [0.0]}, on_error=on_error)
    suite.require_columns(make_prompt(columns={"difficulty": 3}).problem)
    with pytest.raises(
        RewardError, match=r"'f' needs 'difficulty', but the data has no such column .*answer, answer_style, calls, colour"
    ):
        suite.require_columns(make_prompt(columns={"colour": "red"}).problem)
    with pytest.raises(RewardError, match="'f' needs 'difficulty'"):
        suite.score(make_prompt(), make_completions("x"))


def test_a_function_that_changes_its_inputs_disturbs_no_other():
    def vandal(prompts, completions, **columns):
        scores = [0.0] * len(completions)
        completions[0][0]["content"] = "ruined"
        prompts[0].clear()
        columns["answer"].clear()
        return scores

    def check(prompts, completions, answer):
        return [float(completions[0][0]["content"] == "x" and len(prompts[0]) == 2 and answer == ["72"])]

    assert make_suite({"vandal": vandal, "check": check}).score(make_prompt(), make_completions("x")).rewards == (1.0,)


def test_what_can_be_changed_in_a_row_is_each_completion_s_own():
    def uses_up(completions, tests, limits, **columns):
        limits[0]["seconds"].clear()
        for name, ruin in ruins.items():
            assert list(columns[name][0]) == [1]
            ruin(columns[name][0])
        return [float(len(one) + len(limit["seconds"])) for one, limit in zip(tests, limits, strict=True) if one.pop()]

    ruins = {"seen": set.clear, "raw": bytearray.clear, "array": lambda array: array.fill(0), "tensor": torch.Tensor.zero_}
    others = {"seen": {1}, "raw": bytearray([1]), "array": np.array([1]), "tensor": torch.tensor([1])}
    columns = {"tests": [1, 2, 3], "limits": {"seconds": [1]}, "unused": object(), **others}
    suite = make_suite({"first": uses_up, "second": uses_up})
    group = suite.score(make_prompt(columns=columns), make_completions("x", "y"))
    assert group.components == {"first": (2.0, 3.0), "second": (2.0, 3.0)}
    assert (columns["tests"], columns["limits"]) == ([1, 2, 3], {"seconds": [1]})
    assert all(list(columns[name]) == [1] for name in ruins)


# --- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout_s", [LONG_S, None])
@pytest.mark.parametrize("error", [ValueError("too odd"), TimeoutError("socket"), SystemExit(3)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_function_that_raises(error, timeout_s, asynchronous):
    def broken(completions):
        raise error

    async def broken_async(completions):
        raise error

    functions = {"broken": broken_async if asynchronous else broken}
    with pytest.raises(
        RewardError, match=r"reward 'broken' on problem 'gsm8k:train:0' raised .*; correct the function, or set"
    ) as caught:
        make_suite(functions, timeout_s=timeout_s).score(make_prompt(), make_completions("x"))
    assert f"{type(error).__name__}: {error} (test_suite.py, line " in str(caught.value)
    assert caught.value.__cause__ is error
    failure = make_suite(functions, on_error="skip", timeout_s=timeout_s).score(make_prompt(), make_completions("x"))
    assert (failure.function, failure.problem_id, failure.kind) == ("broken", "gsm8k:train:0", "raised")
    # The next call works: neither a thread nor the event loop was lost.
    assert isinstance(make_suite({"fine": quick}, timeout_s=timeout_s).score(make_prompt(), make_completions("x")), Group)


class Panic(BaseException):
    """As Rust code behind Python raises it."""


class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (Panic("index out of range"), "Panic: index out of range"),
        (Unreadable(), "Unreadable: its message cannot be read (RuntimeError)"),
    ],
)
def test_a_panic_and_an_error_without_words_are_failures_like_any(error, said, asynchronous):
    def broken(completions):
        raise error

    async def broken_async(completions):
        raise error

    suite = make_suite({"broken": broken_async if asynchronous else broken}, on_error="skip", timeout_s=LONG_S)
    failure = suite.score(make_prompt(), make_completions("x"))
    assert failure.kind == "raised"
    assert said in failure.message


def test_an_interrupt_in_a_function_is_one():
    def stopped(completions):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_suite({"f": stopped}, on_error="skip", timeout_s=LONG_S).score(make_prompt(), make_completions("x"))


@pytest.mark.parametrize("timeout_s", [LONG_S, None])
def test_a_function_that_needs_signals_is_told_where_it_can_have_them(timeout_s):
    math_verify = pytest.importorskip("math_verify")

    def equal(completions, answer):
        return [float(math_verify.verify(*map(math_verify.parse, both))) for both in zip(answer, ["72"], strict=True)]

    scored = make_suite({"equal": equal}, on_error="skip", timeout_s=timeout_s).score(make_prompt(), make_completions("x"))
    if timeout_s is None:
        assert scored.rewards == (1.0,)
    else:
        assert "another thread: set rewards.timeout_s=null and no timeout_s of its own, or isolate: process" in scored.message
        assert "raised ValueError: Math-Verify" in scored.message


@pytest.mark.parametrize("timeout_s", [LONG_S, None])
def test_a_function_that_yields_its_scores_is_held_to_the_same_rules(timeout_s):
    def one_by_one(completions):
        for completion in completions:
            yield float(completion[0]["content"])

    suite = make_suite({"f": one_by_one}, on_error="skip", timeout_s=timeout_s)
    assert suite.score(make_prompt(), make_completions("1", "2")).rewards == (1.0, 2.0)
    failure = suite.score(make_prompt(), make_completions("1", "two"))
    assert failure.kind == "raised"
    assert "could not convert string to float: 'two'" in failure.message


def test_a_generator_that_never_ends_is_late():
    def counts(completions):
        while True:
            yield time.sleep(0.05)

    assert (
        make_suite({"f": counts}, on_error="skip", timeout_s=0.3).score(make_prompt(), make_completions("x")).kind == "timed_out"
    )


def test_a_coroutine_that_cancels_itself_has_raised():
    async def gives_up(completions):
        raise asyncio.CancelledError

    failure = make_suite({"f": gives_up}, on_error="skip").score(make_prompt(), make_completions("x"))
    assert failure.kind == "raised"


def test_a_message_of_many_lines_becomes_one():
    def broken(completions):
        raise ValueError("first\n  second" + "x" * 1000)

    failure = make_suite({"f": broken}, on_error="skip").score(make_prompt(), make_completions("x"))
    assert "ValueError: first secondxxx" in failure.message
    assert len(failure.message) < 450


def waits_for(held):
    def wait(completions):
        held.wait()
        return [1.0] * len(completions)

    return wait


def waits_for_async(held):
    async def wait(completions):
        while not held.is_set():
            await asyncio.sleep(0.001)
        return [1.0] * len(completions)

    return wait


async def quick(completions):
    await asyncio.sleep(0)
    return [1.0] * len(completions)


@pytest.fixture
def held():
    """Set when the test is over: what waits for it comes back in no other way."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.parametrize("make", [waits_for, waits_for_async])
def test_a_function_that_takes_too_long(make, held):
    """None of the abandoned calls has come back by the end: they hold up nothing."""
    with pytest.raises(RewardError, match=r"'slow' .* did not return within rewards.timeout_s = 0.1 seconds.*; make it faster"):
        make_suite({"slow": make(held)}, timeout_s=0.1).score(make_prompt(), make_completions("x"))
    skipping = make_suite({"slow": make(held)}, timeout_s=0.1, on_error="skip")
    scoring = skipping.score_all([(make_prompt(), make_completions("x"))] * 2)
    assert (scoring.groups, [failure.kind for failure in scoring.failures]) == ([], ["timed_out", "timed_out"])
    done = threading.Event()
    done.set()
    assert make_suite({"quick": make(done)}, timeout_s=LONG_S).score(make_prompt(), make_completions("x")).rewards == (1.0,)


@pytest.fixture
def begun(monkeypatch):
    """Set by a function that has begun; before that no time limit runs."""
    event, wait = threading.Event(), calling._await

    def wait_from_then_on(outcome, timeout_s):
        assert event.wait(LONG_S)
        return wait(outcome, timeout_s)

    monkeypatch.setattr(calling, "_await", wait_from_then_on)
    return event


def test_an_async_function_is_cancelled_when_its_time_is_up(begun):
    ended = threading.Event()

    async def for_ever(completions):
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    failure = make_suite({"slow": for_ever}, timeout_s=0.05, on_error="skip").score(make_prompt(), make_completions("x"))
    assert failure.kind == "timed_out"
    assert ended.wait(LONG_S)


def test_a_coroutine_that_blocks_does_not_block_the_next(begun, held):
    async def blocks(completions):
        begun.set()
        held.wait()
        return [1.0]

    failure = make_suite({"blocks": blocks}, timeout_s=0.05, on_error="skip").score(make_prompt(), make_completions("x"))
    assert failure.kind == "timed_out"
    assert failure.message.endswith("(some async function held up all others by computing or sleeping without await)")
    assert make_suite({"fine": quick}, timeout_s=LONG_S).score(make_prompt(), make_completions("x")).rewards == (1.0,)


def test_async_calls_share_one_loop_and_work_inside_a_notebooks_loop():
    loops = []

    async def judge(completions):
        loops.append(asyncio.get_running_loop())
        return [1.0]

    async def notebook_cell():
        return make_suite({"judge": judge}, timeout_s=None).score(make_prompt(), make_completions("x"))

    assert asyncio.run(notebook_cell()).rewards == (1.0,)
    make_suite({"judge": judge}).score(make_prompt(), make_completions("x"))
    assert loops[0] is loops[1]


def test_without_a_limit_a_function_runs_in_the_callers_thread():
    threads = []
    for timeout_s in (None, LONG_S):
        suite = make_suite({"f": lambda completions: threads.append(threading.current_thread()) or [0.0]}, timeout_s=timeout_s)
        suite.score(make_prompt(), make_completions("x"))
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threads[0]
    assert threads[1].daemon


@pytest.mark.parametrize("on_error", ["stop", "skip"])
@pytest.mark.parametrize(
    ("result", "said"),
    [
        ([1.0], "returned 1 scores for 2 completions; it must return one number or None per completion"),
        ([1.0] * 3, "returned 3 scores for 2 completions"),
        (None, r"returned None \(is a return statement missing\?\) instead of a list of 2 scores"),
        (1.0, "returned a float instead of a list of 2 scores"),
        ("ab", "returned a str instead of a list of 2 scores"),
        (quick, r"a coroutine \(is it an async function in a plain wrapper\? make the wrapper async\) instead of a list of 2"),
        ({"x": 1, "y": 2}, "returned a dict instead"),
        (torch.tensor(1.0), "returned a Tensor instead"),
        ({1.0, 2.0}, "returned a set instead"),
    ],
)
def test_a_wrong_length_always_stops(on_error, result, said):
    with pytest.raises(RewardError, match=said):
        make_suite({"f": lambda completions: result(completions) if result is quick else result}, on_error=on_error).score(
            make_prompt(), make_completions("x", "y")
        )


@pytest.mark.parametrize("lazy", [False, True])
def test_scores_that_raise_while_they_are_read_are_a_failure_of_the_function(lazy):
    class Lazy:
        def __iter__(self):
            yield 1.0
            raise ValueError("half way")

    def f(completions):
        return Lazy() if lazy else iter(Lazy())

    with pytest.raises(RewardError, match=r"raised ValueError.*: half way"):
        make_suite({"f": f}).score(make_prompt(), make_completions("x", "y"))
    failure = make_suite({"f": f}, on_error="skip").score(make_prompt(), make_completions("x", "y"))
    assert (failure.kind, failure.function) == ("raised", "f")


class Wordless:
    def __repr__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (math.nan, r"returned nan for completion 1 instead of a finite number of at most 1e\+12 in size, or None"),
        (-math.inf, "returned -inf for completion 1"),
        (-2e12, r"returned -2000000000000.0 for completion 1 instead of a finite number of at most 1e\+12 in size"),
        (torch.tensor(math.nan), "returned nan for completion 1"),
        ("2", r"returned '2' \(str\) for completion 1 instead of a number or None"),
        ([1.0], r"returned \[1.0\] \(list\) for completion 1"),
        (1j, r"returned 1j \(complex\)"),
        (np.ma.masked, r"returned masked \(MaskedConstant\) for completion 1 instead of a number or None"),
        (Wordless(), r"returned <Wordless, whose repr raises RuntimeError> \(Wordless\) for completion 1"),
        (Fraction(10**5000), "returned <Fraction, whose repr raises ValueError> for completion 1 instead of a finite number"),
    ],
)
def test_scores_that_are_no_numbers(score, said):
    functions = {"f": lambda completions: [1.0, score]}
    with pytest.raises(RewardError, match=said):
        make_suite(functions).score(make_prompt(), make_completions("x", "y"))
    failure = make_suite(functions, on_error="skip").score(make_prompt(), make_completions("x", "y"))
    assert (failure.kind, failure.function) == ("not_a_number", "f")


def test_score_all_keeps_order_and_separates_failures():
    def picky(completions, answer):
        if answer[0] == "bad":
            raise ValueError("bad")
        return [float(answer[0])] * len(completions)

    progress = []
    pairs = [(make_prompt(answer), make_completions("x", "y")) for answer in ("1", "bad", "3")]
    scoring = make_suite({"picky": picky}, on_error="skip").score_all(pairs, progress.append)
    assert [group.rewards for group in scoring.groups] == [(1.0, 1.0), (3.0, 3.0)]
    assert [failure.kind for failure in scoring.failures] == ["raised"]
    assert progress == [1, 2, 3]


def test_no_completions_is_an_error():
    with pytest.raises(RewardError, match="no completions to score"):
        make_suite({"a": constant(1.0)}).score(make_prompt(), [])


# --- answers that math-verify gives no verdict on -------------------------------------------------------------------------


@pytest.fixture
def no_verdict(monkeypatch):
    """math-verify never answers on ``x + 10``."""
    monkeypatch.setattr(algebra, "_CHECKER", algebra._Checker())
    monkeypatch.setattr(algebra._Checker, "_ask_once", lambda self, answer, *_: "timeout" if answer == "x + 10" else False)


UNCHECKED = "<reasoning>\nr\n</reasoning>\n<answer>\nx + 10\n</answer>\n"


@pytest.mark.parametrize("name", ["correctness", "accuracy", "correctness_and_format"])
def test_an_answer_that_could_not_be_checked_is_a_failure_and_not_0(name, no_verdict):
    made = make_completions(RIGHT, UNCHECKED)
    stop = RewardSuite.from_config(config({"function": name}), "xml")
    with pytest.raises(
        RewardError, match=r"UncheckedAnswerError: math-verify gave no verdict on the answer 'x . 10'.*on_error=skip"
    ):
        stop.score(make_prompt("10 - x"), made)
    skip = RewardSuite.from_config(config({"function": name}, on_error="skip"), "xml")
    scoring = skip.score_all([(make_prompt("10 - x"), made), (make_prompt("72"), make_completions(RIGHT, "no"))])
    assert [failure.kind for failure in scoring.failures] == ["raised"]
    assert len(scoring.groups) == 1
    assert scoring.metrics["answers/unchecked"].value == 1
    assert scoring.metrics[f"calls/failed_{name}"].value == 1


def test_an_answer_that_only_the_accuracy_looks_at_is_counted_where_it_could_not_be_checked(no_verdict):
    suite = RewardSuite.from_config(config({"function": "length"}), "xml")
    sampled = Sampled([(0, tuple(make_completions(RIGHT, UNCHECKED)))], 0.0)
    metrics = score([make_prompt("10 - x")], sampled, suite, World(), seed=0, step=1).scoring_metrics
    assert (metrics["answers/unchecked"], metrics["accuracy/strict"]) == (Sum(1), Mean(0.0, 1))


def test_the_speed_of_sampling_counts_the_tokens_of_groups_that_could_not_be_scored():
    def picky(completions, answer):
        if answer[0] == "bad":
            raise ValueError("bad")
        return [1.0, 0.0]

    pairs = [(i, tuple(make_completions("x", "y"))) for i in range(2)]
    suite = make_suite({"picky": picky}, on_error="skip")
    rollout = score([make_prompt("1"), make_prompt("bad")], Sampled(pairs, 2.0), suite, World(), seed=0, step=1)
    assert (len(rollout.groups), len(rollout.failures)) == (1, 1)
    assert rollout.metrics("xml")["speed/sampled_tokens_per_s"] == Mean(2 * (5 + 6), 2.0)
    assert rollout.refilled(rollout, 1).metrics("xml")["speed/sampled_tokens_per_s"] == Mean(4 * (5 + 6), 4.0)


def test_a_step_begins_with_a_new_budget(no_verdict):
    algebra._CHECKER.left_s = -1.0
    RewardSuite.from_config(RewardsConfig(), "xml").score(make_prompt(), make_completions(RIGHT, "no"))
    assert algebra._CHECKER.left_s == algebra.BUDGET_S


def test_functions_are_told_every_reference_answer():
    prompt = make_prompt("2/3")
    prompt = replace(prompt, problem=replace(prompt.problem, also=("0.667",)))
    seen = []

    def mine(completions, answer, accepted_answers):
        seen.append((answer, accepted_answers))
        return [0.0] * len(completions)

    make_suite({"mine": mine}).score(prompt, make_completions("a", "b"))
    assert seen == [(["2/3"] * 2, [("2/3", "0.667")] * 2)]
    scored = RewardSuite.from_config(RewardsConfig(), "xml").score(
        prompt, make_completions("<answer>0.667</answer>", "<answer>2/3</answer>")
    )
    assert scored.components["correctness"] == (2.0, 2.0)


def test_a_group_whose_environment_failed_is_judged_by_no_function():
    """Its text would score 0: a judgement of a policy that was not heard to the end. Running statistics do not hear of it either."""
    told = ToolCall("step", {}, "error: lost connection", "raised")
    whole, ended = make_completions("x", "y")
    turns = (Turn("assistant", "y", len(ended.token_ids), (told,)),)
    pair = [whole, replace(ended, finish_reason="environment_error", turns=turns)]
    asked = []
    suite = make_suite({"f": lambda completions: asked.extend(completions) or [0.0] * len(completions)}, on_error="skip")
    scoring = suite.score_all([(make_prompt(), pair), (make_prompt(), make_completions("v", "w"))])
    (failure,) = scoring.failures
    assert (failure.kind, len(scoring.groups), len(asked)) == ("environment", 1, 2)
    assert failure.message == (
        "the environment failed in completion 1 of problem 'gsm8k:train:0' (environment_error): error: lost connection"
    )
    with pytest.raises(RewardError, match=r"lost connection; correct the environment, or set rewards\.on_error=skip to leave"):
        make_suite({"f": constant(0.0)}).score(make_prompt(), pair)


@pytest.mark.parametrize("scope", ["completion", "group", "batch"])
def test_a_completion_whose_environment_failed_is_shown_to_no_function(scope):
    """Async ones, which begin at once, and those that see the whole step, too."""
    whole, ended = make_completions("x", "y")
    shown = []

    async def scores(completions):
        shown.extend(completion[-1]["content"] for completion in completions)
        return [0.0] * len(completions)

    entries = [RewardFunctionConfig(function="scores", scope=scope)]
    suite = RewardSuite.from_config(RewardsConfig(functions=entries, on_error="skip"), "xml", {"scores": scores})
    failed = (make_prompt(), [whole, replace(ended, finish_reason="environment_error")])
    scoring = suite.score_all([failed, (make_prompt(), make_completions("v", "w"))])
    assert (len(scoring.groups), len(scoring.failures), sorted(shown)) == (1, 1, ["v", "w"])
    assert suite.score_all([failed]).groups == []
