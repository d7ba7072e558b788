"""What the ways of dividing whose passes speak to the other processes have in common: rows of tensors, weights handed out as they are
divided, passes made equally many, and an adapter on a base that is divided.

An adapter's states are small (16 bytes a number of it), so nothing is won by dividing them: they are replicas, as where nothing is divided.
What is large is the base. For the passes a layer of it is gathered and the adapter merged into it; for sampling each layer is gathered,
merged and let go of in turn, so that a process holds the merged weights beside its part of the base, and never the whole base as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.distributed import World
from groupwise.distributed.sharding import Optimizer
from groupwise.errors import ConfigError, RankError
from groupwise.models.decoder import Decoder, MergedDecoder, settle_tie
from groupwise.models.layer import Blocks, copy_filled
from groupwise.models.load import Policy, copy_to_cpu
from groupwise.models.merging import round_dithered_
from groupwise.models.scorer import Scorer
from groupwise.training.sharding.replicas import Replicas

__all__ = [
    "AdapterOnDivided", "Divided", "Rows", "lean", "local", "materialize", "read_by_one", "read_rows", "round_local_", "rows_of",
    "start_of", "tie_as_first",
]  # fmt: skip

Rows = tuple[int, int]
"""First row, and the one after the last."""


def local(tensor: Tensor) -> Tensor:
    """What this process holds of it: all, its rows, or (of DeepSpeed's ZeRO-3) its stretch of the flattened tensor, filled up."""
    stretch: Tensor | None = getattr(tensor, "ds_tensor", None)
    if stretch is not None:
        return stretch.detach()
    piece = getattr(tensor, "to_local", None)
    return tensor.detach() if piece is None else piece().detach()


def start_of(tensor: Tensor) -> int:
    """Where in the flattened tensor that begins which this process holds of it."""
    stretch: Tensor | None = getattr(tensor, "ds_tensor", None)
    if stretch is not None:
        return stretch.numel() * torch.distributed.get_rank()
    mesh: Any = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return 0
    return rows_of(tensor.shape[0], mesh.get_local_rank(), mesh.size())[0] * math.prod(tensor.shape[1:])


def round_local_(weights: Tensor, exact: Tensor) -> None:
    """Write ``exact``, this process's part of a tensor, into its part of ``weights``, as the whole tensor would be rounded."""
    shape: torch.Size = getattr(weights, "ds_shape", weights.shape)
    round_dithered_(local(weights), exact, start_of(weights), shape[-1])


def rows_of(length: int, rank: int, size: int) -> Rows:
    """The rows of process ``rank`` of ``size``, as torch divides them: equal shares rounded up, so that the last may get fewer or none.

    >>> [rows_of(5, rank, 4) for rank in range(4)]
    [(0, 2), (2, 4), (4, 5), (5, 5)]
    """
    share = -(-length // size)
    return min(length, rank * share), min(length, (rank + 1) * share)


def read_rows(path: Path, rows: Mapping[str, tuple[torch.Size, Rows]]) -> dict[str, Tensor]:
    """Read the given rows of the tensors in a safetensors file whose name ends with a key of ``rows`` and that have its shape.

    Others are read whole.
    """
    from safetensors import safe_open

    tensors: dict[str, Tensor] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118  # it is no dict
            part: Any = file.get_slice(name)
            shape, (first, end) = rows.get(name.partition(".")[2], rows.get(name, (None, (0, 0))))
            whole = shape is None or list(shape) != list(part.get_shape())
            tensors[name] = file.get_tensor(name) if whole else part[first:end]
    return tensors


def tie_as_first(model: Any, world: World) -> None:
    """Make the output head of a model without weights the embedding, or a tensor of its own: as the first process found it in the file,
    which it alone has read, whatever the config says. A collective call."""
    tied = world.on_rank0(lambda: settle_tie(model))
    if not world.is_first:
        model.config.tie_word_embeddings = tied
        if not tied and model.lm_head.weight is model.model.embed_tokens.weight:
            model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))


def read_by_one(blocks: Blocks, world: World) -> bool:
    """Whether the first process alone has the numbers of ``blocks``, and the others shapes on the meta device. A collective call.

    Raises RankError where the processes have not the same model: other shapes, or, where each has read it, other numbers.
    """
    mine = [(name, tuple(p.shape), str(p.dtype)) for name, p in blocks.named_parameters()]
    of_ranks = world.all_gather_object((mine, any(p.is_meta for p in blocks.parameters())))
    for rank, (theirs, _) in enumerate(of_ranks):
        if theirs != of_ranks[0][0]:
            raise RankError(
                f"the model of process {rank} has other tensors than that of process 0: let all find the same files under model.name",
                1,
            )
    if any(hollow for _, hollow in of_ranks):
        return True
    world.check_equal("the weights that were read", list(blocks.parameters()))
    return False


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device, dtype: torch.dtype, world: World, from_first: bool) -> None:
    """Move the tensors of ``module``, without its children's, to ``device``, in ``dtype``. ``from_first``: those of the first process,
    for all at once; bit for bit what each would have read."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.data.to(device)
        if from_first:
            world.broadcast(whole)
        if parameter.is_meta:
            setattr(module, name, nn.Parameter(whole.to(dtype), requires_grad=parameter.requires_grad))
        else:
            parameter.data = whole.to(dtype)


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
        """Gather the tensors of ``blocks``, or of one of its layers, for as long as this lasts. A collective call."""
        raise NotImplementedError

    def whole_weights(self) -> Mapping[str, Tensor]:
        """The weights of all blocks in the decoder's layout, by name, on the first process's CPU; else nothing. A collective call."""
        raise NotImplementedError

    @contextmanager
    def evened(self, scorer: Scorer, passes: int) -> Iterator[None]:
        missing = max(self.world.all_gather_object(passes)) - passes
        yield
        for _ in range(missing):
            self.idle_pass(scorer)

    def idle_pass(self, scorer: Scorer) -> None:
        """One that computes nothing of use, with a backward pass where gradients are switched on."""
        logprobs_T = scorer.logprobs(self._idle)
        if torch.is_grad_enabled():
            self.backward(logprobs_T.sum() * 0.0)

    def sum_gradients(self, optimizer: Optimizer) -> None:
        """The backward passes have done it."""

    def whole_policy(self, policy: Policy) -> Policy | None:
        weights = self.whole_weights()
        if not self.world.is_first:
            return None
        model = copy_filled(policy.model, self.scorer.views, weights)
        if str(model.config._attn_implementation).startswith("flash"):
            model.config._attn_implementation = "eager"  # the copy is on the CPU, and what is pushed to vLLM is tried with it
        return replace(policy, model=model)


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
        """A copy of the adapter is enough where only that is saved: the base is not brought together."""
        if not policy.adapter_only:
            return self.base.whole_policy(policy)
        return replace(policy, model=copy_to_cpu(policy.model)) if self.world.is_first else None

    def whole_state(self, pieces: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """They are whole; what is given is a copy, which learning does not touch."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in pieces.items()} if self.world.is_first else {}
