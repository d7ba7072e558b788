"""What reward functions may return: checked (`read_scores`), steps in tokens (`to_token_steps`), normalised and clipped (`Shaper`)."""

from __future__ import annotations

import inspect
import math
import numbers
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, cast

from groupwise.config.rewards import Normalising
from groupwise.importing import in_one_line, shown
from groupwise.limits import LARGEST_REWARD
from groupwise.metrics import Mean, Metric
from groupwise.types import Completion

__all__ = [
    "BadResult",
    "CallRaised",
    "CallTimedOut",
    "Decode",
    "FailureKind",
    "RewardFailure",
    "RunningStatistics",
    "Score",
    "Shaper",
    "StepRewards",
    "has_steps",
    "numbers_of",
    "read_scores",
    "remedy",
    "step_metrics",
    "to_token_steps",
]

Score = float | None | tuple[tuple[int, float], ...]
"""One function's score of one completion: a number, None (does not apply), or its steps as (index of the last token, reward)."""

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


def _read_steps(score: object) -> StepRewards | str | None:
    """A ``StepRewards``, or a list of pairs (characters written when the step is done, reward), with plain numbers in it.

    None for what is neither; a sentence's end for what is one of them and wrong.
    """
    if isinstance(score, StepRewards):
        if not all(isinstance(part, Iterable) for part in (score.rewards, score.ends)):
            return f"steps of {shown(score.rewards)} and {shown(score.ends)} instead of two lists"
        rewards, ends, unit = list(map(_scalar, score.rewards)), list(map(_scalar, score.ends)), score.unit
    elif isinstance(score, (list, tuple)) and all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in score):
        rewards, ends, unit = [_scalar(pair[1]) for pair in score], [_scalar(pair[0]) for pair in score], "characters"
    else:
        return None
    if len(rewards) != len(ends):
        return f"{len(rewards)} step rewards with {len(ends)} ends"
    if unit not in ("characters", "tokens"):
        return f"steps in the unit {shown(unit)}, but it must be 'characters' or 'tokens'"
    if bad := [r for r in rewards if not isinstance(r, numbers.Real) or not _is_sound(r)]:
        return f"a step reward of {shown(bad[0])} instead of a finite number of at most {LARGEST_REWARD:g}"
    if bad := [end for end in ends if not isinstance(end, numbers.Integral)]:
        return f"a step that ends at {shown(bad[0])} instead of a whole number of {unit}"
    return StepRewards([float(r) for r in rewards], [int(end) for end in ends], unit)


def _scalar(value: object) -> Any:
    """A number of numpy or torch as Python's; None for a masked one, which says that it is 0."""
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return None if getattr(value, "mask", False) else value.item()
    return value


def _is_sound(number: numbers.Real) -> bool:
    """Finite, and no larger than what advantages can be made of."""
    try:
        return abs(float(number)) <= LARGEST_REWARD
    except OverflowError:  # a whole number with hundreds of digits
        return False


def to_token_steps(steps: StepRewards, completion: Completion, decode: Decode | None) -> list[tuple[int, float]] | str:
    """Steps as (index of the last token, reward), or a sentence's end where a step ends outside of the completion.

    A step ends with the token that completes its last character. One that ends with the text takes along what follows without text: the
    stop token is part of the last step.
    """
    if steps.unit == "characters" and len(completion.turns) > 1:
        return "steps in characters, which an episode of several turns has no count of: give them in tokens"
    length = len(completion.token_ids if steps.unit == "tokens" else completion.text)
    if outside := [end for end in steps.ends if not 1 <= end <= length]:
        return f"a step that ends after {shown(outside[0])} {steps.unit}, but the completion has {length}"
    if steps.unit == "tokens":
        return [(end - 1, r) for end, r in zip(steps.ends, steps.rewards, strict=True)]
    if decode is None and any(end < length for end in steps.ends):
        return "steps in characters, but there is no tokenizer to count tokens with: give them in tokens"
    token_at = _token_at(completion, decode or (lambda ids: completion.text))
    return [(token_at(end), r) for end, r in zip(steps.ends, steps.rewards, strict=True)]


