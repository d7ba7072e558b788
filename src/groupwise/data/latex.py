r"""When two answers are equal as mathematics: what has to agree before math-verify is asked, and what it is never asked.

math-verify alone drops units, subscripts of digits and the halves of a day, takes the right side of any equation, compares to six
decimals, and does not tell ``x`` from ``X``. As a reward that pays wrong answers. So units, bases, times, ratios, names and brackets
are compared here, by rules that say "unequal" where they are in doubt, and only what is left goes to the computer algebra system.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction

from groupwise.data import algebra
from groupwise.data.quantities import (
    FUNCTION_WORDS,
    MEASURES,
    changes_the_value,
    colon_parts,
    plain_text,
    quantities_equal,
    read_quantity,
    same_unit,
    split_unit,
    time_of_day,
)

__all__ = ["latex_equivalent", "latex_failures", "renew_budget", "too_expensive"]

renew_budget = algebra.renew_budget

LONGEST_EXPRESSION = 500
"""Characters; a longer text is prose or noise, and never worth a computer algebra system's time."""
LARGEST_EXPONENT = 5000
"""Largest exponent of a number, powers of powers multiplied; and the largest number whose factorial, binomial and so on is computed."""
MOST_TERMS = 500
"""Terms that products and powers of sums may have once multiplied out; a thousand take math-verify six seconds."""
DEEPEST = 40
"""Brackets within brackets."""

MATHS_MARK = re.compile(r"[\\^_=+*/()\[\]{}<>|,!\-0-9]")
COMMAND = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|operatorname)\{[^{}]*\}|\\(?:begin|end)\{[^{}]*\}|\\[A-Za-z]+")
LONG_WORD = re.compile(r"[A-Za-z]{4,}")
FUNCTION = re.compile("sqrt|frac|infty|infinity|sinh|cosh|tanh|arcsin|arccos|arctan|theta|alpha|beta|gamma|floor|ceil")
ROUGHLY = re.compile(r"^\\approx(?![A-Za-z])\s*")
LAST_STOP = re.compile(r"(?<![\\.])[.,;]\s*$")
WHOLLY_TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textnormal|textrm)\s?\{([^{}]*)\}")
TEXT = re.compile(r"\\(?:text|mbox|mathrm|textbf|mathbf|textnormal|textrm)\s?\{\s*([^{}]*?)\s*\}")
AND_OR = re.compile(r"(?:,\s*)?(?:\\text\{\s*,?\s*(?:and|or)\s*\}|(?<=[\s,])(?:and|or)(?=\s))\s*")
SIGNS: Mapping[str, str] = {
    "π": r"\pi ", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "÷": r"\div ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ",
    "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ",
    "⋅": r"\cdot ", "∙": r"\cdot ", "⁄": "/", "∕": "/",
    "≈": r"\approx ", "∼": r"\approx ", "≃": r"\approx ", "≅": r"\approx ", "≐": r"\approx ",
}  # fmt: skip
SMALL = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻₀₁₂₃₄₅₆₇₈₉", "0123456789+-0123456789")
RAISED, LOWERED = re.compile("[⁺⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]+"), re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
ROOT = re.compile(r"√\s?(?:\(([^()]*)\)|([0-9]+(?:\.[0-9]+)?|[A-Za-z]))")


def _improper(mixed: re.Match[str]) -> str:
    whole, top, bottom = (int(number) for number in mixed.groups() if number)
    return rf"\frac{{{whole * bottom + top}}}{{{bottom}}}"


