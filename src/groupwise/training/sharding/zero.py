"""DeepSpeed's ZeRO (Rajbhandari et al., arXiv 1910.02054): stage 2 divides masters, moments and gradients, stage 3 the weights as well.

Gradients are added up in fp32 during the backward passes, so that a process holds only its own stretch of them: every process makes
as many passes as the others. In stage 3 a layer's weights are gathered when it is computed, forward and backward, and the whole
model's while a process samples.
"""

from __future__ import annotations

import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from groupwise.config.combinations import refuse_undividable
from groupwise.config.schema import Config, OptimizerConfig
from groupwise.distributed import World
from groupwise.distributed.failures import exchanging
from groupwise.distributed.sharding import refuse_without_deepspeed
from groupwise.errors import ConfigError
from groupwise.limits import ZERO_BUCKET
from groupwise.models.decoder import Decoder
from groupwise.models.families import why_uncovered
from groupwise.models.layer import Blocks
from groupwise.models.scorer import Scorer
from groupwise.training.sharding.divided import Divided, lean, local, materialize, read_by_one

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["Zero", "ZeroAdamW", "check_zero", "give_settings", "import_deepspeed", "make_engine"]


def import_deepspeed(device_type: str) -> Any:
    """The package, silent but for errors. Raises ConfigError where it is set up for another kind of device than the model's."""
    os.environ.setdefault("DS_ACCELERATOR", device_type)  # it asks what is in the machine, not where the model is
    with _quiet():
        import deepspeed
    device = deepspeed.accelerator.get_accelerator().device_name()
    if device != device_type:
        raise ConfigError(
            f"DeepSpeed is set up for {device}, and the model is on {device_type}: set DS_ACCELERATOR={device_type} in the environment"
        )
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed 0.19 calls collectives by names that torch 2.13 calls old, once for every layer of every pass.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    return deepspeed


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without what DeepSpeed prints and warns of while it is imported and set up."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _config(stage: int, blocks: Blocks, dtype: torch.dtype, device_type: str, max_grad_norm: float | None) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": stage, "reduce_bucket_size": ZERO_BUCKET, "allgather_bucket_size": ZERO_BUCKET,
        "contiguous_gradients": True, "overlap_comm": device_type != "cpu",
    }  # fmt: skip
    if stage == 3:
        layer = max(_elements(block) for block in blocks.layers)
        zero |= {
            "stage3_param_persistence_threshold": 0,  # a layer's tensors come in one message, small ones too
            "stage3_prefetch_bucket_size": layer,  # the next layer comes while one is computed
            "stage3_max_live_parameters": _elements(blocks) - sum(map(_elements, blocks.layers)) + 2 * layer,
            "stage3_max_reuse_distance": 0,
        }
    return {
        "train_micro_batch_size_per_gpu": 1,  # of no consequence: passes are ours
        "managed_gradient_accumulation": False,  # an update is made when we say so, after however many passes
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_clipping": max_grad_norm or 0.0,
    }


def _elements(module: torch.nn.Module) -> int:
    """Number of elements of all its parameters, divided or not."""
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in module.parameters())


def _adamw_over(blocks: Blocks, config: OptimizerConfig) -> torch.optim.AdamW:
    """Two groups of parameters, matrices and the rest, since ``optimizer.decay`` may treat them apart."""
    parameters: list[Any] = [p for p in blocks.parameters() if p.requires_grad]
    groups: list[dict[str, Any]] = [{"params": []}, {"params": []}]
    for parameter in parameters:  # one that is divided is flat, and knows what it was
        groups[len(getattr(parameter, "ds_shape", parameter.shape)) < 2]["params"].append(parameter)
    return torch.optim.AdamW(groups, lr=config.learning_rate, fused=True)


def give_settings(groups: list[dict[str, Any]], config: OptimizerConfig) -> None:
    """Give the two groups of ``_adamw_over`` the settings of ``config``."""
    for group, spared in zip(groups, (False, config.decay == "matrices"), strict=True):
        group |= {"lr": config.learning_rate, "betas": config.betas, "eps": config.epsilon}
        group["weight_decay"] = 0.0 if spared else config.weight_decay


def make_engine(
    deepspeed: Any,
    stage: int,
    blocks: Blocks,
    dtype: torch.dtype,
    device: torch.device,
    optimizer: OptimizerConfig | None,
    prepare: Callable[[torch.nn.Module], None] = lambda module: None,
) -> Any:
    """DeepSpeed's engine over ``blocks``, a collective call. Without ``optimizer`` it only computes. ``prepare`` is called with each module
    before stage 3 divides it, and puts its tensors where they belong."""
    config = _config(stage, blocks, dtype, device.type, optimizer.max_grad_norm if optimizer else None)
    with _quiet():
        if stage == 3:
            _divide(deepspeed, blocks, config, prepare)
        adamw = _adamw_over(blocks, optimizer) if optimizer else None
        return deepspeed.initialize(model=blocks, optimizer=adamw, config=config, dist_init_required=False)[0]


