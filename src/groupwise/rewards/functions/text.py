"""Rewards that look at the text alone: its length, words it should contain, and repetition."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from groupwise.errors import RewardError
from groupwise.types import Message

__all__ = ["CompletionText", "keyword", "length", "overlong", "repetition_penalty", "text_of"]

CompletionText = str | Sequence[Message] | Sequence[Mapping[str, Any]]
"""A completion as reward functions receive it: a string for plain prompts, a list of messages for chat prompts."""


def text_of(completion: CompletionText) -> str:
    """The words of a completion in either form; several messages are joined by newlines.

    >>> text_of([{"role": "assistant", "content": "42"}])
    '42'
    """
    if isinstance(completion, str):
        return completion
    return "\n".join(str(message["content"]) for message in completion)


def length(
    completions: Sequence[CompletionText],
    completion_ids: Sequence[Sequence[int]] | None = None,
    target: int = 200,
    unit: Literal["characters", "tokens"] = "characters",
    bounded: bool = True,
    **_: Any,
) -> list[float]:
    """How near a completion's length is to `target`: 0 on the spot, falling linearly to -1 for an empty one or twice the target.

    `-min(1, |length - target| / target)`: longer ones stay at -1, so that one endless completion does not drown the differences
    within its group. `bounded: false` is the plain distance, `-|length - target|`, which has no lower end. Tokens include the stop
    token.

    >>> length(["a" * 25, "a" * 100], target=20)
    [-0.25, -1.0]
    >>> length(["a" * 25, "a" * 100], target=20, bounded=False)
    [-5.0, -80.0]
    """
    if target < 1:
        raise RewardError(f"length's target is {target}, but it must be at least 1")
    if unit not in ("characters", "tokens"):
        raise RewardError(f"length's unit is {unit!r}, but it must be 'characters' or 'tokens'")
    if unit == "tokens":
        if completion_ids is None:
            raise RewardError("length counts tokens only where completion_ids are given; use unit='characters'")
        sizes = [len(ids) for ids in completion_ids]
    else:
        sizes = [len(text_of(completion)) for completion in completions]
    return [-min(1.0, abs(size - target) / target) if bounded else -float(abs(size - target)) for size in sizes]


def overlong(
    completions: Sequence[CompletionText],
    completion_ids: Sequence[Sequence[int]],
    max_completion_tokens: int | Sequence[int],
    cache_tokens: int | None = None,
    **_: Any,
) -> list[float]:
    """0 up to `cache_tokens` before the token limit, then falling linearly to -1 at the limit: DAPO's soft overlong punishment.

    arXiv 2503.14476, eq. 13, where the limit is L_max (the run's `rollout.max_completion_tokens`) and the zone before it L_cache; by
    default a fifth of the limit, the paper's 4,096 of 20,480 tokens. Tokens include the stop token.
    """
    limits = [max_completion_tokens] * len(completion_ids) if isinstance(max_completion_tokens, int) else max_completion_tokens
    scores = []
    for ids, limit in zip(completion_ids, limits, strict=True):
        zone = max(1, limit // 5) if cache_tokens is None else cache_tokens
        if not 1 <= zone <= limit:
            raise RewardError(
                f"overlong's cache_tokens is {zone}, but it must be from 1 to the limit of {limit} tokens "
                "(rollout.max_completion_tokens); a fifth of the limit is usual"
            )
        scores.append(max(-1.0, min(0.0, (limit - zone - len(ids)) / zone)))
    return scores


def keyword(
    completions: Sequence[CompletionText], words: Sequence[str] = (), case_sensitive: bool = False, **_: Any
) -> list[float]:
    """The share of `words` that stand in a completion as whole words: 0 to 1. Repeating one earns nothing more.

    >>> keyword(["Therefore 3, therefore 4", "therefores"], words=["therefore", "because"])
    [0.5, 0.0]
    """
    listed = [words] if isinstance(words, str) else list(words)
    if not listed or not all(word.strip() for word in listed):
        raise RewardError("keyword needs words to look for: set arguments: {words: [therefore, because]}")
    flags = 0 if case_sensitive else re.IGNORECASE
    patterns = [re.compile(rf"(?<!\w){re.escape(word.strip())}(?!\w)", flags) for word in listed]
    return [sum(bool(p.search(text)) for p in patterns) / len(patterns) for text in map(text_of, completions)]


def repetition_penalty(completions: Sequence[CompletionText], ngram: int = 3, strength: float = 1.0, **_: Any) -> list[float]:
    """`-strength` times the share of word n-grams that occurred before in the same completion: 0 to `-strength`.

    `-strength * (1 - distinct / all)` n-grams, over lower-cased words between blanks. Completions shorter than `ngram` words cannot
    repeat and score 0. As in arXiv 2502.03373 (there on tokens), one number for the whole completion.

    >>> repetition_penalty(["so it is so it is", "so it is not so"])  # "so it is" twice among four
    [-0.25, 0.0]
    """
    if ngram < 1 or strength < 0:
        raise RewardError(f"repetition_penalty's ngram is {ngram} and strength {strength}, but they must be at least 1 and 0")
    return [0.0 - strength * _repeated_share(text_of(completion).lower().split(), ngram) for completion in completions]


def _repeated_share(words: Sequence[str], ngram: int) -> float:
    grams = [tuple(words[i : i + ngram]) for i in range(len(words) - ngram + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