REWRITTEN = tuple(
    (re.compile(pattern), meant)
    for pattern, meant in (
        (r"\\(?:left|right|displaystyle|limits|big|Big|bigg|Bigg)(?![A-Za-z])", ""),
        (r"\\(?:boxed|fbox) ?(?=\{)", ""),  # math-verify reads nothing else than what is in the box
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"(?:(?<!\\)\\|(?<![\\A-Za-z]))sqrt\s?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\[dtc](frac|binom)(?![A-Za-z])", r"\\\1"),
        (
            r"\\(frac|binom) ?([0-9]|\{[^{}]*\}) ?([0-9](?![0-9])|\{[^{}]*\})",
            lambda found: rf"\{found[1]}{{{found[2].strip('{}')}}}{{{found[3].strip('{}')}}}",
        ),
        (r"\\(?:textnormal|textrm|mbox|mathrm)(?![A-Za-z])", r"\\text"),
        (r"\\(?:leq|leqslant)(?![A-Za-z])", r"\\le"),
        (r"\\(?:geq|geqslant)(?![A-Za-z])", r"\\ge"),
        (r"^([^0-9A-Za-z~\\]*)~|=\s*~|~\s*=|\\(?:sim|simeq|cong|approxeq|thickapprox|doteq)(?![A-Za-z])", r"\\approx \1"),
        (r"(?<!\\)\\[,;: ]|~|\\q?quad(?![A-Za-z])|\\phantom\s?(?=[-+])", " "),
        (r">\s?=", r"\\ge "),
        (r"<\s?=", r"\\le "),
        (r"!=", r"\\ne "),
        (r"^\s*(?:\\(?:therefore|implies)(?![A-Za-z])|=(?![=<>]))\s*", ""),
        (r"\^ ?(-[0-9]+)(?![0-9./])", r"^{\1}"),
        (r"\^\{\s?\\circ\s?\}|\\degree(?![A-Za-z])", r"^\\circ "),
        (r"\^\{\s?([0-9A-Za-z])\s?\}(?!\s?[0-9])", r"^\1"),
        (r"(?<!\\log)_\{\s?([0-9]+|[A-Za-z])\s?\}(?!\s?[0-9])", r"_\1"),
        (r"\\log\s?_\s?([0-9A-Za-z])(?![0-9])", r"\\log_{\1}"),  # math-verify reads log_10 5 as 5 times log_1 0
        (r"\(([0-9A-F]+)\)_", r"\1_"),
        # math-verify takes an i for a complex number where it stands alone, and for a real one, another letter, in 2i.
        (r"(?<=[0-9])\s*(?=i(?![A-Za-z]))", " "),
        (r"(?<!\\)\{\s?([0-9]{1,3}(?:,[0-9]{3})+)\s?\}", lambda found: "{" + found[1].replace(",", "") + "}"),
        # Mixed numbers: math-verify reads (2+1)/2 in 2 1/2, and the product in 2\frac{1}{2}\pi.
        (
            r"(?<![0-9A-Za-z.,^_/])([0-9]+)(?:\s+([0-9]+) ?/ ?([0-9]+)(?! ?(?:[0-9A-Za-z./(!^]|\\(?!text)))|"
            r" ?\\frac\{([0-9]+)\}\{([0-9]+)\}(?! ?[!^]))",
            _improper,
        ),
        # Numbers, fractions and binomials side by side are factors; math-verify takes 5(6) for the mixed number 5 + 6.
        (r"(?<![\\A-Za-z0-9.,_^])([0-9]+(?:\.[0-9]+)?) ?(?=\((?:[-+0-9.]|\\(?!text))[^,;()]*\))", r"\1\\cdot"),
        (r"(?<=[0-9]) ?(?=\\binom(?![A-Za-z]))", r"\\cdot"),
        (
            r"((?<!\\)\)|\\(?:frac|binom)\{[^{}]*\}\{[^{}]*\}) ?"
            r"(?=[0-9]|\\(?:frac|binom)(?![A-Za-z])|\((?:[-+0-9.]|\\(?!text))[^,;()]*\))",
            r"\1\\cdot ",
        ),
    )
)
UNREADABLE = re.compile(
    # Parts of an expression that math-verify drops or misreads: percentages within, repeated decimals, dots, bases, 1e5.
    r"[%$]|\\(?:overline|bar|dot|hat|vec|widehat|overrightarrow|ldots|dots|cdots)(?![A-Za-z])|\.\.|[0-9][0-9A-F]*\s*_|[0-9][eE][+-]?[0-9]|"
    r"\\text\s?\{|[^\x00-\x7f]|[0-9]\s*\^\s*\{?\s*(?:st|nd|rd|th)(?![a-z])|"
    # Derivatives, transposes and adjoints; remainders, what is not printed, negations; degrees within; products that may not commute;
    # letters' common divisors and multiples, and signs that are read as letters or as an equals sign.
    r"['\"]|\\(?:prime|[bp]?mod|[hv]?phantom|not|neg|lnot|cancel|sout)(?![A-Za-z])|\^\s*\{?\s*(?:T|\*|\\(?:circ|top|ast|dag|dagger))(?![A-Za-z])|"
    r"\^\s*\{\s*\(\s*(?:[0-9]+|[a-z])\s*\)\s*\}|(?<![\\A-Za-z])[A-Za-z]\s*\\times\s*[A-Za-z](?![A-Za-z])|"
    r"\\frac\s*\{\s*(?:d|\\partial)\s*[A-Za-z\\^][^{}]*\}\s*\{\s*(?:d|\\partial)\s*[A-Za-z\\]|\\(?:partial|equiv|angle|measuredangle)(?![A-Za-z])|"
    r"\\(?:gcd|lcm|operatorname\{(?:gcd|lcm)\})\s*\([^()]*[A-Za-z]"
)
ARGUMENTS = re.compile(r"\\(?:frac|binom)\s*(?:[0-9]|\{[^{}]*\})\s*(?:[0-9]|\{[^{}]*\})|_[0-9]+\s*")
"""Numbers side by side that belong to a command, and an index."""
SIDE_BY_SIDE = re.compile(r"[0-9]\s+[0-9.]|[0-9]\s*\{\s*[0-9]|(?<![A-Za-z0-9}\])^_])\{[0-9.]+\}\s*[0-9{(]|\.[0-9]+\.")
"""Two numbers without a sign between them: math-verify adds them (``5 6`` is 11) or drops all but zeros (``10 000``)."""
WORD_AFTER_NUMBER = re.compile(r"(?<=[0-9])(\s*)([A-Za-z]{2,})(?![A-Za-z])")
EQUALS = re.compile(r"(?<![<>!:\\])=(?!=)")
RELATION = re.compile(rf"{EQUALS.pattern}|[<>]|\\(?:le|ge|neq?)(?![A-Za-z])")
GREEK = r"\\(?:alpha|beta|gamma|delta|epsilon|theta|lambda|mu|phi|rho|sigma|tau|omega|Delta|Theta|Omega)"
NAME = re.compile(
    r"(?:(?:m\s?)?\\(?:angle|measuredangle|triangle)\s?)?"
    rf"(?:[A-Za-z]|(?P<points>[A-Z]{{2,4}})|{GREEK})"
    r"(?:_(?:[0-9]+|\w|\{(?:[0-9]+|[A-Za-z](?: ?[+-]? ?[0-9])?)\}))?(?:\([\w, ]+\))?"
)
"""A letter or points, with an index and arguments. Nothing with a prime, a power or a bar: those make another thing of it."""
POINT = re.compile(r"\( ?[A-Za-z](?: ?, ?[A-Za-z])+ ?\)")
STYLED_NAME = re.compile(r"^\\(?:mathbf|boldsymbol|vec|text)\s?\{([A-Za-z])\}((?:_[0-9A-Za-z])?)$")
"""Of a vector or a matrix: ``\\mathbf{v}`` names what ``v`` does."""
COORDINATES = frozenset({r"(r,\theta)", r"(r,\theta,z)", r"(\rho,\theta,\phi)"})
"""Polar, cylindrical and spherical ones in their usual order, which is not that of the alphabet."""
DERIVED = re.compile(r"'+|\^\{-1\}")
WORDS = re.compile(r"\\text\s?\{\s*([A-Za-z ]+)\}|([A-Za-z][A-Za-z ]+)")
NAMING_WORDS = frozenset(
    re.findall(
        "[a-z]+",
        "the a my our so final answer result solution value number amount total sum overall cost costs price profit revenue income area "
        "perimeter circumference volume length width height depth radius diameter distance speed time age weight mass angle slope average "
        "mean median probability remaining left altogether money",
    )
)
"""Words that may stand before an equals sign, because whatever they name is what follows it."""
CAPITALS_ASIDE = re.compile("[A-Za-z][a-z]{3,}|[Yy]es|[Nn]o|[Oo]dd")
"""A word that is the same one with another first letter. Three letters may be a product: ``mgh`` and ``Mgh``."""
COMMANDS = re.compile(r"\\[A-Za-z]+")
THOUSANDS = re.compile("[0-9],[0-9]{3}(?![0-9])")
DIGITS = re.compile("[0-9]+")
JOINED = re.compile(r"[0-9]+(?:-[0-9]+)+|[0-9]+(?: ?[-/] ?[0-9]+){2}")
"""A date, a telephone number, a score, a range; as a difference or a quotient one could not tell it."""
ELEMENT_OF = re.compile(r"^[A-Za-z]\s?\\in(?![A-Za-z])\s*")
OR = re.compile(r"\s*(?:\\text\s?\{\s*or\s*\}|(?<=\s)or(?=\s))\s*")
BOUND = re.compile(r"([A-Za-z]) ?(<|>|\\[lg]e(?![A-Za-z])) ?((?:[^A-Za-z<>=,;]|\\(?:frac|sqrt|pi)(?![A-Za-z]))+)")
BOUNDED = {"<": r"(-\infty, %s)", r"\le": r"(-\infty, %s]", ">": r"(%s, \infty)", r"\ge": r"[%s, \infty)"}
"""By its sign, the interval of the letter in a ``BOUND``."""
SEVERAL_SIGNS = re.compile(r"\\(?:pm|mp)(?![A-Za-z])")