def _divide(deepspeed: Any, blocks: Blocks, config: dict[str, Any], prepare: Callable[[torch.nn.Module], None]) -> None:
    """A layer at a time: each is moved to its device, divided and let go of before the next."""
    for module in (*blocks.layers, blocks):
        prepare(module)
        deepspeed.zero.Init(module=module, config_dict_or_path=config)


_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Stretch:
    """Where a part of a parameter, flattened, lies among the masters of this process."""

    first: int
    """In the parameter."""
    count: int
    masters: Tensor
    """A whole group's, flat, with the stretch from ``start`` on."""
    start: int

    def of(self, flat: Tensor) -> Tensor:
        """The stretch of something laid out as ``masters`` are."""
        return flat.narrow(0, self.start, self.count)


class ZeroAdamW:
    """The methods of ``MasterAdamW`` over DeepSpeed's optimiser. Its states have that one's names, so that checkpoints are the same.

    DeepSpeed adds gradients up in the backward passes, and lets go of them in ``step``.
    """

    loss_scale = 1.0
    can_recover = False
    lost = None

    def __init__(self, engine: Any, named: list[tuple[str, nn.Parameter]], config: OptimizerConfig, world: World) -> None:
        """Starts again, whatever ``engine`` did before: masters are the weights, moments 0."""
        self.engine, self.config, self.world = engine, config, world
        self.zero: Any = engine.optimizer
        self.named = [(name, p) for name, p in named if p.requires_grad]
        self.names_masters = self.named[0][1].dtype != torch.float32
        """As where one process has masters apart from its weights; checkpoints hold them then."""
        give_settings(self.zero.param_groups, config)
        self.zero.clip_grad = config.max_grad_norm or 0.0
        self.stretches = _stretches(self.zero, [p for _, p in self.named], world.rank)
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        for masters in {id(s.masters): s.masters for s in self.stretches if s is not None}.values():
            state = self.zero.optimizer.state[masters]
            state["step"] = torch.zeros((), dtype=torch.float32, device=masters.device)
            for name in _MOMENTS:
                if name in state:
                    state[name].zero_()
                else:
                    state[name] = torch.zeros_like(masters)
        for (_, parameter), stretch in zip(self.named, self.stretches, strict=True):
            if stretch is not None:
                weights = local(parameter).reshape(-1)
                first = 0 if hasattr(parameter, "ds_id") else stretch.first
                stretch.of(stretch.masters).copy_(weights.narrow(0, first, stretch.count))

    @property
    def adamw(self) -> Any:
        """Torch's own inside, whose groups a schedule reads."""
        return self.zero.optimizer

    def step(self, rate: float) -> tuple[float, bool]:
        """Like ``MasterAdamW.step``; a collective call."""
        for group in self.zero.param_groups:
            group["lr"] = rate
        with exchanging():
            self.engine.step()
        norm = float(self.zero._global_grad_norm)
        return norm, not self.zero.overflow and math.isfinite(norm)

    def gradients(self) -> list[Tensor | None]:
        """DeepSpeed's own affair."""
        return []

    def zero_gradient(self, index: int) -> Tensor:
        raise AssertionError("DeepSpeed adds gradients up in the backward passes")

    def clear(self) -> None:
        """``step`` does it. Passes cannot be begun again where they speak to other processes."""

    def close(self) -> None:
        """The next one over the engine starts again."""

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """Whole tensors on the first process's CPU, by name; nothing on the others. A collective call."""
        tensors: dict[str, Tensor] = {}
        for (name, parameter), stretch in zip(self.named, self.stretches, strict=True):
            shape = getattr(parameter, "ds_shape", parameter.shape)
            for key in (*(["master"] if self.names_masters else []), *_MOMENTS):
                whole = torch.zeros(math.prod(shape), dtype=torch.float32, device=self.engine.device)
                if stretch is not None:
                    whole.narrow(0, stretch.first, stretch.count).copy_(stretch.of(self._flat(stretch, key)))
                self.world.all_reduce(whole)  # each number is one process's, and 0 in the others
                if self.world.is_first:
                    tensors[f"{key}.{name}"] = whole.view(shape).to("cpu", copy=True)
            if self.world.is_first:
                tensors[f"step.{name}"] = torch.tensor(self._steps())
        return tensors

    def _flat(self, stretch: _Stretch, key: str) -> Tensor:
        if key == "master":
            return stretch.masters
        flat: Tensor = self.zero.optimizer.state[stretch.masters][key]
        return flat

    def _steps(self) -> float:
        return max((float(self.zero.optimizer.state[s.masters]["step"]) for s in self.stretches if s is not None), default=0.0)

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave, or ``MasterAdamW.state`` in one process. The weights are the model's to restore.

        Raises ValueError for the state of another model or another precision, before anything is changed.
        """
        self._check(state)
        for (name, _), stretch in zip(self.named, self.stretches, strict=True):
            if stretch is None:
                continue
            for key in (*(["master"] if self.names_masters else []), *_MOMENTS):
                saved = state[f"{key}.{name}"].reshape(-1)
                stretch.of(self._flat(stretch, key)).copy_(saved.narrow(0, stretch.first, stretch.count))
            self.zero.optimizer.state[stretch.masters]["step"].fill_(float(state[f"step.{name}"]))

    def _check(self, state: Mapping[str, Tensor]) -> None:
        keys = (*(["master"] if self.names_masters else []), *_MOMENTS, "step")
        mine = {f"{key}.{name}" for name, _ in self.named for key in keys}
        for key in sorted(mine ^ state.keys()):
            raise ValueError(f"the optimiser's state {'lacks' if key in mine else 'has an unknown'} {key}")


def _stretches(zero: Any, parameters: list[nn.Parameter], rank: int) -> list[_Stretch | None]:
    """The stretch of each parameter that this process has the masters of; None for nothing."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return [_of_stage_3(zero, p, rank) for p in parameters]
    groups = {id(p): index for index, group in enumerate(zero.bit16_groups) for p in group}
    return [_of_stage_2(p, zero.single_partition_of_fp32_groups[groups[id(p)]]) for p in parameters]


