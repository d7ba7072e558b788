"""Extraction and comparison, case by case. Each trap was met in real completions or in public trainers' parsers."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from groupwise.data.answers import (
    exact_match,
    extract_answer,
    extract_last_number,
    extract_reference,
    grade,
    numeric_equal,
    numeric_value,
)
from groupwise.errors import AnswerError
from tests.waiting import takes_linear_time


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>72</answer>", "72"),
        ("<reasoning>a</reasoning>\n<answer>\n72\n</answer>", "72"),
        ("<answer>1</answer> no, <answer>2</answer>", "2"),
        ("<answer>1</answer> and <answer>2", "1"),
        ("<answer>1 <answer>2</answer>", "2"),
        ("<answer>1</answer></answer>", "1"),
        ("<answer>two\nlines</answer>", "two\nlines"),
        ("<answer>...</answer>", None),
        ("<answer> … </answer>", None),
        ("<answer>7</answer> as in <answer>...</answer>", None),
        ("<answer></answer>", None),
        ("<answer>72", None),
        ("72</answer>", None),
        ("the answer is 72", None),
        ("", None),
    ],
)
def test_xml_extraction(text: str, expected: str | None) -> None:
    assert extract_answer(text, "xml") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"so \boxed{72}", "72"),
        (r"\boxed{1} then \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"\boxed{\text{a } \{ b}", r"\text{a } \{ b"),
        (r"\boxed {5}", "5"),
        (r"\boxed{\boxed{3}}", "3"),
        (r"\boxed{1} and \boxed{\frac{1}{2}", "1"),
        (r"} } { \boxed{4}", "4"),
        (r"\boxed{}", None),
        (r"\boxed{...}", None),
        (r"\boxed{5", None),
        (r"\fbox{5}", None),
    ],
)
def test_boxed_extraction(text: str, expected: str | None) -> None:
    assert extract_answer(text, "boxed") == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("a\n#### 72", "72"), ("#### 1\n#### 2\nmore", "2"), ("####\n5", "5"), ("#### ", None), ("72", None), ("#### ...", None)],
)
def test_plain_extraction(text: str, expected: str | None) -> None:
    assert extract_answer(text, "plain") == expected


@pytest.mark.parametrize(
    ("text", "right", "wrong"),
    [
        ("The answer is 3 1/4.", ("13/4", "3.25"), ("1/4", "3")),
        ("He needs 1 1/2 cups.", ("1.5",), ("0.5",)),
        ("It costs 100 000.", (), ("0", "000")),
        ("It costs 12 345 dollars.", (), ("345",)),
        ("Of the 2020, 345 stay.", ("345",), ()),
        ("In 2020 345 stayed.", ("345",), ()),
    ],
)
def test_a_number_with_a_space_in_it_is_not_read_by_its_tail(text: str, right: tuple[str, ...], wrong: tuple[str, ...]) -> None:
    assert all(grade(text, one, "xml").lenient for one in right)
    assert not any(grade(text, one, "xml").lenient for one in wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("first 3, then 72.", "72"),
        ("it costs $1,234.50 today", "$1,234.50"),
        ("it is -5", "-5"),
        ("it is −5", "-5"),
        ("x = -$5.", "-$5"),
        ("10-5", "5"),
        ("10 - 5", "5"),
        ("3*-4", "-4"),
        ("1/2.", "1/2"),
        ("it takes 3 1/4 hours", "3 1/4"),
        ("day 3, 1/4 of it", "1/4"),
        (r"\frac{1}{2}", r"\frac{1}{2}"),
        ("1,2,3", "3"),
        ("72</answer>", "72"),
        ("about 50%", "50"),
        ("x2 and v1.2.3", None),
        ("none", None),
    ],
)
def test_last_number(text: str, expected: str | None) -> None:
    assert extract_last_number(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("72", 72),
        ("72.", 72),
        (" 3.0 ", 3),
        ("-1,234.50", Decimal("-1234.5")),
        ("$5", 5),
        ("-$5", -5),
        ("$-5", -5),
        ("$5$", 5),
        (r"\$18", 18),
        ("50%", 50),
        (r"50\%", 50),
        ("1/2", Fraction(1, 2)),
        ("1 1/2", Fraction(3, 2)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        ("−7", -7),
        ("+5", 5),
        (".5", Fraction(1, 2)),
        ("1{,}234", 1234),
        ("**72**", 72),
        ("72 apples", 72),
        ("-0", 0),
        ("007", 7),
    ],
)
def test_numbers(text: str, expected: Decimal | Fraction | int) -> None:
    value = numeric_value(text)
    assert value is not None
    assert Fraction(value) == Fraction(expected)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "-",
        "--5",
        "-$-5",
        "1,23",
        "1,2345",
        "1/0",
        r"\frac{1}{0}",
        "5x",
        "5 x",
        "5 million",
        "5 dozen",
        "1 and 2",
        "3:00",
        "1e5",
        "1.2.3",
        "5 or 6",
        "x = 5",
        "seven",
        "٣",
        "9" * 5000,
        "12 km per hour",
    ],
)
def test_what_is_no_number(text: str) -> None:
    assert numeric_value(text) is None


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        ("3.0", "3", True),
        ("1/2", "0.5", True),
        ("$1,000", "1000", True),
        ("50%", "50", True),
        ("50%", "0.5", False),
        ("0.333", "1/3", False),
        ("5", "-5", False),
        ("x", "x", False),
        ("100000000000000000001", "100000000000000000000", False),
    ],
)
def test_numeric_equality(left: str, right: str, equal: bool) -> None:
    assert numeric_equal(left, right) is equal
    assert numeric_equal(right, left) is equal


def test_exact_match_ignores_only_the_ends() -> None:
    assert exact_match(" 72\n", "72")
    assert not exact_match("72.0", "72")
    assert not exact_match("7 2", "72")


@pytest.mark.parametrize(
    ("text", "reference", "style", "expected"),
    [
        ("<answer>72</answer>", "72", "xml", (True, True, True, True)),
        ("<answer>72.0</answer>", "72", "xml", (False, True, True, True)),
        ("<answer>71</answer>", "72", "xml", (False, False, False, False)),
        ("<answer>\\sqrt{16}+1</answer>", "5", "xml", (False, False, True, True)),
        ("<answer>71</answer> no, it is 72", "72", "xml", (False, False, False, True)),
        ("it is 72", "72", "xml", (False, False, False, True)),
        ("#### 72", "72", "xml", (False, False, False, True)),
        ("\\boxed{72} or so, 9 times", "72", "xml", (False, False, False, True)),
        ("<answer>...</answer> 72", "72", "xml", (False, False, False, True)),
        ("<answer>72</answer>", "72", "boxed", (False, False, False, True)),
        ("\\boxed{\\frac{2}{4}}", "\\frac{1}{2}", "boxed", (False, True, True, True)),
        ("72 is not what I say: 71", "72", "xml", (False, False, False, False)),
        ("<answer>blue</answer>", "blue", "xml", (True, False, True, True)),
        ("<answer>seventy two</answer>", "72", "xml", (False, False, False, False)),
        ("", "72", "xml", (False, False, False, False)),
    ],
)
def test_grades(text: str, reference: str, style: str, expected: tuple[bool, bool, bool, bool]) -> None:
    g = grade(text, reference, style)  # type: ignore[arg-type]
    assert (g.exact, g.numeric, g.strict, g.lenient) == expected


@pytest.mark.parametrize(
    ("text", "answer_format", "expected"),
    [
        ("6 x 200 = 1,200\n#### 1,200", "auto", "1200"),
        ("#### -5", "gsm8k", "-5"),
        ("so <answer>7</answer>", "auto", "7"),
        (r"so \boxed{\frac{1}{2}}", "auto", r"\frac{1}{2}"),
        ("7/8", "auto", "7/8"),
        (" 1,000 ", "plain", "1,000"),
    ],
)
def test_references(text: str, answer_format: str, expected: str) -> None:
    assert extract_reference(text, answer_format) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "answer_format"),
    [
        ("", "auto"),
        ("  ", "plain"),
        ("#### ", "auto"),
        ("#### blue", "gsm8k"),
        ("72", "gsm8k"),
        ("72", "boxed"),
        ("<answer>", "xml"),
    ],
)
def test_bad_references_are_refused_with_a_remedy(text: str, answer_format: str) -> None:
    with pytest.raises(AnswerError, match="correct the row"):
        extract_reference(text, answer_format)  # type: ignore[arg-type]


@pytest.mark.parametrize(("split", "count"), [("train", 7473), ("test", 1319)])
def test_every_gsm8k_answer_parses(shared_data: Path, split: str, count: int) -> None:
    rows = [json.loads(line) for line in (shared_data / "gsm8k" / f"{split}.jsonl").open(encoding="utf-8")]
    assert len(rows) == count
    for row in rows:
        reference = extract_reference(row["answer"], "gsm8k")
        assert Decimal(reference) == Decimal(row["answer"].split("####")[1].strip().replace(",", ""))
        assert grade(row["answer"], reference, "plain").strict


MARKS = ["<answer>", "</answer>", "\\boxed{", "{", "}", "####", "\\frac{1}{2}", "...", "\n"]
PIECES = [*MARKS, "-", "−", "$", "%", ",", ".", "1", "23", "/", " ", "x"]
MESSY = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=25).map("".join))


@settings(max_examples=400, deadline=None)
@given(MESSY)
def test_extraction_never_raises(text: str) -> None:
    for style in ("xml", "boxed", "plain"):
        found = extract_answer(text, style)  # type: ignore[arg-type]
        assert found is None or (found in text and found.strip() == found != "")
    extract_last_number(text)
    numeric_value(text)
    # A reference in words keeps math-verify out of it; test_latex.py sends it the strange texts.
    assert not grade(text, "nothing of the kind", "xml").strict


@given(st.decimals(allow_nan=False, allow_infinity=False, places=2, min_value=-(10**9), max_value=10**9))
def test_a_number_survives_its_dress(value: Decimal) -> None:
    sign, size = ("-" if value < 0 else ""), f"{abs(value):,.2f}"
    for dressed in (
        f"{value}",
        f"{sign}{size}",
        f"{sign}${size}",
        f"{value}%",
        f"{value}.".replace("..", "."),
        f"{value} apples",
    ):
        assert Fraction(numeric_value(dressed) or 0) == Fraction(value)
    assert Fraction(numeric_value(extract_last_number(f"so the total is {sign}{size}.") or "") or 0) == Fraction(value)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", ["<answer>", "\\boxed{", "1,111,", "####", "{"])
def test_extraction_takes_linear_time(piece: str) -> None:
    assert takes_linear_time(lambda count: grade(piece * count, "72", "xml"))


def test_a_fraction_between_dollars_in_running_text_is_a_number():
    text = "so the answer is $\\frac{1}{2}$."
    assert numeric_equal(extract_last_number(text), "0.5")
    assert grade(text, "1/2", "xml").lenient


@pytest.mark.parametrize(
    "text",
    ["5k", "$5k", "5!", "5i", "5π", "5⁴", "5²", "5e3", "5/x", "5 - x", "5 + x", "5x", "5 x", "5 \\pi", "5\\times 2x", "5^x", "3:5",
     "5 p.m.", "5 pm", "5 (thousand)", "**5** thousand", "5 \\text{ thousand}", "$5$ thousand", "5 thousand", "5 times x", "5 over x",
     "5 MM", "5th", "minus 5", "minus $5", "negative 5", "**minus** 5", "is - $5", "- 5", "10 - 5", "x > 5", "\\sqrt{5}", "\\sqrt 5",
     "\\pm 5", "x^5", "x^{5}", "x_5", "f(5)", "\\frac{x}{5}", "not 5", "≈ 5", "~5", "√5", "x/5",
     "5/sin x", "-\\mathbf{5}", "$-\\textbf{5}$", "-\\textit{5}", "x^{\\text{5}}", "3\\times\\mathbf{5}", "5 and a half",
     "**5** and a half", "5 and three-quarters", "5 and an eighth"],
)  # fmt: skip
def test_a_number_that_is_a_part_of_another_is_not_right_leniently(text: str) -> None:
    for said in (text, f"The answer is {text}", f"So it is {text}."):
        assert not grade(said, "5", "xml").lenient, said


@pytest.mark.parametrize(
    "text",
    ["5", "$5", "$5$", "$5$.", "**5**", "**5**.", "`5`", "(5)", "\\(5\\)", "\\[ 5 \\]", "\\[5\\]", "\"5\"", "5 apples", "5 a day",
     "5.", "5, I think", "5 of them", "**Answer:** 5", "**Answer**: $5", "Answer: 5", "x = 5", "x=5", "2+3=5", "2 + 3 = 5", "5%",
     "5\\%", "5 km", "€5", "£5", "5€", "5</answer>", "<b>5</b>", "\\boxed{5}", "\\text{total} = 5", "\\implies 5", "5 (see above)",
     "#### 5", "=> 5", "5\n- so", "5 \\text{ apples}", "a total of 5 eggs", "5 dollars today", "\\mathbf{5}", "\\$5", "$\\boxed{5}$",
     "5 times.", "5 times a day", "$5/month", "= \\textbf{5}", "\\Longrightarrow \\mathbf{5}", "5 and a halfway house"],
)  # fmt: skip
def test_a_number_in_common_dress_is_right_leniently(text: str) -> None:
    for said in (text, f"The answer is {text}"):
        assert grade(said, "5", "xml").lenient, said


@pytest.mark.parametrize(
    ("text", "reference"), [("€5", "$5"), ("£5", "$5"), ("5€", "$5"), ("$5", "5%"), ("5%", "$5"), ("5 km", "5 cm")]
)
def test_another_unit_is_wrong_leniently(text: str, reference: str) -> None:
    assert not grade(f"The answer is {text}", reference, "xml").lenient
