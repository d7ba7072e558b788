"""Three completions that show what a rule means."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from groupwise.doctor.findings import Example
from groupwise.tracking.reading import CompletionRecord, RunRecord

__all__ = ["completions_between", "show", "shown", "three"]

MOST = 3
LONGEST_TEXT = 1500


def shown(text: str) -> str:
    """Beginning and end: how a completion ends is half of what there is to see."""
    if len(text) <= LONGEST_TEXT:
        return text
    half = LONGEST_TEXT // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"


def show(record: CompletionRecord, remark: str = "") -> Example:
    verdict = {True: "right", False: "wrong", None: "not judged"}[record.strict]
    reward = "no reward" if record.reward is None else f"reward {record.reward:g}"
    words = [reward, verdict, *(["cut at the token limit"] if record.truncated else []), *([remark] if remark else [])]
    where = f"step {record.step}, problem {record.problem}, sample {record.sample}"
    return Example(where, shown(record.text), ", ".join(words))


def completions_between(run: RunRecord, steps: tuple[int, int]) -> list[CompletionRecord]:
    return [record for record in run.completions if steps[0] <= record.step <= steps[1]]


def three(
    records: Iterable[CompletionRecord],
    *,
    where: Callable[[CompletionRecord], bool] = lambda record: True,
    remark: Callable[[CompletionRecord], str] = lambda record: "",
) -> tuple[Example, ...]:
    """The first three that fit, of different problems as far as there are that many."""
    fitting = [record for record in records if where(record)]
    firsts: dict[str, CompletionRecord] = {}
    for record in fitting:
        firsts.setdefault(record.problem, record)
    chosen: Sequence[CompletionRecord] = list(firsts.values())[:MOST]
    others = [record for record in fitting if not any(record is one for one in chosen)]
    return tuple(show(record, remark(record)) for record in [*chosen, *others][:MOST])
