"""Finding answers in text and comparing them. No torch, no tokenizer: strings in, verdicts out.

Two figures are kept apart everywhere. *Strict*: the answer stands where the prompt asked for it and is right. *Lenient*: a right
answer stands anywhere a reader would look for it. A model that computes well and formats badly differs in nothing else.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from groupwise.data.latex import latex_equivalent, latex_failures
from groupwise.data.quantities import (
    BRACE,
    DASHES,
    MEASURES,
    UNSIGNED,
    changes_the_value,
    last_boxed,
    quantities_equal,
    read_quantity,
)
from groupwise.errors import AnswerError, UncheckedAnswerError

__all__ = [
    "PLACEHOLDERS",
    "PLACES",
    "AnswerFormat",
    "AnswerStyle",
    "Grade",
    "answers_equal",
    "ends_in",
    "exact_match",
    "extract_answer",
    "extract_last_number",
    "extract_reference",
    "grade",
    "latex_equivalent",
    "latex_failures",
    "numeric_equal",
    "numeric_value",
    "without_places",
]

AnswerStyle = Literal["xml", "boxed", "plain"]
"""Where a completion's answer stands: in ``<answer>``, in ``\\boxed{}``, or after ``####``."""
AnswerFormat = Literal["auto", "gsm8k", "boxed", "xml", "plain"]

PLACES: tuple[AnswerStyle, ...] = ("xml", "boxed", "plain")
PLACEHOLDERS = frozenset({"", "...", "…", ". . ."})
"""What a model copies from the prompt's example instead of answering."""
XML_BLOCK = re.compile(r"<answer>((?:(?!</?answer>).)*)</answer>", re.DOTALL)
NUMBER_IN_TEXT = re.compile(
    rf"(?<![A-Za-z0-9_.])(?P<number>(?:(?<![\w)\]}}%])[+-](?=[$0-9.\\]))?(?:\\?\$\s?[+-]?)?"
    rf"(?:\\[dt]?frac\{{[0-9]+\}}\{{[0-9]+\}}|(?:[0-9]+ (?=[0-9]+/[0-9]))?{UNSIGNED}(?:/[0-9]+(?!\.?[0-9]|/))?))"
)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$\n]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
CLOSED = re.compile(r"(?:\*\*|__|[$`)\]}\"'”’]|[ ~]?\\[)\]]|[ ~][)\]}])*")
"""What may close behind a number: emphasis, mathematics, brackets, quotation marks."""
WORD_BEHIND = re.compile(
    r"(?P<space>(?:[ ~]|\\[ ,;])*)\(?(?:\\(?:text|mbox|mathrm|textbf)\s?\{\s*)?(?P<word>[ap]\.\s?m|[A-Za-z]+|\\?%|:[0-9]{2}|[€£¥₹])"
)
ENDED = re.compile(
    r"\s*$|\s*\n|[ ~]?(?:</?\w|\\\\|\\end)|[ ~]times(?:[.,;]|\s*$| an? | in | on )|/(?!arc|sin|cos|tan|log|exp|sqrt)[A-Za-z]{3,}|"
    r"[.,;:?](?![0-9])|[ ~]+[(\"'“‘|#✓✅—]|\|"
)
"""What ends a number where no word follows; a sign of arithmetic does not."""
OPENED = re.compile(r"(?:\*\*|__|[$`\"'“‘ (\[]|(?<!\\)\{|\\(?:boxed|text[a-z]*|math[a-z]*)|\\[(\[,;])$")
"""What may open before a number; of a command with braces these went before it, so that its name ends the text."""
LEADING, THOUSANDS = re.compile(r"(?<![\w.,])[0-9]{1,3}[ \u00a0\u202f]$"), re.compile(r"[0-9]{3}(?![0-9,/])")
"""Of one number whose thousands are set apart by spaces."""
TAG = re.compile(r"</?\w[^<>]*>\s*$")
TAKEN_BACK = re.compile(
    # A sign or an operator, also spaced; a function or an index; a word that negates.
    r"(?:[-+/^×·÷±√~≈≠<]|(?<!\*)\*|[0-9A-Za-z)]\*\*|(?<!_)_|(?<![=-])>|[<>!]=)\s?$|[0-9]:$|[\w)]\($|\}\{$|"
    r"\\(?!boxed|text|math|quad|qquad|to$|implies|therefore|(?:long)?rightarrow|large|huge|displaystyle)[A-Za-z]+$|"
    r"(?:^|[^A-Za-z])(?:minus|negative|neg|plus|times|over|not|never|isn't|sqrt)(?:\s?=)?$",
    re.IGNORECASE,
)
"""What before a number makes another one of it."""
RUNNING_ON = frozenset(
    re.findall(
        "[a-z]+",
        "and or under above below more less fewer than of to out off from by into before after in per "
        "today tomorrow yesterday tonight now then since until so only exactly precisely yes true right correct instead last may "
        "daily weekly monthly yearly annually hourly",
    )
)
"""Words that may follow a number in a sentence without being a part of it."""
AND_A_PART = re.compile(
    r"[ ~]*and (?:an?|one|two|three|four|five|seven)[ -]"
    r"(?:half|thirds?|quarters?|fourths?|fifths?|sixths?|sevenths?|eighths?|ninths?|tenths?)(?![a-z])"
)
"""What makes ``5 and a half`` of the number before it."""
LONGEST_TEXT = 4000
"""Characters at the end of a completion in which a final formula is looked for."""


