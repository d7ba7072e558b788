"""Dealing work so that all processes finish together."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["deal"]


def deal(costs: Sequence[float], hands: int) -> list[list[int]]:
    """Indices of ``costs`` for each of ``hands`` processes, ascending: greedy longest-first partition.

    A function of the costs alone, so that all processes deal alike without a word. The largest load is at most 4/3 of the best
    possible (R. L. Graham (1969), "Bounds on multiprocessing timing anomalies").

    >>> deal([5, 1, 4, 2], 2)
    [[0, 1], [2, 3]]
    """
    assert hands > 0
    loads = [(0.0, hand) for hand in range(hands)]
    dealt: list[list[int]] = [[] for _ in range(hands)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, hand = heapq.heappop(loads)
        dealt[hand].append(index)
        heapq.heappush(loads, (load + costs[index], hand))
    return [sorted(hand) for hand in dealt]
