"""From records to figures: every share with its interval, counted problem by problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from groupwise.errors import DataError
from groupwise.evaluation.records import vote
from groupwise.evaluation.statistics import clustered_interval, majority_at_k, pass_at_k

__all__ = ["by_problem", "figures", "share", "shares_by_problem"]

Record = Mapping[str, Any]
VERDICTS = ("strict", "lenient", "latex", "field_strict", "field_flexible")


def by_problem(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Samples of each problem, in the order in which problems first appear."""
    grouped: dict[str, list[Record]] = {}
    for record in records:
        grouped.setdefault(record["problem"], []).append(record)
    return grouped


def shares_by_problem(records: Sequence[Record], key: str) -> list[float]:
    """For each problem the share of its samples in which ``key`` is true, of those where that is known."""
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
    figures and counted as ``unchecked``, which is absent where there are none.

    Raises DataError where no record is left.
    """
    unchecked = sum(record["strict"] is None for record in records)
    records = [record for record in records if record["strict"] is not None]
    if not records:
        raise DataError(f"math-verify gave no verdict on any of {unchecked} completions: check that it is installed and starts")
    grouped = by_problem(records)
    samples = min(len(group) for group in grouped.values())
    found: dict[str, Any] = {
        "n": len(grouped),
        "samples": samples,
        "format_rate": math.fsum(r["format"] for r in records) / len(records),
        "stop_rate": math.fsum(r["finish_reason"] == "stop" for r in records) / len(records),
        "mean_tokens": math.fsum(r["tokens"] for r in records) / len(records),
    }
    if unchecked:
        found["unchecked"] = unchecked
    for key in VERDICTS:
        if all(key in record for record in records):
            found[key] = list(share(records, key))
    if samples > 1:
        found["pass_at"] = at_each_k(grouped, samples, passed)
        found["majority_at"] = at_each_k(grouped, samples, voted)
    return found


def estimate(scores_P: Sequence[float], samples: int) -> tuple[float, float, float]:
    return (math.fsum(scores_P) / len(scores_P), *clustered_interval(scores_P, samples))


def at_each_k(
    grouped: Mapping[str, Sequence[Record]], samples: int, score: Callable[[Sequence[Record], int], float]
) -> dict[str, list[float]]:
    """``score(samples of a problem, k)`` averaged over problems, for k = 1, 2, 4 ... and the number of samples."""
    return {str(k): list(estimate([score(group, k) for group in grouped.values()], samples)) for k in each_k(samples)}


def each_k(samples: int) -> list[int]:
    powers = [2**i for i in range(samples.bit_length()) if 2**i < samples]
    return [*powers, samples]


def passed(samples_of_one: Sequence[Record], k: int) -> float:
    return pass_at_k(len(samples_of_one), sum(bool(r["strict"]) for r in samples_of_one), k)


def voted(samples_of_one: Sequence[Record], k: int) -> float:
    return majority_at_k([vote(r) for r in samples_of_one], [bool(r["strict"]) for r in samples_of_one], k)