def extract_reference(text: str, answer_format: AnswerFormat = "auto") -> str:
    """The reference answer that stands in a data set's answer column.

    ``auto`` looks for ``####``, ``<answer>`` and ``\\boxed{}`` in this order and otherwise takes the whole text. Thousands
    separators are removed after ``####`` (GSM8K writes ``#### 1,234``). Raises AnswerError where there is no answer.
    """
    if answer_format == "auto":
        answer_format = _guess_format(text)
    if answer_format == "gsm8k":
        extracted = extract_answer(text, "plain")
        number = None if extracted is None else re.sub(r"(?<=[0-9]),(?=[0-9]{3})", "", extracted).strip()
        if number is None or numeric_value(number) is None:
            raise AnswerError(f"no number after '####' in {_shorten(text)}: correct the row, or set data.answer_format")
        return number
    if answer_format == "plain":
        if text.strip() in PLACEHOLDERS:
            raise AnswerError(f"the answer {_shorten(text)} is empty: correct the row, or set data.answer_column")
        return text.strip()
    style: AnswerStyle = "xml" if answer_format == "xml" else "boxed"
    answer = extract_answer(text, style)
    if answer is None:
        mark = "<answer>...</answer>" if style == "xml" else "\\boxed{...}"
        raise AnswerError(f"no {mark} with an answer in {_shorten(text)}: correct the row, or set data.answer_format")
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
        answer = last_boxed(text)
    else:
        _, mark, rest = text.rpartition("####")
        lines = rest.strip().splitlines()
        answer = lines[0] if mark and lines else None
    if answer is None or answer.strip() in PLACEHOLDERS:
        return None
    return answer.strip()


def without_places(text: str) -> str:
    r"""``text`` without its ``<answer>`` blocks, other tags of the form, and ``\boxed{}``, whose content stays."""
    text = re.sub(r"</?(?:reasoning|answer)>", "", XML_BLOCK.sub("", text))
    kept, end, boxes = [], 0, []
    for match in BRACE.finditer(text):
        token = match.group()
        if token.startswith("\\boxed") or token == "{":
            boxes.append(token != "{")
        if token.startswith("\\boxed") or (token == "}" and boxes and boxes.pop()):
            kept.append(text[end : match.start()])
            end = match.end()
    return "".join([*kept, text[end:]]).strip()


def extract_last_number(text: str) -> str | None:
    """The last number in running text as it is written there, with its sign: ``"-1,234.50"``, ``"1/2"``, ``"3 1/4"``, ``"$5"``.

    A hyphen after a digit or a bracket is a minus sign between two numbers, and not the second one's own: ``10-5`` ends in ``5``.
    """
    last = _last_number(text)
    return None if last is None else last[0]


def _last_number(text: str) -> tuple[str, str, str] | None:
    """The last number, and the text before and behind it."""
    text = text.translate(DASHES)
    last = deque(NUMBER_IN_TEXT.finditer(text), maxlen=1)
    if not last:
        return None
    begin, end = last[0].span()
    return last[0]["number"], text[max(0, begin - 40) : begin], text[end : end + 40]


def ends_in(text: str, reference: str | Sequence[str]) -> bool:
    """Whether a text without any answer place ends in a reference: in the formula between dollar signs, or in ``\\(\\)`` or ``\\[\\]``,
    or in the number that stands last, with what is written beside it.

    Raises UncheckedAnswerError where math-verify gave no verdict.
    """
    text, references = text[-LONGEST_TEXT:], [reference] if isinstance(reference, str) else reference
    formulas, number = deque(FORMULA.finditer(text), maxlen=1), _last_number(text)
    if formulas and _last_number(text[formulas[0].end() :]) is None:
        formula = next(part for part in formulas[0].groups() if part is not None).strip()
        return formula != "" and answers_equal(formula, references)
    return number is not None and any(_last_number_is(*number, one) for one in references)


def exact_match(answer: str, reference: str) -> bool:
    """Equal as text, white space at the ends aside."""
    return answer.strip() == reference.strip()


def numeric_value(text: str) -> Decimal | Fraction | None:
    """The number that ``text`` is, or ``None`` where it is anything else. Exact: no floating point.

    Read is what ``quantities.read_quantity`` reads, with one word of unit behind a space at most (``72 apples``), and none that
    changes the value (``5 million``, ``3 am``). The unit is dropped: ``numeric_equal`` compares it.
    """
    quantity = read_quantity(text)
    return None if quantity is None or quantity.tight or quantity.words > 1 else quantity.value


