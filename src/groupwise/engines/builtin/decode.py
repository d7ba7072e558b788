"""One decode step: the next-token logits of every row in flight.

Attention has two parts with one softmax. Against the prompt, all rows of a group are the queries of one matrix product with the
group's single copy of keys and values; against its own tokens, each row has its own. Axes: B rows, S groups, W rows per group (widest),
K key-value heads, U query heads per key head, E head width, P prompt positions, C own positions there is room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from groupwise.engines.builtin.cache import Cache
from groupwise.models.decoder import Decoder
from groupwise.models.ops import head_norm, rms_norm, rope_rotate
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
    """Where every row stands. Planned anew when rows come or go or the cache has grown, and advanced in place between.

    In place to the letter: a captured CUDA graph reads and writes these very tensors.
    """

    groups: int
    width: int
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
    row_index: Tensor
    lane_of_row: Tensor | None
    """``[B]`` place of each row in the ``[S * W]`` lanes of the prompt product; None where row i is lane i."""
    row_of_lane: Tensor
    """``[S * W]``; empty lanes repeat row 0, and nobody reads them."""
    prompt_positions: int
    """P."""
    mask: Tensor
    """``[B, P + C]`` additive: a row sees its prompt and its own positions filled so far."""

    @classmethod
    def plan(
        cls, cache: Cache, *, group_of_row: list[int], prompt_lengths: list[int], own_lengths: list[int], last_tokens: list[int],
        keys: list[int],
    ) -> DecodeStep:  # fmt: skip
        device, dtype = cache.prompt.device, cache.prompt.dtype
        filled = [0] * len(prompt_lengths)
        ranks = []
        for group in group_of_row:
            ranks.append(filled[group])
            filled[group] += 1
        width = max(filled)
        lanes = [g * width + r for g, r in zip(group_of_row, ranks, strict=True)]
        row_of_lane = torch.zeros(len(prompt_lengths) * width, dtype=torch.long)
        row_of_lane[torch.tensor(lanes)] = torch.arange(len(lanes))
        own = torch.tensor(own_lengths)
        prompt_of_row = torch.tensor(prompt_lengths)[torch.tensor(group_of_row)]
        seen = torch.cat(
            [torch.arange(cache.prompt.shape[4]) < prompt_of_row[:, None], torch.arange(cache.room) < own[:, None]], dim=1
        )
        in_order = lanes == list(range(len(row_of_lane)))
        return cls(
            groups=len(prompt_lengths), width=width, keys=torch.tensor(keys, device=device),
            last_tokens=torch.tensor(last_tokens, device=device), last_logprobs=torch.zeros(len(lanes), device=device),
            own_lengths=own.to(device),
            positions=(prompt_of_row + own).to(device), row_index=torch.arange(len(lanes), device=device),
            lane_of_row=None if in_order else torch.tensor(lanes, device=device), row_of_lane=row_of_lane.to(device),
            prompt_positions=cache.prompt.shape[4],
            mask=torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf")).to(device),
        )  # fmt: skip

    def advance(self, tokens: Tensor, logprobs: Tensor) -> None:
        """Rows that are done may be carried along for a while: they stay at the last place there is."""
        self.last_tokens.copy_(tokens)
        self.last_logprobs.copy_(logprobs)
        last = self.mask.shape[1] - 1 - self.prompt_positions
        self.positions.add_((self.own_lengths < last).long())
        self.own_lengths.add_(1).clamp_(max=last)

    def to_lanes(self, rows: Tensor) -> Tensor:
        """``[B, K, U, x]`` to ``[S * K, W * U, x]``: rows of one group beside each other."""
        lanes = rows if self.lane_of_row is None else rows.index_select(0, self.row_of_lane)
        k, u, x = rows.shape[1:]
        return lanes.view(self.groups, self.width, k, u, x).transpose(1, 2).reshape(self.groups * k, self.width * u, x)

    def to_rows(self, lanes: Tensor, k: int, u: int) -> Tensor:
        """The inverse of ``to_lanes``."""
        x = lanes.shape[-1]
        rows = lanes.view(self.groups, k, self.width, u, x).transpose(1, 2).reshape(self.groups * self.width, k, u, x)
        return rows if self.lane_of_row is None else rows.index_select(0, self.lane_of_row)


def _attend(query: Tensor, cache: Cache, layer: int, step: DecodeStep) -> Tensor:
    """``query`` ``[B, K, U, E]``, already scaled, to attention output of the same shape."""
    b, k, u, e = query.shape
    own_key, own_value = (table[:b].view(b * k, cache.room, e) for table in cache.own[layer])
    prompt_key, prompt_value = cache.prompt[layer, :, : step.groups].flatten(1, 2)  # [S * K, P, E]
    p = prompt_key.shape[1]
    to_prompt = step.to_rows(torch.bmm(step.to_lanes(query), prompt_key.transpose(1, 2)), k, u)
    to_own = torch.bmm(query.view(b * k, u, e), own_key.transpose(1, 2)).view(b, k, u, -1)
    scores = torch.cat([to_prompt, to_own], dim=-1).add_(step.mask[:, None, None])
    weights = torch.softmax(scores, dim=-1)  # in fp32 within, whatever the dtype
    from_own = torch.bmm(weights[..., p:].reshape(b * k, u, -1), own_value).view(b, k, u, e)
    return from_own.add_(step.to_rows(torch.bmm(step.to_lanes(weights[..., :p]), prompt_value), k, u))


def decode(decoder: Decoder, weights: DecodeWeights, cache: Cache, step: DecodeStep) -> Tensor:
    """Feed every row's last token, write its key and value, and return next-token logits ``[B, V]``."""
    heads, kv_heads, epsilon = decoder.heads, decoder.kv_heads, decoder.epsilon
    cos, sin = decoder.rope(step.positions)
    scale = decoder.head_width**-0.5
    step.mask.scatter_(1, (step.own_lengths + step.prompt_positions)[:, None], 0.0)
    x = embedding(step.last_tokens, decoder.embedding)
    rows, turned = len(x), heads + kv_heads
    rotated = torch.empty(rows, turned, decoder.head_width, dtype=x.dtype, device=x.device)
    query = rotated[:, :heads]
    for index, (layer, product) in enumerate(zip(decoder.layers, weights.layers, strict=True)):
        qkv = product.qkv(rms_norm(x, layer.input_norm, epsilon)).view(rows, turned + kv_heads, -1)
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv = head_norm(qkv, layer.q_norm, layer.k_norm, heads, kv_heads, epsilon)
        rope_rotate(qkv[:, :turned], cos, sin, rotated)
        keys, values = cache.own[index]
        keys[step.row_index, :, step.own_lengths] = rotated[:, heads:]
        values[step.row_index, :, step.own_lengths] = qkv[:, turned:]
        attended = _attend(query.mul(scale).view(rows, kv_heads, heads // kv_heads, -1), cache, index, step)
        x = x + product.output(attended.view(rows, -1))
        gate, up = product.gate_up(rms_norm(x, layer.post_norm, epsilon)).chunk(2, dim=-1)
        x = x + product.down(silu(gate).mul_(up))
    return weights.head(rms_norm(x, decoder.final_norm, epsilon))
