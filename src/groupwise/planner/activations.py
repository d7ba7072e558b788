"""What a forward pass keeps for its backward pass, and what both need in passing. It follows the code of ``models``, operation by
operation: change them together.

Bytes throughout. Symbols as in ``ModelShape``; s bytes of a number, R packed rows, T predicted tokens.
"""

from __future__ import annotations

from groupwise.limits import LOGIT_COLUMNS, LOGIT_GRADIENT_ELEMENTS, LOGIT_ROWS, MIN_LOGIT_COLUMNS, QUERY_BLOCK
from groupwise.planner.setup import MicroBatchSize, Setup

__all__ = ["head_bytes", "kept_bytes", "kept_formula", "passing_bytes", "prefill_bytes"]


def kept_formula(setup: Setup) -> str:
    if setup.config.model.gradient_checkpointing:
        return "L R D s + one layer computed again"
    if not setup.packed:
        adapted = " + 4 (5D + HE + F) fp32 copies for the adapter" if setup.adapted else ""
        return f"L N (8D + s (2HE + 2KE + 3F){adapted}), N padded tokens"
    if setup.device == "cpu":
        return "L R (s (2D + (H+2K)E + HE + 2F) + H (s + 4))"
    return "L (R s (4D + HE + 3F) + s E H (queries + output + 2 keys of each block))"


def kept_bytes(setup: Setup, batch: MicroBatchSize) -> int:
    """Held from a micro-batch's forward pass until its backward pass has come by."""
    shape, s = setup.shape, setup.weight_bytes
    one = _layer_kept(setup, batch)
    if not setup.config.model.gradient_checkpointing:
        return shape.layers * one
    rows = batch.rows if setup.packed else batch.padded
    return shape.layers * rows * shape.width * s + one


def _layer_kept(setup: Setup, batch: MicroBatchSize) -> int:
    if not setup.packed:
        return batch.padded * _module_row(setup)
    shape, s = setup.shape, setup.weight_bytes
    raw = (shape.qkv if shape.head_norm else 0) + (shape.layer_norms - 2) * shape.width
    if setup.device == "cpu":  # models/layer.py, _Kept and the input
        row = s * (2 * shape.width + shape.qkv + shape.attended + 2 * shape.feed_forward + raw) + shape.heads * (s + 4)
        return batch.rows * row
    # models/layer.py, _by_library: input, middle, both normed; the attention's flattened output; gate, up and their product
    row = s * (4 * shape.width + shape.attended + 3 * shape.feed_forward + raw) + 8
    return batch.rows * row + _library_attention(setup, batch)


def _library_attention(setup: Setup, batch: MicroBatchSize) -> int:
    """Queries, keys, values and outputs of every rectangle; keys are repeated for each query head, and a prompt's for each completion."""
    queries = keys = 0
    for prompt, count in batch.groups:
        for length, prefix, sequences in ((prompt, 0, 1), (batch.completion - 1, prompt, count)):
            for offset in range(0, length, QUERY_BLOCK):
                end = min(length, offset + QUERY_BLOCK)
                queries += sequences * (end - offset)
                keys += sequences * (prefix + end)
    return setup.weight_bytes * setup.shape.attended * (2 * queries + 2 * keys)


def _module_row(setup: Setup) -> int:
    """One padded token in one layer of transformers' module: norms in fp32, queries, keys, values, output, gate, act(gate), up; and
    what the projections' weights or the adapters need of their inputs."""
    shape, s = setup.shape, setup.weight_bytes
    kv = shape.kv_heads * shape.head_width
    row = 8 * shape.width + s * (2 * shape.attended + 2 * kv + 3 * shape.feed_forward) + 4 * shape.heads
    if not setup.adapted:
        return row + s * (4 * shape.width + shape.feed_forward)  # the attention's output is o's input
    lora = setup.config.model.lora
    assert lora is not None
    copies = 5 * shape.width + shape.attended + shape.feed_forward  # q, k, v, gate, up; o; down: each casts its input
    shared = 2 * shape.width + shape.feed_forward  # nothing to cast, and the attention's output is there
    return row + 4 * (shared if s == 4 else copies) + 7 * 4 * lora.rank


def passing_bytes(setup: Setup, batch: MicroBatchSize) -> int:
    """Needed for a moment by one layer's backward pass, and free again."""
    shape, s = setup.shape, setup.weight_bytes
    if not setup.packed:
        return batch.padded * (4 * 2 * shape.feed_forward + s * 4 * shape.feed_forward)
    # swiglu's output and its gradient, the gradient of gate and up, two products; then the layer's own weight gradients
    return batch.rows * s * (shape.width + 6 * shape.feed_forward) + s * 2 * shape.feed_forward * shape.width


def head_bytes(setup: Setup, batch: MicroBatchSize) -> int:
    """The output head: its input before and after the norm, a tile of fp32 logits, their gradient, and the input's gradient."""
    shape, s, tokens = setup.shape, setup.weight_bytes, batch.tokens
    width = max(MIN_LOGIT_COLUMNS, min(LOGIT_COLUMNS, LOGIT_GRADIENT_ELEMENTS // max(1, tokens)))
    rows = min(tokens, LOGIT_ROWS[setup.device])
    tile = 4 * rows * LOGIT_COLUMNS + s * rows * width  # fp32, and the product it is copied from
    return tile + tokens * (s * width + shape.width * (2 * s + 4))


def prefill_bytes(setup: Setup, rows: int) -> int:
    """One layer over prompts, nothing kept: norms in fp32, queries, keys, values before and after rotation, gate and up."""
    shape, s = setup.shape, setup.weight_bytes
    return rows * (s * (3 * shape.width + 3 * shape.qkv + shape.attended + 3 * shape.feed_forward) + 4 * shape.width)
