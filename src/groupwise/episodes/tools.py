"""Tools that a policy may call: typed Python functions, by name, by import path or from Python; how they are described and called.

Whatever happens in a tool is told to the policy as text: a call of something that does not exist, arguments that do not fit, an exception,
a time-out, a result that is no text. None of it ends a run, and all of it is counted.
"""

from __future__ import annotations

import ast
import inspect
import json
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from groupwise.episodes.formats import Asked
from groupwise.errors import ConfigError
from groupwise.importing import import_member, in_one_line, nearest
from groupwise.rewards.calling import CallRaised, CallTimedOut, call_with_limit
from groupwise.rewards.programs import Programs
from groupwise.rewards.sandbox import refusal
from groupwise.types import ToolCall

__all__ = ["BUILTIN", "Tool", "Toolbox", "arguments_by_name", "calculator", "load_tools"]

LONGEST_RESULT = 2000
"""Characters of a result that the policy is given; the rest is cut, and the policy is told so."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a policy may call, with its description as JSON schema."""

    name: str
    function: Callable[..., Any]
    schema: Mapping[str, Any]
    """As transformers' ``get_json_schema`` makes it, which chat templates take."""
    bounded: bool = False
    """Whether it keeps to the time limit by itself."""
    close: Callable[[], None] | None = None
    """Ends the processes that it has, if any. A later call starts new ones."""

    @property
    def parameters(self) -> list[str]:
        """Names of its arguments, in order."""
        return list(self.schema["function"]["parameters"]["properties"])

    @property
    def summary(self) -> str:
        """``calculator(expression): Computes an arithmetic expression.``"""
        return f"{self.name}({', '.join(self.parameters)}): {self.schema['function']['description'].splitlines()[0]}"


def load_tools(named: Sequence[str], timeout_s: float = 10.0) -> dict[str, Tool]:
    """The tools that a config names, by the name that a policy calls them: built-in ones, and functions by import path.

    ``timeout_s``: of those that keep to it by themselves. Raises ConfigError for one that cannot be found or described, and for two of one
    name.
    """
    tools: dict[str, Tool] = {}
    known = (*BUILTIN, "python")
    for spec in named:
        if ":" in spec:
            function, _ = import_member(spec, "tool", ConfigError)
        elif spec == "python":
            programs = programs_in_sandbox(timeout_s)
            function = python_by(programs)
        elif spec in BUILTIN:
            function = BUILTIN[spec]
        else:
            raise ConfigError(
                f"rollout.tools names {spec!r}, which is no tool{nearest(spec, known)}: use {', '.join(known)}, or a function of your "
                "own, such as my_tools.py:search"
            )
        tool = describe(function, spec)
        if spec == "python":
            tool = replace(tool, bounded=True, close=programs.close)
        if tool.name in tools:
            raise ConfigError(f"rollout.tools has two tools that are called {tool.name}: rename one of them")
        tools[tool.name] = tool
    return tools


def describe(function: Any, place: str) -> Tool:
    """``function`` as a tool. Raises ConfigError where its signature or docstring do not say what a policy must know."""
    from transformers.utils import get_json_schema

    if not callable(function) or isinstance(function, type):
        raise ConfigError(f"the tool {place} is no function: name one with types and a docstring")
    try:
        schema = get_json_schema(function)
        if not schema["function"]["description"]:
            raise ValueError("its docstring does not begin with a sentence")
    except Exception as error:  # the library has several kinds, and a docstring may hold anything
        raise ConfigError(
            f"the tool {place} cannot be described to a policy ({in_one_line(error)}): give each argument a type, and the docstring a "
            "sentence on what it does and a line for each argument under 'Args:'"
        ) from error
    return Tool(schema["function"]["name"], function, schema)


