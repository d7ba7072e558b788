"""Settings of the policy's loss: one section per type, with exactly the settings that act in it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from groupwise.config.section import OWN, Section, check_own, type_of

__all__ = [
    "Aggregation", "CispoLoss", "ClipLoss", "DppoLoss", "GmpoLoss", "LossConfig", "LossSection", "OwnLoss", "ReinforceLoss", "SapoLoss",
    "VespoLoss",
]  # fmt: skip

Aggregation = Literal["sequence_mean", "token_mean", "sequence_sum", "fixed"]


class LossSection(Section):
    """What losses of all types have."""

    type: str
    """Which loss."""
    aggregation: Aggregation = "sequence_mean"
    """How token losses become one number. `sequence_mean`: completions weigh the same. `token_mean`: tokens weigh the same.
    `fixed`: so too, over completions x `rollout.max_completion_tokens`. `sequence_sum`: tokens are summed, completions
    averaged."""


class ClipLoss(LossSection):
    """PPO's pessimistic minimum: no gradient beyond the clip range (arXiv 1707.06347)."""

    type: Literal["clip"] = "clip"
    """PPO's minimum."""
    ratio: Literal["token", "sequence"] = "token"
    """Of new to old probability: for each token, or one for a completion (GSPO; it wants an epsilon a thousand times smaller)."""
    epsilon: float = Field(default=0.2, gt=0)
    """Clip range of the ratio: 1 - epsilon to 1 + epsilon. At 1 or more there is no lower bound."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """Its upper side: 1 + epsilon_high. A little more (0.28) keeps exploration alive. Null takes `epsilon`."""
    dual_clip: float | None = Field(default=None, gt=1)
    """For negative advantages the loss stops growing where the ratio passes this (3 is usual)."""

    @property
    def high(self) -> float:
        """The upper side of the clip range."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @model_validator(mode="after")
    def check_cap(self) -> ClipLoss:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.high:
            raise ValueError(
                f"algorithm.loss.dual_clip is {self.dual_clip}, but it must be above the upper clip bound {1 + self.high:g}; raise it "
                "or lower epsilon_high"
            )
        return self


class CispoLoss(LossSection):
    """REINFORCE with a clipped weight: every token keeps a gradient (arXiv 2506.13585)."""

    type: Literal["cispo"] = "cispo"
    """A clipped weight."""
    ratio: Literal["token", "sequence"] = "token"
    """Of new to old probability: for each token, or one for a completion (GSPO; it wants an epsilon a thousand times smaller)."""
    epsilon: float = Field(default=1.0, gt=0)
    """The weight is at least 1 - epsilon. At 1 or more there is no lower bound."""
    epsilon_high: float | None = Field(default=4.0, gt=0)
    """The weight is at most 1 + epsilon_high. Null takes `epsilon`."""

    @property
    def high(self) -> float:
        """The upper side of the clip range."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high


class ReinforceLoss(LossSection):
    """-A log pi, with no ratio at all: only for on-policy batches (`algorithm.updates_per_batch: 1`)."""

    type: Literal["reinforce"] = "reinforce"
    """No ratio."""


class SapoLoss(LossSection):
    """A sigmoid gate in place of the clip: each token's weight fades smoothly as its ratio leaves 1 (SAPO, arXiv 2511.20347)."""

    type: Literal["sapo"] = "sapo"
    """A soft gate."""
    tau_positive: float = Field(default=1.0, gt=0)
    """Temperature of the gate where the advantage is positive: larger fades faster."""
    tau_negative: float = Field(default=1.05, gt=0)
    """The same where it is negative. A little larger is steadier: such updates spread to many tokens that were not sampled."""


class VespoLoss(LossSection):
    """REINFORCE weighted by w^k exp(lambda (1 - w)) of the completion's whole ratio w (VESPO, arXiv 2602.10693)."""

    type: Literal["vespo"] = "vespo"
    """A soft weight of the completion."""
    k_positive: float = Field(default=2.0, ge=0)
    """k where the advantage is positive: how fast the weight fades as the completion becomes less likely."""
    lambda_positive: float = Field(default=3.0, ge=0)
    """lambda where the advantage is positive: how fast the weight fades as the completion becomes likelier."""
    k_negative: float = Field(default=3.0, ge=0)
    """k where the advantage is negative."""
    lambda_negative: float = Field(default=2.0, ge=0)
    """lambda where the advantage is negative."""


class GmpoLoss(LossSection):
    """The geometric mean of a completion's token ratios, each clipped before the mean (GMPO, arXiv 2507.20673)."""

    type: Literal["gmpo"] = "gmpo"
    """A geometric mean."""
    epsilon: float = Field(default=0.4, gt=0)
    """Clip range of each token's log-ratio: useful from exp(-epsilon) to exp(epsilon)."""


class DppoLoss(LossSection):
    """The plain ratio, without a gradient for tokens whose divergence from the old policy is above a threshold and would grow
    (DPPO, arXiv 2602.04879)."""

    type: Literal["dppo"] = "dppo"
    """A divergence mask."""
    divergence: Literal["tv", "kl"] = "tv"
    """Of the distributions "this token, or any other": total variation |p - p_old|, or KL(old || new)."""
    threshold: float | None = Field(default=None, gt=0)
    """Largest divergence of a token that may still move away. Null takes the authors' 0.15 for `tv` and 0.05 for `kl`."""

    @property
    def limit(self) -> float:
        """The threshold in use."""
        return {"tv": 0.15, "kl": 0.05}[self.divergence] if self.threshold is None else self.threshold


class OwnLoss(LossSection):
    """A function of your own."""

    type: str
    """A registered name, `path/to/file.py:function`, or an import path `package.module:function`."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The function's settings."""

    @model_validator(mode="before")
    @classmethod
    def check_name(cls, given: Any) -> Any:
        return check_own("loss", given, LOSS_TYPES)


LOSS_TYPES: dict[str, type[LossSection]] = {
    "clip": ClipLoss, "cispo": CispoLoss, "reinforce": ReinforceLoss, "sapo": SapoLoss, "vespo": VespoLoss, "gmpo": GmpoLoss,
    "dppo": DppoLoss,
}  # fmt: skip


def _tag(value: Any) -> str:
    kind = type_of(value)
    return kind if kind in LOSS_TYPES else OWN


LossConfig = Annotated[
    Annotated[ClipLoss, Tag("clip")] | Annotated[CispoLoss, Tag("cispo")] | Annotated[ReinforceLoss, Tag("reinforce")]
    | Annotated[SapoLoss, Tag("sapo")] | Annotated[VespoLoss, Tag("vespo")] | Annotated[GmpoLoss, Tag("gmpo")]
    | Annotated[DppoLoss, Tag("dppo")] | Annotated[OwnLoss, Tag(OWN)],
    Discriminator(_tag),
]  # fmt: skip
