"""The run's own record: ``metrics.jsonl``, ``completions.jsonl`` and the evaluations' files. Always on."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any

from groupwise.data.answers import AnswerStyle, grade
from groupwise.errors import TrainingError
from groupwise.tracking.base import EvaluationResult, TokenAdvantages
from groupwise.tracking.files import LineFile, json_line
from groupwise.tracking.run_folder import RunFolder
from groupwise.types import Completion, Group

__all__ = ["JsonlTracker"]

logger = logging.getLogger("groupwise")


class JsonlTracker:
    """Appends a line and hands it to the system, so that a run that is killed keeps every finished step.

    A disk that is full is told once: lines and evaluations wait in memory until there is room again.

    ``log_completions`` bounds how many groups of a step are written; 0 writes none. The first ``log_tokens`` of them are written
    with their tokens. With a ``style`` every completion is judged, so that a reader need not do it again.
    """

    def __init__(
        self, folder: RunFolder, log_completions: int = 4, log_tokens: int = 0, style: AnswerStyle | None = None
    ) -> None:
        self.folder = folder
        self.log_completions = log_completions
        self.log_tokens = log_tokens
        self.style = style
        self.made_s = time.monotonic()
        self.files: dict[Path, LineFile] = {}
        self.evaluations: list[EvaluationResult] = []
        """Evaluations that the disk has not taken yet."""
        self.told = False

    @cached_property
    def started_s(self) -> float:
        """When the run began, by this process's clock; found at the first step, since a resumed run is cut back after this is made."""
        return self.made_s - self.folder.elapsed_s()

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """``{"step": ..., "time_s": seconds since the run began, name: value ...}``; a value that is not finite is null."""
        self.append(self.folder.metrics, {"step": step, "time_s": round(time.monotonic() - self.started_s, 3), **metrics})

    def completions(
        self,
        step: int,
        groups: Sequence[Group],
        advantages: Sequence[Sequence[float]] | None = None,
        token_advantages: TokenAdvantages | None = None,
    ) -> None:
        for p, group in enumerate(groups[: self.log_completions]):
            name = group.prompt.problem.id
            before = sum(other.prompt.problem.id == name for other in groups[:p])
            rows = completion_rows(step, group, advantages[p] if advantages is not None else None, self.style, before)
            for g, (row, completion) in enumerate(zip(rows, group.completions, strict=True)):
                if p < self.log_tokens:
                    row |= token_columns(completion, (token_advantages or {}).get((p, g)))
                self.append(self.folder.completions, row)

    def evaluation(self, result: EvaluationResult) -> None:
        self.evaluations.append(result)
        self.catch_up()

    def close(self) -> None:
        """Raises:
        OSError, TrainingError: the disk is still full, and what waited is lost.
        """
        lost: Exception | None = None
        while self.files:
            try:
                self.files.popitem()[1].close()
            except OSError as error:
                lost = error
        self.write_evaluations()
        if lost is not None:
            raise lost

    def append(self, path: Path, row: Mapping[str, object]) -> None:
        file = self.files.setdefault(path, LineFile(path))
        file.waiting += json_line(row)
        self.catch_up()

    def catch_up(self) -> None:
        """Write what waits, as far as the disk takes it."""
        try:
            for file in self.files.values():
                file.flush()
            self.write_evaluations()
        except (OSError, TrainingError) as error:
            if not self.told:
                why = getattr(error, "strerror", None) or error
                logger.warning(
                    "records cannot be written to %s (%s): they wait in memory until there is room", self.folder.path, why
                )
            self.told = True
        else:
            if self.told:
                logger.warning("%s: there is room again, and every record is written", self.folder.path)
            self.told = False

    def write_evaluations(self) -> None:
        while self.evaluations:
            result = self.evaluations[0]
            self.folder.write_records(result.stage, result.mode, result.records)
            self.evaluations.pop(0)


def completion_rows(
    step: int, group: Group, advantages: Sequence[float] | None, style: AnswerStyle | None = None, occurrence: int = 0
) -> list[dict[str, Any]]:
    """One row per completion of a group. ``advantage`` is null where the caller did not say: it is never recomputed here.

    ``steps``, where a function rewarded some: (index of the step's last token, reward), by function. ``occurrence``, where the problem
    stands in the step already: how many of its groups come before.
    """
    return [
        {
            "step": step,
            "problem": group.prompt.problem.id,
            **({"occurrence": occurrence} if occurrence else {}),
            "sample": completion.sample,
            "prompt": group.prompt.text,
            "completion": completion.text,
            "expected": group.prompt.problem.expected,
            **({"accepted": list(group.prompt.problem.accepted)} if group.prompt.problem.also else {}),
            "reward": group.rewards[g],
            "components": {name: scores[g] for name, scores in group.components.items()},
            **({"steps": {name: scores.steps[g] for name, scores in group.process.items()}} if group.process else {}),
            "advantage": advantages[g] if advantages is not None else None,
            **(verdict(completion.answer, group.prompt.problem.accepted, style) if style else {}),
            **({"turns": [asdict(turn) for turn in completion.turns]} if completion.turns else {}),
            "finish_reason": completion.finish_reason,
            "tokens": len(completion.token_ids),
            "policy_version": completion.policy_version,
        }
        for g, completion in enumerate(group.completions)
    ]


def verdict(text: str, accepted: Sequence[str], style: AnswerStyle) -> dict[str, bool | None]:
    graded = grade(text, accepted, style)
    return {"strict": graded.strict, "lenient": graded.lenient}


def token_columns(completion: Completion, advantages: Sequence[float] | None = None) -> dict[str, Any]:
    """Ids, to three decimals the log-probabilities that they were sampled with, and their advantages where these differ: 0 for those that
    were given. ``advantages``: of the sampled tokens."""
    columns: dict[str, Any] = {
        "token_ids": list(completion.token_ids),
        "logprobs": [round(value, 3) for value in completion.logprobs],
    }
    if advantages:
        of_sampled = iter(advantages)
        columns["token_advantages"] = [float(f"{next(of_sampled) if own else 0.0:.4g}") for own in completion.sampled]
    return columns