def latex_equivalent(answer: str, reference: str, timeout_s: float = algebra.TIMEOUT_S) -> bool:
    r"""Whether ``answer`` is equal to ``reference`` as mathematics (``\frac{1}{2}`` and ``0.5``, ``x=3`` and ``3``).

    Prose, over-long texts and expressions that would take long to compute (``9^{9^9}``) are equal only as text. Safe on any thread.

    Raises UncheckedAnswerError where math-verify, asked twice, gave no verdict.
    """
    if max(len(answer), len(reference)) > LONGEST_EXPRESSION:
        return answer.strip() == reference.strip()
    reference = _normal(reference)
    answer = _normal(_union(answer) if "\\cup" in reference else answer)
    if ROUGHLY.match(reference):  # it is rounded itself, and its digits are what is asked for
        answer, reference = ROUGHLY.sub("", answer), ROUGHLY.sub("", reference)
    if "\\approx" in answer or "\\approx" in reference:
        return _same_text(answer, reference) and answer != ""
    if JOINED.fullmatch(answer) or JOINED.fullmatch(reference):
        return _same_text(answer, reference)
    return _equal(answer, reference, timeout_s)


def latex_failures() -> Mapping[str, int]:
    """How often math-verify gave no verdict since this process began: ``timeout``, ``error``, ``crash``, ``unavailable``,
    ``spent``."""
    return algebra.failures()


