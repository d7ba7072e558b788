"""Llama, and the families that differ from it by biases, norms of the heads, or windows."""

from __future__ import annotations

from groupwise.models.families.family import LLAMA_TENSORS, Family, Settings, Windows, windows_by_kind

__all__ = ["LLAMA", "MISTRAL", "QWEN2", "QWEN3"]

_MISTRAL_WINDOW = 4096


def _qwen_windows(settings: Settings) -> Windows:
    """Windows of the layers from ``max_window_layers`` on, where windows are switched on; newer files name the kind of each layer."""
    layers, first = range(int(settings["num_hidden_layers"])), int(settings.get("max_window_layers") or 0)
    if settings.get("layer_types") is not None:
        return windows_by_kind(settings)
    on = bool(settings.get("use_sliding_window"))
    return tuple(settings.get("sliding_window") if on and layer >= first else None for layer in layers)


def _mistral_windows(settings: Settings) -> Windows:
    """All layers or none. The first models had windows: a config.json that does not say means them."""
    return (settings.get("sliding_window", _MISTRAL_WINDOW),) * int(settings["num_hidden_layers"])


LLAMA = Family(model_type="llama")
QWEN2 = Family(model_type="qwen2", qkv_bias=True, windows=_qwen_windows)
QWEN3 = Family(
    model_type="qwen3",
    tensors={**LLAMA_TENSORS, "q_norm": ("self_attn.q_norm",), "k_norm": ("self_attn.k_norm",)},
    windows=_qwen_windows,
)
MISTRAL = Family(model_type="mistral", windows=_mistral_windows)
