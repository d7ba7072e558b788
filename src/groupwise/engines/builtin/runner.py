"""Decode steps in bursts, on GPUs as replays of a captured graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from groupwise.engines.builtin.cache import Cache
from groupwise.engines.builtin.chunked_prefill import PrefillChunk
from groupwise.engines.builtin.decode import DecodeStep, DecodeWeights, decode
from groupwise.engines.builtin.draw import Draw
from groupwise.memory import DEVICE_WIDE
from groupwise.models.decoder import Decoder

__all__ = ["BURSTS", "GRAPHS", "Runner", "burst_length"]

logger = logging.getLogger("groupwise")

BURSTS = {"cpu": 1, "cuda": 16}
"""Steps between two looks at the tokens, by device. Longer ones carry ended rows further; shorter ones wait more often."""
GRAPHS = frozenset({"cuda"})
"""Kinds of devices on which steps are captured and replayed; ``fast_paths`` leaves it out where that does not work."""


def burst_length(device: torch.device) -> int:
    return BURSTS.get(device.type, 1)


class Runner:
    """Runs bursts over one cache: several decode steps in a row without asking the device what came out.

    On a GPU, a step of a small model is over sooner than Python can launch its kernels, and every look at the sampled tokens waits for all
    that was launched. So there a burst of steps runs between two looks, and all are replays of one captured graph, but for the first step
    of each graph, and steps beside which rows are given something. Rows that end within a burst are carried to its end, and what they
    sampled after their end is dropped. Since randomness has names, completions do not depend on the length of a burst. On CPUs a burst is
    one step: nothing is launched ahead there, and ended rows leave at once.

    The graph of a ``DecodeStep`` is captured when it first is asked for more than one step. Where that fails (a graph takes memory of its
    own, and the driver may refuse), there are no more graphs: every step is launched, which is slower and gives the same tokens.
    """

    def __init__(
        self, decoder: Decoder, weights: DecodeWeights, cache: Cache, draw: Draw, tell: Callable[[str], object] = logger.warning,
        launches: bool = False,
    ) -> None:  # fmt: skip
        """``tell``: hears of a graph that could not be captured. ``launches``: whether graphs are given up already."""
        self.decoder, self.weights, self.cache, self.draw, self.tell = decoder, weights, cache, draw, tell
        self._launches = launches
        """Whether graphs are given up."""
        self._graph: Any = None
        self._captured: DecodeStep | None = None

    def run(self, step: DecodeStep, count: int, chunks: Sequence[PrefillChunk] = ()) -> tuple[list[list[int]], list[list[float]]]:
        """``count`` tokens for every row, and their log-probabilities, by step: one wait for the device in all.

        ``chunks`` of what rows were given are computed beside the first step. Where they are several, all but the last only fill the cache:
        what they compute of the step itself comes again.
        """
        tokens = torch.empty(count, len(step.last_tokens), dtype=torch.long, device=step.last_tokens.device)
        logprobs = torch.empty(tokens.shape, dtype=torch.float32, device=tokens.device)
        for index in range(count):
            parts = () if index else chunks
            known = index or self._captured is step  # a capture needs kernels that have run before, and a replay does not
            if known and not parts and tokens.device.type in GRAPHS and not self._launches:
                self._replay(step)
            else:
                self._once(step, *parts)
            tokens[index], logprobs[index] = step.last_tokens, step.last_logprobs
        return tokens.tolist(), logprobs.tolist()

    def _once(self, step: DecodeStep, *chunks: PrefillChunk) -> None:
        for part in chunks[:-1]:
            decode(self.decoder, self.weights, self.cache, step, part)
        logits = decode(self.decoder, self.weights, self.cache, step, chunks[-1] if chunks else None)
        step.advance(*self.draw(logits, step.keys, step.own_lengths + 1 - step.turn_starts))

    def _replay(self, step: DecodeStep) -> None:
        """One step by the captured graph, which is captured first where it is not there."""
        if self._captured is not step:
            self._graph = None  # its memory goes with it: torch 2.11 refuses a pool whose only graph was destroyed
            try:
                self._graph, self._captured = self._capture(step), step
            except Exception as error:  # Triton's are no RuntimeError
                self._launches = True
                why = str(error).partition("\n")[0]
                self.tell(f"a CUDA graph could not be captured ({why}): steps are launched one by one instead")
                self._once(step)
                return
        self._graph.replay()

    def _capture(self, step: DecodeStep) -> Any:
        """Record one step; nothing is computed yet. Another thread that learns meanwhile may take memory; it may not capture as well."""
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            # Where the end of a capture fails, torch leaves its stream the current one, and (until 2.12) its allocator capturing.
            here, stream = torch.cuda.current_stream(), _capture_stream(torch.cuda.current_device())
            capture = torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local")
            with DEVICE_WIDE, torch.cuda.stream(here), capture:
                self._once(step)
        except Exception:
            with suppress(RuntimeError):  # it has ended
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            raise
        return graph


@cache
def _capture_stream(device: int) -> Any:
    """What is captured on ``device``. The one that torch takes by itself is of the first device that captured in the process."""
    return torch.cuda.Stream(device)
