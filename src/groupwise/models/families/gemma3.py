"""Gemma 3 without its eyes (``Gemma3ForCausalLM``; Gemma Team, arXiv 2503.19786).

Against Llama: five layers of six see a window of positions, with a rotary embedding of their own; what attention and feed-forward add is
normed as well as what they read; a norm's weight is stored as its difference from 1; queries and keys are normed by head; embeddings
and queries have scales of their own; the gate is GELU.
"""

from __future__ import annotations

from groupwise.models.families.family import LLAMA_TENSORS, Family, Settings, Windows, windows_by_kind

__all__ = ["GEMMA3"]


def _windows(settings: Settings) -> Windows:
    """Older files give the pattern as a number: the last of so many layers sees everything."""
    if settings.get("layer_types") is not None:
        return windows_by_kind(settings)
    pattern, window = int(settings.get("sliding_window_pattern", 6)), settings.get("sliding_window", 4096)
    return tuple(window if (layer + 1) % pattern else None for layer in range(int(settings["num_hidden_layers"])))


GEMMA3 = Family(
    model_type="gemma3_text",
    tensors={
        **LLAMA_TENSORS,
        "q_norm": ("self_attn.q_norm",),
        "k_norm": ("self_attn.k_norm",),
        "attention_norm": ("post_attention_layernorm",),
        "post_norm": ("pre_feedforward_layernorm",),
        "feed_forward_norm": ("post_feedforward_layernorm",),
    },
    tied=True,
    activation=("hidden_activation", "gelu_pytorch_tanh"),
    norm_offset=1.0,
    scales_embedding=True,
    query_scalar="query_pre_attn_scalar",
    windows=_windows,
    rope_by_kind=True,
)
