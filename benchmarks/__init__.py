"""Groupwise measured side by side with what people use today, and against what the machine could do.

One command each, from the repository's root: ``python -m benchmarks.step``, ``.sampling``, ``.scaling``, ``.gpu``. Each prints a
table and, as its last line, one JSON object; ``benchmarks/RESULTS.md`` holds what was recorded.
"""
