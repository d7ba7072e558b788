"""The doctor: what is wrong with a run or its settings, with the evidence and the remedy."""

from groupwise.doctor.examine import Watch, check_before, diagnose_prepared, diagnose_run, refuse, verdict_on
from groupwise.doctor.findings import SEVERITIES, Evidence, Example, Finding, Severity
from groupwise.doctor.rules import RULES, Rule

__all__ = [
    "RULES",
    "SEVERITIES",
    "Evidence",
    "Example",
    "Finding",
    "Rule",
    "Severity",
    "Watch",
    "check_before",
    "diagnose_prepared",
    "diagnose_run",
    "refuse",
    "verdict_on",
]
