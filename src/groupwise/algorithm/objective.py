"""The loss of one micro-batch: ratio -> surrogate (+ beta x KL) -> weighted sum, with the numbers worth watching.

Axes: N completions in the micro-batch (whole ones), T their sampled tokens, flattened and ragged: there is no padding.
``sequence_T`` (long, non-decreasing) gives the completion 0..N-1 of each token.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from groupwise.algorithm.advantages import Rewards, group_advantages, token_advantages
from groupwise.algorithm.aggregate import BatchCounts, token_weights
from groupwise.algorithm.correction import off_policy_mask
from groupwise.algorithm.kl import k3, kl_per_token
from groupwise.algorithm.process import Steps, process_advantages
from groupwise.algorithm.ratio import IMPORTANCE, RATIOS
from groupwise.algorithm.sequences import at_least_fp32, segment_mean
from groupwise.algorithm.surrogate import SURROGATES, ClipBounds, Surrogate, sapo, vespo
from groupwise.algorithm.values import PerToken, value_advantages
from groupwise.config.advantage import AdvantageSection, GaeAdvantage, GroupAdvantage
from groupwise.config.algorithm import AlgorithmConfig, KLConfig
from groupwise.config.loss import CispoLoss, ClipLoss, LossSection, ReinforceLoss, SapoLoss, VespoLoss
from groupwise.metrics import Max, Mean, Metric, Min, Sum

__all__ = ["Objective", "policy_loss"]


@dataclass(frozen=True, slots=True)
class Objective:
    """The choices that make up one method of the GRPO family; see ``AlgorithmConfig`` for what each does."""

    baseline: str = "group_mean"
    scale: str = "group_std"
    advantage_epsilon: float = 1e-4
    ratio_level: str = "token"
    surrogate: str | Surrogate = "clip"
    bounds: ClipBounds = ClipBounds(0.2, 0.2)  # noqa: RUF009 (frozen)
    aggregation: str = "sequence_mean"
    kl_estimator: str = "k3"
    kl_placement: str = "loss"
    beta: float = 0.04
    kl_correction: bool = False
    gamma: float = 1.0
    gae_lambda: float = 0.95
    value_clip: float | None = None
    off_policy_limit: float | None = None
    """See ``correction.off_policy_mask``; None: nothing is left out."""

    @classmethod
    def from_config(cls, config: AlgorithmConfig) -> Objective:
        kl = config.kl or KLConfig()
        return cls(
            **_advantage_choices(config.advantage),
            **_loss_choices(config.loss),
            aggregation=config.loss.aggregation,
            kl_estimator=kl.estimator,
            kl_placement=kl.placement,
            beta=config.beta,
            kl_correction=kl.importance_weighted,
            value_clip=None if config.value is None else config.value.clip,
        )

    @property
    def needs_reference(self) -> bool:
        """False at beta 0: no reference model is loaded or run."""
        return self.beta > 0

    @property
    def needs_values(self) -> bool:
        """True where a learned value is the baseline: the trainer passes its values to ``value_advantages``."""
        return self.baseline == "value"

    @property
    def kl_in_loss(self) -> bool:
        return self.kl_placement == "loss"

    @property
    def kl_in_reward(self) -> bool:
        """The trainer takes ``kl.kl_in_reward`` off each completion's reward before ``advantages``."""
        return self.needs_reference and self.kl_placement == "reward"

    @property
    def kl_in_token_reward(self) -> bool:
        """The trainer passes ``kl.kl_penalty`` to ``token_advantages`` and the result as ``advantages_T`` to ``policy_loss``."""
        return self.needs_reference and self.kl_placement == "token_reward"

    def advantages(self, rewards: Rewards) -> list[list[float]]:
        """``group_advantages`` with this objective's choices: whole groups of the whole batch, before any filtering."""
        assert not self.needs_values, "a learned value's advantages come from value_advantages"
        return group_advantages(rewards, self.baseline, self.scale, self.advantage_epsilon)

    def process_advantages(self, steps: Steps, lengths: list[list[int]]) -> list[list[list[float]]]:
        """``process.process_advantages`` with this objective's choices."""
        assert not self.needs_values, "under a learned value the steps' rewards are rewards of tokens"
        return process_advantages(steps, lengths, self.baseline, self.scale, self.advantage_epsilon)

    def token_advantages(self, rewards: Rewards, penalties: list[list[list[float]]]) -> list[list[list[float]]]:
        """``advantages.token_advantages`` with this objective's choices."""
        return token_advantages(rewards, penalties, self.baseline, self.scale, self.advantage_epsilon)

    def value_advantages(
        self, rewards: Rewards, values: PerToken, penalties: PerToken | None = None
    ) -> tuple[list[list[list[float]]], list[list[list[float]]]]:
        """``values.value_advantages`` with this objective's choices: every token's advantage, and its return, the value's target."""
        return value_advantages(
            rewards,
            values,
            penalties,
            gamma=self.gamma,
            lam=self.gae_lambda,
            scale=self.scale,
            epsilon=self.advantage_epsilon,
        )

    def weights(self, lengths_N: Tensor, sequence_T: Tensor, counts: BatchCounts, dtype: torch.dtype = torch.float32) -> Tensor:
        """``token_weights`` with this objective's aggregation."""
        return token_weights(lengths_N, sequence_T, self.aggregation, counts, dtype)

    def value_weights(self, lengths_N: Tensor, sequence_T: Tensor, counts: BatchCounts) -> Tensor:
        """Weights of the value's loss: the mean over all tokens of the batch, whichever way the policy's loss is aggregated."""
        return token_weights(lengths_N, sequence_T, "token_mean", counts)


