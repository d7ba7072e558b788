"""The settings of the objective, in sections: the advantage, the loss, and what may stand beside them.

A preset is a row of ``groupwise.config.presets``: values that lie under those that are written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ModelWrapValidatorHandler, ValidationError, field_validator, model_validator
from pydantic_core import InitErrorDetails, PydanticCustomError

from groupwise.config.former import FORMER, former_key
from groupwise.config.objective import (
    ADVANTAGE_TYPES,
    AdvantageConfig,
    ClipLoss,
    GroupAdvantage,
    LossConfig,
    LossSection,
    ValueConfig,
)
from groupwise.config.presets import PRESETS
from groupwise.config.section import Section, type_of

__all__ = ["COMMON", "AlgorithmConfig", "CorrectionConfig", "EntropyConfig", "KLConfig", "PresetName", "kind_in"]

if TYPE_CHECKING:
    PresetName = str
else:
    PresetName = Literal[tuple(PRESETS)]


class KLConfig(Section):
    """The KL to a reference, which ties the policy to where it started. Null keeps none."""

    beta: float = Field(default=0.04, gt=0)
    """Weight of the KL. `algorithm.kl: null` keeps no reference."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of the KL from one sample. In the loss use `k3` (low variance) or `k2` (exact gradient on-policy), not `k1`, whose
    gradient averages to 0; in the reward `k1` (unbiased)."""
    placement: Literal["loss", "reward", "token_reward"] = "loss"
    """Where `beta` x KL acts: added to the loss, taken off a completion's reward, or taken off each token's own."""
    importance_weighted: bool = False
    """With `placement: loss`: multiply the KL by the ratio (arXiv 2512.02556). With `k3` and the ratio of tokens its gradient is
    then that of KL(policy || reference), also off-policy."""
    target: float | None = Field(default=None, gt=0)
    """Steer `beta` so that the KL per token comes to this (arXiv 1909.08593); 0.05 to 0.1 is usual. Null keeps it fixed."""
    gain: float = Field(default=0.1, gt=0, lt=5)
    """With `target`: share by which `beta` changes a step for an error of 100%; errors count up to 20%, so 5 would make it 0."""
    skip_zero_variance: bool = True
    """With `placement: loss`: leave groups with equal rewards out of the passes, and so out of the KL. Turn it off for eq. 3 of
    arXiv 2402.03300 to the letter."""
    reference_updates: int = Field(default=1, ge=1)
    """I: outer iterations; at the start of each the reference becomes the current policy."""
    reference_every: int | None = Field(default=None, ge=1)
    """Renew the reference every so many steps too."""
    reference_mixing: float = Field(default=1.0, gt=0, le=1)
    """How far a renewal goes: 1 all the way, 0.1 a tenth. Small, with `reference_every: 1`, it is a moving average, at the cost
    of an fp32 copy."""

    @field_validator("beta", mode="before")
    @classmethod
    def refuse_zero(cls, value: Any) -> Any:
        if isinstance(value, int | float) and value == 0:
            raise ValueError("algorithm.kl.beta is 0, but a KL has a weight above 0: write algorithm.kl=null for none")
        return value

    @model_validator(mode="after")
    def check_companions(self) -> KLConfig:
        """Settings that act on something that another setting has switched off."""
        if self.importance_weighted and self.placement != "loss":
            raise ValueError(
                f"algorithm.kl.importance_weighted is true, but placement is {self.placement}, where no ratio multiplies the KL: set "
                "placement to loss, or leave importance_weighted out"
            )
        if self.placement != "loss" and not self.skip_zero_variance:
            raise ValueError(
                f"algorithm.kl.skip_zero_variance is false, but placement is {self.placement}, where no pass has a KL: set placement to "
                "loss, or leave skip_zero_variance out"
            )
        if self.reference_every == 1 and self.reference_updates > 1:
            raise ValueError(
                f"algorithm.kl.reference_updates is {self.reference_updates}, but with reference_every 1 the reference is renewed at every "
                "step anyway: leave either out"
            )
        if self.target is None and self.gain != 0.1:
            raise ValueError(
                f"algorithm.kl.gain is {self.gain:g}, but without algorithm.kl.target beta stays as it is: set target, or leave gain out"
            )
        if self.reference_mixing < 1 and self.reference_every is None and self.reference_updates == 1:
            raise ValueError(
                f"algorithm.kl.reference_mixing is {self.reference_mixing}, but the reference is never renewed; set reference_every, "
                "to 1 for a moving average"
            )
        return self


class CorrectionConfig(Section):
    """Weigh each token, or completion, by how much likelier the trainer finds it than the sampler did
    (`policy/sampler_mismatch`)."""

    level: Literal["token", "sequence"] = "token"
    """One weight for each token, or one for a whole completion."""
    mode: Literal["truncate", "mask"] = "truncate"
    """Beyond the cap: hold the weight there, or leave it out."""
    cap: float = Field(default=2.0, ge=1)
    """Largest weight."""


class EntropyConfig(Section):
    """What keeps exploration alive, or learns where it happens."""

    bonus: float = Field(default=0.0, ge=0)
    """Weight of the entropy of each token's distribution, taken off the loss of all groups. 0.001 is a start; too much makes
    text random."""
    floor: float | None = Field(default=None, gt=0)
    """The bonus acts only in steps whose sampled tokens have less entropy than this on average, in nats. Those of all groups count, but
    for what `mask_truncated` leaves out, where `policy/entropy` is of groups that teach."""
    top_share: float = Field(default=1.0, gt=0, le=1)
    """Only this share of the batch's tokens, those of highest entropy, takes part in the policy's loss (arXiv 2506.01939: 0.2).
    Costs one more forward pass."""

    @model_validator(mode="after")
    def check_floor(self) -> EntropyConfig:
        if self.floor is not None and self.bonus == 0:
            raise ValueError(
                f"algorithm.entropy.floor is {self.floor} with bonus 0, so nothing would lift the entropy; set bonus, to 0.001 for a start"
            )
        return self


class AlgorithmConfig(Section):
    """The objective: advantage x loss x KL, and what corrects and explores. A setting that is not written follows `preset`.
    Under another type of `advantage` or `loss` than the preset's, only `loss.aggregation` still does. Defaults are GRPO as in
    DeepSeekMath (arXiv 2402.03300).
    """

    preset: PresetName = "grpo"
    """The published method that unset fields follow."""
    updates_per_batch: int = Field(default=1, ge=1)
    """mu: optimiser steps on each batch. Above 1 the later ones are off-policy, and clipping begins to act."""
    mask_truncated: bool = False
    """Leave completions that did not end by themselves (cut at the token limit, or episodes at `rollout.max_turns`) out of the loss
    (DAPO's overlong filtering). They still count in the mean of their group or batch; `gae` leaves them out altogether."""
    stale_samples: Literal["decoupled", "behaviour", "uncorrected"] = "decoupled"
    """With `rollout.ahead`, what corrects for age. `decoupled`: ratio and clip are against the weights before the batch's first
    update, and each token is weighted as by `algorithm.correction` (arXiv 2110.00641). `behaviour`: they are against the
    sampler (arXiv 2410.18252). `uncorrected`: no token is weighted, whatever sampled it."""
    advantage: AdvantageConfig = GroupAdvantage()
    """How rewards become advantages. `group`: compared with other completions. `gae`: with a learned value of every token's state (PPO).
    `maxrl` and `gdpo`: published variants of `group`. Or a function of your own."""
    loss: LossConfig = ClipLoss()
    """What is minimised. `clip`: PPO's pessimistic minimum. `cispo`: a clipped weight. `reinforce`: no ratio, for on-policy batches.
    The others bound an update in ways of their own. Or a function of yours."""
    kl: KLConfig | None = KLConfig()
    """The KL to a reference; null keeps none."""
    correction: CorrectionConfig | None = None
    """Importance weights between sampler and trainer. Unless it is set, it is `{level: token}` where `rollout.engine` is vllm
    or your own, or `rollout.quantization` 8bit; otherwise, and with another `stale_samples` than `decoupled`, it is null. With
    `rollout.ahead` and `decoupled` null is `{level: token}` too."""
    entropy: EntropyConfig | None = None
    """A bonus for entropy, or a loss on the tokens of most entropy alone."""
    value: ValueConfig | None = None
    """The learned value: there exactly when `advantage.type` is `gae`. For an advantage of your own that needs values, write it:
    `{}` takes the defaults."""

    @model_validator(mode="wrap")
    @classmethod
    def follow_preset(cls, given: Any, handler: ModelWrapValidatorHandler[AlgorithmConfig]) -> AlgorithmConfig:
        """Lay the preset's row under what is written. Only what is written counts as set."""
        if not isinstance(given, Mapping):
            return handler(given)
        if former := [name for name in given if name in FORMER and name not in cls.model_fields]:
            raise ValidationError.from_exception_data(cls.__name__, [_former_error(name, given[name]) for name in former])
        written = {name: dict(value) if isinstance(value, Section) else value for name, value in given.items()}
        made = handler(_over_preset(written))
        made.model_fields_set.intersection_update(written)
        for name in type(made).model_fields:
            section, own = getattr(made, name), written.get(name)
            if isinstance(section, Section):
                section.model_fields_set.intersection_update(own if isinstance(own, Mapping) else ())
        return made

    def _assign(self, name: str, value: Any) -> None:
        """Make it again from what is written: another preset moves every setting that is not. What the engine wants corrected stays."""
        made = type(self).model_validate(written(self) | {name: value})
        if "correction" not in made.model_fields_set:
            made.__dict__["correction"] = self.correction
        self.__setstate__(made.__getstate__())

    @model_validator(mode="after")
    def check_loss(self) -> AlgorithmConfig:
        if self.loss.type == "reinforce" and self.updates_per_batch > 1:
            raise ValueError(
                f"algorithm.updates_per_batch is {self.updates_per_batch} with algorithm.loss.type 'reinforce', but after the first "
                "update the batch is off-policy and reinforce has no ratio that corrects for it; set loss.type to 'clip', or "
                "updates_per_batch to 1"
            )
        return self

    @model_validator(mode="after")
    def check_kl(self) -> AlgorithmConfig:
        """The reference differs from the policy, and the KL in the reward goes where a reward may have any size and sign."""
        if self.kl is None:
            return self
        if (
            self.kl.reference_every == self.kl.reference_mixing == 1
            and (self.updates_per_batch == 1 or self.kl.placement != "loss")  # in rewards it is that before the first update
        ):
            raise ValueError(
                f"algorithm.kl.reference_every is 1 with reference_mixing 1, updates_per_batch {self.updates_per_batch} and placement "
                f"'{self.kl.placement}', so the reference is the policy itself wherever the KL is measured, and it is always 0: set "
                "reference_mixing below 1, or write algorithm.kl=null"
            )
        if self.kl.placement == "loss":
            return self
        if (
            isinstance(self.advantage, GroupAdvantage)
            and self.advantage.scale == "group_std"
            and self.kl.placement == "token_reward"
        ):
            raise ValueError(
                "algorithm.advantage.scale is 'group_std' with algorithm.kl.placement 'token_reward', but in a group whose completions all "
                "scored the same the KL would be divided by about 0; set scale to 'batch_std' or 'none', or placement to 'reward'"
            )
        if self.advantage.type in ("maxrl", "gdpo"):
            raise ValueError(
                f"algorithm.kl.placement is '{self.kl.placement}', but algorithm.advantage.type '{self.advantage.type}' is for rewards "
                "without a KL in them; set placement to 'loss'"
            )
        return self

    @model_validator(mode="after")
    def check_entropy(self) -> AlgorithmConfig:
        if self.entropy is not None and self.entropy.bonus == 0 and self.entropy.top_share == 1:
            raise ValueError(
                "algorithm.entropy has bonus 0 and top_share 1, so it would do nothing: set one of them, or write algorithm.entropy=null"
            )
        return self

    @property
    def beta(self) -> float:
        """Weight of the KL as it starts; 0 without one."""
        return 0.0 if self.kl is None else self.kl.beta

    @property
    def needs_reference(self) -> bool:
        """Whether ``kl`` needs a reference; a loss of one's own may need one besides."""
        return self.kl is not None

    @property
    def needs_values(self) -> bool:
        """Whether a value is learned."""
        return self.value is not None

    @property
    def flat_groups_teach(self) -> bool:
        """Whether a group whose completions all scored the same has advantages: more than its summed rewards is compared. Not known of
        an ``OwnAdvantage``, and False there."""
        advantage = self.advantage
        across = isinstance(advantage, GroupAdvantage) and advantage.baseline in ("batch_mean", "none")
        return across or advantage.type in ("gae", "gdpo") or (self.kl is not None and self.kl.placement != "loss")


def _former_error(name: str, value: Any) -> InitErrorDetails:
    error = PydanticCustomError("former_key", "{sentence}", {"sentence": former_key(name)})
    return InitErrorDetails(type=error, loc=(name,), input=value)


def _over_preset(written: Mapping[str, Any]) -> dict[str, Any]:
    """The preset's row with ``written`` laid over it, section by section; and the value's section exactly where a value is learned: with
    ``gae``, and with a function of the user's where it is written. To ask the function it would have to be imported, and reading a
    config (a run's, of somebody else) runs no code."""
    row = _row(written)
    merged = {**row, **written}
    for name, under in row.items():
        own = written.get(name)
        if isinstance(own, Mapping) and isinstance(under, Mapping):
            same = own.get("type", under.get("type")) == under.get("type")
            merged[name] = {**(under if same else {k: under[k] for k in under if k in COMMON[name]}), **own}
    kind = type_of(merged.get("advantage"))
    learned = kind == "gae"
    if kind not in ADVANTAGE_TYPES and written.get("value") is not None:
        pass
    elif learned and merged.get("value") is None:
        merged["value"] = row.get("value") or {}
    elif not learned and written.get("value") is not None:
        raise ValueError(
            "algorithm.value is set, but a value is learned only with algorithm.advantage.type=gae, or a function of your own: leave it "
            "out, or set that type"
        )
    elif not learned:
        merged["value"] = None
    return merged


def _row(written: Mapping[str, Any]) -> Mapping[str, Any]:
    """The values of the preset that ``written`` names."""
    preset = written.get("preset", "grpo")
    return PRESETS[preset].values if isinstance(preset, str) and preset in PRESETS else {}


def kind_in(written: Mapping[str, Any], section: str) -> str | None:
    """The type of the advantage or the loss in settings as they are written: their own, or the preset's."""
    return type_of(written.get(section)) or type_of(_row(written).get(section))


COMMON: Mapping[str, set[str]] = {"loss": set(LossSection.model_fields) - {"type"}, "advantage": set()}
"""What a section of another type keeps."""


def written(section: Section) -> dict[str, Any]:
    """What was set in it and in the sections inside, as ``follow_preset`` marks it; and lists and mappings changed in place."""
    found: dict[str, Any] = {}
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        changed = isinstance(value, list | dict) and value != info.get_default(call_default_factory=True)
        if isinstance(value, Section):
            kind, value = type_of(value), written(value)
            if name in COMMON and kind != kind_in({**found, name: value}, name):  # that of an object, whose type nobody wrote
                value["type"] = kind
            changed = bool(value)
        elif isinstance(value, list):
            value = [written(one) if isinstance(one, Section) else one for one in value]
        if name in section.model_fields_set or changed:
            found[name] = value
    return found
