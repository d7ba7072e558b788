"""Log-probabilities through a model's own module: for architectures that the lean decoder does not cover.

Each completion is computed with its prompt, padded on the right. Slower than group packing and equal to it; parity tests use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.models.logprobs import Scored, score_tokens
from groupwise.models.packing import PackedTokens

__all__ = ["ModuleScorer", "Padded", "of_text"]

_TRIED_TOKENS = 4
"""Tokens of the first batch by which it is tested whether logits are what the output head gives."""


@dataclass(frozen=True, slots=True)
class Padded:
    """N completions with their prompts, padded on the right to the longest. Fields as in ``packing.Packed`` where named alike."""

    token_ids: Tensor
    """``[N, L]``."""
    attention_mask: Tensor
    """``[N, L]``, 1 where a token stands."""
    predict_rows_T: Tensor
    """Places in the flattened ``[N * L]`` whose output predicts each sampled token."""
    targets_T: Tensor
    sequence_T: Tensor
    lengths_N: Tensor


class ModuleScorer:
    """The same interface as ``Decoder`` for scoring, over any causal LM of transformers, which stays in evaluation mode."""

    def __init__(self, model: Any, *, trainable: bool = True) -> None:
        self.module = model
        self.device: torch.device = next(model.parameters()).device
        learnt = of_text(model) if trainable else set()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter in learnt)
        # With a padding index, torch drops that row's gradient; the pad token is often the end of a turn, and then stands in prompts.
        model.get_input_embeddings().padding_idx = None
        self._head_is_plain: bool | None = None
        """Whether logits are just ``hidden @ weight.T``; not known before the first batch."""

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.module.named_parameters())

    def prepare(self, groups: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]]) -> Padded:
        """A batch from ``(prompt ids, [completion ids, ...])`` pairs."""
        rows = [(list(prompt), list(completion)) for prompt, completions in groups for completion in completions]
        longest = max(len(p) + len(c) - 1 for p, c in rows)
        token_ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(token_ids)
        predict: list[int] = []
        sequence: list[int] = []
        for index, (prompt, completion) in enumerate(rows):
            inputs = prompt + completion[:-1]
            token_ids[index, : len(inputs)] = torch.tensor(inputs)
            mask[index, : len(inputs)] = 1
            first = index * longest + len(prompt) - 1
            predict.extend(range(first, first + len(completion)))
            sequence.extend([index] * len(completion))
        tensors = [token_ids, mask, *(torch.tensor(x) for x in (predict, [t for _, c in rows for t in c], sequence))]
        lengths = torch.tensor([len(c) for _, c in rows])
        return Padded(*(t.to(self.device) for t in [*tensors, lengths]))

    def logprobs(self, batch: PackedTokens, temperature: float = 1.0) -> Tensor:
        """Log-probability of every completion token, ``[T]`` in fp32, differentiable."""
        return self.score(batch, temperature).logprobs_T

    def score(self, batch: PackedTokens, temperature: float = 1.0, *, entropy: bool = False, keep_hidden: bool = False) -> Scored:
        """Like ``logprobs``, with the entropies and hidden states of the predicted tokens if asked for."""
        assert isinstance(batch, Padded), "another kind of scorer prepared it"
        self._set_modes(learning=torch.is_grad_enabled())
        try:
            if self._head_is_plain is None:
                self._head_is_plain = _head_is_plain(self.module, batch.token_ids[:1, :_TRIED_TOKENS])
            if not self._head_is_plain:
                return self._score_by_logits(batch, temperature, entropy, keep_hidden)
            hidden = self._states(batch)
            head = self.module.get_output_embeddings().weight
            return score_tokens(hidden, head, batch.targets_T, temperature, entropy=entropy, keep_hidden=keep_hidden)
        finally:
            self.module.eval()  # and so it is when the backward pass recomputes

    def states(self, batch: PackedTokens) -> Tensor:
        """``[T, D]``, differentiable: the states in which the completions' tokens are chosen, which the output head reads."""
        assert isinstance(batch, Padded), "another kind of scorer prepared it"
        self._set_modes(learning=torch.is_grad_enabled())
        try:
            return self._states(batch)
        finally:
            self.module.eval()

    def _states(self, batch: Padded) -> Tensor:
        if self.module.base_model is self.module:  # an architecture that names no trunk of its own
            last: Tensor = self.module(**_inputs(batch), output_hidden_states=True).hidden_states[-1]
        else:
            last = self.module.base_model(**_inputs(batch)).last_hidden_state
        return last.flatten(0, 1).index_select(0, batch.predict_rows_T)

    def _score_by_logits(self, batch: Padded, temperature: float, entropy: bool, keep_hidden: bool) -> Scored:
        """Score by the head's own logits: for heads that scale or cap what they give."""
        output = self.module(**_inputs(batch), output_hidden_states=keep_hidden)
        rows = batch.predict_rows_T
        scaled = torch.log_softmax(output.logits.flatten(0, 1).index_select(0, rows).float() / temperature, dim=-1)
        return Scored(
            scaled.gather(1, batch.targets_T[:, None])[:, 0],
            -(scaled.exp() * scaled).sum(-1) if entropy else None,
            output.hidden_states[-1].flatten(0, 1).index_select(0, rows) if keep_hidden else None,
        )

    def _set_modes(self, learning: bool) -> None:
        """Evaluation mode, as dropout has no place in a policy ratio; but gradient checkpointing acts only in parts that are training.

        Attention drops out by its own ``training`` flag, so it does not do to silence ``nn.Dropout`` modules.
        """
        self.module.eval()
        for part in self.module.modules():
            part.training = learning and bool(getattr(part, "gradient_checkpointing", False))


def of_text(model: Any) -> set[nn.Parameter]:
    """The parameters that text is computed with. The others of a model that sees images too never have a gradient, and would take masters
    and moments all the same."""
    if model.config.get_text_config() is model.config:
        return set(model.parameters())
    parts = (model.get_decoder(), model.get_input_embeddings(), model.get_output_embeddings())
    return {parameter for part in parts if part is not None for parameter in part.parameters()}


def _inputs(batch: Padded) -> dict[str, Any]:
    return {"input_ids": batch.token_ids, "attention_mask": batch.attention_mask, "use_cache": False}


@torch.no_grad()
def _head_is_plain(model: Any, token_ids: Tensor) -> bool:
    """Whether logits are just ``hidden @ weight.T``, and not scaled, capped or shifted before or after the output head.

    Architectures name such settings as they like (``final_logit_softcapping``, ``logits_soft_cap``, ``logit_scale`` ...), so the model
    is run on ``token_ids`` ``[1, L]``: what enters its head must be what the trunk gave, and the logits what the head gave, to the bit.
    """
    head, trunk = model.get_output_embeddings(), model.base_model
    if type(head) is not nn.Linear or head.bias is not None or trunk is model:
        return False
    seen: dict[str, Any] = {}
    hooks = [
        trunk.register_forward_hook(lambda _module, _inputs, output: seen.update(hidden=output[0])),
        head.register_forward_hook(lambda _module, inputs, output: seen.update(entered=inputs[0], left=output)),
    ]
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        logits = model(input_ids=token_ids, attention_mask=torch.ones_like(token_ids), use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
        for module, training in modes.items():
            module.training = training
    if "hidden" not in seen or "left" not in seen:
        return False
    return _same(seen["entered"], seen["hidden"]) and _same(seen["left"], logits)


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.float(), other.float())
