"""Settings of the advantage, the learned value and the loss: one section per type, with exactly the settings that act in it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Union

from pydantic import Discriminator, Field, Tag, model_validator

from groupwise.config.section import OWN, REGISTERED, Section, check_own, type_of
from groupwise.errors import ConfigError
from groupwise.importing import import_member

__all__ = [
    "ADVANTAGE_TYPES",
    "AdvantageConfig",
    "AdvantageSection",
    "Aggregation",
    "CispoLoss",
    "ClipLoss",
    "DppoLoss",
    "GaeAdvantage",
    "GdpoAdvantage",
    "GmpoLoss",
    "GroupAdvantage",
    "LossConfig",
    "LossSection",
    "MaxrlAdvantage",
    "OwnAdvantage",
    "OwnLoss",
    "ReinforceLoss",
    "SapoLoss",
    "ToprLoss",
    "ValueConfig",
    "VespoLoss",
]


class AdvantageSection(Section):
    """What advantages of all types have."""

    type: str
    """Which advantage."""


class GroupAdvantage(AdvantageSection):
    """A completion's reward less a baseline, divided by a scale (arXiv 2402.03300)."""

    type: Literal["group"] = "group"
    """Rewards compared with each other."""
    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"] = "group_mean"
    """What a reward is compared with: its group's mean, the mean of the others in its group (unbiased), the batch's mean, or
    nothing."""
    scale: Literal["group_std", "batch_std", "centred_std", "none"] = "group_std"
    """What the difference is divided by: the group's standard deviation, nothing, or, steadier with few completions per prompt,
    the batch's: of the rewards (`batch_std`), or of the differences (`centred_std`)."""
    epsilon: float = Field(default=1e-4, gt=0)
    """Added to the divisor."""
    discount: float = Field(default=1.0, ge=0, le=1)
    """For rewards of steps: what each step counts for the one before it. 1 adds up all that follow; 0 judges a step, or a turn, by its
    own reward alone, with less noise, where that reward says all that the step was worth."""

    @model_validator(mode="after")
    def check_scale(self) -> GroupAdvantage:
        """A scale may be 0 only where the difference that it divides is 0 too: otherwise advantages are 1 / epsilon."""
        if self.scale == "none" and self.epsilon != 1e-4:
            raise ValueError(
                f"algorithm.advantage.epsilon is {self.epsilon:g}, but scale is none, so nothing is divided: leave epsilon out or set scale"
            )
        if self.scale == "group_std" and self.baseline not in ("group_mean", "leave_one_out"):
            raise ValueError(
                f"algorithm.advantage.scale is 'group_std' with baseline '{self.baseline}', but a group whose completions all scored "
                "the same would be divided by about 0; set baseline to 'group_mean' or 'leave_one_out', or scale to 'batch_std' or 'none'"
            )
        if self.scale in ("batch_std", "centred_std") and self.baseline == "none":
            raise ValueError(
                f"algorithm.advantage.scale is '{self.scale}' with baseline 'none', but a batch whose completions all scored the same "
                "would be divided by about 0; set baseline to 'batch_mean', or scale to 'none'"
            )
        return self


class GaeAdvantage(AdvantageSection):
    """A learned value judges every token (arXiv 1506.02438). `algorithm.value` says how it learns."""

    type: Literal["gae"] = "gae"
    """A learned value."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount per token."""
    lam: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda. 1 uses the value as a baseline only (unbiased, noisier); 0 trusts the value of the next token (biased at
    first)."""
    whiten: bool = True
    """Normalise the advantages of all tokens of the batch."""
    epsilon: float = Field(default=1e-4, gt=0)
    """Added to the divisor."""

    @model_validator(mode="after")
    def check_epsilon(self) -> GaeAdvantage:
        if not self.whiten and self.epsilon != 1e-4:
            raise ValueError(
                f"algorithm.advantage.epsilon is {self.epsilon:g}, but whiten is false, so nothing is divided: leave epsilon out, or set "
                "whiten to true"
            )
        return self


class MaxrlAdvantage(AdvantageSection):
    """(reward - mean) / mean of the group: the rarer a right answer, the more it weighs (MaxRL, arXiv 2602.02710)."""

    type: Literal["maxrl"] = "maxrl"
    """Divided by the group's mean."""
    epsilon: float = Field(default=1e-4, gt=0)
    """Added to the divisor."""


class GdpoAdvantage(AdvantageSection):
    """Each reward function normalised within the group by itself, then their weighted sum over the batch (GDPO, arXiv 2601.05242)."""

    type: Literal["gdpo"] = "gdpo"
    """Each reward function by itself."""
    epsilon: float = Field(default=1e-4, gt=0)
    """Added to the divisor."""


