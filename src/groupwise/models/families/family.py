"""What a family of models is, to all that computes, divides or plans one. No torch: a plan reads a config.json and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["LLAMA_TENSORS", "Family", "Settings", "Windows", "no_windows", "windows_by_kind"]

Settings = Mapping[str, Any]
"""A model's settings by name, as its config.json has them, or the ``to_dict`` of its ``PretrainedConfig``."""
Windows = tuple[int | None, ...]
"""For each layer, how many positions back a token sees, itself included; None where it sees all."""

LLAMA_TENSORS: Mapping[str, tuple[str, ...]] = {
    "input_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "post_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
FULL, SLIDING = "full_attention", "sliding_attention"
"""Kinds of layers, as transformers' ``layer_types`` names them."""
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations of the feed-forward part by transformers' names, and by those of ``ops.gated``."""
_UNCOVERED = {
    "mlp_bias": "feed-forward projections with biases",
    "attention_dropout": "attention dropout",
    "attn_logit_softcapping": "soft caps of attention scores",
    "final_logit_softcapping": "soft caps of logits",
    "use_bidirectional_attention": "attention in both directions",
}
"""Settings that the lean decoder does not compute where they are on."""
_STATIC_ROPE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings that do not depend on the sequence's length."""


def no_windows(settings: Settings) -> Windows:
    """Every layer sees all positions."""
    return (None,) * int(settings["num_hidden_layers"])


def windows_by_kind(settings: Settings) -> Windows:
    """The window of each kind of layer that ``layer_types`` names."""
    return tuple(settings.get("sliding_window") if kind == SLIDING else None for kind in settings["layer_types"])


def _rope_types(settings: Settings) -> list[str]:
    """The type of the rotary embedding, or of each kind of layer's."""
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    parts = [part for part in rope.values() if isinstance(part, Mapping)] or [rope]
    return [part.get("rope_type", part.get("type", "default")) for part in parts]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family of Llama-like models: where its tensors are, and what it computes that Llama does not."""

    model_type: str
    """By which transformers knows it."""
    tensors: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: LLAMA_TENSORS)
    """For each of a ``Layer``'s tensors, the modules of a transformers layer whose weights are its rows, in order. Their biases are those
    of the projection."""
    qkv_bias: bool = False
    """Whether queries, keys and values always have biases; otherwise ``attention_bias`` says so."""
    tied: bool = False
    """Whether the output head is the embedding where ``tie_word_embeddings`` does not say."""
    activation: tuple[str, str] = ("hidden_act", "silu")
    """The setting that names the feed-forward part's activation, and its default."""
    norm_offset: float = 0.0
    """Added to the weights of all norms, which are then applied in fp32 (Gemma)."""
    scales_embedding: bool = False
    """Whether embeddings are multiplied by the square root of the model's width, rounded to the weights' dtype."""
    query_scalar: str | None = None
    """The setting whose inverse square root scales queries; by default that is the heads' width."""
    windows: Callable[[Settings], Windows] = no_windows
    rope_by_kind: bool = False
    """Whether layers with a window have a rotary embedding of their own."""

    @property
    def head_norm(self) -> bool:
        """Whether queries and keys are normed by head."""
        return "q_norm" in self.tensors

    @property
    def layer_norms(self) -> int:
        """Norms of the model's width in each layer."""
        return sum(name.endswith("_norm") for name in self.tensors) - 2 * self.head_norm

    def why_uncovered(self, settings: Settings) -> str | None:
        """``None`` if the lean decoder computes a model of this family with these settings, else the reason in a few words."""
        if (activation := settings.get(*self.activation)) not in ACTIVATIONS:
            return f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}"
        if others := set(settings.get("layer_types") or ()) - {FULL, SLIDING}:
            return f"layers of the kind {min(others)!r}"
        for kind in _rope_types(settings):
            if kind not in _STATIC_ROPE:
                return f"rotary embedding {kind!r} depends on the sequence length"
        return next((reason for name, reason in _UNCOVERED.items() if settings.get(name)), None)

    def activation_of(self, settings: Settings) -> str:
        """The activation's name in ``ops.gated``."""
        return ACTIVATIONS[settings.get(*self.activation)]

    def query_scale_of(self, settings: Settings) -> float | None:
        """What queries are multiplied by; None for 1 / sqrt of the heads' width."""
        return None if self.query_scalar is None else float(settings[self.query_scalar]) ** -0.5
