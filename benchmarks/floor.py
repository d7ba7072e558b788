"""The minimum time of a step here: its matrix products alone, timed on this machine in the same run.

Everything else (attention, norms, softmax, drawing, the optimiser, Python) counts as nothing. What prompts begin with is computed once,
the rest of each once per group, the output head only where a token is predicted, and nothing is computed again. The gradient of a
weight counts where it takes one, and so do those of an adapter's factors.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from groupwise.engines.builtin.decode import rearranged_product, rearranging_helps
from groupwise.models.decoder import Decoder
from groupwise.models.merging import Factor, MergedLayer
from groupwise.models.ops import product

__all__ = ["floor_seconds"]

_SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def _time(call: Callable[[], object]) -> float:
    call()
    found = []
    for _ in range(3):
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return sorted(found)[1]


@torch.no_grad()
def floor_seconds(
    decoder: Decoder, prompt_lengths: Sequence[int], lengths: Sequence[Sequence[int]], common: int
) -> dict[str, float]:
    """Seconds of matrix products in sampling, in scoring under the reference and in learning, for the given lengths, where all prompts
    begin with the same ``common`` tokens."""
    layer = decoder.layers[0]
    weights = {name: getattr(layer, name) for name in ("qkv", "output", "gate_up", "down")}
    factors = {name: layer.projections[name].factors() if isinstance(layer, MergedLayer) else [] for name in weights}
    flat = [n for group in lengths for n in group]
    prompts = sum(prompt_lengths) - (len(prompt_lengths) - 1) * common
    rows, tokens = prompts + sum(flat) - len(flat), sum(flat)
    forward = len(decoder.layers) * sum(_forward(w, rows) for w in weights.values()) + _forward(decoder.head, tokens)
    in_layer = sum(_backward(w, rows, factors[name]) for name, w in weights.items())
    backward = len(decoder.layers) * in_layer + _backward(decoder.head, tokens)
    prefill = len(decoder.layers) * sum(_forward(w, prompts) for w in weights.values())
    return {
        "sampling": prefill + _decoding(decoder, flat),
        "reference": forward,
        "forward_backward": forward + backward,
    }


def _inputs(width: int, rows: int, like: Tensor) -> Tensor:
    return torch.randn(rows, width, dtype=like.dtype)


def _tiled(weight: Tensor, rows: int) -> int:
    """Rows at a time: the head's output for all of them would not fit the cache, and nobody computes it so."""
    return min(rows, 2**25 // len(weight))


def _forward(weight: Tensor, rows: int) -> float:
    part = _tiled(weight, rows)
    x = _inputs(weight.shape[1], part, weight)
    return _time(lambda: product(x, weight.t())) * rows / part


def _backward(weight: Tensor, rows: int, factors: Sequence[Factor] = ()) -> float:
    """``factors``: of an adapter beside the weight."""
    part = _tiled(weight, rows)
    x, grad = _inputs(weight.shape[1], part, weight), _inputs(weight.shape[0], part, weight)
    products: list[Callable[[], object]] = [lambda: product(grad, weight)]
    if weight.requires_grad:
        products.append(lambda: product(grad.t(), x))
    products += [partial(factor.gradients, grad, x) for factor in factors]
    return sum(map(_time, products)) * rows / part


def _decoding(decoder: Decoder, lengths: Sequence[int]) -> float:
    """Over all decode steps, with as many rows as are still running, rounded up to a measured size."""
    prepare = rearranged_product if rearranging_helps(decoder.embedding) else (lambda w: lambda x: linear(x, w))
    every = [prepare(w) for layer in decoder.layers for w in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    head, width, wide = prepare(decoder.head), decoder.embedding.shape[1], decoder.layers[0].down.shape[1]
    measured: dict[int, float] = {}
    total = 0.0
    for step in range(1, max(lengths)):
        running = sum(n > step for n in lengths)
        size = next((s for s in _SIZES if s >= running), running)
        if size not in measured:
            narrow, broad = _inputs(width, size, decoder.embedding), _inputs(wide, size, decoder.embedding)

            def run(narrow: Tensor = narrow, broad: Tensor = broad) -> None:
                for index, multiply in enumerate(every):
                    multiply(broad if index % 4 == 3 else narrow)
                head(narrow)

            measured[size] = _time(run)
        total += measured[size]
    return total
