"""One completion as it was judged: the record that every figure is counted from, and the file that keeps them.

``further_verdicts`` also judges by the field's usual reading of GSM8K answers, rule for rule, so that figures can be laid beside
published ones: the two filters and the comparison of the task ``gsm8k`` (version 3.0) of EleutherAI's lm-evaluation-harness. They read
``#### 1.`` and ``$5`` as its authors do, and miss ``<answer>`` and fractions as they do.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from dataclasses import asdict
from pathlib import Path
from typing import Any

from groupwise.data.answers import PLACES, AnswerStyle, answers_equal, ends_in, extract_answer, grade, numeric_value
from groupwise.durable import write_bytes
from groupwise.errors import DataError, TrainingError, UncheckedAnswerError
from groupwise.rewards.functions import is_well_formed
from groupwise.tracking.files import json_line
from groupwise.types import Completion, Prompt

__all__ = [
    "CONDITIONS",
    "INVALID",
    "PartialRecords",
    "flexible_extract",
    "further_verdicts",
    "is_well_formed",
    "judge_again",
    "latex_right",
    "make_record",
    "matches",
    "read_records",
    "references_of",
    "refuse_to_lose",
    "strict_match",
    "told_if_lost",
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
        "expected": problem.expected,
        **({"accepted": list(problem.accepted)} if problem.also else {}),
        **verdicts(completion.answer, problem.accepted, style),
        "finish_reason": completion.finish_reason,
        "tokens": len(completion.token_ids),
        "response": completion.answer,
        **({"turns": [asdict(turn) for turn in completion.turns]} if completion.turns else {}),
        **of_environment(completion),
    }


def of_environment(completion: Completion) -> dict[str, Any]:
    """What the environment said the episode was worth, and whether that is a success: more than 0. Both are ``None`` where it failed;
    absent where no environment gives a reward."""
    if completion.reward is None and not completion.failed:
        return {}
    return {"reward": completion.reward, "success": None if completion.reward is None else completion.reward > 0}


def verdicts(text: str, references: Sequence[str], style: AnswerStyle) -> dict[str, Any]:
    """``strict`` and ``lenient`` are ``None`` where math-verify gave no verdict, and ``unchecked`` says why."""
    verdict = grade(text, references, style)
    return {
        "extracted": verdict.extracted,
        "strict": verdict.strict,
        "lenient": verdict.lenient,
        "format": is_well_formed(text, style),
        **({} if verdict.failure is None else {"unchecked": verdict.failure}),
    }


def further_verdicts(text: str, references: Sequence[str], style: AnswerStyle) -> dict[str, bool | None]:
    """What ``groupwise eval`` says besides: ``latex``, and by the field's GSM8K rules ``field_strict`` and ``field_flexible``."""
    return {
        "latex": latex_right(text, references, style),
        "field_strict": any(matches(strict_match(text), one) for one in references),
        "field_flexible": any(matches(flexible_extract(text), one) for one in references),
    }


def latex_right(text: str, references: str | Sequence[str], style: AnswerStyle) -> bool | None:
    """Whether the final answer, wherever it stands, equals a reference as mathematics; ``None`` where math-verify gave no verdict.

    The final answer is what stands in the place asked for, or else in another style's place, or else the last formula or number of
    the text. One answer is compared, unlike in the lenient verdict, which takes a right one from any of these places.
    """
    places = (extract_answer(text, place) for place in (style, *(other for other in PLACES if other != style)))
    final = next((answer for answer in places if answer is not None), None)
    try:
        return answers_equal(final, references) if final else ends_in(text, references)
    except UncheckedAnswerError:
        return None


def vote(record: Mapping[str, Any]) -> Hashable | None:
    """What a sample votes for in majority@k: right answers are one class, numbers vote by value, other answers by text; a sample
    without an answer in its place does not vote."""
    if record["strict"]:
        return "right"
    if record["extracted"] is None:
        return None
    value = numeric_value(record["extracted"])
    return ("text", record["extracted"]) if value is None else ("number", value)


def judge_again(record: Mapping[str, Any]) -> dict[str, Any]:
    """``record`` with every verdict made again from its response and reference, by the rules of today."""
    text, references, style = record["response"], references_of(record), record["style"]
    kept = {key: value for key, value in record.items() if key != "unchecked"}
    return {**kept, **verdicts(text, references, style), **further_verdicts(text, references, style)}


def references_of(record: Mapping[str, Any]) -> Sequence[str]:
    """Every reference answer of a record."""
    accepted: Sequence[str] = record.get("accepted") or [record["expected"]]
    return accepted


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


@contextmanager
def told_if_lost(path: Path, remedy: str) -> Iterator[None]:
    """Raise TrainingError where the disk does not take what is written to ``path``; ``remedy`` is for when it has room again."""
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"the records {str(path)!r} cannot be written ({error.strerror or error}): free space or make the folder writable, {remedy}"
        ) from error


