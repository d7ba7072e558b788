"""The lean decoder over a frozen base, quantised or not, with or without an adapter: its weights are merged a layer at a time.

What is sampled and what is learnt go through the same merged weights, so the two agree to the last bit of rounding, and no second copy of
the base is kept for either. The reference is the same decoder with the adapter switched off.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from groupwise.models.adapters import KeepsAdapter, base_module, is_adapted, why_not_mergeable
from groupwise.models.decoder import Decoder, why_unsupported
from groupwise.models.merging import MergedLayer, is_adapted_layer
from groupwise.models.quantised import is_quantised

__all__ = ["MergedDecoder", "why_not_lean"]


def why_not_lean(model: Any) -> str | None:
    """``None`` if a ``MergedDecoder`` computes what ``model`` with its adapter and its quantised layers does, else the reason."""
    base = base_module(model)
    if is_adapted(model) and (reason := why_not_mergeable(model)) is not None:
        return reason
    if (reason := why_unsupported(base, any_layers=True)) is not None:
        return reason
    for outside in (base.model.embed_tokens, base.lm_head):
        if is_adapted_layer(outside) or is_quantised(outside) or hasattr(outside, "lora_embedding_A"):
            return "an adapted or quantised embedding or output head"
    for layer in base.model.layers:
        for module in layer.modules():
            plain = getattr(module, "base_layer", module)
            if hasattr(plain, "in_features") and type(plain) is not nn.Linear and not is_quantised(plain):
                return f"a layer of the kind {type(plain).__name__}"
    return None


class MergedDecoder(Decoder, KeepsAdapter):
    """As ``Decoder``, over a model for which ``why_not_lean`` is None. Trains what peft has left trainable, if anything."""

    def __init__(self, model: Any, *, gradient_checkpointing: bool = False, attention: str = "auto") -> None:
        reason = why_not_lean(model)
        assert reason is None, reason
        self.adapted = model
        base = base_module(model)
        self._read(base, gradient_checkpointing, attention)
        if not is_adapted(model):
            base.requires_grad_(False)
        self.embedding = base.model.embed_tokens.weight
        self.head = self.embedding if base.config.tie_word_embeddings else base.lm_head.weight
        self.layers = [MergedLayer(layer, self.dtype) for layer in base.model.layers]
        self.final_norm = base.model.norm.weight

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trainable tensors: the adapter's, under the module's names."""
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