def _of_stage_2(parameter: Any, masters: Tensor) -> _Stretch | None:
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    there = mapping.get_hp_fragment_address()
    return _Stretch(mapping.lp_fragment_address.start, there.numel, masters, there.start)


def _of_stage_3(zero: Any, parameter: Any, rank: int) -> _Stretch | None:
    group, start, size = zero.grad_position[parameter.ds_id]
    first = rank * size
    count = min(size, parameter.ds_numel - first)  # the last one is filled up
    return None if count <= 0 else _Stretch(first, count, zero.fp32_partitioned_groups_flat[group], start)


def check_zero(config: Config, hf_config: PreTrainedConfig, name: str) -> None:
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
        blocks = scorer.to_modules()
        self.learns = any(p.requires_grad for p in blocks.parameters())
        optimizer = config.optimizer if self.learns else None
        by_one = self.stage == 3 and read_by_one(blocks, world)
        self.engine = make_engine(
            self.deepspeed, self.stage, blocks, scorer.dtype, device, optimizer,
            lambda module: materialize(module, device, scorer.dtype, world, by_one),
        )  # fmt: skip
        scorer.inside = _inside(self.engine if self.learns else blocks)  # an engine without an optimiser refuses backward passes

    def make_optimizer(self, config: OptimizerConfig) -> ZeroAdamW:
        return ZeroAdamW(self.engine, self.scorer.named_parameters(), config, self.world)

    @torch.no_grad()
    def make_reference(self, scorer: Scorer) -> Scorer:
        """Whole in stage 2; divided like the policy in stage 3."""
        assert isinstance(scorer, Decoder)
        with self._gathered():
            twin = scorer.meta_copy()
            blocks = twin.blocks
            assert blocks is not None
            blocks.to_empty(device=self.device)
            for (_, mine), (_, policys) in zip(twin.named_parameters(), scorer.named_parameters(), strict=True):
                mine.copy_(policys)
        if self.stage == 3:
            twin.inside = _inside(make_engine(self.deepspeed, 3, blocks, scorer.dtype, self.device, None))
        return twin

    def _gathered(self, parameters: Sequence[Any] | None = None) -> Any:
        """Gather the weights of ``parameters``, or all, for as long as this lasts; a collective call in stage 3."""
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
        tensors = {}
        for name, piece in pieces.items():
            tensor = piece
            if self.stage == 3 and name in shapes:
                parts = piece.new_zeros(self.world.size, piece.numel())
                parts[self.world.rank] = piece
                self.world.all_reduce(parts)
                tensor = parts.reshape(-1)[: shapes[name].numel()].view(shapes[name])
            if self.world.is_first:
                tensors[name] = tensor.detach().to("cpu", copy=True)
        return tensors

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
