"""A layer's matrix products as callables, so that decoding can run them on weights laid out for small batches; and in which numbers.

A decode step multiplies few rows with every weight of the model. On CPUs the library's kernels for bf16 then spend a large part of
their time rearranging the weight: with 32 rows a step of SmolLM2-135M took 17.8 ms on plain weights and 13.6 ms on rearranged ones,
with the same numbers to the last bit (2 cores, AVX-512 bf16). Rearranging all of them takes about as long as two decode steps, so it is
done again for each call of the sampler, which also is what makes it follow the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from groupwise.config.schema import ModelConfig

__all__ = ["Product", "computes_bf16", "plain_product", "rearranged_product", "rearranging_helps", "with_dtype"]

Product = Callable[[Tensor], Tensor]
"""``[B, in]`` to ``[B, out]``."""


@dataclass(frozen=True, slots=True)
class plain_product:  # used as a function
    """``x @ weight.T + bias`` on the weight as it is."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def computes_bf16() -> bool:
    """Whether this CPU has instructions for bfloat16 that PyTorch's library uses: AVX-512 or AVX-NE-CONVERT on x86, BF16 on Arm."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def with_dtype(config: ModelConfig) -> ModelConfig:
    """The settings with ``dtype`` named: ``auto`` becomes float32 on a CPU that has no instructions for bfloat16, else bfloat16.

    Without them PyTorch converts every number on its way into a product, which takes several times as long as float32.
    """
    if config.dtype != "auto":
        return config
    on_cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    return config.model_copy(update={"dtype": "float32" if on_cpu and not computes_bf16() else "bfloat16"})


def rearranging_helps(weight: Tensor) -> bool:
    """Whether ``rearranged_product`` is there for this weight: bf16 on a CPU whose library has the blocked kernels."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not computes_bf16():
        return False
    operations = torch.ops.mkldnn
    return hasattr(operations, "_linear_pointwise") and hasattr(operations, "_reorder_linear_weight")


def rearranged_product(weight: Tensor, bias: Tensor | None = None, rows: int = 32) -> Product:
    """As ``plain_product``, on a rearranged copy of ``weight`` as it is now. ``rows`` is a hint of the batch's size."""
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(x: Tensor) -> Tensor:
        return multiply(x, blocked, bias, "none", [], "")

    return product
