"""Rewards for the steps of a completion: what a function returns, and with which token each step ends."""

from __future__ import annotations

import math
import numbers
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from groupwise.types import Completion

__all__ = ["Decode", "StepRewards", "place", "read_steps"]

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, as ``Completion.text`` was made."""


@dataclass(frozen=True)
class StepRewards:
    """Rewards of one completion's steps. A process reward function returns one of these per completion.

    >>> StepRewards(rewards=[1.0, 0.0], ends=[12, 30])
    StepRewards(rewards=[1.0, 0.0], ends=[12, 30], unit='characters')
    """

    rewards: Sequence[float]
    ends: Sequence[int] = field(default=())
    """How much of the completion has been written when each step is done: from 1 to its length, in ``unit``."""
    unit: Literal["characters", "tokens"] = "characters"


def read_steps(score: Any) -> StepRewards | str | None:
    """A ``StepRewards``, or a list of pairs (characters written when the step is done, reward), with plain numbers in it.

    None for what is neither; a sentence's end for what is one of them and wrong.
    """
    if isinstance(score, StepRewards):
        rewards, ends, unit = list(score.rewards), list(score.ends), score.unit
    elif isinstance(score, (list, tuple)) and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in score):
        rewards, ends, unit = [pair[1] for pair in score], [pair[0] for pair in score], "characters"
    else:
        return None
    if len(rewards) != len(ends):
        return f"{len(rewards)} step rewards with {len(ends)} ends"
    if unit not in ("characters", "tokens"):
        return f"steps in the unit {unit!r:.80}, but it must be 'characters' or 'tokens'"
    if bad := [r for r in rewards if not isinstance(r, numbers.Real) or not _is_finite(r)]:
        return f"a step reward of {bad[0]!r:.80} instead of a finite number"
    if bad := [end for end in ends if not isinstance(end, numbers.Integral)]:
        return f"a step that ends at {bad[0]!r:.80} instead of a whole number of {unit}"
    return StepRewards([float(r) for r in rewards], [int(end) for end in ends], unit)


def _is_finite(number: numbers.Real) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # a whole number with hundreds of digits
        return False


def place(steps: StepRewards, completion: Completion, decode: Decode | None) -> list[tuple[int, float]] | str:
    """(index of the step's last token, reward), or a sentence's end where a step ends outside of the completion.

    A step ends with the token that completes its last character. One that ends with the text takes along what follows without text: the
    stop token is part of the last step.
    """
    length = len(completion.token_ids if steps.unit == "tokens" else completion.text)
    if outside := [end for end in steps.ends if not 1 <= end <= length]:
        return f"a step that ends after {outside[0]} {steps.unit}, but the completion has {length}"
    if steps.unit == "tokens":
        return [(end - 1, r) for end, r in zip(steps.ends, steps.rewards, strict=True)]
    if decode is None and any(end < length for end in steps.ends):
        return "steps in characters, but there is no tokenizer to count tokens with: give them in tokens"
    written = _written(completion, decode or (lambda ids: completion.text))
    return [(written(end), r) for end, r in zip(steps.ends, steps.rewards, strict=True)]


def _written(completion: Completion, decode: Decode) -> Callable[[int], int]:
    """The index of the token that completes the text's first so many characters."""
    ids, text = completion.token_ids, completion.text

    @cache
    def so_far(tokens: int) -> str:
        return decode(ids[:tokens])

    def index(characters: int) -> int:
        if characters >= len(text):
            return len(ids) - 1
        wanted = text[:characters]
        # Half a character, of which a token may consist, decodes to a replacement that is not the character.
        first = bisect_left(range(1, len(ids) + 1), True, key=lambda tokens: so_far(tokens)[:characters] == wanted)
        return min(first, len(ids) - 1)

    return index
