"""The slow references: one completion at a time through transformers' own module, and gradients under the module's names."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from groupwise.models.decoder import Decoder

Ids = list[int]
Groups = list[tuple[Ids, list[Ids]]]

SHAPES = ((9, (5, 1, 17)), (3, (8, 2)), (30, (1,)), (21, (26, 11, 26)))
"""Prompt length and completion lengths of four groups: single tokens among them, and sequences of several blocks of 8."""


def random_groups(
    shapes: Sequence[tuple[int, Sequence[int]]] = SHAPES, vocabulary: int = 128, seed: int = 1, common: int = 0
) -> Groups:
    """``common``: tokens with which all prompts begin."""
    rng = random.Random(seed)

    def tokens(count: int) -> Ids:
        return [rng.randrange(vocabulary) for _ in range(count)]

    beginning = tokens(common)
    return [(beginning + tokens(prompt - common), [tokens(n) for n in lengths]) for prompt, lengths in shapes]


def slow_logprobs(module: Any, groups: Groups, temperature: float = 1.0) -> Tensor:
    """``[T]``: every prompt with every completion, alone, unpadded, all logits kept."""
    found = _slow_scores(module, groups, temperature)
    return torch.cat([scores[torch.arange(len(completion)), torch.tensor(completion)] for scores, completion in found])


def slow_entropies(module: Any, groups: Groups, temperature: float = 1.0) -> Tensor:
    """``[T]``, in the same way."""
    return torch.cat([-(scores.exp() * scores).sum(-1) for scores, _ in _slow_scores(module, groups, temperature)])


def _slow_scores(module: Any, groups: Groups, temperature: float) -> Iterator[tuple[Tensor, Ids]]:
    # The tiny models' pad token is an ordinary token here, as an end of turn is in a conversation: its row learns like any other.
    module.get_input_embeddings().padding_idx = None
    for prompt, completions in groups:
        for completion in completions:
            logits = module(torch.tensor([prompt + completion]), use_cache=False).logits[0, len(prompt) - 1 : -1]
            yield torch.log_softmax(logits / temperature, dim=-1), completion


def token_weights(count: int) -> Tensor:
    """``[T]`` random weights, as advantages would be: their sum with the logprobs is the loss whose gradient is compared."""
    return torch.randn(count, generator=torch.Generator().manual_seed(5))


def module_gradients(decoder: Decoder) -> dict[str, Tensor]:
    """The decoder's gradients under the names of the module's parameters, which are found by where they lie in memory."""
    fused = [tensor for _, tensor in decoder.named_parameters()]
    found = {}
    for name, parameter in decoder.module.named_parameters():
        (owner,) = (f for f in fused if 0 <= parameter.data_ptr() - f.data_ptr() < 4 * f.numel())
        assert owner.grad is not None, name
        start = (parameter.data_ptr() - owner.data_ptr()) // 4
        found[name] = owner.grad.flatten()[start : start + parameter.numel()].view_as(parameter)
    assert sum(f.numel() for f in fused) == sum(g.numel() for g in found.values())
    return found


def assert_equal_gradients(ours: dict[str, Tensor], expected: dict[str, Tensor], relative: float, absolute: float = 0.0) -> None:
    """Each tensor's difference, as a norm, is within ``relative`` of the expected norm (or within ``absolute``)."""
    assert ours.keys() == expected.keys()
    for name, gradient in ours.items():
        difference, size = (gradient - expected[name]).norm().item(), expected[name].norm().item()
        assert difference <= max(relative * size, absolute), f"{name}: differs by {difference:.2e} of {size:.2e}"