def _token_at(completion: Completion, decode: Decode) -> Callable[[int], int]:
    """A function from a number of characters to the index of the token that completes them."""
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


FailureKind = Literal["raised", "timed_out", "wrong_length", "not_a_number", "bad_step", "environment"]


@dataclass(frozen=True, slots=True)
class RewardFailure:
    """A group that could not be scored and is left out of the update. The caller counts it and shows ``message``."""

    function: str
    problem_id: str
    kind: FailureKind
    message: str


class CallRaised(Exception):
    """The function raised; the original exception is the ``__cause__``."""


class CallTimedOut(Exception):
    """The function did not return within its time limit. The message, where there is one, says what held it up."""


class BadResult(Exception):
    """Something that is no score, or no list of them; the message is what the function did, without a subject."""

    def __init__(self, kind: FailureKind, message: str, cause: BaseException | None = None) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.cause = cause


def read_scores(result: object, members: Sequence[int]) -> list[float | StepRewards | BadResult | None]:
    """Check what a function returned: one score per completion. Lists, tuples, numpy arrays and 1-d tensors will do.

    ``members`` are the completions' numbers within their groups, for the messages. A score that is no number comes back as a
    ``BadResult`` in its place, since the other completions of a batch are none the worse for it. Raises ``BadResult`` where there is
    no list of that many.
    """
    try:
        listed = None if isinstance(result, (str, bytes, Mapping, Set)) else list(cast(Iterable[object], result))
    except TypeError:
        listed = None
    except Exception as error:  # a generator computes while it is read
        raise BadResult("raised", f"raised {in_one_line(error)} while its scores were read", error) from error
    expected = len(members)
    if listed is None:
        kind = "None (is a return statement missing?)" if result is None else f"a {type(result).__name__}"
        if inspect.iscoroutine(result):
            result.close()
            kind += " (is it an async function in a plain wrapper? make the wrapper async)"
        raise BadResult("wrong_length", f"returned {kind} instead of a list of {expected} scores")
    if len(listed) != expected:
        raise BadResult("wrong_length", f"returned {len(listed)} scores for {expected} completions")
    return [_score(score, member) for score, member in zip(listed, members, strict=True)]


def _score(score: object, member: int) -> float | StepRewards | BadResult | None:
    if score is None:
        return None
    steps = _read_steps(score)
    if isinstance(steps, str):
        return BadResult("bad_step", f"returned {steps}, for completion {member}")
    return _number(score, member) if steps is None else steps


def _number(score: object, member: int) -> float | BadResult:
    scalar = _scalar(score)
    if not isinstance(scalar, numbers.Real):
        what = f"{shown(score)} ({type(score).__name__})"
        return BadResult("not_a_number", f"returned {what} for completion {member} instead of a number or None")
    if not _is_sound(scalar):
        what = f"a finite number of at most {LARGEST_REWARD:g} in size, or None"
        return BadResult("not_a_number", f"returned {shown(scalar)} for completion {member} instead of {what}")
    return float(scalar)


def remedy(kind: FailureKind) -> str:
    """How to fix a failure of this kind, as the end of a sentence."""
    if kind == "wrong_length":
        return "it must return one number or None per completion, so correct the function"
    if kind == "timed_out":
        return "make it faster, raise rewards.timeout_s, or set rewards.on_error=skip to leave such groups out"
    if kind == "bad_step":
        return "steps end within their completion, so correct the function, or set rewards.on_error=skip to leave such groups out"
    what = "environment" if kind == "environment" else "function"
    return f"correct the {what}, or set rewards.on_error=skip to leave such groups out and count them"


_NO_DEVIATION = 1e-8
"""A standard deviation of less than this share of the numbers' size is rounding, and nothing is divided by it."""


