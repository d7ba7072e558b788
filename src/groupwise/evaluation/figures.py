"""From records to figures: shares with intervals, pass@k and majority@k, and comparisons of two evaluations with p-values.

Plain arithmetic, exact where it can be. Suffixes name axes: P problem, S sample of that problem.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from groupwise.errors import DataError
from groupwise.evaluation.records import vote
from groupwise.metrics import Z, wilson_interval
from groupwise.types import FAILURES

__all__ = [
    "by_problem",
    "clustered_interval",
    "crosstab",
    "figures",
    "first_samples",
    "headline_verdict",
    "holm",
    "majority_at_k",
    "mcnemar_p_value",
    "of_episodes",
    "paired_comparison",
    "paired_interval",
    "pass_at_k",
    "share",
    "shares_by_problem",
    "sign_flip_p_value",
    "turns_interval",
]

Record = Mapping[str, Any]
VERDICTS = ("strict", "lenient", "latex", "field_strict", "field_flexible", "success")


def by_problem(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Samples of each problem, in the order in which problems first appear."""
    grouped: dict[str, list[Record]] = {}
    for record in records:
        grouped.setdefault(record["problem"], []).append(record)
    return grouped


def shares_by_problem(records: Sequence[Record], key: str) -> list[float]:
    """Share of each problem's samples in which ``key`` is true, of those where that is known."""
    known = [record for record in records if record[key] is not None]
    return [sum(bool(r[key]) for r in samples) / len(samples) for samples in by_problem(known).values()]


def share(records: Sequence[Record], key: str) -> tuple[float, float, float]:
    """Mean over problems of the share of samples in which ``key`` is true, with the ends of its 95% interval."""
    scores = shares_by_problem(records, key)
    return estimate(scores, round(len(records) / max(1, len(scores))))


def figures(records: Sequence[Record]) -> dict[str, Any]:
    """What the records come to: for each verdict they hold ``[mean, low, high]`` (with several samples this is mean@n), further
    ``pass_at`` and ``majority_at`` by k where there are several samples of every problem, and what was written.

    pass@k and majority@k go by the strict verdict. Records without one (``None``: math-verify gave no verdict) are left out of all
    figures and counted as ``unchecked``, which is absent where there are none. A problem with fewer than k others has no part in pass@k
    and majority@k.

    Raises DataError where no record is left.
    """
    samples = min((len(group) for group in by_problem(records).values()), default=0)
    unchecked = sum(record["strict"] is None for record in records)
    records = [record for record in records if record["strict"] is not None]
    if not records:
        raise DataError(f"math-verify gave no verdict on any of {unchecked} completions: check that it is installed and starts")
    grouped = by_problem(records)
    result: dict[str, Any] = {
        "n": len(grouped),
        "samples": samples,
        "format_rate": math.fsum(r["format"] for r in records) / len(records),
        "stop_rate": math.fsum(r["finish_reason"] == "stop" for r in records) / len(records),
        "mean_tokens": math.fsum(r["tokens"] for r in records) / len(records),
    }
    if unchecked:
        result["unchecked"] = unchecked
    for key in VERDICTS:
        if all(key in record for record in records) and any(record[key] is not None for record in records):
            result[key] = list(share(records, key))
    if all("turns" in record for record in records):
        result["episodes"] = of_episodes(records)
        if turns := turns_interval(records):
            result["turns_interval"] = list(turns)
    if samples > 1:
        result["pass_at"] = at_each_k(grouped, samples, passed)
        result["majority_at"] = at_each_k(grouped, samples, voted)
    return result


