"""The policy's loss, token by token: ratios, what is maximised in place of the expected reward, and the table of both.

A loss is a function ``LossInputs -> LossOutputs`` with its settings as keywords. It returns one number per token and never divides by a
count: ``aggregate`` owns the weights, so that how a batch is cut cannot change the gradient. Axes: N completions (whole ones), T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from groupwise.algorithm.aggregate import segment_mean, segment_sum
from groupwise.metrics import Metric

__all__ = [
    "LOSSES", "MAX_LOG_RATIO", "Loss", "LossInputs", "LossOutputs", "cispo_loss", "clip", "clip_loss", "dppo_loss",
    "dual_clipped", "gmpo_loss", "product_ratio", "reinforce_loss", "sapo_loss", "sequence_importance", "sequence_ratio",
    "token_ratio", "topr_loss", "vespo_loss",
]  # fmt: skip

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here, in nats, before exp: a ratio of 5e8 is already far beyond any clip bound, and fp32 overflows at 88."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss may read about the tokens of some whole completions; fp32 at least. The gradient flows into ``logprobs_T`` alone
    (and into ``entropy_T``)."""

    logprobs_T: Tensor
    """Log-probabilities of the current policy, in nats."""
    old_logprobs_T: Tensor
    """The denominator of the ratio: the policy before the batch's first update (on-policy the same numbers), or the sampler where
    ``stale_samples`` is ``behaviour``."""
    advantages_T: Tensor
    sequence_T: Tensor
    """Which completion, 0 to N - 1, each token belongs to."""
    completions: int
    """N."""
    sampler_logprobs_T: Tensor | None = None
    """Log-probabilities under the distribution that the token was drawn from."""
    reference_logprobs_T: Tensor | None = None
    """Those of the reference, for losses whose ``needs`` names it, or where the run keeps one anyway."""
    entropy_T: Tensor | None = None
    """Entropy of the current policy's whole distribution, for losses whose ``needs`` names it."""


@dataclass(frozen=True, slots=True)
class LossOutputs:
    """What a loss says about each token."""

    loss_T: Tensor
    """The negative objective of each token, before weights."""
    clipped_T: Tensor | None = None
    """True where the clip acts; None: nowhere."""
    ratio_T: Tensor | None = None
    """The ratio that the loss goes by, for the metrics; None: the token ratio."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    """Further numbers, logged as ``loss/<name>``."""


class Loss(Protocol):
    """A function of some completions' tokens, its settings bound or at their defaults. An attribute ``needs`` (a set of "reference",
    "entropy", see ``groupwise.algorithm.needs``) asks for inputs that cost a pass."""

    def __call__(self, inputs: LossInputs, /) -> LossOutputs: ...


# Ratios: how much likelier the policy has made what was sampled.


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
    """pi(completion) / pi_old(completion), given to each of its tokens, without a gradient: the weight in VESPO and TOPR.

    Between 1e-8 and exp(20); each token's log-ratio is cut at 20 either way first, as in the authors' code.
    """
    log_T = (logprobs_T - old_logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return segment_sum(log_T, sequence_T, completions).clamp(math.log(1e-8), MAX_LOG_RATIO).exp()[sequence_T]


_RATIOS: Mapping[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "whole_sequence": sequence_importance,
}


def _ratio(inputs: LossInputs, level: str) -> Tensor:
    return _RATIOS[level](inputs.logprobs_T, inputs.old_logprobs_T, inputs.sequence_T, inputs.completions)


# Surrogates, from a ratio r and an advantage A to each token's loss, and where the clip acts.


def clip(ratio_T: Tensor, advantages_T: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - low, 1 + high) A): PPO (arXiv 1707.06347, eq. 7); low != high is DAPO's clip-higher (2503.14476).

    Pessimistic: only the side that would move r further away is cut, so r may always come back.
    """
    free_T = ratio_T * advantages_T
    held_T = ratio_T.clamp(1 - low, 1 + high) * advantages_T
    return -torch.minimum(free_T, held_T), held_T < free_T