def _normal(text: str) -> str:
    """One of several ways to write the same thing; nothing that changes the meaning."""
    text = plain_text(text)
    while (bare := plain_text(LAST_STOP.sub("", text))) != text:  # a full stop may stand within dollar signs, or behind them
        text = bare
    whole = WHOLLY_TEXT.fullmatch(text)
    text = whole[1].strip() if whole else text
    if not text.isascii():
        text = ROOT.sub(lambda match: rf"\sqrt{{{match[1] or match[2]}}}", text)
        text = RAISED.sub(lambda match: f"^{{{match[0].translate(SMALL)}}}", text)
        text = LOWERED.sub(lambda match: f"_{{{match[0].translate(SMALL)}}}", text)
        for sign, command in SIGNS.items():
            text = text.replace(sign, command)
    for pattern, meant in REWRITTEN:
        text = pattern.sub(meant, text)
    return AND_OR.sub(", ", LAST_STOP.sub("", " ".join(text.split()))).strip()


def _union(text: str) -> str:
    r"""``x < 1 or x \ge 2`` as ``x \in (-\infty, 1) \cup [2, \infty)``, other texts as they are."""
    bounds = [BOUND.fullmatch(_normal(part)) for part in OR.split(plain_text(text))]
    found = [bound.groups() for bound in bounds if bound]
    if len(found) < max(2, len(bounds)) or len({letter for letter, _, _ in found}) > 1:
        return text
    return rf"{found[0][0]} \in " + r" \cup ".join(BOUNDED[sign] % end for _, sign, end in found)


def _same_text(left: str, right: str) -> bool:
    """White space aside where it separates nothing: behind a comma it makes a list of what would be a number of thousands."""
    if len(_list(left)) != len(_list(right)):
        return False
    left, right = (re.sub(r"\s+(?![0-9A-Za-z])|(?<![0-9A-Za-z])\s+", "", text) for text in (left, right))
    return left == right


def _same_word(answer: str, reference: str) -> bool:
    """Whether both are one word, but for the first letter or all in capitals: ``true``, ``True`` and ``TRUE``. Letters that may be
    a product, as ``ab``, are told apart."""
    if not CAPITALS_ASIDE.fullmatch(reference) or answer.lower() != reference.lower():
        return False
    if answer.isupper():
        return not reference.islower() or reference in ("yes", "no", "true", "false")
    return answer[1:] == reference[1:]


