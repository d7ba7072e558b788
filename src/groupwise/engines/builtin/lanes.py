"""A decode step's attention by PyTorch's batched products.

It has two parts with one softmax. Against the prompt, all rows of a group are the queries of one matrix product with the group's single
copy of keys and values; against its own tokens, each row has its own. Axes: B rows, S groups, W rows per group (widest), K key-value
heads, U query heads per key head, E head width, P prompt positions, C own positions there is room for.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.engines.builtin.cache import Cache

__all__ = ["Lanes", "attend"]


@dataclass
class Lanes:
    """Where rows stand beside each other in the products with their prompts, and what each row may see."""

    groups: int
    width: int
    row_index: Tensor
    """``[B]``, counting."""
    lane_of_row: Tensor | None
    """``[B]`` place of each row in the ``[S * W]`` lanes of the prompt product; None where row i is lane i."""
    row_of_lane: Tensor
    """``[S * W]``; empty lanes repeat row 0, and nobody reads them."""
    prompt_positions: int
    """P."""
    mask: Tensor
    """``[B, P + C]`` additive: a row sees its prompt and its own positions filled so far."""
    places: Tensor
    """``[B, P + C]``: of each place in the cache, the position in the row's sequence."""

    @classmethod
    def plan(cls, cache: Cache, group_of_row: list[int], prompt_lengths: list[int], own_lengths: list[int]) -> Lanes:
        table = cache.own[0][0]
        filled = [0] * len(prompt_lengths)
        ranks = []
        for group in group_of_row:
            ranks.append(filled[group])
            filled[group] += 1
        width = max(filled)
        lanes = [g * width + r for g, r in zip(group_of_row, ranks, strict=True)]
        row_of_lane = torch.zeros(len(prompt_lengths) * width, dtype=torch.long)
        row_of_lane[torch.tensor(lanes)] = torch.arange(len(lanes))
        prompt_of_row = torch.tensor(prompt_lengths)[torch.tensor(group_of_row)]
        seen = torch.cat(
            [
                torch.arange(cache.prompt_room) < prompt_of_row[:, None],
                torch.arange(cache.room) < torch.tensor(own_lengths)[:, None],
            ],
            dim=1,
        )
        in_order = lanes == list(range(len(row_of_lane)))
        return cls(
            groups=len(prompt_lengths), width=width, row_index=torch.arange(len(lanes), device=table.device),
            lane_of_row=None if in_order else torch.tensor(lanes, device=table.device),
            row_of_lane=row_of_lane.to(table.device), prompt_positions=cache.prompt_room,
            mask=torch.zeros(seen.shape, dtype=table.dtype).masked_fill_(~seen, float("-inf")).to(table.device),
            places=torch.cat(
                [torch.arange(cache.prompt_room).expand(len(lanes), -1), prompt_of_row[:, None] + torch.arange(cache.room)], dim=1
            ).to(table.device),
        )  # fmt: skip

    def mask_of(self, window: int | None, positions: Tensor) -> Tensor:
        """``mask`` for layers in which the tokens at ``positions`` ``[B]`` see so many positions, themselves included."""
        return self.mask if window is None else self.mask.masked_fill(self.places <= positions[:, None] - window, float("-inf"))

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


def attend(query: Tensor, cache: Cache, layer: int, lanes: Lanes, mask: Tensor) -> Tensor:
    """``query`` ``[B, K, U, E]``, already scaled, to attention output of the same shape; ``mask``: as ``lanes.mask``."""
    b, k, u, e = query.shape
    own_key, own_value = (table[:b].view(b * k, cache.room, e) for table in cache.own[layer])
    prompt_key, prompt_value = (table[: lanes.groups].flatten(0, 1) for table in cache.prompt[layer])  # [S * K, P, E]
    p = prompt_key.shape[1]
    to_prompt = lanes.to_rows(torch.bmm(lanes.to_lanes(query), prompt_key.transpose(1, 2)), k, u)
    to_own = torch.bmm(query.view(b * k, u, e), own_key.transpose(1, 2)).view(b, k, u, -1)
    scores = torch.cat([to_prompt, to_own], dim=-1).add_(mask[:, None, None])
    weights = torch.softmax(scores, dim=-1)  # in fp32 within, whatever the dtype
    from_own = torch.bmm(weights[..., p:].reshape(b * k, u, -1), own_value).view(b, k, u, e)
    return from_own.add_(lanes.to_rows(torch.bmm(lanes.to_lanes(weights[..., :p]), prompt_value), k, u))
