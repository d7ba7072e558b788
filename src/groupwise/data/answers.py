"""Finding answers in text and comparing them. No torch, no tokenizer: strings in, verdicts out.

Two figures are kept apart everywhere. *Strict*: the answer stands where the prompt asked for it and is right. *Lenient*: a right
answer stands anywhere a reader would look for it. A model that computes well and formats badly differs in nothing else.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from groupwise.data.latex import latex_equivalent, latex_failures
from groupwise.errors import AnswerError

__all__ = [
    "PLACEHOLDERS",
    "PLACES",
    "AnswerFormat",
    "AnswerStyle",
    "Grade",
    "answers_equal",
    "exact_match",
    "extract_answer",
    "extract_last_number",
    "extract_reference",
    "grade",
    "latex_equivalent",
    "latex_failures",
    "numeric_equal",
    "numeric_value",
]

AnswerStyle = Literal["xml", "boxed", "plain"]
"""Where a completion's answer stands: in ``<answer>``, in ``\\boxed{}``, or after ``####``."""
AnswerFormat = Literal["auto", "gsm8k", "boxed", "xml", "plain"]

PLACES: tuple[AnswerStyle, ...] = ("xml", "boxed", "plain")
PLACEHOLDERS = frozenset({"", "...", "…", ". . ."})
"""What a model copies from the prompt's example instead of answering."""
LONGEST_NUMBER = 100
"""Characters; beyond this a text is not read as one number (and Python refuses to convert 4,300 digits)."""

XML_BLOCK = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
BRACE = re.compile(r"\\boxed\s*\{|\\[{}\\]|[{}]")
# Digits are written out as [0-9] because \d also matches other scripts' digits.
DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
UNSIGNED = rf"(?:{DIGITS}(?:\.[0-9]+)?|\.[0-9]+)"
NUMBER_IN_TEXT = re.compile(
    rf"(?<![A-Za-z0-9_.])(?P<number>(?:(?<![\w)\]}}%])[+-](?=[$0-9.\\]))?(?:\\?\$\s?[+-]?)?"
    rf"(?:\\[dt]?frac\{{[0-9]+\}}\{{[0-9]+\}}|{UNSIGNED}(?:/[0-9]+(?!\.?[0-9]|/))?))"
)
WHOLE_NUMBER = re.compile(
    rf"(?P<sign>[+-]?)\s?\$?\s?(?P<inner>[+-]?)(?:(?P<whole>{DIGITS})\s(?=[0-9]+/))?(?P<value>{UNSIGNED})\.?"
    rf"(?:\s?/\s?(?P<denominator>{DIGITS}))?\s?(?P<tail>%|°|[A-Za-z]{{2,20}})?\.?"
)
FRACTION_COMMAND = re.compile(r"([+-]?)\s?\\[dt]?frac\{([+-]?[0-9]+)\}\{([0-9]+)\}")
NOT_UNITS = re.compile(
    "and|or|pi|plus|minus|times|over|more|less|fewer|half|halves|thirds?|quarters?|fifths|tenths|hundredths|squared|cubed|dozens?|"
    "pairs?|score|hundreds?|thousands?|millions?|billions?|trillions?|st|nd|rd|th|mod|sin|cos|tan|log|ln|exp|to|of",
    re.IGNORECASE,
)
"""Words after a number that change its value, so that the whole is not read as that number with a unit."""
DASHES = str.maketrans({"−": "-", "–": "-", "﹣": "-", "-": "-", "\u00a0": " ", "\u202f": " "})


def extract_reference(text: str, answer_format: AnswerFormat = "auto") -> str:
    """The reference answer that stands in a data set's answer column.

    ``auto`` looks for ``####``, ``<answer>`` and ``\\boxed{}`` in this order and otherwise takes the whole text. Thousands
    separators are removed after ``####`` (GSM8K writes ``#### 1,234``). Raises AnswerError where there is no answer.
    """
    if answer_format == "auto":
        answer_format = _guess_format(text)
    if answer_format == "gsm8k":
        found = extract_answer(text, "plain")
        number = None if found is None else re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", found).strip()
        if number is None or numeric_value(number) is None:
            raise AnswerError(f"no number after '####' in {_shorten(text)}: mend the row, or set data.answer_format")
        return number
    if answer_format == "plain":
        if text.strip() in PLACEHOLDERS:
            raise AnswerError(f"the answer {_shorten(text)} is empty: mend the row, or set data.answer_column")
        return text.strip()
    style: AnswerStyle = "xml" if answer_format == "xml" else "boxed"
    answer = extract_answer(text, style)
    if answer is None:
        mark = "<answer>...</answer>" if style == "xml" else "\\boxed{...}"
        raise AnswerError(f"no {mark} with an answer in {_shorten(text)}: mend the row, or set data.answer_format")
    return answer


def _guess_format(text: str) -> AnswerFormat:
    if "####" in text:
        return "gsm8k"
    if "<answer>" in text:
        return "xml"
    if "\\boxed" in text:
        return "boxed"
    return "plain"


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 80 else "..." + text[-77:])


def extract_answer(text: str, style: AnswerStyle) -> str | None:
    """The answer in the place that ``style`` names, stripped; ``None`` where it is absent, empty, unclosed or a bare ``...``.

    The last complete place counts: a model that corrects itself is judged by its last word.
    """
    if style == "xml":
        blocks = XML_BLOCK.findall(text)
        answer = blocks[-1] if blocks else None
    elif style == "boxed":
        answer = _last_boxed(text)
    else:
        _, mark, rest = text.rpartition("####")
        lines = rest.strip().splitlines()
        answer = lines[0] if mark and lines else None
    if answer is None or answer.strip() in PLACEHOLDERS:
        return None
    return answer.strip()


