"""Rules about settings and problems: what can be said before anything else is loaded."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from groupwise.config import Config
from groupwise.config.combinations import unsaved_work
from groupwise.data.answers import exact_match, numeric_equal
from groupwise.data.named import is_prepared
from groupwise.data.sources import ProblemSet
from groupwise.doctor.findings import Evidence, Example
from groupwise.tracking.reading import RunRecord
from groupwise.types import Problem

__all__ = [
    "cannot_see_hacking",
    "contradictions",
    "duplicates",
    "evaluation_cut_shorter",
    "hardly_any_chance",
    "leakage",
    "leakage_in_run",
    "no_checkpoints",
    "rate_too_high",
    "rate_too_low",
    "truncated_distribution",
]

TYPICAL_WEIGHT = 0.02
"""The usual size of a weight in the models that are trained here; AdamW moves it by about the learning rate in one update."""
BF16_BITS = 8
"""Significant bits of a bfloat16: neighbours are 2^-7 to 2^-8 of the value apart."""


def rate_too_low(config: Config) -> Evidence | None:
    """An update below half the distance to the next bfloat16 is rounded away, every time. An adapter's weights are float32."""
    rate, smallest = config.optimizer.learning_rate, TYPICAL_WEIGHT * 2.0**-BF16_BITS / 2
    in_bf16 = config.model.dtype in ("bfloat16", "auto") and config.model.lora is None
    if not in_bf16 or config.optimizer.precision != "pure" or rate >= smallest:
        return None
    moving = rate * 2.0 ** (BF16_BITS + 1)
    return Evidence(
        f"optimizer.learning_rate is {rate:g} with optimizer.precision pure: a bfloat16 weight of {TYPICAL_WEIGHT} only moves "
        f"when a single update is larger than about {smallest:.0e}; of the policy's weights only those below about {moving:.0e} move",
        numbers={"learning_rate": rate, "smallest": smallest, "moving": moving},
    )


def rate_too_high(config: Config) -> Evidence | None:
    """A rate as large as a weight replaces the model in one update: nobody means that."""
    rates = {"optimizer.learning_rate": config.optimizer.learning_rate}
    if config.warm_start.steps:
        rates["warm_start.learning_rate"] = config.warm_start.learning_rate
    for name, rate in rates.items():
        if rate >= TYPICAL_WEIGHT:
            return Evidence(
                f"{name} is {rate:g}: an update moves each weight by about as much, and weights are of the size of {TYPICAL_WEIGHT}",
                numbers={"learning_rate": rate},
                severity="critical",
            )
    rate = config.optimizer.learning_rate
    if rate <= 1e-4 or config.model.lora:
        return None
    return Evidence(
        f"optimizer.learning_rate is {rate:g}, and all weights are trained: runs of this kind use 1e-6 to 5e-5",
        numbers={"learning_rate": rate},
    )


def cannot_see_hacking(config: Config) -> Evidence | None:
    data, evaluation = config.data, config.evaluation
    none_held_out = data.holdout == 0 and data.holds_out and not is_prepared(data.source)
    if none_held_out:
        return Evidence("no problems are held out: whether a rising reward means anything cannot be told")
    if evaluation.every == 0 and config.training.steps > 300:
        return Evidence(
            f"evaluation.every is 0 in a run of {config.training.steps} steps: a reward that is being gamed shows at the end only",
            numbers={"steps": config.training.steps},
        )
    return None


def evaluation_cut_shorter(config: Config) -> Evidence | None:
    limit, trained = config.evaluation.max_completion_tokens, config.rollout.max_completion_tokens
    if limit is None or limit >= trained:
        return None
    return Evidence(
        f"evaluation.max_completion_tokens is {limit}, but the policy is trained with {trained}: what it learns to write is cut "
        "when it is judged",
        numbers={"evaluation": limit, "rollout": trained},
    )


def no_checkpoints(config: Config) -> Evidence | None:
    unsaved = unsaved_work(config)
    return Evidence(unsaved, numbers={"steps": config.training.steps}) if unsaved else None


def hardly_any_chance(config: Config) -> Evidence | None:
    """Sampling too cold for a group to differ."""
    temperature = config.rollout.temperature
    if config.rollout.top_k == 1:
        return Evidence(
            "rollout.top_k is 1, always the likeliest token: the completions of a group are all the same, and teach nothing",
            numbers={"top_k": 1},
            severity="critical",
        )
    if temperature >= 0.4:
        return None
    return Evidence(
        f"rollout.temperature is {temperature:g}: completions of a group will nearly all be the same, and teach nothing",
        numbers={"temperature": temperature},
    )


