"""The penalty for leaving the reference: estimates of KL(policy || reference) from the sampled token alone, and a controller of its weight.

Write d = log ref(token) - log policy(token). Estimators per token (J. Schulman, "Approximating KL divergence", 2020):

    k1 = -d                 unbiased, of either sign, high variance
    k2 = d^2 / 2            biased, never negative
    k3 = exp(d) - 1 - d     unbiased, never negative, low variance; DeepSeekMath (arXiv 2402.03300) eq. 4

What they do as a *loss* is another matter, since samples are not differentiated through. On-policy, in expectation:

    gradient of k1 = 0                          nothing is pulled anywhere
    gradient of k2 = gradient of KL(policy || reference)
    gradient of k3 = gradient of KL(reference || policy): the other direction, the same near the reference

k1 belongs into the reward, where the policy gradient turns it into the gradient of KL(policy || reference).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from groupwise.algorithm.aggregate import at_least_fp32, segment_sum

__all__ = ["MAX_LOG_DIFFERENCE", "AdaptiveKL", "k1", "k2", "k3", "kl_in_reward", "kl_penalty", "kl_per_token"]

MAX_LOG_DIFFERENCE = 20.0
"""Above this difference of log-probabilities, in nats, k3 goes on along its tangent: exp(20) is 5e8; fp32 overflows at 88."""


def k1(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """log policy - log reference."""
    return logprobs_T - reference_logprobs_T


def k2(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """(log policy - log reference)^2 / 2."""
    return (logprobs_T - reference_logprobs_T).square() / 2


def k3(logprobs_T: Tensor, reference_logprobs_T: Tensor) -> Tensor:
    """exp(d) - 1 - d with d = log reference - log policy, by ``expm1`` so that it stays exact near the reference.

    For d above ``MAX_LOG_DIFFERENCE`` it continues linearly with the slope reached there: large, but finite in value and in
    gradient, and still pulling the policy back (a clamp would let go of it). The two pieces must not share a gradient path: near
    the reference the slopes would have to cancel, which fp32 cannot do beside 5e8.
    """
    d_T = reference_logprobs_T - logprobs_T
    near_T = d_T.clamp(max=MAX_LOG_DIFFERENCE)
    beyond_T = torch.relu(d_T - MAX_LOG_DIFFERENCE)
    return torch.expm1(near_T) - near_T + math.expm1(MAX_LOG_DIFFERENCE) * beyond_T


ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": k1, "k2": k2, "k3": k3}


def kl_per_token(logprobs_T: Tensor, reference_logprobs_T: Tensor, estimator: str = "k3") -> Tensor:
    """The named estimate for each token, in fp32 at least; the gradient flows into ``logprobs_T`` only."""
    return ESTIMATORS[estimator](at_least_fp32(logprobs_T), at_least_fp32(reference_logprobs_T).detach())


@torch.no_grad()
def kl_penalty(logprobs_T: Tensor, reference_logprobs_T: Tensor, *, beta: float, estimator: str = "k1") -> Tensor:
    """``penalty_T``: beta x KL of each sampled token, to be taken off as that token's reward; no gradient.

    ``logprobs_T`` are those of the policy that sampled. Feeds ``advantages.token_advantages`` and ``advantages.gae_advantage``.
    """
    return beta * kl_per_token(logprobs_T, reference_logprobs_T, estimator)


@torch.no_grad()
def kl_in_reward(
    logprobs_T: Tensor, reference_logprobs_T: Tensor, sequence_T: Tensor, completions: int, *, beta: float, estimator: str = "k1"
) -> Tensor:
    """``penalty_N``: beta x KL summed over each completion, to be taken off its reward before the baseline; no gradient.

    With k1 it is beta log(policy(y) / reference(y)), the penalised reward of RLOO (arXiv 2402.14740, eq. 2).
    """
    penalty_T = kl_penalty(logprobs_T, reference_logprobs_T, beta=beta, estimator=estimator)
    return segment_sum(penalty_T, sequence_T, completions)


@dataclass(frozen=True, slots=True)
class AdaptiveKL:
    """A coefficient that steers the KL towards a target: Ziegler et al. 2019 (arXiv 1909.08593), section 2.2.

    After each step, beta is multiplied by 1 + gain x clip((kl - target) / target, -limit, limit): proportional control of
    log beta. The paper's values are the defaults.
    """

    beta: float
    target: float
    gain: float = 0.1
    limit: float = 0.2

    def __post_init__(self) -> None:
        for name in ("beta", "target", "gain", "limit"):
            if not getattr(self, name) > 0:
                raise ValueError(f"AdaptiveKL.{name} is {getattr(self, name)}, but it must be above 0; choose a positive number")
        if not self.gain * self.limit < 1:
            raise ValueError(
                f"AdaptiveKL.gain is {self.gain}, but times limit ({self.limit}) it must be below 1, or beta would become 0"
            )

    def update(self, kl: float) -> AdaptiveKL:
        """The controller after a step whose mean KL was ``kl``; a KL that is not a number leaves it as it is."""
        if kl != kl:
            return self
        error = max(-self.limit, min(self.limit, (kl - self.target) / self.target))
        return replace(self, beta=self.beta * (1 + self.gain * error))
