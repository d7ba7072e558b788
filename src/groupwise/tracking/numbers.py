"""Turning metrics into the few short words that a person follows during a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

__all__ = ["clock", "fields", "headline", "interval", "number", "percent", "sparkline"]

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
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def clock(seconds: float) -> str:
    """``0:07``, ``12:05``, ``1:02:03``."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def sparkline(history: Sequence[float]) -> str:
    """One block per value, from the least to the greatest of ``history``.

    >>> sparkline([0.0, 0.5, 1.0])
    '▁▅█'
    """
    blocks = "▁▂▃▄▅▆▇█"
    known = [value for value in history if math.isfinite(value)]
    if not known:
        return ""
    low, span = min(known), max(known) - min(known)
    return "".join(blocks[round((value - low) / span * 7 + 1e-9) if span else 0] for value in known)


def headline(metrics: Metrics) -> list[tuple[str, str]]:
    """Label and value of the numbers to watch; those that the step did not log are left out."""
    shown = []
    for label, name, show in WATCHED:
        if name in metrics:
            shown.append((label, show(metrics[name], metrics)))
    return shown


def fields(numbers: Metrics) -> list[tuple[str, str]]:
    return [(name.replace("_", " "), number(value)) for name, value in numbers.items()]


def reward(mean: float, metrics: Metrics) -> str:
    spread = metrics.get("reward/std")
    return f"{mean:.3f}" if spread is None else f"{mean:.3f} ± {spread:.3f}"


def as_percent(value: float, metrics: Metrics) -> str:
    return percent(value)


def as_number(value: float, metrics: Metrics) -> str:
    return number(value)


WATCHED: tuple[tuple[str, str, Callable[[float, Metrics], str]], ...] = (
    ("reward", "reward/mean", reward),
    ("accuracy", "accuracy/strict", as_percent),
    ("format", "accuracy/format", as_percent),
    ("KL", "policy/kl", as_number),
    ("clipped", "policy/clip_share", as_percent),
    ("length", "completions/tokens_mean", as_number),
    ("stopped", "completions/stop_rate", as_percent),
    ("truncated", "completions/truncated", as_percent),
    ("no variance", "groups/zero_variance", as_percent),
    ("grad norm", "optimizer/grad_norm", as_number),
    ("tokens/s", "speed/sampled_tokens_per_s", as_number),
)
