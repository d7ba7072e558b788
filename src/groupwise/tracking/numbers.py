"""Turning metrics into the few short words that a person follows during a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

__all__ = [
    "averaged",
    "clock",
    "evaluation_numbers",
    "evaluation_step",
    "fields",
    "headline",
    "interval",
    "number",
    "percent",
    "sections",
    "sparkline",
]

Metrics = Mapping[str, float]


def percent(share: float) -> str:
    return f"{100 * share:.1f}%" if math.isfinite(share) else "-"


def interval(share: float, bounds: Sequence[float]) -> str:
    """``51.5% [44.6, 58.4]``: a share with its 95% interval, both in percent."""
    return f"{percent(share)} [{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]"


def number(value: float) -> str:
    """Three or four significant digits, thousands separated; whole numbers stay whole."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    if abs(value) >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def clock(seconds: float) -> str:
    """``0:07``, ``12:05``, ``1:02:03``."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def averaged(values: Sequence[float], count: int) -> list[float]:
    """Means of neighbouring values, at most ``count`` of them; those that are not finite left out.

    >>> averaged([1.0, 3.0, 5.0, 7.0], 2)
    [2.0, 6.0]
    """
    known = [value for value in values if math.isfinite(value)]
    if len(known) <= count:
        return known
    ends = [i * len(known) // count for i in range(count + 1)]
    return [math.fsum(known[a:b]) / (b - a) for a, b in pairwise(ends)]


def sparkline(history: Sequence[float]) -> str:
    """One block per value, from the minimum to the maximum of ``history``.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    blocks = "▁▂▃▄▅▆▇█"
    known = [value for value in history if math.isfinite(value)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    return "".join(blocks[round((value - low) / span * 7 + 1e-9) if span else 0] for value in known)


def sections(metrics: Metrics) -> list[tuple[str, list[tuple[str, str]]]]:
    """The numbers to watch by what they are about: title, then label and value. What the step did not log is left out."""
    shown = []
    for title, watched in WATCHED:
        cells = [(label, show(metrics[name], metrics)) for label, name, show in watched if name in metrics]
        if title == "rewards":
            cells += components(metrics)
        if cells:
            shown.append((title, cells))
    return shown


def headline(metrics: Metrics) -> list[tuple[str, str]]:
    """The same in one row, for a log, where labels stand alone: of the times only the step's."""
    shown = []
    for title, cells in sections(metrics):
        for label, value in cells[:1] if title == "seconds" else cells:
            shown.append((LONG_LABELS.get((title, label), label if title != "rewards" else f"reward/{label}"), value))
    return shown


def components(metrics: Metrics) -> list[tuple[str, str]]:
    """Each reward function's mean score, under its own name."""
    own = ("reward/mean", "reward/std")
    names = [name for name in metrics if name.startswith("reward/") and name not in own]
    return [(name.removeprefix("reward/"), number(metrics[name])) for name in names]


def evaluation_numbers(summary: Mapping[str, Any]) -> dict[str, float]:
    """An evaluation's figures under the names of ``metric_table.EVALUATION_METRICS``, for sinks that know numbers only."""
    mode = summary["mode"]
    names = {
        "strict": "strict_accuracy", "lenient": "lenient_accuracy", "format": "format_rate", "stopped": "stop_rate",
        "tokens": "mean_tokens",
    }  # fmt: skip
    numbers = {f"evaluation/{mode}_{name}": float(summary[key]) for name, key in names.items()}
    figures = summary.get("figures", {})
    if "success" in figures:
        numbers[f"evaluation/{mode}_success"] = float(figures["success"][0])
    numbers |= {f"evaluation/{mode}_{name}": float(value) for name, value in figures.get("episodes", {}).items()}
    for name in ("pass_at", "majority_at"):
        several = {int(k): estimate for k, estimate in figures.get(name, {}).items() if int(k) > 1}
        numbers |= {f"evaluation/{mode}_{name}_{k}": float(estimate[0]) for k, estimate in sorted(several.items())}
    return numbers


def evaluation_step(stage: str, last_step: int) -> int:
    """The step after which a stage was judged: 0 before the first, ``last_step`` for the last."""
    if stage.startswith("step-") and stage[5:].isdigit():
        return int(stage[5:])
    return 0 if stage in ("base", "warm_start") else last_step


def fields(numbers: Metrics) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), number(value)) for name, value in numbers.items()]


def reward(mean: float, metrics: Metrics) -> str:
    spread = metrics.get("reward/std")
    return f"{mean:.3f}" if spread is None else f"{mean:.3f} ± {spread:.3f}"


def as_percent(value: float, metrics: Metrics) -> str:
    return percent(value)


def as_number(value: float, metrics: Metrics) -> str:
    return number(value)


def as_seconds(value: float, metrics: Metrics) -> str:
    return f"{value:.1f} s"


def as_gib(value: float, metrics: Metrics) -> str:
    return f"{value:.1f} GiB"


def length(mean: float, metrics: Metrics) -> str:
    longest = metrics.get("completions/tokens_max")
    return number(mean) if longest is None else f"{mean:.1f} (max {longest:.0f})"


Watched = tuple[str, str, Callable[[float, Metrics], str]]

WATCHED: tuple[tuple[str, tuple[Watched, ...]], ...] = (
    ("rewards", (("reward", "reward/mean", reward),)),
    ("answers", (("accuracy", "accuracy/strict", as_percent), ("format", "accuracy/format", as_percent))),
    (
        "completions",
        (
            ("length", "completions/tokens_mean", length),
            ("stopped", "completions/stop_rate", as_percent),
            ("truncated", "completions/truncated", as_percent),
        ),
    ),
    (
        "episodes",
        (
            ("turns", "episodes/turns", as_number),
            ("calls", "episodes/calls", as_number),
            ("invalid", "episodes/invalid_calls", as_percent),
            ("failed", "episodes/failed_calls", as_percent),
        ),
    ),
    (
        "groups",
        (
            ("no variance", "groups/zero_variance", as_percent),
            ("failed", "groups/failed", as_number),
            ("sampled", "groups/sampled", as_number),
        ),
    ),
    (
        "policy",
        (
            ("KL", "policy/kl", as_number),
            ("entropy", "policy/entropy", as_number),
            ("clipped", "policy/clip_share", as_percent),
            ("grad norm", "optimizer/grad_norm", as_number),
            ("value loss", "value/loss", as_number),
        ),
    ),
    (
        "tokens/s",
        (
            ("sampled", "speed/sampled_tokens_per_s", as_number),
            ("learnt", "speed/learnt_tokens_per_s", as_number),
        ),
    ),
    (
        "seconds",
        (
            ("step", "time/step_s", as_seconds),
            ("sampling", "time/sample_s", as_seconds),
            ("scoring", "time/score_s", as_seconds),
            ("reference", "time/reference_s", as_seconds),
            ("learning", "time/learn_s", as_seconds),
        ),
    ),
    ("memory", (("peak", "memory/peak_gib", as_gib),)),
)
"""Title of a row, then label, metric and form of each number in it."""

LONG_LABELS = {
    ("rewards", "reward"): "reward",
    ("tokens/s", "sampled"): "sampled tokens/s",
    ("tokens/s", "learnt"): "learnt tokens/s",
    ("episodes", "invalid"): "invalid calls",
    ("episodes", "failed"): "failed calls",
    ("groups", "failed"): "failed groups",
    ("groups", "sampled"): "sampled groups",
    ("memory", "peak"): "peak memory",
}
"""What a label is called where no title stands before it."""
