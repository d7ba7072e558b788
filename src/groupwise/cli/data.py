"""``groupwise data``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from groupwise.cli.options import AsJson, Overrides, Source

__all__ = ["app"]

app = typer.Typer(
    help="Look at problems before training on them, and prepare them once.", no_args_is_help=True, rich_markup_mode=None
)


@app.command("inspect", short_help="Show rows, a rendered prompt, lengths, bad answers.")
def inspect(
    source: Source,
    overrides: Overrides = None,
    model: Annotated[str | None, typer.Option("--model", help="Whose tokenizer and chat template render the prompts.")] = None,
    rows: Annotated[int, typer.Option("--rows", min=1, help="How many rows to show.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Show rows, the rendered prompt, token lengths, and answers that could not be read.

    \b
    Examples:
      groupwise data inspect gsm8k
      groupwise data inspect problems.jsonl --rows 10
      groupwise data inspect table.csv data.prompt_column=task data.answer_column=result
      groupwise data inspect gsm8k --model Qwen/Qwen2.5-0.5B-Instruct --json
    """
    from groupwise.cli.show import print_json
    from groupwise.config import load_config
    from groupwise.data.inspect import inspect_source
    from groupwise.models.load import load_tokenizer

    named = [f"model.name={model}"] if model else []
    config = load_config(None, [f"data.source={source}", *named, *(overrides or ())])
    report = inspect_source(config.data, config.prompt, load_tokenizer(config.model), rows)
    if as_json:
        print_json(report)
    else:
        _print_report(report)


@app.command("prepare", short_help="Read a source once and save it.")
def prepare(
    source: Source,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    overrides: Overrides = None,
    as_json: AsJson = False,
) -> None:
    """Read a source once, extract its answers, split it, and save it; train on the folder as data.source.

    \b
    Examples:
      groupwise data prepare gsm8k prepared/gsm8k
      groupwise data prepare problems.jsonl prepared/mine data.holdout=500
      groupwise train gsm8k-0.5b data.source=prepared/gsm8k
    """
    from groupwise.cli.show import console, print_json
    from groupwise.config import load_config
    from groupwise.data.sources import load_problems, save_prepared
    from groupwise.tracking.text import harmless

    problems = load_problems(load_config(None, [f"data.source={source}", *(overrides or ())]).data)
    save_prepared(problems, out)
    if as_json:
        print_json({"folder": str(out), "train": len(problems.train), "held_out": len(problems.held_out)})
        return
    console().print(
        harmless(f"{out}: {len(problems.train):,} training problems, {len(problems.held_out):,} held out"), soft_wrap=True
    )


def _print_report(report: dict[str, Any]) -> None:
    from groupwise.cli.show import console
    from groupwise.tracking.text import harmless

    out = console()
    for name, value in report.items():
        out.print(harmless(f"{name}", "bold") + harmless(f"  {value}"), soft_wrap=True)
