"""MATH's training problems of levels 1 to 3, as rows for ``data.source``: what a model of 1.5B can learn from.

    export GROUPWISE_DATA=FOLDER    # with train_math.json, or competition-math/train_math.json, and math500_test.jsonl beside it
    groupwise train gsm8k-1.5b-cpu data.source=experiments.math_levels:up_to_3 data.eval_source=math500 data.on_bad_answer=drop \\
        prompt.system=boxed 'rewards.functions=[correctness, boxed_format]' rollout.max_completion_tokens=512

The file is that of DeepScaleR (agentica-project/deepscaler, MIT): 7,474 problems of MATH with the level as ``difficulty``. None of the
500 that MATH-500 judges by is among them; a dry run finds three in nearly the same words.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["LEVELS", "up_to_3"]

LEVELS = (1, 2, 3)
FILE = "train_math.json"


def up_to_3() -> list[dict[str, Any]]:
    """Rows with ``problem``, ``answer``, ``difficulty`` and ``type``. Raises FileNotFoundError where GROUPWISE_DATA has no such file."""
    folder = Path(os.environ.get("GROUPWISE_DATA", "."))
    found = [path for path in (folder / FILE, folder / "competition-math" / FILE) if path.is_file()]
    if not found:
        raise FileNotFoundError(
            f"no {FILE} in {folder.resolve()} or its competition-math/: set GROUPWISE_DATA to the folder that has it"
        )
    rows: list[dict[str, Any]] = json.loads(found[0].read_text(encoding="utf-8"))
    return [row for row in rows if row["difficulty"] in LEVELS]
