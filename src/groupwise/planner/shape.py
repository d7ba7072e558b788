"""A model's shape: what its config.json says about sizes, and how many weights follow from it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

from groupwise.config.schema import ModelConfig
from groupwise.errors import ModelError
from groupwise.models.families import FAMILIES, experts_of, longrope_positions, why_uncovered
from groupwise.models.folder import is_folder_name, refused_by_hub, stored_quantisation

__all__ = ["KNOWN_SHAPES", "ModelShape", "find_shape", "shape_of_config"]

_COUNTED = (
    *FAMILIES, "phi3", "gemma", "gemma2", "smollm3", "olmo", "olmo2", "olmo3", "granite", "stablelm", "cohere",
    "cohere2", "glm", "glm4", "helium", "exaone4", "seed_oss", "ernie4_5",
)  # fmt: skip
"""Architectures whose weights were counted here and by transformers, with the same result to 0.1%."""
_UNNAMED_CONTEXT = 2**20
"""What training takes where neither config nor tokenizer names one."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Llama-like decoder. D width, F feed_forward, L layers, H heads, K kv_heads, E head_width, V vocabulary."""

    width: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    vocabulary: int
    tied: bool
    """Whether the output head is the embedding."""
    qkv_bias: bool = False
    head_norm: bool = False
    """Whether queries and keys are normed by head."""
    layer_norms: int = 2
    """Norms of the model's width in each layer."""
    architecture: str = "qwen2"
    uncovered: str | None = None
    """Why the lean decoder does not compute it, but the model's own module; None where it does."""

    windows: tuple[int | None, ...] = ()
    """For each layer, how many positions back a token sees, itself included, and None where it sees all; empty where all layers do."""
    context: int = _UNNAMED_CONTEXT
    """Positions of the model, prompt and completion together."""
    file_dtype: str = "bfloat16"
    """Numbers of its files, as its config says."""
    capped_attention: bool = False
    """Whether attention's scores go through a cap, which the library computes with all of them in memory."""
    plain_head: bool = True
    """Whether logits are the head's product, and not scaled or capped: else the model's module computes them whole."""
    wrapped: bool = False
    """Whether it lies within a model of another type, such as one that sees images too."""
    stored: str = "none"
    """How its files hold its matrices, as ``stored_quantisation`` says."""

    @property
    def lean(self) -> bool:
        """Whether the lean decoder computes it."""
        return self.uncovered is None

    @property
    def counted(self) -> bool:
        """Whether its weights are known to be those of the formula."""
        return self.architecture in _COUNTED

    @property
    def qkv(self) -> int:
        """Output width of the fused query, key and value projection: (H + 2K) E."""
        return (self.heads + 2 * self.kv_heads) * self.head_width

    @property
    def attended(self) -> int:
        """Width of the attention's output: H E."""
        return self.heads * self.head_width

    @property
    def layer_matrices(self) -> int:
        """Weights of one layer's matrices: D (H + 2K) E + H E D + 3 D F."""
        return self.width * (self.qkv + self.attended + 3 * self.feed_forward)

    @property
    def matrix_rows(self) -> int:
        """Outputs of one layer's matrices together: (H + 2K) E + 2 D + 2 F."""
        return self.qkv + 2 * self.width + 2 * self.feed_forward

    @property
    def layers_by_window(self) -> Mapping[float, int]:
        """How many layers have each window; an infinite one where they see all positions."""
        return Counter(inf if window is None else window for window in self.windows or (None,) * self.layers)

    def cached(self, size: int) -> int:
        """Bytes of one position's keys and values, ``size`` bytes a number: 2 L K E s."""
        return 2 * self.layers * self.kv_heads * self.head_width * size

    @property
    def head(self) -> int:
        """Weights of the output head: V D."""
        return self.vocabulary * self.width

    @property
    def parameters(self) -> int:
        """All weights: L (matrices + norms + biases) + V D, twice where the head is not the embedding, + the final norm."""
        norms = self.layer_norms * self.width + (2 * self.head_width if self.head_norm else 0)
        biases = self.qkv if self.qkv_bias else 0
        return self.layers * (self.layer_matrices + norms + biases) + (1 if self.tied else 2) * self.head + self.width

    def adapter(self, rank: int, target_modules: str | list[str]) -> int:
        """Weights of a LoRA of this rank: rank (in + out) for every adapted projection. A regular expression counts as all in a layer."""
        kv = self.kv_heads * self.head_width
        sizes = {
            "q_proj": self.width + self.attended, "k_proj": self.width + kv, "v_proj": self.width + kv,
            "o_proj": self.attended + self.width, "gate_proj": self.width + self.feed_forward,
            "up_proj": self.width + self.feed_forward, "down_proj": self.feed_forward + self.width,
        }  # fmt: skip
        chosen = list(sizes) if isinstance(target_modules, str) else [m.rsplit(".", 1)[-1] for m in target_modules]
        sizes |= {"qkv_proj": self.width + self.attended + 2 * kv, "gate_up_proj": self.width + 2 * self.feed_forward}
        ends = sum(name in _ENDS for name in chosen) * (self.width + self.vocabulary)
        return rank * (self.layers * sum(sizes.get(name, 0) for name in chosen) + ends)


