"""One decode step: the next-token logits of every row in flight.

Attention has two parts with one softmax. Against the prompt, all rows of a group are the queries of one matrix product with the
group's single copy of keys and values; against its own tokens, each row has its own. Axes: B rows, S groups, W rows per group (widest),
K key-value heads, U query heads per key head, E head width, P prompt positions, C own positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from groupwise.engines.builtin.cache import Cache
from groupwise.models.decoder import Decoder
from groupwise.models.ops import rope_rotate

__all__ = ["DecodeStep", "decode"]


@dataclass
class DecodeStep:
    """Where every row stands. Planned anew when rows come or go, and advanced in place between."""

    rows: int
    groups: int
    width: int
    prompt_positions: int
    own_positions: int
    keys: Tensor
    """``[B]`` seeds."""
    last_tokens: Tensor
    """``[B]`` the token each row feeds in."""
    own_lengths: Tensor
    """``[B]`` own positions filled so far: where this step's key and value go."""
    positions: Tensor
    """``[B]`` position of the fed token in its sequence."""
    row_index: Tensor
    lane_of_row: Tensor
    """``[B]`` place of each row in the ``[S * W]`` lanes of the prompt product."""
    row_of_lane: Tensor
    """``[S * W]``; empty lanes repeat row 0, and nobody reads them."""
    past_prompt: Tensor
    """``[B, P]``: places past the end of the row's prompt."""
    ragged: bool
    """Prompts or own lengths differ, so that a mask is needed."""

    @classmethod
    def plan(
        cls, device: torch.device, *, group_of_row: list[int], prompt_lengths: list[int], own_lengths: list[int],
        last_tokens: list[int], keys: list[int],
    ) -> DecodeStep:  # fmt: skip
        filled = [0] * len(prompt_lengths)
        ranks = []
        for group in group_of_row:
            ranks.append(filled[group])
            filled[group] += 1
        width, longest = max(filled), max(prompt_lengths)
        lanes = torch.tensor([g * width + r for g, r in zip(group_of_row, ranks, strict=True)])
        row_of_lane = torch.zeros(len(prompt_lengths) * width, dtype=torch.long)
        row_of_lane[lanes] = torch.arange(len(lanes))
        own = torch.tensor(own_lengths)
        prompt_of_row = torch.tensor(prompt_lengths)[torch.tensor(group_of_row)]
        past_prompt = torch.arange(longest)[None] >= prompt_of_row[:, None]
        return cls(
            rows=len(group_of_row), groups=len(prompt_lengths), width=width, prompt_positions=longest,
            own_positions=max(own_lengths) + 1, keys=torch.tensor(keys, device=device),
            last_tokens=torch.tensor(last_tokens, device=device), own_lengths=own.to(device),
            positions=(prompt_of_row + own).to(device), row_index=torch.arange(len(group_of_row), device=device),
            lane_of_row=lanes.to(device), row_of_lane=row_of_lane.to(device), past_prompt=past_prompt.to(device),
            ragged=min(prompt_lengths) < longest or min(own_lengths) < max(own_lengths),
        )  # fmt: skip

    def advance(self, tokens: Tensor) -> None:
        self.last_tokens = tokens
        self.own_lengths = self.own_lengths + 1
        self.positions = self.positions + 1
        self.own_positions += 1

    def mask(self) -> Tensor | None:
        """``[B, 1, 1, P + C]`` additive: a row sees its prompt and its own positions up to the one written in this step."""
        if not self.ragged:
            return None
        place = torch.arange(self.own_positions, device=self.own_lengths.device)[None]
        unseen = torch.cat([self.past_prompt, place > self.own_lengths[:, None]], dim=1)
        return torch.zeros(unseen.shape, device=unseen.device).masked_fill_(unseen, float("-inf"))[:, None, None]


def _attend(query: Tensor, cache: Cache, layer: int, step: DecodeStep, mask: Tensor | None) -> Tensor:
    """``query`` ``[B, K, U, E]``, already scaled, to attention output of the same shape."""
    b, k, u, e = query.shape
    s, w, p, c = step.groups, step.width, step.prompt_positions, step.own_positions
    own_key, own_value = cache.own[layer, :, :b, :, :c].flatten(1, 2)  # views [B * K, C, E]
    prompt_key, prompt_value = cache.prompt[layer, :, :s, :, :p].flatten(1, 2)
    lanes = query.index_select(0, step.row_of_lane).view(s, w, k, u, e).transpose(1, 2).reshape(s * k, w * u, e)
    seen = torch.bmm(lanes, prompt_key.transpose(1, 2)).view(s, k, w, u, p).transpose(1, 2).reshape(s * w, k, u, p)
    scores = torch.empty(b, k, u, p + c, dtype=torch.float32, device=query.device)
    scores[..., :p] = seen.index_select(0, step.lane_of_row)
    scores[..., p:] = torch.bmm(query.view(b * k, u, e), own_key.transpose(1, 2)).view(b, k, u, c)
    if mask is not None:
        scores += mask
    weights = torch.softmax(scores, dim=-1).to(query.dtype)
    out = torch.bmm(weights[..., p:].reshape(b * k, u, c), own_value).view(b, k, u, e)
    lane_weights = weights[..., :p].index_select(0, step.row_of_lane).view(s, w, k, u, p).transpose(1, 2).reshape(s * k, w * u, p)
    from_prompt = torch.bmm(lane_weights, prompt_value).view(s, k, w, u, e).transpose(1, 2).reshape(s * w, k, u, e)
    return out.add_(from_prompt.index_select(0, step.lane_of_row))


def decode(decoder: Decoder, cache: Cache, step: DecodeStep) -> Tensor:
    """Feed every row's last token, write its key and value, and return next-token logits ``[B, V]``."""
    heads, kv_heads = decoder.heads, decoder.kv_heads
    cos, sin = decoder.rope(step.positions)
    scale = decoder.head_width**-0.5
    mask = step.mask()
    x = embedding(step.last_tokens, decoder.embedding)
    for index, layer in enumerate(decoder.layers):
        qkv = decoder.project_qkv(layer, x)
        rotated = torch.empty_like(qkv[:, : heads + kv_heads])
        rope_rotate(qkv[:, : heads + kv_heads], cos, sin, rotated)
        cache.own[index, 0][step.row_index, :, step.own_lengths] = rotated[:, heads:]
        cache.own[index, 1][step.row_index, :, step.own_lengths] = qkv[:, heads + kv_heads :]
        query = rotated[:, :heads].mul(scale).view(len(x), kv_heads, heads // kv_heads, -1)
        x = decoder.finish_layer(layer, x, _attend(query, cache, index, step, mask))
    return decoder.logits(x)
