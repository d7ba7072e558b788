"""Rules about the problems: repeated, contradictory, or the same on both sides of the split."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from groupwise.data.answers import exact_match, numeric_equal
from groupwise.data.sources import ProblemSet
from groupwise.doctor.findings import Evidence, Example
from groupwise.tracking.reading import RunRecord
from groupwise.types import Problem

__all__ = ["contradictions", "duplicates", "leakage", "leakage_in_run"]

WORD = re.compile(r"\w+|[^\w\s.,;:!?'\"’“”()]")
"""Words, numbers and the signs of mathematics; without its sign 3 - 2 would be 3 + 2."""
SHINGLE = 8
"""Words in a row that are compared."""
OVERLAP = 0.8
"""Share of a held-out question's shingles that one training question must have for the two to count as the same. Their numbers
must be the same too: other numbers in the same story are another problem."""
SHORTEST = 12
"""Words; below this only the whole question is compared, since short questions of one kind share most of their words."""


def words_of(problem: Problem) -> tuple[str, ...]:
    """Words, numbers and signs in lower case: punctuation, spacing and capitals do not make a new question."""
    question = problem.question
    text = question if isinstance(question, str) else "\n".join(m["content"] for m in question if m["role"] != "system")
    return words_in(text)


def words_in(text: str) -> tuple[str, ...]:
    return tuple(WORD.findall(text.lower()))


def pair(first: Problem, second: Problem, remark: str) -> Example:
    return Example(f"{first.id} and {second.id}", f"{question(first)}\n---\n{question(second)}", remark)


def question(problem: Problem) -> str:
    return problem.question if isinstance(problem.question, str) else problem.question[-1]["content"]


def repeated(problems: Sequence[Problem]) -> Iterator[list[Problem]]:
    found: dict[tuple[str, ...], list[Problem]] = defaultdict(list)
    for problem in problems:
        found[words_of(problem)].append(problem)
    return (same for same in found.values() if len(same) > 1)


def duplicates(problems: ProblemSet) -> Evidence | None:
    """More than one in a hundred training problems stands there again."""
    same = list(repeated(problems.train))
    spare = sum(len(one) - 1 for one in same)
    if spare <= 0.01 * len(problems.train):
        return None
    return Evidence(
        f"{spare:,} of {len(problems.train):,} training problems repeat another one, word for word",
        numbers={"repeats": spare, "share": spare / len(problems.train)},
        examples=tuple(pair(one[0], one[1], f"{len(one)} times") for one in same[:3]),
    )


def contradictions(problems: ProblemSet) -> Evidence | None:
    """The same question with different reference answers."""
    found = []
    for same in repeated(problems.train):
        other = next((p for p in same[1:] if not agree(p, same[0])), None)
        if other is not None:
            found.append((same[0], other))
    if not found:
        return None
    return Evidence(
        f"{len(found):,} questions stand there with different reference answers: whichever the policy gives, one of them is "
        "scored as wrong",
        numbers={"questions": len(found)},
        examples=tuple(pair(a, b, f"answers {a.expected} and {b.expected}") for a, b in found[:3]),
    )


def agree(first: Problem, second: Problem) -> bool:
    """Whether some answer is right for both."""
    return any(exact_match(a, b) or numeric_equal(a, b) for a in first.accepted for b in second.accepted)


def leakage(problems: ProblemSet) -> Evidence | None:
    """Held-out questions that stand in the training problems in nearly the same words."""
    found = list(leaked(problems.train, problems.held_out))
    if not found:
        return None
    share = len(found) / len(problems.held_out)
    return Evidence(
        f"{len(found):,} of {len(problems.held_out):,} held-out questions ({share:.1%}) stand in the training problems in nearly the "
        "same words: what is measured there is memory",
        numbers={"leaked": len(found), "share": share},
        examples=tuple(pair(a, b, "held out and trained on") for a, b in found[:3]),
        severity="critical" if share > 0.05 else None,
    )


def leaked(train: Sequence[Problem], held_out: Sequence[Problem]) -> Iterator[tuple[Problem, Problem]]:
    """Pairs of a held-out problem and the training problem that gives it away."""
    whole = {words_of(problem): problem for problem in train}
    wanted = {shingle for problem in held_out for shingle in shingles(words_of(problem))}
    holders: dict[int, list[int]] = defaultdict(list)  # only shingles that a held-out question has are kept
    numbers = [numbers_in(words_of(problem)) for problem in train]
    for index, problem in enumerate(train):
        for shingle in set(shingles(words_of(problem))) & wanted:
            holders[shingle].append(index)
    for problem in held_out:
        words = words_of(problem)
        if words in whole:
            yield problem, whole[words]
            continue
        alike = most_shared(shingles(words), holders) if len(words) >= SHORTEST else []
        same = next((i for i in alike if numbers[i] == numbers_in(words)), None)
        if same is not None:
            yield problem, train[same]


def shingles(words: Sequence[str]) -> list[int]:
    return [hash(tuple(words[i : i + SHINGLE])) for i in range(len(words) - SHINGLE + 1)]


def numbers_in(words: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in words if word[0].isdigit())


def most_shared(own: Sequence[int], holders: Mapping[int, Sequence[int]]) -> list[int]:
    """The training problems that have at least ``OVERLAP`` of the shingles."""
    counts = Counter(index for shingle in set(own) for index in holders.get(shingle, ()))
    return [index for index, count in counts.items() if count >= OVERLAP * len(set(own))]


def leakage_in_run(run: RunRecord) -> Evidence | None:
    """Prompts that were trained on and judged by; of training only the recorded ones can be seen here."""
    trained = {words_in(prompt): prompt for prompt in distinct(r.prompt for r in run.completions) if prompt}
    judged = {r["prompt"]: r["problem"] for e in run.evaluations for r in e.records if r["prompt"]}
    both = [(problem, prompt) for prompt, problem in judged.items() if words_in(prompt) in trained]
    if not both:
        return None
    given_away = {trained[words_in(prompt)] for _, prompt in both}
    steps = [r.step for r in run.completions if r.prompt in given_away]
    return Evidence(
        f"{len(both)} of {len(judged)} held-out prompts were also trained on, among the {len(trained):,} training prompts recorded",
        (min(steps), max(steps)),
        {"leaked": len(both)},
        examples=tuple(Example(f"problem {problem}", prompt) for problem, prompt in both[:3]),
        severity="critical" if len(both) > 0.05 * len(judged) else None,
    )


def distinct(prompts: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys(prompts)
