"""Sizes by which sampling, passes and messages are cut, and by which a plan counts their memory; and the largest reward. No torch."""

from __future__ import annotations

__all__ = [
    "ATTENTION_SCORES",
    "CACHE_ROOM",
    "GRADIENT_BUCKET",
    "KEPT_LOGITS",
    "LARGEST_REWARD",
    "LOGIT_COLUMNS",
    "LOGIT_GRADIENT_ELEMENTS",
    "LOGIT_ROWS",
    "MIN_LOGIT_COLUMNS",
    "PREFILL_TOKENS",
    "QUERY_BLOCK",
    "VLLM_COLDEST",
    "VLLM_HOTTEST",
    "ZERO_BUCKET",
    "logit_columns",
]

LARGEST_REWARD = 1e12
"""Rewards of another size are a mistake: squares of advantages and gradients made of them leave fp32."""
VLLM_COLDEST, VLLM_HOTTEST = 0.01, 2.0
"""vLLM's temperatures (``SamplingParams``): given a lower one above 0 it samples at the first, and it refuses those above the
second."""

PREFILL_TOKENS = 4096
"""Most prompt tokens that the built-in engine computes at a time, so that prefill needs no more memory than learning does."""
CACHE_ROOM = {"cpu": 32, "cuda": 256}
"""Positions that its table of keys and values grows by at least; long tables grow by an eighth, so that copying stays a small share.
On GPUs gaps cost less, and new tables mean that a graph is captured again."""
QUERY_BLOCK = 256
"""Queries of one sequence that the library's attention kernels are given at a time: bounds the mask, and skips most of the causal upper
half."""
ATTENTION_SCORES = 2**24
"""Most elements of the mask of one rectangle of attention per head, over its sequences: bounds the memory of the repeated prompts."""
LOGIT_COLUMNS, MIN_LOGIT_COLUMNS = 4096, 256
"""Columns of the vocabulary that the output head computes at a time, and the fewest, for very many rows;"""
_ALIGNED_COLUMNS = 64
"""on GPUs a multiple of so many: of bf16 products whose operands do not begin at multiples of 16 bytes, the fast kernels take none;"""
LOGIT_ROWS = {"cpu": 512, "cuda": 2**15}
"""rows at a time: on CPUs so that the fp32 copy of a tile (8 MiB) stays in the cache;"""
LOGIT_GRADIENT_ELEMENTS = 2**25
"""most elements of the gradient of a slice's logits over all rows, in the weights' dtype."""
KEPT_LOGITS = 256 * 2**20
"""Most bytes of logits that the output head's forward pass keeps for its backward pass, on CPUs. The backward pass computes all others
again."""
GRADIENT_BUCKET = 16 * 2**20
"""Numbers of gradients that processes with whole weights add up in one message: 64 MiB in fp32."""
ZERO_BUCKET = 50_000_000
"""The same for DeepSpeed's ZeRO: 200 MB in fp32."""


def logit_columns(rows: int, device: str) -> int:
    """Columns of a slice of the vocabulary over ``rows`` rows, on ``cpu`` or ``cuda``."""
    width = max(MIN_LOGIT_COLUMNS, min(LOGIT_COLUMNS, LOGIT_GRADIENT_ELEMENTS // max(1, rows)))
    return width if device == "cpu" else width // _ALIGNED_COLUMNS * _ALIGNED_COLUMNS
