"""A layer's matrix products as callables, so that decoding can run them on weights laid out for small batches.

A decode step multiplies few rows with every weight of the model. On CPUs the library's kernels for bf16 then spend a large part of
their time rearranging the weight: with 32 rows a step of SmolLM2-135M took 17.8 ms on plain weights and 13.6 ms on rearranged ones,
with the same numbers to the last bit (2 cores, AVX-512 bf16). Rearranging all of them takes about as long as two decode steps, so it is
done anew for each call of the sampler, which also is what makes it follow the policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

__all__ = ["Product", "plain_product", "rearranged_product", "rearranging_helps"]

Product = Callable[[Tensor], Tensor]
"""``[B, in]`` to ``[B, out]``."""


@dataclass(frozen=True, slots=True)
class plain_product:  # used as a function
    """``x @ weight.T + bias`` on the weight as it is."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def rearranging_helps(weight: Tensor) -> bool:
    """Whether ``rearranged_product`` is there for this weight: bf16 on a CPU that has the library's blocked kernels (AVX-512 at least)."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    operations = torch.ops.mkldnn
    needed = ("_linear_pointwise", "_reorder_linear_weight", "_is_mkldnn_bf16_supported")
    return all(hasattr(operations, name) for name in needed) and bool(operations._is_mkldnn_bf16_supported())


def rearranged_product(weight: Tensor, bias: Tensor | None = None, rows: int = 32) -> Product:
    """As ``plain_product``, on a rearranged copy of ``weight`` as it is now. ``rows`` is a hint of the batch's size."""
    blocked = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(x: Tensor) -> Tensor:
        return multiply(x, blocked, bias, "none", [], "")

    return product
