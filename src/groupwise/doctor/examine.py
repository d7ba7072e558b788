"""Ask every rule: about a run that is going on or over, about settings before a run, and beside a run (`Watch`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from groupwise.config import Config
from groupwise.doctor.findings import SEVERITIES, Finding
from groupwise.doctor.rehearsal import Rehearsal
from groupwise.doctor.rules import RULES, Subject
from groupwise.errors import ConfigError, RewardError
from groupwise.tracking.reading import RunRecord, read_run
from groupwise.training.setup import Prepared

__all__ = ["Watch", "check_before", "diagnose_prepared", "diagnose_run", "refuse", "verdict_on"]

ENOUGH, CERTAIN = 5, 10
"""Steps before which nothing is said of a run but what one step shows for certain, and before which nothing is critical: rules take
means over half of the steps of a short run, and of ten steps that are five."""


def diagnose_run(run: RunRecord) -> list[Finding]:
    """What is wrong with a run, by what it has written so far; the gravest first."""
    about_settings = ask("settings", run.config) if run.config else []
    steps, at_once = len(run.steps), {rule.name for rule in RULES if rule.at_once}
    findings = [one for one in ask("run", run) if steps >= ENOUGH or one.severity in ("note", "normal") or one.rule in at_once]
    if steps < CERTAIN:
        findings = [replace(one, severity="warning") if one.severity == "critical" else one for one in findings]
    return ordered([*findings, *about_settings])


def verdict_on(run: RunRecord, findings: Iterable[Finding]) -> str:
    """What ``findings``, those of ``diagnose_run``, come to, in a few words; behind a colon why there is nothing to say yet."""
    steps = len(run.steps)
    if any(finding.severity in ("critical", "warning") for finding in findings):
        return "Problems found"
    if not steps:
        return "Nothing to judge yet: 0 steps"
    too_early = f"Too early to judge: {steps} step{'s' * (steps > 1)}, and it takes {ENOUGH}"
    return too_early if steps < ENOUGH else "No problem found"


def diagnose_prepared(prepared: Prepared) -> list[Finding]:
    """What can be said of a run before it starts: settings, data, rewards and the model's tokenizer; no weights are loaded."""
    from groupwise.models.devices import with_dtype

    # The settings as a run on this machine would have them.
    here = prepared.config.model_copy(update={"model": with_dtype(prepared.config.model)})
    return ordered([*ask("settings", here), *ask("problems", prepared.problems), *ask("rehearsal", Rehearsal(prepared))])


BY_NAME = {rule.name: rule for rule in RULES}
FEW = 4
"""Problems that rewards are tried on where the run follows."""


def check_before(prepared: Prepared) -> list[Finding]:
    """What a run looks at before it loads its weights: settings, and the rewards tried on a few made-up completions. The data are not
    searched for repeats and leaks."""
    return ordered([*ask("settings", prepared.config), *ask("rehearsal", Rehearsal(prepared, FEW))])


def refuse(findings: Iterable[Finding], config: Config) -> None:
    """Raise what is critical about settings and rewards, as the error of a run that is not begun.

    Rewards that fail where ``rewards.on_error`` is skip are no such thing: somebody has said what becomes of them.
    """
    told = [one for one in findings if one.severity == "critical" and BY_NAME[one.rule].subject in ("settings", "rehearsal")]
    told = [one for one in told if one.rule != "reward-fails" or config.rewards.on_error == "stop"]
    if not told:
        return
    kind = RewardError if told[0].rule.startswith("reward") else ConfigError
    more = f"{len(told) - 1} more of the kind; " if len(told) > 1 else ""
    raise kind(
        f"{told[0].summary}. {told[0].remedy} ({more}`groupwise doctor` says more; --no-check, in Python check=False, trains all the same)"
    )


def ask(subject: Subject, about: Any) -> list[Finding]:
    findings = (rule.examine(about) for rule in RULES if rule.subject == subject)
    return [finding for finding in findings if finding is not None]


def ordered(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


FIRST = 10
"""Steps before which nothing can be said."""
GROWTH = 1.5
"""Each look comes after this many times the steps of the one before: reading all over again costs little in the whole."""


class Watch:
    """Call it with a run's folder and step after each step; ``say`` gets a sentence about every new critical finding or warning.

    What it tells once it does not tell again. It never ends a run: where looking fails, it says so and stops looking.
    """

    def __init__(self, say: Callable[[str, str], None]) -> None:
        self.say = say
        self.next_look = FIRST
        self.told: set[str] = set()

    def before(self, prepared: Prepared) -> list[str]:
        """What a run that is about to begin should be told, a sentence each.

        Raises ConfigError or RewardError for what is critical.
        """
        findings = [one for one in check_before(prepared) if one.severity in ("critical", "warning")]
        refuse(findings, prepared.config)
        self.told |= {finding.rule for finding in findings}
        return [f"doctor, before the run: {one.severity}: {one.title}: {one.summary}. {one.remedy}" for one in findings]

    def __call__(self, folder: Path, step: int) -> None:
        if step < self.next_look:
            return
        self.next_look = int(step * GROWTH)
        try:
            findings = diagnose_run(read_run(folder))
        except Exception as error:
            self.next_look = 2**63
            self.say(f"the doctor cannot look at {folder} ({type(error).__name__}: {error})", "warning")
            return
        for finding in findings:
            if finding.rule not in self.told and finding.severity in ("critical", "warning"):
                self.told.add(finding.rule)
                self.say(sentence(finding, folder, step), finding.severity)


def sentence(finding: Finding, folder: Path, step: int) -> str:
    return f"doctor, step {step}: {finding.severity}: {finding.title}: {finding.summary} (groupwise doctor {folder})"
