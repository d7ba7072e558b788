"""``groupwise train``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.options import NumProcesses, Overrides, ProgressAside, start_processes

if TYPE_CHECKING:
    from rich.console import Console

    from groupwise.config import Config
    from groupwise.doctor import Finding
    from groupwise.training.setup import Prepared

__all__ = ["train"]

Source = Annotated[str, typer.Argument(metavar="RECIPE|FILE", help="A recipe's name, or a YAML file.")]
DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Check settings, data, rewards, prompts and the model's files; load no weights."),
]
RunFolder = Annotated[
    Path | None,
    typer.Option("--run-folder", metavar="DIR", help="Where the run is written; else runs/RECIPE-DATE-TIME."),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Resume from the newest checkpoint; without --run-folder, of the recipe's newest unfinished run.",
    ),
]
AcceptChanges = Annotated[bool, typer.Option("--accept-changes", help="With --resume: although settings or data differ.")]
Check = Annotated[bool, typer.Option("--check/--no-check", help="Try settings and rewards first, and refuse what cannot learn.")]
Everything = Annotated[bool, typer.Option("--all", help="With --dry-run: show every setting.")]
Hints = Annotated[bool, typer.Option("--hints/--no-hints", help="Say during the run what the doctor finds.")]


def train(
    source: Source,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: ProgressAside = False,
    run_folder: RunFolder = None,
    resume: Resume = False,
    accept_changes: AcceptChanges = False,
    check: Check = True,
    everything: Everything = False,
    hints: Hints = True,
    num_processes: NumProcesses = 1,
) -> None:
    """Train a model: a recipe or a YAML file, with any setting changed on the way.

    A setting is named by its section and name, or by its name alone where only one is called so.

    \b
    Examples:
      groupwise train quickstart
      groupwise train gsm8k-1.5b-24gb completions_per_prompt=4 training.seed=1 --dry-run
      groupwise train mine.yaml 'rewards.functions=[correctness, my_rewards.py:short]'
      groupwise train mine.yaml --run-folder runs/first-try --resume
      groupwise train gsm8k-0.5b --num-processes 8

    Exit code 1 means that training could not continue; 130, 143 and 129 that Ctrl-C, SIGTERM or a closed terminal stopped it, after it
    saved.
    """
    from groupwise.config import load_config
    from groupwise.config.load import find_source

    config = load_config(source, overrides or ())  # before torch is imported: a mistake is told at once
    from groupwise.models.embedded import fetch_model

    fetch_model(config.model)
    if dry_run:
        from groupwise.cli.show import console

        if resume and run_folder is None:
            run_folder = _newest(config, find_source(source).stem, console(stderr=as_json))
        _dry_run(config, as_json, num_processes, everything, check, run_folder, resume, accept_changes)
        return
    start_processes(num_processes)
    from groupwise.cli.show import console, print_json
    from groupwise.distributed import is_first_process
    from groupwise.training.loop import train as run_training

    recipe, shown = find_source(source).stem, console(stderr=as_json)
    if resume and run_folder is None:
        run_folder = _newest(config, recipe, shown)
    from groupwise.doctor import Watch
    from groupwise.tracking.text import harmless

    styles = {"critical": "bold red", "warning": "yellow"}

    def say(sentence: str, severity: str) -> None:
        """Say it on one line in a log; broken between words in a terminal."""
        shown.print(harmless(sentence, styles[severity]), soft_wrap=not shown.is_terminal, highlight=False)

    watch = Watch(say)
    result = run_training(
        config, recipe=recipe, run_folder=run_folder, console=shown, resume=resume, accept_changes=accept_changes,
        on_step=(lambda report: watch(report.folder, report.step)) if hints else None,
        check=watch.before if check else None,
    )  # fmt: skip
    if as_json and is_first_process():
        print_json({"folder": str(result.folder), "summary": result.summary})


def _newest(config: Config, recipe: str, shown: Console) -> Path | None:
    """The run to resume where no folder was named on the command line; None where the settings name it."""
    from groupwise.distributed import is_first_process, told_once
    from groupwise.tracking.text import harmless
    from groupwise.training.resume import newest_run

    if config.output.folder is not None:
        return None
    others: list[str] = []
    with told_once():
        folder = newest_run(recipe, others.append)
    for sentence in others if is_first_process() else ():
        shown.print(harmless(sentence, "yellow"), soft_wrap=True, highlight=False)
    return folder


def _dry_run(
    config: Config, as_json: bool, num_processes: int, everything: bool, check: bool, run_folder: Path | None, resume: bool,
    accept_changes: bool,
) -> None:  # fmt: skip
    from groupwise.cli.show import console, print_json, print_notes
    from groupwise.distributed import world_size
    from groupwise.doctor import diagnose_prepared, refuse
    from groupwise.models.devices import with_dtype
    from groupwise.tracking.run_folder import check_new
    from groupwise.training.resume import would_resume
    from groupwise.training.setup import prepare

    folder = run_folder or (Path(config.output.folder) if config.output.folder else None)
    if not resume:
        check_new(folder and folder.expanduser())
    if resume:  # what the run's own settings are compared with
        config = config.model_copy(update={"model": with_dtype(config.model)})
    processes = max(num_processes, world_size())
    prepared = prepare(config, processes=processes, folder=folder)
    findings = diagnose_prepared(prepared) if check else []
    prepared.rewards.close()
    resumed, steps_left = (
        would_resume(folder.expanduser(), prepared, accept_changes, processes) if folder is not None and resume else ([], True)
    )
    begun = resume and folder is not None and folder.expanduser().is_dir()
    if as_json:
        print_json(_facts(prepared) | {"findings": [finding.to_json() for finding in findings], "resume": resumed})
    else:
        _print_prepared(prepared, findings, everything)
    if not begun:  # what goes on is not refused for what it began with
        refuse(findings, config)
    if not as_json:
        print_notes(resumed, console())
        if steps_left:
            _print_verdict(prepared, findings if check else None)


def _facts(prepared: Prepared) -> dict[str, Any]:
    from groupwise.tracking.text import hide_secrets

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


def _print_prepared(prepared: Prepared, findings: Sequence[Finding], everything: bool) -> None:
    """Print what is short last, so that it is still there to be read."""
    from groupwise.cli.runs import print_finding, print_other_notes
    from groupwise.cli.show import console, table
    from groupwise.config import changed_settings
    from groupwise.config.dialect import yaml_text
    from groupwise.tracking.text import harmless

    out, facts = console(), _facts(prepared)
    out.print(harmless("Settings" if everything else "Settings that differ from the defaults (--all: every one)", "bold"))
    out.print(harmless(yaml_text(facts["config"] if everything else changed_settings(facts["config"]))), soft_wrap=True)
    rows = [(row["name"], row["weight"], row["arguments"] or None, row["called"], row["summary"]) for row in facts["rewards"]]
    out.print(table(["reward", "weight", "arguments", "sees one", "what it scores"], rows))
    first = facts["first_prompt"]
    out.print(harmless(f"First prompt ({first['problem']}, {first['tokens']} tokens)", "bold"))
    out.print(harmless(first["text"]), soft_wrap=True)
    out.print(harmless(f"\nreference answer: {first['reference_answer']}\n", "dim"), soft_wrap=True)
    print_other_notes(facts["notes"], findings, out)
    for finding in findings:
        print_finding(finding, 0, out)


def _print_verdict(prepared: Prepared, findings: Sequence[Finding] | None) -> None:
    from groupwise.cli.show import console
    from groupwise.tracking.text import harmless

    grave = sum(finding.severity in ("critical", "warning") for finding in findings or ())
    verdict = f"It would run, with {grave} {'finding' if grave == 1 else 'findings'} above" if grave else "Everything checks out"
    verdict = "It would run; rewards and settings were not checked" if findings is None else verdict
    console().print(
        harmless(
            f"{verdict}: {len(prepared.train_prompts):,} training problems, {len(prepared.held_out_prompts):,} held out; "
            f"{prepared.config.completions_per_step} completions a step for {prepared.config.training.steps} steps. "
            "No weights were loaded.",
            "yellow" if grave else "green",
        ),
        soft_wrap=True,
    )
