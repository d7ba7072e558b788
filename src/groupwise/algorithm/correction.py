"""When the sampler and the trainer are not the same policy: importance weights between the two (F. Yao et al. 2025, "Your efficient
RL framework secretly brings you off-policy RL training").

Another engine, other kernels or quantised weights sample from mu while training scores pi_old. The factor pi_old / mu makes the
expectation right again; since it has a heavy tail it is cut (``truncate``) or its outliers are left out (``mask``).

Axes: N completions, T tokens, flattened and ragged.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from groupwise.algorithm.aggregate import at_least_fp32, segment_mean, segment_sum
from groupwise.algorithm.losses import MAX_LOG_RATIO
from groupwise.metrics import Mean, Metric

__all__ = ["off_policy_mask", "sampler_correction"]


@torch.no_grad()
def sampler_correction(
    old_logprobs_T: Tensor,
    sampler_logprobs_T: Tensor,
    sequence_T: Tensor,
    completions: int,
    *,
    level: str = "token",
    mode: str = "truncate",
    high: float | None = 2.0,
    low: float | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """``factor_T`` for ``policy_loss`` and metrics: pi_old / mu of each token, or of its whole completion (the product).

    ``old_logprobs_T`` are the trainer's before the first update, ``sampler_logprobs_T`` the sampler's. ``level`` is ``token`` or
    ``sequence``. ``truncate`` holds the factor between ``low`` and ``high``; ``mask`` sets it to 0 outside of them, which takes
    the token or the completion out of the surrogate. ``None`` is no bound. The gradient does not flow through the factor.

    Metrics, over tokens: ``correction`` (mean factor), ``correction_cut`` (share beyond a bound) and ``sampler_kl``, the k3 estimate
    exp(d) - 1 - d of KL(mu || pi_old) from d = log pi_old - log mu (Schulman 2020), whose samples come from mu.
    """
    log_T = at_least_fp32(old_logprobs_T) - at_least_fp32(sampler_logprobs_T)
    kl_T = log_T.clamp(max=MAX_LOG_RATIO).expm1() - log_T
    if level == "sequence":
        log_T = segment_sum(log_T, sequence_T, completions)[sequence_T]
    raw_T = log_T.clamp(max=MAX_LOG_RATIO).exp()
    low, high = 0.0 if low is None else low, math.inf if high is None else high
    beyond_T = (raw_T < low) | (raw_T > high)
    factor_T = raw_T.clamp(low, high) if mode == "truncate" else raw_T.masked_fill(beyond_T, 0.0)
    total, cut, kl = torch.stack([factor_T.sum(), beyond_T.sum().to(factor_T.dtype), kl_T.sum()]).tolist()
    tokens = factor_T.numel()
    return factor_T, {"correction": Mean(total, tokens), "correction_cut": Mean(cut, tokens), "sampler_kl": Mean(kl, tokens)}


@torch.no_grad()
def off_policy_mask(
    logprobs_T: Tensor, old_logprobs_T: Tensor, advantages_T: Tensor, sequence_T: Tensor, completions: int, limit: float
) -> Tensor:
    """``kept_T``: False for completions with a negative advantage from which the policy has moved by more than ``limit``, the mean of
    log pi_old - log pi over their tokens in nats: DeepSeek-V3.2 (arXiv 2512.02556, "off-policy sequence masking")."""
    moved_N = segment_mean(old_logprobs_T - logprobs_T, sequence_T, completions)
    return (advantages_T >= 0) | (moved_N <= limit)[sequence_T]