def _advantage_choices(advantage: AdvantageSection) -> dict[str, Any]:
    if isinstance(advantage, GroupAdvantage):
        return {"baseline": advantage.baseline, "scale": advantage.scale, "advantage_epsilon": advantage.epsilon}
    if isinstance(advantage, GaeAdvantage):
        scale = "batch_std" if advantage.whiten else "none"
        learned = {"gamma": advantage.gamma, "gae_lambda": advantage.lam}
        return {"baseline": "value", "scale": scale, "advantage_epsilon": advantage.epsilon, **learned}
    raise NotImplementedError(f"algorithm.advantage.type={advantage.type}")


def _loss_choices(loss: LossSection) -> dict[str, Any]:
    if isinstance(loss, ClipLoss | CispoLoss):
        bounds = ClipBounds(loss.epsilon, loss.high, loss.dual_clip if isinstance(loss, ClipLoss) else None)
        return {"surrogate": loss.type, "ratio_level": loss.ratio, "bounds": bounds}
    if isinstance(loss, ReinforceLoss):
        return {"surrogate": "reinforce"}
    if isinstance(loss, SapoLoss):
        return {"surrogate": partial(sapo, positive=loss.tau_positive, negative=loss.tau_negative)}
    if isinstance(loss, VespoLoss):
        by_sign = {"positive": (loss.k_positive, loss.lambda_positive), "negative": (loss.k_negative, loss.lambda_negative)}
        return {"surrogate": partial(vespo, **by_sign), "ratio_level": "product"}
    raise NotImplementedError(f"algorithm.loss.type={loss.type}")


