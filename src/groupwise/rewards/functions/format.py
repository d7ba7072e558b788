"""Rewards for giving the answer in the form that was asked for, whether it is right or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.data.answers import PLACEHOLDERS, extract_answer
from groupwise.rewards.functions.text import CompletionText, text_of

__all__ = ["TAGS", "boxed_format", "format", "soft_xml", "strict_xml"]

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def format(completions: Sequence[CompletionText], **_: Any) -> list[float]:
    """0.2 for each of `<reasoning>`, `</reasoning>`, `<answer>`, `</answer>` that stands exactly once: 0 to 0.8.

    The gentle one: a model that gets one tag right already learns something. Order is not looked at.
    """
    return [_tags_once(text_of(completion)) / 5 for completion in completions]


def strict_xml(completions: Sequence[CompletionText], score: float = 0.5, **_: Any) -> list[float]:
    """`score` where the completion is one reasoning block, then one answer block, both filled in, and nothing else; else 0."""
    return [score if _blocks_in_order(text_of(completion), nothing_else=True) else 0.0 for completion in completions]


def soft_xml(completions: Sequence[CompletionText], score: float = 0.5, **_: Any) -> list[float]:
    """`score` where one filled reasoning block is followed by one filled answer block, whatever stands around them; else 0."""
    return [score if _blocks_in_order(text_of(completion), nothing_else=False) else 0.0 for completion in completions]


def boxed_format(completions: Sequence[CompletionText], score: float = 0.5, **_: Any) -> list[float]:
    r"""`score` where exactly one `\boxed{}` stands in the completion, closed and filled in; else 0."""
    return [score if _one_filled_box(text_of(completion)) else 0.0 for completion in completions]


def _tags_once(text: str) -> int:
    return sum(text.count(tag) == 1 for tag in TAGS)


def _blocks_in_order(text: str, nothing_else: bool) -> bool:
    # Positions instead of a regular expression: linear in the length, however many half-open tags a model produces.
    if _tags_once(text) < len(TAGS):
        return False
    starts = [text.index(tag) for tag in TAGS]
    if starts != sorted(starts):
        return False
    ends = [start + len(tag) for start, tag in zip(starts, TAGS, strict=True)]
    before, reasoning, between, answer, after = (
        text[start:end].strip() for start, end in zip([0, *ends], [*starts, len(text)], strict=True)
    )
    return _filled(reasoning) and _filled(answer) and not (nothing_else and (before or between or after))


def _filled(content: str) -> bool:
    """A copy of the prompt's placeholder is not an answer."""
    return content not in PLACEHOLDERS


def _one_filled_box(text: str) -> bool:
    return text.count("\\boxed") == 1 and extract_answer(text, "boxed") is not None
