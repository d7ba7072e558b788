"""An objective in words and in letters: what `groupwise algorithms` and the pages in docs/algorithms show of a preset's settings.

In formulas i is a completion, t one of its |o_i| tokens, N the completions of the batch, pi the policy.
"""

from __future__ import annotations

from groupwise.config.algorithm import AlgorithmConfig

__all__ = ["formula", "in_words"]

_BASELINES = {
    "group_mean": "group mean",
    "leave_one_out": "mean of the others",
    "batch_mean": "batch mean",
    "none": "none",
    "value": "learned value",
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
    return {
        "baseline": _BASELINES[algorithm.baseline],
        "scale": _SCALES[algorithm.scale],
        "ratio": "-" if algorithm.surrogate == "reinforce" else algorithm.ratio_level,
        "surrogate": algorithm.surrogate,
        "clip_range": _clip_range(algorithm),
        "aggregation": algorithm.aggregation,
        "kl": f"{algorithm.beta:g} x {algorithm.kl_estimator} {_PLACES[algorithm.kl_placement]}" if algorithm.beta else "none",
    }


def formula(algorithm: AlgorithmConfig) -> list[str]:
    """The loss that these settings make, one line per step from rewards to the sum over the batch."""
    lines = [*_rewards(algorithm), *_advantages(algorithm), *_ratio(algorithm), f"L_it  = {_surrogate(algorithm)}"]
    if algorithm.beta and algorithm.kl_placement == "loss":
        factor = " w" if algorithm.kl_correction else ""
        lines += [f"L_it += {algorithm.beta:g}{factor} {algorithm.kl_estimator}_it", _estimate(algorithm, "pi")]
    return [*lines, f"loss  = {_BATCH_SUMS[algorithm.aggregation]}", *_value(algorithm)]


def _clip_range(algorithm: AlgorithmConfig) -> str:
    if algorithm.surrogate == "reinforce":
        return "-"
    low, high = algorithm.epsilon, _high(algorithm)
    cap = algorithm.dual_clip or algorithm.delta
    words = f"{low:g}" if low == high else f"{'none' if low >= 1 else f'{low:g}'} down, {high:g} up"
    return f"{words}, at most {cap:g} for A < 0" if cap else words


def _high(algorithm: AlgorithmConfig) -> float:
    return algorithm.epsilon if algorithm.epsilon_high is None else algorithm.epsilon_high


def _estimate(algorithm: AlgorithmConfig, policy: str) -> str:
    return f"{algorithm.kl_estimator}_it = {_ESTIMATES[algorithm.kl_estimator].format(policy=policy)}"


def _rewards(algorithm: AlgorithmConfig) -> list[str]:
    """How the KL enters the reward; r_i (or r_it) without a line of its own is what the reward functions said."""
    if not algorithm.beta or algorithm.kl_placement == "loss":
        return []
    penalty = f"{algorithm.beta:g} {algorithm.kl_estimator}"
    if algorithm.kl_placement == "reward":
        line = f"r_i   = reward_i - sum_t {penalty}_it"
    elif algorithm.baseline == "value":
        line = f"r_it  = -{penalty}_it, plus reward_i at the last token"
    else:
        line = f"r_it  = reward_i - sum_(s >= t) {penalty}_is"
    return [line, _estimate(algorithm, "pi_old")]


def _advantages(algorithm: AlgorithmConfig) -> list[str]:
    per_token = algorithm.beta > 0 and algorithm.kl_placement == "token_reward"
    if algorithm.baseline == "value":
        white = f", whitened: (A - mean) / (std + {algorithm.advantage_epsilon:g}) over all tokens of the batch"
        discount, next_value = f"{algorithm.gamma * algorithm.gae_lambda:g}^(s-t)", "V_i,t+1"
        if algorithm.gamma != 1:
            next_value = f"{algorithm.gamma:g} {next_value}"
        at_end = "" if per_token else ", with r_it = r_i at the last token and 0 before"
        delta = f"delta_it = r_it + {next_value} - V_it, V = 0 after the last token{at_end}"
        return [delta, f"A_it  = sum_(s >= t) {discount} delta_is{white if algorithm.scale == 'batch_std' else ''}"]
    reward, index = ("r_it", "it") if per_token else ("r_i", "i")
    over = "token returns" if per_token else "rewards"
    baseline = {
        "group_mean": "mean(rewards of the group)",
        "leave_one_out": "mean(rewards of the others in the group)",
        "batch_mean": f"mean({over} of the batch)",
        "none": "",
    }[algorithm.baseline]
    difference = f"{reward} - {baseline}" if baseline else reward
    scale = {
        "group_std": "std(rewards of the group)",
        "batch_std": f"std({over} of the batch)",
        "centred_std": "std(the same difference over the batch)",
        "none": "",
    }[algorithm.scale]
    left = f"A_{index}".ljust(5)
    if not scale:
        return [f"{left} = {difference}"]
    return [f"{left} = ({difference}) / ({scale} + {algorithm.advantage_epsilon:g})"]


def _ratio(algorithm: AlgorithmConfig) -> list[str]:
    if algorithm.surrogate == "reinforce":
        return []
    if algorithm.ratio_level == "token":
        return ["w     = pi(o_it) / pi_old(o_it)"]
    return ["w     = (pi(o_i) / pi_old(o_i))^(1/|o_i|), one for the whole completion"]


def _surrogate(algorithm: AlgorithmConfig) -> str:
    if algorithm.surrogate == "reinforce":
        return "-A log pi(o_it)"
    held = f"clip(w, {max(0.0, 1 - algorithm.epsilon):g}, {1 + _high(algorithm):g})"
    if algorithm.surrogate == "cispo":
        return f"-{held} A log pi(o_it), with no gradient through the weight"
    if algorithm.dual_clip is not None:
        return f"-min(w A, {held} A), and at most -{algorithm.dual_clip:g} A where A < 0"
    first = "w A" if algorithm.delta is None else f"min(w, {algorithm.delta:g}) A"
    return f"-min({first}, {held} A)"


def _value(algorithm: AlgorithmConfig) -> list[str]:
    if algorithm.baseline != "value":
        return []
    squares, clip = "(V - R)^2", algorithm.value_clip
    if clip is not None:
        squares = f"max({squares}, (V_old + clip(V - V_old, -{clip:g}, {clip:g}) - R)^2)"
    return [
        f"value = {algorithm.value_loss_weight:g} x mean over tokens of {squares} / 2",
        "R_it  = A_it (before whitening) + V_it",
    ]
