"""DeepSpeed's engine over a decoder's blocks: how it is set up, so that it computes what one process computes."""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import torch

from groupwise.config.schema import OptimizerConfig
from groupwise.errors import ConfigError
from groupwise.models.blocks import Blocks

__all__ = ["give_settings", "import_deepspeed", "make_engine"]

_BUCKET_ELEMENTS = 50_000_000
"""Gradients that are added up in one message: 200 MB in fp32."""


def import_deepspeed(device_type: str) -> Any:
    """The package, silent but for errors. Raises ConfigError where it is set up for another kind of device than the model's."""
    os.environ.setdefault("DS_ACCELERATOR", device_type)  # it asks what is in the machine, not where the model is
    with _quiet():
        import deepspeed
    found = deepspeed.accelerator.get_accelerator().device_name()
    if found != device_type:
        raise ConfigError(
            f"DeepSpeed is set up for {found}, and the model is on {device_type}: set DS_ACCELERATOR={device_type} in the environment"
        )
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed 0.19 calls collectives by names that torch 2.13 calls old, once for every layer of every pass.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    return deepspeed


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what DeepSpeed prints and warns of while it is imported and set up."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def _config(stage: int, blocks: Blocks, dtype: torch.dtype, device_type: str, max_grad_norm: float | None) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": stage, "reduce_bucket_size": _BUCKET_ELEMENTS, "allgather_bucket_size": _BUCKET_ELEMENTS,
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
    """Of all its parameters, whether they are divided or not."""
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
    settle: Callable[[torch.nn.Module], None] = lambda module: None,
) -> Any:
    """For all processes at once. Without ``optimizer`` it only computes. ``settle`` is called with each module before stage 3 divides it,
    and puts its tensors where they belong."""
    config = _config(stage, blocks, dtype, device.type, optimizer.max_grad_norm if optimizer else None)
    with _quiet():
        if stage == 3:
            _divide(deepspeed, blocks, config, settle)
        adamw = _adamw_over(blocks, optimizer) if optimizer else None
        return deepspeed.initialize(model=blocks, optimizer=adamw, config=config, dist_init_required=False)[0]


def _divide(deepspeed: Any, blocks: Blocks, config: dict[str, Any], settle: Callable[[torch.nn.Module], None]) -> None:
    """A layer at a time: each is moved to its device, divided and let go of before the next."""
    for module in (*blocks.layers, blocks):
        settle(module)
        deepspeed.zero.Init(module=module, config_dict_or_path=config)
