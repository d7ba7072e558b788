"""Asking every rule: about a run that is going on or over, and about settings before a run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from groupwise.config import Config
from groupwise.doctor.findings import SEVERITIES, Finding
from groupwise.doctor.rehearsal import Rehearsal
from groupwise.doctor.rules import RULES, Subject
from groupwise.tracking.reading import RunRecord
from groupwise.training.setup import Prepared, prepare

__all__ = ["diagnose_prepared", "diagnose_run", "diagnose_settings"]


def diagnose_run(run: RunRecord) -> list[Finding]:
    """What ails a run, by what it has written so far; the gravest first."""
    about_settings = ask("settings", run.config) if run.config else []
    return ordered([*ask("run", run), *about_settings])


def diagnose_settings(config: Config) -> list[Finding]:
    """What can be said of a run before it starts: settings, data, rewards and the model's tokenizer; no weights are loaded.

    Raises what ``prepare`` raises: what makes a run impossible is an error, and no finding.
    """
    return diagnose_prepared(prepare(config))


def diagnose_prepared(prepared: Prepared) -> list[Finding]:
    found = [*ask("settings", prepared.config), *ask("problems", prepared.problems), *ask("rehearsal", Rehearsal(prepared))]
    return ordered(found)


def ask(subject: Subject, about: Any) -> list[Finding]:
    findings = (rule.examine(about) for rule in RULES if rule.subject == subject)
    return [finding for finding in findings if finding is not None]


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
