"""Low-rank adapters (LoRA, arXiv 2106.09685) on a frozen base, by the library peft, which is imported only when one is asked for.

The policy's model is then a ``PeftModel``. Where the lean decoder covers it, it is sampled and learnt through weights that are merged a
layer at a time (``models/decoder.py``), else through the base's own module, into which peft has put its layers. The reference is
the same with the adapter off.
"""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from groupwise.errors import ModelError
from groupwise.importing import in_one_line
from groupwise.models.devices import has_device_map
from groupwise.models.logprobs import Scored
from groupwise.models.merging import is_adapted_layer, merged_weight
from groupwise.models.module_scorer import ModuleScorer, Padded
from groupwise.models.ops import scramble, uniforms
from groupwise.models.packing import PackedTokens
from groupwise.models.quantised import dense_weight, is_quantised
from groupwise.models.quiet import quieten_bitsandbytes
from groupwise.models.saving import Made

if TYPE_CHECKING:
    from groupwise.config.schema import LoraConfig

__all__ = [
    "NOT_TRAINABLE",
    "AdapterScorer",
    "KeepsAdapter",
    "ReferenceWithoutAdapter",
    "attach",
    "base_module",
    "drops_out",
    "has_injected_adapter",
    "is_adapted",
    "load_adapter",
    "load_trained",
    "merged",
    "merged_state",
    "peft_config_of",
    "require_peft",
    "why_not_mergeable",
]

_DRAWN = 2**22
"""Numbers that dropout draws at a time: bounds its memory."""
_QUANTISED = ("Linear4bit", "Linear8bitLt")
"""peft's layers around those of bitsandbytes."""
NOT_TRAINABLE = "no parameter of the adapter is trainable: load it with is_trainable=True"
_REFERENCE = "ref"
"""Name of the frozen copy of an adapter that had been trained before this run began."""


def is_adapted(model: Any) -> bool:
    """Whether ``model`` is peft's."""
    return hasattr(model, "peft_config") and hasattr(model, "get_base_model")


def has_injected_adapter(model: Any) -> bool:
    """Whether transformers itself has put an adapter into ``model`` (``add_adapter``, or files beside its own): computed by its module
    alone, and left out by whatever else reads the weights."""
    return bool(getattr(base_module(model), "_hf_peft_config_loaded", False))


def base_module(model: Any) -> Any:
    """The causal LM itself, with the adapter's layers in their places; any other model as it is."""
    return model.get_base_model() if is_adapted(model) else model


def peft_config_of(config: LoraConfig) -> Any:
    """``model.lora`` as peft's own config."""
    return require_peft().LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        target_modules=config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules),
        task_type="CAUSAL_LM",
    )


def attach(model: Any, peft_config: Any, seed: int = 0, revision: str | None = None) -> Any:
    """Put a new adapter on ``model`` and freeze the rest. Its weights are drawn from ``seed``; at first it changes nothing.
    ``revision``: the model's on the Hub, which goes with the adapter.

    Raises ModelError where peft is missing, the model has an adapter already, peft refuses the config, or it adapts one of two ends that
    are one tensor.
    """
    peft = require_peft()
    if not isinstance(peft_config, peft.PeftConfig):
        raise ModelError(f"peft_config is a {type(peft_config).__name__}, but it must be one of peft's, such as peft.LoraConfig")
    if is_adapted(model):
        raise ModelError("the model has an adapter already: pass it without peft_config, or merge_and_unload() it first")
    if peft_config.is_prompt_learning or peft_config.is_adaption_prompt:
        raise ModelError(
            f"{type(peft_config).__name__} puts trained vectors before the prompt, which is not covered: use a peft.LoraConfig"
        )
    try:
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        tied = None not in ends and ends[0].weight is ends[1].weight
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            adapted = peft.get_peft_model(model, peft_config, revision=revision)
    except (TypeError, ValueError) as error:
        raise ModelError(f"the adapter does not fit this model ({' '.join(str(error).split())}): fix target_modules") from error
    outside = (base_module(adapted).get_input_embeddings(), base_module(adapted).get_output_embeddings())
    if tied and any(is_adapted_layer(end) for end in outside):
        raise ModelError(
            "target_modules names the embedding or the output head, which are one tensor in this model: a merged model could not hold what "
            "only one of them learns; leave it out"
        )
    return adapted


def load_adapter(model: Any, folder: Path) -> None:
    """Overwrite the active adapter's weights by those that ``model.save_pretrained(folder)`` wrote: below its name, unless that is
    ``default``."""
    from safetensors.torch import load_file

    peft, name = require_peft(), model.active_adapter
    file = (folder if name == "default" else folder / name) / "adapter_model.safetensors"
    loaded = peft.set_peft_model_state_dict(model, load_file(file), adapter_name=name)
    if loaded.unexpected_keys:
        raise ModelError(f"the adapter in {folder} has {loaded.unexpected_keys[0]}, which this one lacks: use the same settings")


