"""What little is random beside problem order and sampling, seeded by what it is for: so a resumed run draws the same numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from groupwise.rewards import process_worker

__all__ = ["seed_generators", "seed_noise"]


def seed_generators(seed: int, step: int) -> None:
    """Seed the generators of Python, numpy and torch for one step: tools and environments that draw from them repeat their numbers, as
    far as calls side by side can. For reward functions the suite seeds them by group (``rewards/suite.py``)."""
    process_worker.seed_generators(_number(f"step/{seed}/{step}"))


def seed_noise(noisy: Iterable[Any], seed: int, *what: int) -> None:
    """Seed the only noise of a batch's updates, in those that have any: a scorer's dropout, an optimiser's stochastic rounding."""
    for one in noisy:
        if (seed_one := getattr(one, "seed_noise", None)) is not None:
            seed_one(_number(f"update/{seed}/{'/'.join(map(str, what))}"))


def _number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")
