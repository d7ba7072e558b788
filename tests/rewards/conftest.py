"""Prompts and completions to score, in the chat form and in the plain one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from groupwise.config.schema import RewardFunctionConfig, RewardsConfig
from groupwise.rewards import RewardSuite
from groupwise.types import Completion, Problem, Prompt

RIGHT = "<reasoning>\n48 / 2 = 24\n</reasoning>\n<answer>\n72\n</answer>\n"


def make_prompt(answer: str = "72", chat: bool = True, columns: Mapping[str, Any] | None = None) -> Prompt:
    problem = Problem("gsm8k:train:0", "How many clips?", answer, columns or {})
    messages = ({"role": "system", "content": "Think."}, {"role": "user", "content": "How many clips?"}) if chat else None
    return Prompt(problem, "Think.How many clips?", (1, 2, 3), messages)


def make_completions(*texts: str) -> list[Completion]:
    return [
        Completion(text, tuple(range(5 + i)), (-0.5,) * (5 + i), "stop" if i else "length", i) for i, text in enumerate(texts)
    ]


def make_suite(functions: Mapping[str, Callable[..., Any]], style: str = "xml", **settings: Any) -> RewardSuite:
    """A suite of Python functions only, each with weight 1."""
    entries = [RewardFunctionConfig(function=name) for name in functions]
    return RewardSuite.from_config(RewardsConfig(functions=entries, **settings), style, functions)


@pytest.fixture
def reward_file(tmp_path):
    def write(text: str, name: str = "mine.py"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write