def dual_clipped(ratio_T: Tensor, advantages_T: Tensor, low: float, high: float, c: float) -> tuple[Tensor, Tensor]:
    """The clipped loss with a second bound: for A < 0, -max(min(r A, clip(r) A), c A), c > 1 (Ye et al. 2020, arXiv 1912.09729, eq. 5).

    Without it the loss of a bad token grows without limit as the token becomes likelier. INTELLECT-2's min(r, delta) (arXiv 2505.07291,
    section 3.4) is the same with c = delta, as long as delta > 1 + high.
    """
    loss_T, clipped_T = clip(ratio_T, advantages_T, low, high)
    ceiling_T = -c * advantages_T
    capped_T = (advantages_T < 0) & (loss_T > ceiling_T)
    return torch.where(capped_T, ceiling_T, loss_T), clipped_T | capped_T


# Losses by name; keywords are the fields of their settings sections (``config.objective``).


def clip_loss(
    inputs: LossInputs, *, epsilon: float = 0.2, epsilon_high: float | None = None, ratio: str = "token",
    dual_clip: float | None = None,
) -> LossOutputs:  # fmt: skip
    """``clip``, or ``dual_clipped`` where ``dual_clip`` is set: PPO, GRPO, DAPO; with ``ratio="sequence"`` GSPO."""
    ratio_T, high = _ratio(inputs, ratio), epsilon if epsilon_high is None else epsilon_high
    if dual_clip is None:
        loss_T, clipped_T = clip(ratio_T, inputs.advantages_T, epsilon, high)
    else:
        loss_T, clipped_T = dual_clipped(ratio_T, inputs.advantages_T, epsilon, high, dual_clip)
    return LossOutputs(loss_T, clipped_T, ratio_T)


def cispo_loss(
    inputs: LossInputs, *, epsilon: float = 1.0, epsilon_high: float | None = 4.0, ratio: str = "token"
) -> LossOutputs:
    """-sg[clip(r, 1 - low, 1 + high)] A log pi: MiniMax-M1 (arXiv 2506.13585, eq. 4 and 5). Every token keeps a gradient."""
    ratio_T, high = _ratio(inputs, ratio), epsilon if epsilon_high is None else epsilon_high
    weight_T = ratio_T.detach().clamp(1 - epsilon, 1 + high)
    return LossOutputs(-weight_T * inputs.advantages_T * inputs.logprobs_T, weight_T != ratio_T.detach(), ratio_T)


def reinforce_loss(inputs: LossInputs) -> LossOutputs:
    """-A log pi: Williams 1992, for on-policy batches. Nothing corrects for staleness, and nothing is clipped."""
    return LossOutputs(-inputs.advantages_T * inputs.logprobs_T)


def _by_sign(good_T: Tensor, positive: float, negative: float, like: Tensor) -> Tensor:
    return torch.where(good_T, like.new_tensor(positive), like.new_tensor(negative))


