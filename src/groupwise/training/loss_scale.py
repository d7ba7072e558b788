"""Loss scaling for fp16 weights: gradients below 6e-8 would vanish in fp16, and above 65,504 overflow."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LossScale"]

_START, _LEAST, _MOST = 2.0**16, 1.0, 2.0**24


@dataclass
class LossScale:
    """What the loss is multiplied by before the backward pass; the gradients' sums are divided by it again (Micikevicius et al., arXiv
    1710.03740). An overflow halves it and the update is left out; ``patience`` updates without one double it."""

    value: float = _START
    made_in_a_row: int = 0
    patience: int = 200

    @property
    def can_recover(self) -> bool:
        """Whether a smaller scale may still help against gradients that are not finite."""
        return self.value > _LEAST

    def update(self, finite: bool) -> None:
        """After each attempt at an update."""
        self.made_in_a_row = self.made_in_a_row + 1 if finite else 0
        if not finite:
            self.value = max(_LEAST, self.value / 2)
        elif self.made_in_a_row == self.patience:
            self.value, self.made_in_a_row = min(_MOST, self.value * 2), 0