def _last_boxed(text: str) -> str | None:
    """Content of the complete ``\\boxed{...}`` that begins last, in one pass over the braces."""
    open_braces: list[int | None] = []
    last: tuple[int, int] | None = None
    for match in BRACE.finditer(text):
        token = match.group()
        if token.startswith("\\boxed"):
            open_braces.append(match.end())
        elif token == "{":
            open_braces.append(None)
        elif token == "}" and open_braces:
            start = open_braces.pop()
            if start is not None and (last is None or start > last[0]):
                last = (start, match.start())
    return None if last is None else text[last[0] : last[1]]


def extract_last_number(text: str) -> str | None:
    """The last number in running text as it is written there, with its sign: ``"-1,234.50"``, ``"1/2"``, ``"$5"``.

    A hyphen after a digit or a bracket is a minus sign between two numbers, and not the second one's own: ``10-5`` ends in ``5``.
    """
    last = None
    for match in NUMBER_IN_TEXT.finditer(text.translate(DASHES)):
        last = match.group("number")
    return last


def exact_match(answer: str, reference: str) -> bool:
    """Equal as text, white space at the ends aside."""
    return answer.strip() == reference.strip()


def numeric_value(text: str) -> Decimal | Fraction | None:
    """The number that ``text`` is, or ``None`` where it is anything else. Exact: no floating point.

    Read are signs, thousands separators, decimals, ``$``, a trailing period, ``a/b``, ``1 1/2``, ``\\frac{a}{b}``, and one word
    of unit (``72 apples``) unless the word changes the value (``5 million``). A percent sign is dropped: ``50%`` is 50, not 1/2,
    since a question that asks for a percentage has it in its reference both ways.
    """
    if len(text) > LONGEST_NUMBER:
        return None
    text = _unwrap(text)
    fraction = FRACTION_COMMAND.fullmatch(text.removeprefix("$"))  # of "$\\frac{1}{2}$" in running text the second $ is cut off
    if fraction:
        sign, top, bottom = fraction.groups()
        return None if int(bottom) == 0 else Fraction(int(top), int(bottom)) * (-1 if sign == "-" else 1)
    match = WHOLE_NUMBER.fullmatch(text)
    if match is None or NOT_UNITS.fullmatch(match["tail"] or "") or (match["sign"] and match["inner"]):
        return None
    sign = -1 if "-" in (match["sign"], match["inner"]) else 1
    value = Decimal(match["value"].replace(",", ""))
    if match["denominator"] is None:
        return value.copy_negate() if sign < 0 and value else value
    bottom = int(match["denominator"].replace(",", ""))
    if bottom == 0:
        return None
    whole = int((match["whole"] or "0").replace(",", ""))
    return sign * (whole + Fraction(value) / bottom)


def _unwrap(text: str) -> str:
    """Without the dress that leaves a number what it is: ``$...$``, ``**...**``, ``\\$``, ``\\%``, ``{,}``."""
    text = text.translate(DASHES).strip()
    for left, right in (("$$", "$$"), ("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"), ("**", "**"), ("`", "`")):
        if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right):
            text = text[len(left) : -len(right)].strip()
    for written, meant in (("{,}", ","), ("\\!", ""), ("\\$", "$"), ("\\%", "%"), ("\\,", "")):
        text = text.replace(written, meant)
    return text.strip()


def numeric_equal(answer: str, reference: str) -> bool:
    """Both are numbers, and the same one: ``3.0`` and ``3``, ``1/2`` and ``0.5``, ``$1,000`` and ``1000``."""
    left, right = numeric_value(answer), numeric_value(reference)
    return left is not None and right is not None and Fraction(left) == Fraction(right)


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one completion."""

    extracted: str | None
    """The answer found where the style asks for it."""
    exact: bool
    """``extracted`` equals the reference as text."""
    numeric: bool
    """``extracted`` equals the reference as a number."""
    strict: bool
    """``extracted`` is right: exactly, as a number, or as mathematics."""
    lenient: bool
    """Strict, or right in another style's place, or the last number of the text is the reference."""


def grade(text: str, reference: str, style: AnswerStyle) -> Grade:
    """Judge the completion ``text`` against ``reference``. Never raises, whatever the policy wrote."""
    extracted = extract_answer(text, style)
    if extracted is None:
        return Grade(None, False, False, False, _right_somewhere(text, reference, style))
    exact = exact_match(extracted, reference)
    numeric = numeric_equal(extracted, reference)
    strict = exact or numeric or _equal_as_maths(extracted, reference)
    return Grade(extracted, exact, numeric, strict, strict or _right_somewhere(text, reference, style))


def _right_somewhere(text: str, reference: str, style: AnswerStyle) -> bool:
    last_number = extract_last_number(text)
    if last_number is not None and numeric_equal(last_number, reference):
        return True
    found = [extract_answer(text, other) for other in PLACES if other != style]
    return any(answer is not None and answers_equal(answer, reference) for answer in found)


def answers_equal(answer: str, reference: str) -> bool:
    """Equal as text, as numbers, or as mathematics."""
    return exact_match(answer, reference) or numeric_equal(answer, reference) or _equal_as_maths(answer, reference)


def _equal_as_maths(answer: str, reference: str) -> bool:
    # Two plain numbers have been compared already, exactly.
    if numeric_value(answer) is not None and numeric_value(reference) is not None:
        return False
    return latex_equivalent(answer, reference)
