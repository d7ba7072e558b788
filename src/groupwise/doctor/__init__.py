"""The doctor: what ails a run or its settings, with the evidence and the remedy."""

from groupwise.doctor.examine import diagnose_prepared, diagnose_run, diagnose_settings
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
    "diagnose_prepared",
    "diagnose_run",
    "diagnose_settings",
]
