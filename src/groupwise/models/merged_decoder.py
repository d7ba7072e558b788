"""The lean decoder over a frozen base, quantised or not, with or without an adapter: its weights are merged a layer at a time.

What is sampled and what is learnt go through the same merged weights, so the two agree to the last bit of rounding, and no second copy of
the base is kept for either. The reference is the same decoder with the adapter switched off.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from groupwise.models.adapters import KeepsAdapter, base_module, is_adapted, why_not_mergeable
from groupwise.models.blocks import Blocks, hollow
from groupwise.models.decoder import Decoder, layer_sources, why_unsupported
from groupwise.models.layer import Layer
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

    def __init__(
        self, model: Any, *, gradient_checkpointing: bool = False, attention: str = "auto", device: torch.device | None = None
    ) -> None:
        """``device``: where it will compute, if its weights are still elsewhere. The adapter goes there now."""
        reason = why_not_lean(model)
        assert reason is None, reason
        self.adapted = model
        base = base_module(model)
        self._read(base, gradient_checkpointing, attention, device)
        if not is_adapted(model):
            base.requires_grad_(False)
        self.embedding = base.model.embed_tokens.weight
        self.head = self.embedding if base.config.tie_word_embeddings else base.lm_head.weight
        self.layers = [MergedLayer(layer, self.family, self.dtype) for layer in base.model.layers]
        self.final_norm = base.model.norm.weight
        for _, parameter in self.named_parameters():
            parameter.data = parameter.data.to(self.device)

    def as_blocks(self) -> Blocks:
        """See ``Decoder.as_blocks``: of the frozen base. The adapter stays where it is."""
        model = self.module.model
        self.views: dict[str, list[nn.Parameter]] = {}
        layers = [
            merged.settle(self._fused_layer(f"layers.{index}", layer))
            for index, (merged, layer) in enumerate(zip(self.layers, model.layers, strict=True))
        ]
        if tied := self.head is self.embedding:
            self.module.lm_head.weight = model.embed_tokens.weight  # one tensor, and not two that share their numbers
        ends = {"embedding": model.embed_tokens.weight, "final_norm": model.norm.weight}
        ends |= {} if tied else {"head": self.module.lm_head.weight}
        found = {name: self._moved(name, [weight]) for name, weight in ends.items()}
        blocks, merged_layers = Blocks(found["embedding"], layers, found["final_norm"], found.get("head")), self.layers
        self._settle(blocks)
        self.layers = merged_layers
        return blocks

    def _fused_layer(self, place: str, layer: Any) -> Layer:
        """A layer's frozen tensors; the module's own hold nothing from then on, so that only one layer is there twice."""
        found = {n: sources and self._moved(f"{place}.{n}", sources) for n, sources in layer_sources(layer, self.family).items()}
        return Layer(**found)  # type: ignore[arg-type]

    def _moved(self, name: str, sources: list[nn.Parameter]) -> nn.Parameter:
        weights = sources[0].data if len(sources) == 1 else torch.cat([source.data for source in sources])
        self.views[name] = sources
        hollow({name: sources}, self.device)
        return nn.Parameter(weights, requires_grad=False)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trainable tensors: the adapter's, under the module's names."""
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
