"""What a run divides over its processes (``training.sharding``), and what comes together for a moment.

``zero2`` divides gradients, masters and moments (arXiv 1910.02054); ``zero3`` and ``fsdp2`` (arXiv 2304.11277) divide the weights too,
and the reference's, gather them layer by layer in the passes, and whole while sampling, where every token needs all of them. Of an adapter
on a base the base is divided alone, and while sampling its layers are there merged, and not as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from groupwise.config.combinations import refuse_undividable
from groupwise.errors import ConfigError
from groupwise.planner.item import Item
from groupwise.planner.setup import Setup

__all__ = [
    "Part", "divided", "exchange_buffers", "exchange_bytes", "flat_gradient", "gathered_for_passes", "gathered_for_sampling",
    "refused", "scattered", "share", "shared_formula",
]  # fmt: skip

Part = Literal["weights", "gradients", "optimiser"]
_BUCKET_ELEMENTS = 16 * 2**20
"""Of ``distributed/world.py``."""
_ZERO_BUCKET_ELEMENTS = 50_000_000
"""Of ``training/sharding/zero_engine.py``."""


@dataclass(frozen=True, slots=True)
class _Mode:
    weights: bool
    gradients: bool = True
    optimiser: bool = True


_MODES = {"zero2": _Mode(weights=False), "zero3": _Mode(weights=True), "fsdp2": _Mode(weights=True)}


def divided(setup: Setup, part: Part) -> bool:
    """Whether each process holds only its share of ``part``."""
    mode = _MODES.get(setup.sharding)
    if setup.adapted and part != "weights":
        return False
    return mode is not None and bool(getattr(mode, part))


def share(setup: Setup, part: Part, total: int) -> int:
    """Bytes of ``total`` that fall to one process."""
    return -(-total // setup.world_size) if divided(setup, part) else total


def shared_formula(setup: Setup, part: Part, formula: str) -> str:
    return f"{formula} / n" if divided(setup, part) else formula


def gathered_for_passes(setup: Setup) -> list[Item]:
    """What is whole during a pass though it is divided between passes: one layer, in the message and out of it, and both ends."""
    if not divided(setup, "weights"):
        return []
    whole = setup.weight_bytes * (2 * _layer(setup) + _ends(setup))
    return [Item("gathered weights", whole, "s (2 layers + embedding and head)")]


def gathered_for_sampling(setup: Setup) -> list[Item]:
    """All weights, beside what is held of them, for an engine that reads them; with an adapter what is before and after the layers."""
    if not divided(setup, "weights"):
        return []
    if setup.adapted:
        return [Item("gathered weights", setup.weight_bytes * _ends(setup), "s (embedding and head), while sampling")]
    return [Item("gathered weights", setup.weights, "s P, while sampling")]


def scattered(setup: Setup, at_the_end: bool) -> list[Item]:
    """The message that adds a layer's gradient up over the processes, in fp32, and what is kept of it; at the end, both ends'."""
    if not divided(setup, "gradients"):
        return []
    if setup.sharding != "fsdp2":
        unit = max(_ZERO_BUCKET_ELEMENTS, _ends(setup) if at_the_end else 0)
        return [Item("communication buffers", 4 * unit, "4 x the larger of 5 x 10^7 numbers and embedding and head")]
    unit = _ends(setup) if at_the_end else _layer(setup)
    return [
        Item("communication buffers", 4 * (unit + unit // setup.world_size), "4 (1 + 1/n) of a layer, or of embedding and head")
    ]


def flat_gradient(setup: Setup) -> list[Item]:
    """DeepSpeed's step makes one tensor of all gradients that fall to the process."""
    if setup.sharding not in ("zero2", "zero3") or not divided(setup, "gradients"):
        return []
    return [Item("flat gradient", 4 * -(-setup.trained // setup.world_size), "4 P / n, at the step")]


def refused(setup: Setup) -> bool:
    """Whether the trainer does not divide a run with these settings."""
    try:
        refuse_undividable(setup.config, setup.sharding, setup.shape.uncovered)
    except ConfigError:
        return True
    return False


def exchange_buffers(setup: Setup) -> list[Item]:
    """What processes that hold everything add their gradients up in: runs of them in fp32 (``distributed/world.py``)."""
    if setup.world_size == 1 or divided(setup, "gradients"):
        return []
    elements = min(setup.trained, max(_BUCKET_ELEMENTS, 0 if setup.adapted else setup.shape.head))
    return [Item("communication buffers", 4 * elements, "4 x the larger of 2^24 numbers and V D")]


def exchange_bytes(setup: Setup) -> float:
    """What one process sends in one update and the sampling before it. A ring sends (n - 1) / n of what it gathers or scatters."""
    ring = (setup.world_size - 1) / setup.world_size
    gradients = 4.0 * setup.trained
    if not divided(setup, "weights"):
        return ring * (gradients + setup.weight_bytes * setup.trained) if divided(setup, "gradients") else 2 * ring * gradients
    passes, whole = setup.passes, float(setup.weights)
    reference = (
        passes * whole if setup.config.algorithm.needs_reference else 0.0
    )  # also of a base, which is its adapter's reference
    added_up = passes * gradients if divided(setup, "gradients") else 2 * gradients
    return ring * (passes * 2 * whole + added_up + reference + whole)


def _layer(setup: Setup) -> int:
    """Weights of one layer."""
    return (setup.shape.parameters - _ends(setup)) // setup.shape.layers


def _ends(setup: Setup) -> int:
    """Weights of the embedding, the final norm, and an output head of its own."""
    return (1 if setup.shape.tied else 2) * setup.shape.head + setup.shape.width
