"""What is logged, under TRL's names and with TRL's meaning of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from groupwise.metrics import Max, Mean, Metric
from groupwise.trl.config import GRPOConfig
from groupwise.trl.generation import Generation

__all__ = ["generation_numbers", "sweep_numbers", "whole_loss"]


def generation_numbers(generation: Generation, names: Sequence[str], args: GRPOConfig) -> dict[str, float]:
    """Lengths, rewards and groups of one generation; NaN where a number does not exist."""
    lengths = [len(c.token_ids) for c in generation.sampled]
    ended = [len(c.token_ids) for c in generation.sampled if c.stopped] or [0]
    found = {
        "completions/mean_length": statistics.fmean(lengths),
        "completions/min_length": min(lengths),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": statistics.fmean(not c.stopped for c in generation.sampled),
        "completions/mean_terminated_length": statistics.fmean(ended),
        "completions/min_terminated_length": min(ended),
        "completions/max_terminated_length": max(ended),
    }
    for name, scores in zip(names, generation.scores, strict=True):
        applicable = [s for s in scores if s is not None]
        found[f"rewards/{name}/mean"], found[f"rewards/{name}/std"] = _mean(applicable), _std(applicable)
    rewards = [r for r in generation.rewards if not math.isnan(r)]
    found |= {"reward": _mean(rewards), "reward_std": _std(rewards), "frac_reward_zero_std": _still(generation, args)}
    return {name: float(number) for name, number in found.items()}


def sweep_numbers(found: Mapping[str, Metric], skipped_tokens: int, loss_type: str) -> dict[str, float]:
    """Entropy, KL and clipping of one optimiser step's sweeps, as means over its tokens.

    ``skipped_tokens`` are those of completions without an advantage, which were not computed: none of them is clipped.
    """
    out = {name: metric.value for name, metric in found.items() if name.startswith("loss/")}  # of a loss of the user's
    for ours, theirs in (("policy/entropy", "entropy"), ("policy/kl", "kl"), ("detail/kl_corrected", "kl")):
        if ours in found:
            out[theirs] = found[ours].value
    if loss_type in ("sapo", "vespo"):
        return out  # they clip nothing
    low, high = (found.get(f"detail/clip_{side}", Mean(0.0, 0)) for side in ("low", "high"))
    tokens = max(1, low.count + skipped_tokens)  # type: ignore[union-attr]
    shares = [m.total / tokens for m in (low, high)]  # type: ignore[union-attr]
    if loss_type == "cispo":
        return out | {"cispo_clip_ratio": sum(shares)}  # a bound below 1 holds down ratios below 1 too
    return out | {
        "clip_ratio/low_mean": shares[0],
        "clip_ratio/high_mean": shares[1],
        "clip_ratio/region_mean": sum(shares),
        "clip_ratio/low_min": 0.0 if skipped_tokens else found.get("detail/clip_low_least", Max(0.0)).value,
        "clip_ratio/high_max": found.get("detail/clip_high_most", Max(0.0)).value,
    }


def whole_loss(found: Mapping[str, Metric]) -> float:
    """The policy's loss less the entropy bonus; 0 of nothing."""
    return sum(sign * found[name].value for name, sign in (("policy/loss", 1), ("detail/entropy_bonus", -1)) if name in found)


def _still(generation: Generation, args: GRPOConfig) -> float:
    """Share of completions whose rewards' standard deviation is 0: of their group, or of the batch where that is the scale."""
    if args.scale_rewards == "batch" or args.multi_objective_aggregation == "normalize_then_sum":
        return float(_flat(generation.rewards))
    return statistics.fmean(_flat(group.rewards) for group in generation.groups)


def _flat(rewards: Sequence[float]) -> bool:
    known = [r for r in rewards if not math.isnan(r)]
    return len(known) > 1 and max(known) - min(known) < 1e-8


def _mean(numbers: Sequence[float]) -> float:
    return statistics.fmean(numbers) if numbers else math.nan


def _std(numbers: Sequence[float]) -> float:
    return statistics.stdev(numbers) if len(numbers) > 1 else math.nan
