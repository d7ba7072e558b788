"""An adapter on a base that is divided: the frozen weights are gathered layer by layer, the adapter is whole on each process.

An adapter's states are small (16 bytes a number of it), so nothing is won by dividing them: they are replicas, as where nothing is divided.
What is large is the base. For the passes a layer of it is gathered and the adapter merged into it; for sampling each layer is gathered,
merged and let go of in turn, so that a process holds the merged weights beside its part of the base, and never the whole base as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from groupwise.distributed import World
from groupwise.models.load import Policy
from groupwise.models.merged_decoder import MergedDecoder
from groupwise.models.scorer import Scorer
from groupwise.training.sharding.divided import Divided
from groupwise.training.sharding.replicas import Replicas

__all__ = ["AdapterOnDivided"]


class AdapterOnDivided(Replicas):
    """Implements ``distributed.sharding.Sharding``: gradients of the adapter are added up once, at an update's end."""

    divides_weights = True

    def __init__(self, scorer: MergedDecoder, world: World, base: Divided) -> None:
        """``base``: what has divided the frozen weights of ``scorer``."""
        super().__init__(scorer, world)
        self.adapted, self.base, self.name = scorer, base, base.name

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Merged weights of this moment, where the engine reads the decoder's."""
        decoder, layers, inside = self.adapted, self.adapted.layers, self.adapted.inside
        merged = []
        for layer in layers:
            with self.base.gathered(layer.block):
                merged.append(layer.taken_out())
        with self.base.gathered(self.base.blocks):
            decoder.layers, decoder.inside = merged, None
            try:
                yield
            finally:
                decoder.layers, decoder.inside = layers, inside

    def evened(self, scorer: Scorer, passes: int) -> AbstractContextManager[None]:
        return self.base.evened(scorer, passes)

    def backward(self, loss: Tensor) -> None:
        self.base.backward(loss)

    def whole_policy(self, policy: Policy) -> Policy | None:
        return self.base.whole_policy(policy)

    def whole_state(self, pieces: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """They are whole; what is given is a copy, which learning does not touch."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in pieces.items()} if self.world.is_first else {}
