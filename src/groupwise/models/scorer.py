"""Choosing how a model is computed: the lean decoder where it applies, else the model's own module."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from groupwise.config.schema import ModelConfig
from groupwise.models.adapters import AdapterScorer, KeepsAdapter, ReferenceWithoutAdapter, drops_out, is_adapted
from groupwise.models.decoder import Decoder, MergedDecoder, why_not_lean, why_unsupported
from groupwise.models.load import Policy
from groupwise.models.logprobs import Scored
from groupwise.models.module_scorer import ModuleScorer
from groupwise.models.packing import PackedTokens

__all__ = [
    "Scorer", "Trunk", "as_in_learning", "attention_note", "copy_trunk", "freeze_output_head", "make_reference",
    "make_scorer",
]  # fmt: skip

Trunk = Decoder | ModuleScorer
"""A scorer that also gives the bare states in which tokens are chosen (``states``)."""


class Scorer(Protocol):
    """Log-probabilities of given completions, and the tensors that are trained."""

    module: PreTrainedModel
    device: torch.device

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Every trainable tensor once."""
        ...

    def prepare(self, groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]) -> PackedTokens:
        """A batch from ``(prompt ids, [completion ids, ...])`` pairs, for this scorer, or another of its kind."""
        ...

    def logprobs(self, batch: PackedTokens, temperature: float = 1.0) -> Tensor:
        """``[T]`` in fp32, differentiable."""
        ...

    def score(self, batch: PackedTokens, temperature: float = 1.0, *, entropy: bool = False, keep_hidden: bool = False) -> Scored:
        """Like ``logprobs``, with the entropies and hidden states of the predicted tokens if asked for."""
        ...


def as_in_learning(scorer: Scorer) -> AbstractContextManager[None]:
    """A context in which passes without gradients say what those with gradients do: an adapter's dropout acts in both."""
    enter = getattr(scorer, "as_in_learning", None)
    return nullcontext() if enter is None else enter()


def make_scorer(policy: Policy, config: ModelConfig, device: torch.device | None = None) -> Trunk:
    """The lean decoder if the architecture allows (it takes the parameters over), else the module itself.

    ``device``: where it will compute, if its weights are still elsewhere; they are to be moved there.
    """
    attention = "sdpa" if config.attention == "sdpa" else "auto"
    if is_adapted(policy.model):
        if why_not_lean(policy.model) is not None or drops_out(policy.model):
            return AdapterScorer(policy.model)
        return MergedDecoder(
            policy.model, gradient_checkpointing=config.gradient_checkpointing, attention=attention, device=device
        )
    if why_unsupported(policy.model) is not None:
        return ModuleScorer(policy.model)
    return Decoder(policy.model, gradient_checkpointing=config.gradient_checkpointing, attention=attention, device=device)


def attention_note(attention: str, model_type: str) -> str | None:
    """A sentence where ``model.attention`` names kernels that a model computed by the lean decoder never calls."""
    if attention not in ("eager", "flash_attention_2"):
        return None
    return (
        f"model.attention={attention} has no effect here: a {model_type} model is computed by groupwise's own decoder, whose "
        "attention is blocked products on CPUs, and on GPUs flash kernels or sdpa where they are allowed."
    )


def make_reference(scorer: Scorer) -> Scorer:
    """A frozen copy of the policy as it is now, computed the same way; with an adapter the policy itself, without it."""
    if isinstance(scorer, KeepsAdapter):
        return ReferenceWithoutAdapter(scorer)
    module = copy.deepcopy(scorer.module)
    if isinstance(scorer, Decoder):
        return Decoder(module, trainable=False, attention=scorer.attention)
    return ModuleScorer(module, trainable=False)


def copy_trunk(scorer: Scorer) -> Trunk:
    """A second model that starts as the policy is now and learns by itself; of an adapted policy, base and adapter."""
    if isinstance(scorer, AdapterScorer):
        return AdapterScorer(copy.deepcopy(scorer.adapted))
    if isinstance(scorer, MergedDecoder):
        return MergedDecoder(
            copy.deepcopy(scorer.adapted), gradient_checkpointing=scorer.gradient_checkpointing, attention=scorer.attention
        )
    module = copy.deepcopy(scorer.module)
    if isinstance(scorer, Decoder):
        return Decoder(module, gradient_checkpointing=scorer.gradient_checkpointing, attention=scorer.attention)
    return ModuleScorer(module)


def freeze_output_head(trunk: Trunk) -> None:
    """An output head that is no view of the embedding takes no part in ``states``: it shall have no masters and moments either."""
    if isinstance(trunk, Decoder):
        if trunk.head is not trunk.embedding:
            trunk.head.requires_grad_(False)
        return
    head = trunk.module.get_output_embeddings()
    if head.weight is not trunk.module.get_input_embeddings().weight:
        head.requires_grad_(False)
