"""Copies of the policy that stay as they are while the policy learns: what sampling ahead samples from."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from groupwise.models.adapters import is_adapted
from groupwise.models.decoder import Decoder
from groupwise.models.layer import Layer
from groupwise.models.load import Policy

__all__ = ["PolicyCopy", "WholeCopy"]


class PolicyCopy:
    """``policy`` once more, with weights and a tokenizer of its own; under an adapter the frozen weights are shared.

    An engine may rearrange the copy's weights, as long as the module's parameters stay views of what it samples from.
    """

    def __init__(self, policy: Policy) -> None:
        self.original = policy.model
        kept = {id(t): t for t in policy.model.parameters() if not t.requires_grad} if is_adapted(policy.model) else {}
        # Not the tokenizer in use: its Rust part refuses to be used by two threads at once.
        self.policy = replace(policy, model=copy.deepcopy(policy.model, kept), tokenizer=copy.deepcopy(policy.tokenizer))

    @torch.no_grad()
    def follow(self) -> None:
        """The original's weights of this moment."""
        for name, weight in self._own():
            weight.copy_(self.original.get_parameter(name))

    def state(self) -> dict[str, Tensor]:
        """Its weights by name, those that are shared with the original left out; in memory that is no other tensor's."""
        return {name: w.detach() if w.untyped_storage().nbytes() == w.nbytes else w.detach().clone() for name, w in self._own()}

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """What ``state`` gave. KeyError or RuntimeError: that was another model's."""
        for name, weight in self._own():
            weight.copy_(tensors[name])

    def _own(self) -> list[tuple[str, Any]]:
        originals = dict(self.original.named_parameters())
        return [(name, weight) for name, weight in self.policy.model.named_parameters() if weight is not originals[name]]


class WholeCopy:
    """A decoder with the whole weights of one whose own are divided among processes; with an adapter, the merged ones."""

    def __init__(self, policy: Policy, decoder: Decoder) -> None:
        """To be made, and to ``follow``, when the weights of ``decoder``, the policy's, are whole."""
        self.original = decoder
        self.policy = replace(policy, tokenizer=copy.deepcopy(policy.tokenizer))  # as above
        self.decoder = decoder.standing_still()

    @torch.no_grad()
    def follow(self) -> None:
        """The original's weights of this moment."""
        for mine, theirs in zip(_tensors(self.decoder), _tensors(self.original), strict=True):
            if mine is not None and theirs is not None:
                mine.copy_(theirs)


def _tensors(decoder: Decoder) -> list[Tensor | None]:
    """All that a decoder computes with, as it is now."""
    head = [] if decoder.head is decoder.embedding else [decoder.head]
    layers = [getattr(layer, name) for layer in decoder.layers for name in Layer.__slots__]
    return [decoder.embedding, decoder.final_norm, *head, *layers]
