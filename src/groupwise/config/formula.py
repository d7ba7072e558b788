"""An objective in words and in letters: what `groupwise algorithms` and the pages in docs/reference/algorithms show of a preset's settings.

In formulas i is a completion, t one of its |o_i| tokens, N the completions of the batch, pi the policy.
"""

from __future__ import annotations

from groupwise.config.algorithm import AlgorithmConfig, KLConfig
from groupwise.config.objective import RATIOS, GaeAdvantage, GdpoAdvantage, GroupAdvantage, MaxrlAdvantage, OwnAdvantage

__all__ = ["formula", "in_words"]

_BASELINES = {
    "group_mean": "group mean",
    "leave_one_out": "mean of the others",
    "batch_mean": "batch mean",
    "none": "none",
}
_SCALES = {"group_std": "group std", "batch_std": "batch std", "centred_std": "batch std of the differences", "none": "none"}
_PLACES = {"loss": "in the loss", "reward": "in the reward", "token_reward": "in token rewards"}
_ESTIMATES = {
    "k1": "log {policy}(o_it) - log pi_ref(o_it)",
    "k2": "(log {policy}(o_it) - log pi_ref(o_it))^2 / 2",
    "k3": "pi_ref(o_it) / {policy}(o_it) - 1 - log(pi_ref(o_it) / {policy}(o_it))",
}
_BATCH_SUMS = {
    "sequence_mean": "1/N sum_i 1/|o_i| sum_t L_it",
    "token_mean": "sum_i sum_t L_it / sum_i |o_i|",
    "sequence_sum": "1/N sum_i sum_t L_it",
    "fixed": "sum_i sum_t L_it / (N max_completion_tokens)",
}


def in_words(algorithm: AlgorithmConfig) -> dict[str, str]:
    """The choices as the cells of a table's row."""
    baseline, scale = _advantage_words(algorithm)
    kl = algorithm.kl
    return {
        "baseline": baseline,
        "scale": scale,
        "ratio": algorithm.loss.ratio_level,
        "surrogate": algorithm.loss.type,
        "clip_range": algorithm.loss.clip_range,
        "aggregation": algorithm.loss.aggregation,
        "kl": "none" if kl is None else f"{kl.beta:g} x {kl.estimator} {_PLACES[kl.placement]}",
    }


def formula(algorithm: AlgorithmConfig) -> list[str]:
    """The loss that these settings make, one line per step from rewards to the sum over the batch."""
    kl, loss = algorithm.kl, algorithm.loss
    ratio = [] if loss.ratio_formula is None else [f"w     = {loss.ratio_formula}"]
    lines = [*_rewards(algorithm), *_advantages(algorithm), *ratio, f"L_it  = {loss.formula}"]
    if kl is not None and kl.placement == "loss":
        # A loss whose ratio can be chosen lends it to the KL; beside any other the KL has the token's.
        other = kl.importance_weighted and not hasattr(loss, "ratio") and loss.ratio_formula != RATIOS["token"]
        factor = "" if not kl.importance_weighted else " u" if other else " w"
        lines += [f"u     = {RATIOS['token']}"] if other else []
        lines += [f"L_it += {kl.beta:g}{factor} {kl.estimator}_it", _estimate(kl, "pi")]
    return [*lines, f"loss  = {_BATCH_SUMS[loss.aggregation]}", *_value(algorithm)]


def _advantage_words(algorithm: AlgorithmConfig) -> tuple[str, str]:
    """The cells for what a reward is compared with, and what the difference is divided by."""
    advantage = algorithm.advantage
    if isinstance(advantage, GroupAdvantage):
        return _BASELINES[advantage.baseline], _SCALES[advantage.scale]
    if isinstance(advantage, GaeAdvantage):
        return "learned value", "batch std" if advantage.whiten else "none"
    if isinstance(advantage, MaxrlAdvantage):
        return "group mean", "group mean"
    if isinstance(advantage, GdpoAdvantage):
        return "group mean of each function", "group std of each function, batch std"
    return advantage.type, "-"


