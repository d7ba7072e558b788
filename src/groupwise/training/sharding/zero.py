"""DeepSpeed's ZeRO (Rajbhandari et al., arXiv 1910.02054): stage 2 divides masters, moments and gradients, stage 3 the weights as well.

Gradients are added up in fp32 during the backward passes, so that a process holds only its own stretch of them: every process makes
as many passes as the others. In stage 3 a layer's weights are gathered when it is computed, forward and backward, and the whole
model's while a process samples.

Accelerate launches the processes and says the stage. Its own wrapper of DeepSpeed's engine (1.15) does not carry the rest: it makes the
update within the last backward pass, it takes a model that each process has read, and it saves pickled files, one a process, which only as
many processes read again. Here an update follows any number of passes, the first process reads the weights for all, and any number of
processes go on from a checkpoint.
"""

from __future__ import annotations

import importlib
import io
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stdout
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
from groupwise.training.sharding.divided import Divided, lean, local, materialize, read_by_one, round_local_

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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


def _config(stage: int, blocks: Blocks, dtype: torch.dtype, max_grad_norm: float | None) -> dict[str, Any]:
    # No overlap_comm: its races have lost gradients (DeepSpeed issue 5545), it waits for the whole device, which no CUDA graph
    # that is captured meanwhile outlives, and no test on CPUs sees it.
    zero: dict[str, Any] = {
        "stage": stage, "reduce_bucket_size": ZERO_BUCKET, "allgather_bucket_size": ZERO_BUCKET,
        "contiguous_gradients": True, "overlap_comm": False,
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
    config = _config(stage, blocks, dtype, optimizer.max_grad_norm if optimizer else None)
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
        self.stage = engine.zero_optimization_stage()
        self.access: Any = importlib.import_module("deepspeed.utils")
        """DeepSpeed's own functions for states that it has divided."""
        self.named = [(name, p) for name, p in named if p.requires_grad]
        apart = self.named[0][1].dtype != torch.float32
        self._keys = (*(["master"] if apart else []), *_MOMENTS)
        """What a checkpoint has of each parameter; masters where one process has them apart from its weights."""
        give_settings(self.zero.param_groups, config)
        self.zero.clip_grad = config.max_grad_norm or 0.0
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        state = self.zero.optimizer.state
        for masters in self.zero.fp32_partitioned_groups_flat if self.stage == 3 else self.zero.single_partition_of_fp32_groups:
            kept = state.setdefault(masters, {name: torch.zeros_like(masters) for name in _MOMENTS})
            kept["step"] = torch.zeros((), dtype=torch.float32, device=masters.device)
            for name in _MOMENTS:
                kept[name].zero_()
        if self.stage == 2:  # by itself DeepSpeed finds a parameter's moments after the first step only
            self.zero._lazy_init_hp_params_optimizer_state()
        for _, parameter in self.named:
            self._set(parameter, "master", local(parameter))

    def _set(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        """Write a parameter's master or one of its moments: whole, or in stage 3 the stretch of it that this process holds."""
        reach = "full" if self.stage == 2 else "local"
        if key == "master":
            getattr(self.access, f"safe_set_{reach}_fp32_param")(parameter, value)
        else:
            getattr(self.access, f"safe_set_{reach}_optimizer_state")(parameter, value, key)

    def _get(self, parameter: nn.Parameter, key: str) -> Tensor:
        """A parameter's master or one of its moments, whole, in all processes."""
        access = self.access
        found = (
            access.safe_get_full_fp32_param(parameter)
            if key == "master"
            else access.safe_get_full_optimizer_state(parameter, key)
        )
        return found  # type: ignore[no-any-return]

    @property
    def adamw(self) -> Any:
        """Torch's own inside, whose groups a schedule reads."""
        return self.zero.optimizer

    def step(self, rate: float | None) -> tuple[float, bool]:
        """Like ``MasterAdamW.step``; a collective call."""
        for group in self.zero.param_groups if rate is not None else ():
            group["lr"] = rate
        with exchanging():
            self.engine.step()
            self._publish()
        norm = float(self.zero._global_grad_norm)
        return norm, not self.zero.overflow and math.isfinite(norm)

    @torch.no_grad()
    def _publish(self) -> None:
        """Round the masters into the weights by fixed thresholds: DeepSpeed has rounded them to the nearest. A collective call."""
        if "master" not in self._keys:
            return
        reach = "full" if self.stage == 2 else "local"
        for _, parameter in self.named:
            round_local_(parameter, getattr(self.access, f"safe_get_{reach}_fp32_param")(parameter))

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
        for name, parameter in self.named:
            for key in self._keys:
                whole = self._get(parameter, key)
                if self.world.is_first:
                    tensors[f"{key}.{name}"] = whole.to("cpu", copy=True)
            if self.world.is_first:
                step = max(float(kept["step"]) for kept in self.zero.optimizer.state.values())
                tensors[f"step.{name}"] = torch.tensor(step, dtype=torch.float32)
        return tensors

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave, or ``MasterAdamW.state`` in one process. Weights that have no masters are the model's to restore.

        Raises ValueError for the state of another model or another precision, before anything is changed.
        """
        self._check(state)
        for name, parameter in self.named:
            for key in self._keys:
                saved = state[f"{key}.{name}"]
                piece = saved if self.stage == 2 else _stretch(saved, local(parameter).numel(), self.world.rank)
                self._set(parameter, key, piece)
        for kept in self.zero.optimizer.state.values():
            kept["step"].fill_(float(state[f"step.{self.named[0][0]}"]))
        with exchanging():
            self._publish()

    def _check(self, state: Mapping[str, Tensor]) -> None:
        mine = {f"{key}.{name}" for name, _ in self.named for key in (*self._keys, "step")}
        for key in sorted(mine ^ state.keys()):
            raise ValueError(f"the optimiser's state {'lacks' if key in mine else 'has an unknown'} {key}")


def check_zero(config: Config, hf_config: PretrainedConfig, name: str) -> None:
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
        self._let_go()
        chosen = list(self.blocks.parameters() if parameters is None else parameters)
        return self.deepspeed.zero.GatheredParameters(chosen)

    def _let_go(self) -> None:
        """Let go of what passes of stage 3 have gathered: one without a backward pass leaves weights on their way, fetched for the next."""
        offload = self.engine.optimizer
        getattr(offload, "parameter_offload", offload).partition_all_parameters()

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
                self._let_go()  # of what the outermost module gathered: nothing else does

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
        """The optimiser's are whole already, copies in the first process; in stage 3 the reference's are not whole."""
        shapes = self._shapes()
        tensors = {}
        for name, piece in pieces.items():
            if name not in shapes:  # not copied again: 12 bytes a weight
                tensors[name] = piece
                continue
            tensor = piece
            if self.stage == 3:
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


def _stretch(tensor: Tensor, size: int, rank: int) -> Tensor:
    """What process ``rank`` holds of ``tensor`` in stage 3: ``size`` elements of it, flattened; the last one's are filled up."""
    piece = tensor.reshape(-1)[size * rank : size * (rank + 1)]
    return torch.nn.functional.pad(piece, (0, size - len(piece)))


class _Lazy(Mapping[str, Tensor]):
    """The tensors of a safetensors file."""

    def __init__(self, path: Path, sizes: Mapping[str, int], rank: int) -> None:
        """``sizes``: elements of the stretches that some of them are divided into, of which that of ``rank`` is given."""
        self.file: Any = safe_open(path, framework="pt")
        self.names, self.sizes, self.rank = list(self.file.keys()), sizes, rank

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self.file.get_tensor(name)
        size = self.sizes.get(name)
        return tensor if size is None else _stretch(tensor, size, self.rank)

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
