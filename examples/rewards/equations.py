"""A reward of your own: equations that a completion writes down should hold."""

import re

from groupwise.rewards.functions import text_of

EQUATION = re.compile(r"(\d+) ?([-+x*]) ?(\d+) ?= ?(-?\d+)")


def true_equations(completions, **columns):
    """The share of the equations in a completion that hold; None, "does not apply", where there are none."""
    return [share_that_holds(EQUATION.findall(text_of(completion))) for completion in completions]


def share_that_holds(equations):
    if not equations:
        return None
    return sum(compute(int(a), sign, int(b)) == int(result) for a, sign, b, result in equations) / len(equations)


def compute(a, sign, b):
    return {"+": a + b, "-": a - b}.get(sign, a * b)
