"""How much likelier the policy has made what was sampled: pi(token) / pi_old(token), per token or per completion."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from groupwise.algorithm.sequences import segment_mean, segment_sum

__all__ = ["MAX_LOG_RATIO", "product_ratio", "sequence_importance", "sequence_ratio", "token_ratio"]

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here, in nats, before exp: a ratio of 5e8 is already far beyond any clip bound, and fp32 overflows at 88."""


def token_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, sequence_T: Tensor, completions: int) -> Tensor:
    """exp(log pi - log pi_old) of each token (PPO, GRPO); the gradient flows through ``logprobs_T``.

    A log-ratio above ``MAX_LOG_RATIO`` is cut, and has no gradient.
    """
    return (logprobs_T - old_logprobs_T).clamp(max=MAX_LOG_RATIO).exp()


def sequence_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, sequence_T: Tensor, completions: int) -> Tensor:
    """GSPO (arXiv 2507.18071): the geometric mean of a completion's token ratios, given to each of its tokens.

    The value is s = exp(mean_t log-ratio), eq. 7; the gradient is that of the paper's token form, s_t = sg[s] pi_t / sg[pi_t]
    (eq. 14), so that token t's gradient is s grad log pi_t. Summed with weights 1 / |o| both forms have the same gradient. All
    tokens of a completion must be in this call.
    """
    log_ratio_T = (logprobs_T - old_logprobs_T).detach()
    log_s_T = segment_mean(log_ratio_T, sequence_T, completions)[sequence_T]
    # lp - sg[lp] is 0 in value and grad log pi in gradient
    return (log_s_T + (logprobs_T - logprobs_T.detach())).clamp(max=MAX_LOG_RATIO).exp()


def sequence_importance(logprobs_T: Tensor, old_logprobs_T: Tensor, sequence_T: Tensor, completions: int) -> Tensor:
    """The value of ``sequence_ratio`` with its true gradient, which runs into all tokens of the completion: GSPO, eq. 7.

    As a factor of something else than a completion's advantage the two forms differ, and where some of its tokens are left out.
    """
    log_s_N = segment_mean(logprobs_T - old_logprobs_T, sequence_T, completions)
    return log_s_N.clamp(max=MAX_LOG_RATIO).exp()[sequence_T]


@torch.no_grad()
def product_ratio(logprobs_T: Tensor, old_logprobs_T: Tensor, sequence_T: Tensor, completions: int) -> Tensor:
    """pi(completion) / pi_old(completion), given to each of its tokens, without a gradient: the weight in VESPO.

    Between 1e-8 and exp(20); each token's log-ratio is cut at 20 either way first, as in the authors' code.
    """
    log_T = (logprobs_T - old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return segment_sum(log_T, sequence_T, completions).clamp(math.log(1e-8), MAX_LOG_RATIO).exp()[sequence_T]


Ratio = Callable[[Tensor, Tensor, Tensor, int], Tensor]
RATIOS: dict[str, Ratio] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "whole_sequence": sequence_importance,
    "product": product_ratio,
}
IMPORTANCE: dict[str, Ratio] = {
    "token": token_ratio,
    "sequence": sequence_importance,
    "whole_sequence": sequence_importance,
    "product": token_ratio,
}
"""What the KL is multiplied by where it is corrected: a ratio with its gradient."""