def load_trained(policy: Any, folder: Path) -> Any:
    """``policy`` with the adapter that peft's ``save_pretrained`` wrote into ``folder``. Raises ModelError where it does not fit, or is
    damaged."""
    peft = require_peft()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")  # they would add nothing
            model = peft.PeftModel.from_pretrained(policy.model, folder)
        # It tells nobody which weights found no place. Of a model that lies on the disk in part not all places can be filled once more.
        if not has_device_map(policy.model):
            renamed = getattr(policy.model, "_checkpoint_conversion_mapping", None)  # by transformers 4; 5 does so by itself
            loaded = peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(folder), device="cpu", key_mapping=renamed))
            if loaded.unexpected_keys:
                raise ValueError(f"no place for {loaded.unexpected_keys[0]}")
    except (
        EOFError, KeyError, OSError, RuntimeError, SafetensorError, TypeError, UserWarning, ValueError, pickle.UnpicklingError,
    ) as error:  # fmt: skip
        raise ModelError(
            f"the adapter in {folder} does not fit {policy.name} ({in_one_line(error)}): name its own base with --base"
        ) from error
    return replace(policy, model=model.eval())


class KeepsAdapter:
    """What scorers of an adapted model have in common. ``adapted`` is peft's model."""

    adapted: Any

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        raise NotImplementedError

    def keep_present_adapter(self) -> None:
        """Let the reference be the adapter as it is now, in place of none: for one that comes trained.

        What an earlier call kept is overwritten. Raises ModelError where a script's own adapter has the reference's name.
        """
        name = self.adapted.active_adapter
        trainable = [p for _, p in self.named_parameters()]
        if _REFERENCE not in self.adapted.peft_config:
            config = copy.deepcopy(self.adapted.peft_config[name])
            config.init_lora_weights = False  # PiSSA and its like would take their factors out of the base once more
            self.adapted.add_adapter(_REFERENCE, config)
            self.adapted.keeps_reference = True
        elif name == _REFERENCE or not getattr(self.adapted, "keeps_reference", False):
            raise ModelError(
                f"the model has an adapter of its own named {_REFERENCE!r}, which is the reference's name: load it under another"
            )
        weights = dict(self.adapted.named_parameters())
        for key, parameter in weights.items():
            parts = key.split(".")  # an embedding's factors and trained tokens end in the name
            if _REFERENCE in parts:
                parameter.data.copy_(weights[".".join(name if part == _REFERENCE else part for part in parts)].data)
                parameter.requires_grad_(False)
        for parameter in trainable:
            parameter.requires_grad_(True)


class Noise:
    """The names of what dropout draws: a seed, and for every token of the pass at hand a key that stands for it and all before it."""

    def __init__(self) -> None:
        self.seed = 0
        self.keys: Tensor | None = None

    def tokens(self, token_ids: Tensor) -> None:
        """``[N, L]`` of the next pass. Padding on the right changes nothing."""
        places = torch.arange(token_ids.shape[1], device=token_ids.device)
        self.keys = scramble(token_ids, places).cumsum(1)