class OwnAdvantage(AdvantageSection):
    """A function of your own."""

    type: str
    """A registered name, `path/to/file.py:function`, or an import path `package.module:function`."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """The function's settings."""

    @model_validator(mode="before")
    @classmethod
    def check_name(cls, given: Any) -> Any:
        return check_own("advantage", given, ADVANTAGE_TYPES)

    @property
    def formula(self) -> str:
        """The function's own words for it. Imports it; raises ConfigError where that fails."""
        return getattr(_own_function("advantage", self.type), "formula", self.type)


def _own_function(what: str, name: str) -> object:
    return REGISTERED[what].get(name) or import_member(name, what, ConfigError)[0]


ADVANTAGE_TYPES: dict[str, type[AdvantageSection]] = {
    "group": GroupAdvantage, "gae": GaeAdvantage, "maxrl": MaxrlAdvantage, "gdpo": GdpoAdvantage,
}  # fmt: skip


def _tag(given: object, types: Mapping[str, type[Section]]) -> str:
    """The type of a section as pydantic's tag: its name among ``types``, or ``OWN``."""
    kind = type_of(given)
    return kind if kind is not None and kind in types else OWN


AdvantageConfig = Annotated[
    Annotated[GroupAdvantage, Tag("group")] | Annotated[GaeAdvantage, Tag("gae")] | Annotated[MaxrlAdvantage, Tag("maxrl")]
    | Annotated[GdpoAdvantage, Tag("gdpo")] | Annotated[OwnAdvantage, Tag(OWN)],
    Discriminator(lambda given: _tag(given, ADVANTAGE_TYPES)),
]  # fmt: skip


class ValueConfig(Section):
    """The learned value of `algorithm.advantage.type: gae`, or of a function of your own that needs values, and who learns it."""

    critic: str = Field(default="shared", min_length=1)
    """Whose states the value's head reads. `shared`: the policy's. `copy`: those of a second model, which starts as the policy;
    or a model folder or Hub name with the same tokenizer. A second model doubles weights, optimiser state and passes."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of the value's head, a linear layer."""
    critic_learning_rate: float = Field(default=1e-5, gt=0)
    """Constant learning rate of a `critic` of its own."""
    clip: float | None = Field(default=None, gt=0)
    """How far a value may move within a batch, in units of reward. Acts with `algorithm.updates_per_batch` above 1."""
    loss_weight: float = Field(default=0.1, gt=0)
    """Weight of the value's loss. Acts with `trains_trunk`, and through `optimizer.max_grad_norm` on a `critic` of its own; AdamW divides
    it out elsewhere."""
    trains_trunk: bool = False
    """With the `shared` critic: let the value's error reach the policy's layers too."""

    @model_validator(mode="after")
    def check_critic(self) -> ValueConfig:
        if self.critic == "shared" and self.critic_learning_rate != 1e-5:
            raise ValueError(
                f"algorithm.value.critic_learning_rate is {self.critic_learning_rate:g}, but critic is shared, so no second model is "
                "learned: leave it out, or set critic to copy"
            )
        if self.critic != "shared" and self.trains_trunk:
            raise ValueError(
                f"algorithm.value.trains_trunk is true, but critic is {self.critic!r}, a model of its own, which the value's error "
                "always reaches: leave it out"
            )
        return self


Aggregation = Literal["sequence_mean", "token_mean", "sequence_sum", "fixed"]
RATIOS = {
    "token": "pi(o_it) / pi_old(o_it)",
    "sequence": "(pi(o_i) / pi_old(o_i))^(1/|o_i|), one for the whole completion",
    "product": "pi(o_i) / pi_old(o_i), one for the whole completion",
}
"""Formulas of a ratio, i a completion and t one of its |o_i| tokens."""


class LossSection(Section):
    """What losses of all types have. Properties are what `groupwise algorithms` shows of each."""

    type: str
    """Which loss."""
    aggregation: Aggregation = "sequence_mean"
    """How token losses become one number. `sequence_mean`: completions weigh the same. `token_mean`: tokens weigh the same.
    `fixed`: so too, over completions x `rollout.max_completion_tokens`. `sequence_sum`: tokens are summed, completions
    averaged."""

    level: ClassVar[str] = "-"
    own_ratio: ClassVar[str | None] = None
    """Of `RATIOS`, where it is another than its level's."""
    clip_drops_gradient: ClassVar[bool] = True
    """Whether a token at the clip has no gradient. False where the clip holds a weight in front of the gradient."""

    @property
    def ratio_level(self) -> str:
        """What has a ratio of its own: a token, or a sequence."""
        return self.level

    @property
    def ratio_formula(self) -> str | None:
        """The ratio w; None where the loss has none."""
        return RATIOS.get(self.own_ratio or self.ratio_level)

    @property
    def clip_range(self) -> str:
        """How far the ratio may go."""
        return "-"

    @property
    def formula(self) -> str:
        """The loss of one token, from w and the advantage A."""
        return self.type


