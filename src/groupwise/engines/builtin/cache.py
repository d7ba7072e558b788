"""Keys and values of everything in flight: one copy of a prompt for its whole group, and a dense table of rows for completions.

Axes: L layers, K key-value heads, E head width, S group slots, P longest prompt in the cache, B row slots, C completion positions.
Rows and groups stay dense: when one leaves, the last one takes its place. So a decode step is a batched product over the first so
many rows, and nothing is gathered.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["Cache"]


class Cache:
    """Preallocated, and zero at first: places that were never written are masked, but a mask does not help against NaN."""

    def __init__(
        self, *, layers: int, kv_heads: int, head_width: int, groups: int, prompt_tokens: int, rows: int, completion_tokens: int,
        dtype: torch.dtype, device: torch.device,
    ) -> None:  # fmt: skip
        self.kv_heads = kv_heads
        like = {"dtype": dtype, "device": device}
        self.prompt = torch.zeros(layers, 2, groups, kv_heads, prompt_tokens, head_width, **like)  # type: ignore[call-overload]
        self.own = torch.zeros(layers, 2, rows, kv_heads, completion_tokens, head_width, **like)  # type: ignore[call-overload]

    def fits(self, groups: int, prompt_tokens: int, rows: int, completion_tokens: int) -> bool:
        p, o = self.prompt.shape, self.own.shape
        return p[2] >= groups and p[4] >= prompt_tokens and o[2] >= rows and o[4] >= completion_tokens

    def store_prompts(self, layer: int, kv: Tensor, starts: list[int], lengths: list[int], slots: list[int]) -> None:
        """Copy prompts' rotated keys and values out of the packed rows ``kv`` ``[R, 2K, E]``."""
        for start, length, slot in zip(starts, lengths, slots, strict=True):
            rows = kv[start : start + length].unflatten(1, (2, self.kv_heads)).permute(1, 2, 0, 3)
            self.prompt[layer, :, slot, :, :length] = rows

    def move_group(self, source: int, target: int) -> None:
        self.prompt[:, :, target] = self.prompt[:, :, source]

    def move_row(self, source: int, target: int, length: int) -> None:
        self.own[:, :, target, :, :length] = self.own[:, :, source, :, :length]
