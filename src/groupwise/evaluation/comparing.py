"""Two evaluations of the same problems, laid side by side problem by problem."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from groupwise.errors import DataError
from groupwise.evaluation.figures import by_problem
from groupwise.evaluation.statistics import mcnemar_p_value, paired_interval, sign_flip_p_value

__all__ = ["crosstab", "first_samples", "paired_comparison"]

Record = Mapping[str, Any]


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
            "math-verify gave no verdict on any problem that two evaluations share: check that it is installed and starts"
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


def first_samples(before: Sequence[Record], after: Sequence[Record], key: str = "strict") -> list[tuple[bool, bool]]:
    """For each problem that both judge, its verdict before and after, by the first sample of each: further samples of a problem
    are no pairs of their own."""
    first, then = ({record["problem"]: bool(record[key]) for record in reversed(records)} for records in (before, after))
    return [(first[problem], then[problem]) for problem in dict.fromkeys(r["problem"] for r in after) if problem in first]


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
