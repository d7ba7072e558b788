"""Settings of the advantage: one section per type, with exactly the settings that act in it; and of the learned value."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from groupwise.config.section import OWN, Section, check_own, type_of

__all__ = [
    "AdvantageConfig", "AdvantageSection", "GaeAdvantage", "GdpoAdvantage", "GroupAdvantage", "MaxrlAdvantage", "OwnAdvantage",
    "ValueConfig",
]  # fmt: skip


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
    """What the difference is divided by. `group_std` lets an almost solved problem weigh as much as a hard one; `none` keeps
    the reward's units. Steadier with few completions per prompt is one standard deviation for the batch: of the rewards
    (`batch_std`), or of the differences (`centred_std`)."""
    epsilon: float = Field(default=1e-4, gt=0)
    """Added to the divisor."""

    @model_validator(mode="after")
    def check_scale(self) -> GroupAdvantage:
        """A scale may be 0 only where the difference that it divides is 0 too: otherwise advantages are 1 / epsilon."""
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


ADVANTAGE_TYPES: dict[str, type[AdvantageSection]] = {
    "group": GroupAdvantage, "gae": GaeAdvantage, "maxrl": MaxrlAdvantage, "gdpo": GdpoAdvantage,
}  # fmt: skip


def _tag(value: Any) -> str:
    kind = type_of(value)
    return kind if kind in ADVANTAGE_TYPES else OWN


AdvantageConfig = Annotated[
    Annotated[GroupAdvantage, Tag("group")] | Annotated[GaeAdvantage, Tag("gae")] | Annotated[MaxrlAdvantage, Tag("maxrl")]
    | Annotated[GdpoAdvantage, Tag("gdpo")] | Annotated[OwnAdvantage, Tag(OWN)],
    Discriminator(_tag),
]  # fmt: skip


class ValueConfig(Section):
    """The learned value of `algorithm.advantage.type: gae`, and who learns it."""

    critic: str = Field(default="shared", min_length=1)
    """Whose states the value's head reads. `shared`: the policy's. `copy`: those of a second model that starts as the policy
    and learns only the value; or a model folder or Hub name with the same tokenizer. A second model doubles weights, optimiser
    state and passes."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of the value's head, a linear layer."""
    critic_learning_rate: float = Field(default=1e-5, gt=0)
    """Constant learning rate of a `critic` of its own."""
    clip: float | None = Field(default=None, gt=0)
    """How far a value may move within a batch, in units of reward. Acts with `algorithm.updates_per_batch` above 1."""
    loss_weight: float = Field(default=0.1, gt=0)
    """Weight of the value's loss."""
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
