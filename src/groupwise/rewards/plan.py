"""Which calls score a batch of groups, and what each call is told."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from groupwise.errors import RewardError
from groupwise.rewards.load import LoadedReward
from groupwise.types import Completion, Problem, Prompt

__all__ = ["Batch", "Call", "Teller", "plan_calls", "require_columns"]

Batch = Sequence[tuple[Prompt, Sequence[Completion]]]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one function, and the completions, as (group, completion), that it gives scores to."""

    reward: LoadedReward
    targets: tuple[tuple[int, int], ...]

    @property
    def groups(self) -> list[int]:
        return list(dict.fromkeys(group for group, _ in self.targets))

    def where(self, batch: Batch) -> str:
        """The subject of a sentence about this call."""
        if self.reward.scope == "batch":
            return f"reward {self.reward.name!r} on the batch of {len(self.targets)} completions"
        group, member = self.targets[0]
        which = f"completion {member} of " if self.reward.scope == "completion" else ""
        return f"reward {self.reward.name!r} on {which}problem {batch[group][0].problem.id!r}"


def plan_calls(rewards: Sequence[LoadedReward], batch: Batch) -> Iterator[Call]:
    """Every call that the batch takes: those that see all of it first, then group by group, in the order of ``rewards``."""
    members = [tuple((g, m) for m in range(len(completions))) for g, (_, completions) in enumerate(batch)]
    for reward in rewards:
        if reward.scope == "batch" and batch:
            yield Call(reward, tuple(target for group in members for target in group))
    for group in members:
        for reward in rewards:
            if reward.scope == "group":
                yield Call(reward, group)
            elif reward.scope == "completion":
                yield from (Call(reward, (target,)) for target in group)


@dataclass
class Teller:
    """What reward functions are told beside the data's columns."""

    answer_style: str
    max_completion_tokens: int | None = None
    """The run's limit on a completion; None where nobody said, and then it is not offered."""

    def names(self, problem: Problem) -> list[str]:
        """The keywords that a function may ask for on this problem."""
        return list(self._keywords([], list(problem.columns)))

    def keywords(self, call: Call, batch: Batch) -> dict[str, Any]:
        """The call's keywords, as fresh lists with one entry per completion: a function that changes them disturbs no other.

        Our own keywords win over columns of the same name; so ``answer`` is the extracted reference, whatever the row calls so.
        """
        columns = dict.fromkeys(name for group in call.groups for name in batch[group][0].problem.columns)
        for group in call.groups:
            require_columns(call.reward, self.names(batch[group][0].problem))
        told = self._keywords([(g, batch[g][0], batch[g][1][m]) for g, m in call.targets], list(columns))
        return call.reward.select(told)

    def _keywords(self, chosen: Sequence[tuple[int, Prompt, Completion]], columns: Sequence[str]) -> dict[str, Any]:
        told: dict[str, Any] = {name: [p.problem.columns.get(name) for _, p, _ in chosen] for name in columns}
        told |= {
            "prompts": [p.text if p.messages is None else [dict(m) for m in p.messages] for _, p, _ in chosen],
            "completions": [c.text if p.messages is None else [{"role": "assistant", "content": c.text}] for _, p, c in chosen],
            "answer": [p.problem.answer for _, p, _ in chosen],
            "accepted_answers": [p.problem.accepted for _, p, _ in chosen],
            "answer_style": [self.answer_style for _ in chosen],
            "completion_ids": [list(c.token_ids) for _, _, c in chosen],
            "finish_reason": [c.finish_reason for _, _, c in chosen],
            "group_index": [g for g, _, _ in chosen],
        }
        if self.max_completion_tokens is not None:
            told["max_completion_tokens"] = [self.max_completion_tokens for _ in chosen]
        return told


def require_columns(reward: LoadedReward, offered: Sequence[str]) -> None:
    """Raise ``RewardError`` where the function needs a keyword that is not among ``offered``."""
    missing = reward.missing(offered)
    if missing:
        raise RewardError(
            f"reward {reward.name!r} needs {missing[0]!r}, but the data has no such column "
            f"(offered are {', '.join(sorted(offered))}); give the parameter a default, set it under the function's arguments, "
            "or use data with that column"
        )
