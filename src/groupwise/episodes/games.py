"""A game whose best play is known, with its rows: what the recipe ``quickstart-game`` learns.

A number from 1 to ``LARGEST`` is to be found. Each guess is answered with the numbers that are left: all of them, or where they are more
than ``NAMED``, that many at even distances, both ends and the middle among them. Halving needs ``fewest_guesses`` on average; guessing any
of those that are named, as the played examples do, needs about 7.6.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from groupwise.rewards import StepRewards

__all__ = ["LARGEST", "HigherOrLower", "fewest_guesses", "guesses_lost", "rows"]

LARGEST = 64
NAMED = 5
"""Most numbers that an answer names. A small model says the middle one sooner than it computes the mean of two ends."""


class HigherOrLower:
    """An environment by the protocol of steps. A row has its number in the column ``answer``."""

    def reset(self, answer: str) -> None:
        """Begin with the number ``answer``; the question has said what to do."""
        self.secret, self.low, self.high = int(answer), 1, LARGEST

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        """One guess: the numbers that are left; 1 if it found the number, less what it lost against halving; whether it found it."""
        guess = int(text) if re.fullmatch(r"\s*\d{1,3}\s*", text) else 0
        lost = _lost(guess - self.low, self.high - guess)
        if self.low <= guess < self.secret:
            self.low = guess + 1
        elif self.secret < guess <= self.high:
            self.high = guess - 1
        found = guess == self.secret
        return _left(self.low, self.high), found - lost, found, {}


def guesses_lost(
    completions: Sequence[object], turns: Sequence[Sequence[Mapping[str, Any]]], answer: Sequence[str], **_: object
) -> list[StepRewards]:
    """Reward of each guess: less the guesses that it loses against the middle, on average over the numbers that are left.

    With V(n) guesses to come for n numbers under halving, it is V(n) - 1 - E[V(numbers left)]: "each guess costs 1", shaped by the
    potential -V, in expectation over the number. Such shaping changes no best play (Ng, Harada, Russell 1999), and by this potential a
    guess is judged without those that follow (``algorithm.advantage.discount: 0``).
    """
    given = []
    for game, secret in zip(turns, answer, strict=True):
        played, rewards, ends, end = HigherOrLower(), [], [], 0
        played.reset(secret)
        for turn in game:
            end += turn["tokens"]
            if turn["role"] == "assistant":
                reward, found = played.step(turn["text"])[1:3]
                rewards.append(reward - found)
                ends.append(end)
        given.append(StepRewards(rewards, ends, unit="tokens"))
    return given


def rows(games: int = 1200, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Games with a number each, and a play by chance among the numbers that are left, for the warm start."""
    chance = random.Random(seed)
    for game in range(games):
        secret, low, high = chance.randint(1, LARGEST), 1, LARGEST
        script: list[str] = []
        while not script or int(script[-1]) != secret:
            guess = chance.choice(_named(low, high))
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
            script.append(f"{guess:02}")
        yield {"question": f"Game {game}: {_left(1, LARGEST)}", "answer": str(secret), "script": script}


@cache
def fewest_guesses(numbers: int = LARGEST) -> float:
    """The mean number of guesses of binary search, all numbers being equally likely."""
    return sum((guess + 1) * min(2**guess, numbers - 2**guess + 1) for guess in range(numbers.bit_length())) / max(1, numbers)


def _lost(below: int, above: int) -> float:
    """By how many guesses a game gets longer than it need be, on average, by a guess with so many numbers that are left below and above;
    one outside of them loses itself."""
    numbers = below + above + 1
    if below < 0 or above < 0:
        return 1.0
    return 1 + (below * fewest_guesses(below) + above * fewest_guesses(above)) / numbers - fewest_guesses(numbers)


def _named(low: int, high: int) -> list[int]:
    """Those of the numbers from ``low`` to ``high`` that are named."""
    named = min(NAMED, high - low + 1)
    return [low + round(i * (high - low) / max(1, named - 1)) for i in range(named)]


def _left(low: int, high: int) -> str:
    return " ".join(f"{number:02}" for number in _named(low, high))
