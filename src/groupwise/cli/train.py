"""``groupwise train``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.options import NumProcesses, Overrides, ProgressAside, start_processes

if TYPE_CHECKING:
    from rich.console import Console

    from groupwise.config import Config
    from groupwise.training.loop import StepReport
    from groupwise.training.setup import Prepared

__all__ = ["train"]

Source = Annotated[
    str, typer.Argument(metavar="RECIPE|FILE", help="A shipped recipe (see `groupwise recipes`) or a YAML file of settings.")
]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Check settings, data, rewards, prompts and the model's files; load no weights, then stop."),
]
RunFolder = Annotated[
    Path | None,
    typer.Option("--run-folder", metavar="DIR", help="Where the run is written; runs/RECIPE-DATE-TIME by itself."),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Carry on in the run's folder from its newest checkpoint; without --run-folder, in the recipe's newest unfinished run. A "
        "finished run is left as it is.",
    ),
]
AcceptChanges = Annotated[
    bool, typer.Option("--accept-changes", help="With --resume: although settings or data that change the result differ.")
]
Hints = Annotated[
    bool, typer.Option("--hints/--no-hints", help="Say during the run what the doctor finds; ever more seldom as it goes on.")
]


def train(
    source: Source,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: ProgressAside = False,
    run_folder: RunFolder = None,
    resume: Resume = False,
    accept_changes: AcceptChanges = False,
    hints: Hints = True,
    num_processes: NumProcesses = 1,
) -> None:
    """Train a model: a recipe or a YAML file, with any setting changed on the way.

    A setting is named by its section and name, or by its name alone where only one is called so. A list is written as in YAML.

    \b
    Examples:
      groupwise train quickstart
      groupwise train quickstart --dry-run
      groupwise train quickstart training.steps=10 training.seed=1
      groupwise train gsm8k-1.5b-24gb completions_per_prompt=4 micro_batch_tokens=2048
      groupwise train mine.yaml 'rewards.functions=[correctness, my_rewards.py:short]'
      groupwise train mine.yaml --run-folder runs/first-try
      groupwise train mine.yaml --run-folder runs/first-try --resume
      groupwise train gsm8k-0.5b --num-processes 8

    Exit code 2 means a mistake in the settings or the data, told in one sentence; 1 that training could not go on; 130, 143 and 129
    that Ctrl-C, SIGTERM or a closed terminal (SIGHUP; not under nohup) stopped it, after the step was finished or abandoned, and
    saved. A second Ctrl-C ends it at once.
    """
    from groupwise.cli.models import fetch_model
    from groupwise.config import load_config
    from groupwise.config.load import find_source

    config = load_config(source, overrides or ())
    fetch_model(config)
    if dry_run:
        _dry_run(config, as_json, num_processes)
        return
    start_processes(num_processes)
    from groupwise.cli.show import console, print_json
    from groupwise.distributed import is_first_process
    from groupwise.training.loop import train as run_training

    recipe, shown = find_source(source).stem, console(stderr=as_json)
    if resume and run_folder is None:
        run_folder = _newest(config, recipe, shown)
    on_step = _hints(shown) if hints else None
    result = run_training(
        config, recipe=recipe, run_folder=run_folder, on_step=on_step, console=shown, resume=resume, accept_changes=accept_changes
    )
    if as_json and is_first_process():
        print_json({"folder": str(result.folder), "summary": result.summary})


def _newest(config: Config, recipe: str, shown: Console) -> Path | None:
    """The run to carry on with where no folder was named on the command line; None where the settings name it."""
    from groupwise.distributed import is_first_process
    from groupwise.tracking.text import harmless
    from groupwise.training.resume import newest_run

    if config.output.folder is not None:
        return None
    others: list[str] = []
    folder = newest_run(recipe, others.append)
    for sentence in others if is_first_process() else ():
        shown.print(harmless(sentence, "yellow"), soft_wrap=True, highlight=False)
    return folder


def _hints(shown: Console) -> Callable[[StepReport], None]:
    """A callback for the loop that shows what the doctor finds during the run."""
    from groupwise.doctor import Watch
    from groupwise.tracking.text import harmless

    styles = {"critical": "bold red", "warning": "yellow"}

    def say(sentence: str, severity: str) -> None:
        """On one line in a log; between words, in a terminal."""
        shown.print(harmless(sentence, styles[severity]), soft_wrap=not shown.is_terminal, highlight=False)

    watch = Watch(say)
    return lambda report: watch(report.folder, report.step)


def _dry_run(config: Config, as_json: bool, num_processes: int) -> None:
    from groupwise.cli.show import print_json
    from groupwise.distributed import world_size
    from groupwise.training.setup import prepare

    prepared = prepare(config, processes=max(num_processes, world_size()))
    if as_json:
        print_json(_facts(prepared))
    else:
        _print_prepared(prepared)


def _facts(prepared: Prepared) -> dict[str, Any]:
    from groupwise.tracking.secrets import hide_secrets

    first = prepared.train_prompts[0]
    return {
        "config": hide_secrets(prepared.config.model_dump(mode="json")),
        "training_problems": len(prepared.train_prompts),
        "held_out_problems": len(prepared.held_out_prompts),
        "answer_style": prepared.answer_style,
        "context_length": prepared.context_length,
        "rewards": [
            {
                "name": row.name,
                "weight": row.weight,
                "source": row.source,
                "summary": row.summary,
                "arguments": hide_secrets(dict(row.arguments)),
                "called": row.called,
            }
            for row in prepared.rewards.describe()
        ],
        "first_prompt": {
            "problem": first.problem.id,
            "text": first.text,
            "tokens": len(first.token_ids),
            "reference_answer": first.problem.expected,
        },
        "notes": prepared.notes,
    }


def _print_prepared(prepared: Prepared) -> None:
    from groupwise.cli.show import console, print_notes, table
    from groupwise.config.load import yaml_text
    from groupwise.tracking.text import harmless

    out, facts = console(), _facts(prepared)
    out.print(harmless("Settings", "bold"))
    out.print(harmless(yaml_text(facts["config"])), soft_wrap=True)
    rows = [(row["name"], row["weight"], row["arguments"] or None, row["called"], row["summary"]) for row in facts["rewards"]]
    out.print(table(["reward", "weight", "arguments", "sees one", "what it scores"], rows))
    first = facts["first_prompt"]
    out.print(harmless(f"First prompt ({first['problem']}, {first['tokens']} tokens)", "bold"))
    out.print(harmless(first["text"]), soft_wrap=True)
    out.print(harmless(f"\nreference answer: {first['reference_answer']}\n", "dim"), soft_wrap=True)
    print_notes(facts["notes"], out)
    out.print(
        harmless(
            f"Everything checks out: {facts['training_problems']:,} training problems, {facts['held_out_problems']:,} held out; "
            f"{prepared.config.completions_per_step} completions a step for {prepared.config.training.steps} steps. "
            "No weights were loaded.",
            "green",
        ),
        soft_wrap=True,
    )