class NamedDropout(nn.Dropout):
    """Dropout whose mask is a function of (seed, layer, the tokens up to this one, feature) alone, and of no generator's state.

    So it is the same in all updates of a batch, in the old log-probabilities and in what a backward pass computes again, and does not
    depend on how the batch is cut, padded or divided among processes.
    """

    def __init__(self, p: float, layer: int, noise: Noise) -> None:
        super().__init__(p)
        self.layer, self.noise = layer, noise

    def forward(self, x: Tensor) -> Tensor:
        """``x`` is ``[N, L, D]``. Of another shape (tokens that were sent to an expert), rows are named by their places."""
        if not self.training or self.p == 0:
            return x
        keys, features = self.noise.keys, torch.arange(x.shape[-1], device=x.device)
        if keys is None or keys.shape != x.shape[:-1]:
            keys = torch.arange(x[..., 0].numel(), device=x.device).view(x.shape[:-1])
        names = scramble(scramble(keys, torch.tensor(self.noise.seed)), torch.tensor(self.layer)).reshape(-1, 1)
        rows = max(1, _DRAWN // x.shape[-1])
        kept = torch.cat([uniforms(some, features) >= self.p for some in names.split(rows)])
        return x * kept.view(x.shape).to(x.dtype).div_(1 - self.p)


class AdapterScorer(ModuleScorer, KeepsAdapter):
    """A ``ModuleScorer`` that trains what peft has left trainable. The adapter's dropout acts where gradients are computed."""

    def __init__(self, model: Any) -> None:
        marked = [p for p in model.parameters() if p.requires_grad]
        self.adapted = model
        super().__init__(base_module(model), trainable=False)
        for parameter in marked:
            parameter.requires_grad_(True)
        if not marked:
            raise ModelError(NOT_TRAINABLE)
        self.noise, self._learns = Noise(), False
        self._dropouts: list[NamedDropout] = []
        for name, module in list(self.module.named_modules()):
            if "lora_dropout" in name and isinstance(module, nn.Dropout) and module.p:
                self._dropouts.append(NamedDropout(module.p, len(self._dropouts), self.noise))
                self.module.set_submodule(name, self._dropouts[-1])

    def seed_noise(self, seed: int) -> None:
        """Make what dropout draws from now on a function of this and of the tokens: to be called before each batch."""
        self.noise.seed = seed

    @contextmanager
    def as_in_learning(self) -> Iterator[None]:
        """Dropout acts in here also where no gradients are computed: for log-probabilities that later ones are measured by."""
        self._learns = True
        try:
            yield
        finally:
            self._learns = False

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The trainable tensors: the adapter's."""
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    def score(self, batch: PackedTokens, temperature: float = 1.0, *, entropy: bool = False, keep_hidden: bool = False) -> Scored:
        """See ``ModuleScorer.score``. Dropout stays on until the next call, since the backward pass may recompute."""
        assert isinstance(batch, Padded), "another kind of scorer prepared it"
        self.noise.tokens(batch.token_ids)
        result = super().score(batch, temperature, entropy=entropy, keep_hidden=keep_hidden)
        self._set_dropout(torch.is_grad_enabled())
        return result

    def states(self, batch: PackedTokens) -> Tensor:
        """See ``ModuleScorer.states``; dropout as for ``score``."""
        assert isinstance(batch, Padded), "another kind of scorer prepared it"
        self.noise.tokens(batch.token_ids)
        result = super().states(batch)
        self._set_dropout(torch.is_grad_enabled())
        return result

    def _set_modes(self, learning: bool) -> None:
        super()._set_modes(learning)
        self._set_dropout(learning or self._learns)

    def _set_dropout(self, on: bool) -> None:
        for dropout in self._dropouts:
            dropout.training = on


class ReferenceWithoutAdapter:
    """A policy's reference that needs no memory: the same module with the adapter off (or with the one it came with)."""

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer
        self.module, self.device = scorer.module, scorer.device

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """None: nothing of its own."""
        return []

    def prepare(self, groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]) -> PackedTokens:
        packed: PackedTokens = self.scorer.prepare(groups)
        return packed

    @torch.no_grad()
    def logprobs(self, batch: PackedTokens, temperature: float = 1.0) -> Tensor:
        return self.score(batch, temperature).logprobs_T

    @torch.no_grad()
    def score(self, batch: PackedTokens, temperature: float = 1.0, *, entropy: bool = False, keep_hidden: bool = False) -> Scored:
        with self._reference():
            return self.scorer.score(batch, temperature, entropy=entropy, keep_hidden=keep_hidden)

    @contextmanager
    def _reference(self) -> Iterator[None]:
        model = self.scorer.adapted
        if _REFERENCE not in model.peft_config:
            with model.disable_adapter():
                yield
            return
        active, trainable = model.active_adapter, [p for _, p in self.scorer.named_parameters()]
        model.set_adapter(_REFERENCE)
        try:
            yield
        finally:
            model.set_adapter(active)
            for name, parameter in model.named_parameters():
                if _REFERENCE in name.split("."):
                    parameter.requires_grad_(False)
            for parameter in trainable:
                parameter.requires_grad_(True)


def why_not_mergeable(model: Any) -> str | None:
    """``None`` if base plus low-rank product is all that the adapter does, else the reason."""
    if list(model.peft_config) != [model.active_adapter] and set(model.peft_config) != {model.active_adapter, _REFERENCE}:
        return "several adapters"
    for config in model.peft_config.values():
        if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
            return f"an adapter of the kind {config.peft_type}"
        if config.use_dora or config.bias != "none" or getattr(config, "modules_to_save", None):
            return "an adapter that is more than two low-rank factors"
        if getattr(config, "lora_bias", False) or getattr(config, "trainable_token_indices", None):
            return "an adapter with biases or tokens of its own"
    for layer in _layers(model):
        if type(layer).__name__ not in ("Linear", *_QUANTISED) or getattr(layer, "lora_variant", None):
            return f"an adapted layer of the kind {type(layer).__name__}"
        if getattr(layer, "fan_in_fan_out", False):
            return "an adapted layer whose weight is transposed"
        if getattr(layer, "merged", False):
            return "an adapter that is worked into the weights already"
    return None


