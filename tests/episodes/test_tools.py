"""Tools: how they are found and described, what the policy is told of whatever happens in them, and the calculator."""

from __future__ import annotations

import json
import math
import operator
import random
import socket
import time
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from groupwise.episodes.driver import EpisodeEngine, Episodes
from groupwise.episodes.formats import FORMATS, Asked, Tags
from groupwise.episodes.tools import LONGEST_RESULT, Tool, Toolbox, as_text, calculator, describe, load_tools
from groupwise.errors import ConfigError
from groupwise.rewards.programs import Programs
from groupwise.rewards.sandbox import refusal
from groupwise.tracking.files import json_line
from groupwise.types import ToolCall, Turn
from tests.waiting import LONG_S


def search(query: str, limit: int = 3) -> list[str]:
    """Looks something up.

    Args:
        query: What to look for.
        limit: How many to return.
    """
    return [query] * limit


def hangs(seconds: float) -> str:
    """Waits.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "late"


def raises(word: str) -> str:
    """Fails.

    Args:
        word: Any.
    """
    raise KeyError(word)


def returns(kind: str) -> Any:
    """Returns odd things.

    Args:
        kind: Which.
    """
    deep: list[Any] = []
    deep.append(deep)
    return {
        "megabyte": "x" * 1_000_000, "bytes": b"42", "object": object(), "none": None, "json": {"a": [1, "ü"]}, "half": "a\ud800b",
        "number": 42, "deep": deep,
    }[kind]  # fmt: skip


async def waits(word: str) -> str:
    """Answers later.

    Args:
        word: What to say.
    """
    return word.upper()


@pytest.fixture
def toolbox() -> Toolbox:
    return Toolbox(
        {f.__name__: describe(f, f.__name__) for f in (search, hangs, raises, returns, waits, calculator)}, timeout_s=LONG_S
    )


@pytest.mark.parametrize("literal", ["{1, 2}", "{(1, 2): 3}", "b'a'", "{b'a': 1}", "0x" + "F" * 4000, "['\\ud83d']"])
def test_literals_that_no_record_can_hold_are_told_and_kept_as_text(toolbox: Toolbox, literal: str) -> None:
    (asked,) = Tags().read(f"<call>calculator(expression={literal})</call>")
    call = toolbox.call(asked)
    assert call.failure in ("invalid", "raised")
    assert call.result.startswith("error: ")
    json.dumps(asdict(call), ensure_ascii=False).encode()


def test_half_a_character_in_an_error_is_a_question_mark() -> None:
    def city(name: str) -> str:
        """Looks up.

        Args:
            name: Its name.
        """
        raise ValueError(f"there is no city {name}")

    call = Toolbox({"city": describe(city, "city")}, LONG_S).call(Asked("city", {"name": "\ud83d"}))
    assert (call.result, call.arguments) == ("error: ValueError: there is no city ?", {"name": "?"})


def test_schemas_are_the_library_s(toolbox: Toolbox) -> None:
    assert toolbox.tools["search"].schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for."},
            "limit": {"type": "integer", "description": "How many to return."},
        },
        "required": ["query"],
    }
    assert toolbox.tools["search"].summary == "search(query, limit): Looks something up."


def test_tools_are_found_by_name_and_by_path(tmp_path: Any) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        'def twice(word: str) -> str:\n    """Says it twice.\n\n    Args:\n        word: What.\n    """\n    return word * 2\n'
    )
    tools = load_tools(["calculator", f"{file}:twice"])
    assert list(tools) == ["calculator", "twice"]
    assert Toolbox(tools, LONG_S).call(Asked("twice", {"word": "ha"})).result == "haha"


@pytest.mark.parametrize(
    ("named", "why"),
    [
        (["calculater"], "no tool \\(did you mean 'calculator'\\?\\)"),
        (["calculator", "calculator"], "two tools that are called calculator"),
        (["math:sin"], "cannot be described"),
        (["math:pi"], "is no function"),
        (["groupwise.types:Completion"], "is no function"),
        (["nowhere.py:f"], "does not exist"),
    ],
)
def test_what_is_no_tool_is_refused_by_name(named: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        load_tools(named)


def test_a_tool_must_say_what_it_does_and_what_its_arguments_are() -> None:
    def silent(word: str) -> str:
        return word

    def only_returns() -> str:
        """Returns:
        A word.
        """
        return "word"

    for function in (silent, only_returns):
        with pytest.raises(ConfigError, match="docstring a sentence on what it does and a line for each argument under 'Args:'"):
            describe(function, "mine.py:function")


@pytest.mark.parametrize(
    ("asked", "result", "failure"),
    [
        (Asked("search", {"query": "a", "limit": 2}), '["a", "a"]', None),
        (Asked("search", positions=("a", 1)), '["a"]', None),
        (Asked("search", {"limit": 1}, ("a",)), '["a"]', None),
        (Asked("search", text="the sea"), '["the sea", "the sea", "the sea"]', None),
        (Asked("waits", {"word": "hello"}), "HELLO", None),
        (Asked("returns", {"kind": "json"}), '{"a": [1, "ü"]}', None),
        (Asked("returns", {"kind": "none"}), "null", None),
        (Asked("returns", {"kind": "number"}), "42", None),
        (Asked("returns", {"kind": "half"}), "a?b", None),
        (Asked("returns", {"kind": "bytes"}), "error: returns returned bytes, which is neither text nor JSON", "raised"),
        (Asked("returns", {"kind": "object"}), "error: returns returned object, which is neither text nor JSON", "raised"),
        (Asked("returns", {"kind": "deep"}), "error: returns returned list, which is neither text nor JSON", "raised"),
        (Asked("raises", {"word": "x"}), "error: KeyError: 'x'", "raised"),
        (Asked("hangs", {"seconds": 600}), "error: hangs did not answer within 0.2 seconds", "timed_out"),
        (Asked("serach", {}), "error: there is no tool 'serach' (did you mean 'search'?); there is search,", "invalid"),
        (Asked("search", {}), "error: missing a required argument: 'query'; it is called as search(query, limit)", "invalid"),
        (Asked("search", {"query": 3}), "error: the argument query must be of the type string, and 3 is not;", "invalid"),
        (Asked("search", {"query": "a", "limit": True}), "error: the argument limit must be of the type integer", "invalid"),
        (Asked("search", {"query": "a", "how": "b"}), "error: got an unexpected keyword argument 'how'", "invalid"),
        (Asked("search", positions=("a", 1, 2)), "error: 3 arguments are too many", "invalid"),
        (Asked("search", problem="a call ends with </call>"), "error: a call ends with </call>", "invalid"),
        (Asked("hangs", text="a b"), "error: the arguments 'a b' cannot be read", "invalid"),
    ],
)
def test_whatever_happens_the_policy_is_told_in_text(toolbox: Toolbox, asked: Asked, result: str, failure: str | None) -> None:
    toolbox.timeout_s = 0.2 if failure == "timed_out" else LONG_S
    call = toolbox.call(asked)
    assert call.result.startswith(result)
    assert call.failure == failure
    assert call.name == asked.name


@pytest.mark.parametrize(
    ("call", "result"),
    [
        ('search("sea", 2)', '["sea", "sea"]'),
        ('search("sea", limit=1)', '["sea"]'),
        ('search("a", 1, 2)', "error: 3 arguments are too many"),
        ('search("x", query="y")', "error: the argument query is given by position and by name"),
        ("search(2024, 2)", '["2024, 2", '),
        ('search("sea" or land)', '["\\"sea\\" or land", '),
        ("calculator(1,234)", "1234"),
        ("calculator(12)", "12"),
    ],
)
def test_arguments_in_tags_are_one_text_only_where_they_can_be_nothing_else(toolbox: Toolbox, call: str, result: str) -> None:
    (asked,) = FORMATS["tags"].read(f"<call>{call}</call>")
    assert toolbox.call(asked).result.startswith(result)


def test_a_megabyte_is_cut_and_says_so(toolbox: Toolbox) -> None:
    call = toolbox.call(Asked("returns", {"kind": "megabyte"}))
    assert call.failure is None
    assert len(call.result) < LONGEST_RESULT + 100
    assert call.result.endswith("... (the first 2,000 of 1,000,000 characters)")


def test_arguments_that_no_record_can_hold_are_kept_as_text(toolbox: Toolbox) -> None:
    assert toolbox.call(Asked("search", {"query": {1, 2}})).arguments == {"query": "{1, 2}"}


def test_arguments_too_deep_for_a_record_make_an_invalid_call(toolbox: Toolbox) -> None:
    """Rewards and records get `asdict` of a call, which would end the run with a RecursionError."""

    def nested(levels: int) -> ToolCall:
        deep = "[" * (levels - 1) + "]" * (levels - 1)
        (asked,) = FORMATS["hermes"].read(f'<tool_call>{{"name": "search", "arguments": {{"query": {deep}}}}}</tool_call>')
        call = toolbox.call(asked)
        json_line(asdict(Turn("assistant", "said", 1, (call,))))
        return call

    refused = nested(500)
    assert (refused.arguments, refused.failure) == ({}, "invalid")
    assert refused.result == "error: its arguments are nested more than 50 deep"
    assert nested(51).arguments == {}
    assert nested(50).arguments["query"] != []


def test_arguments_are_recorded_as_the_policy_wrote_them() -> None:
    def total(numbers: list[int]) -> int:
        """Adds up.

        Args:
            numbers: What.
        """
        return numbers.pop() + sum(numbers)

    call = Toolbox({"total": describe(total, "total")}, LONG_S).call(Asked("total", {"numbers": [1, 2, 3]}))
    assert (call.arguments, call.result) == ({"numbers": [1, 2, 3]}, "6")


_SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


def test_the_calculator_computes_what_python_does() -> None:
    rng = random.Random(0)

    def drawn(depth: int) -> tuple[str, int]:
        if depth == 0 or rng.random() < 0.3:
            number = rng.randint(0, 999)
            return str(number), number
        sign = rng.choice("+-*")
        (left, a), (right, b) = drawn(depth - 1), drawn(depth - 1)
        return f"({left} {sign} {right})", _SIGNS[sign](a, b)

    for _ in range(200):
        text, value = drawn(3)
        assert calculator(text) == str(value)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 x 3", "36"), ("12×3", "36"), ("7 / 2", "3.5"), ("8 / 2", "4"), ("2 ^ 10", "1024"), ("-3 + 1,000", "997"),
        ("1/3", "0.333333333333"), ("10 % 4", "2"), ("7 // 2", "3"), (" ( 2 + 3 ) * 4 ", "20"), ("1e3", "1000"),
        ("(1 + 0.05/365)^(365*2)", "1.10516334913"), ("1.01^401", "54.0593583804"), ("0.99^500", "0.00657048304241"),
        ("1/100000", "0.00001"), ("10x5", "50"), ("1,0x2", "20"), ("0x(3)", "0"), ("10^15/3", "333333333333333.3"), ("0.1 + 0.2", "0.3"),
    ],
)  # fmt: skip
def test_the_calculator_reads_usual_signs(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "hello", "__import__('os')", "(1).__class__", "[1]", "1 if 1 else 2", "f'{1}'", "9**9**9**9", "2**10000", "1 << 99999",
        "1 / 0", "0 ** -1", "(" * 99, "1+" * 150 + "1", "'a' * 9", "1j * 1j", "(-8) ** 0.5", "True + 1", "lambda: 1", "1e308 * 10", "1e999",
        "2.0 ** 5000", "0x10", "3 + 0X1f",
    ],
)  # fmt: skip
def test_the_calculator_refuses_quickly_what_is_no_arithmetic(expression: str) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError):
        calculator(expression)
    assert time.monotonic() - started < 30


def test_every_builtin_tool_can_be_described() -> None:
    tools = load_tools(["calculator"])
    assert isinstance(tools["calculator"], Tool)
    for form in FORMATS.values():
        (asked,) = form.read(form.write("calculator", {"expression": "6 * 7"}))
        assert Toolbox(tools, LONG_S).call(asked).result == "42"
    assert as_text(math.pi, "f").startswith("3.14")


# --- python --------------------------------------------------------------------------------------------------------------------

needs_walls = pytest.mark.skipif(bool(refusal()), reason=f"no sandbox on this machine: {refusal()}")


@pytest.fixture(scope="module")
def sandboxed() -> Toolbox:
    return Toolbox(load_tools(["python"], timeout_s=LONG_S), timeout_s=LONG_S)


@needs_walls
@pytest.mark.parametrize(
    ("code", "result"),
    [
        ("print(6 * 7)", "42\n"),
        ("6 * 7", "42\n"),
        ("x = 6\nfor i in range(2):\n    x *= 7\nprint('so', end=' ')\nx", "so 294\n"),
        ("", ""),
        ("None", ""),
        ("print('a')\nimport sys\nsys.exit(3)", "a\n"),
        ("print('a')\nimport sys\nsys.exit('no root')", "a\nno root"),
        ("print('a')\n1 / 0", "a\nZeroDivisionError: division by zero (line 2)"),
        ("print(", "SyntaxError: '(' was never closed"),
        ("def f(n):\n    return f(n)\nf(0)", "RecursionError: maximum recursion depth exceeded"),
        ("import sys; print('e', file=sys.stderr)", "e\n"),
        ("print('ü' * 3 + chr(0xd800))", "üüü?\n"),
        ("import fractions; fractions.Fraction(1, 3)", "Fraction(1, 3)\n"),
    ],
)
def test_python_answers_what_a_program_prints(sandboxed: Toolbox, code: str, result: str) -> None:
    call = sandboxed.call(Asked("python", {"code": code}))
    assert call.result.startswith(result) if "Error" in result else call.result == result
    assert call.failure is None


@needs_walls
def test_python_keeps_nothing_and_cuts_what_is_long(sandboxed: Toolbox) -> None:
    assert (
        sandboxed.call(Asked("python", {"code": "kept = 1; open('kept', 'w').write('1'); import math; math.pi = 3"})).failure
        is None
    )
    told = sandboxed.call(Asked("python", {"code": "import math, os\nprint(math.pi, 'kept' in os.listdir('.'))\nkept"})).result
    assert told == "3.141592653589793 False\nNameError: name 'kept' is not defined (line 3)"
    told = sandboxed.call(Asked("python", {"code": "print('x' * 10**6)\nraise ValueError('at the end')"})).result
    assert len(told) < LONGEST_RESULT
    assert told.endswith("x ... (998,501 more characters)\nValueError: at the end (line 2)")


ATTACKS = {
    "a fork bomb": ("import os\nwhile True:\n    os.fork()", ("raised", "timed_out")),
    "endless output": ("while True:\n    print('x' * 1000)", ("timed_out",)),
    "sockets": ("import socket\nsocket.create_connection(('127.0.0.1', {port}), 2)", (None,)),
    "memory": ("x = []\nwhile True:\n    x.append(bytearray(2**26))", (None, "raised", "timed_out")),
    "the run's environment": ("import os\nprint(os.environ.get('GROUPWISE_TEST_SECRET'))", (None,)),
    "killing": ("import os, signal\nos.kill(-1, signal.SIGKILL)", (None, "raised")),
}


@needs_walls
@pytest.mark.parametrize("name", ATTACKS)
def test_python_holds_against_what_a_policy_might_write(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next program runs as if nothing had been."""
    monkeypatch.setenv("GROUPWISE_TEST_SECRET", "hidden")
    code, failures = ATTACKS[name]
    limit_s = 3.0 if "timed_out" in failures else LONG_S
    box = Toolbox(load_tools(["python"], timeout_s=limit_s), timeout_s=limit_s)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        server.setblocking(False)
        began = time.monotonic()
        call = box.call(Asked("python", {"code": code.replace("{port}", str(server.getsockname()[1]))}))
        with pytest.raises(BlockingIOError):
            server.accept()
    assert call.failure in failures
    assert time.monotonic() - began < 30
    assert "hidden" not in call.result
    assert len(call.result.splitlines()) < 5
    assert box.call(Asked("python", {"code": "print(6 * 7)"})).result == "42\n"


