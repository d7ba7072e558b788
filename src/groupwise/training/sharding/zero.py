"""DeepSpeed's ZeRO (Rajbhandari et al., arXiv 1910.02054): stage 2 divides masters, moments and gradients, stage 3 the weights as well.

Gradients are added up in fp32 during the backward passes, so that a process holds only its own stretch of them: every process makes
as many passes as the others. In stage 3 a layer's weights are gathered when it is computed, forward and backward, and the whole
model's while a process samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from groupwise.config.combinations import refuse_undividable
from groupwise.config.schema import Config, OptimizerConfig
from groupwise.distributed import World
from groupwise.distributed.failures import exchanging
from groupwise.distributed.shards import local
from groupwise.distributed.zero_launch import refuse_without_deepspeed
from groupwise.models.decoder import Decoder
from groupwise.models.families import why_uncovered
from groupwise.models.scorer import Scorer
from groupwise.training.sharding.divided import Divided, lean
from groupwise.training.sharding.handing import place, read_by_one
from groupwise.training.sharding.zero_engine import import_deepspeed, make_engine
from groupwise.training.sharding.zero_optimizer import ZeroAdamW

__all__ = ["Zero", "check_zero"]


def check_zero(config: Config, hf_config: Any, name: str) -> None:
    """Raise ConfigError for what ZeRO does not go with, and where DeepSpeed is not installed."""
    refuse_undividable(config, name, why_uncovered(hf_config))
    refuse_without_deepspeed(f"training.sharding is {name}, which is DeepSpeed's")


class Zero(Divided):
    """Implements ``distributed.sharding.Sharding`` for the lean decoder."""

    def __init__(self, scorer: Scorer, world: World, config: Config, name: str, device: torch.device) -> None:
        """Divides the policy. ``name``: ``zero2`` or ``zero3``."""
        super().__init__(
            scorer := lean(scorer, name, config.model.name), world
        )  # in stage 2, too, passes speak to other processes
        self.name, self.stage, self.device = name, int(name[-1]), device
        self.deepspeed = import_deepspeed(device.type)
        blocks = scorer.as_blocks()
        self.learns = any(p.requires_grad for p in blocks.parameters())
        optimizer = config.optimizer if self.learns else None
        by_one = self.stage == 3 and read_by_one(blocks, world)
        self.engine = make_engine(
            self.deepspeed, self.stage, blocks, scorer.dtype, device, optimizer,
            lambda module: place(module, device, scorer.dtype, world, by_one),
        )  # fmt: skip
        scorer.inside = _inside(self.engine if self.learns else blocks)  # an engine without an optimiser refuses backward passes

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
        chosen = list(self.blocks.parameters() if parameters is None else parameters)
        return self.deepspeed.zero.GatheredParameters(chosen)

    def gathered(self, module: nn.Module) -> AbstractContextManager[None]:
        return self._gathered(list(module.parameters(recurse=False)))  # type: ignore[no-any-return]

    @contextmanager
    def whole(self) -> Iterator[None]:
        inside = self.scorer.inside
        with self._gathered():
            self.scorer.inside = None
            try:
                yield
            finally:
                self.scorer.inside = inside

    def backward(self, loss: Tensor) -> None:
        """DeepSpeed averages gradients over the processes; the tokens' weights are shares of the whole batch, so they are added up."""
        with exchanging():
            if self.learns:
                self.engine.backward(loss * self.world.size)
            else:
                loss.backward()  # type: ignore[no-untyped-call]
                self.engine.optimizer.partition_all_parameters()  # what the outermost module gathered: nothing else lets go of it

    def check(self) -> None:
        """Stage 2: raises RankError where the processes' weights are not the same bits. In stage 3 each number is in one place."""
        if self.stage == 2:
            self.world.check_equal("the weights", [p.detach() for _, p in self.scorer.named_parameters()])

    @torch.no_grad()
    def whole_weights(self) -> Mapping[str, Tensor]:
        weights: dict[str, Tensor] = {}
        for name, parameter in self.blocks.named_parameters():
            with self._gathered([parameter]):
                if self.world.is_first:
                    weights[name] = parameter.detach().to("cpu", copy=True)
        return weights

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
