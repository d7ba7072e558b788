"""What of a model can be learnt: refused before anything is loaded where that is nothing."""

from __future__ import annotations

from groupwise.config.schema import ModelConfig
from groupwise.errors import ConfigError

__all__ = ["check_trainable"]


def check_trainable(config: ModelConfig) -> None:
    """Raise ConfigError for weights that cannot be trained: quantised ones without an adapter."""
    if config.quantization != "none" and config.lora is None:
        raise ConfigError(
            f"model.quantization is {config.quantization} and model.lora is null, but weights stored in so few bits cannot be trained "
            "themselves: add model.lora={rank: 16, alpha: 32}, or use model.quantization=none"
        )
