"""``groupwise eval``."""

from __future__ import annotations

import contextlib
import sys
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
    from groupwise.cli.models import settings_for_model
    from groupwise.cli.show import console, print_json
    from groupwise.tracking.text import harmless

    config, run_config = settings_for_model(model, [*_data_overrides(data), *(overrides or ())])
    if run_config is not None:
        console(stderr=True).print(harmless(f"settings from {run_config}", "dim"), soft_wrap=True)
    from groupwise.evaluation import evaluate_model

    with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
        result = evaluate_model(config)
    if as_json:
        print_json(result)
        return
    from groupwise.tracking.tables import summary_lines, summary_table

    out = console()
    out.print(summary_table(result, harmless))
    for line in summary_lines(result):
        out.print(harmless(line), soft_wrap=True)


def _data_overrides(data: str | None) -> list[str]:
    """``gsm8k:test`` -> that split is judged; a file -> all of it is; the generator -> its held-out problems."""
    if data is None:
        return []
    source, colon, split = data.rpartition(":")
    if not colon or Path(data).exists():
        source, split = data, ""
    if source == "arithmetic":
        return ["data.source=arithmetic", "data.eval_source=null", "data.eval_split=null"]
    named = [f"data.source={source}", f"data.eval_source={source}"]
    return [*named, f"data.eval_split={split}"] if split else [*named, "data.eval_split=null"]
