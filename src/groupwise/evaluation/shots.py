"""Worked examples before the question (few-shot prompts), as earlier turns of the conversation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from groupwise.config.schema import Config
from groupwise.data.answers import AnswerStyle
from groupwise.data.prompts import worked_completion
from groupwise.data.sources import load_problems, question_key
from groupwise.errors import DataError
from groupwise.types import Message, Problem

__all__ = ["choose_shots", "with_shots"]


def with_shots(problems: Sequence[Problem], config: Config, style: AnswerStyle) -> list[Problem]:
    """``problems`` with the same ``config.evaluation.shots`` worked examples before each question; unchanged at 0.

    Raises:
        DataError: the training problems, which the examples come from, are too few or cannot be read.
    """
    if config.evaluation.shots == 0:
        return list(problems)
    turns: list[Message] = []
    for shot in choose_shots(config, problems):
        turns += _conversation(shot)
        turns.append({"role": "assistant", "content": worked_completion(shot, style)})
    return [replace(problem, question=_after(turns, problem)) for problem in problems]


def choose_shots(config: Config, judged: Sequence[Problem]) -> list[Problem]:
    """Training problems in an order that depends on ``evaluation.seed`` and the questions alone; none that is itself judged."""
    wanted = config.evaluation.shots
    taken = {question_key(problem) for problem in judged}
    try:
        offered = load_problems(config.data).train
    except DataError as error:
        raise DataError(
            f"evaluation.shots is {wanted}, but there are no training problems to take worked examples from ({error}): name them "
            "with data.source and data.split, or set shots to 0"
        ) from error
    kept = [p for p in offered if question_key(p) not in taken]
    if len(kept) < wanted:
        raise DataError(
            f"evaluation.shots is {wanted}, but only {len(kept)} training problems of {config.data.source!r} are not judged "
            "themselves: name others with data.source, or lower shots"
        )
    return sorted(kept, key=lambda problem: _rank(problem, config.evaluation.seed))[:wanted]


def _rank(problem: Problem, seed: int) -> bytes:
    return hashlib.blake2b(f"shots/{seed}/{question_key(problem)}".encode(), digest_size=16).digest()


def _conversation(problem: Problem) -> list[Message]:
    question = problem.question
    return [{"role": "user", "content": question}] if isinstance(question, str) else list(question)


def _after(turns: Sequence[Message], problem: Problem) -> tuple[Message, ...]:
    """The examples, then the problem's own turns; a system turn of its own stays first."""
    own = _conversation(problem)
    system = [turn for turn in own[:1] if turn["role"] == "system"]
    return (*system, *turns, *own[len(system) :])
