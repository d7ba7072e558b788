"""The settings of the objective. A preset is a row of ``groupwise.config.presets``; fields that are set win over it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from groupwise.config.presets import PRESETS
from groupwise.config.section import Section

__all__ = ["AlgorithmConfig", "PresetName"]

PresetName = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++", "bnpo", "ppo"]


class AlgorithmConfig(Section):
    """The objective, as a product of small choices: baseline x scale x ratio x surrogate x aggregation x KL.

    `preset` picks a published method; a field that is not set takes the preset's value, one that is set wins. Defaults are GRPO
    as in DeepSeekMath (arXiv 2402.03300, eq. 3 and 4).
    """

    preset: PresetName = "grpo"
    """The published method that unset fields follow. `grpo` is the one to start with; the table is in `config/presets.py`."""
    epsilon: float = Field(default=0.2, gt=0)
    """Clip range of the ratio to the old policy: useful from 1 - epsilon to 1 + epsilon. At 1 or more there is no lower bound."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """Its upper side, where that should differ: useful up to 1 + epsilon_high. A little above `epsilon` (0.28) keeps exploration
    alive in long runs. Null takes `epsilon`."""
    beta: float = Field(default=0.04, ge=0)
    """Weight of the KL leash to the reference. 0 keeps no reference at all, which saves its memory and time."""
    skip_zero_variance: bool = True
    """Leave groups whose completions all scored the same out of the passes: their advantages are 0. It is exact at beta 0; above, it
    also spares them the KL pull, which saves their compute. Turn it off for eq. 3 to the letter. They take part where something else
    needs them: a learned value, an entropy bonus that acts, a top-entropy share, a KL in the reward."""
    updates_per_batch: int = Field(default=1, ge=1)
    """mu: optimiser steps on each batch of completions. Above 1 the later ones are off-policy, and clipping begins to act."""
    reference_updates: int = Field(default=1, ge=1)
    """I: outer iterations. The run is divided into this many; at the start of each the reference becomes the current policy."""
    advantage_epsilon: float = Field(default=1e-4, gt=0)
    """Added to the standard deviation before dividing by it, whichever `scale` names."""
    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none", "value"] = "group_mean"
    """What a completion's reward is compared with: its group's mean, the mean of the others in its group (unbiased), the mean of
    the whole batch, nothing, or a learned `value` of every token's state (PPO; `critic` says who learns it)."""
    scale: Literal["group_std", "batch_std", "centred_std", "none"] = "group_std"
    """What the difference is divided by. `group_std` lets an almost solved problem weigh as much as a hard one; `none` keeps the
    reward's own units. In between, and steadier with few completions per prompt, is one standard deviation for the whole batch: of the
    rewards (`batch_std`), or of the differences themselves (`centred_std`, which the spread of difficulty does not enter). With
    `baseline: value`, `batch_std` whitens: the mean of all tokens' advantages is taken off too."""
    ratio_level: Literal["token", "sequence"] = "token"
    """Ratio of new to old probability for each token, or one for a whole completion (GSPO: steadier for mixture-of-experts
    models; it wants an epsilon about a thousand times smaller)."""
    surrogate: Literal["clip", "cispo", "reinforce"] = "clip"
    """`clip`: PPO's pessimistic minimum, no gradient beyond the clip range. `cispo`: clips the weight, so every token keeps a
    gradient. `reinforce`: no ratio at all; only for on-policy batches (`updates_per_batch: 1`)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """With `clip`: for negative advantages the loss stops growing where the ratio passes this (3 is usual). Set it when a few
    tokens that became far likelier dominate the loss."""
    delta: float | None = Field(default=None, gt=1)
    """The same cap in INTELLECT-2's form, min(ratio, delta), for configs that come from there (4 is usual). Set this or
    `dual_clip`, not both; it must exceed 1 + epsilon_high."""
    aggregation: Literal["sequence_mean", "token_mean", "sequence_sum", "fixed"] = "sequence_mean"
    """How token losses become one number. `sequence_mean`: completions weigh the same, so a token of a long one weighs less.
    `token_mean`: all tokens of the batch weigh the same. `fixed`: like it, with a denominator that does not depend on lengths
    (completions x `rollout.max_completion_tokens`). `sequence_sum`: tokens are summed, completions averaged (needs a rate smaller
    by about the length)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the KL to the reference from one sample. In the loss use `k3` (never negative, low variance) or `k2` (the exact
    gradient of the KL on-policy), not `k1`, whose gradient averages to 0; in the reward use `k1` (unbiased)."""
    kl_placement: Literal["loss", "reward", "token_reward"] = "loss"
    """Where `beta` x KL acts: added to the loss; taken off a completion's reward before the baseline; or taken off as each
    token's own reward, so that a token's advantage counts only the KL still to come."""

    kl_correction: bool = False
    """Multiply the KL in the loss by the ratio (DeepSeek-V3.2, arXiv 2512.02556): with `k3`, its gradient is then that of the KL of the
    policy to the reference, also off-policy. `epsilon` does not clip this ratio."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """With `baseline: value`: discount per token. Below 1 a token far from the end hears little of the final reward."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """With `baseline: value`: 1 takes the whole return and uses the value as a baseline only (unbiased, noisier); 0 trusts the value
    of the next token (biased while the value is young)."""
    value_clip: float | None = Field(default=None, gt=0)
    """With `baseline: value`: within one batch the value learns no further than this from where it was, in units of reward. Acts
    only with `updates_per_batch` above 1. Null takes the plain squared error."""
    value_loss_weight: float = Field(default=0.1, gt=0)
    """With `baseline: value`: weight of the value's loss beside the policy's."""
    value_learning_rate: float = Field(default=1e-3, gt=0)
    """With `baseline: value`: learning rate of the value's own head, a single linear layer that starts from nothing."""
    critic: str = Field(default="shared", min_length=1)
    """With `baseline: value`: whose states the value's head reads. `shared`: the policy's own, at next to no cost. `copy`: those of a
    second model that starts as the policy is when GRPO begins and learns only the value; a model folder or Hub name with the same
    tokenizer: another such model. A second model doubles the memory of weights and optimiser, and the time of the passes."""
    critic_learning_rate: float = Field(default=1e-5, gt=0)
    """With a `critic` of its own: learning rate of that model, constant. The head on it learns at `value_learning_rate`."""
    value_trains_trunk: bool = False
    """With `baseline: value`: let the value's error reach the policy's layers too, at the policy's learning rate."""
    mask_truncated: bool = False
    """Leave completions that were cut at the token limit out of the loss and out of its count of tokens (DAPO's overlong filtering):
    a cut says little about the text before it. They still count in the mean of their group or batch, their KL included where it is part
    of the reward; a learned value leaves them out altogether. If most are cut, raise the limit instead."""
    entropy_bonus: float = Field(default=0.0, ge=0)
    """Weight of the entropy of each token's whole distribution, taken off the loss: keeps exploration alive, and too much of it makes
    text random. It acts on all groups, those without variance included. Costs some time in the output head. 0.001 is a start."""
    entropy_floor: float | None = Field(default=None, gt=0)
    """The bonus acts only on batches whose `policy/entropy` is less than this, in nats. Null: on all."""
    top_entropy_share: float = Field(default=1.0, gt=0, le=1)
    """Only this share of the batch's tokens, those of highest entropy, takes part in the policy's loss: the forks of the text, where it
    is decided what comes (arXiv 2506.01939 has 0.2). Costs one more forward pass, and the passes of groups without variance."""
    sampler_correction: Literal["none", "token", "sequence"] = "none"
    """Weigh each token, or completion, by how much likelier the trainer finds it than the sampler did: for samplers whose numbers differ
    (another engine, quantised weights). `policy/sampler_mismatch` says whether there is anything to correct. With `rollout.engine: vllm`
    it is `token` unless it is set."""
    sampler_correction_mode: Literal["truncate", "mask"] = "truncate"
    """Beyond the cap: hold the weight there, or leave the token (the completion) out."""
    sampler_correction_cap: float = Field(default=2.0, ge=1)
    """Largest weight that the correction gives."""
    stale_samples: Literal["decoupled", "behaviour", "uncorrected"] = "decoupled"
    """With `rollout.ahead`, what corrects for samples of older weights. `decoupled`: ratio and clip are against the weights before the
    batch's first update, and each token is weighted by how much likelier those find it than the sampler did, up to
    `sampler_correction_cap` (arXiv 2110.00641, 2505.24298); `sampler_correction: sequence` weighs whole completions instead.
    `behaviour`: ratio and clip are against the sampler's own log-probabilities (plain PPO, as in arXiv 2410.18252). `uncorrected`: as if
    the samples were fresh."""
    kl_target: float | None = Field(default=None, gt=0)
    """Steer `beta` so that the KL per token comes to this (arXiv 1909.08593): it rises while the KL is above and falls while below.
    `beta` is where it starts. 0.05 to 0.1 is a usual band. Null keeps `beta` fixed."""
    kl_gain: float = Field(default=0.1, gt=0)
    """With `kl_target`: share by which `beta` changes a step, for an error of 100%; errors count up to 20%."""
    reference_every: int | None = Field(default=None, ge=1)
    """Renew the reference every so many steps, beside the outer iterations. Null: never."""
    reference_mixing: float = Field(default=1.0, gt=0, le=1)
    """How far a renewal goes: 1 makes the reference the policy, 0.1 moves it a tenth of the way. Small, with `reference_every: 1`, it is
    a moving average of the policy, at the cost of an fp32 copy."""

    @model_validator(mode="after")
    def follow_preset(self) -> AlgorithmConfig:
        """Fields that were not set follow the preset; written past validation, so that they still count as not set."""
        values = PRESETS[self.preset].values
        for name, info in type(self).model_fields.items():
            if name not in self.model_fields_set:
                self.__dict__[name] = values.get(name, info.default)
        return self

    @model_validator(mode="after")
    def check_scale(self) -> AlgorithmConfig:
        """A scale may be 0 only where the difference that it divides is 0 too: otherwise advantages are 1 / advantage_epsilon."""
        own_group = ("group_mean", "leave_one_out")
        if self.scale == "group_std" and self.baseline not in own_group:
            raise ValueError(
                f"algorithm.scale is 'group_std' with baseline '{self.baseline}', but a group whose completions all scored the same "
                "would be divided by about 0; set baseline to 'group_mean' or 'leave_one_out', or scale to 'batch_std' or 'none'"
            )
        if self.scale == "centred_std" and self.baseline == "value":
            raise ValueError("algorithm.scale is 'centred_std' with baseline 'value': use 'batch_std', which does the same there")
        if self.scale in ("batch_std", "centred_std") and self.baseline == "none":
            raise ValueError(
                f"algorithm.scale is '{self.scale}' with baseline 'none', but a batch whose completions all scored the same would be "
                "divided by about 0; set baseline to 'batch_mean', or scale to 'none'"
            )
        if self.scale == "group_std" and self.kl_placement == "token_reward" and self.beta > 0:
            raise ValueError(
                "algorithm.scale is 'group_std' with kl_placement 'token_reward', but in a group whose completions all scored the "
                "same the KL would be divided by about 0; set scale to 'batch_std' or 'none', or kl_placement to 'reward'"
            )
        return self

    @model_validator(mode="after")
    def check_companions(self) -> AlgorithmConfig:
        """Settings that act on something that another setting has switched off."""
        if self.entropy_floor is not None and self.entropy_bonus == 0:
            raise ValueError(
                f"algorithm.entropy_floor is {self.entropy_floor} with entropy_bonus 0, so nothing would lift the entropy; "
                "set entropy_bonus, to 0.001 for a start"
            )
        if self.kl_target is not None and self.beta == 0:
            raise ValueError(
                f"algorithm.kl_target is {self.kl_target} with beta 0, but a coefficient of 0 stays 0; set beta to where it should start"
            )
        if self.reference_mixing < 1 and self.reference_every is None and self.reference_updates == 1:
            raise ValueError(
                f"algorithm.reference_mixing is {self.reference_mixing}, but the reference is never renewed; set reference_every, "
                "to 1 for a moving average"
            )
        return self

    @model_validator(mode="after")
    def check_surrogate(self) -> AlgorithmConfig:
        if self.surrogate == "reinforce" and self.updates_per_batch > 1:
            raise ValueError(
                f"algorithm.updates_per_batch is {self.updates_per_batch} with surrogate 'reinforce', but after the first update the "
                "batch is off-policy and reinforce has no ratio that corrects for it; set surrogate to 'clip', or updates_per_batch to 1"
            )
        cap = "dual_clip" if self.dual_clip is not None else "delta" if self.delta is not None else None
        if cap and self.surrogate != "clip":
            raise ValueError(
                f"algorithm.{cap} is {getattr(self, cap)}, but surrogate is '{self.surrogate}', where it has no effect; "
                f"remove it, or set surrogate to 'clip'"
            )
        if self.dual_clip is not None and self.delta is not None:
            raise ValueError(
                f"algorithm.dual_clip is {self.dual_clip} and delta is {self.delta}, but both cap the same thing; set only one"
            )
        upper = 1 + (self.epsilon if self.epsilon_high is None else self.epsilon_high)
        if cap and getattr(self, cap) <= upper:
            raise ValueError(
                f"algorithm.{cap} is {getattr(self, cap)}, but it must be above the upper clip bound {upper:g}; raise it or "
                "lower epsilon_high"
            )
        return self
