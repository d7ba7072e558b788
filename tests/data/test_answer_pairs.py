"""When two answers are equal: a table of pairs, with what the field's rules say of each beside ours.

``answer_pairs.tsv`` has a line a pair: what it is about, the reference, the answer, whether we call them equal, whether each of the field's
rules does, and a reason where one of them differs from us. ``python tests/data/test_answer_pairs.py`` writes the field's columns again.
"""

from __future__ import annotations

import csv
import json
import logging
import re
from collections import Counter
from pathlib import Path

import pytest

from groupwise.data.answers import answers_equal, grade
from groupwise.data.latex import latex_equivalent

TABLE = Path(__file__).with_name("answer_pairs.tsv")
FIELD = ("harness_strict", "harness_flexible", "math_verify")


def read() -> list[dict[str, str]]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


PAIRS = read() if TABLE.exists() else []


def harness(answer: str, reference: str, form: str, pattern: str, which: int) -> bool:
    """The task gsm8k of lm-evaluation-harness: the match number ``which`` of ``pattern``, then ``exact_match`` with its clean-up."""
    found = re.findall(pattern, form.format(answer))
    first = found[which] if found else "[invalid]"
    parts = [part for part in first if part] if isinstance(first, tuple) else [first]
    said, asked = parts[0].strip(), f"#### {reference}"
    for ignored in (",", r"\$", "(?s).*#### ", r"\.$"):
        said, asked = re.sub(ignored, "", said), re.sub(ignored, "", asked)
    return said.lower() == asked.lower()


def of_the_harness(answer: str, reference: str) -> dict[str, bool]:
    return {
        "harness_strict": harness(answer, reference, "#### {}", r"#### (\-?[0-9\.\,]+)", 0),
        "harness_flexible": harness(answer, reference, "The answer is {}", r"(-?[$0-9.,]{2,})|(-?[0-9]+)", -1),
    }


def of_math_verify(answer: str, reference: str) -> bool:
    from math_verify import parse, verify

    gold, said = (parse(f"${text}$", parsing_timeout=None) for text in (reference, answer))
    return verify(gold, said, timeout_seconds=None)


def test_the_table_is_long_and_has_no_pair_twice() -> None:
    assert len(PAIRS) >= 300
    assert max(Counter((pair["reference"], pair["answer"]) for pair in PAIRS).values()) == 1
    assert {pair["equal"] for pair in PAIRS} == {"yes", "no"}


@pytest.mark.parametrize("kind", sorted({pair["kind"] for pair in PAIRS}))
def test_our_rule_says_what_the_table_says(kind: str) -> None:
    rows = [pair for pair in PAIRS if pair["kind"] == kind]
    wrong = [pair for pair in rows if answers_equal(pair["answer"], pair["reference"]) is not (pair["equal"] == "yes")]
    assert not wrong


def test_the_wrapper_of_math_verify_pays_no_wrong_answer_by_itself() -> None:
    unequal = [pair for pair in PAIRS if pair["equal"] == "no"]
    assert not [pair for pair in unequal if latex_equivalent(pair["answer"], pair["reference"])]


def test_the_reward_and_the_lenient_verdict_go_by_the_same_rule() -> None:
    """A wrong answer in its place is wrong, and is not right leniently because its number is."""
    for pair in PAIRS:
        found = grade(f"<answer>{pair['answer']}</answer>", pair["reference"], "xml")
        assert found.strict is (pair["equal"] == "yes"), pair


def test_what_the_harness_says_is_what_the_table_says() -> None:
    for pair in PAIRS:
        said = of_the_harness(pair["answer"], pair["reference"])
        assert {key: pair[key] for key in said} == {key: "yes" if value else "no" for key, value in said.items()}, pair


@pytest.mark.slow
def test_what_math_verify_says_is_what_the_table_says() -> None:
    """Of every seventh pair, since its computer algebra takes its time; and not of those that are there because it does."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for pair in PAIRS[::7]:
        if pair["math_verify"] != "too long":
            said = of_math_verify(pair["answer"], pair["reference"])
            assert pair["math_verify"] == ("yes" if said else "no"), pair


def test_every_difference_from_a_rule_of_mathematics_has_its_reason() -> None:
    assert not [pair for pair in PAIRS if pair["math_verify"] == "yes" and pair["equal"] == "no" and not pair["reason"]]


def test_every_real_reference_of_mathematics_equals_itself_in_common_dress(shared_data: Path) -> None:
    folder = shared_data / "competition-math"
    rows = json.loads((folder / "train_math.json").read_text(encoding="utf-8"))
    rows += [json.loads(line) for line in (folder / "math500_test.jsonl").read_text(encoding="utf-8").splitlines()]
    references = sorted({str(row["answer"]) for row in rows} - {""})
    assert len(references) > 3000
    for reference in references[::2]:
        dressed = [f"${reference}$", reference.replace("\\frac", "\\dfrac"), reference.replace("-", "−"), f" {reference}."]
        for answer in (reference, *dressed[: 3 if reference.rstrip().endswith((".", ",")) else 4]):
            assert answers_equal(answer, reference), answer


def test_every_real_reference_that_is_a_number_equals_itself_in_common_dress(shared_data: Path) -> None:
    lines = (shared_data / "gsm8k" / "train.jsonl").read_text(encoding="utf-8").splitlines()
    references = {json.loads(line)["answer"].rpartition("#### ")[2].replace(",", "") for line in lines}
    references |= {str(json.loads(line)["Answer"]) for line in (shared_data / "svamp" / "svamp.jsonl").open(encoding="utf-8")}
    assert len(references) > 900
    for reference in references:
        for answer in (reference, f"{reference} apples", f"x = {reference}", f"${reference}$", f"{float(reference):,}"):
            assert answers_equal(answer, reference), answer
        assert not answers_equal(str(float(reference) + 1), reference)


def regenerate() -> None:
    logging.disable(logging.WARNING)
    rows = read()
    for row in rows:
        said = of_the_harness(row["answer"], row["reference"])
        row |= {key: "yes" if value else "no" for key, value in said.items()}
        if row["math_verify"] != "too long":
            row["math_verify"] = "yes" if of_math_verify(row["answer"], row["reference"]) else "no"
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(
            file, ["kind", "reference", "answer", "equal", *FIELD, "reason"], delimiter="\t", lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    regenerate()
