"""What the ways of dividing whose passes speak to the other processes have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.distributed import World
from groupwise.errors import ConfigError
from groupwise.models.blocks import Blocks, copy_filled
from groupwise.models.decoder import Decoder
from groupwise.models.load import Policy
from groupwise.models.scorer import Scorer

__all__ = ["Divided", "lean"]

_IDLE = ([0], [[0]])
"""What a pass that computes nothing of use is about: a prompt of one token, and a completion of one."""


def lean(scorer: Scorer, way: str, model: str) -> Decoder:
    """``scorer`` itself, for a way that divides blocks. Raises ConfigError where the lean decoder does not cover the model."""
    if not isinstance(scorer, Decoder):
        raise ConfigError(
            f"training.sharding is {way}, which needs the lean decoder, and that does not cover {model}: use training.sharding=none"
        )
    return scorer


class Divided:
    """The base of such ways. Its subclasses offer the rest of ``distributed.sharding.Sharding``."""

    name: str
    divides_weights = True

    def __init__(self, scorer: Decoder, world: World) -> None:
        self.scorer, self.world = scorer, world
        self._idle = scorer.prepare([_IDLE])

    def backward(self, loss: Tensor) -> None:
        raise NotImplementedError

    @property
    def blocks(self) -> Blocks:
        """Whose tensors are divided: the policy's weights, or the frozen ones that its adapter is beside."""
        assert self.scorer.blocks is not None
        return self.scorer.blocks

    def gathered(self, module: nn.Module) -> AbstractContextManager[None]:
        """The tensors of ``blocks`` or of one of its layers, whole meanwhile. A meeting."""
        raise NotImplementedError

    def whole_weights(self) -> Mapping[str, Tensor]:
        """The weights of all blocks in the decoder's layout, by name, on the first process's CPU; nothing on the others. A meeting."""
        raise NotImplementedError

    @contextmanager
    def evened(self, scorer: Scorer, passes: int) -> Iterator[None]:
        missing = max(self.world.gather(passes)) - passes
        yield
        for _ in range(missing):
            found = scorer.logprobs(self._idle)
            if torch.is_grad_enabled():
                self.backward(found.sum() * 0.0)

    def sum_gradients(self, optimizer: Any) -> None:
        """The backward passes have done it."""

    def whole_policy(self, policy: Policy) -> Policy | None:
        weights = self.whole_weights()
        if not self.world.is_first:
            return None
        return replace(policy, model=copy_filled(policy.model, self.scorer.views, weights))
