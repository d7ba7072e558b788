"""The records that flow through groupwise. Frozen, plain Python, no torch: every other room may import this one.

Problem --render--> Prompt --engine--> Completion x G --rewards--> Group --advantages, packing--> update
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict

__all__ = ["Completion", "FinishReason", "Group", "Message", "Problem", "Prompt", "StepScores", "told_apart"]

FinishReason = Literal["stop", "length"]
"""``stop``: the policy sampled one of the model's end tokens. ``length``: it hit the token limit first."""


class Message(TypedDict):
    """One turn of a conversation, in the form chat templates take: ``{"role": "user", "content": "2 + 2?"}``."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with a checkable answer.

    >>> Problem(id="gsm8k:train:0", question="Natalia sold clips to 48 of her friends ...", answer="72")
    """

    id: str
    """Unique and stable: seeds, data order and per-example records are derived from it."""
    question: str | Sequence[Message]
    """Plain text, or a conversation that already ends with the user's turn."""
    answer: str
    """The reference answer after extraction (``"72"``, not the worked solution)."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The row's other columns; reward functions receive them by name."""
    also: tuple[str, ...] = ()
    """Further reference answers: an answer that equals any one of them is as right as one that equals ``answer``."""

    @property
    def accepted(self) -> tuple[str, ...]:
        """Every reference answer, ``answer`` first."""
        return (self.answer, *self.also)

    @property
    def expected(self) -> str:
        """The reference for a person to read: ``"2/3"``, or ``"2/3 or 0.667"`` where there are several."""
        return " or ".join(self.accepted)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A problem rendered for one model: exactly the token ids that the policy is conditioned on."""

    problem: Problem
    text: str
    token_ids: tuple[int, ...]
    messages: tuple[Message, ...] | None = None
    """The conversation behind ``text`` when the chat template was used; ``None`` for plain styles."""
    occurrence: int = 0
    """How often the problem stands before this in the same batch; part of its completions' seeds."""


def told_apart(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The same prompts, those of a problem that comes up again numbered by ``occurrence``: else its completions would be the same again."""
    seen: Counter[str] = Counter()
    out = []
    for prompt in prompts:
        again, seen[prompt.problem.id] = seen[prompt.problem.id], seen[prompt.problem.id] + 1
        out.append(replace(prompt, occurrence=again) if again != prompt.occurrence else prompt)
    return out


@dataclass(frozen=True, slots=True)
class Completion:
    """What the policy sampled for one prompt. Every token in ``token_ids`` was sampled, the stop token included, and so every
    token is trained: masks come from provenance, never from a comparison with a pad id."""

    text: str
    """``token_ids`` decoded without special tokens."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token under the distribution it was drawn from, in nats; as long as ``token_ids``."""
    finish_reason: FinishReason
    sample: int = 0
    """Index within the group, 0 to G - 1; part of the completion's seed."""
    policy_version: int = 0
    """How many optimiser steps the sampling weights had seen."""
    temperature: float = 1.0
    """At which it was sampled; its log-probabilities are scored at the same."""

    @property
    def stopped(self) -> bool:
        return self.finish_reason == "stop"


@dataclass(frozen=True, slots=True)
class StepScores:
    """What one reward function gave to the steps of a group's completions: process supervision.

    >>> StepScores(weight=1.0, steps=(((4, 1.0), (9, 0.0)), ((6, 1.0),))).vary
    True
    """

    weight: float
    steps: tuple[tuple[tuple[int, float], ...], ...]
    """By completion: (index of the step's last token, reward); empty where it has no steps."""

    @property
    def vary(self) -> bool:
        """False where all steps of the group have one reward: compared with each other they teach nothing."""
        rewards = [r for completion in self.steps for _, r in completion]
        return bool(rewards) and max(rewards) - min(rewards) > 1e-9


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt with its G completions and their scores: the unit of GRPO. It is never split before advantages are computed.

    ``rewards[i]`` is the weighted sum over ``components`` for completion ``i``; ``components[name][i]`` is one reward
    function's own score before weighting, ``None`` where the function says that it does not apply.
    """

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: tuple[float, ...]
    components: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    process: Mapping[str, StepScores] = field(default_factory=dict)
    """Rewards of steps, by function. In ``components`` and ``rewards`` they count as their sum."""
    outcome_rewards: tuple[float, ...] | None = None
    """``rewards`` without those of steps; ``None`` where there are no steps."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """The reward functions' weights, by name."""

    @property
    def outcomes(self) -> tuple[float, ...]:
        """What completions as wholes are compared by."""
        return self.rewards if self.outcome_rewards is None else self.outcome_rewards

    @property
    def has_variance(self) -> bool:
        """False where all completions, and all their steps, scored the same: every group-relative advantage is 0 and nothing can be
        learnt."""
        return max(self.outcomes) - min(self.outcomes) > 1e-9 or any(s.weight and s.vary for s in self.process.values())
