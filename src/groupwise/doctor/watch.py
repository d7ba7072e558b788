"""The doctor beside a run: now and then it looks at what has been written so far, and says what is new."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from groupwise.doctor.examine import check_before, diagnose_run, refuse
from groupwise.doctor.findings import Finding
from groupwise.tracking.reading import read_run
from groupwise.training.setup import Prepared

__all__ = ["Watch"]

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
        found = [one for one in check_before(prepared) if one.severity in ("critical", "warning")]
        refuse(found, prepared.config)
        self.told |= {finding.rule for finding in found}
        return [f"doctor, before the run: {one.severity}: {one.title}: {one.summary}. {one.remedy}" for one in found]

    def __call__(self, folder: Path, step: int) -> None:
        if step < self.next_look:
            return
        self.next_look = int(step * GROWTH)
        try:
            found = diagnose_run(read_run(folder))
        except Exception as error:
            self.next_look = 2**63
            self.say(f"the doctor cannot look at {folder} ({type(error).__name__}: {error})", "warning")
            return
        for finding in found:
            if finding.rule not in self.told and finding.severity in ("critical", "warning"):
                self.told.add(finding.rule)
                self.say(sentence(finding, folder, step), finding.severity)


def sentence(finding: Finding, folder: Path, step: int) -> str:
    return f"doctor, step {step}: {finding.severity}: {finding.title}: {finding.summary} (groupwise doctor {folder})"
