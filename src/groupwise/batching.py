"""Cutting a batch into micro-batches by a token budget.

Where the cuts fall changes memory and speed, never the gradient: every token's weight in the loss is known before the first
backward pass. A group stays together where it fits, since its prompt is then computed once; a group beyond the budget is cut
between completions, and its prompt is computed once for each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["GroupPart", "cut_batch"]


@dataclass(frozen=True, slots=True)
class GroupPart:
    """Some completions of one group, by index; they share the group's prompt."""

    group: int
    members: tuple[int, ...]


def cut_batch(sizes: Sequence[tuple[int, Sequence[int]]], budget: int) -> list[list[GroupPart]]:
    """Micro-batches of at most ``budget`` tokens each, from ``(prompt tokens, [completion tokens, ...])`` for each group.

    A single completion that exceeds the budget with its prompt gets a micro-batch of its own: it cannot be cut.

    >>> cut_batch([(10, [5, 5]), (10, [5, 80])], budget=40)
    [[GroupPart(group=0, members=(0, 1)), GroupPart(group=1, members=(0,))], [GroupPart(group=1, members=(1,))]]
    """
    batches: list[list[GroupPart]] = [[]]
    room = budget
    for group, (prompt, completions) in enumerate(sizes):
        if prompt + sum(completions) > room and batches[-1] and prompt + sum(completions) <= budget:
            batches.append([])
            room = budget
        members: list[int] = []
        for index, length in enumerate(completions):
            needed = length if members else prompt + length
            if needed > room and (members or batches[-1]):
                if members:
                    batches[-1].append(GroupPart(group, tuple(members)))
                batches.append([])
                room, members = budget, []
                needed = prompt + length
            members.append(index)
            room -= needed
        if members:
            batches[-1].append(GroupPart(group, tuple(members)))
    return [batch for batch in batches if batch]