def of_episodes(records: Sequence[Record]) -> dict[str, float]:
    """What went on between turns, and what it cost: means per completion, and of calls the shares that went wrong.

    ``turns`` of the policy; ``calls``; ``invalid_calls`` that could not be made and ``failed_calls`` in which the tool did wrong, as
    shares of the calls (absent without any); ``sampled_tokens`` and ``given_tokens``, which add up to a completion's length;
    ``reward`` of the environment, and ``environment_failed``, the share of episodes in which it failed, where there is an environment.
    """
    calls = [call for record in records for call in _own_calls(record)]
    tokens = [(turn["tokens"], turn["role"] == "assistant") for record in records for turn in record["turns"]]
    result = {
        "turns": sum(own for _, own in tokens) / len(records),
        "calls": len(calls) / len(records),
        "sampled_tokens": sum(count for count, own in tokens if own) / len(records),
        "given_tokens": sum(count for count, own in tokens if not own) / len(records),
    }
    if calls:
        result["invalid_calls"] = sum(call["failure"] == "invalid" for call in calls) / len(calls)
        result["failed_calls"] = sum(call["failure"] in ("raised", "timed_out") for call in calls) / len(calls)
    if rewarded := [record["reward"] for record in records if "reward" in record]:
        known = [reward for reward in rewarded if reward is not None]
        # Where a record without a reward has no such key, the episode is sound: its environment gives none.
        result["environment_failed"] = (len(rewarded) - len(known)) / len(records)
        if known:
            result["reward"] = math.fsum(known) / len(known)
    return result


def _own_calls(record: Record) -> list[Mapping[str, Any]]:
    """Those that the policy made: the last one of an episode whose environment failed says how it did."""
    calls = [call for turn in record["turns"] for call in turn["calls"]]
    return calls[:-1] if record["finish_reason"] in FAILURES else calls


def turns_interval(records: Sequence[Record]) -> tuple[float, float] | None:
    """The ends of the 95% interval of the mean turns of an episode: normal, with problems as the unit. None for fewer than two problems."""
    counts = [
        [sum(turn["role"] == "assistant" for turn in r["turns"]) for r in samples] for samples in by_problem(records).values()
    ]
    if len(counts) < 2:
        return None
    means_P = [sum(samples) / len(samples) for samples in counts]
    middle, half = statistics.fmean(means_P), Z * statistics.stdev(means_P) / math.sqrt(len(means_P))
    return middle - half, middle + half


def estimate(scores_P: Sequence[float], samples: int) -> tuple[float, float, float]:
    return (math.fsum(scores_P) / len(scores_P), *clustered_interval(scores_P, samples))


def at_each_k(
    grouped: Mapping[str, Sequence[Record]], samples: int, score: Callable[[Sequence[Record], int], float]
) -> dict[str, list[float]]:
    """``score(samples of a problem, k)`` averaged over problems of at least k samples, for k = 1, 2, 4 ... and ``samples``."""
    scores = {k: [score(group, k) for group in grouped.values() if len(group) >= k] for k in each_k(samples)}
    return {str(k): list(estimate(scores_P, samples)) for k, scores_P in scores.items() if scores_P}


def each_k(samples: int) -> list[int]:
    powers = [2**i for i in range(samples.bit_length()) if 2**i < samples]
    return [*powers, samples]


def passed(samples_of_one: Sequence[Record], k: int) -> float:
    return pass_at_k(len(samples_of_one), sum(bool(r["strict"]) for r in samples_of_one), k)


def voted(samples_of_one: Sequence[Record], k: int) -> float:
    return majority_at_k([vote(r) for r in samples_of_one], [bool(r["strict"]) for r in samples_of_one], k)


