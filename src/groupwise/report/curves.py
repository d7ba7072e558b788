"""Numbers over steps, thinned to what a screen can show."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from groupwise.tracking.reading import CompletionRecord, RunRecord

__all__ = ["MOST_BANDS", "MOST_POINTS", "QUANTILES", "bands", "curves", "taken", "thin"]

MOST_POINTS = 600
"""Points of a curve; above, neighbours are averaged, and their smallest and largest values are kept as well."""
MOST_BANDS = 120
"""Places along the steps at which a distribution is shown."""
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)


def curves(run: RunRecord) -> dict[str, dict[str, list[float]]]:
    """Every metric that was ever logged with a finite value: name -> thinned curve."""
    thinned = {name: thin(run.series(name)) for name in run.metric_names()}
    return {name: curve for name, curve in thinned.items() if curve["steps"]}


def taken(run: RunRecord, most: int = MOST_POINTS) -> dict[str, list[float] | None]:
    """What the run had taken by the end of each of ``steps``, which begin with 0: ``time`` in seconds, and ``tokens``, the completion
    tokens of the batches (mean length times completions of a step). Of long runs every so many steps; None where it was not logged.

    In versions before 0.2 a resumed run counted its seconds from 0 again; they are added to those before.
    """
    rows = [row for row in run.steps if row["step"] is not None]
    batch = run.config.completions_per_step if run.config else 0
    time, tokens, before = [0.0], [0.0], 0.0
    for row in rows:
        now = row.get("time_s") or before
        time.append(time[-1] + (now - before if now >= before else now))
        before = now
        tokens.append(tokens[-1] + (row.get("completions/tokens_mean") or 0.0) * batch)
    kept = sorted({*range(0, len(time), -(-len(time) // most)), len(time) - 1})
    steps = [0.0, *(float(row["step"] or 0) for row in rows)]
    return {
        "steps": [steps[i] for i in kept],
        "time": [short(time[i]) for i in kept] if time[-1] else None,
        "tokens": [short(tokens[i]) for i in kept] if tokens[-1] else None,
    }


def thin(points: Sequence[tuple[int, float]], most: int = MOST_POINTS) -> dict[str, list[float]]:
    """``steps`` and ``values``; of more than ``most`` points the means of buckets, with ``low`` and ``high`` of each.

    >>> thin([(1, 0.0), (2, 1.0), (3, 5.0), (4, 7.0)], most=2)
    {'steps': [2, 4], 'values': [0.5, 6.0], 'low': [0.0, 5.0], 'high': [1.0, 7.0]}
    """
    if len(points) <= most:
        return {"steps": [step for step, _ in points], "values": [short(value) for _, value in points]}
    made: dict[str, list[float]] = {"steps": [], "values": [], "low": [], "high": []}
    for i in range(most):
        bucket = points[i * len(points) // most : (i + 1) * len(points) // most]
        values = [value for _, value in bucket]
        made["steps"].append(bucket[-1][0])
        made["values"].append(short(math.fsum(value / len(values) for value in values)))
        made["low"].append(short(min(values)))
        made["high"].append(short(max(values)))
    return made


def short(value: float) -> float:
    """Six significant digits: what a curve can show, in half the space."""
    return float(f"{value:.6g}")


def bands(run: RunRecord) -> dict[str, dict[str, Any]]:
    """Quantiles of length, advantage and reward over the recorded completions: name -> ``steps`` and one row per quantile."""
    kinds: dict[str, Callable[[CompletionRecord], float | None]] = {
        "tokens": lambda record: record.tokens,
        "advantage": lambda record: record.advantage,
        "reward": lambda record: record.reward,
    }
    by_bucket = buckets(run.completions)
    return {name: band(by_bucket, value) for name, value in kinds.items() if by_bucket}


def buckets(completions: Sequence[CompletionRecord]) -> list[list[CompletionRecord]]:
    """Completions of neighbouring steps together, in at most ``MOST_BANDS`` portions of equally many steps."""
    steps = sorted({record.step for record in completions})
    place = {step: i * min(MOST_BANDS, len(steps)) // len(steps) for i, step in enumerate(steps)}
    by_place: dict[int, list[CompletionRecord]] = defaultdict(list)
    for record in completions:
        by_place[place[record.step]].append(record)
    return [by_place[i] for i in sorted(by_place)]


def band(by_bucket: Sequence[Sequence[CompletionRecord]], value: Callable[[CompletionRecord], float | None]) -> dict[str, Any]:
    steps: list[int] = []
    rows: list[list[float]] = [[] for _ in QUANTILES]
    for bucket in by_bucket:
        known = sorted(v for v in map(value, bucket) if v is not None)
        if not known:
            continue
        steps.append(bucket[-1].step)
        for row, share in zip(rows, QUANTILES, strict=True):
            row.append(short(quantile(known, share)))
    return {"steps": steps, "quantiles": rows}


def quantile(ordered: Sequence[float], share: float) -> float:
    """The quantile at ``share``, linear between neighbours."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    part = place - below
    return ordered[below] * (1 - part) + ordered[above] * part
