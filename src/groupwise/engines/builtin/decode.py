"""One decode step: the next-token logits of every row in flight.

Between the matrix products, bf16 models on CPUs are computed by fused loops (``models/native``) where these could be compiled, and
everything else by PyTorch's operations (``lanes.py`` has the attention). Axes: B rows, S groups, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.engines.builtin.cache import Cache
from groupwise.engines.builtin.lanes import Lanes, attend
from groupwise.models.decoder import Decoder
from groupwise.models.native.calls import add_norm, decode_attention
from groupwise.models.ops import gated, head_norm, rms_norm, rope_rotate
from groupwise.models.projections import Product, plain_product, rearranged_product, rearranging_helps

__all__ = ["DecodeStep", "DecodeWeights", "decode"]


@dataclass(frozen=True, slots=True)
class _LayerProducts:
    qkv: Product
    output: Product
    gate_up: Product
    down: Product


class DecodeWeights:
    """A decoder's matrix products for few rows: on weights rearranged for them where that helps, for one call of the sampler.

    ``rows`` is how many rows a step will have at most. The copies hold the weights as they are now.
    """

    def __init__(self, decoder: Decoder, rows: int) -> None:
        def product(weight: Tensor, bias: Tensor | None = None) -> Product:
            return rearranged_product(weight, bias, rows) if rearranged else plain_product(weight, bias)

        rearranged = rearranging_helps(decoder.embedding)
        self.layers = [
            _LayerProducts(
                product(layer.qkv, layer.qkv_bias),
                product(layer.output, layer.output_bias),
                product(layer.gate_up),
                product(layer.down),
            )
            for layer in decoder.layers
        ]
        self.head = product(decoder.head)


@dataclass
class DecodeStep:
    """Where every row stands. Planned again when rows come or go or the cache has grown, and advanced in place between.

    In place to the letter: a captured CUDA graph reads and writes these very tensors.
    """

    keys: Tensor
    """``[B]`` seeds."""
    last_tokens: Tensor
    """``[B]`` the token each row feeds in."""
    last_logprobs: Tensor
    """``[B]`` its log-probability; nothing before the first step."""
    own_lengths: Tensor
    """``[B]`` own positions filled so far: where this step's key and value go."""
    positions: Tensor
    """``[B]`` position of the fed token in its sequence."""
    group_of_row: Tensor
    """``[B]``."""
    prompt_lengths: Tensor
    """``[S]``."""
    room: int
    """Own positions there is room for."""
    lanes: Lanes | None
    """For attention by PyTorch's products; None where the native kernels attend."""

    @classmethod
    def plan(
        cls, cache: Cache, *, group_of_row: list[int], prompt_lengths: list[int], own_lengths: list[int], last_tokens: list[int],
        keys: list[int],
    ) -> DecodeStep:  # fmt: skip
        device = cache.own[0][0].device
        own, groups, prompts = torch.tensor(own_lengths), torch.tensor(group_of_row), torch.tensor(prompt_lengths)
        return cls(
            keys=torch.tensor(keys, device=device), last_tokens=torch.tensor(last_tokens, device=device),
            last_logprobs=torch.zeros(len(keys), device=device), own_lengths=own.to(device),
            positions=(prompts[groups] + own).to(device), group_of_row=groups.to(device), prompt_lengths=prompts.to(device),
            room=cache.room, lanes=None if cache.native else Lanes.plan(cache, group_of_row, prompt_lengths, own_lengths),
        )  # fmt: skip

    def advance(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Rows that are done may be carried along for a while: they stay at the last place there is."""
        self.last_tokens.copy_(tokens)
        self.last_logprobs.copy_(logprobs)
        self.positions.add_((self.own_lengths < self.room - 1).long())
        self.own_lengths.add_(1).clamp_(max=self.room - 1)


def decode(decoder: Decoder, weights: DecodeWeights, cache: Cache, step: DecodeStep) -> Tensor:
    """Feed every row's last token, write its key and value, and return next-token logits ``[B, V]``."""
    return (_by_operations if step.lanes else _by_kernels)(decoder, weights, cache, step)


def _by_kernels(decoder: Decoder, weights: DecodeWeights, cache: Cache, step: DecodeStep) -> Tensor:
    shape, norm = decoder.shape, decoder.norm
    heads, kv_heads = shape.heads, shape.kv_heads
    ropes = decoder.ropes(step.positions)
    x, added = decoder.embed(step.last_tokens), None
    rows = len(x)
    for index, (layer, product, kind) in enumerate(zip(decoder.layers, weights.layers, decoder.kinds, strict=True)):
        qkv = product.qkv(add_norm(x, added, layer.input_norm, *norm)).view(rows, heads + 2 * kv_heads, -1)
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv = head_norm(qkv, layer.q_norm, layer.k_norm, heads, kv_heads, *norm)
        attended = decode_attention(
            qkv, *ropes[kind], cache.own[index], cache.prompt[index], step.own_lengths, step.group_of_row, step.prompt_lengths, heads,
            shape.query_scale, decoder.windows[kind],
        )  # fmt: skip
        added = product.output(attended.view(rows, -1))
        if layer.attention_norm is not None:
            added = add_norm(added, None, layer.attention_norm, *norm)
        added = product.down(gated(product.gate_up(add_norm(x, added, layer.post_norm, *norm)), shape.activation))
        if layer.feed_forward_norm is not None:
            added = add_norm(added, None, layer.feed_forward_norm, *norm)
    return weights.head(add_norm(x, added, decoder.final_norm, *norm))


def _by_operations(decoder: Decoder, weights: DecodeWeights, cache: Cache, step: DecodeStep) -> Tensor:
    shape, norm, lanes = decoder.shape, decoder.norm, step.lanes
    heads, kv_heads = shape.heads, shape.kv_heads
    assert lanes is not None
    ropes = decoder.ropes(step.positions)
    scale = decoder.head_width**-0.5 if shape.query_scale is None else shape.query_scale
    lanes.mask.scatter_(1, (step.own_lengths + lanes.prompt_positions)[:, None], 0.0)
    masks = [lanes.mask_of(window, step.positions) for window in decoder.windows]
    x = decoder.embed(step.last_tokens)
    rows, turned = len(x), heads + kv_heads
    rotated = torch.empty(rows, turned, decoder.head_width, dtype=x.dtype, device=x.device)
    query = rotated[:, :heads]
    for index, (layer, product, kind) in enumerate(zip(decoder.layers, weights.layers, decoder.kinds, strict=True)):
        qkv = product.qkv(rms_norm(x, layer.input_norm, *norm)).view(rows, turned + kv_heads, -1)
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv = head_norm(qkv, layer.q_norm, layer.k_norm, heads, kv_heads, *norm)
        rope_rotate(qkv[:, :turned], *ropes[kind], rotated)
        keys, values = cache.own[index]
        keys[lanes.row_index, :, step.own_lengths] = rotated[:, heads:]
        values[lanes.row_index, :, step.own_lengths] = qkv[:, turned:]
        attended = attend(query.mul(scale).view(rows, kv_heads, heads // kv_heads, -1), cache, index, lanes, masks[kind])
        added = product.output(attended.view(rows, -1))
        x = x + (added if layer.attention_norm is None else rms_norm(added, layer.attention_norm, *norm))
        added = product.down(gated(product.gate_up(rms_norm(x, layer.post_norm, *norm)), shape.activation))
        x = x + (added if layer.feed_forward_norm is None else rms_norm(added, layer.feed_forward_norm, *norm))
    return weights.head(rms_norm(x, decoder.final_norm, *norm))