def _equal(answer: str, reference: str, timeout_s: float) -> bool:
    if _same_text(answer, reference):
        return bool(answer)
    if _same_word(answer, reference):
        return True
    times = time_of_day(answer), time_of_day(reference)
    if times != (None, None):
        return times[0] == times[1]
    if EQUALS.search(answer) or EQUALS.search(reference):
        return _equations_equal(answer, reference, timeout_s)
    ratios = colon_parts(answer), colon_parts(reference)
    if ratios != (None, None):
        return _ratios_equal(*ratios)
    measured = read_quantity(answer), read_quantity(reference)
    if measured[0] is not None and measured[1] is not None:
        return quantities_equal(measured[0], measured[1])
    listed = _measured_list(answer), _measured_list(reference)
    if listed[0] is not None and listed[1] is not None:
        return same_unit(listed[0][1], listed[1][1]) and listed[0][0] == listed[1][0]
    (answer, unit), (reference, expected) = _measured(answer), _measured(reference)
    if not same_unit(unit, expected) or not answer or not reference:
        return False
    if unit is not None or expected is not None:
        return _equal(answer, reference, timeout_s)
    members = ELEMENT_OF.match(answer), ELEMENT_OF.match(reference)
    if members[0] and members[1]:
        return answer[0] == reference[0] and _equal(answer[members[0].end() :], reference[members[1].end() :], timeout_s)
    return _ask(answer, reference, timeout_s)


def _measured_list(text: str) -> tuple[Counter[Fraction], str | None] | None:
    """The numbers of a list and the unit of each, ``5 cm, 6 cm``; ``None`` for what is no list or has several units."""
    quantities = [read_quantity(item) for item in _list(text)] if "," in text or ";" in text else []
    found = [quantity for quantity in quantities if quantity is not None and not quantity.tight]
    if len(found) < max(2, len(quantities)) or len({quantity.unit for quantity in found}) > 1:
        return None
    return Counter(Fraction(quantity.value) for quantity in found), found[0].unit


def _measured(text: str) -> tuple[str, str | None]:
    """Body and unit; a unit that may be a product of letters stays where it is."""
    body, unit, _, tight = split_unit(text)
    return (text, None) if tight else (body, unit)


def _ratios_equal(left: list[str] | None, right: list[str] | None) -> bool:
    """Part by part: ``2:4`` may be a clock time, and is not reduced."""
    if left is None or right is None or len(left) != len(right):
        return False
    pairs = [(read_quantity(a), read_quantity(b), a == b != "") for a, b in zip(left, right, strict=True)]
    return all(same or (a is not None and b is not None and quantities_equal(a, b)) for a, b, same in pairs)


# --- equations ---------------------------------------------------------------------------------------------------------


def _equations_equal(answer: str, reference: str, timeout_s: float) -> bool:
    """``x = 3`` and ``3`` are equal, ``x = 3`` and ``y = 3`` are not. In ``12 + 7 = 19`` and ``x = 12 + 7 = 19`` each side but a name has
    to be the reference's value. A reference of quantities alone, ``0.56 = 56%``, is equal to each of them."""
    left, right = _list(answer), _list(reference)
    if len(left) > 1 or len(right) > 1:
        return _lists_equal(left, right, timeout_s)
    said, asked = _sides(answer), _sides(reference)
    if len(said) == len(asked) == 2 and not (said[0] == "" or asked[0] == ""):
        same = _same_text(said[0], asked[0])
        if (_is_name(said[0]) and _is_name(asked[0])) or (same and DERIVED.search(said[0])):
            return same and _equal(said[1], asked[1], timeout_s)
        unknowns, expected = (set(re.findall("[A-Za-z]", COMMANDS.sub("", text))) for text in (answer, reference))
        return unknowns == expected != set() and _ask(answer, reference, timeout_s)
    if len(asked) == 2 and _is_name(DERIVED.sub("", asked[0])) and len(said) == 1:
        return _equal(said[0], asked[1], timeout_s)
    if len(said) == 1 and all(map(read_quantity, asked)):
        return any(_equal(said[0], side, timeout_s) for side in asked)  # 0.56 = 56%
    if len(asked) > 1:
        named = len(asked) == 2 and _is_name(asked[0]) and _same_text(said[0], asked[0])
        return named and all(value != "" and _equal(value, asked[1], timeout_s) for value in said[1:])
    names = next((i for i, side in enumerate(said[:-1]) if not _is_name(side)), len(said) - 1)
    values = said[names:]
    return all(value != "" and _equal(value, asked[0], timeout_s) for value in values)


