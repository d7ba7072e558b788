"""What takes memory, and what lives together."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Item", "Phase"]


@dataclass(frozen=True, slots=True)
class Item:
    """Something that takes memory."""

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class Phase:
    """What lives at the fullest moment of a phase, largest first."""

    name: str
    items: tuple[Item, ...]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def cause(self) -> Item:
        """Its largest item."""
        return self.items[0]
