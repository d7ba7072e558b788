"""The field's usual reading of GSM8K answers, rule for rule, so that figures can be laid beside published ones.

These are the two filters and the comparison of the task ``gsm8k`` (version 3.0) of EleutherAI's lm-evaluation-harness. Nothing else in
groupwise judges by them: they read ``#### 1.`` and ``$5`` as its authors do, and miss ``<answer>`` and fractions as they do.
"""

from __future__ import annotations

import re

__all__ = ["INVALID", "flexible_extract", "matches", "strict_match"]

INVALID = "[invalid]"
"""What both filters give where they find nothing."""
STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
IGNORED = tuple(re.compile(pattern) for pattern in (r",", r"\$", r"(?s).*#### ", r"\.$"))
"""Taken out of answer and reference before they are compared, in this order."""


def strict_match(text: str) -> str:
    """Filter ``strict-match``: the number after the *first* ``#### `` (with its one space), as it is written there."""
    found = STRICT.findall(text)
    return found[0].strip() if found else INVALID


def flexible_extract(text: str) -> str:
    """Filter ``flexible-extract``: the last number, or the last run of at least two of ``$``, digits, ``.`` and ``,``."""
    found = FLEXIBLE.findall(text)
    if not found:
        return INVALID
    long, short = found[-1]
    return (long or short).strip()


def matches(answer: str, reference: str) -> bool:
    """Metric ``exact_match`` of that task: equal as text, commas, ``$``, all up to ``#### ``, and a last full stop aside."""
    return _bare(answer) == _bare(reference)


def _bare(text: str) -> str:
    for pattern in IGNORED:
        text = pattern.sub("", text)
    return text.lower()
