"""The process behind ``algebra.py``: reads ``[answer, reference, timeout_s]`` lines of JSON, writes ``{"equal": bool}`` lines.

Run as a script, so that it imports math-verify and nothing of groupwise. Its parent kills it when it is late.
"""

import json
import math
import os
import re
import resource
import signal
import sys
from typing import Any

MEMORY_LIMIT_BYTES = 4 << 30
"""An expression that grows without end fails here before the machine does."""
INTERVALS = re.compile(r"\\infty|\\cup|\[|\]")
"""Marks of a reference that can be no point, as ``(1, 2)`` can."""
END = r"(?:[^A-Za-z<>=,;]|\\(?:frac|sqrt|pi|infty)(?![A-Za-z]))+"
LESS, MORE = (rf" ?(?:{sign}|\\{name}q?(?![A-Za-z])) ?" for sign, name in (("<", "le"), (">", "ge")))
SOLVED = re.compile(
    rf"[A-Za-z](?:{LESS}|{MORE}| ?\\neq?(?![A-Za-z])){END}|{END}(?:{LESS}|{MORE})[A-Za-z]|"
    rf"{END}{LESS}[A-Za-z]{LESS}{END}|{END}{MORE}[A-Za-z]{MORE}{END}"
)
"""A letter between bounds. Other inequalities may be the problem itself: ``x^2 < 4``."""
COMMAND, ELEMENT_OF = re.compile(r"\\[A-Za-z]+"), re.compile(r"(.*?)\\in(?![A-Za-z])")


def limit_memory() -> None:
    try:
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    except (ValueError, OSError):
        pass  # no such limit on this system; the time limit remains


def die_after(seconds: float) -> None:
    """Outlive a parent that was killed itself by a few seconds only. The default action ends even a loop in C; 0 disarms."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(math.ceil(seconds))


def equal(answer: str, reference: str) -> bool:
    from latex2sympy2_extended.latex2sympy2 import NormalizationConfig
    from math_verify import LatexExtractionConfig, parse, verify

    # Units are compared before we are asked; math-verify would drop them, and single letters that look like one.
    as_written = NormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="all", equations=False
    )
    how = [LatexExtractionConfig(normalization_config=as_written)]
    # Time limits off: they would arm signal.alarm for nothing, and the parent's limit is the one that counts.
    gold, target = (parse(f"${text}$", how, parsing_timeout=None) for text in (reference, answer))
    limits: dict[str, Any] = {
        "float_rounding": 12,
        "timeout_seconds": None,
        "allow_set_relation_comp": _bounds_of_the_same(answer, reference),
    }
    return bool(gold and target and verify(gold, target, **limits)) and really_equal(gold, target)


def _bounds_of_the_same(answer: str, reference: str) -> bool:
    """Whether ``answer`` bounds a letter and ``reference`` has intervals, of that letter where it names one: ``x \\in [1, 2]``."""
    if not (INTERVALS.search(reference) and SOLVED.fullmatch(answer)):
        return False
    named = ELEMENT_OF.match(reference)
    return named is None or named[1].strip() in re.findall("[A-Za-z]", COMMAND.sub("", answer))


def really_equal(gold: list[Any], target: list[Any]) -> bool:
    """Whether two texts that math-verify calls equal are. It takes differences below 1e-16 for none, and any two equations without a real
    solution for one."""
    from sympy import Basic

    one, other = (next((part for part in parsed if isinstance(part, Basic)), None) for parsed in (gold, target))
    return one is None or other is None or _same(one, other)


def _same(one: Any, other: Any) -> bool:
    from sympy import Eq, Expr, FiniteSet, Interval, N, Tuple, simplify, solve

    if isinstance(one, (Interval, Tuple)) and type(one) is type(other):
        return all(map(_same, one.args, other.args))
    if isinstance(one, FiniteSet) and isinstance(other, FiniteSet):
        return all(any(_same(a, b) for b in other) for a in one)
    if isinstance(one, Eq) and isinstance(other, Eq):
        if any(side.is_Matrix or not isinstance(side, Expr) for side in (*one.args, *other.args)):
            return True  # sets, points, vectors: their members are told apart, however near
        factor = simplify((one.lhs - one.rhs) / (other.lhs - other.rhs))
        try:
            return not factor.free_symbols or bool(solve(one))
        except NotImplementedError:
            return True
    if isinstance(one, Expr) and isinstance(other, Expr) and one.is_number and other.is_number:
        first, second = N(one, 30), N(other, 30)
        if first.is_finite and second.is_finite:  # looser than math-verify's 12 digits: it decides near zero alone
            return bool(abs(first - second) <= 1e-9 * max(abs(first), abs(second)) or simplify(one - other) == 0)
    return True


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # whatever a library prints must not end up among the replies
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # for the parent, which closes our input when it ends
    limit_memory()
    import math_verify  # noqa: F401

    def reply(message: dict[str, Any]) -> None:
        replies.write(json.dumps(message) + "\n")
        replies.flush()

    reply({"ready": True})
    for line in sys.stdin:
        answer, reference, timeout_s = json.loads(line)
        die_after(timeout_s + 5)
        try:
            reply({"equal": equal(answer, reference)})
        except Exception as error:
            reply({"error": type(error).__name__})
        die_after(0)


if __name__ == "__main__":
    main()