def policy_loss(
    objective: Objective,
    *,
    logprobs_T: Tensor,
    sequence_T: Tensor,
    weights_T: Tensor,
    old_logprobs_T: Tensor | None = None,
    advantages_N: Tensor | None = None,
    advantages_T: Tensor | None = None,
    reference_logprobs_T: Tensor | None = None,
    factor_T: Tensor | None = None,
    beta: float | None = None,
) -> tuple[Tensor, dict[str, Metric]]:
    """sum_t w_t (surrogate_t + beta KL_t) over a micro-batch, ready for ``backward``, and its metrics.

    The sum of this over all micro-batches is the batch's loss; with weights from ``token_weights`` nothing is divided again.
    With the default objective it is GRPO's, arXiv 2402.03300 eq. 3 and 4, with the sign turned.

    ``old_logprobs_T``: of the policy that sampled; ``None`` means that the batch is on-policy (the ratio is then exactly 1).
    Exactly one of ``advantages_N`` (one per completion) and ``advantages_T`` (one per token) is given. ``reference_logprobs_T``
    is needed only where the KL is in the loss and ``beta`` (by default the objective's) is above 0; given anyway, it is logged.
    ``factor_T`` multiplies the surrogate, not the KL: ``correction.sampler_correction``, or a mask of tokens.
    Half-precision inputs are computed in fp32. The gradient flows into ``logprobs_T`` alone. Raises ``ValueError`` for a
    missing reference.
    """
    beta = objective.beta if beta is None else beta
    kl_weight = beta if objective.kl_in_loss else 0.0
    if kl_weight and reference_logprobs_T is None:
        raise ValueError(
            f"beta is {beta} and the KL is in the loss, but there are no reference logprobs; pass them, or set beta 0"
        )
    assert (advantages_N is None) != (advantages_T is None), "pass advantages_N or advantages_T"
    completions = len(advantages_N) if advantages_N is not None else int(sequence_T[-1]) + 1 if len(sequence_T) else 0
    logprobs_T = at_least_fp32(logprobs_T)
    old_T = (logprobs_T if old_logprobs_T is None else old_logprobs_T).detach().to(logprobs_T.dtype)
    spread = advantages_T if advantages_T is not None else advantages_N[sequence_T]  # type: ignore[index]
    advantages_T = spread.detach().to(logprobs_T.dtype)
    weights_T = weights_T.detach().to(logprobs_T.dtype)
    assert logprobs_T.shape == old_T.shape == advantages_T.shape == weights_T.shape == sequence_T.shape, "one value per token"

    ratio_T = RATIOS[objective.ratio_level](logprobs_T, old_T, sequence_T, completions)
    surrogate = SURROGATES[objective.surrogate] if isinstance(objective.surrogate, str) else objective.surrogate
    surrogate_T, clipped_T = surrogate(ratio_T, advantages_T, logprobs_T, objective.bounds)
    if objective.off_policy_limit is not None:
        kept_T = off_policy_mask(logprobs_T, old_T, advantages_T, sequence_T, completions, objective.off_policy_limit)
        surrogate_T = surrogate_T * kept_T.to(surrogate_T.dtype)
    if factor_T is not None:
        surrogate_T = surrogate_T * factor_T.detach().to(surrogate_T.dtype)
    loss = policy = (weights_T * surrogate_T).sum()
    more: dict[str, Metric] = {}
    if kl_weight:
        assert reference_logprobs_T is not None
        kl_T = kl_per_token(logprobs_T, reference_logprobs_T, objective.kl_estimator)
        if objective.kl_correction:
            kl_T = kl_T * IMPORTANCE[objective.ratio_level](logprobs_T, old_T, sequence_T, completions)
            more["kl_corrected"] = Mean(float(kl_T.detach().sum()), len(kl_T))
        loss = policy + kl_weight * (weights_T * kl_T).sum()
    metrics = _metrics(loss, policy, logprobs_T, old_T, reference_logprobs_T, ratio_T, clipped_T)
    return loss, metrics | more | _clipped_by_completion(clipped_T, ratio_T, sequence_T, completions)


@torch.no_grad()
def _clipped_by_completion(clipped_T: Tensor, ratio_T: Tensor, sequence_T: Tensor, completions: int) -> dict[str, Metric]:
    """The completion with the smallest share of tokens clipped from below, and the one with the largest clipped from above."""
    if not completions:
        return {}
    low_N = segment_mean((clipped_T & (ratio_T < 1)).to(ratio_T.dtype), sequence_T, completions)
    high_N = segment_mean((clipped_T & (ratio_T >= 1)).to(ratio_T.dtype), sequence_T, completions)
    least, most = torch.stack([low_N.min(), high_N.max()]).tolist()
    return {"clip_low_least": Min(least), "clip_high_most": Max(most)}


@torch.no_grad()
def _metrics(
    loss: Tensor,
    policy: Tensor,
    logprobs_T: Tensor,
    old_T: Tensor,
    reference_logprobs_T: Tensor | None,
    ratio_T: Tensor,
    clipped_T: Tensor,
) -> dict[str, Metric]:
    """Everything is stacked and read back at once, so that a GPU is waited for only here. k3 is used for both KLs: for old ->
    new it is E_old[r - 1 - log r], an estimate of KL(old || new)."""
    tokens = logprobs_T.numel()
    sums = {
        "logprob": logprobs_T.sum(),
        "ratio": ratio_T.sum(),
        "clip_low": (clipped_T & (ratio_T < 1)).sum(),
        "clip_high": (clipped_T & (ratio_T >= 1)).sum(),
        "kl_old": k3(old_T, logprobs_T).sum(),
    }
    if reference_logprobs_T is not None:
        sums["kl"] = kl_per_token(logprobs_T, reference_logprobs_T, "k3").sum()
    deviation = (ratio_T - 1).abs().max() if tokens else ratio_T.new_zeros(())
    read = torch.stack([x.to(logprobs_T.dtype) for x in (loss, policy, deviation, *sums.values())]).tolist()
    metrics: dict[str, Metric] = {"loss": Sum(read[0]), "loss_policy": Sum(read[1]), "loss_kl": Sum(read[0] - read[1])}
    metrics["ratio_deviation_max"] = Max(read[2])
    metrics |= {name: Mean(total, tokens) for name, total in zip(sums, read[3:], strict=True)}
    return metrics