class Toolbox:
    """The tools of a run, as a policy calls them.

    Args:
        timeout_s: seconds that one call may take; None for any number.
        longest: characters of a result that the policy is given; None for all.
        write: makes text of a result and the tool's name; it raises TypeError for what is no result. By itself `as_text`.
    """

    def __init__(
        self, tools: Mapping[str, Tool], timeout_s: float | None, longest: int | None = LONGEST_RESULT,
        write: Callable[[object, str], str] | None = None,
    ) -> None:  # fmt: skip
        self.tools, self.timeout_s, self.longest, self.write = dict(tools), timeout_s, longest, write or as_text

    def call(self, asked: Asked) -> ToolCall:
        """Makes the call, and returns what the policy is told of it. Raises nothing."""
        tool, problem = self.tools.get(asked.name), asked.problem
        if problem is None and tool is None:
            problem = f"there is no tool {asked.name!r}{nearest(asked.name, self.tools)}; there is {', '.join(self.tools)}"
        if problem is not None or tool is None:
            return _failed(asked, "invalid", str(problem))
        try:
            arguments = _bound(tool, asked)
        except (TypeError, ValueError) as error:
            return _failed(asked, "invalid", f"{error}; it is called as {tool.name}({', '.join(tool.parameters)})")
        named = Asked(asked.name, _plain(arguments))  # before the tool changes them
        try:
            result = self.write(call_with_limit(tool.function, arguments, None if tool.bounded else self.timeout_s), tool.name)
        except CallTimedOut:
            return self._late(named)
        except CallRaised as raised:
            if isinstance(raised.__cause__, CallTimedOut):
                return self._late(named)
            return _failed(named, "raised", in_one_line(raised.__cause__ or raised))
        except TypeError as error:
            return _failed(named, "raised", str(error))
        return ToolCall(tool.name, named.arguments, shortened(result, self.longest))

    def _late(self, asked: Asked) -> ToolCall:
        return _failed(asked, "timed_out", f"{asked.name} did not answer within {self.timeout_s:g} seconds")


def arguments_by_name(tool: Tool, asked: Asked) -> dict[str, Any]:
    """Those of a call as it was written. Raises ValueError where they cannot be read, are too many, or one is given twice."""
    given = dict(asked.arguments)
    if asked.text and not given:
        quoted = bool(asked.positions) and isinstance(asked.positions[0], str)
        if not quoted and (name := _only_text(tool)) is not None:
            return {name: asked.text}
        if not asked.positions:
            raise ValueError(f"the arguments {asked.text!r:.80} cannot be read")
    if asked.positions:
        names = tool.parameters
        if len(asked.positions) > len(names):
            raise ValueError(f"{len(asked.positions)} arguments are too many")
        if twice := [name for name in names[: len(asked.positions)] if name in given]:
            raise ValueError(f"the argument {twice[0]} is given by position and by name")
        given = dict(zip(names, asked.positions, strict=False)) | given
    return given


def _bound(tool: Tool, asked: Asked) -> dict[str, Any]:
    """The arguments by name. Raises TypeError or ValueError where they do not fit."""
    given = arguments_by_name(tool, asked)
    inspect.signature(tool.function).bind(**given)
    for name, value in given.items():
        schema = tool.schema["function"]["parameters"]["properties"].get(name, {})
        wanted = schema.get("type")
        if isinstance(wanted, str) and not _is_a(value, wanted) and not (value is None and schema.get("nullable")):
            raise ValueError(f"the argument {name} must be of the type {wanted}, and {value!r:.80} is not")
    return given


def _only_text(tool: Tool) -> str | None:
    """The one argument that must be given, where it is text."""
    parameters = tool.schema["function"]["parameters"]
    names = parameters.get("required") or tool.parameters
    if len(names) != 1:
        return None
    described = parameters["properties"].get(names[0], {})  # a client's schema may describe others alone
    return names[0] if described.get("type") == "string" else None


_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "array": (list, tuple), "object": (dict,),
}  # fmt: skip


def _is_a(value: object, wanted: str) -> bool:
    if isinstance(value, bool) and wanted != "boolean":
        return False
    return isinstance(value, _TYPES.get(wanted, (object,)))


def _failed(asked: Asked, failure: Any, why: str) -> ToolCall:
    return ToolCall(asked.name, _plain(asked.arguments), shortened(_whole(f"error: {why}")), failure)