def _lists_equal(answer: list[str], reference: list[str], timeout_s: float) -> bool:
    """Whether lists with names are equal: the same names with equal values in any order, or the values of one name (``x = 1, x = 2``,
    ``x = \\pm 1``) as a list, with the name or without."""
    said, asked = _named(answer), _named(reference)
    if said is None or asked is None:
        return False
    names, expected = [name for name, _ in said], [name for name, _ in asked]
    if len({*names, *expected} - {""}) < 2:
        return _equal(", ".join(value for _, value in said), ", ".join(value for _, value in asked), timeout_s)
    if sorted(names) != sorted(expected) or len(set(names)) < len(names):
        return False
    order = sorted(range(len(said)), key=lambda i: names[i]), sorted(range(len(asked)), key=lambda i: expected[i])
    return all(_equal(said[i][1], asked[j][1], timeout_s) for i, j in zip(*order, strict=True))


def _named(items: list[str]) -> list[tuple[str, str]] | None:
    """Name and value of each, a name of "" where it has none; ``None`` where an item is another kind of equation."""
    members = []
    for item in items:
        sides = _sides(item)
        if len(sides) > 2 or "" in sides or (len(sides) == 2 and not _is_name(sides[0])):
            return None
        members.append((sides[0].replace(" ", "") if len(sides) == 2 else "", sides[-1]))
    return members


def _sides(text: str) -> list[str]:
    *names, value = (side.strip() for side in EQUALS.split(text))
    return [*(STYLED_NAME.sub(r"\1\2", name) for name in names), value]


def _is_name(text: str) -> bool:
    """A symbol, a point of several, or words that leave the value what it is, with the plural of what is counted: ``number of eggs
    left``."""
    if symbol := NAME.fullmatch(text):
        points = symbol["points"] or ""
        return not changes_the_value(points) and points.lower() not in FUNCTION_WORDS
    if text.replace(" ", "") in COORDINATES:
        return True
    if POINT.fullmatch(text):  # letters in their order: (y, x) = (1, 2) is not what (1, 2) is without a name
        letters = re.findall("[A-Za-z]", text)
        return letters == sorted({*letters})
    written = WORDS.fullmatch(text)
    words = (written[1] or written[2]).lower().split() if written else []
    counted = [word for word in words if word not in NAMING_WORDS and word != "of"]
    if len(counted) == len(words) or any(word.removesuffix("s") in FUNCTION_WORDS or changes_the_value(word) for word in counted):
        return False
    return all(len(word) > 3 and word.endswith("s") and word not in ("squares", "cubes", "times") for word in counted)


def _is_solved(text: str) -> bool:
    r"""Whether ``text`` says what one name is: ``x = 3``, ``3 = x``, ``1 < x \le 2``, and neither ``x + 3 = 6`` nor ``2x - 3 = x``.
    The letters e and i are numbers."""
    sides = [side.strip() for side in RELATION.split(text)]
    plain = (COMMANDS.sub("", re.sub(rf"{GREEK}(?![A-Za-z])", "t", side)) for side in sides)
    lettered = [side for side, letters in zip(sides, plain, strict=True) if {*re.findall("[A-Za-z]", letters)} - {"e", "i"}]
    return len(sides) > 1 and len(lettered) == 1 and _is_name(lettered[0])


def _list(text: str) -> list[str]:
    """What stands between commas and semicolons outside brackets."""
    items, depth, begin = [], 0, 0
    for place, sign in enumerate(text):
        depth += (sign in "({[") - (sign in ")}]")
        if sign in ",;" and depth == 0 and not THOUSANDS.match(text[max(0, place - 1) : place + 5]):
            items.append(text[begin:place].strip())
            begin = place + 1
    return [*items, text[begin:].strip()]


# --- what math-verify is asked ---------------------------------------------------------------------------------------------


def _ask(answer: str, reference: str, timeout_s: float) -> bool:
    answer, reference = _both_signs(answer), _both_signs(reference)
    if not (_is_maths(answer) and _is_maths(reference)) or not (MATHS_MARK.search(answer) or MATHS_MARK.search(reference)):
        return False
    if _misread(answer) or _misread(reference) or not _same_brackets(answer, reference):
        return False
    if _is_solved(reference) and RELATION.search(answer) and not _is_solved(answer):
        return False  # the problem itself or a step on the way, which math-verify compares by the difference of the sides
    if (
        not _same_members(answer, reference)
        or too_expensive(answer)
        or too_expensive(reference)
        or not _same_letters(answer, reference)
    ):
        return False
    return algebra.equivalent(answer, reference, timeout_s)


