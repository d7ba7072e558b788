"""A lean decoder over the parameters of a transformers model of one of the families in ``models/families``.

``Decoder`` owns the trainable tensors: projections that read the same input are fused into one (query, key and value; gate and up), and
the library's module is re-pointed at views of them. So the module, the sampler and the trainer hold the very same memory: an optimiser
step is seen by all three at once, and saving the module saves what was trained. Parity tests hold the decoder equal to the module.

``MergedDecoder`` is the same over a frozen base, quantised or not, with or without an adapter: its weights are merged a layer at a time.
What is sampled and what is learnt go through the same merged weights, so the two agree to the last bit of rounding. Learning keeps no
second copy of the base; the sampler has the merged weights of all layers while it samples. The reference is the same decoder with the
adapter switched off.

Axes: R packed rows, D model width, H query heads, K key-value heads, E head width, F feed-forward width, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from groupwise.models.adapters import KeepsAdapter, base_module, is_adapted, why_not_mergeable
from groupwise.models.attention import default_implementation, plan_attention
from groupwise.models.families import FAMILIES, Family, why_uncovered
from groupwise.models.families.family import FULL, SLIDING
from groupwise.models.layer import Blocks, Layer, Shape, hollow
from groupwise.models.logprobs import Scored, score_tokens
from groupwise.models.merging import MergedLayer, is_adapted_layer
from groupwise.models.ops import rms_norm
from groupwise.models.packing import Packed, PackedTokens, beginning_to_share, pack
from groupwise.models.quantised import is_quantised, store_in_16_bits
from groupwise.threads import adapt_threads

__all__ = ["Decoder", "MergedDecoder", "layer_sources", "settle_tie", "why_not_lean", "why_unsupported"]


def why_unsupported(model: Any, *, any_layers: bool = False) -> str | None:
    """``None`` if the lean decoder computes what ``model`` (a transformers causal LM) computes, else the reason in a few words.

    ``any_layers``: leave it to the caller whether its linear layers are plain ones.
    """
    if (reason := why_uncovered(model.config)) is not None:
        return reason
    for part in (model, model.model, *model.model.layers[:1]):
        if not type(part).__module__.startswith("transformers.models."):
            return f"a class of its own, {type(part).__name__}"
    if not any_layers and any(type(m) is not nn.Linear for m in model.modules() if hasattr(m, "in_features")):
        return "adapters or quantised layers"
    # Not of adapters and quantised layers, whose numbers become the embedding's as they are merged.
    plain = [m for name, m in model.named_modules() if "lora_" not in name and not is_quantised(m)]
    if len({parameter.dtype for module in plain for parameter in module.parameters(recurse=False)}) > 1:
        return "weights of several dtypes"
    return None


def settle_tie(model: Any) -> bool:
    """Whether the output head is the embedding; from now on the config says it too, by which what is saved is loaded.

    Of a file with two tensors that differ, transformers 5 makes two whatever the config says.
    """
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    if head is embedding or head.is_meta:
        tied = head is embedding or bool(model.config.tie_word_embeddings)
    else:
        tied = head.data_ptr() == embedding.data_ptr() != 0 and head.shape == embedding.shape
    model.config.tie_word_embeddings = tied
    return tied


def layer_sources(layer: nn.Module, family: Family) -> dict[str, list[nn.Parameter] | None]:
    """The parameters of a transformers layer that are the rows of each of a ``Layer``'s tensors, by its name; None where it has none.

    An adapter's are not among them, but those that it is beside.
    """
    parameters: dict[str, list[nn.Parameter] | None] = dict.fromkeys(Layer.__slots__)
    for name, places in family.tensors.items():
        modules: list[Any] = [layer.get_submodule(place) for place in places]
        parameters[name] = [module.weight for module in modules]
        if getattr(modules[0], "bias", None) is not None:
            parameters[f"{name}_bias"] = [module.bias for module in modules]
    return parameters


def _rotary(trunk: Any, window: int | None, family: Family) -> Any:
    """What gives layers with this window their rotary factors: in transformers 4 a module of their own, in 5 one that is told the kind."""
    local = getattr(trunk, "rotary_emb_local", None) if family.rope_by_kind and window is not None else None
    return trunk.rotary_emb if local is None else local


class Decoder:
    """The policy (or a reference) as functions of packed rows.

    Args:
        model: a causal LM for which ``why_unsupported`` is ``None``; its parameters become views of this decoder's.
        trainable: whether the tensors require gradients.
        gradient_checkpointing: recompute each layer in the backward pass. Sampling is not affected.
        attention: ``blocked``, ``sdpa``, ``varlen`` or ``auto`` (see ``models/attention.py``).
        device: where it will compute, if its weights are still elsewhere.
    """

    def __init__(
        self, model: Any, *, trainable: bool = True, gradient_checkpointing: bool = False, attention: str = "auto",
        device: torch.device | None = None,
    ) -> None:  # fmt: skip
        reason = why_unsupported(model)
        assert reason is None, reason
        self._read(model, gradient_checkpointing, attention, device)
        self._fused: list[tuple[nn.Parameter, list[nn.Parameter]]] = []
        trunk = model.model
        tied = settle_tie(model)
        self.embedding = self._fuse([trunk.embed_tokens.weight], trainable)
        if tied:
            model.lm_head.weight = trunk.embed_tokens.weight
        self.head = self.embedding if tied else self._fuse([model.lm_head.weight], trainable)
        self.layers: Sequence[Any] = [self._adopt(layer, trainable) for layer in trunk.layers]
        self.final_norm = self._fuse([trunk.norm.weight], trainable)

    def _read(self, model: Any, gradient_checkpointing: bool, attention: str, device: torch.device | None = None) -> None:
        """Read the model's shape from its config, and where it lies."""
        config, trunk = model.config, model.model
        self.module = model
        self.family = FAMILIES[config.model_type]
        settings, family = config.to_dict(), self.family
        self.shape = Shape(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_width=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            epsilon=config.rms_norm_eps,
            norm_offset=family.norm_offset,
            query_scale=family.query_scale_of(settings),
            activation=family.activation_of(settings),
        )
        windows = family.windows(settings)
        self.windows: list[int | None] = sorted(set(windows), key=lambda window: window or 0)
        """The window of each kind of layer, in tokens; None for one that sees all positions."""
        self.kinds = [self.windows.index(window) for window in windows]
        """The kind of each layer, as an index into ``windows``."""
        self.vocabulary: int = config.vocab_size
        self.gradient_checkpointing = gradient_checkpointing
        self.device: torch.device = device or trunk.embed_tokens.weight.device
        self.dtype: torch.dtype = trunk.embed_tokens.weight.dtype
        self.attention = default_implementation(self.device) if attention == "auto" else attention
        scale = torch.tensor(config.hidden_size**0.5).to(self.dtype)  # rounded as the module rounds it
        self.embedding_scale: float | None = scale.item() if family.scales_embedding else None
        self._rotary = [_rotary(trunk, window, family).to(self.device) for window in self.windows]
        self._ropes = [(torch.empty(0), torch.empty(0))] * len(self.windows)
        self.blocks: Blocks | None = None
        """The tensors' home once ``to_modules`` has been called."""
        self.inside: Callable[..., Any] | None = None
        """Runs a computation where the weights of ``blocks`` are gathered as they are needed; None while they are simply there."""

    def _fuse(self, sources: list[nn.Parameter], trainable: bool) -> nn.Parameter:
        """Concatenate along the output axis into one parameter, and make the sources views of it."""
        fused = nn.Parameter(torch.cat([s.data for s in sources]), requires_grad=trainable)
        start = 0
        for source in sources:
            source.requires_grad_(False)
            source.data = fused.data[start : start + len(source)]
            start += len(source)
        self._fused.append((fused, sources))
        return fused

    def to_modules(self) -> Blocks:
        """Move the tensors into modules, and read them from there from now on. The transformers module is hollow afterwards."""
        names = {id(tensor): name for name, tensor in self.named_parameters()}
        self.views = {names[id(fused)]: sources for fused, sources in self._fused}
        tied = self.head is self.embedding
        hollow(self.views, self.device)
        self._settle(Blocks(self.embedding, self.layers, self.final_norm, None if tied else self.head))
        self._fused = []
        assert self.blocks is not None
        return self.blocks

    def meta_copy(self) -> Decoder:
        """Another decoder of this shape, its blocks without weights (on the meta device), to be filled; for one with blocks."""
        assert self.blocks is not None
        twin = copy.copy(self)
        twin.inside = None
        twin._settle(self.blocks.without_weights(self.dtype))
        return twin

    @torch.no_grad()
    def snapshot(self) -> Decoder:
        """A frozen decoder with the weights of this moment in memory of its own; for one with blocks, which are whole now."""

        def own(tensor: Tensor | None) -> Any:
            return None if tensor is None else tensor.detach().clone()

        twin = copy.copy(self)
        twin.blocks, twin.inside = None, None
        twin.embedding, twin.final_norm = own(self.embedding), own(self.final_norm)
        twin.head = twin.embedding if self.head is self.embedding else own(self.head)
        twin.layers = [Layer(*(own(getattr(layer, name)) for name in Layer.__slots__)) for layer in self.layers]
        return twin

    def _settle(self, blocks: Blocks) -> None:
        self.blocks, self.layers = blocks, list(blocks.layers)
        for name in ("embedding", "final_norm", "head"):
            self.__dict__.pop(name, None)

    def __getattr__(self, name: str) -> Any:
        """Tensors that live in ``blocks``: another object whenever they are gathered."""
        if name in ("embedding", "final_norm", "head") and (blocks := self.__dict__.get("blocks")) is not None:
            return blocks.embedding if name == "head" and blocks.head is None else getattr(blocks, name)
        raise AttributeError(name)

    def _adopt(self, layer: Any, trainable: bool) -> Layer:
        tensors = {
            name: sources and self._fuse(sources, trainable) for name, sources in layer_sources(layer, self.family).items()
        }
        return Layer(**tensors)  # type: ignore[arg-type]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Every tensor once, under a stable name; fused ones by their fused name."""
        named: list[tuple[str, Any]] = [("embedding", self.embedding)]
        for index, layer in enumerate(self.layers):
            named += [(f"layers.{index}.{field}", getattr(layer, field)) for field in Layer.__slots__]
        named.append(("final_norm", self.final_norm))
        if self.head is not self.embedding:
            named.append(("head", self.head))
        return [(name, tensor) for name, tensor in named if tensor is not None]

    def embed(self, token_ids: Tensor) -> Tensor:
        """``[R, D]``: what enters the first layer."""
        x = embedding(token_ids, self.embedding)
        return x if self.embedding_scale is None else x * self.embedding_scale

    def ropes(self, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """``cos`` and ``sin`` ``[R, 1, E / 2]`` at reserved ``positions`` ``[R]`` for each kind of layer, as the module's own rotary
        embeddings give them."""
        return [(cos[positions], sin[positions]) for cos, sin in self._ropes]

    def reserve_positions(self, count: int) -> None:
        """Tabulate the rotary embedding for positions below ``count``, so that no step has to ask for the largest position."""
        if count <= len(self._ropes[0][0]):
            return
        probe, positions = torch.empty(1, dtype=self.dtype, device=self.device), torch.arange(count, device=self.device)[None]
        ropes = []
        for rotary, window in zip(self._rotary, self.windows, strict=True):
            kind = (SLIDING if window else FULL,) if self.family.rope_by_kind and hasattr(rotary, "layer_types") else ()
            with torch.no_grad():
                cos, sin = (
                    table[0, :, None, : self.shape.head_width // 2].contiguous() for table in rotary(probe, positions, *kind)
                )
            ropes.append((cos, sin))
        self._ropes = ropes  # whole or not at all: where memory runs out above, whoever tries again finds what there was

    def hidden(self, packed: Packed, keep_kv: Callable[[int, Tensor], None] | None = None) -> Tensor:
        """Outputs of the last layer before the final norm, ``[R, D]``.

        ``keep_kv(layer, kv)``, when given, is called with each layer's rotated keys and values ``[R, 2K, E]``.
        """
        self.reserve_positions(packed.longest)
        plans = plan_attention(packed, self.ropes(packed.positions_R), self.windows, self.attention)
        x = self.embed(packed.token_ids_R)
        for index, layer in enumerate(self.layers):
            adapt_threads()
            run = layer.forward if self.inside is None else layer
            x, keys_values = run(x, plans[self.kinds[index]], self.shape, self.gradient_checkpointing)
            if keep_kv is not None:
                keep_kv(index, keys_values)
        return x

    def prepare(self, groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]) -> Packed:
        """A batch from ``(prompt ids, [completion ids, ...])`` pairs. Blocked attention has what all prompts begin with once."""
        return pack(groups, beginning_to_share(groups) if self.attention == "blocked" else 0).to(self.device)

    def states(self, packed: PackedTokens) -> Tensor:
        """``[T, D]``, differentiable: the states in which the completions' tokens are chosen, which the output head reads."""
        assert isinstance(packed, Packed), "another kind of scorer prepared it"
        return self._states(packed) if self.inside is None else self.inside(self._states, packed)  # type: ignore[no-any-return]

    def _states(self, packed: Packed) -> Tensor:
        return rms_norm(self.hidden(packed).index_select(0, packed.predict_rows_T), self.final_norm, *self.shape.norm)

    def logprobs(self, packed: PackedTokens, temperature: float = 1.0) -> Tensor:
        """Log-probability of every completion token, ``[T]`` in fp32, differentiable."""
        return self.score(packed, temperature).logprobs_T

    def score(
        self, packed: PackedTokens, temperature: float = 1.0, *, entropy: bool = False, keep_hidden: bool = False
    ) -> Scored:
        """Like ``logprobs``, with the entropies and hidden states of the predicted tokens if asked for."""
        assert isinstance(packed, Packed), "another kind of scorer prepared it"
        arguments = (packed, temperature, entropy, keep_hidden)
        return Scored(*(self._score(*arguments) if self.inside is None else self.inside(self._score, *arguments)))

    def _score(self, packed: Packed, temperature: float, entropy: bool, keep_hidden: bool) -> tuple[Tensor | None, ...]:
        states = self._states(packed)
        scored = score_tokens(states, self.head, packed.targets_T, temperature, entropy=entropy, keep_hidden=keep_hidden)
        return scored.logprobs_T, scored.entropy_T, scored.hidden_T


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
    """A ``Decoder`` over a model for which ``why_not_lean`` is None. Trains what peft has left trainable, if anything."""

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
        self.head = self.embedding if settle_tie(base) else base.lm_head.weight
        self.layers = [MergedLayer(layer, self.family, self.dtype) for layer in base.model.layers]
        self.final_norm = base.model.norm.weight
        for _, parameter in self.named_parameters():
            parameter.data = parameter.data.to(self.device)

    def store_in_16_bits(self) -> None:
        """On a CPU, hold the projections of a base in fp32 in bf16, where that changes no number of them; they are widened when they are
        merged. Not for a base that is divided, nor one that its own module computes."""
        if self.device.type != "cpu":
            return
        for layer in self.layers:
            for projection in layer.projections.values():
                for module in projection.layers:
                    store_in_16_bits(getattr(module, "base_layer", module))

    def to_modules(self) -> Blocks:
        """See ``Decoder.to_modules``: of the frozen base. The adapter stays where it is."""
        model = self.module.model
        self.views: dict[str, list[nn.Parameter]] = {}
        layers = [
            merged.move_into_block(self._fused_layer(f"layers.{index}", layer))
            for index, (merged, layer) in enumerate(zip(self.layers, model.layers, strict=True))
        ]
        if tied := self.head is self.embedding:
            self.module.lm_head.weight = model.embed_tokens.weight  # one tensor, and not two that share their numbers
        ends = {"embedding": model.embed_tokens.weight, "final_norm": model.norm.weight}
        ends |= {} if tied else {"head": self.module.lm_head.weight}
        moved = {name: self._moved(name, [weight]) for name, weight in ends.items()}
        blocks, merged_layers = Blocks(moved["embedding"], layers, moved["final_norm"], moved.get("head")), self.layers
        self._settle(blocks)
        self.layers = merged_layers
        return blocks

    def _fused_layer(self, place: str, layer: Any) -> Layer:
        """A layer's frozen tensors; the module's own hold nothing from then on, so that only one layer is there twice."""
        tensors = {
            n: sources and self._moved(f"{place}.{n}", sources) for n, sources in layer_sources(layer, self.family).items()
        }
        return Layer(**tensors)  # type: ignore[arg-type]

    def _moved(self, name: str, sources: list[nn.Parameter]) -> nn.Parameter:
        weights = sources[0].data if len(sources) == 1 else torch.cat([source.data for source in sources])
        self.views[name] = sources
        hollow({name: sources}, self.device)
        return nn.Parameter(weights, requires_grad=False)

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trainable tensors: the adapter's, under the module's names."""
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
