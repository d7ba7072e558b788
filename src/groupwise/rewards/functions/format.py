"""Rewards for giving the answer in the form that was asked for, whether it is right or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.data.answers import PLACEHOLDERS, extract_answer
from groupwise.errors import RewardError
from groupwise.rewards.functions.text import CompletionText, text_of

__all__ = ["TAGS", "boxed_format", "format", "soft_xml", "strict_xml", "xml_count"]

TAGS = ("<reasoning>", "</reasoning>", "<answer>", "</answer>")


def format(completions: Sequence[CompletionText], **_: Any) -> list[float]:
    """0.2 for each of `<reasoning>`, `</reasoning>`, `<answer>`, `</answer>` that stands exactly once, and not inside the other block:
    0 to 0.8.

    The gentle one: a model that gets one tag right already learns something. Which block comes first is not looked at.

    >>> format(["<reasoning>2 + 2</reasoning> 4", "<answer>4</answer><answer>5</answer>"])
    [0.4, 0.0]
    """
    return [_tags_once(text_of(completion)) / 5 for completion in completions]


def strict_xml(completions: Sequence[CompletionText], score: float = 0.5, **_: Any) -> list[float]:
    """`score` where the completion is one reasoning block, then one answer block, both filled in, and nothing else; else 0."""
    return [score if _blocks_in_order(text_of(completion), nothing_else=True) else 0.0 for completion in completions]


def soft_xml(completions: Sequence[CompletionText], score: float = 0.5, **_: Any) -> list[float]:
    """`score` where one filled reasoning block is followed by one filled answer block, whatever stands around them; else 0."""
    return [score if _blocks_in_order(text_of(completion), nothing_else=False) else 0.0 for completion in completions]


def xml_count(
    completions: Sequence[CompletionText], tag_score: float = 0.125, trailing_penalty: float = 0.001, **_: Any
) -> list[float]:
    """`tag_score` for each of the four tags that stands exactly once, on a line of its own, less `trailing_penalty` for every
    character after `</answer>`; never below 0. With the defaults 0 to 0.5.

    Partial credit on the way to `strict_xml`'s form with line breaks. The floor keeps a long epilogue from being worse than no answer.

    >>> xml_count(["<reasoning>\\n4\\n</reasoning>\\n<answer>\\n4\\n</answer>\\n", "<answer>\\n4\\n</answer>\\nBye."])
    [0.5, 0.246]
    """
    if tag_score < 0 or trailing_penalty < 0:
        raise RewardError(
            f"xml_count's tag_score is {tag_score} and trailing_penalty {trailing_penalty}, but neither may be below 0: the penalty "
            "is already taken off"
        )
    return [
        max(0.0, tag_score * _tags_on_own_lines(text) - trailing_penalty * _trailing(text)) for text in map(text_of, completions)
    ]


def boxed_format(completions: Sequence[CompletionText], score: float = 0.5, **_: Any) -> list[float]:
    r"""`score` where exactly one `\boxed{}` stands in the completion, closed and filled in; else 0."""
    return [score if _one_filled_box(text_of(completion)) else 0.0 for completion in completions]


def _tags_once(text: str) -> int:
    return sum(_stands(tag, text) for tag in TAGS)


def _tags_on_own_lines(text: str) -> int:
    lines = [line.strip() for line in text.splitlines()]
    return sum(_stands(tag, text) and tag in lines for tag in TAGS)


def _stands(tag: str, text: str) -> bool:
    """Once, and not within the other block: an answer inside the reasoning is no answer after it."""
    opening, closing = TAGS[2:] if tag in TAGS[:2] else TAGS[:2]
    begin, end = text.find(opening), text.rfind(closing)
    return text.count(tag) == 1 and not (begin != -1 and begin < text.find(tag) < end)


def _trailing(text: str) -> int:
    """Characters after the last closing answer tag, blanks at both ends aside."""
    _, closed, after = text.rpartition(TAGS[-1])
    return len(after.strip()) if closed else 0


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
