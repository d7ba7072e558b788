"""Whole replicas: every process holds everything, and only the work is divided. And sampling where the weights are divided all the same."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from groupwise.config.schema import OptimizerConfig
from groupwise.distributed import World
from groupwise.distributed.sharding import Optimizer, Sharding
from groupwise.engines import Engine
from groupwise.engines.base import Progress, SampleRequest
from groupwise.models.load import Policy
from groupwise.models.scorer import Scorer, make_reference
from groupwise.training.optimizer import MasterAdamW
from groupwise.types import Completion

__all__ = ["Replicas", "with_whole_weights"]


class Replicas:
    """Implements ``distributed.sharding.Sharding``: gradients are added up once, at an update's end, and all make the same update."""

    name = "none"
    divides_weights = False

    def __init__(self, scorer: Scorer, world: World) -> None:
        self.scorer, self.world = scorer, world

    def make_optimizer(self, config: OptimizerConfig) -> Optimizer:
        half = any(p.dtype == torch.float16 for p in self.scorer.module.parameters())
        return MasterAdamW(self.scorer.named_parameters(), config, half=half)

    def make_reference(self, scorer: Scorer) -> Scorer:
        return make_reference(scorer)

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()

    def evened(self, scorer: Scorer, passes: int) -> AbstractContextManager[None]:
        """Passes are each process's own."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def sum_gradients(self, optimizer: Optimizer) -> None:
        self.world.sum_gradients(optimizer.gradients(), optimizer.zero_gradient)

    def check(self) -> None:
        """Raises RankError where replicas have drifted apart."""
        if self.world.size > 1:
            self.world.check_equal("the weights", [p for _, p in self.scorer.named_parameters()])

    def whole_policy(self, policy: Policy) -> Policy | None:
        return policy

    def whole_state(self, pieces: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return pieces

    def read_state(self, path: Path) -> dict[str, Tensor]:
        return load_file(path)


def with_whole_weights(engine: Engine, sharding: Sharding) -> Engine:
    """An engine that samples as ``engine`` does, which all processes must ask at once; itself where it has weights of its own."""
    return engine if engine.holds_weights else _Gathering(engine, sharding)


class _Gathering(Engine):
    """Wraps an engine that reads the policy's weights."""

    def __init__(self, engine: Engine, sharding: Sharding) -> None:
        self.engine, self.sharding = engine, sharding

    def serve(self, request: SampleRequest, on_progress: Progress | None = None) -> list[tuple[Completion, ...]]:
        """See ``Engine.serve``. Whoever has no prompts takes part too."""
        with self.sharding.whole():
            return self.engine.serve_checked(request, on_progress)

    def refresh(self, policy_version: int) -> None:
        self.engine.refresh(policy_version)
