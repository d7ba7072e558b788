"""``groupwise data``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.options import AsJson, Overrides, Source

if TYPE_CHECKING:
    from groupwise.config import Config
    from groupwise.types import Problem, Prompt

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
    """Show rows, the rendered prompt (tools included), token lengths, and answers that could not be read.

    \b
    Examples:
      groupwise data inspect table.csv data.prompt_column=task data.answer_column=result
      groupwise data inspect gsm8k --model Qwen/Qwen2.5-0.5B-Instruct --json
      groupwise data inspect arithmetic 'rollout.tools=[calculator]'
    """
    from groupwise.cli.show import print_json
    from groupwise.config import load_config

    named = [f"model.name={model}"] if model else []
    config = load_config(None, [f"data.source={source}", *named, *(overrides or ())])  # before torch is imported
    from groupwise.data.inspect import inspect_source
    from groupwise.models.embedded import fetch_model
    from groupwise.models.load import load_tokenizer

    fetch_model(config.model)
    tokenizer = load_tokenizer(config.model)
    report = inspect_source(config.data, config.prompt, tokenizer, rows, _first_turn(config, tokenizer))
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
      groupwise data prepare problems.jsonl prepared/mine data.holdout=500
      groupwise train gsm8k-0.5b data.source=prepared/gsm8k
    """
    from groupwise.cli.show import console, print_json
    from groupwise.config import load_config
    from groupwise.data.sources import load_problems, save_prepared
    from groupwise.tracking.text import harmless

    problems = load_problems(load_config(None, [f"data.source={source}", *(overrides or ())]).data)
    save_prepared(problems, str(out))
    if as_json:
        counts = {"train": len(problems.train), "held_out": len(problems.held_out), "dropped": dict(problems.dropped)}
        print_json({"folder": str(out), **counts})
        return
    console().print(harmless(f"{out}: {problems.description}"), soft_wrap=True)


def _first_turn(config: Config, tokenizer: Any) -> Callable[[Problem, str | None], Prompt] | None:
    """How the first turn of an episode is rendered; None without tools and environment."""
    if not config.rollout.has_episodes:
        return None
    from groupwise.episodes import open_episodes, render_episode
    from groupwise.models.load import end_token_ids, generation_config, load_model_config
    from groupwise.serving.agents import open_agents

    ends = end_token_ids(tokenizer, load_model_config(config.model), generation_config(config.model))
    episodes = open_episodes(config, tokenizer, ends, open_agents)
    return lambda problem, system: render_episode(problem, tokenizer, config.prompt, system, episodes)


def _print_report(report: dict[str, Any]) -> None:
    from groupwise.cli.show import console, print_notes, table
    from groupwise.tracking.text import harmless

    out = console()

    def say(text: str, style: str = "") -> None:
        out.print(harmless(text, style), soft_wrap=True)

    columns, lengths = report["columns"], report["prompt_tokens"]
    say(f"{report['source']} ({report['split']}): {report['rows']:,} rows, {report['usable']:,} usable", "bold")
    if columns["all"]:
        say(f"columns    {', '.join(columns['all'])}: question from {columns['prompt']}, answer from {columns['answer']}")
    own, shown = report["own_system"], report["system"] or "none"
    if own:
        shown = "each row's own" if own == report["usable"] else f"{shown} (of {own:,} rows their own)"
    say(f"answers    in the {report['answer_style']} style; system prompt: {shown}")
    if lengths:
        say(
            f"prompts    {lengths['min']} to {lengths['max']} tokens, median {lengths['median']}, 95% up to {lengths['p95']} "
            f"({lengths['measured']:,} measured)"
        )
    for example in report["examples"]:
        say(f"\n{example['id']}", "bold")
        say(example.get("prompt", str(example["question"])))
        say(f"reference answer: {' or '.join([example['answer'], *example['also']])}", "green")
    bad = report["bad_rows"]
    if bad["count"]:
        out.print(table(["row", "why it cannot be used"], [(one["row"], one["reason"]) for one in bad["first"]], ""))
        remedy = "data.on_bad_answer=drop leaves them out, counted"
        if refused := bad["refused"]:
            remedy = f"the chat template refuses {refused:,} of them, and data.on_bad_answer=drop leaves out the others alone"
        say(f"{bad['count']:,} rows cannot be used; {remedy}", "yellow")
    print_notes(report["notes"], out)