def test_processes_of_python_end_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Programs] = []
    monkeypatch.setattr("groupwise.episodes.tools.refusal", lambda: None)
    monkeypatch.setattr(Programs, "close", lambda programs: closed.append(programs))
    tools, engine = load_tools(["python", "calculator"]), SimpleNamespace(close=lambda: None)
    EpisodeEngine(engine, Episodes(tools, None, Tags(), None, 1, LONG_S, 1)).close()  # type: ignore[arg-type]
    assert len(closed) == 1


def test_python_is_refused_where_there_is_no_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("groupwise.episodes.tools.refusal", lambda: "the kernel said no")
    with pytest.raises(ConfigError, match=r"rollout\.tools names python, .* the kernel said no; run where it is allowed"):
        load_tools(["python"])


def test_an_argument_may_be_null_where_its_type_says_so() -> None:
    def find(word: str, limit: int | None = None) -> str:
        """Finds.

        Args:
            word: What.
            limit: How many.
        """
        return f"{word} {limit}"

    box = Toolbox({"find": describe(find, "find")}, LONG_S)
    assert box.call(Asked("find", {"word": "a", "limit": None})).result == "a None"
    assert box.call(Asked("find", {"word": None})).failure == "invalid"


def test_a_result_is_whole_where_nothing_limits_it(toolbox: Toolbox) -> None:
    assert len(Toolbox(toolbox.tools, None, longest=None).call(Asked("returns", {"kind": "megabyte"})).result) == 1_000_000
