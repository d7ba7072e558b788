"""The records that flow through groupwise. Frozen, plain Python, no torch: every other room may import this one.

Problem --render--> Prompt --engine--> Completion x G --rewards--> Group --advantages, packing--> update
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, Literal, TypedDict, get_args, get_origin, get_type_hints

__all__ = [
    "CUT_SHORT", "FAILURES", "CallFailure", "Completion", "FinishReason", "Group", "Message", "Problem", "Prompt", "StepScores",
    "ToolCall", "Turn",
    "from_json", "number_occurrences",
]  # fmt: skip

FinishReason = Literal["stop", "length", "max_turns", "context_full", "environment_error", "timeout", "new_conversation"]
"""``stop``: the policy sampled one of the model's end tokens, and nothing answered it. ``length``: it hit the token limit first.
``max_turns``: what it did in its last turn would have been answered. ``context_full``: the answer did not fit within the token limit.
``environment_error`` and ``timeout``: the environment raised, or took too long. ``new_conversation``: an agent's program asked
about something else than how its conversation goes on."""
CUT_SHORT: dict[str, str] = {
    "length": "cut at the token limit", "max_turns": "cut at the limit of turns", "context_full": "no room for what came back",
    "environment_error": "the environment failed", "timeout": "the environment took too long",
    "new_conversation": "the agent asked about something else",
}  # fmt: skip
"""What people read of every reason but ``stop``."""
FAILURES: tuple[FinishReason, ...] = ("environment_error", "timeout", "new_conversation")
"""After which nobody knows what an episode was worth."""
CallFailure = Literal["invalid", "raised", "timed_out"]
"""``invalid``: nothing was called, since the call could not be read or there is no such tool or argument."""


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


def number_occurrences(prompts: Iterable[Prompt]) -> list[Prompt]:
    """The same prompts, those of a problem that comes up again numbered by ``occurrence``: else its completions would be the same again."""
    seen: Counter[str] = Counter()
    out = []
    for prompt in prompts:
        again, seen[prompt.problem.id] = seen[prompt.problem.id], seen[prompt.problem.id] + 1
        out.append(replace(prompt, occurrence=again) if again != prompt.occurrence else prompt)
    return out


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool in an episode, and what came back."""

    name: str
    arguments: Mapping[str, Any]
    result: str
    """What the policy was told: the result as text, or what went wrong."""
    failure: CallFailure | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One part of an episode: tokens that the policy sampled (``assistant``), or that it was given (any other role)."""

    role: str
    text: str
    """Without special tokens; of a given turn the content alone, without what the chat template puts around it."""
    tokens: int
    """How many of the completion's tokens are its own: what the template puts around the turn included."""
    calls: tuple[ToolCall, ...] = ()
    """Those that the policy made in this turn."""
    reward: float | None = None
    """What an environment gave for this turn."""
    rewritten: bool = False
    """Whether the tokens of a given turn are the whole conversation up to the policy's next turn, since the chat template writes the past
    otherwise now. Nothing after them sees the prompt, or the completion's tokens before them."""

    @property
    def sampled(self) -> bool:
        return self.role == "assistant"


@dataclass(frozen=True, slots=True)
class Completion:
    """What followed one prompt. A token is trained because the policy sampled it, the stop token included: masks come from provenance,
    never from a comparison with a pad id. In an episode of several turns the tokens between the policy's turns were given."""

    text: str
    """``token_ids`` decoded without special tokens."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability of each sampled token under the distribution it was drawn from, in nats; as long as ``token_ids``. 0 for a token
    that was given."""
    finish_reason: FinishReason
    sample: int = 0
    """Index within the group, 0 to G - 1; part of the completion's seed."""
    policy_version: int = 0
    """How many optimiser steps the sampling weights had seen."""
    temperature: float = 1.0
    """At which it was sampled; its log-probabilities are scored at the same."""
    turns: tuple[Turn, ...] = ()
    """The turns of an episode, which the tokens are divided among in order; empty where every token was sampled in one turn."""
    reward: float | None = None
    """What the environment gave for the whole episode; None where there is none, or where it failed."""

    @property
    def stopped(self) -> bool:
        """Whether it ended by itself, and not at a limit."""
        return self.finish_reason == "stop"

    @property
    def failed(self) -> bool:
        """Whether the environment failed."""
        return self.finish_reason in FAILURES

    @property
    def sampled(self) -> tuple[bool, ...]:
        """Whether the policy sampled each token."""
        if not self.turns:
            return (True,) * len(self.token_ids)
        return tuple(turn.sampled for turn in self.turns for _ in range(turn.tokens))

    @property
    def segments(self) -> tuple[int, ...]:
        """For each token, which sample of the completion it belongs to. The first follows the prompt; each further one begins with a
        rewritten history, which is its prompt."""
        numbers = accumulate(turn.rewritten for turn in self.turns)
        return tuple(n for turn, n in zip(self.turns, numbers, strict=True) for _ in range(turn.tokens)) or (0,) * len(
            self.token_ids
        )

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy sampled."""
        return sum(turn.tokens for turn in self.turns if turn.sampled) if self.turns else len(self.token_ids)

    @property
    def answer(self) -> str:
        """What is judged: the text of the policy's last turn, so that nothing that a tool returned counts as the policy's own."""
        return next((turn.text for turn in reversed(self.turns) if turn.sampled), self.text)

    @property
    def messages(self) -> list[Message]:
        """The completion as a conversation that follows the prompt's."""
        if not self.turns:
            return [{"role": "assistant", "content": self.text}]
        return [{"role": turn.role, "content": turn.text} for turn in self.turns]

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """All calls of tools, in order."""
        return tuple(call for turn in self.turns for call in turn.calls)


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

    ``rewards[i]`` is the weighted sum over ``shaped`` for completion ``i``, normalised and clipped where ``rewards.normalise`` and
    ``rewards.clip`` say so, plus the rewards of its steps. ``components[name][i]`` is one function's own score as it gave it, ``None``
    where it says that it does not apply.
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
    shaped: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """The scores of completions as wholes that ``rewards`` adds up: after each function's clip and normalising, before its weight."""

    @property
    def outcomes(self) -> tuple[float, ...]:
        """What completions as wholes are compared by."""
        return self.rewards if self.outcome_rewards is None else self.outcome_rewards

    @property
    def has_variance(self) -> bool:
        """False where all completions, and all their steps, scored the same: every group-relative advantage is 0 and nothing can be
        learnt."""
        return max(self.outcomes) - min(self.outcomes) > 1e-9 or any(s.weight and s.vary for s in self.process.values())


_fields_of = cache(get_type_hints)


def from_json(kind: Any, value: Any) -> Any:
    """What `dataclasses.asdict` and JSON made of a record as the record again: ``kind`` is its class, or a tuple or mapping of such.

    >>> from_json(StepScores, {"weight": 1.0, "steps": [[[4, 1.0]], []]})
    StepScores(weight=1.0, steps=(((4, 1.0),), ()))
    """
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        return kind(**{name: from_json(_fields_of(kind)[name], inner) for name, inner in value.items()})
    inside = get_args(kind)
    if get_origin(kind) is tuple:
        plain = inside[0] in (int, float)  # token ids, of which there are many
        return tuple(value) if plain else tuple(from_json(inside[0], inner) for inner in value)
    if get_origin(kind) is Mapping:
        return {name: from_json(inside[1], inner) for name, inner in value.items()}
    if isinstance(value, list) and type(None) in inside:
        return from_json(inside[0], value)
    return value