def paired_comparison(
    before_records: Sequence[Record], after_records: Sequence[Record], *, key: str = "strict"
) -> dict[str, Any]:
    """What became of each problem between two evaluations of the same problems, with an exact p-value.

    With one sample of each problem: how many were fixed, broken, stayed right and stayed wrong, and the exact McNemar test. With
    several: how many problems got better and worse, and the exact paired permutation test, which exchanges the two models' results
    problem by problem. ``difference`` is after minus before, as a share, with a 95% interval in which problems are the unit.

    Problems with a completion that could not be checked (a verdict of ``None``) are left out.

    A paired test sees more than two overlapping intervals do: problems that stayed right or wrong cancel out.

    Raises:
        DataError: the two do not judge the same problems in the same order, or sampled them a different number of times.
    """
    before, after = by_problem(before_records), by_problem(after_records)
    check_pairs(before, after)
    names = [name for name in before if all(record[key] is not None for record in (*before[name], *after[name]))]
    if not names:
        raise DataError(
            f"no problem that two evaluations share has a verdict ({key}) in both: check that math-verify is installed and starts, or that "
            "the environment answers"
        )
    rights = [(count_right(before[name], key), count_right(after[name], key)) for name in names]
    samples = len(next(iter(before.values())))
    differences = [b - a for a, b in rights]
    common: dict[str, Any] = {
        "n": len(rights),
        "samples": samples,
        "difference": math.fsum(differences) / samples / len(rights),
        "difference_interval": list(paired_interval([d / samples for d in differences])),
    }
    if samples > 1:
        better, worse = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
        p_value = sign_flip_p_value(differences)
        return {**common, "better": better, "worse": worse, "p_value": p_value, "test": "exact paired permutation test"}
    return {**common, **crosstab(rights), "test": "exact McNemar test"}


def crosstab(pairs: Sequence[tuple[int, int]]) -> dict[str, Any]:
    """How many problems were fixed, broken, right twice and wrong twice, of verdicts (before, after), and McNemar's exact p-value."""
    fixed, broken = pairs.count((0, 1)), pairs.count((1, 0))
    return {
        "fixed": fixed,
        "broken": broken,
        "both_right": pairs.count((1, 1)),
        "both_wrong": pairs.count((0, 0)),
        "p_value": mcnemar_p_value(broken, fixed),
    }


def headline_verdict(*evaluations: Sequence[Record]) -> str:
    """By which verdict evaluations are compared: ``success`` where an environment judged all episodes, and of some problem in all
    evaluations the verdict is known; else ``strict``."""
    if not all(records and all("success" in one for one in records) for records in evaluations):
        return "strict"
    known = (
        {problem for problem, samples in by_problem(records).items() if all(one["success"] is not None for one in samples)}
        for records in evaluations
    )
    return "success" if set.intersection(*known) else "strict"


def first_samples(before: Sequence[Record], after: Sequence[Record], key: str = "strict") -> list[tuple[bool, bool]]:
    """Verdicts (before, after) of each problem that both judge, by the first sample of each: further samples of a problem
    are no pairs of their own. Without problems of which either verdict is unknown (``None``), and those of another reference answer,
    which are of other data."""
    first, then = ({record["problem"]: record for record in reversed(records)} for records in (before, after))
    pairs = [(first[name], then[name]) for name in dict.fromkeys(r["problem"] for r in after) if name in first]
    same = [(was[key], now[key]) for was, now in pairs if was.get("expected") == now.get("expected")]
    return [(bool(was), bool(now)) for was, now in same if was is not None and now is not None]


def count_right(samples_of_one: Sequence[Record], key: str) -> int:
    return sum(bool(record[key]) for record in samples_of_one)


def check_pairs(before: Mapping[str, Sequence[Record]], after: Mapping[str, Sequence[Record]]) -> None:
    if not before or list(before) != list(after):
        raise DataError(
            f"two evaluations of {len(before)} and {len(after)} problems do not judge the same ones in the same order, which a "
            "comparison pair by pair needs: evaluate both with the same data settings"
        )
    counts = {len(samples) for samples in (*before.values(), *after.values())}
    if len(counts) > 1:
        raise DataError(
            f"two evaluations have {' and '.join(str(c) for c in sorted(counts))} samples of a problem, and a comparison pair by "
            "pair needs as many of each: evaluate both with the same evaluation.samples"
        )
    for name in before:
        if before[name][0].get("expected") != after[name][0].get("expected"):
            raise DataError(f"problem {name} has two different reference answers: the two evaluations are of different data")


MOST_SUBSETS = 2000
"""Most subsets of samples that are voted on one by one; beyond, this many are drawn."""


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