class ClipLoss(LossSection):
    """PPO's pessimistic minimum: no gradient beyond the clip range (arXiv 1707.06347)."""

    type: Literal["clip"] = "clip"
    """PPO's minimum."""
    ratio: Literal["token", "sequence"] = "token"
    """Ratio of new to old probability: for each token, or one for a completion (GSPO; it wants an epsilon a thousand times smaller)."""
    epsilon: float = Field(default=0.2, gt=0)
    """Clip range of the ratio: 1 - epsilon to 1 + epsilon. At 1 or more there is no lower bound."""
    epsilon_high: float | None = Field(default=None, gt=0)
    """Upper side of the clip range: 1 + epsilon_high. A little more (0.28) keeps exploration alive. Null takes `epsilon`."""
    dual_clip: float | None = Field(default=None, gt=1)
    """For negative advantages the loss stops growing where the ratio passes this (3 is usual)."""

    @property
    def high(self) -> float:
        """The upper side of the clip range."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def ratio_level(self) -> str:
        return self.ratio

    @property
    def clip_range(self) -> str:
        words = _range_words(self.epsilon, self.high)
        return f"{words}, at most {self.dual_clip:g} for A < 0" if self.dual_clip else words

    @property
    def formula(self) -> str:
        minimum = f"-min(w A, {_held(self.epsilon, self.high)} A)"
        return minimum if self.dual_clip is None else f"{minimum}, and at most -{self.dual_clip:g} A where A < 0"

    @model_validator(mode="after")
    def check_cap(self) -> ClipLoss:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.high:
            raise ValueError(
                f"algorithm.loss.dual_clip is {self.dual_clip}, but it must be above the upper clip bound {1 + self.high:g}; raise it "
                "or lower epsilon_high"
            )
        return self


def _range_words(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{'none' if low >= 1 else f'{low:g}'} down, {high:g} up"


def _held(low: float, high: float) -> str:
    return f"clip(w, {max(0.0, 1 - low):g}, {1 + high:g})"


class CispoLoss(LossSection):
    """REINFORCE with a clipped weight: every token keeps a gradient (arXiv 2506.13585)."""

    type: Literal["cispo"] = "cispo"
    """A clipped weight."""
    ratio: Literal["token", "sequence"] = "token"
    """Ratio of new to old probability: for each token, or one for a completion (GSPO; it wants an epsilon a thousand times smaller)."""
    epsilon: float = Field(default=1.0, gt=0)
    """The weight is at least 1 - epsilon. At 1 or more there is no lower bound."""
    epsilon_high: float | None = Field(default=4.0, gt=0)
    """The weight is at most 1 + epsilon_high. Null takes `epsilon`."""
    clip_drops_gradient: ClassVar[bool] = False

    @property
    def high(self) -> float:
        """The upper side of the clip range."""
        return self.epsilon if self.epsilon_high is None else self.epsilon_high

    @property
    def ratio_level(self) -> str:
        return self.ratio

    @property
    def clip_range(self) -> str:
        return _range_words(self.epsilon, self.high)

    @property
    def formula(self) -> str:
        return f"-{_held(self.epsilon, self.high)} A log pi(o_it), with no gradient through the weight"


class ReinforceLoss(LossSection):
    """-A log pi, with no ratio at all: only for on-policy batches (`algorithm.updates_per_batch: 1`)."""

    type: Literal["reinforce"] = "reinforce"
    """No ratio."""

    @property
    def formula(self) -> str:
        return "-A log pi(o_it)"


class SapoLoss(LossSection):
    """A sigmoid gate in place of the clip (SAPO, arXiv 2511.20347)."""

    type: Literal["sapo"] = "sapo"
    """A soft gate."""
    tau_positive: float = Field(default=1.0, gt=0)
    """Temperature of the gate where the advantage is positive: larger fades faster."""
    tau_negative: float = Field(default=1.05, gt=0)
    """Temperature of the gate where it is negative."""
    level: ClassVar[str] = "token"

    @property
    def formula(self) -> str:
        tau = f"tau = {self.tau_positive:g} where A > 0, else {self.tau_negative:g}"
        return f"-4 / tau sigmoid(tau (w - 1)) A, {tau}"


class VespoLoss(LossSection):
    """REINFORCE weighted by w^k exp(lambda (1 - w)) of the completion's whole ratio w (VESPO, arXiv 2602.10693)."""

    type: Literal["vespo"] = "vespo"
    """A soft weight of the completion."""
    k_positive: float = Field(default=2.0, ge=0)
    """k where the advantage is positive: how fast unlikelier completions fade."""
    lambda_positive: float = Field(default=3.0, ge=0)
    """lambda where the advantage is positive: how fast likelier completions fade."""
    k_negative: float = Field(default=3.0, ge=0)
    """k where the advantage is negative."""
    lambda_negative: float = Field(default=2.0, ge=0)
    """lambda where the advantage is negative."""
    level: ClassVar[str] = "sequence"
    own_ratio: ClassVar[str | None] = "product"

    @property
    def formula(self) -> str:
        positive = f"{self.k_positive:g}, {self.lambda_positive:g} where A >= 0"
        by_sign = f"k, l = {positive}, else {self.k_negative:g}, {self.lambda_negative:g}"
        return f"-w^k exp(l (1 - w)) A log pi(o_it), with no gradient through the weight; {by_sign}"