def sapo_loss(inputs: LossInputs, *, tau_positive: float = 1.0, tau_negative: float = 1.05, ratio: str = "token") -> LossOutputs:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau being ``tau_positive`` for A > 0, else ``tau_negative``: SAPO (arXiv 2511.20347).

    A gate in place of the clip: its slope is 1 at r = 1 and fades on both sides, faster with a larger tau. Nothing counts as
    clipped.
    """
    ratio_T = _ratio(inputs, ratio)
    tau_T = _by_sign(inputs.advantages_T > 0, tau_positive, tau_negative, ratio_T)
    return LossOutputs(-torch.sigmoid(tau_T * (ratio_T - 1)) * (4 / tau_T) * inputs.advantages_T, None, ratio_T)


def vespo_loss(
    inputs: LossInputs, *, k_positive: float = 2.0, lambda_positive: float = 3.0, k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> LossOutputs:  # fmt: skip
    """-sg[phi(w)] A log pi with phi(w) = w^k exp(lambda (1 - w)): VESPO (arXiv 2602.10693); w is the completion's whole ratio.

    k and lambda are the positive ones for A >= 0, else the negative ones. phi is 1 at w = 1, and 0 for what has become very
    likely or very unlikely.
    """
    w_T = product_ratio(inputs.logprobs_T, inputs.old_logprobs_T, inputs.sequence_T, inputs.completions)
    good_T = inputs.advantages_T >= 0
    power_T = _by_sign(good_T, k_positive, k_negative, w_T)
    fade_T = _by_sign(good_T, lambda_positive, lambda_negative, w_T).clamp(min=1e-4)
    phi_T = (power_T * w_T.log() + fade_T * (1 - w_T)).exp()
    return LossOutputs(-phi_T * inputs.advantages_T * inputs.logprobs_T, None, w_T)


def gmpo_loss(inputs: LossInputs, *, epsilon: float = 0.4) -> LossOutputs:
    """GMPO (arXiv 2507.20673, eq. 4): -A times the geometric mean of a completion's clipped token ratios, given to each of its tokens.

    Log-ratios are clipped at ``epsilon`` nats, pessimistically by the sign of A, before their mean is taken; the gradient runs into all
    tokens that the clip leaves free. With ``aggregation: sequence_mean`` every completion counts once. A mean above
    ``MAX_LOG_RATIO`` is cut, and has no gradient.
    """
    sign_T = torch.where(inputs.advantages_T > 0, 1.0, -1.0).to(inputs.logprobs_T.dtype)
    signed_T = sign_T * (inputs.logprobs_T - inputs.old_logprobs_T)
    held_T = torch.minimum(signed_T, signed_T.clamp(-epsilon, epsilon))
    mean_N = segment_mean(sign_T * held_T, inputs.sequence_T, inputs.completions).clamp(max=MAX_LOG_RATIO)
    ratio_T = mean_N.exp()[inputs.sequence_T]
    return LossOutputs(-ratio_T * inputs.advantages_T, held_T < signed_T, ratio_T)


def dppo_loss(inputs: LossInputs, *, divergence: str = "tv", threshold: float | None = None) -> LossOutputs:
    """DPPO (arXiv 2602.04879): -r A, left out where the policy has left its trust region and the step would lead further away.

    The region is measured on the sampled token against everything else: total variation |pi - pi_old| (``tv``), or the KL of the two
    Bernoulli distributions (``kl``), at most ``threshold`` (by default 0.15 and 0.05). PPO's bounds of the ratio cut unlikely tokens too
    early and likely ones too late.
    """
    ratio_T = _ratio(inputs, "token")
    p_T, q_T = inputs.old_logprobs_T.exp(), inputs.logprobs_T.detach().exp()
    if divergence == "tv":
        away_T = (q_T - p_T).abs()
    else:
        p_T, q_T = (x.clamp(1e-8, 1 - 1e-6) for x in (p_T, q_T))
        away_T = p_T * (p_T.log() - q_T.log()) + (1 - p_T) * ((-p_T).log1p() - (-q_T).log1p())
    limit = {"tv": 0.15, "kl": 0.05}[divergence] if threshold is None else threshold
    outwards_T = (ratio_T.detach() - 1) * inputs.advantages_T > 0
    left_out_T = outwards_T & (away_T > limit)
    loss_T = -ratio_T * inputs.advantages_T
    return LossOutputs(loss_T.masked_fill(left_out_T, 0.0), left_out_T, ratio_T)


def topr_loss(inputs: LossInputs) -> LossOutputs:
    """TOPR (arXiv 2503.14286): -sg[c] A log pi, c = 1 for A >= 0, else w cut to 0 to 1; w is the completion's whole ratio.

    A bad completion fades as the policy leaves it, so that its loss is bounded; a good one is learnt however unlikely it has become.
    """
    w_T = product_ratio(inputs.logprobs_T, inputs.old_logprobs_T, inputs.sequence_T, inputs.completions)
    bad_T = inputs.advantages_T < 0
    weight_T = torch.where(bad_T, w_T.clamp(max=1), torch.ones_like(w_T))
    return LossOutputs(-weight_T * inputs.advantages_T * inputs.logprobs_T, bad_T & (w_T > 1), w_T)


LOSSES: dict[str, Loss] = {
    "clip": clip_loss,
    "cispo": cispo_loss,
    "reinforce": reinforce_loss,
    "sapo": sapo_loss,
    "vespo": vespo_loss,
    "gmpo": gmpo_loss,
    "dppo": dppo_loss,
    "topr": topr_loss,
}
"""By ``algorithm.loss.type``; ``groupwise.algorithm.register_loss`` adds to it."""
