"""Which problems a step works on: a pure function of the step's number, so that a resumed run goes on as if never stopped."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Sequence
from functools import lru_cache

__all__ = ["problems_for_step"]


def problems_for_step(count: int, prompts_per_step: int, step: int, seed: int, shuffle: bool = True) -> list[int]:
    """Indices below ``count`` of the problems of step ``step`` (from 0), ``prompts_per_step`` of them.

    Steps cut one endless sequence of epochs. Each epoch holds every problem once, in an order drawn from (seed, epoch); with
    ``shuffle`` off it is always the file's order. Where a step reaches into the next epoch, that epoch begins with problems that
    the step does not hold yet: nothing is repeated within a step unless there are fewer problems than places.
    """
    assert count > 0
    assert prompts_per_step > 0
    assert step >= 0
    first = step * prompts_per_step
    positions = range(first, first + prompts_per_step)
    if not shuffle:
        return [position % count for position in positions]
    if count >= 2 * prompts_per_step:
        orders = {e: _epoch(count, prompts_per_step, seed, e) for e in {positions[0] // count, positions[-1] // count}}
        return [orders[position // count][position % count] for position in positions]
    return _small(count, prompts_per_step, step, seed)


def _epoch(count: int, prompts_per_step: int, seed: int, epoch: int) -> Sequence[int]:
    """One epoch's order. Only its first ``prompts_per_step`` places depend on the epoch before, whose last are as drawn."""
    order = _permutation(count, seed, epoch)
    carried = epoch * count % prompts_per_step
    if carried == 0:
        return order
    tail = _permutation(count, seed, epoch - 1)[count - carried :]
    return _fresh_first(order[:prompts_per_step], tail) + order[prompts_per_step:]


def _small(count: int, prompts_per_step: int, step: int, seed: int) -> list[int]:
    """Fewer than two steps' worth of problems: epochs are so short that each depends on the whole one before."""
    first = step * prompts_per_step
    last_epoch = (first + prompts_per_step - 1) // count
    # The chain starts again wherever an epoch and a step begin together, so there is no need to walk it from epoch 0.
    cycle = prompts_per_step // math.gcd(count, prompts_per_step)
    taken: list[int] = []
    order: tuple[int, ...] = ()
    for epoch in range(first // count // cycle * cycle, last_epoch + 1):
        carried = epoch * count % prompts_per_step
        tail = order[max(0, count - carried) :] if carried else ()
        order = _fresh_first(_permutation(count, seed, epoch), tail)
        begin = epoch * count
        taken += [order[p - begin] for p in range(max(first, begin), min(first + prompts_per_step, begin + count))]
    return taken


def _fresh_first(order: tuple[int, ...], held: Collection[int]) -> tuple[int, ...]:
    held = set(held)
    return tuple(i for i in order if i not in held) + tuple(i for i in order if i in held)


@lru_cache(maxsize=256)
def _permutation(count: int, seed: int, epoch: int) -> tuple[int, ...]:
    digest = hashlib.blake2b(f"problem order/{seed}/{epoch}".encode(), digest_size=16).digest()
    rng = random.Random(int.from_bytes(digest, "big"))
    order = list(range(count))
    # Fisher and Yates by hand: random() is the one method whose numbers Python promises to keep between versions.
    for last in range(count - 1, 0, -1):
        other = min(int(rng.random() * (last + 1)), last)
        order[last], order[other] = order[other], order[last]
    return tuple(order)
