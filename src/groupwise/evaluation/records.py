"""One completion as it was judged: the record that every figure is counted from, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from groupwise.data.answers import PLACES, AnswerStyle, answers_equal, extract_answer, grade, numeric_value
from groupwise.data.latex import latex_equivalent_in_text
from groupwise.errors import DataError
from groupwise.evaluation.field_rules import flexible_extract, matches, strict_match
from groupwise.types import Completion, Prompt

__all__ = [
    "CONDITIONS",
    "further_verdicts",
    "is_well_formed",
    "judge_again",
    "latex_right",
    "make_record",
    "read_records",
    "vote",
]

CONDITIONS = ("data", "available", "prompt_format", "style", "shots", "temperature", "max_tokens", "samples", "seed")
"""Keys of a record in a file that say how it was asked for; the same in all records of one model and mode."""
NEEDED = ("model", "mode", "style", "problem", "expected", "response", "finish_reason", "tokens")


def make_record(prompt: Prompt, completion: Completion, style: AnswerStyle, sample: int = 0) -> dict[str, Any]:
    problem = prompt.problem
    question = problem.question if isinstance(problem.question, str) else problem.question[-1]["content"]
    return {
        "problem": problem.id,
        "sample": sample,
        "question": question,
        "prompt": prompt.text,
        "expected": problem.answer,
        **verdicts(completion.text, problem.answer, style),
        "finish_reason": completion.finish_reason,
        "tokens": len(completion.token_ids),
        "response": completion.text,
    }


def verdicts(text: str, reference: str, style: AnswerStyle) -> dict[str, Any]:
    verdict = grade(text, reference, style)
    return {
        "extracted": verdict.extracted,
        "strict": verdict.strict,
        "lenient": verdict.lenient,
        "format": is_well_formed(text, style),
    }


def further_verdicts(text: str, reference: str, style: AnswerStyle) -> dict[str, bool]:
    """What ``groupwise eval`` says besides: ``latex``, and by the field's GSM8K rules ``field_strict`` and ``field_flexible``."""
    return {
        "latex": latex_right(text, reference, style),
        "field_strict": matches(strict_match(text), reference),
        "field_flexible": matches(flexible_extract(text), reference),
    }


def latex_right(text: str, reference: str, style: AnswerStyle) -> bool:
    """Whether the final answer, wherever it stands, equals ``reference`` as mathematics.

    The final answer is what stands in the place asked for, or else in another style's place, or else what math-verify finds in the
    text by itself. One answer is compared, unlike in the lenient verdict, which takes a right one from any of these places.
    """
    for place in (style, *(other for other in PLACES if other != style)):
        found = extract_answer(text, place)
        if found is not None:
            return answers_equal(found, reference)
    return latex_equivalent_in_text(text, reference)


def is_well_formed(text: str, style: AnswerStyle) -> bool:
    """Exactly the form asked for. xml: one filled reasoning block, then one filled answer block, and nothing else but white
    space; boxed: exactly one filled ``\\boxed{}``; plain: exactly one ``####`` with something after it."""
    from groupwise.rewards.functions.format import boxed_format, strict_xml

    if style == "xml":
        return strict_xml([text], score=1.0) == [1.0]
    if style == "boxed":
        return boxed_format([text], score=1.0) == [1.0]
    _, mark, answer = text.partition("####")
    return bool(mark and answer.strip()) and "####" not in answer


def vote(record: Mapping[str, Any]) -> Any:
    """What a sample votes for in majority@k: right answers are one class, numbers vote by value, other answers by text; a sample
    without an answer in its place does not vote."""
    if record["strict"]:
        return "right"
    if record["extracted"] is None:
        return None
    value = numeric_value(record["extracted"])
    return ("text", record["extracted"]) if value is None else ("number", value)


def judge_again(record: Mapping[str, Any]) -> dict[str, Any]:
    """``record`` with every verdict made anew from its response and reference, by the rules of today."""
    text, reference, style = record["response"], record["expected"], record["style"]
    return {**record, **verdicts(text, reference, style), **further_verdicts(text, reference, style)}


def read_records(path: Path) -> list[dict[str, Any]]:
    """Records as ``groupwise eval --out`` wrote them.

    Raises DataError for a file that cannot be read, and for a line that is no record of this kind.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the records {str(path)!r} cannot be read ({error}): name a file that `eval --out` wrote") from error
    records = [_parsed(line, f"{path.name} line {number}") for number, line in enumerate(lines, start=1) if line.strip()]
    if not records:
        raise DataError(f"the records {str(path)!r} are empty: name a file that `eval --out` wrote")
    return records


def _parsed(line: str, name: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} is not JSON ({error}): records hold one object a line") from error
    missing = _missing(record)
    if missing:
        raise DataError(
            f"{name} is no record of an evaluation (it lacks {', '.join(missing)}): name a file that `eval --out` wrote"
        )
    if record["style"] not in PLACES:
        raise DataError(f"{name} has the style {record['style']!r}, but it must be one of {', '.join(PLACES)}: mend the file")
    return dict(record)


def _missing(record: Any) -> Iterable[str]:
    if not isinstance(record, dict):
        return NEEDED
    texts = ("problem", "expected", "response")
    return [key for key in NEEDED if key not in record] or [key for key in texts if not isinstance(record[key], str)]
