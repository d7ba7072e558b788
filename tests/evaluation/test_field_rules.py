"""Agreement with the field's extraction rules for GSM8K: tables of cases, and the field's own code where it is installed."""

import importlib.util
import json
import re

import pytest

from groupwise.data.answers import grade
from groupwise.evaluation.records import INVALID, flexible_extract, matches, strict_match

CASES = [
    # text, strict-match, flexible-extract
    ("48 + 24 = 72\n#### 72", "72", "72"),
    ("#### 1,234", "1,234", "1,234"),
    ("#### -5", "-5", "-5"),
    ("#### 3.50", "3.50", "3.50"),
    ("#### 72.", "72.", "72."),
    ("####72", INVALID, "72"),
    ("#### $72", INVALID, "$72"),
    ("####  72", INVALID, "72"),
    ("#### 72 apples", "72", "72"),
    ("#### 5\nNo: #### 6", "5", "6"),
    ("The answer is 72.", INVALID, "72."),
    ("The answer is $1,234.50, I think.", INVALID, "$1,234.50,"),
    ("10-5", INVALID, "-5"),
    ("It takes 7 days", INVALID, "7"),
    ("It takes 7 days...", INVALID, "..."),
    ("3 of 10%", INVALID, "10"),
    ("1/2", INVALID, "2"),
    ("<answer>\n42\n</answer>", INVALID, "42"),
    ("\\boxed{\\frac{3}{4}}", INVALID, "4"),
    ("no number at all", INVALID, INVALID),
    ("", INVALID, INVALID),
    ("twelve $$", INVALID, "$$"),
    ("− 5 with another minus", INVALID, "5"),
]


@pytest.mark.parametrize(("text", "strict", "flexible"), CASES)
def test_what_the_filters_extract(text, strict, flexible):
    assert (strict_match(text), flexible_extract(text)) == (strict, flexible)


@pytest.mark.parametrize(
    ("answer", "reference", "equal"),
    [
        ("72", "72", True),
        ("72.", "72", True),
        ("$1,234", "1234", True),
        ("1,234", "3 x 411 + 1 = 1,234\n#### 1,234", True),
        ("72.0", "72", False),
        ("072", "72", False),
        (INVALID, "72", False),
        ("72..", "72", False),
        ("5.0", "5.0", True),
    ],
)
def test_what_counts_as_equal(answer, reference, equal):
    assert matches(answer, reference) is equal


def responses(row):
    """Ways to answer a problem: its own worked solution, and what models write instead."""
    worked, _, number = row["answer"].rpartition("#### ")
    yield row["answer"]
    yield f"{worked}The answer is {number}."
    yield f"The answer is ${number}"
    yield f"{worked}#### {number.replace(',', '')}"
    yield f"{worked}#### {int(number.replace(',', '')) + 1}"
    yield f"<reasoning>\n{worked}</reasoning>\n<answer>\n{number}\n</answer>"
    yield worked


def test_on_gsm8k_itself_field_and_house_agree_where_both_can_read(shared_data):
    """All 1,319 test problems: a worked solution is right by every rule, and a wrong number by none."""
    rows = [json.loads(line) for line in (shared_data / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 1319
    for row in rows:
        reference = row["answer"].rpartition("#### ")[2].replace(",", "")
        own, said, dollars, _, wrong, tagged, _ = responses(row)
        for text in (own, said, dollars, tagged):
            assert matches(flexible_extract(text), reference)
            assert grade(text, reference, "plain").lenient
        assert matches(strict_match(own), reference)
        assert grade(own, reference, "plain").strict
        assert not matches(strict_match(said), reference)
        assert not grade(said, reference, "plain").strict
        assert not matches(strict_match(wrong), reference)
        assert not grade(wrong, reference, "plain").strict


@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="needs lm-evaluation-harness (pip install lm_eval --no-deps)"
)
def test_the_harness_own_filters_and_metric_say_the_same(shared_data):
    extraction = pytest.importorskip("lm_eval.filters.extraction", exc_type=ImportError)
    import yaml

    root = importlib.util.find_spec("lm_eval").submodule_search_locations[0]
    with open(f"{root}/tasks/gsm8k/gsm8k.yaml", encoding="utf-8") as file:
        task = yaml.safe_load(file)
    filters = {}
    for named in task["filter_list"]:
        options = {key: value for key, value in named["filter"][0].items() if key != "function"}
        filters[named["name"]] = extraction.RegexFilter(**options)
    ignored = task["metric_list"][0]["regexes_to_ignore"]

    def theirs(answer, target):
        for pattern in ignored:
            answer, target = re.sub(pattern, "", answer), re.sub(pattern, "", target)
        return answer.lower() == target.lower()

    lines = (shared_data / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    texts = [(text, row["answer"]) for row in map(json.loads, lines) for text in responses(row)]
    texts += [(text, "#### 72") for text, _, _ in CASES]
    for text, target in texts:
        (strict,), (flexible,) = (filters[name].apply([[text]], [{}])[0] for name in ("strict-match", "flexible-extract"))
        assert (strict_match(text), flexible_extract(text)) == (strict, flexible)
        reference = target.rpartition("#### ")[2].replace(",", "")
        for answer in (strict, flexible):
            assert matches(answer, reference) is theirs(answer, target)