class GmpoLoss(LossSection):
    """The geometric mean of a completion's token ratios, each clipped before the mean (GMPO, arXiv 2507.20673)."""

    type: Literal["gmpo"] = "gmpo"
    """A geometric mean."""
    epsilon: float = Field(default=0.4, gt=0)
    """Clip range of each token's log-ratio: useful from exp(-epsilon) to exp(epsilon)."""
    level: ClassVar[str] = "sequence"
    own_ratio: ClassVar[str | None] = "token"

    @property
    def clip_range(self) -> str:
        return f"exp(-{self.epsilon:g}) to exp({self.epsilon:g})"

    @property
    def formula(self) -> str:
        held = f"clip(log w, -{self.epsilon:g}, {self.epsilon:g})"
        return f"-exp(1/|o_i| sum_t x_it) A, with x_it the smaller of log w and {held} where A > 0, else the larger"


class DppoLoss(LossSection):
    """The plain ratio, but no gradient for tokens that diverged too far (DPPO, arXiv 2602.04879)."""

    type: Literal["dppo"] = "dppo"
    """A divergence mask."""
    divergence: Literal["tv", "kl"] = "tv"
    """How far apart the distributions "this token, or any other" are: total variation |p - p_old|, or KL(old || new)."""
    threshold: float | None = Field(default=None, gt=0)
    """Largest divergence of a token that may still move away. Null takes the authors' 0.15 for `tv` and 0.05 for `kl`."""

    @property
    def limit(self) -> float:
        """The threshold in use."""
        return {"tv": 0.15, "kl": 0.05}[self.divergence] if self.threshold is None else self.threshold

    level: ClassVar[str] = "token"

    @property
    def clip_range(self) -> str:
        return f"{self.divergence} of {self.limit:g}"

    @property
    def formula(self) -> str:
        return f"-m w A, with m = 0 where w A would grow and {self.divergence}(pi, pi_old) > {self.limit:g}, else 1"


class ToprLoss(LossSection):
    """REINFORCE in which bad completions fade as they become unlikely, by their whole ratio (TOPR, arXiv 2503.14286)."""

    type: Literal["topr"] = "topr"
    """A tapered weight of bad completions."""
    level: ClassVar[str] = "sequence"
    own_ratio: ClassVar[str | None] = "product"
    clip_drops_gradient: ClassVar[bool] = False

    @property
    def clip_range(self) -> str:
        return "at most 1 for A < 0"

    @property
    def formula(self) -> str:
        return "-c A log pi(o_it), with no gradient through c = 1 where A >= 0, else min(w, 1)"


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

    @property
    def needs_reference(self) -> bool:
        """Whether the function declares that it reads a reference (`groupwise.algorithm.needs`). Imports it; raises ConfigError where that
        fails."""
        return "reference" in getattr(_own_function("loss", self.type), "needs", ())

    @property
    def formula(self) -> str:
        """The function's own words for it. Imports it as ``needs_reference`` does."""
        return getattr(_own_function("loss", self.type), "formula", self.type)


LOSS_TYPES: dict[str, type[LossSection]] = {
    "clip": ClipLoss, "cispo": CispoLoss, "reinforce": ReinforceLoss, "sapo": SapoLoss, "vespo": VespoLoss, "gmpo": GmpoLoss,
    "dppo": DppoLoss, "topr": ToprLoss,
}  # fmt: skip

if TYPE_CHECKING:
    LossConfig = LossSection
else:
    LossConfig = Annotated[
        Union[(*(Annotated[kind, Tag(name)] for name, kind in LOSS_TYPES.items()), Annotated[OwnLoss, Tag(OWN)])],
        Discriminator(lambda given: _tag(given, LOSS_TYPES)),
    ]