def _plain(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """As a record can hold them."""
    return json.loads(_whole(json.dumps(dict(arguments), default=repr, ensure_ascii=False)))  # type: ignore[no-any-return]


def _whole(text: str) -> str:
    """With a question mark for half a character, which has no tokens."""
    return text.encode("utf-8", "replace").decode("utf-8")


def as_text(result: object, name: str) -> str:
    """Text as it is, and JSON for what has that form. Raises TypeError for anything else."""
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            raise TypeError(f"{name} returned {type(result).__name__}, which is neither text nor JSON") from None
    return _whole(result)


def shortened(text: str, longest: int | None = LONGEST_RESULT) -> str:
    if longest is None or len(text) <= longest:
        return text
    return f"{text[:longest]} ... (the first {longest:,} of {len(text):,} characters)"


# The built-in calculator. Nothing is evaluated as Python: a tree of numbers and operators is walked.

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod, ast.Pow: operator.pow, ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
_LONGEST_EXPRESSION = 200
_LARGEST_BITS = 400
"""The limit of a whole number in between, about 120 digits: what is larger would take memory and time, not teach anything."""
_HEXADECIMAL = re.compile(r"(?<![\w.,])0x\w+", re.IGNORECASE)
"""``0x10``, which as a product would be 0 by the sign x."""
_SIGNS = str.maketrans({"x": "*", "×": "*", "·": "*", "÷": "/", "−": "-", "^": "**", ",": "", "_": " "})


def calculator(expression: str) -> str:
    """Computes an arithmetic expression.

    Args:
        expression: Numbers, parentheses and + - * / // % **, such as 12 * (3 + 4).
    """
    if len(expression) > _LONGEST_EXPRESSION:
        raise ValueError(f"an expression of {len(expression)} characters is too long")
    if (hexadecimal := _HEXADECIMAL.search(expression)) is not None:
        raise ValueError(f"{hexadecimal[0]} is no decimal number: write it as one, or with * where times is meant")
    try:
        tree = ast.parse(expression.translate(_SIGNS).strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError(f"{expression!r} is no arithmetic expression") from None
    value = _value(tree.body)
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        value = int(value)
    if isinstance(value, int):
        return str(value)
    # Twelve digits hide what binary fractions add; more, so that none before the point is lost.
    digits = min(17, max(12, len(str(int(abs(value)))) + 1))
    return format(Decimal(f"{value:.{digits}g}"), "f")


def _value(node: ast.expr) -> int | float:
    value: Any
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not isinstance(node.value, bool):
        value = node.value
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_value(node.operand))
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        left, right = _value(node.left), _value(node.right)
        whole = isinstance(left, int) and isinstance(right, int)
        if isinstance(node.op, ast.Pow) and whole and abs(right) * max(1, _bits(left)) > _LARGEST_BITS:
            raise ValueError("the result is too large")
        try:
            value = _OPERATORS[type(node.op)](left, right)
        except ZeroDivisionError:
            raise ValueError("division by zero") from None
        except OverflowError:
            raise ValueError("the result is too large") from None
    else:
        raise ValueError("only numbers, parentheses and + - * / // % ** can be computed")
    if isinstance(value, complex) or _bits(value) > _LARGEST_BITS:
        raise ValueError("the result is too large, or no real number")
    return value  # type: ignore[no-any-return]


def _bits(value: float) -> int:
    if isinstance(value, int):
        return value.bit_length()
    return 0 if value != value or abs(value) < 1 else min(10_000, int(abs(value)).bit_length() if abs(value) < 1e300 else 10_000)


def programs_in_sandbox(timeout_s: float) -> Programs:
    """Raises ConfigError where there is no sandbox on this machine."""
    if refused := refusal():
        raise ConfigError(
            f"rollout.tools names python, which runs what the policy writes in a sandbox, and this machine does not allow that: {refused}; "
            "run where it is allowed, or leave it out"
        )
    return Programs(os.cpu_count() or 1, timeout_s)


def python_by(programs: Programs) -> Callable[[str], str]:
    """The tool ``python``."""

    def python(code: str) -> str:
        """Runs a Python program and returns what it prints.

        Args:
            code: The program. It has no network, and nothing of it stays for the next one.
        """
        return programs(code)

    return python


BUILTIN: dict[str, Callable[..., Any]] = {"calculator": calculator}