def _estimate(kl: KLConfig, policy: str) -> str:
    return f"{kl.estimator}_it = {_ESTIMATES[kl.estimator].format(policy=policy)}"


def _rewards(algorithm: AlgorithmConfig) -> list[str]:
    """How the KL enters the reward; r_i (or r_it) without a line of its own is what the reward functions said."""
    kl = algorithm.kl
    if kl is None or kl.placement == "loss":
        return []
    penalty = f"{kl.beta:g} {kl.estimator}"
    if kl.placement == "reward":
        line = f"r_i   = reward_i - sum_t {penalty}_it"
    elif algorithm.needs_values:
        line = f"r_it  = -{penalty}_it, plus reward_i at the last token"
    else:
        line = f"r_it  = reward_i - sum_(s >= t) {penalty}_is"
    return [line, _estimate(kl, "pi_old")]


def _advantages(algorithm: AlgorithmConfig) -> list[str]:
    advantage = algorithm.advantage
    per_token = algorithm.kl is not None and algorithm.kl.placement == "token_reward"
    if isinstance(advantage, GaeAdvantage):
        return _gae(advantage, per_token)
    if isinstance(advantage, MaxrlAdvantage):
        mean = "mean(rewards of the group)"
        return [f"A_i   = (r_i - {mean}) / ({mean} + {advantage.epsilon:g})"]
    if isinstance(advantage, GdpoAdvantage):
        return [
            f"S_i   = sum_k weight_k (r_ik - mean(r_k)) / (std(r_k) + {advantage.epsilon:g}) over the group, k a reward function",
            f"A_i   = (S_i - mean(S of the batch)) / (std(S of the batch) + {advantage.epsilon:g})",
        ]
    if not isinstance(advantage, GroupAdvantage):
        return [f"A     = {advantage.formula if isinstance(advantage, OwnAdvantage) else advantage.type}"]
    reward, index = ("r_it", "it") if per_token else ("r_i", "i")
    over = "token returns" if per_token else "rewards"
    baseline = {
        "group_mean": "mean(rewards of the group)",
        "leave_one_out": "mean(rewards of the others in the group)",
        "batch_mean": f"mean({over} of the batch)",
        "none": "",
    }[advantage.baseline]
    difference = f"{reward} - {baseline}" if baseline else reward
    scale = {
        "group_std": "std(rewards of the group)",
        "batch_std": f"std({over} of the batch)",
        "centred_std": "std(the same difference over the batch)",
        "none": "",
    }[advantage.scale]
    left = f"A_{index}".ljust(5)
    if not scale:
        return [f"{left} = {difference}"]
    return [f"{left} = ({difference}) / ({scale} + {advantage.epsilon:g})"]


def _gae(advantage: GaeAdvantage, per_token: bool) -> list[str]:
    white = f", whitened: (A - mean) / (std + {advantage.epsilon:g}) over all tokens of the batch"
    discount, next_value = f"{advantage.gamma * advantage.lam:g}^(s-t)", "V_i,t+1"
    if advantage.gamma != 1:
        next_value = f"{advantage.gamma:g} {next_value}"
    at_end = "" if per_token else ", with r_it = r_i at the last token and 0 before"
    delta = f"delta_it = r_it + {next_value} - V_it, V = 0 after the last token{at_end}"
    return [delta, f"A_it  = sum_(s >= t) {discount} delta_is{white if advantage.whiten else ''}"]


def _value(algorithm: AlgorithmConfig) -> list[str]:
    value = algorithm.value
    if value is None:
        return []
    squares, clip = "(V - R)^2", value.clip
    if clip is not None:
        squares = f"max({squares}, (V_old + clip(V - V_old, -{clip:g}, {clip:g}) - R)^2)"
    return [
        f"value = {value.loss_weight:g} x mean over tokens of {squares} / 2",
        "R_it  = A_it (before whitening) + V_it",
    ]
