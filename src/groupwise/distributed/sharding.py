"""How the weights and the optimiser's state are divided among the processes: who decides it, and what a way of dividing has to offer.

The ways themselves are in ``training/sharding``. Training calls the methods below wherever it would otherwise touch weights, gradients
or state; with whole replicas most of them do nothing. What a launcher's configuration asks for is honoured, or refused by name; never
passed over.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from groupwise.config.schema import OptimizerConfig
from groupwise.errors import ConfigError
from groupwise.metrics import Mean

if TYPE_CHECKING:
    from groupwise.models.load import Policy
    from groupwise.models.scorer import Scorer

__all__ = ["Optimizer", "Sharding", "chosen_sharding", "refuse_without_deepspeed", "sharding_of_launcher", "zero_of_launcher"]

_ALONE = "leave parallelism_config out: the weights are divided among all processes, or not at all"
_REFUSED = (
    ("ACCELERATE_MIXED_PRECISION", "mixed_precision", "no", "set it to no (or add --mixed_precision no), and set model.dtype"),
    ("ACCELERATE_DYNAMO_BACKEND", "dynamo_backend", "no", "leave dynamo_config out"),
    ("ACCELERATE_USE_MEGATRON_LM", "use_megatron_lm", "false", "choose FSDP version 2 or DeepSpeed's ZeRO"),
    ("PARALLELISM_CONFIG_DP_REPLICATE_SIZE", "parallelism_config_dp_replicate_size", "1", _ALONE),
    ("PARALLELISM_CONFIG_TP_SIZE", "parallelism_config_tp_size", "1", _ALONE),
    ("PARALLELISM_CONFIG_CP_SIZE", "parallelism_config_cp_size", "1", _ALONE),
    ("PARALLELISM_CONFIG_SP_SIZE", "parallelism_config_sp_size", "1", _ALONE),
)  # fmt: skip
"""Environment variable, its name in Accelerate's configuration, the value of one that asks for nothing, and the remedy."""
_REFUSED_OF_FSDP = (
    ("FSDP_OFFLOAD_PARAMS", "fsdp_offload_params", "false", "set it to false"),
    ("FSDP_ACTIVATION_CHECKPOINTING", "fsdp_activation_checkpointing", "false", "use model.gradient_checkpointing=true instead"),
    ("FSDP_RESHARD_AFTER_FORWARD", "fsdp_reshard_after_forward", "true", "set it to true"),
)  # fmt: skip
_REFUSED_OF_DEEPSPEED = (
    ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "deepspeed_config_file", "auto", "leave it out and set zero_stage"),
    ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "offload_optimizer_device", "auto", "set it to none"),
    ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "offload_param_device", "auto", "set it to none"),
    ("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "deepspeed_moe_layer_cls_names", "auto", "leave it out"),
    ("ACCELERATE_GRADIENT_CLIPPING", "gradient_clipping", "auto", "leave it out and set optimizer.max_grad_norm"),
)  # fmt: skip


def _refuse(environment: Mapping[str, str], rows: Sequence[tuple[str, str, str, str]]) -> None:
    for variable, name, nothing, remedy in rows:
        if (value := environment.get(variable, nothing)).lower() not in (nothing, "none", ""):
            raise ConfigError(
                f"the configuration of accelerate launch sets {name} to {value}, which groupwise does not take from there: "
                f"{remedy}"
            )