class PartialRecords:
    """Records of an evaluation under way, in a file: each part is on the disk before the next is sampled, so that a command that was
    stopped can be resumed. A line is one of the file that ``eval --out`` writes at its end.

    Args:
        path: the file.
        found: the lines to go on with, as ``read`` gives them. The file begins with them alone.
        rows: completions that a process samples at once.
        processes: how many there are.
        writes: whether this process is the one that writes.
    """

    def __init__(
        self, path: Path, found: Sequence[Mapping[str, Any]], rows: int, processes: int = 1, writes: bool = True
    ) -> None:
        self.path, self.found, self.rows, self.processes, self.writes = path, found, rows, processes, writes
        self.model = ""
        if writes and path.exists():
            self._begin()  # without a line that a stop has cut

    def _begin(self) -> None:
        with self._told_if_lost():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(self.path, b"".join(map(json_line, self.found)))

    def _told_if_lost(self) -> AbstractContextManager[None]:
        return told_if_lost(self.path, "then go on with --resume, which keeps what was written before")

    @staticmethod
    def read(path: Path) -> list[dict[str, Any]]:
        """The records of ``path``, without what a stop has cut: a last line without its end, and a last problem of which samples are
        missing. None where there is no such file. Raises DataError as ``read_records`` does."""
        found = path.exists()
        try:
            text = path.read_text(encoding="utf-8", errors="replace") if found else ""
        except OSError as error:
            raise DataError(f"the records {str(path)!r} cannot be read ({error}): move it away, or name another --out") from error
        whole = text[: text.rfind("\n") + 1].splitlines()
        lines = [_parsed(line, f"{path.name} line {number}") for number, line in enumerate(whole, start=1)]
        last = [line for line in lines if all(line[key] == lines[-1][key] for key in ("model", "mode"))]
        return lines[: len(lines) - len(last) % last[0].get("samples", 1)] if last else []

    def of(self, model: str) -> PartialRecords:
        """The same file, for the records of ``model``."""
        one = copy(self)
        one.model = model
        return one

    def parts(self, prompts: Sequence[Prompt], samples: int) -> Iterator[Sequence[Prompt]]:
        """``prompts`` in parts of one, two and then four times what is sampled at once: a part ends with few completions under way,
        so larger ones are faster, while a stop loses no more than four."""
        at_once = max(1, self.rows // samples) * self.processes
        first, size = 0, at_once
        while first < len(prompts):
            yield prompts[first : first + size]
            first, size = first + size, min(2 * size, 4 * at_once)

    def judged(self, mode: str, conditions: Mapping[str, Any], prompts: Sequence[Prompt]) -> list[dict[str, Any]]:
        """The records that there are of the first of ``prompts``.

        Raises DataError where they are of another evaluation than this.
        """
        lines = [line for line in self.found if (line["model"], line["mode"]) == (self.model, mode)]
        samples, asked = conditions["samples"], json.loads(json_line(conditions))
        asks = [[prompt.problem.id, prompt.text] for prompt in prompts for _ in range(samples)][: len(lines)]
        differs = sorted({key for line in lines for key in asked if line.get(key) != asked[key]})
        written = json.loads(json_line(asks))  # with secrets hidden
        if [[line["problem"], line.get("prompt")] for line in lines] != written:
            differs = differs or ["problems"]
        if differs:
            raise DataError(
                f"{str(self.path)!r} was left by an evaluation of {self.model} ({mode}) with other {' and '.join(differs)} than now: give "
                "it the settings that it had, or delete the file to start from the first problem"
            )
        return [{key: value for key, value in line.items() if key not in ("model", "mode", *asked)} for line in lines]

    def add(self, mode: str, conditions: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
        """Append ``records``. Raises TrainingError where the disk does not take them."""
        if self.writes:
            if not self.path.exists():
                self._begin()
            with self._told_if_lost(), self.path.open("ab") as file:
                file.write(b"".join(json_line({"model": self.model, "mode": mode, **conditions, **record}) for record in records))
                file.flush()
                os.fsync(file.fileno())


def refuse_to_lose(out: Path, lines: Iterable[Mapping[str, Any]], asked: Collection[tuple[str, str]]) -> None:
    """Raise DataError where ``lines``, which ``out`` has, are of a model or mode that is not among ``asked`` (model, mode)."""
    for model, mode in dict.fromkeys((line["model"], line["mode"]) for line in lines):
        if (model, mode) not in asked:
            raise DataError(
                f"{str(out)!r} has {mode} completions of {model}, which this command does not judge and would lose: name that model and "
                "mode too (--resume keeps what was judged), or write to another --out"
            )


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
        raise DataError(f"{name} has the style {record['style']!r}, but it must be one of {', '.join(PLACES)}: fix the file")
    return dict(record)


def _missing(record: object) -> Iterable[str]:
    if not isinstance(record, dict):
        return NEEDED
    texts = ("problem", "expected", "response")
    return [key for key in NEEDED if key not in record] or [key for key in texts if not isinstance(record[key], str)]


INVALID = "[invalid]"
"""What both filters give where they find nothing."""
STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
IGNORED = tuple(re.compile(pattern) for pattern in (r",", r"\$", r"(?s).*#### ", r"\.$"))
"""Taken out of answer and reference before they are compared, in this order."""


def strict_match(text: str) -> str:
    """Filter ``strict-match``: the number after the *first* ``#### `` (with its one space), as it is written there."""
    numbers = STRICT.findall(text)
    return numbers[0].strip() if numbers else INVALID


def flexible_extract(text: str) -> str:
    """Filter ``flexible-extract``: the last number, or the last run of at least two of ``$``, digits, ``.`` and ``,``."""
    numbers = FLEXIBLE.findall(text)
    if not numbers:
        return INVALID
    long, short = numbers[-1]
    return (long or short).strip()


def matches(answer: str, reference: str) -> bool:
    """Metric ``exact_match`` of that task: equal as text, commas, ``$``, all up to ``#### ``, and a last full stop aside."""
    return _bare(answer) == _bare(reference)


def _bare(text: str) -> str:
    for pattern in IGNORED:
        text = pattern.sub("", text)
    return text.lower()
