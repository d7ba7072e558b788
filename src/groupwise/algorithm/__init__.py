"""The algorithm as pure arithmetic: advantages x loss x aggregation x KL, and nothing about models.

Axes in names: P problem, G completion in its group, N completions of a micro-batch (flattened), T their sampled tokens,
flattened and ragged: there is no padding anywhere.
"""

from groupwise.algorithm.advantages import (
    Advantage,
    AdvantageInputs,
    AdvantageOutputs,
    FunctionScores,
    StepRewards,
    group_advantages,
    process_advantages,
    to_go,
    token_advantages,
)
from groupwise.algorithm.aggregate import BatchCounts, lengths_of, token_weights
from groupwise.algorithm.correction import sampler_correction
from groupwise.algorithm.kl import AdaptiveKL, kl_in_reward, kl_penalty, kl_per_token
from groupwise.algorithm.losses import Loss, LossInputs, LossOutputs
from groupwise.algorithm.objective import KL, Objective, policy_loss
from groupwise.algorithm.registry import needs, register_advantage, register_loss
from groupwise.algorithm.values import explained_variance, gae, value_advantages, value_loss

__all__ = [
    "KL",
    "AdaptiveKL",
    "Advantage",
    "AdvantageInputs",
    "AdvantageOutputs",
    "BatchCounts",
    "FunctionScores",
    "Loss",
    "LossInputs",
    "LossOutputs",
    "Objective",
    "StepRewards",
    "explained_variance",
    "gae",
    "group_advantages",
    "kl_in_reward",
    "kl_penalty",
    "kl_per_token",
    "lengths_of",
    "needs",
    "policy_loss",
    "process_advantages",
    "register_advantage",
    "register_loss",
    "sampler_correction",
    "to_go",
    "token_advantages",
    "token_weights",
    "value_advantages",
    "value_loss",
]
