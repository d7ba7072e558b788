"""DeepSpeed's ZeRO (Rajbhandari et al., arXiv 1910.02054): stage 2 divides masters, moments and gradients, stage 3 the weights as well.

Gradients are added up in fp32 during the backward passes, so that a process holds only its own stretch of them: every process makes
as many passes as the others. In stage 3 a layer's weights are gathered when it is computed, forward and backward, and the whole
model's while a process samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from groupwise.config.division import refuse_undividable
from groupwise.config.schema import Config, OptimizerConfig
from groupwise.distributed import World
from groupwise.distributed.failures import exchanging
from groupwise.distributed.shards import local
from groupwise.distributed.zero_launch import refuse_without_deepspeed
from groupwise.errors import ConfigError
from groupwise.models.blocks import copy_filled
from groupwise.models.decoder import Decoder
from groupwise.models.load import Policy
from groupwise.models.scorer import Scorer
from groupwise.training.sharding.zero_engine import import_deepspeed, make_engine
from groupwise.training.sharding.zero_optimizer import ZeroAdamW

__all__ = ["Zero", "check_zero"]

_IDLE = ([0], [[0]])
"""What a pass that computes nothing of use is about: a prompt of one token, and a completion of one."""


def check_zero(config: Config, hf_config: Any, name: str) -> None:
    """Raise ConfigError for what ZeRO does not go with, and where DeepSpeed is not installed."""
    refuse_undividable(config, name, hf_config.model_type)
    refuse_without_deepspeed(f"training.sharding is {name}, which is DeepSpeed's")


class Zero:
    """Implements ``distributed.sharding.Sharding`` for the lean decoder."""

    def __init__(self, scorer: Scorer, world: World, config: Config, name: str, device: torch.device) -> None:
        """Divides the policy. ``name``: ``zero2`` or ``zero3``."""
        if not isinstance(scorer, Decoder):
            raise ConfigError(
                f"training.sharding is {name}, which needs the lean decoder, and that does not cover {config.model.name}: use "
                "training.sharding=none"
            )
        self.name, self.stage = name, int(name[-1])
        self.divides_weights = True  # passes speak to the other processes in stage 2 too
        self.scorer, self.world, self.device = scorer, world, device
        self.deepspeed = import_deepspeed(device.type)
        blocks = scorer.as_blocks()
        self.engine = make_engine(self.deepspeed, self.stage, blocks, scorer.dtype, device, config.optimizer)
        scorer.inside = _inside(self.engine)
        self._idle = scorer.prepare([_IDLE])

    def make_optimizer(self, config: OptimizerConfig) -> ZeroAdamW:
        return ZeroAdamW(self.engine, self.scorer.named_parameters(), config, self.world)

    @torch.no_grad()
    def make_reference(self, scorer: Scorer) -> Scorer:
        """Whole in stage 2; divided like the policy in stage 3."""
        assert isinstance(scorer, Decoder)
        with self._gathered():
            twin = scorer.frozen_twin()
            blocks = twin.blocks
            assert blocks is not None
            blocks.to_empty(device=self.device)
            for (_, mine), (_, policys) in zip(twin.named_parameters(), scorer.named_parameters(), strict=True):
                mine.copy_(policys)
        if self.stage == 3:
            twin.inside = _inside(make_engine(self.deepspeed, 3, blocks, scorer.dtype, self.device, None))
        return twin

    def _gathered(self, parameters: Sequence[Any] | None = None) -> Any:
        """Whole weights meanwhile, of ``parameters`` or all: a meeting in stage 3."""
        if self.stage == 2:
            return nullcontext()
        chosen = [p for _, p in self.scorer.named_parameters()] if parameters is None else list(parameters)
        return self.deepspeed.zero.GatheredParameters(chosen)

    @contextmanager
    def whole(self) -> Iterator[None]:
        inside = self.scorer.inside
        with self._gathered():
            self.scorer.inside = None
            try:
                yield
            finally:
                self.scorer.inside = inside

    @contextmanager
    def evened(self, scorer: Scorer, passes: int) -> Iterator[None]:
        missing = max(self.world.gather(passes)) - passes
        yield
        for _ in range(missing):
            found = scorer.logprobs(self._idle)
            if torch.is_grad_enabled():
                self.backward(found.sum() * 0.0)

    def backward(self, loss: Tensor) -> None:
        """DeepSpeed averages gradients over the processes; the tokens' weights are shares of the whole batch, so they are added up."""
        with exchanging():
            self.engine.backward(loss * self.world.size)

    def sum_gradients(self, optimizer: Any) -> None:
        """The backward passes have done it."""

    def check(self) -> None:
        """Stage 2: raises RankError where the processes' weights are not the same bits. In stage 3 each number is in one place."""
        if self.stage == 2:
            self.world.check_equal("the weights", [p.detach() for _, p in self.scorer.named_parameters()])

    @torch.no_grad()
    def whole_policy(self, policy: Policy) -> Policy | None:
        weights: dict[str, Tensor] = {}
        for name, parameter in self.scorer.named_parameters():
            with self._gathered([parameter]):
                if self.world.is_first:
                    weights[name] = parameter.detach().to("cpu", copy=True)
        if not self.world.is_first:
            return None
        return replace(policy, model=copy_filled(policy.model, self.scorer.views, weights))

    def whole_state(self, pieces: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The optimiser's are whole already; in stage 3 the reference's are not."""
        shapes = self._shapes()
        found = {}
        for name, piece in pieces.items():
            tensor = piece
            if self.stage == 3 and name in shapes:
                parts = piece.new_zeros(self.world.size, piece.numel())
                parts[self.world.rank] = piece
                self.world.add_up(parts)
                tensor = parts.reshape(-1)[: shapes[name].numel()].view(shapes[name])
            if self.world.is_first:
                found[name] = tensor.detach().to("cpu", copy=True)
        return found

    def read_state(self, path: Path) -> Mapping[str, Tensor]:
        """Tensors that are read when they are asked for; in stage 3, of the reference's weights, this process's stretches."""
        sizes = {name: local(p).numel() for name, p in self.scorer.named_parameters()} if self.stage == 3 else {}
        return _Lazy(path, sizes, self.world.rank)

    def _shapes(self) -> dict[str, torch.Size]:
        return {name: getattr(p, "ds_shape", p.shape) for name, p in self.scorer.named_parameters()}


class _Lazy(Mapping[str, Tensor]):
    """The tensors of a safetensors file."""

    def __init__(self, path: Path, sizes: Mapping[str, int], rank: int) -> None:
        """``sizes``: elements of the stretches that some of them are divided into, of which that of ``rank`` is given."""
        self.file: Any = safe_open(path, framework="pt")
        self.names, self.sizes, self.rank = list(self.file.keys()), sizes, rank

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.file.get_tensor(name)
        size = self.sizes.get(name)
        if size is None:
            return tensor
        stretch = tensor.reshape(-1)[size * self.rank : size * (self.rank + 1)]
        return torch.nn.functional.pad(stretch, (0, size - len(stretch)))

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def _inside(engine: Any) -> Callable[..., Any]:
    """Runs a computation as a forward pass of ``engine``."""

    def run(compute: Callable[..., Any], *arguments: Any) -> Any:
        with exchanging():
            return engine(compute, *arguments)

    return run
