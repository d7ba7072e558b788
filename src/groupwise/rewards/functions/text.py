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
    unit: Literal["characters", "words", "tokens"] = "characters",
    bounded: bool = True,
    penalise_longer: bool = True,
    **_: Any,
) -> list[float]:
    """How near a completion's length is to `target`: 0 on the spot, falling linearly to -1 for an empty one or twice the target.

    `-min(1, |length - target| / target)`: longer ones stay at -1, so that one endless completion does not drown the differences
    within its group. `bounded: false` is the plain distance, `-|length - target|`, which has no lower end. With `penalise_longer: false`
    whatever reaches the target scores 0: `min(length / target, 1) - 1`. Words stand between blanks; tokens include the stop token.

    >>> length(["a" * 25, "a" * 100], target=20)
    [-0.25, -1.0]
    >>> length(["a" * 25, "a" * 100], target=20, bounded=False)
    [-5.0, -80.0]
    >>> length(["only three words", "these are four words"], target=4, unit="words", penalise_longer=False)
    [-0.25, 0.0]
    """
    if target < 1:
        raise RewardError(f"length's target is {target}, but it must be at least 1")
    if unit not in ("characters", "words", "tokens"):
        raise RewardError(f"length's unit is {unit!r}, but it must be 'characters', 'words' or 'tokens'")
    if unit == "tokens":
        if completion_ids is None:
            raise RewardError("length counts tokens only where completion_ids are given; use unit='characters'")
        sizes = [len(ids) for ids in completion_ids]
    else:
        texts = [text_of(completion) for completion in completions]
        sizes = [len(text.split()) if unit == "words" else len(text) for text in texts]
    distances = [abs(size - target) if penalise_longer else max(0, target - size) for size in sizes]
    return [0.0 - (min(1.0, distance / target) if bounded else distance) for distance in distances]


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
    completions: Sequence[CompletionText],
    words: Sequence[str] = (),
    case_sensitive: bool = False,
    avoid: Sequence[str] = (),
    **_: Any,
) -> list[float]:
    """The share of `words` that stand in a completion as whole words, less the share of those to `avoid`: -1 to 1.

    Repeating one changes nothing.

    >>> keyword(["Therefore 3, therefore 4", "therefores"], words=["therefore", "because"])
    [0.5, 0.0]
    >>> keyword(["Therefore 3", "Sorry, an error"], words=["therefore"], avoid=["sorry", "error", "wrong", "false"])
    [1.0, -0.5]
    """
    wanted, unwanted = _word_patterns(words, case_sensitive), _word_patterns(avoid, case_sensitive)
    if not wanted and not unwanted:
        raise RewardError("keyword needs words to look for: set arguments: {words: [therefore, because]}")
    return [_share_found(wanted, text) - _share_found(unwanted, text) for text in map(text_of, completions)]


def _word_patterns(words: Sequence[str], case_sensitive: bool) -> list[re.Pattern[str]]:
    listed = [words] if isinstance(words, str) else list(words)
    if not all(word.strip() for word in listed):
        raise RewardError("keyword needs words to look for, but one of them is blank: remove it")
    return [re.compile(rf"(?<!\w){re.escape(word.strip())}(?!\w)", 0 if case_sensitive else re.IGNORECASE) for word in listed]


def _share_found(patterns: Sequence[re.Pattern[str]], text: str) -> float:
    return sum(bool(pattern.search(text)) for pattern in patterns) / len(patterns) if patterns else 0.0


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
