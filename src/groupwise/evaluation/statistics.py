"""What samples of an evaluation say about a model: pass@k, majority@k, intervals, and p-values. Plain arithmetic, exact where it can be.

Suffixes name axes: P problem, S sample of that problem.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from groupwise.metrics import wilson_interval

__all__ = [
    "clustered_interval",
    "holm",
    "majority_at_k",
    "mcnemar_p_value",
    "paired_interval",
    "pass_at_k",
    "sign_flip_p_value",
]

Z = 1.959963984540054
"""Of a 95% interval of the normal distribution."""
MOST_SUBSETS = 2000
"""Up to so many subsets of samples are voted on one by one; beyond, so many are drawn."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Chance that at least one of k samples is right, estimated without bias from ``samples`` of which ``right`` were right.

    1 - C(n - c, k) / C(n, k); M. Chen et al. (2021), "Evaluating Large Language Models Trained on Code", eq. 1. The plain
    1 - (1 - c/n)^k is biased: it draws with replacement.
    """
    assert 1 <= k <= samples, f"pass@{k} cannot be estimated from {samples} samples"
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def majority_at_k(answers_S: Sequence[Hashable | None], right_S: Sequence[bool], k: int) -> float:
    """Chance that the commonest answer among k of the samples is right, over all ways to choose k of them.

    Answers that are equal vote together; ``None`` is a sample without an answer, and does not vote. Answers that share the lead win
    with equal chances. X. Wang et al. (2022), "Self-Consistency Improves Chain of Thought Reasoning". Where there are more than
    2,000 subsets, 2,000 are drawn, the same ones each time.
    """
    n = len(answers_S)
    assert 1 <= k <= n, f"majority@{k} cannot be estimated from {n} samples"
    subsets: Iterable[Sequence[int]]
    if math.comb(n, k) <= MOST_SUBSETS:
        subsets = combinations(range(n), k)
    else:
        draw = random.Random(0)
        subsets = [draw.sample(range(n), k) for _ in range(MOST_SUBSETS)]
    votes = [_majority(answers_S, right_S, subset) for subset in subsets]
    return math.fsum(votes) / len(votes)


def _majority(answers_S: Sequence[Hashable | None], right_S: Sequence[bool], subset: Sequence[int]) -> float:
    votes = Counter(answers_S[i] for i in subset if answers_S[i] is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    leaders = {answer for answer, count in votes.items() if count == most}
    right = {answers_S[i] for i in subset if right_S[i]}
    return len(leaders & right) / len(leaders)


def clustered_interval(scores_P: Sequence[float], samples: int = 1) -> tuple[float, float]:
    """95% interval of the mean of ``scores_P``, each a problem's own score from 0 to 1 (its share of right samples, its pass@k).

    Several samples of one problem are no independent evidence about other problems, so the problems are the unit: Wilson's
    interval with the effective number of trials p (1 - p) / (s^2 / P), s the standard deviation between problems. That number
    lies between P (samples of a problem agree) and P x ``samples`` (problems do not differ); with one sample each it is P, and the
    interval is Wilson's. L. Kish (1965), "Survey Sampling", for the effective size; E. Miller (2024), "Adding Error Bars to
    Evals", for problems as clusters.
    """
    problems = len(scores_P)
    if problems == 0:
        return (0.0, 1.0)
    mean = math.fsum(scores_P) / problems
    trials = float(problems)
    if samples > 1 and problems > 1 and 0 < mean < 1:
        variance = math.fsum((score - mean) ** 2 for score in scores_P) / (problems - 1)
        most = float(problems * samples)
        trials = min(most, max(trials, problems * mean * (1 - mean) / variance)) if variance > 0 else most
    low, high = wilson_interval(mean * trials, trials)
    return (0.0 if mean == 0 else low, 1.0 if mean == 1 else high)


def mcnemar_p_value(broken: int, fixed: int) -> float:
    """Two-sided exact McNemar test: the chance of a split at least this uneven if each change fell either way with 1/2.

    Q. McNemar (1947), "Note on the sampling error of the difference between correlated proportions or percentages".
    """
    changed = broken + fixed
    tail = sum(math.comb(changed, i) for i in range(min(broken, fixed) + 1))
    return min(1.0, 2 * tail / 2**changed)


def sign_flip_p_value(differences_P: Sequence[int]) -> float:
    """Two-sided exact paired permutation test: the chance of a total at least this far from 0 if, problem by problem, the two
    models' results were exchanged with 1/2.

    ``differences_P`` are counts of right samples, one model's minus the other's. All 2^P exchanges are counted, by adding up
    the distribution of the total one problem at a time. With differences of 1 and -1 this is the exact McNemar test.
    R. A. Fisher (1935), "The Design of Experiments", section 21.
    """
    moved = [abs(d) for d in differences_P if d]
    reach = sum(moved)
    chances: NDArray[np.float64] = np.zeros(2 * reach + 1)  # of the totals -reach .. reach
    chances[reach] = 1.0
    for size in moved:
        up, down = np.zeros_like(chances), np.zeros_like(chances)
        up[size:], down[:-size] = chances[:-size], chances[size:]
        chances = (up + down) / 2
    total = abs(sum(differences_P))
    return min(1.0, float(chances[reach + total :].sum() * (2 if total else 1) + (chances[:reach].sum() if not total else 0.0)))


def paired_interval(differences_P: Sequence[float]) -> tuple[float, float]:
    """95% interval of the mean of ``differences_P``, each a problem's own difference between two models, from -1 to 1.

    The normal interval after two problems are added, of differences 1 and -1: with single samples this is the interval of D. G.
    Bonett and R. M. Price (2012), "Adjusted Wald confidence interval for a difference of binomial proportions based on paired
    data". Without them, twelve problems on which two models agree would prove that they always do.
    """
    problems = len(differences_P) + 2
    mean = math.fsum(differences_P) / problems
    variance = (math.fsum(d * d for d in differences_P) + 2) / problems - mean * mean
    half = Z * math.sqrt(variance / problems)
    return max(-1.0, mean - half), min(1.0, mean + half)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values adjusted for being several, so that the chance of any false finding stays at the level: S. Holm (1979)."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = highest
    return adjusted
