"""Reward models in a plan: the weights that lie beside the policy's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from groupwise.config.rewards import RewardModelConfig
from groupwise.config.schema import Config, ModelConfig
from groupwise.errors import ModelError
from groupwise.planner.shape import find_shape

__all__ = ["judge_bytes", "unknown_judges"]


def judge_bytes(config: Config) -> int:
    """Weights of the reward models on the policy's device. Those that `unknown_judges` names are left out.

    A classifier has the language model's layers and embedding, and a score head of one row per label in place of the output head.
    """
    return sum(_bytes_per_weight(model) * found for model in _beside(config) if (found := _weights(model)) is not None)


def unknown_judges(config: Config) -> list[str]:
    """Reward models whose config.json cannot be had, or is not that of a Llama-like decoder."""
    return [model.name for model in _beside(config) if _weights(model) is None]


def _beside(config: Config) -> Iterator[RewardModelConfig]:
    """Reward models that share the policy's device."""
    for entry in config.rewards.functions:
        if entry.model is not None and entry.model.device in ("auto", config.model.device):
            yield entry.model


def _weights(model: RewardModelConfig) -> int | None:
    try:
        shape = find_shape(ModelConfig(name=model.name, revision=model.revision))
    except ModelError:
        return None
    return replace(shape, tied=True).parameters + shape.width


def _bytes_per_weight(model: RewardModelConfig) -> int:
    return 4 if model.dtype == "float32" else 2  # checkpoints are nearly all half precision where dtype is auto
