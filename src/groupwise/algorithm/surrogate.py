"""What is maximised in place of the expected reward, token by token. Each function returns a loss (the negative objective).

r is the ratio to the old policy, A the advantage. ``clipped_T`` marks tokens on which the clip acts: for ``clip`` they have no
gradient, for ``cispo`` their weight is cut.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["ClipBounds", "Surrogate", "cispo", "clip", "dual_clip", "reinforce", "sapo", "two_sided", "vespo"]


@dataclass(frozen=True, slots=True)
class ClipBounds:
    """r stays useful between ``1 - low`` and ``1 + high``; ``dual`` or ``delta`` caps the loss of negative advantages."""

    low: float
    high: float
    dual: float | None = None
    delta: float | None = None


def clip(ratio_T: Tensor, advantages_T: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, 1 - low, 1 + high) A): PPO (arXiv 1707.06347, eq. 7); low != high is DAPO's clip-higher (2503.14476).

    Pessimistic: only the side that would move r further away is cut, so r may always come back.
    """
    free_T = ratio_T * advantages_T
    held_T = ratio_T.clamp(1 - low, 1 + high) * advantages_T
    return -torch.minimum(free_T, held_T), held_T < free_T


def dual_clip(ratio_T: Tensor, advantages_T: Tensor, low: float, high: float, c: float) -> tuple[Tensor, Tensor]:
    """For A < 0, -max(min(r A, clip(r) A), c A) with c > 1: Ye et al. 2020 (arXiv 1912.09729, eq. 5).

    Without it the loss of a bad token grows without limit as the token becomes likelier.
    """
    loss_T, clipped_T = clip(ratio_T, advantages_T, low, high)
    ceiling_T = -c * advantages_T
    capped_T = (advantages_T < 0) & (loss_T > ceiling_T)
    return torch.where(capped_T, ceiling_T, loss_T), clipped_T | capped_T


def two_sided(ratio_T: Tensor, advantages_T: Tensor, low: float, high: float, delta: float) -> tuple[Tensor, Tensor]:
    """-min(min(r, delta) A, clip(r) A): INTELLECT-2 (arXiv 2505.07291, section 3.4).

    For delta > 1 + high, the only use, it equals ``dual_clip`` with c = delta.
    """
    loss_T, clipped_T = clip(ratio_T.clamp(max=delta), advantages_T, low, high)
    return loss_T, clipped_T | ((advantages_T < 0) & (ratio_T > delta))


def cispo(ratio_T: Tensor, advantages_T: Tensor, logprobs_T: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """-sg[clip(r, 1 - low, 1 + high)] A log pi: MiniMax-M1 (arXiv 2506.13585, eq. 4 and 5). Every token keeps a gradient."""
    weight_T = ratio_T.detach().clamp(1 - low, 1 + high)
    return -weight_T * advantages_T * logprobs_T, weight_T != ratio_T.detach()


def reinforce(advantages_T: Tensor, logprobs_T: Tensor) -> tuple[Tensor, Tensor]:
    """-A log pi: Williams 1992. Nothing corrects for staleness, and nothing is clipped."""
    return -advantages_T * logprobs_T, torch.zeros_like(logprobs_T, dtype=torch.bool)


def sapo(
    ratio_T: Tensor, advantages_T: Tensor, logprobs_T: Tensor, bounds: object = None, *, positive: float, negative: float
) -> tuple[Tensor, Tensor]:
    """-(4 / tau) sigmoid(tau (r - 1)) A, with tau ``positive`` for A > 0 and ``negative`` otherwise: SAPO (arXiv 2511.20347).

    A gate in place of the clip: its slope is 1 at r = 1 and fades on both sides, faster with a larger tau. Nothing counts as clipped.
    """
    tau_T = _by_sign(advantages_T > 0, positive, negative, ratio_T)
    return -torch.sigmoid(tau_T * (ratio_T - 1)) * (4 / tau_T) * advantages_T, torch.zeros_like(ratio_T, dtype=torch.bool)


def vespo(
    ratio_T: Tensor, advantages_T: Tensor, logprobs_T: Tensor, bounds: object = None, *,
    positive: tuple[float, float], negative: tuple[float, float],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """-sg[phi(w)] A log pi with phi(w) = w^k exp(lambda (1 - w)): VESPO (arXiv 2602.10693); w is ``ratio_T``, the completion's whole ratio.

    (k, lambda) is ``positive`` for A >= 0, else ``negative``. phi is 1 at w = 1, and 0 for what has become very likely or very unlikely.
    """
    power_T, fade_T = (_by_sign(advantages_T >= 0, p, n, ratio_T) for p, n in zip(positive, negative, strict=True))
    fade_T = fade_T.clamp(min=1e-4)
    w_T = ratio_T.detach()
    phi_T = (power_T * w_T.log() + fade_T * (1 - w_T)).exp()
    return -phi_T * advantages_T * logprobs_T, torch.zeros_like(ratio_T, dtype=torch.bool)


def _by_sign(good_T: Tensor, positive: float, negative: float, like: Tensor) -> Tensor:
    return torch.where(good_T, like.new_tensor(positive), like.new_tensor(negative))


def _clip_family(ratio_T: Tensor, advantages_T: Tensor, logprobs_T: Tensor, bounds: ClipBounds) -> tuple[Tensor, Tensor]:
    if bounds.dual is not None:
        return dual_clip(ratio_T, advantages_T, bounds.low, bounds.high, bounds.dual)
    if bounds.delta is not None:
        return two_sided(ratio_T, advantages_T, bounds.low, bounds.high, bounds.delta)
    return clip(ratio_T, advantages_T, bounds.low, bounds.high)


def _cispo(ratio_T: Tensor, advantages_T: Tensor, logprobs_T: Tensor, bounds: ClipBounds) -> tuple[Tensor, Tensor]:
    return cispo(ratio_T, advantages_T, logprobs_T, bounds.low, bounds.high)


def _reinforce(ratio_T: Tensor, advantages_T: Tensor, logprobs_T: Tensor, bounds: ClipBounds) -> tuple[Tensor, Tensor]:
    return reinforce(advantages_T, logprobs_T)


Surrogate = Callable[[Tensor, Tensor, Tensor, ClipBounds], tuple[Tensor, Tensor]]
"""Of ratios, advantages, log-probabilities and bounds; the loss of each token, and whether the clip acts on it."""

SURROGATES: dict[str, Surrogate] = {
    "clip": _clip_family,
    "cispo": _cispo,
    "reinforce": _reinforce,
}
