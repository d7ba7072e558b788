"""``groupwise eval``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from groupwise.cli.options import Model, Overrides, ProgressAside

__all__ = ["evaluate"]


def evaluate(
    model: Model,
    overrides: Overrides = None,
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="SOURCE[:SPLIT]", help="gsm8k:test, arithmetic, a file ...; else what the run used."),
    ] = None,
    as_json: ProgressAside = False,
) -> None:
    """Judge a model on held-out problems: strict and lenient accuracy with 95% intervals, greedy and sampled.

    A model that a run made is asked the way it was trained: settings come from that run's config.yaml unless you change them.

    \b
    Examples:
      groupwise eval smollm2-135m-instruct --data arithmetic
      groupwise eval runs/quickstart-1/final_model
      groupwise eval Qwen/Qwen2.5-0.5B-Instruct --data gsm8k:test evaluation.problems=null
      groupwise eval my-model --data problems.jsonl prompt.system=boxed --json
    """
    from groupwise.cli.models import fetch_model, settings_for_model
    from groupwise.cli.show import console, print_json
    from groupwise.tracking.text import harmless

    config, run_config = settings_for_model(model, [*_data_overrides(data), *(overrides or ())])
    aside = console(stderr=True)
    if run_config is not None:
        aside.print(harmless(f"settings from {run_config}", "dim"), soft_wrap=True)
    from groupwise.evaluation import evaluate_model
    from groupwise.tracking import make_trackers

    fetch_model(config)
    trackers = make_trackers(config, None, aside)
    try:
        results = evaluate_model(config.model.name, config, trackers=trackers)
    finally:
        trackers.close()
    result = {
        "model": config.model.name,
        "data": data or config.data.eval_source or config.data.source,
        "evaluations": [one.to_summary() for one in results],
    }
    if as_json:
        print_json(result)
        return
    from groupwise.tracking.tables import summary_lines, summary_table

    out = console()
    out.print(summary_table(result, harmless))
    for line in summary_lines(result):
        out.print(harmless(line), soft_wrap=True)


def _data_overrides(data: str | None) -> list[str]:
    """``gsm8k:test``: that split is judged; a file: all of it; the generator or a prepared folder: its held-out problems."""
    if data is None:
        return []
    source, colon, split = data.rpartition(":")
    if not colon or Path(data).exists():
        source, split = data, ""
    from groupwise.data.prepared import is_prepared

    if not split and (source == "arithmetic" or is_prepared(source)):
        return [f"data.source={source}", "data.eval_source=null", "data.eval_split=null"]
    named = [f"data.source={source}", f"data.eval_source={source}"]
    return [*named, f"data.eval_split={split or 'null'}"]
