"""A game whose best play is known, with its rows: what the recipe ``quickstart-game`` learns.

A number from 1 to ``LARGEST`` is to be found. Each wrong guess is answered with the numbers that are left. Halving them each time needs
``fewest_guesses`` on average; guessing any of them, as the played examples do, needs about 6.6.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["LARGEST", "HigherOrLower", "fewest_guesses", "rows"]

LARGEST = 64
COST = 0.1
"""What a guess costs. The number found pays 1."""


class HigherOrLower:
    """An environment by the protocol of steps. A row has its number in the column ``answer``."""

    def reset(self, answer: str) -> None:
        """Begin with the number ``answer``; the question has said what to do."""
        self.secret, self.low, self.high = int(answer), 1, LARGEST

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        """One guess: the observation, its reward, whether the number is found, and nothing else."""
        guess = int(text) if re.fullmatch(r"\s*\d{1,3}\s*", text) else 0
        if not self.low <= guess <= self.high:
            return f"Say one number from {self.low} to {self.high}.", -2 * COST, False, {}
        if guess == self.secret:
            return "Right.", 1 - COST, True, {}
        if guess < self.secret:
            self.low = guess + 1
        else:
            self.high = guess - 1
        word = "Higher" if guess < self.secret else "Lower"
        return f"{word}: from {self.low} to {self.high}.", -COST, False, {}


def rows(games: int = 1200, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Games with a number each, and a play by chance among the numbers that are left, for the warm start."""
    chance = random.Random(seed)
    for game in range(games):
        secret, low, high = chance.randint(1, LARGEST), 1, LARGEST
        script: list[str] = []
        while not script or script[-1] != str(secret):
            guess = chance.randint(low, high)
            low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
            script.append(str(guess))
        yield {"question": f"Game {game}: find the number from 1 to {LARGEST}.", "answer": str(secret), "script": script}


def fewest_guesses(numbers: int = LARGEST) -> float:
    """The mean number of guesses of binary search, all numbers being equally likely."""
    return sum((guess + 1) * min(2**guess, numbers - 2**guess + 1) for guess in range(numbers.bit_length())) / numbers
