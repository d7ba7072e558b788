"""Several decode steps in a row without asking the device what came out.

On a GPU, a step of a small model is over sooner than Python can launch its kernels, and every look at the sampled tokens waits for all
that was launched. So there a burst of steps runs between two looks, and all but the first are replays of one captured graph. Rows that
end within a burst are carried to its end, and what they sampled after their end is dropped. Since randomness has names, completions do
not depend on the length of a burst. On CPUs a burst is one step: nothing is launched ahead there, and ended rows leave at once.
"""

from __future__ import annotations

from typing import Any

import torch

from groupwise.engines.builtin.cache import Cache
from groupwise.engines.builtin.decode import DecodeStep, DecodeWeights, decode
from groupwise.engines.builtin.draw import Draw
from groupwise.memory import DEVICE_WIDE
from groupwise.models.decoder import Decoder

__all__ = ["Runner", "burst_length"]

BURSTS = {"cpu": 1, "cuda": 16}
"""Steps between two looks at the tokens, by device. Longer ones carry ended rows further; shorter ones wait more often."""


def burst_length(device: torch.device) -> int:
    return BURSTS.get(device.type, 1)


class Runner:
    """Runs bursts over one cache. The graph of a ``DecodeStep`` is captured when it first is asked for more than one step."""

    def __init__(self, decoder: Decoder, weights: DecodeWeights, cache: Cache, draw: Draw) -> None:
        self.decoder, self.weights, self.cache, self.draw = decoder, weights, cache, draw
        self._graph: Any = None
        self._captured: DecodeStep | None = None
        self._pool: Any = None

    def run(self, step: DecodeStep, count: int) -> tuple[list[list[int]], list[list[float]]]:
        """``count`` tokens for every row, and their log-probabilities, by step: one wait for the device in all."""
        tokens = torch.empty(count, len(step.last_tokens), dtype=torch.long, device=step.last_tokens.device)
        logprobs = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
        for index in range(count):
            if index and tokens.device.type == "cuda":
                self._replay(step)
            else:
                self._once(step)
            tokens[index], logprobs[index] = step.last_tokens, step.last_logprobs
        return tokens.tolist(), logprobs.tolist()

    def _once(self, step: DecodeStep) -> None:
        logits = decode(self.decoder, self.weights, self.cache, step)
        step.advance(*self.draw(logits, step.keys, step.own_lengths + 1))

    def _replay(self, step: DecodeStep) -> None:
        """One step by the captured graph. Capturing needs kernels that have run before: the first step of a burst is not captured."""
        if self._captured is not step:
            self._graph = torch.cuda.CUDAGraph()
            # It records; nothing is computed yet. Another thread that learns meanwhile may take memory; it may not capture as well.
            with DEVICE_WIDE, torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode="thread_local"):
                self._once(step)
            self._captured, self._pool = step, self._graph.pool()
        self._graph.replay()