def zero_of_launcher(environment: Mapping[str, str]) -> str | None:
    """``zero2`` or ``zero3`` where ``accelerate launch``'s configuration asks for DeepSpeed, else None.

    Raises ConfigError for what groupwise does not take from there, and where DeepSpeed is not installed.
    """
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() not in ("true", "1"):
        return None
    _refuse(environment, _REFUSED_OF_DEEPSPEED)
    if (taken := environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")) not in ("1", "auto"):
        raise ConfigError(
            f"the configuration of accelerate launch sets gradient_accumulation_steps to {taken}: leave it out, since micro-batches "
            "are cut by training.micro_batch_tokens"
        )
    stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    if stage not in ("2", "3"):
        raise ConfigError(
            f"the configuration of accelerate launch asks for DeepSpeed's ZeRO stage {stage}: groupwise knows 2 and 3, so set "
            "zero_stage to one of them"
        )
    refuse_without_deepspeed("the configuration of accelerate launch asks for DeepSpeed")
    return f"zero{stage}"


def refuse_without_deepspeed(who_asks: str) -> None:
    """Raise ConfigError where the package is not installed."""
    if find_spec("deepspeed") is None:
        raise ConfigError(f"{who_asks}, and the package deepspeed is not installed: `pip install 'groupwise[deepspeed]'`")


class Optimizer(Protocol):
    """What steps the policy's weights, as ``training.optimizer.MasterAdamW`` does; that says what each method is for."""

    @property
    def adamw(self) -> Any:
        """Torch's optimiser inside, whose groups a schedule reads."""
        ...

    @property
    def loss_scale(self) -> float: ...

    @property
    def can_recover(self) -> bool: ...

    @property
    def lost(self) -> Mean | None: ...

    def gradients(self) -> list[Tensor | None]: ...

    def zero_gradient(self, index: int) -> Tensor: ...

    def step(self, rate: float | None, /) -> tuple[float, bool]: ...

    def clear(self) -> None: ...

    def close(self) -> None: ...

    def state(self) -> dict[str, Tensor]: ...

    def load_state(self, state: Mapping[str, Tensor]) -> None: ...


class Sharding(Protocol):
    """One way of dividing. Every process must call each method, in one order, but for those that say otherwise."""

    name: str
    divides_weights: bool
    """Whether a process holds only a part of the weights; then passes speak to the other processes."""

    def make_optimizer(self, config: OptimizerConfig) -> Optimizer:
        """One of the policy's weights."""
        ...

    def make_reference(self, scorer: Scorer) -> Scorer:
        """A frozen copy of the policy as it is now, divided likewise."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """The policy's weights, as they are now, whole where an engine or a copy reads them. Not one inside another."""
        ...

    def evened(self, scorer: Scorer, passes: int) -> AbstractContextManager[None]:
        """Around ``passes`` passes of ``scorer`` here: at its end as many more that compute nothing of use, until all processes have
        made equally many; each with a backward pass where gradients are switched on.

        How many those are is agreed on before the first: later, one process would ask while another waits in a pass.
        """
        ...

    def backward(self, loss: Tensor) -> None:
        """The backward pass. Not a collective call of its own: ``evened`` matches what it exchanges."""
        ...

    def sum_gradients(self, optimizer: Optimizer) -> None:
        """Sum what has added up in ``optimizer`` over the processes, before its step."""
        ...

    def check(self) -> None:
        """Raise RankError where the processes no longer train one model."""
        ...

    def whole_policy(self, policy: Policy) -> Policy | None:
        """``policy`` with whole weights, for the first process; None in others that hold only a part."""
        ...

    def whole_state(self, pieces: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Whole tensors from each process's pieces, for the first process; keys end with the parameter's name."""
        ...

    def read_state(self, path: Path) -> Mapping[str, Tensor]:
        """This process's pieces of a file of whole tensors. Not a collective call."""
        ...


def sharding_of_launcher(environment: Mapping[str, str] | None = None) -> str | None:
    """What ``accelerate launch``'s configuration asks for, or None. Raises ConfigError for what groupwise cannot do."""
    variables = os.environ if environment is None else environment
    _refuse(variables, _REFUSED)
    if variables.get("ACCELERATE_USE_FSDP", "false").lower() in ("true", "1"):
        return _fsdp(variables)
    return zero_of_launcher(variables)


def _fsdp(environment: Mapping[str, str]) -> str:
    if environment.get("FSDP_VERSION", "1") != "2":
        raise ConfigError(
            "the configuration of accelerate launch asks for FSDP version 1, and groupwise works with version 2: set fsdp_version: 2 "
            "in its fsdp_config (launch/fsdp2-8gpu.yaml is one that works)"
        )
    _refuse(environment, _REFUSED_OF_FSDP)
    return "fsdp2"


def chosen_sharding(setting: str, processes: int, environment: Mapping[str, str] | None = None) -> str:
    """``none``, ``fsdp2``, ``zero2`` or ``zero3``, from ``training.sharding`` and the launcher's configuration.

    A world of one divides nothing. Raises ConfigError where the two contradict each other.
    """
    launched = sharding_of_launcher(environment)
    if setting != "auto" and launched is not None and launched != setting:
        raise ConfigError(
            f"training.sharding is {setting}, but the configuration of accelerate launch asks for {launched}: change one of them, or "
            "leave training.sharding at auto"
        )
    wanted = (launched or "none") if setting == "auto" else setting
    return wanted if processes > 1 else "none"
