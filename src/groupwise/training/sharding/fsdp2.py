"""FSDP2 (torch's ``fully_shard``; Zhao et al., arXiv 2304.11277): each process holds some rows of every tensor.

A layer's weights are gathered when the layer is computed, forward and backward, and let go of again; its gradient is added up over the
processes, in fp32, and each keeps its rows. With ``optimizer.precision`` ``masters`` the rows are the fp32 masters themselves, and what
is gathered is their copy in the weights' dtype, dithered (``models.merging``): so a process holds 16 bytes a parameter divided by the
number of processes (masters, gradients, two moments), and the whole weights only while it samples.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from groupwise.config.combinations import refuse_undividable
from groupwise.config.schema import Config, OptimizerConfig
from groupwise.distributed import World
from groupwise.distributed.failures import exchanging
from groupwise.errors import ConfigError, RankError, TrainingError
from groupwise.metrics import Mean
from groupwise.models.decoder import Decoder
from groupwise.models.families import why_uncovered
from groupwise.models.layer import Blocks
from groupwise.models.merging import round_dithered_
from groupwise.models.scorer import Scorer
from groupwise.training.optimizer import MasterAdamW, adds_up_itself
from groupwise.training.sharding.divided import (
    Divided,
    Rows,
    lean,
    local,
    materialize,
    read_by_one,
    read_rows,
    round_local_,
    rows_of,
    start_of,
)  # fmt: skip

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["FSDP2", "ShardedAdamW", "check_fsdp2"]


def check_fsdp2(config: Config, hf_config: PretrainedConfig) -> None:
    """Raise ConfigError for what FSDP2 does not go with, and where torch lacks what it takes of it."""
    refuse_undividable(config, "fsdp2", why_uncovered(hf_config))
    if not _torch_fits():
        raise ConfigError(
            f"training.sharding is fsdp2, which does not go with torch {torch.__version__}: it takes parts of FSDP2 that torch 2.9 to 2.15 "
            "have. Install one of these, or use training.sharding=zero2 or zero3"
        )


def _torch_fits() -> bool:
    try:
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    except ImportError:
        return False
    return hasattr(FSDPModule, "set_force_sum_reduction_for_comms") and hasattr(FSDPParam, "_init_extensions")


class FSDP2(Divided):
    """Implements ``distributed.sharding.Sharding`` for the lean decoder."""

    name = "fsdp2"

    def __init__(self, scorer: Scorer, world: World, config: Config, device_type: str) -> None:
        """Divides the policy's weights."""
        from torch.distributed.device_mesh import init_device_mesh

        super().__init__(scorer := lean(scorer, "fsdp2", config.model.name), world)
        self.config = config
        self.mesh = init_device_mesh(device_type, (world.size,))
        self.dtype = scorer.dtype
        self._optimizer: ShardedAdamW | None = None
        blocks = scorer.to_modules()
        masters = config.optimizer.precision == "masters" and any(p.requires_grad for p in blocks.parameters())
        kept, by_one = torch.float32 if masters else self.dtype, read_by_one(blocks, world)
        self._divide(blocks, kept, lambda module: materialize(module, scorer.device, kept, world, by_one))
        scorer.inside = _inside(blocks)
        with torch.no_grad():  # torch settles the order of its modules in their first pass
            scorer.logprobs(self._idle)
        if kept != self.dtype:
            for module in self._modules():
                _round_when_gathered(module, self.dtype)

    def _divide(self, blocks: Blocks, kept: torch.dtype, prepare: Callable[[nn.Module], None] | None = None) -> None:
        """Rows in dtype ``kept``, gathered as the policy's; each layer is materialized, divided and freed before the next."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        gathered = None if kept == self.dtype else self.dtype
        policy = MixedPrecisionPolicy(param_dtype=gathered, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for module in (*blocks.layers, blocks):
            if prepare is not None:
                prepare(module)
            fully_shard(module, mesh=self.mesh, mp_policy=policy, reshard_after_forward=True if module is not blocks else None)
            divided: Any = module
            divided.set_gradient_divide_factor(1.0)  # added up, not averaged: weights of tokens are shares of the whole batch
            divided.set_force_sum_reduction_for_comms(True)

    def make_optimizer(self, config: OptimizerConfig) -> ShardedAdamW:
        self._optimizer = ShardedAdamW(self.scorer.named_parameters(), config, self.dtype, self.world)
        return self._optimizer

    def make_reference(self, scorer: Scorer) -> Scorer:
        assert isinstance(scorer, Decoder)
        twin = scorer.meta_copy()
        blocks = twin.blocks
        assert blocks is not None
        self._divide(blocks, self.dtype)
        blocks.to_empty(device=scorer.device)
        with torch.no_grad():
            for (_, mine), (_, policys) in zip(twin.named_parameters(), scorer.named_parameters(), strict=True):
                round_local_(mine, local(policys))
        twin.inside = _inside(blocks)
        return twin

    @contextmanager
    def gathered(self, module: Any) -> Iterator[None]:
        with exchanging():
            module.unshard()
        try:
            yield
        finally:
            module.reshard()

    @contextmanager
    def whole(self) -> Iterator[None]:
        inside = self.scorer.inside
        with ExitStack() as stack:
            for module in self._modules():
                stack.enter_context(self.gathered(module))
            self.scorer.inside = None
            try:
                yield
            finally:
                self.scorer.inside = inside

    def backward(self, loss: Tensor) -> None:
        with exchanging():
            loss.backward()  # type: ignore[no-untyped-call]
        if self._optimizer is not None:
            self._optimizer.collect()

    def check(self) -> None:
        """Every module's gathered weights are the same bits on all processes, and those that are saved: raises RankError otherwise."""
        for module in self._modules():
            own = {name: (start_of(p), _rounded(p, self.dtype)) for name, p in module.named_parameters(recurse=False)}
            with self.gathered(module):
                gathered = {name: p.detach() for name, p in module.named_parameters(recurse=False)}
                self.world.check_equal("the gathered weights", list(gathered.values()))
                for name, (start, rows) in own.items():
                    if not torch.equal(gathered[name].view(-1)[start : start + rows.numel()], rows.view(-1)):
                        raise RankError(
                            f"the weights {name} that FSDP2 gathers are not the rows that a checkpoint gets: this version of torch "
                            f"({torch.__version__}) rounds them otherwise; use training.sharding=none",
                            TrainingError.exit_code,
                        )

    def _modules(self) -> list[Any]:
        return [self.blocks, *self.blocks.layers]

    def whole_weights(self) -> Mapping[str, Tensor]:
        return self._gather({name: _rounded(p, self.dtype) for name, p in self.blocks.named_parameters()})

    def whole_state(self, pieces: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self._gather(pieces)

    def _gather(self, pieces: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Gather whole tensors on the first process's CPU; what is no piece of a parameter stays as it is. Nothing on the others."""
        shapes, tensors = self._shapes(), {}
        for name, piece in pieces.items():
            shape = _of(shapes, name)
            tensor = self._joined(piece, shape) if shape is not None and self._is_piece(piece, shape) else piece
            if self.world.is_first:
                tensors[name] = tensor.detach().to("cpu", copy=True)
        return tensors

    def _joined(self, rows: Tensor, shape: torch.Size) -> Tensor:
        """Each process's rows, one after the other; a message has equally many of each, and the last ones are filled up."""
        share = -(-shape[0] // self.world.size)
        everywhere = rows.new_empty(share * self.world.size, *shape[1:])
        filled = everywhere.new_zeros(share, *shape[1:])
        filled[: len(rows)] = rows
        with exchanging():
            torch.distributed.all_gather(list(everywhere.chunk(self.world.size)), filled, group=self.mesh.get_group())
        return everywhere[: shape[0]]

    def _shapes(self) -> dict[str, torch.Size]:
        return {name: p.shape for name, p in self.blocks.named_parameters()}

    def _is_piece(self, piece: Tensor, shape: torch.Size) -> bool:
        first, end = self._rows(shape)
        return piece.shape == torch.Size([end - first, *shape[1:]])

    def _rows(self, shape: torch.Size) -> Rows:
        return rows_of(shape[0], self.world.rank, self.world.size)

    def read_state(self, path: Path) -> dict[str, Tensor]:
        return read_rows(path, {name: (shape, self._rows(shape)) for name, shape in self._shapes().items()})


def _of(shapes: Mapping[str, torch.Size], name: str) -> torch.Size | None:
    """The shape of the parameter that ``name`` is about: its own name, or one with the kind before it (``exp_avg.embedding``)."""
    return shapes.get(name, shapes.get(name.partition(".")[2]))


def _inside(blocks: Blocks) -> Callable[..., Any]:
    """Runs a computation as the forward pass of ``blocks``."""
    root: Any = blocks

    def run(compute: Callable[..., Any], *arguments: Any) -> Any:
        with exchanging():
            result = root(compute, *arguments)
        if not torch.is_grad_enabled():  # no backward pass will let go of what the outermost module gathered
            root.reshard()
        return result

    return run


def _rounded(divided: Tensor, dtype: torch.dtype) -> Tensor:
    """This process's rows in ``dtype``, as the whole tensor would be rounded."""
    return _rounded_rows(local(divided), start_of(divided), divided.shape[-1], dtype)


def _rounded_rows(exact: Tensor, start: int, width: int, dtype: torch.dtype) -> Tensor:
    rows = torch.empty_like(exact, dtype=dtype)
    round_dithered_(rows, exact, start, width)
    return rows


def _round_when_gathered(module: Any, dtype: torch.dtype) -> None:
    """Let torch gather the rows of ``module``, without its children's, as ``_rounded`` gives them: by itself it rounds to the nearest.

    Its hooks for that are methods of the local tensors (``fsdp_pre_all_gather``), looked up by name, and it looks for them when it
    divides; tensors divided already are told here.
    """
    for parameter in module._get_fsdp_state()._fsdp_param_group.fsdp_params:
        divided, size = parameter.sharded_param, parameter.padded_sharded_param_size
        rows = divided._local_tensor  # by a weak reference: it would hold itself
        rows.fsdp_pre_all_gather = partial(_before_gather, weakref.ref(rows), start_of(divided), divided.shape[-1], size, dtype)
        rows.fsdp_post_all_gather = _after_gather
        parameter._init_extensions()


def _before_gather(
    held: Any, start: int, width: int, size: torch.Size, dtype: torch.dtype, mesh: Any, whole_size: Any, whole_stride: Any, module: Any,
    policy: Any,
) -> tuple[tuple[Tensor], None]:  # fmt: skip
    """What this process sends: its rows, filled up to as many as each one sends."""
    rows = _rounded_rows(held(), start, width, dtype)
    if rows.shape != size:
        filled = rows.new_zeros(size)
        filled[: len(rows)] = rows
        rows = filled
    return (rows,), None


def _after_gather(outputs: tuple[Tensor, ...], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
    """What came is the tensor itself, and from the second time on it came to where it was."""
    return None if out is not None else (outputs[0], outputs)


class ShardedAdamW(MasterAdamW):
    """``MasterAdamW`` over this process's rows. Clipping goes by the norm over all of them."""

    def __init__(
        self, parameters: Sequence[tuple[str, nn.Parameter]], config: OptimizerConfig, dtype: torch.dtype, world: World
    ) -> None:
        """``dtype``: of the weights that compute, whatever the rows are kept in."""
        self.divided = [p for _, p in parameters if p.requires_grad]
        self.dtype, self.world = dtype, world
        rows = [(name, nn.Parameter(local(p))) for name, p in parameters if p.requires_grad]
        super().__init__(rows, config, half=dtype == torch.float16)

    def seed_noise(self, seed: int) -> None:
        """A seed for each process: rows of one tensor are not to be rounded by the same bits."""
        super().seed_noise(seed + self.world.rank)

    @torch.no_grad()
    def collect(self) -> None:
        """Collect the gradients of a backward pass. FSDP2 adds gradients up itself, in the rows' dtype; in fp32 it is done here where that
        is not."""
        for master, parameter in zip(self.masters, self.divided, strict=True):
            if parameter.grad is None:
                continue
            if adds_up_itself(parameter, self.config):
                master.grad = local(parameter.grad)
                continue
            gradient, parameter.grad = local(parameter.grad), None
            known = self._sums.get(master)
            self._sums[master] = gradient.float() if known is None else known.add_(gradient)

    def step(self, learning_rate: float | None) -> tuple[float, bool]:
        outcome = super().step(learning_rate)
        parts = self.world.all_gather_object(None if self.lost is None else (self.lost.total, self.lost.count))
        known = [part for part in parts if part is not None]
        self.lost = Mean(sum(total for total, _ in known), sum(count for _, count in known)) if known else None
        return outcome

    def norm(self, gradients: list[Tensor]) -> Tensor:
        total = super().norm(gradients).float().square()
        self.world.all_reduce(total)
        return total.sqrt()

    def clear(self) -> None:
        super().clear()
        for parameter in self.divided:
            parameter.grad = None

    @torch.no_grad()
    def close(self) -> None:
        """Round to the weights that compute: what comes after begins with them, as where masters are apart from them."""
        super().close()
        for parameter, divided in zip(self.parameters, self.divided, strict=True):
            parameter.copy_(_rounded(divided, self.dtype))

    @property
    def _names_masters(self) -> bool:
        """Whether one process would have masters apart from its weights: then checkpoints hold them."""
        return self.dtype != torch.float32 and self.config.precision == "masters"

    def state(self) -> dict[str, Tensor]:
        masters = dict(zip(self.names, self.masters, strict=True)) if self._names_masters else {}
        return {f"master.{name}": master for name, master in masters.items()} | super().state()

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        super().load_state(state)
        if self._names_masters:
            for name, master in zip(self.names, self.masters, strict=True):
                master.copy_(state[f"master.{name}"])