def _is_maths(text: str) -> bool:
    if not text or len(text) > LONGEST_EXPRESSION:
        return False
    return all(FUNCTION.fullmatch(word) for word in LONG_WORD.findall(COMMAND.sub(" ", text)))


def _misread(text: str) -> bool:
    """Whether something stands in ``text`` that math-verify is known to drop or to take for another thing."""
    if UNREADABLE.search(TEXT.sub(lambda match: match[1] if len(match[1]) == 1 else match[0], text)):
        return True
    if SIDE_BY_SIDE.search(ARGUMENTS.sub("", text)):
        return True
    for space, word in WORD_AFTER_NUMBER.findall(text):
        if word not in FUNCTION_WORDS and (word.lower() in MEASURES or (space and changes_the_value(word))):
            return True
    return False


def _same_letters(answer: str, reference: str) -> bool:
    """False where a letter of both is a capital in one of them only: math-verify writes all letters small."""
    bare = (re.sub(r"\\(?:begin|end)\{[^{}]*\}", "", TEXT.sub(r"\1", text)) for text in (answer, reference))
    left, right = (set(re.findall(r"\\?[A-Za-z]+", text)) for text in bare)
    left, right = ({c for word in words for c in ([word] if word[0] == "\\" else word)} for words in (left, right))
    differing, small, expected = ({c.lower() for c in letters} for letters in (left ^ right, left, right))
    return not differing & small & expected


def _same_brackets(answer: str, reference: str) -> bool:
    """An interval or a point and a set are two things; a list without brackets is a set."""
    left, right = _brackets(answer), _brackets(reference)
    return left == right or "" in (left, right)


def _brackets(text: str) -> str:
    """What encloses a list: ``()``, ``[)``, ``list`` for a set; "" for what is no list."""
    text = text.strip()
    if len(_list(text)) > 1 or text.startswith("\\{") or (text[:1] + text[-1:] == "{}" and len(_list(text[1:-1])) > 1):
        return "list"
    if len(text) < 2 or text[0] not in "([" or text[-1] not in ")]" or len(_list(text[1:-1])) < 2:
        return ""
    depth = 0
    for sign in text[:-1]:
        depth += (sign in "([{") - (sign in ")]}")
        if depth == 0:
            return ""
    return text[0] + text[-1]


def _both_signs(text: str) -> str:
    r"""Each member with one ``\pm`` as two: math-verify knows it between terms alone, and in no fraction or point."""
    members = _members(text)
    signed: list[str] = []
    for member in members:
        alone = SEVERAL_SIGNS.findall(member) == ["\\pm"] and "\\{" not in member and not RELATION.search(member)
        signed += [SEVERAL_SIGNS.sub(sign, member) for sign in "+-"] if alone else [member]
    return text if len(signed) == len(members) else ", ".join(signed)


def _same_members(answer: str, reference: str) -> bool:
    """Whether there are as many members on both sides, each as often: math-verify compares lists as sets, which those in braces are."""
    left, right = (ELEMENT_OF.sub("", text) for text in (answer, reference))
    if all(text.startswith(("{", "\\{")) and text.endswith("}") and "," in text for text in (left, right)):
        return True
    members, expected = _members(left), _members(right)
    signs = [len(SEVERAL_SIGNS.findall(member)) for member in (*members, *expected)]
    if max(signs) > 1:
        return True
    if len(members) + sum(signs[: len(members)]) != len(expected) + sum(signs[len(members) :]):
        return False
    counts, wanted = Counter(map(_as_written, members)), Counter(map(_as_written, expected))
    return counts == wanted or max(counts.values()) == max(wanted.values()) == 1


def _members(text: str) -> list[str]:
    inner = re.fullmatch(r"\\?\{((?:(?!\\[{}]).)*)\\?\}", text)
    return _list(inner[1]) if inner else _list(text)


def _as_written(member: str) -> Fraction | str:
    quantity = read_quantity(member)
    return member.replace(" ", "") if quantity is None else Fraction(quantity.value)