def numeric_equal(answer: str, reference: str) -> bool:
    """Whether both are numbers, and the same one in the same unit, if both have one: ``3.0`` and ``3``, ``1/2`` and ``0.5``, ``$1,000`` and
    ``1000``; not ``7 feet`` and ``7 inches``."""
    left, right = read_quantity(answer), read_quantity(reference)
    return left is not None and right is not None and quantities_equal(left, right)


@dataclass(frozen=True, slots=True)
class Grade:
    """The verdict on one completion."""

    extracted: str | None
    """The answer found where the style asks for it."""
    exact: bool
    """``extracted`` equals the reference as text."""
    numeric: bool
    """``extracted`` equals the reference as a number."""
    strict: bool | None
    """``extracted`` is right: exactly, as a number, or as mathematics. ``None`` where that could not be found out (see ``failure``)."""
    lenient: bool | None
    """Strict, or right in another style's place, or the last number of the text is the reference. ``None`` as for ``strict``."""
    failure: str | None = None
    """What kept math-verify from an answer, where ``strict`` or ``lenient`` is ``None``."""


def grade(text: str, reference: str | Sequence[str], style: AnswerStyle) -> Grade:
    """Judge the completion ``text`` against ``reference``, or against several of which any is right. Never raises, whatever the policy
    wrote."""
    references = [reference] if isinstance(reference, str) else reference
    extracted = extract_answer(text, style)
    failures: list[str] = []
    exact = extracted is not None and any(exact_match(extracted, one) for one in references)
    numeric = extracted is not None and any(numeric_equal(extracted, one) for one in references)
    strict = exact or numeric or _any_equal([extracted], references, failures)
    elsewhere = strict or _right_somewhere(text, references, style, failures)
    lenient = elsewhere if elsewhere or strict is not None else None
    return Grade(extracted, exact, numeric, strict, lenient, failures[0] if failures else None)


def _right_somewhere(text: str, references: Sequence[str], style: AnswerStyle, failures: list[str]) -> bool | None:
    last = _last_number(text)
    if last is not None and any(_last_number_is(*last, reference) for reference in references):
        return True
    return _any_equal([extract_answer(text, other) for other in PLACES if other != style], references, failures)


def _last_number_is(number: str, before: str, behind: str, reference: str) -> bool:
    """What stands before and behind the number takes part where it changes the value or may do so, and where it is a unit."""
    before = before.rpartition("\n")[2]
    if before[-1:] in ("€", "£", "¥", "₹"):
        before, number = before[:-1], before[-1] + number
    if _taken_back(before) or (THOUSANDS.match(number) and LEADING.search(before)):
        return False
    if "$" in number and behind.startswith("$"):
        number = number.replace("\\$", "").replace("$", "")
    behind = behind[_end(CLOSED, behind) :]
    word = WORD_BEHIND.match(behind)
    if word is None or word["word"] == "times":
        return ENDED.match(behind) is not None and numeric_equal(number, reference)
    unit, lower = word["word"].removeprefix("\\"), word["word"].lower()
    if (lower in MEASURES and lower not in RUNNING_ON) or unit[0] in "%€£¥₹":
        measured, expected = read_quantity(f"{number}{' ' if word['space'] else ''}{unit}"), read_quantity(reference)
        return measured is not None and expected is not None and quantities_equal(measured, expected)
    if not word["space"] or not unit.isalpha() or (len(unit) == 1 and unit not in "aI"):
        return False
    if AND_A_PART.match(behind):
        return False
    return (lower in RUNNING_ON or not changes_the_value(lower)) and numeric_equal(number, reference)


def _taken_back(before: str) -> bool:
    """Whether the text before a number ends in what makes another number of it, whatever opens between the two."""
    while True:
        if TAG.search(before):
            return False
        if TAKEN_BACK.search(before):
            return True
        opened = OPENED.search(before)
        if opened is None:
            return False
        before = before[: opened.start()]


def _end(pattern: re.Pattern[str], text: str) -> int:
    match = pattern.match(text)
    return match.end() if match else 0


def _any_equal(answers: Sequence[str | None], references: Sequence[str], failures: list[str]) -> bool | None:
    """Whether some answer is right; ``None`` where none is known to be and one could not be checked."""
    before = len(failures)
    for answer in answers:
        for reference in references:
            try:
                if answer is not None and answers_equal(answer, reference):
                    return True
            except UncheckedAnswerError as error:
                failures.append(str(error))
    return None if len(failures) > before else False


def answers_equal(answer: str, reference: str | Sequence[str]) -> bool:
    """Equal as text, as numbers, or as mathematics; to any of several references.

    Raises UncheckedAnswerError where math-verify gave no verdict.
    """
    if not isinstance(reference, str):
        failures: list[str] = []
        verdict = _any_equal([answer], reference, failures)
        if verdict is None:
            raise UncheckedAnswerError(failures[0])
        return verdict
    return exact_match(answer, reference) or numeric_equal(answer, reference) or latex_equivalent(answer, reference)
