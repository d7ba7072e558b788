"""Rules about settings alone: what can be said before anything is loaded."""

from __future__ import annotations

from groupwise.config import Config
from groupwise.config.notes import unsaved_work
from groupwise.doctor.findings import Evidence

__all__ = [
    "cannot_see_hacking",
    "evaluation_cut_shorter",
    "hardly_any_chance",
    "no_checkpoints",
    "rate_too_high",
    "rate_too_low",
    "truncated_distribution",
]

TYPICAL_WEIGHT = 0.02
"""The usual size of a weight in the models that are trained here; AdamW moves it by about the learning rate in one update."""
BF16_BITS = 8
"""Significant bits of a bfloat16: neighbours are 2^-7 to 2^-8 of the value apart."""


def rate_too_low(config: Config) -> Evidence | None:
    """An update below half the distance to the next bfloat16 is rounded away, every time."""
    rate, smallest = config.optimizer.learning_rate, TYPICAL_WEIGHT * 2.0**-BF16_BITS / 2
    if config.model.dtype not in ("bfloat16", "auto") or config.optimizer.precision != "pure" or rate >= smallest:
        return None
    moving = rate * 2.0 ** (BF16_BITS + 1)
    return Evidence(
        f"optimizer.learning_rate is {rate:g} with optimizer.precision pure: a bfloat16 weight of {TYPICAL_WEIGHT} only moves "
        f"when a single update is larger than about {smallest:.0e}; of the policy's weights only those below about {moving:.0e} move",
        numbers={"learning_rate": rate, "smallest": smallest, "moving": moving},
    )


def rate_too_high(config: Config) -> Evidence | None:
    """A rate as large as a weight replaces the model in one update: nobody means that."""
    rates = {"optimizer.learning_rate": config.optimizer.learning_rate}
    if config.warm_start.steps:
        rates["warm_start.learning_rate"] = config.warm_start.learning_rate
    for name, rate in rates.items():
        if rate >= TYPICAL_WEIGHT:
            return Evidence(
                f"{name} is {rate:g}: an update moves each weight by about as much, and weights are of the size of {TYPICAL_WEIGHT}",
                numbers={"learning_rate": rate},
                severity="critical",
            )
    rate = config.optimizer.learning_rate
    if rate <= 1e-4 or config.model.lora:
        return None
    return Evidence(
        f"optimizer.learning_rate is {rate:g}, and all weights are trained: runs of this kind use 1e-6 to 5e-5",
        numbers={"learning_rate": rate},
    )


def cannot_see_hacking(config: Config) -> Evidence | None:
    data, evaluation = config.data, config.evaluation
    none_held_out = data.holdout == 0 and data.eval_source is None and data.eval_split is None
    if none_held_out:
        return Evidence("no problems are held out: whether a rising reward means anything cannot be told")
    if evaluation.every == 0 and config.training.steps > 300:
        return Evidence(
            f"evaluation.every is 0 in a run of {config.training.steps} steps: a reward that is being gamed shows at the end only",
            numbers={"steps": config.training.steps},
        )
    return None


def evaluation_cut_shorter(config: Config) -> Evidence | None:
    limit, trained = config.evaluation.max_completion_tokens, config.rollout.max_completion_tokens
    if limit is None or limit >= trained:
        return None
    return Evidence(
        f"evaluation.max_completion_tokens is {limit}, but the policy is trained with {trained}: what it learns to write is cut "
        "when it is judged",
        numbers={"evaluation": limit, "rollout": trained},
    )


def no_checkpoints(config: Config) -> Evidence | None:
    unsaved = unsaved_work(config)
    return Evidence(unsaved, numbers={"steps": config.training.steps}) if unsaved else None


def hardly_any_chance(config: Config) -> Evidence | None:
    """Sampling too cold for a group to differ."""
    temperature = config.rollout.temperature
    if config.rollout.top_k == 1:
        return Evidence(
            "rollout.top_k is 1, always the likeliest token: the completions of a group are all the same, and teach nothing",
            numbers={"top_k": 1},
            severity="critical",
        )
    if temperature >= 0.4:
        return None
    return Evidence(
        f"rollout.temperature is {temperature:g}: completions of a group will nearly all be the same, and teach nothing",
        numbers={"temperature": temperature},
    )


def truncated_distribution(config: Config) -> Evidence | None:
    rollout = config.rollout
    cut = [f"rollout.top_p is {rollout.top_p:g}"] if rollout.top_p < 1 else []
    cut += [f"rollout.top_k is {rollout.top_k}"] if rollout.top_k else []
    if not cut:
        return None
    return Evidence(
        f"{' and '.join(cut)}: completions come from a narrower distribution than the one whose log-probabilities are trained"
    )
