"""Figures that read well on a light and on a dark page: transparent ground, mid-grey axes, text that stays text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from cycler import cycler
from matplotlib import pyplot

__all__ = ["COLOURS", "INK", "band", "figure"]

INK = "#808080"
"""Axes, ticks and words: grey with a contrast above 3.9 on white and above 5 on a dark page."""
COLOURS = ("#1f8fd6", "#e07b00", "#2aa36b", "#d6453d", "#9a6bd6", "#a8743f", "#d65fae", "#7f8c1f", "#16a0a8")
"""One per line, in this order; all of middling lightness, so that they show on either ground."""

_SETTINGS: Any = {
    "svg.fonttype": "none",  # text, not outlines: small files, and words that can be searched
    "svg.hashsalt": "groupwise",  # the same numbers give the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "axes.prop_cycle": cycler(color=list(COLOURS)),
}


@contextmanager
def figure(path: Path, titles: Sequence[str], *, rows: int = 1, width: float = 9.0, height: float = 3.2) -> Iterator[Any]:
    """Axes in ``rows`` rows, one per title, to draw on; written to ``path`` as SVG in the end."""
    with matplotlib.rc_context(_SETTINGS):
        columns = -(-len(titles) // rows)
        canvas, axes = pyplot.subplots(rows, columns, figsize=(width, height * rows), squeeze=False, layout="constrained")
        for axis, title in zip(axes.flat, titles, strict=False):
            axis.set_title(title)
        for axis in axes.flat[len(titles) :]:
            axis.set_visible(False)
        try:
            yield list(axes.flat[: len(titles)])
            canvas.savefig(path, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        finally:
            pyplot.close(canvas)


def band(axis: Any, x: Sequence[float], runs: Sequence[Sequence[float]], colour: str, label: str | None = None) -> None:
    """The mean over ``runs`` as a line, from the smallest to the largest as a band."""
    mean = [sum(column) / len(column) for column in zip(*runs, strict=True)]
    low, high = ([pick(column) for column in zip(*runs, strict=True)] for pick in (min, max))
    axis.plot(x, mean, color=colour, label=label)
    axis.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
