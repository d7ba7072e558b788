"""What a run leaves, for Python and notebooks: data frames, a chart and a short view of its folder."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from groupwise.errors import ConfigError
from groupwise.tracking.metric_table import describe_metric
from groupwise.tracking.numbers import interval, number, percent
from groupwise.tracking.reading import EvaluationRecords, RunRecord, read_run, stage_position
from groupwise.tracking.tables import mode_label, stage_label

if TYPE_CHECKING:
    from pandas import DataFrame

__all__ = ["Chart", "RunResult"]

FIRST_LOOK = ("reward/mean", "accuracy/strict")
USUAL = (*FIRST_LOOK, "completions/tokens_mean", "groups/zero_variance")
"""What is drawn where nothing is named, as far as the run has it."""


@dataclass(frozen=True)
class RunResult:
    """What a run leaves: its folder, and the figures of ``summary.json``.

    ``metrics``, ``completions`` and ``evaluations`` are data frames, read from the folder. A result stands for its folder wherever a
    path is asked for: ``read_run(result)``, ``write_report(result)``.
    """

    folder: Path
    summary: dict[str, Any]

    @classmethod
    def of(cls, folder: str | os.PathLike[str]) -> RunResult:
        """The result of a run that was made before; of one that has not ended, as far as it is, but without its
        ``evaluations``. Raises ConfigError for any other folder."""
        run = read_run(Path(folder))
        return cls(run.path, dict(run.summary or {"steps": run.last_step}))

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    @cached_property
    def run(self) -> RunRecord:
        """Everything in the folder, as it was when this was first asked for."""
        return read_run(self.folder)

    @property
    def metrics(self) -> DataFrame:
        """A row for each step (the index), a column for each metric; NaN for what was not logged or not finite."""
        from pandas import DataFrame

        rows = [{name: value for name, value in row.items() if name != "step"} for row in self.run.steps]
        steps = [int(row["step"] or 0) for row in self.run.steps]
        return DataFrame(rows, index=steps, dtype=float).rename_axis("step")

    @property
    def completions(self) -> DataFrame:
        """A row for each recorded completion, with the score of each reward function in ``reward/NAME``."""
        from pandas import DataFrame

        names = (
            "step",
            "problem",
            "sample",
            "expected",
            "text",
            "strict",
            "lenient",
            "reward",
            "advantage",
            "finish_reason",
            "tokens",
        )
        return DataFrame(
            {name: getattr(record, name) for name in names} | {f"reward/{k}": v for k, v in record.components.items()}
            for record in self.run.completions
        )

    @property
    def evaluations(self) -> DataFrame:
        """A row for each stage (``base``, ``warm_start``, ``step-N``, ``final``) and mode: shares of right answers (``strict``,
        ``lenient``) with the ends of their 95% intervals. Of episodes further ``success`` and what went on in them
        (``evaluation.figures.of_episodes``). None of a run that has not ended: `write_report` shows what it has."""
        from pandas import DataFrame

        rows = [*self._evaluation_rows(), *self.summary.get("training_evaluations", ())]
        rows.sort(key=lambda row: stage_position(EvaluationRecords(row["stage"], row["mode"], ()))[:2])
        return DataFrame([_flat(row) for row in rows])

    def plot(self, *metrics: str) -> Chart:
        """The course of ``metrics`` over the steps, one chart each; by default of reward, accuracy, length and groups without variance.

        Raises ConfigError for a metric that the run does not have.
        """
        known = self.run.metric_names()
        unknown = [name for name in metrics if name not in known]
        if unknown:
            raise ConfigError(f"{unknown[0]!r} is no metric of this run: it has {', '.join(known)}")
        return Chart({name: self.run.series(name) for name in metrics or [name for name in USUAL if name in known]})

    def _evaluation_rows(self) -> list[Mapping[str, Any]]:
        rows = [row for key in ("evaluations", "sampled_evaluations", "greedy_evaluations") for row in self.summary.get(key, ())]
        return list({(row["stage"], row["mode"]): row for row in rows}.values())

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{_safe(stage_label(row['stage']))}</td><td>{_safe(mode_label(row))}</td>"
            f"<td>{interval(row['strict_accuracy'], row['strict_interval'])}</td><td>{percent(row['format_rate'])}</td></tr>"
            for row in self._evaluation_rows()
        )
        head = "<tr><th>held-out problems</th><th></th><th>right [95% interval]</th><th>in the form asked for</th></tr>"
        table = f"<table>{head}{rows}</table>" if rows else ""
        drawn = (
            Chart({name: points for name in FIRST_LOOK if (points := self.run.series(name))}) if self.folder.is_dir() else None
        )
        chart = drawn._repr_html_() if drawn and drawn.series else ""
        return f"<div><b>{_safe(self.folder)}</b>, {_safe(self.summary.get('steps', '?'))} steps{table}{chart}</div>"


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    cells = {key: row.get(key) for key in ("stage", "mode", "temperature", "n", "samples")}
    for name in ("strict", "lenient"):
        low, high = row[f"{name}_interval"]
        cells |= {name: row[f"{name}_accuracy"], f"{name}_low": low, f"{name}_high": high}
    played = row.get("figures", {})
    if "success" in played:
        cells |= dict(zip(("success", "success_low", "success_high"), played["success"], strict=True))
    return (
        cells | {key: row.get(key) for key in ("format_rate", "stop_rate", "mean_tokens", "seconds")} | played.get("episodes", {})
    )


@dataclass(frozen=True)
class Chart:
    """Curves as SVG, one under the other; a notebook shows them, ``save`` writes them."""

    series: Mapping[str, Sequence[tuple[int, float]]]
    """(step, value) by metric."""

    WIDTH, HEIGHT = 560, 130

    def svg(self) -> str:
        panels = "".join(
            f'<g transform="translate(0,{i * self.HEIGHT})">{self._panel(name, points)}</g>'
            for i, (name, points) in enumerate(self.series.items())
        )
        size = f'width="{self.WIDTH}" height="{self.HEIGHT * len(self.series)}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11" fill="currentColor">{panels}</svg>'

    def _panel(self, name: str, points: Sequence[tuple[int, float]]) -> str:
        """Lowest and highest value at the left, first and last step below."""
        left, right, top, bottom = 70, self.WIDTH - 10, 24, self.HEIGHT - 20
        title = f'<text x="{left}" y="14" font-weight="bold">{_safe(name)} <tspan font-weight="normal">{_safe(_unit(name))}</tspan></text>'
        if not points:
            return title
        steps, values = [step for step, _ in points], [value for _, value in points]
        low, high = min(values), max(values)
        wide, tall = max(1, steps[-1] - steps[0]), (high - low) or 1.0
        line = " ".join(
            f"{left + (right - left) * (step - steps[0]) / wide:.1f},{bottom - (bottom - top) * (value - low) / tall:.1f}"
            for step, value in points
        )
        curve = f'<polyline points="{line}" fill="none" stroke="#2a78b5" stroke-width="1.5"/>'
        if len(points) == 1:
            curve = f'<circle cx="{left}" cy="{bottom}" r="2.5" fill="#2a78b5"/>'
        labels = "".join(
            f'<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'
            for x, y, anchor, text in (
                (left - 6, top + 4, "end", number(high)), (left - 6, bottom + 4, "end", number(low) if high > low else ""),
                (left, bottom + 15, "start", f"step {steps[0]}"), (right, bottom + 15, "end", steps[-1]),
            )
        )  # fmt: skip
        return f'{title}<path d="M{left},{top}V{bottom}H{right}" fill="none" stroke="#999"/>{curve}{labels}'

    def save(self, path: str | Path) -> Path:
        """Write the SVG; returns its path."""
        target = Path(path).expanduser()
        target.write_text(self.svg(), encoding="utf-8")
        return target

    def _repr_html_(self) -> str:
        return self.svg()


def _unit(name: str) -> str:
    described = describe_metric(name)
    return f"[{described[0]}]" if described and described[0] != "-" else ""


def _safe(text: object) -> str:
    return html.escape(str(text))
