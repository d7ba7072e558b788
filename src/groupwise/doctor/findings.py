"""What the doctor says: a finding is a fault with its evidence and its remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

__all__ = ["SEVERITIES", "Evidence", "Example", "Finding", "Severity"]

Severity = Literal["critical", "warning", "note", "normal"]
SEVERITIES: tuple[Severity, ...] = ("critical", "warning", "note", "normal")
"""``critical``: the run cannot learn, or learns something else. ``warning``: likely to go wrong. ``note``: worth knowing.
``normal``: looks odd and is right."""


@dataclass(frozen=True, slots=True)
class Example:
    """A completion, problem or row that shows the fault."""

    where: str
    """Such as ``step 12, problem gsm8k:train:7, sample 3``."""
    text: str
    remark: str = ""
    """Such as ``reward 2.8, wrong``."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a rule found. ``summary`` is one sentence with the numbers in it."""

    summary: str
    steps: tuple[int, int] | None = None
    """First and last step that it was seen at."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    examples: tuple[Example, ...] = ()
    """At most three."""
    severity: Severity | None = None
    """Where it differs from the rule's own."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of a diagnosis: the rule's words and what it found here."""

    rule: str
    title: str
    severity: Severity
    summary: str
    meaning: str
    remedy: str
    steps: tuple[int, int] | None
    numbers: Mapping[str, float]
    examples: tuple[Example, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
