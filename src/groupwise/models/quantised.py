"""Frozen weights stored in fewer bits than they are computed in: in 4 or 8 by the library bitsandbytes, which is imported only when one
is asked for, or in 16 where nothing is lost by it.

4 bit is QLoRA's NF4 with double quantisation (arXiv 2305.14314): blocks of 64 weights share a scale, and scales are quantised too, so
a weight takes 0.516 bytes. 8 bit is the row-wise format of LLM.int8() (arXiv 2208.07339): a byte a weight and a scale for each row.
Embedding, output head, norms and biases stay as they are.

16 bit is for models that compute in fp32, as on CPUs without instructions for bf16: most files hold bf16, which fp32 numbers then are.

Only the storage is bitsandbytes': products are computed here on the dequantised weight. Its own kernels would make the result depend on
what else is in the batch (8 bit: activations are quantised too) or on whether gradients are wanted (4 bit), and then the distribution
that is sampled would not be the one that is scored.
"""

from __future__ import annotations

import copy
import importlib.util
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn.functional import linear

from groupwise.errors import ModelError
from groupwise.models.quiet import quieten_bitsandbytes

if TYPE_CHECKING:
    from groupwise.config.schema import ModelConfig

__all__ = [
    "dense_weight",
    "is_quantised",
    "multiply_dequantised",
    "quantisation_settings",
    "quantised_layers",
    "store_in_16_bits",
    "store_layers_in_16_bits",
]

_LAYERS = ("Linear4bit", "Linear8bitLt")
_PLAIN: dict[type, type] = {}
"""By bitsandbytes' class of layer, the subclass of it that multiplies with dequantised weights."""


def quantisation_settings(config: ModelConfig) -> Any:
    """``model.quantization`` as transformers' own settings, or None for ``none``.

    Raises ModelError where a package is missing.
    """
    if config.quantization == "none":
        return None
    for package in ("bitsandbytes", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ModelError(
                f"model.quantization is {config.quantization}, which needs the package {package}, and it is not installed: "
                "pip install 'groupwise[quantized]', or use model.quantization=none"
            )
    from transformers import BitsAndBytesConfig

    quieten_bitsandbytes()
    if config.quantization == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, config.dtype),
    )


def is_quantised(layer: Any) -> bool:
    """Whether ``layer`` is a linear layer whose weight is stored in fewer bits than it computes in."""
    if isinstance(layer, _In16Bits):
        return True
    return any(base.__name__ in _LAYERS and base.__module__.startswith("bitsandbytes") for base in type(layer).__mro__)


def quantised_layers(model: Any) -> list[Any]:
    """Every quantised linear layer of ``model``."""
    return [module for module in model.modules() if is_quantised(module)]


def dense_weight(layer: Any, dtype: torch.dtype | None = None) -> Tensor:
    """The weight ``[out, in]`` of a linear layer: a quantised one dequantised into memory of its own, any other as it is.

    ``dtype`` is that of the numbers for quantised layers: by default what their weights were quantised from (8 bit: bfloat16).
    """
    if not is_quantised(layer):
        return layer.weight  # type: ignore[no-any-return]
    if isinstance(layer, _In16Bits):
        return layer.weight.to(dtype or torch.float32)
    if layer.weight.dtype == torch.int8:
        codes, scales = layer.weight.data, layer.weight.SCB if layer.weight.SCB is not None else layer.state.SCB
        return (codes * (scales / 127.0)[:, None]).to(dtype or torch.bfloat16)
    dense = _from_4_bits(layer.weight)
    return dense if dtype is None else dense.to(dtype)


def _from_4_bits(weight: Any) -> Tensor:
    """bitsandbytes' own kernel. On CPUs with AVX-512 that of version 0.50.2 is wrong for rows that are no multiple of a block, so there
    the matrix is handed over as rows of one block each, or as a single row."""
    from bitsandbytes.functional import dequantize_4bit

    state = weight.quant_state
    if weight.device.type != "cpu":
        return dequantize_4bit(weight.data, state)  # type: ignore[no-any-return]
    flat, count = copy.copy(state), math.prod(state.shape)
    flat.shape = (count // state.blocksize, state.blocksize) if count % state.blocksize == 0 else (1, count)
    return dequantize_4bit(weight.data, flat).view(state.shape)  # type: ignore[no-any-return]


def multiply_dequantised(model: Any) -> Any:
    """Let the quantised layers of ``model`` multiply with dequantised weights, and return it. Repeating it changes nothing."""
    for layer in quantised_layers(model):
        if type(layer) not in _PLAIN.values() and not isinstance(layer, _In16Bits):
            if type(layer) not in _PLAIN:
                _PLAIN[type(layer)] = type(type(layer).__name__, (type(layer),), {"forward": _forward})
            layer.__class__ = _PLAIN[type(layer)]
    return model


def _forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return _Product.apply(x, layer)  # type: ignore[no-any-return]


class _Product(Function):
    """``x @ weight.T + bias``; the weight is dequantised for it, and again in the backward pass, and not kept in between."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        bias = None if layer.bias is None else layer.bias.to(x.dtype)
        return linear(x, dense_weight(layer, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad @ dense_weight(ctx.layer, grad.dtype), None


class _In16Bits(nn.Linear):
    """A frozen fp32 layer whose weight is held in bf16."""

    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self)  # type: ignore[no-any-return]


@torch.no_grad()
def store_in_16_bits(layer: Any) -> bool:
    """Hold the weight of a frozen linear layer in fp32 in bf16 from now on, if that changes no number of it. Returns whether."""
    if type(layer) is not nn.Linear or layer.weight.dtype != torch.float32 or layer.weight.requires_grad:
        return False
    narrow = layer.weight.bfloat16()
    if not torch.equal(narrow.float(), layer.weight):
        return False
    layer.weight, layer.__class__ = nn.Parameter(narrow, requires_grad=False), _In16Bits
    return True


def store_layers_in_16_bits(model: Any) -> bool:
    """``store_in_16_bits`` of the layers of a model without an adapter that nothing will train, on a CPU. Returns whether of any."""
    if model.device.type != "cpu":
        return False
    projections = [module for module in model.model.layers.modules() if isinstance(module, nn.Linear)]
    stored = [store_in_16_bits(module.requires_grad_(False)) for module in projections]
    return any(stored)
