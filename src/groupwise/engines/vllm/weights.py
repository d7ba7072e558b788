"""A policy's weights as what travels: named tensors as in a checkpoint, an adapter merged into them, in parts of bounded size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from groupwise.errors import ConfigError
from groupwise.models.adapters import base_module, is_adapted, why_not_mergeable

__all__ = ["check_pushable", "named_weights", "packed_buckets"]


def check_pushable(model: Any, name: str) -> None:
    """Raises ConfigError where the model's weights are not what a checkpoint would hold, so that vLLM could not take them."""
    reason = why_not_mergeable(model) if is_adapted(model) else None
    odd = next((n for n, p in base_module(model).named_parameters() if not p.dtype.is_floating_point), None)
    if reason is None and odd is not None:
        reason = f"{odd} is quantised"
    if reason is not None:
        raise ConfigError(
            f"rollout.engine is vllm, which is sent plain weights, but {name} has {reason}: use rollout.engine=auto"
        )


@torch.no_grad()
def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a checkpoint would hold, under its name there, on the CPU. Tied ones come once, under the first name. An adapter is
    added up in fp32 and rounded once, layer by layer: no second copy of the model.
    """
    seen: set[int] = set()
    merged = dict(_merged_layers(model)) if is_adapted(model) else {}
    for name, tensor in base_module(model).state_dict().items():
        parts = name.split(".")
        if any(part.startswith("lora_") for part in parts):
            continue
        layer = name.partition(".base_layer.")[0]
        delta = merged.get(layer) if name.endswith(".base_layer.weight") else None
        if delta is not None:
            tensor = (tensor.float() + delta().float()).to(tensor.dtype)
        elif tensor.data_ptr() in seen:
            continue
        else:
            seen.add(tensor.data_ptr())
        yield name.replace(".base_layer.", "."), tensor.detach().to("cpu").contiguous()


def _merged_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Adapted layers by name, each with what computes its scaled B A."""
    adapter = model.active_adapter
    for name, layer in base_module(model).named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            yield name, lambda layer=layer: layer.get_delta_weight(adapter)


def packed_buckets(model: Any, limit: int) -> Iterator[tuple[bytes, str]]:
    """The weights as safetensors of about ``limit`` bytes each (a larger tensor travels alone), with the SHA-256 of each."""
    part: dict[str, Tensor] = {}
    for name, tensor in named_weights(model):
        if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > limit:
            yield _packed(part)
            part = {}
        part[name] = tensor
    if part:
        yield _packed(part)


def _packed(part: dict[str, Tensor]) -> tuple[bytes, str]:
    data = save(part)
    return data, hashlib.sha256(data).hexdigest()
