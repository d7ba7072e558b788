"""Rewards for the right answer: the completion's extracted answer against the problem's reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from groupwise.data.answers import AnswerStyle, Grade, grade
from groupwise.errors import UncheckedAnswerError
from groupwise.rewards.functions.format import format
from groupwise.rewards.functions.text import CompletionText, text_of

__all__ = ["accuracy", "correctness", "correctness_and_format"]


def correctness(
    completions: Sequence[CompletionText],
    answer: Sequence[str],
    answer_style: Sequence[str] | None = None,
    accepted_answers: Sequence[Sequence[str]] | None = None,
    **_: Any,
) -> list[float]:
    r"""2.0 where the answer is exactly the reference, 1.5 where it is equal to it as a number or as LaTeX, else 0.

    Only an answer in the form that was asked for counts (the last `<answer>` block, or `\boxed{}`): a right number elsewhere
    in the text scores 0. Where a row has several reference answers (`accepted_answers`), any of them will do.

    >>> correctness(["<answer>72</answer>", "<answer>72.0</answer>", "72"], answer=["72"] * 3)
    [2.0, 1.5, 0.0]
    """
    graded = _grades(completions, accepted_answers or answer, answer_style)
    return [2.0 if one.exact else 1.5 if _sure(one, one.strict) else 0.0 for one in graded]


def accuracy(
    completions: Sequence[CompletionText],
    answer: Sequence[str],
    answer_style: Sequence[str] | None = None,
    lenient: bool = False,
    accepted_answers: Sequence[Sequence[str]] | None = None,
    **_: Any,
) -> list[float]:
    """1 where the answer is right, else 0. `lenient` also takes the last number of a completion that ignores the format."""
    graded = _grades(completions, accepted_answers or answer, answer_style)
    return [float(_sure(one, one.lenient if lenient else one.strict)) for one in graded]


def correctness_and_format(
    completions: Sequence[CompletionText],
    answer: Sequence[str],
    answer_style: Sequence[str] | None = None,
    accepted_answers: Sequence[Sequence[str]] | None = None,
    **_: Any,
) -> list[float]:
    """The sum of `correctness` and `format`: 0 to 2.8."""
    right = correctness(completions, answer, answer_style, accepted_answers)
    return [points + tags for points, tags in zip(right, format(completions), strict=True)]


def _grades(
    completions: Sequence[CompletionText], references: Sequence[str | Sequence[str]], answer_style: Sequence[str] | None
) -> list[Grade]:
    styles = ["xml"] * len(completions) if answer_style is None else answer_style
    return [
        grade(text_of(completion), reference, cast(AnswerStyle, style))
        for completion, reference, style in zip(completions, references, styles, strict=True)
    ]


def _sure(graded: Grade, verdict: bool | None) -> bool:
    """The verdict, or ``UncheckedAnswerError``: what nobody could check is no 0."""
    if verdict is None:
        raise UncheckedAnswerError(graded.failure)
    return verdict