@dataclass
class RunningStatistics:
    """Count, mean and sum of squared deviations of a stream of numbers, one batch at a time.

    Batches are merged by the pairwise rule of T. Chan, G. Golub and R. LeVeque (1979), "Updating formulae and a pairwise algorithm for
    computing sample variances": exact up to rounding however the stream is cut, and stable where the mean is large beside the deviation.
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    """Sum of (x - mean)^2."""

    def update(self, numbers: Sequence[float]) -> None:
        if not numbers:
            return
        new = len(numbers)
        mean = math.fsum(numbers) / new
        squares = math.fsum((x - mean) ** 2 for x in numbers)
        total, apart = self.count + new, mean - self.mean
        self.squares += squares + apart * apart * self.count * new / total
        self.mean += apart * new / total
        self.count = total

    @property
    def std(self) -> float:
        """Sample standard deviation; 0 for fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0


@dataclass
class Shaper:
    """Normalise and clip one stream of scores; without either it returns them unchanged.

    The statistics are those of all scores of the run so far, the current batch included; where a batch is sampled in rounds, its first
    round, so that all of its scores are divided by the same, and later batches know them all. They are state of the run: checkpoints
    hold them, and a resumed run continues with them exactly.
    """

    normalise: Normalising = "none"
    clip: tuple[float, float] | None = None
    statistics: RunningStatistics = field(default_factory=RunningStatistics)
    """Statistics of all scores so far."""
    used: RunningStatistics = field(default_factory=RunningStatistics)
    """The statistics after the first round of the current batch: what its scores are divided by."""

    def learn(self, scores: Sequence[float], *, more: bool = False) -> None:
        """Take scores into the statistics: a batch's, or ``more`` of the same batch."""
        if self.normalise != "none":
            self.statistics.update(scores)
            if not more:
                self.used = replace(self.statistics)

    def __call__(self, score: float) -> float:
        """(score - mean) / std, or score / std, then clipped. Scores that never varied are not divided.

        As long as nothing has been learnt, as in a trial before the run, a score that is to be normalised stays as it is.
        """
        if self.normalise != "none":
            if self.used.count == 0:
                return score
            if self.normalise == "mean_std":
                score -= self.used.mean
            score /= self._divisor
        return score if self.clip is None else min(max(score, self.clip[0]), self.clip[1])

    def metrics(self, name: str, scores: Sequence[float]) -> dict[str, Metric]:
        """The statistics as they are, and the share of ``scores`` (as they came) that the clip changes."""
        metrics: dict[str, Metric] = {}
        if self.normalise != "none" and self.used.count:
            metrics[f"shaping/mean_{name}"] = Mean(self.used.mean, 1)
            metrics[f"shaping/std_{name}"] = Mean(self.used.std, 1)
        if self.clip is not None and scores:
            inside = Shaper(self.normalise, None, self.statistics, self.used)
            metrics[f"shaping/clipped_{name}"] = Mean.of(not self.clip[0] <= inside(score) <= self.clip[1] for score in scores)
        return metrics

    def state(self) -> list[float]:
        """Count, mean and squares: JSON values that give the same numbers back."""
        return [self.statistics.count, self.statistics.mean, self.statistics.squares]

    def restore(self, state: Sequence[float]) -> None:
        """Raises ValueError or TypeError for what ``state`` never gave."""
        count, mean, squares = state
        self.statistics = RunningStatistics(int(count), float(mean), float(squares))
        self.used = replace(self.statistics)

    @property
    def _divisor(self) -> float:
        std = self.used.std
        return std if std > _NO_DEVIATION * abs(self.used.mean) else 1.0


def numbers_of(score: Score) -> list[float]:
    """Every reward in a score."""
    if score is None:
        return []
    return [r for _, r in score] if isinstance(score, tuple) else [score]


def has_steps(scores: Sequence[Score]) -> bool:
    """Whether any of the scores is given by step."""
    return any(isinstance(score, tuple) for score in scores)


def step_metrics(name: str, scores: Sequence[Score]) -> dict[str, Metric]:
    """How many steps a completion has, and the reward of a step; empty where the function gave no steps."""
    if not has_steps(scores):
        return {}
    counts = [len(score) for score in scores if isinstance(score, tuple)]
    rewards = [r for score in scores if isinstance(score, tuple) for r in numbers_of(score)]
    metrics: dict[str, Metric] = {f"steps/count_{name}": Mean.of(counts)}
    return metrics | ({f"steps/reward_{name}": Mean.of(rewards)} if rewards else {})
