"""How much arithmetic a step needs: multiplications and additions of matrix products, two operations each.

What is counted is the work itself: a prompt once per group, no padding, no recomputation, the output head at predicted tokens only.
A backward pass is two forward passes. Element-wise work, softmaxes and the optimiser are left out, as in PaLM's model FLOPs
utilisation (arXiv 2204.02311, appendix B).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["forward_flops", "learning_flops", "parameters"]

Lengths = Sequence[tuple[int, Sequence[int]]]
"""For each group its prompt's tokens, and the tokens of its completions."""


def parameters(config: Any) -> tuple[int, int]:
    """Weights of all layers' matrices, and of the output head, of a Llama or Qwen2 ``config``."""
    width, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    head_width = getattr(config, "head_dim", None) or width // heads
    attention = width * (heads + 2 * kv_heads) * head_width + heads * head_width * width
    return config.num_hidden_layers * (attention + 3 * width * config.intermediate_size), width * config.vocab_size


def forward_flops(config: Any, groups: Lengths) -> float:
    """One forward pass over group-packed completions. Sampling them takes the same: every token is computed once.

    The last token of a completion is predicted but not fed. An attention pair (one query, one key) costs two operations for the
    score and two for the weighted value, in each of a head's channels.
    """
    layers, head = parameters(config)
    rows = tokens = pairs = 0
    for prompt, completions in groups:
        rows += prompt + sum(n - 1 for n in completions)
        tokens += sum(completions)
        pairs += prompt * (prompt + 1) // 2 + sum((n - 1) * prompt + (n - 1) * n // 2 for n in completions)
    head_width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 4.0 * pairs * config.num_hidden_layers * config.num_attention_heads * head_width
    return 2.0 * layers * rows + 2.0 * head * tokens + attention


def learning_flops(config: Any, groups: Lengths) -> float:
    """Forward and backward pass over group-packed completions."""
    return 3.0 * forward_flops(config, groups)
