"""Retired words stand in no text that a user reads, or that a reader of the code does: the field's plain words do."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RETIRED = {
    r"ails?|ailing": "diagnose, fault",
    r"mend(s|ed|ing)?": "fix",
    r"senseless": "nonsense",
    r"gone": "elapsed, missing, ended, down",
    r"dear(er|est)?": "expensive, longest",
    r"carr(y|ies|ied|ying)( it| them)? on": "resume, continue",
    r"(?<!at )least(?! common| squares)|greatest(?! common)": "minimum, maximum, smallest, largest",
    r"the allocator's holes": "fragmentation",
    r"once over": "one epoch of",
    r"anew|afresh": "again",
    r"spread": "broadcast, scatter, divide, standard deviation",
    r"heard": "known, received",
    r"sweeps?": "micro-step, pass",
}
"""Regular expression of a retired word: the word to use instead."""
PATTERN = re.compile(r"\b(?:" + "|".join(RETIRED) + r")\b", re.IGNORECASE)


def texts() -> Iterator[tuple[str, str]]:
    """(where, text) of all that is read: pages, notebooks, recipes, the report's assets, and the strings of the package."""
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    pages += [*(ROOT / "examples").rglob("*.ipynb"), *(ROOT / "examples").rglob("*.yaml")]
    pages += [p for p in (ROOT / "src").rglob("*") if p.suffix in (".yaml", ".js", ".html", ".css")]
    pages += [*(ROOT / "benchmarks").glob("*.md"), *(ROOT / "experiments").glob("*.md")]
    for page in pages:
        if page.exists():
            for number, line in enumerate(page.read_text().splitlines(), 1):
                yield f"{page.relative_to(ROOT)}:{number}", line
    for module in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield f"{module.relative_to(ROOT)}:{node.lineno}", " ".join(node.value.split())


def retired(text: str) -> list[str]:
    return [found.group() for found in PATTERN.finditer(text)]


def allowed(where: str, words: list[str]) -> bool:
    """Words that stand in others' answers, and the sweeps over settings that are measured: the field's own word for those."""
    return where.split(":")[0] in WORD_LISTS or (where.startswith(("benchmarks/", "experiments/")) and set(words) == {"sweep"})


def test_no_text_uses_a_retired_word():
    found = [f"{where}: {words}" for where, text in texts() if (words := retired(text)) and not allowed(where, words)]
    assert not found, "\n".join([*found, f"use instead: {RETIRED}"])


WORD_LISTS = {"src/groupwise/data/quantities.py"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Carry on with it, mend the dearest.", ["Carry on", "mend", "dearest"]),
        ("at least one, the least common multiple, amended, begone", []),
        ("0:12 gone; once over 7,473 problems", ["gone", "once over"]),
        ("from least to greatest", ["least", "greatest"]),
        ("Sampled afresh in every sweep; the spread is heard of, widespread", ["afresh", "sweep", "spread", "heard"]),
    ],
)
def test_whole_words_are_found(text, words):
    assert retired(text) == words
