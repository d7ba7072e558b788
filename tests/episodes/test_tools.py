"""Tools: how they are found and described, what the policy is told of whatever happens in them, and the calculator."""

from __future__ import annotations

import math
import operator
import random
import time
from typing import Any

import pytest

from groupwise.episodes.formats import FORMATS, Asked
from groupwise.episodes.tools import LONGEST_RESULT, Tool, Toolbox, as_text, calculator, describe, load_tools
from groupwise.errors import ConfigError


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
        {f.__name__: describe(f, f.__name__) for f in (search, hangs, raises, returns, waits, calculator)}, timeout_s=0.2
    )


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
    assert Toolbox(tools, 1.0).call(Asked("twice", {"word": "ha"})).result == "haha"


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


def test_a_tool_must_say_what_its_arguments_are() -> None:
    def silent(word: str) -> str:
        return word

    with pytest.raises(ConfigError, match="a line for each argument under 'Args:'"):
        describe(silent, "mine.py:silent")


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
        (Asked("hangs", {"seconds": 30}), "error: hangs did not answer within 0.2 seconds", "timed_out"),
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
    call = toolbox.call(asked)
    assert call.result.startswith(result)
    assert call.failure == failure
    assert call.name == asked.name


def test_a_megabyte_is_cut_and_says_so(toolbox: Toolbox) -> None:
    call = toolbox.call(Asked("returns", {"kind": "megabyte"}))
    assert call.failure is None
    assert len(call.result) < LONGEST_RESULT + 100
    assert call.result.endswith("... (the first 2,000 of 1,000,000 characters)")


def test_arguments_that_no_record_can_hold_are_kept_as_text(toolbox: Toolbox) -> None:
    assert toolbox.call(Asked("search", {"query": {1, 2}})).arguments == {"query": "{1, 2}"}


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
    ],
)  # fmt: skip
def test_the_calculator_reads_usual_signs(expression: str, value: str) -> None:
    assert calculator(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "", "hello", "__import__('os')", "(1).__class__", "[1]", "1 if 1 else 2", "f'{1}'", "9**9**9**9", "2**10000", "1 << 99999",
        "1 / 0", "0 ** -1", "(" * 99, "1+" * 150 + "1", "'a' * 9", "1j * 1j", "(-8) ** 0.5", "True + 1", "lambda: 1", "1e308 * 10", "1e999",
    ],
)  # fmt: skip
def test_the_calculator_refuses_quickly_what_is_no_arithmetic(expression: str) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError):
        calculator(expression)
    assert time.monotonic() - started < 1


def test_every_builtin_tool_can_be_described() -> None:
    tools = load_tools(["calculator"])
    assert isinstance(tools["calculator"], Tool)
    for form in FORMATS.values():
        (asked,) = form.read(form.write("calculator", {"expression": "6 * 7"}))
        assert Toolbox(tools, 1.0).call(asked).result == "42"
    assert as_text(math.pi, "f").startswith("3.14")
