"""Drawing tokens: randomness that has a name, and an inverse-CDF draw that reads the logits once.

A completion's uniform numbers come from a counter-based generator: position t of a completion with key k gets
``splitmix64(k + t * golden)``. The key is a hash of (seed, scope, problem id, sample index), and of how often the problem came up before in
its batch. Nothing depends on what else is in the batch, on arrival order, or on the number of processes, and no generator state has to be
saved.

Axes: B sequences, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from groupwise.engines.base import SamplingSettings
from groupwise.models.native.calls import draw, fits
from groupwise.models.ops import GOLDEN, uniforms

__all__ = ["Draw", "key_further", "seed_key", "uniforms"]

_BLOCK = 256
_AGAIN = "\x1f"


def seed_key(seed: int, scope: str, problem_id: str, sample: int, occurrence: int = 0) -> int:
    """A signed 64-bit key for one completion's randomness. ``occurrence``: of the problem in its batch, from 0."""
    name = f"{seed}\x1f{scope}\x1f{problem_id}\x1f{sample}{f'{_AGAIN}{occurrence}' if occurrence else ''}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)


def key_further(key: int, positions: int) -> int:
    """The key whose number at position 0 is that of ``key`` at ``positions``."""
    return (key + positions * GOLDEN + 2**63) % 2**64 - 2**63


def _restrict(logits: Tensor, settings: SamplingSettings) -> None:
    """Set to -inf, in place, what top-k, top-p and min-p rule out, one after the other. Ties at the k-th value are kept."""
    if settings.top_k is not None and settings.top_k < logits.shape[1]:
        lowest = logits.topk(settings.top_k, dim=1).values[:, -1:]
        logits.masked_fill_(logits < lowest, float("-inf"))
    if settings.top_p < 1.0:
        ordered, index = logits.sort(dim=1, descending=True)
        shares = ordered.softmax(1)
        ordered.masked_fill_(shares.cumsum(1) - shares >= settings.top_p, float("-inf"))
        logits.scatter_(1, index, ordered)
    if settings.min_p > 0.0:
        logits.masked_fill_(logits < logits.amax(1, keepdim=True) + math.log(settings.min_p), float("-inf"))


class Draw:
    """Draws one token a row, with its log-probability, in buffers that are reused from step to step."""

    def __init__(self, settings: SamplingSettings, vocabulary: int, device: torch.device) -> None:
        self.settings, self.vocabulary, self.device = settings, vocabulary, device
        self._plain = settings.greedy or (settings.top_k is None and settings.top_p >= 1.0 and settings.min_p == 0.0)
        self._blocks = -(-vocabulary // _BLOCK)
        self._buffer = torch.empty(0, self._blocks * _BLOCK, dtype=torch.float32, device=device)

    def _weights(self, rows: int) -> Tensor:
        if len(self._buffer) < rows:
            self._buffer = torch.zeros(rows, self._blocks * _BLOCK, dtype=torch.float32, device=self.device)
        return self._buffer[:rows]

    def __call__(self, logits: Tensor, keys: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``[B]`` and their log-probabilities ``[B]`` (fp32) from ``logits`` ``[B, V]``.

        Greedy tokens are scored under the plain softmax at the settings' temperature.
        """
        if self._plain and fits(logits):
            return draw(
                logits.contiguous(), keys.contiguous(), positions.contiguous(), self.settings.temperature, self.settings.greedy
            )
        weights = self._weights(len(logits))
        scaled = weights[:, : self.vocabulary]
        scaled.copy_(logits)
        if self.settings.temperature != 1.0:
            scaled.div_(self.settings.temperature)
        if not self.settings.greedy:
            _restrict(scaled, self.settings)
        greedy = scaled.argmax(1) if self.settings.greedy else None
        scaled.sub_(scaled.amax(1, keepdim=True)).exp_()
        blocks = weights.view(len(weights), self._blocks, _BLOCK)
        mass = blocks.sum(-1).double().cumsum_(1)
        total = mass[:, -1:]
        tokens = self._invert(blocks, mass, uniforms(keys, positions)[:, None] * total) if greedy is None else greedy
        chosen = scaled.gather(1, tokens[:, None])
        return tokens, (chosen.double() / total).log_()[:, 0].float()

    def _invert(self, blocks: Tensor, mass: Tensor, target: Tensor) -> Tensor:
        """The token whose interval of cumulative weight holds ``target`` ``[B, 1]``: first its block, then its place there."""
        block = torch.searchsorted(mass, target, right=True).clamp_(max=self._blocks - 1)
        before = torch.where(block > 0, mass.gather(1, (block - 1).clamp_(min=0)), 0.0)
        inside = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK))[:, 0].double()
        place = torch.searchsorted(inside.cumsum(1), target - before, right=True)
        # Rounding can carry the target past the block's last weight; the last token that has any weight is the right one then.
        last = (inside > 0).double().mul_(torch.arange(1, _BLOCK + 1, device=inside.device)).argmax(1, keepdim=True)
        return (block * _BLOCK + torch.minimum(place, last))[:, 0]
