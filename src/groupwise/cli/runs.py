"""``groupwise doctor`` and ``groupwise report``: what is to be said of runs, and of settings before a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from groupwise.cli.options import AsJson, Overrides

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from groupwise.doctor import Finding
    from groupwise.engines.builtin.fast_paths import Choice

__all__ = ["doctor", "print_finding", "print_other_notes", "report"]

STYLES = {"critical": "bold red", "warning": "yellow", "note": "cyan", "normal": "green"}


def doctor(
    target: Annotated[
        str, typer.Argument(metavar="RUN|RECIPE|FILE", help="A run's folder, or the recipe or YAML file of a run to come.")
    ],
    overrides: Overrides = None,
    as_json: AsJson = False,
    examples: Annotated[int, typer.Option("--examples", min=0, max=3, help="Examples with each finding.")] = 1,
    device: Annotated[
        bool, typer.Option("--device", help="Check the fast paths of this machine for the model of a recipe or file instead.")
    ] = False,
) -> None:
    """Diagnose a run, with the evidence and the remedy: before it starts, while it goes on, and afterwards.

    For a recipe or a file the settings, data, rewards and tokenizer are tried out; no weights are loaded.

    \b
    Examples:
      groupwise doctor mine.yaml optimizer.learning_rate=1e-5
      groupwise doctor runs/quickstart-1 --examples 3
      groupwise doctor quickstart --device

    Exit code 1 means that something critical was found.

    With --device each fast way of computing is compared with the plain one and timed against it, at the shape of the model; no weights are
    loaded. Exit code 1 means that one failed or gave other numbers.
    """
    from groupwise.cli.show import print_json

    if device:
        _check_device(target, overrides or (), as_json)
        return
    findings, about = _diagnose(target, overrides or ())
    if as_json:
        print_json({**about, "findings": [finding.to_json() for finding in findings]})
    else:
        _print(findings, about, examples)
    if any(finding.severity == "critical" for finding in findings):
        raise typer.Exit(1)


def _check_device(target: str, overrides: Sequence[str], as_json: bool) -> None:
    from groupwise.config import load_config

    config = load_config(target, overrides)  # before torch is imported
    import torch

    from groupwise.cli.show import console, print_json
    from groupwise.engines.builtin.fast_paths import TOLERANCE, check_fast_paths
    from groupwise.models.devices import with_dtype
    from groupwise.models.embedded import fetch_model
    from groupwise.models.load import load_model_config, resolve_device

    model = with_dtype(config.model)
    fetch_model(model)
    device, dtype = resolve_device(model.device), getattr(torch, model.dtype)
    choices = check_fast_paths(load_model_config(model), dtype, device, again=True)
    if as_json:
        print_json({"device": str(device), "dtype": model.dtype, "fast_paths": [choice.to_json() for choice in choices]})
    else:
        console().print(_device_table(choices, f"{model.name} in {model.dtype} on {device}", TOLERANCE[dtype]))
    if any(not choice.taken and not choice.agrees for choice in choices):
        raise typer.Exit(1)


def _device_table(choices: Sequence[Choice], title: str, tolerance: float) -> Table | str:
    from groupwise.cli.show import table

    if not choices:
        return f"{title}: there is no fast path, all is computed the plain way."
    rows = []
    for choice in choices:
        measured = [(m.operation, f"{m.fast_ms:.2f}", f"{m.plain_ms:.2f}", f"{m.difference:.1e}") for m in choice.operations]
        for place, row in enumerate(measured or [("", "", "", "")]):
            rows.append([choice.path, *row, "yes" if choice.taken else f"no: {choice.why}"] if place == 0 else ["", *row, ""])
    return table(("fast path", "operation", "ms", "plain, ms", f"apart, of {tolerance:g}", "taken"), rows, title)


def _diagnose(target: str, overrides: Sequence[str]) -> tuple[list[Finding], dict[str, Any]]:
    from groupwise.tracking.reading import names_run, read_run

    if names_run(target):
        from groupwise.doctor import diagnose_run, verdict_on
        from groupwise.errors import ConfigError

        if overrides:
            raise ConfigError(
                f"{overrides[0]!r} changes nothing about {target!r}, a run whose settings are what they were: leave it out"
            )
        run = read_run(target)
        state = "finished" if run.summary else "not finished"
        findings = diagnose_run(run)
        about = {
            "run": str(run.path), "steps": run.last_step, "state": state, "verdict": verdict_on(run, findings),
            "unreadable": dict(run.unreadable),
        }  # fmt: skip
        return findings, about
    from groupwise.config import load_config

    config = load_config(target, overrides)  # before torch is imported
    from groupwise.doctor import diagnose_prepared
    from groupwise.models.embedded import fetch_model
    from groupwise.training.setup import prepare

    fetch_model(config.model)
    prepared = prepare(config)
    try:
        findings = diagnose_prepared(prepared)
    finally:
        prepared.rewards.close()
    return findings, {"settings": target, "notes": prepared.notes}


def _print(findings: Sequence[Finding], about: dict[str, Any], examples: int) -> None:
    from groupwise.cli.show import console
    from groupwise.tracking.text import harmless

    out = console()
    if "run" in about:
        out.print(harmless(f"{about['run']}: {about['steps']} steps, {about['state']}", "bold"), soft_wrap=True)
        if about["unreadable"]:
            left_out = ", ".join(f"{count} of {name}" for name, count in about["unreadable"].items())
            out.print(harmless(f"could not be read and left out: {left_out}", "yellow"), soft_wrap=True)
    print_other_notes(about.get("notes", ()), findings, out)
    for finding in findings:
        print_finding(finding, examples, out)
    if str(about.get("verdict")).startswith(("Too early", "Nothing to judge")):
        out.print(harmless(f"{about['verdict']}.", "cyan"), soft_wrap=True)
    elif not any(finding.severity in ("critical", "warning") for finding in findings):
        out.print(harmless("No problem found.", "green"), soft_wrap=True)


def print_other_notes(notes: Iterable[str], findings: Sequence[Finding], out: Console) -> None:
    """Those that no finding says too."""
    from groupwise.cli.show import print_notes

    print_notes([note for note in notes if not any(note.startswith(one.summary) for one in findings)], out)


def print_finding(finding: Finding, examples: int, out: Console) -> None:
    from groupwise.tracking.text import harmless

    style = STYLES[finding.severity]
    out.print(harmless(f"\n{finding.severity.upper()}  {finding.title}", style), soft_wrap=True)
    for label, text in (("found", finding.summary), ("means", finding.meaning), ("do", finding.remedy)):
        out.print(harmless(f"  {label:<6} {text}"), soft_wrap=True)
    for example in finding.examples[:examples]:
        remark = f" ({example.remark})" if example.remark else ""
        out.print(harmless(f"  {example.where}{remark}", "dim"), soft_wrap=True)
        for line in example.text.splitlines()[:12]:
            out.print(harmless(f"    | {line}", "dim"), soft_wrap=True)


def report(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders of runs, going on or finished.")],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to write; else RUN/report.html, or report.html for several."),
    ] = None,
    texts: Annotated[
        bool, typer.Option("--texts/--no-texts", help="With or without what the models wrote, and the problems.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page about one run or several: curves, completions, evaluations, settings, and what the doctor finds.

    The page is a single file that opens from disk without a network.

    \b
    Examples:
      groupwise report runs/quickstart-1 runs/quickstart-2 --out both.html
      groupwise report runs/quickstart-1 --no-texts --out numbers-only.html
    """
    from groupwise.cli.show import console, print_json
    from groupwise.report import write_report
    from groupwise.tracking.text import harmless

    made = write_report(runs, out, completions=texts)
    if as_json:
        facts = {"path": str(made.path), "size_bytes": made.size_bytes, "text_bytes": made.text_bytes}
        print_json({**facts, "runs": list(made.runs), "completions": made.completions})
        return
    size, inside = made.size_bytes / 2**20, f"{len(made.runs)} {'run' if len(made.runs) == 1 else 'runs'}"
    console().print(
        harmless(f"{made.path}: {size:.1f} MiB, {inside}, {made.completions:,} completions; open it in a browser"), soft_wrap=True
    )
