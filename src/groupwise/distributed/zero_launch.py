"""What a launcher's DeepSpeed configuration asks for, and whether it can be had: honoured, or refused by name; never passed over."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec

from groupwise.errors import ConfigError

__all__ = ["refuse_without_deepspeed", "zero_of_launcher"]

_REFUSED = (
    ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "deepspeed_config_file", "leave it out and set zero_stage: groupwise writes DeepSpeed's settings"),
    ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "offload_optimizer_device", "set it to none"),
    ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "offload_param_device", "set it to none"),
    ("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES", "deepspeed_moe_layer_cls_names", "leave it out"),
    ("ACCELERATE_GRADIENT_CLIPPING", "gradient_clipping", "leave it out and set optimizer.max_grad_norm"),
)  # fmt: skip
"""Environment variable, its name in Accelerate's configuration, and the remedy."""


def zero_of_launcher(environment: Mapping[str, str]) -> str | None:
    """``zero2`` or ``zero3`` where ``accelerate launch``'s configuration asks for DeepSpeed, else None.

    Raises ConfigError for what groupwise does not take from there, and where DeepSpeed is not installed.
    """
    if environment.get("ACCELERATE_USE_DEEPSPEED", "false").lower() not in ("true", "1"):
        return None
    for variable, name, remedy in _REFUSED:
        if (value := environment.get(variable, "none")).lower() not in ("none", "auto", ""):
            raise ConfigError(
                f"the configuration of accelerate launch sets {name} to {value}, which groupwise does not take: {remedy}"
            )
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