def truncated_distribution(config: Config) -> Evidence | None:
    rollout = config.rollout
    cut = [f"rollout.top_p is {rollout.top_p:g}"] if rollout.top_p < 1 else []
    cut += [f"rollout.top_k is {rollout.top_k}"] if rollout.top_k else []
    if not cut:
        return None
    return Evidence(
        f"{' and '.join(cut)}: completions come from a narrower distribution than the one whose log-probabilities are trained"
    )


WORD = re.compile(r"(?<![\w'])[a-z]'+(?!\w)|\d+(?:\.\d+)+|(?<![\w.])\.\d+|\w+|[^\w\s.,;:?'\"“”()]")
"""Words, numbers and the signs of mathematics. Without its sign 3 - 2 would be 3 + 2, without its point 1.2, 3 would be 1, 2.3, and without
its prime f'(2) would be f(2)."""
PAIR, ONE_WORD = re.compile(r"(?<!\\)\(([^()]*)(?<!\\)\)"), re.compile(r"\s*[\w.]*\s*")
LETTERS, OPERATOR = re.compile(r"[^\W\d_]{2}"), re.compile(r"[+*^=<>\\]")
EXCLAMATION = re.compile(r"(?<![\d)\]}!])(?<!\b[a-z])!+(?![!=])")
"""Marks that end a sentence; behind a number, a bracket or a single letter they are factorials."""
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
    text, pairs = EXCLAMATION.sub(" ", text.lower().replace("’", "'")), 1
    while pairs:  # the innermost first
        text, pairs = PAIR.subn(without_or_marked, text)
    return tuple(WORD.findall(text))


def without_or_marked(pair: re.Match[str]) -> str:
    """What stands in a pair of brackets, between ⟨ and ⟩ where they say what is computed first: not around prose or a single word."""
    inner = pair[1]
    punctuation = ONE_WORD.fullmatch(inner) or (LETTERS.search(inner) and not OPERATOR.search(inner))
    return f" {inner} " if punctuation else f"⟨{inner}⟩"


def pair(first: Problem, second: Problem, remark: str) -> Example:
    return Example(f"{first.id} and {second.id}", f"{question(first)}\n---\n{question(second)}", remark)


def question(problem: Problem) -> str:
    return problem.question if isinstance(problem.question, str) else problem.question[-1]["content"]


def repeated(problems: Sequence[Problem]) -> Iterator[list[Problem]]:
    by_words: dict[tuple[str, ...], list[Problem]] = defaultdict(list)
    for problem in problems:
        by_words[words_of(problem)].append(problem)
    return (same for same in by_words.values() if len(same) > 1)


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
    pairs = []
    for same in repeated(problems.train):
        other = next((p for p in same[1:] if not agree(p, same[0])), None)
        if other is not None:
            pairs.append((same[0], other))
    if not pairs:
        return None
    return Evidence(
        f"{len(pairs):,} questions stand there with different reference answers: whichever the policy gives, one of them is "
        "scored as wrong",
        numbers={"questions": len(pairs)},
        examples=tuple(pair(a, b, f"answers {a.expected} and {b.expected}") for a, b in pairs[:3]),
    )


def agree(first: Problem, second: Problem) -> bool:
    """Whether some answer is right for both."""
    return any(exact_match(a, b) or numeric_equal(a, b) for a in first.accepted for b in second.accepted)


def leakage(problems: ProblemSet) -> Evidence | None:
    """Held-out questions that stand in the training problems in nearly the same words."""
    pairs = list(leaked(problems.train, problems.held_out))
    if not pairs:
        return None
    share = len(pairs) / len(problems.held_out)
    return Evidence(
        f"{len(pairs):,} of {len(problems.held_out):,} held-out questions ({share:.1%}) stand in the training problems in nearly the "
        "same words: what is measured there is memory",
        numbers={"leaked": len(pairs), "share": share},
        examples=tuple(pair(a, b, "held out and trained on") for a, b in pairs[:3]),
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
    """With primes, factorials and brackets, by which the same numbers come to something else."""
    return tuple(word for word in words if word[0].isdigit() or word[0] in ".⟨⟩!" or word[-1] == "'")


def most_shared(own: Sequence[int], holders: Mapping[int, Sequence[int]]) -> list[int]:
    """The training problems that have at least ``OVERLAP`` of the shingles."""
    counts = Counter(index for shingle in set(own) for index in holders.get(shingle, ()))
    return [index for index, count in counts.items() if count >= OVERLAP * len(set(own))]


def leakage_in_run(run: RunRecord) -> Evidence | None:
    """Prompts that were trained on and judged by; of training only the recorded ones can be seen here."""
    trained = {words_in(prompt): prompt for prompt in dict.fromkeys(r.prompt for r in run.completions) if prompt}
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