def drops_out(model: Any) -> bool:
    """Whether the adapter's inputs are dropped out in learning."""
    return any(isinstance(m, nn.Dropout) and m.p > 0 for n, m in model.named_modules() if "lora_dropout" in n)


def merged(model: Any) -> Any:
    """A plain model of its own: the adapter worked into its weights, quantised ones dequantised. It takes the memory of a whole model.

    Where the adapter is two low-rank factors, the weights are those that sample and learn (``models/merging.py``), and on the CPU.
    """
    if is_adapted(model) and why_not_mergeable(model) is not None:
        return _dense(copy.deepcopy(model)).merge_and_unload()
    plain, state = merged_state(model)
    for key, tensor in state.items():
        place, _, name = key.rpartition(".")
        owner = plain.get_submodule(place)
        made = (tensor.make() if isinstance(tensor, Made) else tensor).to("cpu")  # a GPU may have no room for all of them
        if name in owner._buffers:
            owner._buffers[name] = made
        else:
            owner._parameters[name] = nn.Parameter(made, requires_grad=False)
    plain.tie_weights()
    return plain.eval()


def _dense(model: Any) -> Any:
    """``model`` with its quantised layers dequantised, adapted ones too: peft would round what it merges back into few bits."""
    dtype = base_module(model).dtype
    for name, layer in list(model.named_modules()):
        if not is_quantised(layer):
            continue
        with torch.device("meta"):
            plain = nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=dtype)
        plain.weight = nn.Parameter(dense_weight(layer, dtype), requires_grad=False)
        plain.bias = layer.bias
        place, _, own = name.rpartition(".")
        owner = model.get_submodule(place)
        setattr(owner, own, plain)
        if is_adapted_layer(owner):
            owner.__class__ = require_peft().tuners.lora.layer.Linear
            owner.fan_in_fan_out = owner.is_target_conv_1d_layer = False
    for part in (model, base_module(model)):
        part.config.__dict__.pop("quantization_config", None)
        for name in ("is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit", "hf_quantizer"):
            part.__dict__.pop(name, None)
    return model


def merged_state(model: Any) -> tuple[Any, dict[str, Tensor | Made]]:
    """A model like the base on the meta device, and what ``merged`` fills it with, each weight made when it is asked for; for a model
    whose adapter, if any, is two low-rank factors."""
    base = base_module(model)
    state: dict[str, Tensor | Made] = {}
    for name, module in base.named_modules():
        owner = name.replace(".base_layer", "")
        if ".lora_" in f".{name}":
            continue
        if is_adapted_layer(module) or (is_quantised(module) and not name.endswith(".base_layer")):
            plain = getattr(module, "base_layer", module)
            shape = torch.Size((plain.out_features, plain.in_features))
            state[f"{name}.weight"] = Made(shape, base.dtype, partial(merged_weight, module, dtype=base.dtype))
        for key, tensor in module.named_parameters(recurse=False):
            state.setdefault(f"{owner}.{key}", tensor.detach())
        for key, tensor in module.named_buffers(recurse=False):
            state[f"{owner}.{key}"] = tensor
    return _without_weights(base), state


def _without_weights(base: Any) -> Any:
    """A plain model of ``base``'s class on the meta device, tied as it is."""
    config = copy.deepcopy(base.config)
    for name in ("quantization_config", "_pre_quantization_dtype"):  # the second is no JSON, and 4.57 would write it
        config.__dict__.pop(name, None)
    config._attn_implementation = base.config._attn_implementation
    with torch.device("meta"):
        plain = type(base)(config)
    plain.to(base.dtype)
    plain.tie_weights()
    plain.generation_config = base.generation_config
    return plain.eval()


def _layers(model: Any) -> list[Any]:
    return [m for m in model.modules() if is_adapted_layer(m)]


def require_peft() -> Any:
    """The package peft. Raises ModelError where it is missing."""
    quieten_bitsandbytes()  # which peft imports where it is installed
    try:
        import peft
    except ImportError as error:
        raise ModelError("an adapter needs the package peft, which is not installed: pip install 'groupwise[peft]'") from error
    # peft writes a card beside an adapter and asks whether Jinja is there. Two threads that ask for the first time at once, such as a
    # checkpoint's and the final model's, are told that it is not (huggingface_hub notes "N/A" before it looks).
    from huggingface_hub.utils import is_jinja_available

    is_jinja_available()
    return peft
