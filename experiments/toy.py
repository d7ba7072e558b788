"""A policy small enough to train in a second, through the very objective and weights that real runs use.

A problem is a vector of features; the policy chooses up to L tokens, each from its own softmax over a linear map of the features,
and ends where it chooses token 0. The right completion begins with two key tokens, which a hidden linear map decides, and then has
to end before the limit: reward 1, else 0. All problems share the parameters, so there is something to generalise and to disturb.

Axes: P problems, G completions of each, N = P G, L positions, V vocabulary, D features, T sampled tokens (ragged, flattened).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from groupwise.algorithm import AdvantageInputs, BatchCounts, Objective, policy_loss

__all__ = ["KEY_TOKENS", "STOP", "Batch", "ToyPolicy", "backward", "objective"]

STOP = 0
KEY_TOKENS = 2


class ToyPolicy:
    """The hidden map is drawn from ``seed``; the policy starts with a small part of it, right about one time in ten."""

    def __init__(self, seed: int, *, features: int = 16, length: int = 8, vocabulary: int = 8, head_start: float = 0.2) -> None:
        self.random = torch.Generator().manual_seed(seed)
        self.length, self.vocabulary, self.features = length, vocabulary, features
        self.key_map = torch.randn(features, KEY_TOKENS, vocabulary, generator=self.random)
        self.key_map[:, :, STOP] = -9.0  # the key never says stop
        start = torch.zeros(features, length, vocabulary)
        start[:, :KEY_TOKENS, 1:] = head_start * self.key_map[:, :, 1:]
        self.weight = start.requires_grad_()
        self.bias = torch.zeros(length, vocabulary, requires_grad=True)

    @property
    def parameters(self) -> list[Tensor]:
        return [self.weight, self.bias]

    def problems(self, count: int) -> Tensor:
        """``features_PD`` of new problems."""
        return torch.randn(count, self.features, generator=self.random)

    def logprobs_NLV(self, features_ND: Tensor) -> Tensor:
        return (torch.einsum("nd,dlv->nlv", features_ND, self.weight) + self.bias).log_softmax(-1)

    @torch.no_grad()
    def sample(self, problems: int, group: int) -> Batch:
        """Completions of new problems, their rewards included."""
        features_PD = self.problems(problems)
        features_ND = features_PD.repeat_interleave(group, 0)
        probabilities = self.logprobs_NLV(features_ND).exp()
        tokens_NL = torch.multinomial(probabilities.flatten(0, 1), 1, generator=self.random).view(len(features_ND), self.length)
        stops_NL = tokens_NL == STOP
        stopped_N = stops_NL.any(1)
        lengths_N = torch.where(stopped_N, stops_NL.int().argmax(1) + 1, self.length)
        scores_PLV = torch.einsum("pd,dlv->plv", features_PD, self.key_map)
        scores_PLV[:, :, STOP] = -torch.inf
        key_NL = scores_PLV.argmax(-1).repeat_interleave(group, 0)
        right_N = (tokens_NL[:, :KEY_TOKENS] == key_NL).all(1) & stopped_N
        batch = Batch(features_ND, tokens_NL, lengths_N, right_N.float(), stopped_N, group)
        batch.old_logprobs_T = self.logprobs(batch).detach()
        return batch

    def logprobs(self, batch: Batch) -> Tensor:
        """``[T]`` of the batch's tokens under the policy as it is now."""
        chosen_NL = self.logprobs_NLV(batch.features_ND).gather(2, batch.tokens_NL[..., None])[..., 0]
        return chosen_NL[batch.used_NL]


@dataclass
class Batch:
    """Scored completions; those of one problem are neighbours."""

    features_ND: Tensor
    tokens_NL: Tensor
    lengths_N: Tensor
    """Tokens up to the stop token and with it."""
    rewards_N: Tensor
    stopped_N: Tensor
    group: int
    old_logprobs_T: Tensor | None = None

    @property
    def used_NL(self) -> Tensor:
        """Which places hold sampled tokens."""
        return torch.arange(self.tokens_NL.shape[1]) < self.lengths_N[:, None]

    @property
    def sequence_T(self) -> Tensor:
        return torch.arange(len(self.lengths_N)).repeat_interleave(self.lengths_N)

    def counts(self) -> BatchCounts:
        return BatchCounts(len(self.lengths_N), int(self.lengths_N.sum()), self.tokens_NL.shape[1])

    def part(self, start: int, stop: int, group: int | None = None) -> Batch:
        """Completions ``start`` to ``stop``; with ``group`` as if that were the size of their groups."""
        cut = slice(start, stop)
        tokens = (self.sequence_T >= start) & (self.sequence_T < stop)
        return Batch(self.features_ND[cut], self.tokens_NL[cut], self.lengths_N[cut], self.rewards_N[cut], self.stopped_N[cut],
                     group or self.group, None if self.old_logprobs_T is None else self.old_logprobs_T[tokens])  # fmt: skip


def objective(**choices: object) -> Objective:
    """GRPO without KL, or what ``choices`` (settings of ``algorithm``) make of it."""
    from groupwise.config.schema import AlgorithmConfig

    return Objective.from_config(AlgorithmConfig(**{"kl": None, **choices}))  # type: ignore[arg-type]


def backward(
    policy: ToyPolicy, batch: Batch, chosen: Objective, *, counts: BatchCounts | None = None, reference: ToyPolicy | None = None,
    factor: float = 1.0, train_stop: bool = True, first: bool = True,
) -> dict[str, float]:  # fmt: skip
    """Add the gradient of ``factor`` x the loss. ``counts`` are those of the whole batch where this is a part of it.

    ``train_stop`` off leaves the stop token out of the loss, as a mask by pad id does where pad = eos. ``first``: on-policy.
    """
    inputs = AdvantageInputs(
        rewards_N=batch.rewards_N.double(), group_N=torch.arange(len(batch.rewards_N)) // batch.group, lengths_N=batch.lengths_N
    )
    advantages_N = chosen.advantages(inputs).per_completion(inputs).float()
    logprobs_T = policy.logprobs(batch)
    weights_T = chosen.weights(batch.lengths_N, batch.sequence_T, counts or batch.counts())
    if not train_stop:
        weights_T = weights_T * (batch.tokens_NL[batch.used_NL] != STOP)
    with torch.no_grad():
        reference_logprobs_T = reference.logprobs(batch) if reference is not None else None
    loss, numbers = policy_loss(
        chosen, logprobs_T=logprobs_T, sequence_T=batch.sequence_T, weights_T=weights_T, advantages_N=advantages_N,
        old_logprobs_T=None if first else batch.old_logprobs_T, reference_logprobs_T=reference_logprobs_T,
    )  # fmt: skip
    (factor * loss).backward()
    tokens = len(logprobs_T)
    clipped = numbers["clip_low"].total + numbers["clip_high"].total  # type: ignore[union-attr]
    found = {"loss": float(loss.detach()), "ratio_deviation": numbers["ratio_deviation_max"].value, "clipped": clipped / tokens}
    return found | ({"kl": numbers["kl"].value} if "kl" in numbers else {})
