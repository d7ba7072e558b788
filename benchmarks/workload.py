"""Workload W: a step of GRPO on word problems as long as GSM8K's, with the embedded model.

4 prompts of 100 to 174 tokens x 8 completions of at most 128 tokens (about 95 on average), temperature 1, mu = 1, beta = 0.04.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.config.load import build_config
from groupwise.config.schema import Config
from groupwise.data.prompts import render
from groupwise.types import Problem, Prompt

__all__ = ["SYSTEM", "even_tokens", "problems", "prompts", "step_config"]

SYSTEM = "Reason in <reasoning></reasoning>, then put only the final answer in <answer></answer>."
"""Not the package's default, which may change: figures of this workload are compared over versions."""

_STORIES = (
    "A bakery sells {a} loaves of bread every morning and {b} every afternoon. Each loaf costs {c} dollars, and flour and wood for "
    "the oven cost 90 dollars a day. How many dollars does the bakery keep after {d} days on which nothing is left over?",
    "Mira collects stamps. She starts the year with {a} stamps, and in each of the first {d} months she buys {b} more. In summer "
    "she gives {c} stamps to each of her two brothers, and her grandmother then doubles what is left. How many stamps does Mira "
    "have in the end?",
    "A school rents buses for a trip to the lake. There are {a} pupils in the lower years and {b} in the upper years, and {c} "
    "teachers come along. Every bus has {d} seats, none of which may be taken by the driver. A bus costs 120 dollars for the day, "
    "and the lake asks for 3 dollars from every pupil, but nothing from teachers. How many dollars does the whole trip cost?",
    "Tomas and Lena paint a fence of {a} meters together. Tomas paints {c} meters an hour, and Lena, who began when Tomas had "
    "already worked for one hour, paints 2 meters an hour more than he does. After {d} hours of Tomas's work they stop for lunch, "
    "which takes 45 minutes. The neighbour then lends them a third brush and helps at the pace of Tomas. Paint for a meter costs "
    "{b} cents. Nobody stops before the last meter is dry. "
    "How many dollars does the paint for the part that was finished before lunch cost, rounded to whole dollars?",
)
_ENDING = " Just the number, please."
"""With it the model's answers are about as long as those to GSM8K's problems: 95 tokens on average, ragged, more than half of them cut."""
_STEPS = (7, 5, 3, 2)
"""How far each number of a story moves from one variant to the next."""


def problems(count: int) -> list[Problem]:
    """``count`` different problems: the four stories, again and again with other numbers."""
    out = []
    for index in range(count):
        variant = index // len(_STORIES)
        a, b, c, d = (base + variant * step for base, step in zip((120, 45, 6, 4), _STEPS, strict=True))
        question = _STORIES[index % len(_STORIES)].format(a=a, b=b, c=c, d=d) + _ENDING
        out.append(Problem(f"story-{index}", question, str(a)))
    return out


def prompts(tokenizer: Any, count: int) -> list[Prompt]:
    """The problems as the policy sees them."""
    config = step_config("", groups=max(1, count))
    return [render(problem, tokenizer, config.prompt, SYSTEM) for problem in problems(count)]


def even_tokens(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """A reward that costs nothing and differs inside every group: the share of even token ids. Both sides score with it."""
    return [sum(token % 2 == 0 for token in ids) / max(1, len(ids)) for ids in completion_ids]


def step_config(
    model: str,
    *,
    groups: int = 4,
    completions: int = 8,
    max_tokens: int = 128,
    rank: int = 0,
    device: str = "cpu",
    ours: Sequence[str] = (),
) -> Config:
    """W's settings. The learning rate is far below what fp32 masters can hold: the optimiser does all its work, but the
    policy stays the model it is, so that every step of a run samples from the same distribution. ``rank``: of an adapter, in place of all
    weights; 0 for none. ``ours``: further settings, as ``section.name=value``."""
    return build_config(
        {
            "model": {"name": model or "smollm2-135m-instruct", "device": device, "lora": {"rank": rank} if rank else None},
            "prompt": {"style": "chat"},
            "rollout": {
                "prompts_per_step": groups,
                "completions_per_prompt": completions,
                "max_completion_tokens": max_tokens,
                "temperature": 1.0,
            },
            "algorithm": {
                "preset": "grpo",
                "kl": {"beta": 0.04, "skip_zero_variance": False},
                "updates_per_batch": 1,
            },  # as TRL does
            "optimizer": {"learning_rate": 1e-12},
        },
        ours,
    )
