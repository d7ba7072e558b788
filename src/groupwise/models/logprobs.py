"""Log-probabilities of sampled tokens, without ever keeping ``[tokens, vocabulary]``.

The output head runs in tiles of rows, forward and backward. The backward pass recomputes each tile's logits: one more matrix product
in exchange for the largest tensor of the whole step. Axes: T tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

__all__ = ["TILE_ELEMENTS", "token_logprobs"]

TILE_ELEMENTS = 24 * 2**20
"""fp32 logits of one tile on a CPU: 512 rows of a vocabulary of 49,152. Fewer rows make the weight's gradient, a product over the
tile's rows, slow; more only take memory."""
GPU_TILE_ELEMENTS = 2**28


def _tile_rows(hidden: Tensor, weight: Tensor) -> int:
    elements = TILE_ELEMENTS if hidden.device.type == "cpu" else GPU_TILE_ELEMENTS
    return max(1, elements // len(weight))


def _scaled_logits(hidden: Tensor, weight: Tensor, temperature: float, out: Tensor) -> Tensor:
    logits = out[: len(hidden)]
    logits.copy_(hidden @ weight.t())
    return logits if temperature == 1.0 else logits.div_(temperature)


def _forward(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    rows = _tile_rows(hidden, weight)
    chosen = torch.empty(len(targets), dtype=torch.float32, device=hidden.device)
    normaliser = torch.empty_like(chosen)
    buffer = torch.empty(min(rows, len(targets)), len(weight), dtype=torch.float32, device=hidden.device)
    for start in range(0, len(targets), rows):
        tile = slice(start, min(start + rows, len(targets)))
        logits = _scaled_logits(hidden[tile], weight, temperature, buffer)
        chosen[tile] = logits.gather(1, targets[tile, None])[:, 0]
        top = logits.amax(1, keepdim=True)
        normaliser[tile] = logits.sub_(top).exp_().sum(1).log_().add_(top[:, 0])
    return chosen - normaliser, normaliser


class _TokenLogprobs(Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> Tensor:
        logprobs, normaliser = _forward(hidden, weight, targets, temperature)
        ctx.save_for_backward(hidden, weight, targets, normaliser)
        ctx.temperature = temperature
        return logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden, weight, targets, normaliser = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        rows = _tile_rows(hidden, weight)
        grad = grad.float() / ctx.temperature
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_weight else None
        buffer = torch.empty(min(rows, len(targets)), len(weight), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(targets), rows):
            tile = slice(start, min(start + rows, len(targets)))
            probabilities = _scaled_logits(hidden[tile], weight, ctx.temperature, buffer).sub_(normaliser[tile, None]).exp_()
            grad_logits = probabilities.mul_(-grad[tile, None])  # d logprob[target] / d logits = onehot - p
            grad_logits.scatter_add_(1, targets[tile, None], grad[tile, None])
            narrow = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(narrow, weight, out=grad_hidden[tile])
            if grad_weight is not None:
                grad_weight += narrow.t() @ hidden[tile]
        return grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype), None, None


def token_logprobs(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    """``log softmax(hidden @ weight.T / temperature)[target]`` for each row.

    Args:
        hidden: ``[T, D]``, outputs of the final norm at the rows that predict.
        weight: ``[V, D]``, the output head.
        targets: ``[T]`` token ids.
    Returns:
        ``[T]`` in fp32 and nats.
    """
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        return _TokenLogprobs.apply(hidden, weight, targets, temperature)
    return _forward(hidden, weight, targets, temperature)[0]
