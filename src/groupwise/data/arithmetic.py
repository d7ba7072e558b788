"""The built-in generator of arithmetic word problems: a task that needs no data file and whose answers are certainly right.

A problem is a sum (a start and one to four operations of + - x) told as one of several short stories. Which split a sum belongs
to is a hash of the sum itself, so that training and held-out problems differ in their numbers and not merely in their wording.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from groupwise.config.schema import ArithmeticConfig
from groupwise.errors import DataError
from groupwise.types import Problem

__all__ = ["Split", "generate"]

Split = Literal["train", "held_out"]
T = TypeVar("T")

HELD_OUT_SHARE = 5
"""One sum in five belongs to the held-out split."""
ATTEMPTS_PER_PROBLEM = 200
"""Draws without a new problem before the space of problems counts as used up."""

NAMES: tuple[tuple[str, str], ...] = (
    ("Mia", "She"), ("Tom", "He"), ("Ana", "She"), ("Ben", "He"), ("Lily", "She"), ("Sam", "He"),
    ("Ruth", "She"), ("Omar", "He"), ("Nina", "She"), ("Jack", "He"), ("Grace", "She"), ("Leo", "He"),
    ("Emma", "She"), ("Paul", "He"), ("Clara", "She"), ("David", "He"), ("Sara", "She"), ("Max", "He"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Story:
    """One way to tell a sum. ``{n}`` is a number, ``{k}`` a factor, ``{name}`` and ``{She}`` a person, ``{things}`` a plural."""

    things: tuple[str, ...]
    opening: str
    """Says the start, ``{n}``."""
    groups: str
    """Says start and factor at once, for a sum whose first operation is x: ``{k}`` groups of ``{n}``."""
    plus: tuple[str, ...]
    minus: tuple[str, ...]
    times: str
    question: str


STORIES: tuple[Story, ...] = (
    Story(
        ("apples", "plums", "pears", "lemons"),
        "{name} has {n} {things}.",
        "{name} has {k} bags of {n} {things}.",
        ("{She} buys {n} more.", "{She} picks {n} more."),
        ("{She} eats {n}.", "{She} gives away {n}."),
        "Then {she} gets enough to have {k} times as many.",
        "How many {things} does {she} have now?",
    ),
    Story(
        ("people", "passengers"),
        "A train leaves with {n} {things}.",
        "A train leaves with {k} cars of {n} {things} each.",
        ("At a stop {n} get on.", "Then {n} more board."),
        ("At a stop {n} get off.", "Then {n} leave the train."),
        "At the next city the number becomes {k} times as large.",
        "How many {things} are on the train?",
    ),
    Story(
        ("books", "comics", "maps"),
        "A library shelf holds {n} {things}.",
        "A library has {k} shelves of {n} {things}.",
        ("It receives {n} new ones.", "Readers return {n}."),
        ("Readers borrow {n}.", "It sells {n} old ones."),
        "Later the stock grows to {k} times its size.",
        "How many {things} are there in the end?",
    ),
    Story(
        ("dollars", "coins"),
        "{name} saved {n} {things}.",
        "{name} saved {n} {things} a week for {k} weeks.",
        ("{She} earns {n} more.", "Grandma gives {her} {n}."),
        ("{She} spends {n}.", "{She} pays {n} for lunch."),
        "Then {she} wins a prize that makes it {k} times as much.",
        "How many {things} does {she} have left?",
    ),
    Story(
        ("rolls", "muffins", "cookies", "buns"),
        "A baker makes {n} {things}.",
        "A baker fills {k} trays with {n} {things} each.",
        ("Another {n} come out of the oven.", "A helper bakes {n}."),
        ("Customers buy {n}.", "The baker drops {n}."),
        "By noon there are {k} times as many.",
        "How many {things} are there?",
    ),
    Story(
        ("points",),
        "In a game {name} scores {n} {things}.",
        "In a game {name} scores {n} {things} in each of {k} rounds.",
        ("A bonus adds {n}.", "Next {she} gains {n}."),
        ("A mistake costs {n}.", "Then {she} loses {n}."),
        "A lucky card multiplies the score by {k}.",
        "What is the final score?",
    ),
    Story(
        ("sheep", "hens", "goats", "cows"),
        "A farmer keeps {n} {things}.",
        "A farmer has {k} barns with {n} {things} in each.",
        ("{n} more are born.", "The farmer buys {n}."),
        ("The farmer sells {n}.", "{n} run away."),
        "After some years the herd is {k} times as big.",
        "How many {things} does the farmer have?",
    ),
    Story(
        ("chairs", "tables", "lamps"),
        "There are {n} {things} in a hall.",
        "In a hall stand {k} rows of {n} {things}.",
        ("Workers bring in {n}.", "Then {n} are added."),
        ("Workers carry out {n}.", "Then {n} are removed."),
        "For a party the number is raised to {k} times that.",
        "How many {things} are in the hall now?",
    ),
    Story(
        ("pages",),
        "{name} wrote {n} {things} of a story.",
        "{name} wrote {n} {things} a day for {k} days.",
        ("{She} adds {n}.", "On Sunday {she} writes {n} more."),
        ("{She} throws {n} away.", "{She} cuts {n}."),
        "The final book is {k} times as long.",
        "How many {things} is it?",
    ),
    Story(
        ("litres of water", "gallons of water"),
        "A tank contains {n} {things}.",
        "{k} pumps each put {n} {things} into an empty tank.",
        ("Rain adds {n}.", "A hose fills in {n}."),
        ("{n} leak out.", "A gardener uses {n}."),
        "A flood brings it to {k} times that amount.",
        "How many {things} are in the tank?",
    ),
    Story(
        ("stamps", "marbles", "stickers", "cards"),
        "{name} owns {n} {things}.",
        "{name} owns {k} albums with {n} {things} each.",
        ("A friend gives {her} {n}.", "{She} finds {n} in a drawer."),
        ("{She} trades away {n}.", "{She} loses {n}."),
        "A year later {she} owns {k} times as many.",
        "What is the number of {things} in the end?",
    ),
    Story(
        ("metres", "steps", "miles"),
        "{name} walks {n} {things} along a road.",
        "{name} walks {n} {things} along a road, and does so {k} times.",
        ("{She} goes {n} further.", "Then {she} goes on for {n}."),
        ("{She} turns and walks back {n}.", "{She} goes back {n}."),
        "At last {she} is {k} times as far from the start.",
        "How many {things} from the start is {she}?",
    ),
    Story(
        ("boxes", "crates", "parcels"),
        "A truck carries {n} {things}.",
        "A truck makes {k} trips with {n} {things} each to an empty store.",
        ("Then {n} are loaded.", "Another {n} arrive."),
        ("Then {n} are delivered.", "Of these, {n} are sent back."),
        "A second delivery makes it {k} times as many.",
        "How many {things} is that?",
    ),
    Story(
        ("fish", "ducks", "frogs"),
        "{n} {things} live in a pond.",
        "In each of {k} ponds live {n} {things}; all move to one lake.",
        ("{n} more come.", "In spring {n} join them."),
        ("{n} go away.", "In autumn {n} leave."),
        "The next year there are {k} times as many.",
        "How many {things} live there then?",
    ),
)


@dataclass(frozen=True, slots=True)
class Sum:
    """``start``, then operations such as ``("+", 25)``; every partial result is a positive whole number."""

    start: int
    operations: tuple[tuple[str, int], ...]

    def partial_results(self) -> list[int]:
        results = [self.start]
        for sign, number in self.operations:
            last = results[-1]
            results.append(last + number if sign == "+" else last - number if sign == "-" else last * number)
        return results

    def worked(self) -> str:
        """``17 + 25 = 42. 42 - 9 = 33.``"""
        results = self.partial_results()
        lines = zip(results, self.operations, results[1:], strict=False)
        return " ".join(f"{before} {sign} {number} = {after}." for before, (sign, number), after in lines)

    def expression(self) -> str:
        """``(17 + 25) * 3``: the whole sum as one expression, computed from left to right."""
        text = str(self.start)
        for index, (sign, number) in enumerate(self.operations):
            grouped = f"({text})" if sign == "x" and index and self.operations[index - 1][0] != "x" else text
            text = f"{grouped} {'*' if sign == 'x' else sign} {number}"
        return text

    def split(self) -> Split:
        key = f"{self.start}" + "".join(f"{sign}{number}" for sign, number in self.operations)
        digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
        return "held_out" if int.from_bytes(digest, "big") % HELD_OUT_SHARE == 0 else "train"


def generate(config: ArithmeticConfig, count: int, seed: int, split: Split) -> list[Problem]:
    """``count`` different problems, the same for the same arguments; a longer list begins with the shorter one.

    No sum of one split occurs in the other, whatever the seeds. ``columns`` holds the worked ``solution``, the sum as one ``expression``
    and the number of ``steps``. Raises DataError where the settings do not allow for that many different problems.
    """
    rng = random.Random(_seed(seed, split))
    problems: list[Problem] = []
    seen: set[str] = set()
    idle = 0
    while len(problems) < count:
        arithmetic = _draw_sum(rng, config)
        question = _tell(arithmetic, rng) if arithmetic else ""
        if arithmetic is None or arithmetic.split() != split or question in seen:
            idle += 1
            if idle > ATTEMPTS_PER_PROBLEM:
                raise DataError(_used_up(config, count, len(problems), split))
            continue
        idle = 0
        seen.add(question)
        columns = {"solution": arithmetic.worked(), "expression": arithmetic.expression(), "steps": config.steps}
        answer = str(arithmetic.partial_results()[-1])
        problems.append(Problem(f"arithmetic:{split}:{len(problems)}", question, answer, columns))
    return problems


def _used_up(config: ArithmeticConfig, count: int, made: int, split: Split) -> str:
    return (
        f"{count} different {split} problems were asked for, but data.arithmetic.largest_number {config.largest_number} with "
        f"data.arithmetic.steps {config.steps} and operations {' '.join(config.operations)} gives only about {made}: raise "
        "largest_number or ask for fewer problems"
    )


def _seed(seed: int, split: Split) -> int:
    return int.from_bytes(hashlib.blake2b(f"arithmetic/{seed}/{split}".encode(), digest_size=16).digest(), "big")


def _below(rng: random.Random, count: int) -> int:
    # Of random.Random only random() is promised to give the same numbers in every Python version.
    return min(int(rng.random() * count), count - 1)


def _between(rng: random.Random, low: int, high: int) -> int:
    return low + _below(rng, high - low + 1)


def _choose(rng: random.Random, items: Sequence[T]) -> T:
    return items[_below(rng, len(items))]


def _draw_sum(rng: random.Random, config: ArithmeticConfig) -> Sum | None:
    """A start and its operations; None where the allowed operations cannot go on from what was drawn."""
    largest = config.largest_number
    start = value = _between(rng, 2, largest)
    operations: list[tuple[str, int]] = []
    for _ in range(config.steps):
        operation = _draw_operation(rng, value, config)
        if operation is None:
            return None
        sign, number = operation
        operations.append((sign, number))
        value = value + number if sign == "+" else value - number if sign == "-" else value * number
    return Sum(start, tuple(operations))


def _draw_operation(rng: random.Random, value: int, config: ArithmeticConfig) -> tuple[str, int] | None:
    """One operation that is possible on ``value``: at least 1 is left by -, and x does not run away (by default at most 4 x largest)."""
    largest, most = config.largest_number, (config.largest_factor - 1) * config.largest_number
    factors = range(2, min(config.largest_factor, largest, most // value) + 1)
    possible = {"+": True, "-": value >= 3, "x": bool(factors)}
    signs = [sign for sign, can in possible.items() if can and sign in config.operations]
    if not signs:
        return None
    sign = _choose(rng, signs)
    if sign == "x":
        return sign, _choose(rng, factors)
    return sign, _between(rng, 2, largest if sign == "+" else min(value - 1, largest))


def _tell(arithmetic: Sum, rng: random.Random) -> str:
    story = _choose(rng, STORIES)
    name, she = _choose(rng, NAMES)
    words = {
        "name": name,
        "She": she,
        "she": she.lower(),
        "her": "her" if she == "She" else "him",
        "things": _choose(rng, story.things),
    }
    operations = list(arithmetic.operations)
    if operations[0][0] == "x":
        sentences = [story.groups.format(n=arithmetic.start, k=operations.pop(0)[1], **words)]
    else:
        sentences = [story.opening.format(n=arithmetic.start, **words)]
    used: set[str] = set()
    for sign, number in operations:
        phrases = story.plus if sign == "+" else story.minus if sign == "-" else (story.times,)
        fresh = [p for p in phrases if p not in used] or list(phrases)
        phrase = _choose(rng, fresh)
        used.add(phrase)
        sentences.append(phrase.format(n=number, k=number, **words))
    return " ".join([*sentences, story.question.format(**words)])
