"""What of a model can be learnt: refused before anything is loaded where that is nothing."""

from __future__ import annotations

from groupwise.config.schema import ModelConfig
from groupwise.errors import ConfigError

__all__ = ["check_trainable"]


def check_trainable(config: ModelConfig) -> None:
    """Raise ConfigError for weights that cannot be trained: quantised ones without an adapter, and a model in pieces."""
    if config.device_map is not None:
        raise ConfigError(
            f"model.device_map is {config.device_map}, which lays one model over several devices for eval and generate, but training needs "
            "it whole on each: leave it out, and use model.quantization=4bit with model.lora, or several processes with training.sharding"
        )
    if config.quantization != "none" and config.lora is None:
        raise ConfigError(
            f"model.quantization is {config.quantization} and model.lora is null, but weights stored in so few bits cannot be trained "
            "themselves: add model.lora={rank: 16, alpha: 32}, or use model.quantization=none"
        )