_ENDS = ("embed_tokens", "lm_head")
_OF_THE_HEAD = ("final_logit_softcapping", "logits_scaling", "logit_scale", "lm_head_multiplier")
"""By what Gemma 2, Granite, Cohere and Falcon-H1 cap or scale logits."""
_LEFT_OUT: Mapping[str, Mapping[str, int]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
    },
    "phi3": {"original_max_position_embeddings": 4096},
}
"""What published configs leave to the defaults of their type."""
_TIED = ("gemma", "gemma2", "smollm3", "cohere", "cohere2", "ernie4_5")
"""Types whose output head is the embedding where the config does not say."""


def _qwen25(width: int, feed_forward: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool) -> ModelShape:
    return ModelShape(width, feed_forward, layers, heads, kv_heads, 128, vocabulary, tied, qkv_bias=True)


_BY_SIZE = {
    "0.5B": ModelShape(896, 4864, 24, 14, 2, 64, 151936, True, qkv_bias=True),
    "1.5B": _qwen25(1536, 8960, 28, 12, 2, 151936, True),
    "3B": _qwen25(2048, 11008, 36, 16, 2, 151936, True),
    "7B": _qwen25(3584, 18944, 28, 28, 4, 152064, False),
    "14B": _qwen25(5120, 13824, 48, 40, 8, 152064, False),
    "32B": _qwen25(5120, 27648, 64, 40, 8, 152064, False),
    "72B": _qwen25(8192, 29568, 80, 64, 8, 152064, False),
}
_QWEN3 = {
    "0.6B": (1024, 3072, 28, 16, 8, 128, 151936, True), "1.7B": (2048, 6144, 28, 16, 8, 128, 151936, True),
    "4B": (2560, 9728, 36, 32, 8, 128, 151936, True), "8B": (4096, 12288, 36, 32, 8, 128, 151936, False),
}  # fmt: skip
_SHORT_BASES = ("0.5B", "3B")
"""Sizes of Qwen2.5 whose base models have a context as short as the instructed ones."""
KNOWN_SHAPES: dict[str, ModelShape] = {
    "smollm2-135m-instruct": ModelShape(576, 1536, 30, 9, 3, 64, 49152, True, architecture="llama", context=2**13),
    **{
        f"meta-llama/Llama-3.1-8B{kind}": ModelShape(
            4096, 14336, 32, 32, 8, 128, 128256, False, architecture="llama", context=2**17
        )
        for kind in ("", "-Instruct")
    },
    **{f"Qwen/Qwen2.5-{size}-Instruct": replace(shape, context=2**15) for size, shape in _BY_SIZE.items()},
    **{
        f"Qwen/Qwen2.5-{size}": replace(shape, context=2**15 if size in _SHORT_BASES else 2**17)
        for size, shape in _BY_SIZE.items()
    },
    **{
        f"Qwen/Qwen2.5-{family}-{size}{kind}": replace(_BY_SIZE[size], context=context)
        for family, context, sizes in (("Coder", 2**15, ("0.5B", "1.5B", "3B", "14B", "32B")), ("Math", 2**12, ("1.5B",)))
        for size in sizes
        for kind in ("", "-Instruct")
    },
    **{
        f"Qwen/Qwen3-{size}": ModelShape(*sizes, head_norm=True, architecture="qwen3", context=40_960)
        for size, sizes in _QWEN3.items()
    },
}
"""Models that recipes and guides name, so that they can be planned without a network."""


