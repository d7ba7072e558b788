"""The families of models that the lean decoder computes: each is one descriptor, which decoder, adapters, planner and sharding read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from groupwise.models.families.family import Family, Settings
from groupwise.models.families.gemma3 import GEMMA3
from groupwise.models.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3

if TYPE_CHECKING:
    from transformers import PretrainedConfig

__all__ = ["FAMILIES", "Family", "Settings", "experts_of", "longrope_positions", "why_uncovered"]

FAMILIES = {family.model_type: family for family in (LLAMA, QWEN2, QWEN3, MISTRAL, GEMMA3)}
"""By transformers' ``model_type``."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def experts_of(settings: Settings) -> int:
    """Experts of a layer of a mixture; 1 or 0 of a dense model. ``settings``: by name, of the text model or of what wraps it."""
    text = settings.get("text_config") or settings
    return max((found for name in _EXPERTS if isinstance(found := text.get(name), int)), default=0)


def longrope_positions(settings: Settings) -> int | None:
    """Positions that LongRoPE's short factors are for (Phi-3 with 128k positions); None for other rotary embeddings.

    transformers rotates all of a batch by other factors as soon as one row is longer, also what goes on from keys that were rotated by
    these. ``settings``: by name, as in a config.json, in which Phi-3 also calls it ``su`` or ``yarn``.
    """
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, Mapping) else None
    if kind != "longrope" and not (settings.get("model_type") == "phi3" and kind in ("su", "yarn")):
        return None
    short = rope.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings")
    return short if isinstance(short, int) else None


def why_uncovered(config: PretrainedConfig | Settings) -> str | None:
    """``None`` if the lean decoder computes models with this config, else the reason in a few words.

    ``config``: a ``PretrainedConfig``, or its settings by name.
    """
    settings: Settings = config if isinstance(config, Mapping) else config.to_dict()
    if (family := FAMILIES.get(settings["model_type"])) is None:
        return f"architecture {settings['model_type']!r} is not one of {', '.join(FAMILIES)}"
    return family.why_uncovered(settings)
