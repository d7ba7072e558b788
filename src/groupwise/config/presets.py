"""The published methods as rows of one table: which choices each makes, and where it was published. Data only, no torch.

A preset is nothing but values for the sections of ``AlgorithmConfig``. Fields that a row does not name keep their own default, and
keys that a user sets win over the row. What a method does outside the objective (DAPO's dynamic sampling, for example) is in ``beyond``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PRESETS", "Preset"]


@dataclass(frozen=True, slots=True)
class Preset:
    """One published method as values of ``AlgorithmConfig``."""

    title: str
    paper: str
    """arXiv identifier."""
    summary: str
    """What is particular about it, in one sentence."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """Section of ``AlgorithmConfig`` -> its values, or None where the method has no such section."""
    beyond: str = ""
    """Parts of the published recipe that are not in the objective, or where we differ from it on purpose."""

    @property
    def settings(self) -> dict[str, Any]:
        """The same values by their paths within ``algorithm``: ``loss.epsilon``."""
        flat: dict[str, Any] = {}
        for section, values in self.values.items():
            flat |= {section: None} if values is None else {f"{section}.{name}": value for name, value in values.items()}
        return flat


PRESETS: Mapping[str, Preset] = {
    "grpo": Preset(
        title="GRPO",
        paper="2402.03300",
        summary="Group mean and standard deviation as the baseline and scale, clipped token ratio, k3 KL in the loss.",
        values={
            "advantage": {"type": "group", "baseline": "group_mean", "scale": "group_std"},
            "loss": {"type": "clip", "ratio": "token", "epsilon": 0.2, "aggregation": "sequence_mean"},
            "kl": {"beta": 0.04, "estimator": "k3", "placement": "loss"},
        },
    ),
    "dr_grpo": Preset(
        title="Dr. GRPO",
        paper="2503.20783",
        summary="GRPO without its two biases: no division by the group's standard deviation, none by a completion's length.",
        values={
            "advantage": {"type": "group", "baseline": "group_mean", "scale": "none"},
            "loss": {"type": "clip", "aggregation": "fixed"},
            "kl": None,
        },
        beyond="The fixed denominator is completions x rollout.max_completion_tokens.",
    ),
    "dapo": Preset(
        title="DAPO",
        paper="2503.14476",
        summary="A higher upper clip bound leaves unlikely tokens room to grow, and every token of the batch weighs the same.",
        values={
            "advantage": {"type": "group", "baseline": "group_mean", "scale": "group_std"},
            "loss": {"type": "clip", "epsilon": 0.2, "epsilon_high": 0.28, "aggregation": "token_mean"},
            "kl": None,
        },
        beyond=(
            "Dynamic sampling is rollout.refill_rounds, and the soft overlong punishment the reward function overlong. The paper "
            "writes the token mean per prompt; here it is over the whole batch, so that a token weighs the same whichever prompt it "
            "answers."
        ),
    ),
    "gspo": Preset(
        title="GSPO",
        paper="2507.18071",
        summary="The ratio, and so the clipping, belongs to a whole completion: the geometric mean of its token ratios.",
        values={
            "advantage": {"type": "group", "baseline": "group_mean", "scale": "group_std"},
            "loss": {"type": "clip", "ratio": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4, "aggregation": "sequence_mean"},
            "kl": None,
        },
    ),
    "cispo": Preset(
        title="CISPO",
        paper="2506.13585",
        summary="Clips the importance weight, not the update: every token keeps a gradient.",
        values={
            "advantage": {"type": "group", "baseline": "group_mean", "scale": "group_std"},
            "loss": {"type": "cispo", "epsilon": 1.0, "epsilon_high": 4.0, "aggregation": "token_mean"},
            "kl": None,
        },
        beyond=(
            "The paper has no lower bound (hence epsilon = 1) and does not print its upper one; weights are cut at 5 here, "
            "as in ScaleRL (arXiv 2510.13786)."
        ),
    ),
    "rloo": Preset(
        title="RLOO",
        paper="2402.14740",
        summary="Plain REINFORCE on whole completions, each judged against the mean of the others; KL as part of the reward.",
        values={
            "advantage": {"type": "group", "baseline": "leave_one_out", "scale": "none"},
            "loss": {"type": "reinforce", "aggregation": "sequence_sum"},
            "kl": {"beta": 0.03, "estimator": "k1", "placement": "reward"},
        },
        beyond="On-policy by derivation: keep algorithm.updates_per_batch at 1, since nothing here corrects for staleness.",
    ),
    "reinforce++": Preset(
        title="REINFORCE++",
        paper="2501.03262",
        summary="No groups needed: the advantage is the reward less the KL still to come, normalised over the whole batch.",
        values={
            "advantage": {"type": "group", "baseline": "batch_mean", "scale": "batch_std"},
            "loss": {"type": "clip", "epsilon": 0.2, "aggregation": "token_mean"},
            "kl": {"beta": 0.01, "estimator": "k1", "placement": "token_reward"},
        },
        beyond=(
            "The paper's variant with a baseline is advantage: {baseline: group_mean, scale: centred_std} with "
            "kl: {placement: loss, estimator: k2}."
        ),
    ),
    "bnpo": Preset(
        title="BNPO (as in TRL)",
        paper="2402.03300",
        summary="GRPO with every token of the batch weighing the same: what TRL calls loss_type bnpo.",
        values={
            "advantage": {"type": "group", "baseline": "group_mean", "scale": "group_std"},
            "loss": {"type": "clip", "epsilon": 0.2, "aggregation": "token_mean"},
            "kl": None,
        },
        beyond=(
            "TRL divides by the tokens of each process's micro-batch, so its result depends on how the batch is cut; here it is "
            "the whole batch, always. Not the Beta-normalised method of arXiv 2506.02864, which shares the letters."
        ),
    ),
    "ppo": Preset(
        title="PPO",
        paper="1707.06347",
        summary="A learned value judges every token; advantages by GAE; the KL is each token's own (negative) reward.",
        values={
            "advantage": {"type": "gae", "gamma": 1.0, "lam": 0.95, "whiten": True},
            "loss": {"type": "clip", "ratio": "token", "epsilon": 0.2, "aggregation": "token_mean"},
            "kl": {"beta": 0.02, "estimator": "k1", "placement": "token_reward"},
            "value": {"clip": 0.2, "loss_weight": 0.1},
        },
        beyond=(
            "KL in the reward, gamma, lambda and the value's weight follow its use on language models (arXiv 1909.08593, 2203.02155). "
            "Several updates per batch are usual: set algorithm.updates_per_batch to 4 for that."
        ),
    ),
    "sapo": Preset(
        title="SAPO",
        paper="2511.20347",
        summary="A sigmoid gate in place of the clip: an update fades as its token's ratio leaves 1, and never stops all at once.",
        values={
            "advantage": {"type": "group", "baseline": "group_mean", "scale": "group_std"},
            "loss": {"type": "sapo", "tau_positive": 1.0, "tau_negative": 1.05, "aggregation": "sequence_mean"},
            "kl": None,
        },
    ),
    "vespo": Preset(
        title="VESPO",
        paper="2602.10693",
        summary="A smooth weight of the whole completion's ratio, 1 where the policy has not moved and 0 far away on either side.",
        values={
            "advantage": {"type": "group", "baseline": "group_mean", "scale": "group_std"},
            "loss": {
                "type": "vespo",
                "k_positive": 2.0,
                "lambda_positive": 3.0,
                "k_negative": 3.0,
                "lambda_negative": 2.0,
                "aggregation": "token_mean",
            },
            "kl": None,
        },
    ),
    "gmpo": Preset(
        title="GMPO",
        paper="2507.20673",
        summary="The geometric mean of a completion's clipped token ratios: one outlier cannot dominate a completion.",
        values={
            "advantage": {"type": "group", "baseline": "group_mean", "scale": "group_std"},
            "loss": {"type": "gmpo", "epsilon": 0.4, "aggregation": "sequence_mean"},
            "kl": None,
        },
    ),
    "dppo": Preset(
        title="DPPO",
        paper="2602.04879",
        summary="Leaves out a token by how far its probability has moved, not by its ratio, which cuts unlikely tokens too early.",
        values={
            "advantage": {"type": "group", "baseline": "group_mean", "scale": "group_std"},
            "loss": {"type": "dppo", "divergence": "tv", "aggregation": "token_mean"},
            "kl": None,
        },
        beyond="The paper measures from the policy that sampled; here it is the one before the batch's first update, as everywhere.",
    ),
    "maxrl": Preset(
        title="MaxRL",
        paper="2602.02710",
        summary="Divides by the group's mean reward: a problem that is rarely solved weighs more, as in maximum likelihood.",
        values={
            "advantage": {"type": "maxrl", "epsilon": 1e-4},
            "loss": {"type": "clip", "epsilon": 0.2, "aggregation": "token_mean"},
            "kl": None,
        },
        beyond="For rewards from 0 to 1. The paper's gradient is on-policy; the clip acts only with updates_per_batch above 1.",
    ),
    "gdpo": Preset(
        title="GDPO",
        paper="2601.05242",
        summary="Normalises each reward function by itself before they are added, so that one of small variance counts too.",
        values={
            "advantage": {"type": "gdpo", "epsilon": 1e-4},
            "loss": {"type": "clip", "epsilon": 0.2, "aggregation": "token_mean"},
            "kl": None,
        },
    ),
    "topr": Preset(
        title="TOPR",
        paper="2503.14286",
        summary=(
            "Good completions are learnt as they are, bad ones weighted by how likely they still are: stale samples change the policy "
            "little."
        ),
        values={
            "advantage": {"type": "group", "baseline": "group_mean", "scale": "none"},
            "loss": {"type": "topr", "aggregation": "sequence_sum"},
            "kl": None,
        },
        beyond="The paper's rewards are 1 and -1 with a constant baseline; the group's mean gives rewards of 0 and 1 both signs.",
    ),
    "lite_ppo": Preset(
        title="Lite PPO",
        paper="2508.08221",
        summary=(
            "PPO without a critic and with two choices alone: the batch's standard deviation as the scale, and equal weights of all tokens."
        ),
        values={
            "advantage": {"type": "group", "baseline": "group_mean", "scale": "batch_std"},
            "loss": {"type": "clip", "epsilon": 0.2, "aggregation": "token_mean"},
            "kl": None,
        },
    ),
}