def find_shape(config: ModelConfig) -> ModelShape:
    """The shape of ``config.name``: from the table above, a folder's config.json, the local Hub cache, or the Hub (config.json only).

    Raises ModelError where no config.json can be had, or it is not that of a Llama-like decoder.
    """
    if config.name in KNOWN_SHAPES:
        return KNOWN_SHAPES[config.name]
    path = Path(config.name).expanduser() / "config.json" if is_folder_name(config.name) else _from_hub(config)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"the config of model {config.name!r} cannot be read from {str(path)!r} ({error}): name a model folder with config.json, or "
            f"one of {', '.join(sorted(KNOWN_SHAPES)[:3])} ..."
        ) from error
    return shape_of_config(values, config.name)


def _from_hub(config: ModelConfig) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    cached = try_to_load_from_cache(config.name, "config.json", revision=config.revision)
    if isinstance(cached, str):
        return Path(cached)
    try:
        return Path(hf_hub_download(config.name, "config.json", revision=config.revision, etag_timeout=10.0))
    except Exception as error:  # no network, offline mode, no config.json there: the client's many errors come to the same here
        if (refusal := refused_by_hub(config.name, config.revision, error)) is not None:
            raise refusal from error
        raise ModelError(
            f"the config of model {config.name!r} is neither built in, nor in the local Hub cache, nor to be had from the Hub "
            f"({type(error).__name__}): check the spelling and the network, or name a folder with its config.json"
        ) from error


def shape_of_config(values: Any, name: str) -> ModelShape:
    """The shape that a config.json describes; one level down for models that wrap a text model.

    Raises ModelError for one that is not that of a Llama-like decoder, and for mixtures of experts.
    """
    values = values if isinstance(values, dict) else {}
    text = values.get("text_config") or values
    architecture = str(text.get("model_type") or values.get("model_type"))
    text = {**_LEFT_OUT.get(architecture, {}), **text}
    if (experts := experts_of(text)) > 1:
        raise ModelError(
            f"the model {name!r} (type {architecture!r}) is a mixture of {experts} experts, whose weights and passes plan does not count: "
            "name a dense model, or try the run with `groupwise bench`"
        )
    family = FAMILIES.get(architecture)
    tied = architecture in _TIED if family is None else family.tied
    outer = str(values.get("model_type") or architecture)  # a wrapped text model is loaded with what wraps it
    context = longrope_positions(text) or text.get("max_position_embeddings")
    try:
        width, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        return ModelShape(
            width=width,
            feed_forward=int(text["intermediate_size"]),
            layers=int(text["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(text.get("num_key_value_heads") or heads),
            head_width=int(text.get("head_dim") or width // heads),
            vocabulary=int(text["vocab_size"]),
            tied=bool(text.get("tie_word_embeddings", values.get("tie_word_embeddings", tied))),
            qkv_bias=(family is not None and family.qkv_bias) or bool(text.get("attention_bias")),
            head_norm=family is not None and family.head_norm,
            layer_norms=2 if family is None else family.layer_norms,
            architecture=architecture,
            uncovered=why_uncovered({**text, "model_type": outer}),
            windows=() if family is None or not any(windows := family.windows(text)) else windows,
            context=context if isinstance(context, int) and 0 < context < 10**9 else _UNNAMED_CONTEXT,
            capped_attention=text.get("attn_logit_softcapping") is not None,
            plain_head=all(text.get(key) in (None, 1, 1.0) for key in _OF_THE_HEAD),
            wrapped=outer != architecture,
            stored=stored_quantisation(values),
            file_dtype=next((str(v[key]) for v in (text, values) for key in ("dtype", "torch_dtype") if v.get(key)), "float32"),
        )
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"the config of model {name!r} (type {architecture!r}) has no usable {error}, so that its memory cannot be planned: "
            "plan covers Llama-like decoders; `groupwise bench` tries a run of any other"
        ) from error
