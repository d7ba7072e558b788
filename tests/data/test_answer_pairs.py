"""When two answers are equal: a table of pairs, with what the field's rules say of each beside ours.

``answer_pairs.tsv`` has a line a pair: what it is about, the reference, the answer, whether we call them equal, whether each of the field's
rules does; ``note``, written by hand, why we say so where it is not plain; and ``reason``, what each rule that differs from us read.
``python tests/data/test_answer_pairs.py`` writes the field's columns and the reasons again.
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


def found_by_the_harness(answer: str) -> dict[str, str | None]:
    """What the task gsm8k of lm-evaluation-harness takes from an answer in the form it wants: the first number right behind ``####``, or
    the last number of the text."""
    strict = re.findall(r"#### (\-?[0-9\.\,]+)", f"#### {answer}")
    flexible = re.findall(r"(-?[$0-9.,]{2,})|(-?[0-9]+)", f"The answer is {answer}")
    return {
        "harness_strict": strict[0].strip() if strict else None,
        "harness_flexible": (flexible[-1][0] or flexible[-1][1]).strip() if flexible else None,
    }


def of_the_harness(answer: str, reference: str) -> dict[str, bool]:
    """``exact_match`` of what was found, with the task's clean-up."""
    return {
        rule: _cleaned(found or "[invalid]") == _cleaned(f"#### {reference}")
        for rule, found in found_by_the_harness(answer).items()
    }


def _cleaned(text: str) -> str:
    for ignored in (",", r"\$", "(?s).*#### ", r"\.$"):
        text = re.sub(ignored, "", text)
    return text.lower()


def why_the_harness_differs(pair: dict[str, str]) -> list[str]:
    """What each of its two rules took, where it does not say what we say."""
    why = {
        rule: _taken(pair["answer"], found, pair["equal"] == "yes")
        for rule, found in found_by_the_harness(pair["answer"]).items()
        if pair[rule] != pair["equal"]
    }
    if len(set(why.values())) == 1 and len(why) == 2:
        return [f"harness {why['harness_strict']}"]
    return [f"{rule.removeprefix('harness_')} {words}" for rule, words in why.items()]


def _taken(answer: str, found: str | None, equal: bool) -> str:
    if found is None:
        return "wants the number first" if re.search("[0-9]", answer) else "reads numbers alone"
    if found != answer.strip():
        return f"takes {found.rstrip(',')} alone"
    return "compares text" if equal else "drops commas"


def read_by_math_verify(text: str) -> list[object]:
    from math_verify import parse

    return list(parse(f"${text}$", parsing_timeout=None))


def of_math_verify(answer: str, reference: str) -> bool:
    from math_verify import verify

    return verify(read_by_math_verify(reference), read_by_math_verify(answer), timeout_seconds=None)


def why_math_verify_differs(pair: dict[str, str]) -> list[str]:
    """What it read, where it does not say what we say."""
    if pair["math_verify"] == pair["equal"]:
        return []
    if pair["math_verify"] == "too long":
        return ["math-verify computes it and does not end"]
    reference, answer = (_shown(read_by_math_verify(pair[side])) for side in ("reference", "answer"))
    if reference == answer:
        return [f"math-verify reads {answer} in both{' and says no' if pair['equal'] == 'yes' else ''}"]
    return [f"math-verify {'tells apart' if pair['equal'] == 'yes' else 'takes for equal'} {reference} and {answer}"]


def _shown(read: list[object]) -> str:
    text = str(read[0]) if read else "nothing"
    return text if len(text) <= 60 else f"{text[:57]}..."


def test_the_table_is_long_and_has_no_pair_twice() -> None:
    assert len(PAIRS) >= 300
    assert max(Counter((pair["reference"], pair["answer"]) for pair in PAIRS).values()) == 1
    assert {pair["equal"] for pair in PAIRS} == {"yes", "no"}


def test_the_page_counts_as_the_table_does() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs/how-to/data.md").read_text(encoding="utf-8")
    wrong = [pair for pair in PAIRS if pair["equal"] == "no"]
    paid = [sum(pair[rule] == "yes" for pair in wrong) for rule in ("math_verify", "harness_strict", "harness_flexible")]
    said = re.search(
        r"has ([\d,]+) hard pairs.*?Of the (\d+) .*?calls (\d+) equal.*? (\d+) \(strict\) and (\d+) \(flexible\)", page, re.S
    )
    assert said
    assert [int(x.replace(",", "")) for x in said.groups()] == [len(PAIRS), len(wrong), *paid]


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
def test_what_math_verify_says_and_reads_is_what_the_table_says() -> None:
    """Of every seventh pair, since its computer algebra takes its time; and not of those that are there because it does."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    for pair in PAIRS[::7]:
        if pair["math_verify"] != "too long":
            said = of_math_verify(pair["answer"], pair["reference"])
            assert pair["math_verify"] == ("yes" if said else "no"), pair
            assert pair["reason"].endswith("; ".join(why_math_verify_differs(pair))), pair


def test_a_pair_has_a_reason_exactly_where_a_rule_differs_and_it_is_what_that_rule_took() -> None:
    for pair in PAIRS:
        differs = [rule for rule in FIELD if pair[rule] != pair["equal"]]
        assert bool(pair["reason"]) is bool(differs), pair
        of_harness, separator, of_math_verify = pair["reason"].rpartition("math-verify ")
        assert bool(separator) is ("math_verify" in differs), pair
        assert bool(of_math_verify) is bool(differs), pair
        assert (of_harness if separator else pair["reason"]).removesuffix("; ") == "; ".join(why_the_harness_differs(pair)), pair


def test_a_pair_that_we_refuse_and_another_rule_pays_has_a_note() -> None:
    assert not [pair for pair in PAIRS if pair["equal"] == "no" and "yes" in {pair[rule] for rule in FIELD} and not pair["note"]]


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
        row["reason"] = "; ".join([*why_the_harness_differs(row), *why_math_verify_differs(row)])
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(
            file, ["kind", "reference", "answer", "equal", *FIELD, "note", "reason"], delimiter="\t", lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    regenerate()