def too_expensive(text: str) -> bool:
    r"""Whether computing ``text`` could take long or fill the memory: powers of powers and factorials of factorials of numbers, large
    exponents, powers of long sums, sums and products with large bounds. It never takes long itself."""
    if re.search(r"!\s*[)}\]\s]*!", text) or re.search(r"\\(?:uparrow|Uparrow|prod|sum|int|iint|lim|Gamma)(?![A-Za-z])", text):
        return True
    grows = "!" in text or re.search(r"\\[dt]?binom|\\choose", text)
    if grows and any(len(number) > 4 or int(number) > LARGEST_EXPONENT for number in DIGITS.findall(text)):
        return True
    if not grows and "^" not in text:
        return False
    return _height(text) > LARGEST_EXPONENT or _terms(text) > MOST_TERMS


def _terms(text: str) -> float:
    """An upper bound of the number of terms once all products and powers of sums are multiplied out. Sums of numbers count as one."""
    levels: list[tuple[float, float, bool]] = []
    done, product, letters, place = 0.0, 1.0, False, 0
    while place < len(text):
        sign = text[place]
        if sign in "({[":
            levels.append((done, product, letters))
            done, product, letters = 0.0, 1.0, False
        elif sign in ")}]" and levels:
            group, lettered = (done + product if letters else 1.0), letters
            done, product, letters = levels.pop()
            letters = letters or lettered
            exponent, power = re.compile(r"\s*\^").match(text, place + 1), 1.0
            if exponent and group > 1:
                inside, end = _exponent(text, exponent.end())
                power, place = _power(inside), end - 1
            product *= _powers_terms(group, power)
        elif sign in "+-" and text[max(0, place - 3) : place].rstrip()[-1:] not in ("", *"({[+-*/^"):
            done, product = done + product, 1.0
        elif sign.isalpha():
            letters = True
        if product > MOST_TERMS:
            return float("inf")
        place += 1
    return done + product


def _powers_terms(terms: float, power: float) -> float:
    """C(terms - 1 + power, power): the terms of a power of a sum."""
    if power > LARGEST_EXPONENT and terms > 1:
        return float("inf")
    small, large = sorted((terms - 1, power))
    count = 1.0
    for k in range(1, int(small) + 1):
        count *= (large + k) / k
        if count > 2 * MOST_TERMS:
            return float("inf")
    return count


def _height(text: str) -> float:
    """The largest product of exponents that stand upon each other, factorials counting by their number."""
    heights: list[float] = [1.0]
    stack: list[list[float]] = []
    last = 1.0
    place = 0
    while place < len(text):
        sign = text[place]
        if sign in "({[":
            stack.append(heights)
            heights, last = [1.0], 1.0
            if len(stack) > DEEPEST:
                return float("inf")
        elif sign in ")}]" and stack:
            last = max(heights)
            heights = stack.pop()
            heights.append(last)
        elif sign == "!":
            if last > 1:
                return float("inf")
            last = max((float(n) for n in DIGITS.findall(text[max(0, place - 12) : place])), default=9.0)
            heights.append(last)
        elif sign == "^":
            exponent, place = _exponent(text, place + 1)
            if text[place : place + 2].lstrip().startswith("^"):  # 9^9^9 is a tower
                return float("inf")
            last *= _power(exponent)
            heights.append(last)
            continue
        elif not sign.isspace():
            last = 1.0
        place += 1
    return max([*heights, *(height for level in stack for height in level)])


def _exponent(text: str, place: int) -> tuple[str, int]:
    """What stands in the exponent that begins at ``place``, and where it ends."""
    while place < len(text) and text[place] == " ":
        place += 1
    if place >= len(text) or text[place] not in "{(":
        match = re.compile(r"[+-]?[0-9]+|\\[A-Za-z]+|.?", re.DOTALL).match(text, place)
        assert match is not None
        return match[0], max(match.end(), place + 1)
    depth = 0
    for end in range(place, len(text)):
        depth += (text[end] in "({[") - (text[end] in ")}]")
        if depth == 0:
            return text[place + 1 : end], end + 1
    return text[place + 1 :], len(text)


def _power(exponent: str) -> float:
    exponent = re.sub(r"([A-Za-z])\s?\^\s?\{?\s?([0-9])(?![0-9])\s?\}?", r"\1", exponent)  # e^{x^2} is no tower
    if "^" in exponent or "!" in exponent:
        return float("inf")
    product = 1.0
    for number in DIGITS.findall(exponent):
        product *= max(1.0, float(number))
    return product
