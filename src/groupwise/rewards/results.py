"""What a reward function returned, checked: numbers, steps or None, one for each completion. What is none of them is explained."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from groupwise.rewards.steps import StepRewards, read_steps

__all__ = ["BadResult", "FailureKind", "RewardFailure", "Score", "read_scores", "remedy"]

FailureKind = Literal["raised", "timed_out", "wrong_length", "not_a_number", "bad_step"]
Score = float | None | StepRewards


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A group that could not be scored and is left out of the update. The caller counts it and shows ``message``."""

    function: str
    problem_id: str
    kind: FailureKind
    message: str


class BadResult(Exception):
    """Something that is no score, or no list of them; the message is what the function did, without a subject."""

    def __init__(self, kind: FailureKind, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.cause = cause


def read_scores(result: Any, members: Sequence[int]) -> list[Score | BadResult]:
    """One score per completion. Lists, tuples, numpy arrays and 1-d tensors will do.

    ``members`` are the completions' numbers within their groups, for the messages. A score that is no number comes back as a
    ``BadResult`` in its place, since the other completions of a batch are none the worse for it. Raises ``BadResult`` where there is
    no list of that many.
    """
    try:
        listed = None if isinstance(result, (str, bytes, Mapping)) else list(result)
    except TypeError:
        listed = None
    expected = len(members)
    if listed is None:
        kind = "None (is a return statement missing?)" if result is None else f"a {type(result).__name__}"
        raise BadResult("wrong_length", f"returned {kind} instead of a list of {expected} scores")
    if len(listed) != expected:
        raise BadResult("wrong_length", f"returned {len(listed)} scores for {expected} completions")
    return [_score(score, member) for score, member in zip(listed, members, strict=True)]


def _score(score: Any, member: int) -> Score | BadResult:
    if score is None:
        return None
    steps = read_steps(score)
    if isinstance(steps, str):
        return BadResult("bad_step", f"returned {steps}, for completion {member}")
    return _number(score, member) if steps is None else steps


def _number(score: Any, member: int) -> float | BadResult:
    scalar = score.item() if hasattr(score, "item") and getattr(score, "shape", None) == () else score
    if not isinstance(scalar, numbers.Real):
        what = f"{score!r:.80} ({type(score).__name__})"
        return BadResult("not_a_number", f"returned {what} for completion {member} instead of a number or None")
    try:
        number = float(scalar)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        return BadResult("not_a_number", f"returned {number} for completion {member} instead of a finite number or None")
    return number


def remedy(kind: FailureKind) -> str:
    """What to do about it, as the end of a sentence."""
    if kind == "wrong_length":
        return "it must return one number or None per completion, so correct the function"
    if kind == "timed_out":
        return "make it faster, raise rewards.timeout_s, or set rewards.on_error=skip to leave such groups out"
    if kind == "bad_step":
        return "steps end within their completion, so correct the function, or set rewards.on_error=skip to leave such groups out"
    return "correct the function, or set rewards.on_error=skip to leave such groups out and count them"
