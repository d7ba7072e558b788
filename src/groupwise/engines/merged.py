"""Sampling from a base with an adapter at the built-in engine's speed: over a copy of the weights into which the adapter is merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.models.adapters import merge_into
from groupwise.models.decoder import Decoder

__all__ = ["MergedEngine"]


class MergedEngine(BuiltinEngine):
    """A ``BuiltinEngine`` over ``plain``, a copy of ``adapted``'s base, which follows the adapter at every ``refresh``.

    It costs the memory of the base once more. A merged weight is rounded once where the module adds two products, so sampling
    and training differ by rounding, which ``policy/sampler_mismatch`` shows.
    """

    holds_weights = True

    def __init__(self, adapted: Any, plain: Any, tokenizer: Any, end_token_ids: Sequence[int], *, max_rows: int = 256) -> None:
        super().__init__(Decoder(plain, trainable=False), tokenizer, end_token_ids, max_rows=max_rows)
        self.adapted, self.plain = adapted, plain
        self.refresh(0)

    def refresh(self, policy_version: int) -> None:
        """The adapter has changed: merge it anew."""
        merge_into(self.adapted, self.plain)
        super().refresh(policy_version)
