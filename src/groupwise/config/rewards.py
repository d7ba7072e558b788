"""Settings of how completions are scored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from groupwise.config.section import Section

__all__ = ["Normalising", "RewardFunctionConfig", "RewardsConfig", "Scope"]

Scope = Literal["completion", "group", "batch"]
Normalising = Literal["none", "std", "mean_std"]


class _Shaped(Section):
    """What a score goes through before it counts."""

    @model_validator(mode="after")
    def check_clip(self) -> _Shaped:
        clip = getattr(self, "clip", None)
        if clip is not None and not clip[0] < clip[1]:
            raise ValueError(
                f"clip is [{clip[0]:g}, {clip[1]:g}], but its lower end must be below its upper one; turn them round"
            )
        return self


class RewardFunctionConfig(_Shaped):
    """One reward function and its weight."""

    function: str
    """A built-in name, `path/to/file.py:function`, or an import path `package.module:function`."""
    weight: float = 1.0
    """Factor in the sum that becomes the completion's reward."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed to the function at every call."""
    scope: Scope | None = None
    """What one call sees: one `completion`, the completions of one problem (`group`), or those of the whole step (`batch`). Null takes
    what the function itself declares with `reward_scope`, and `group` where it declares nothing."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds that one call may take; null takes `rewards.timeout_s`."""
    isolate: bool = False
    """Call it in a process of its own, where the time limit is hard: whatever it is doing then is killed, and a new process takes its
    place. For functions that may hang or crash, such as those that run generated code. It must be named by file or module."""
    normalise: Normalising = "none"
    """Before the weight: divide scores by their standard deviation over the whole run so far (`std`), or take off their mean as well
    (`mean_std`). For functions whose size is unknown or drifts, such as reward models. Checkpoints keep the statistics."""
    clip: tuple[float, float] | None = None
    """Before the weight, and after `normalise`: hold every score between these two, such as `[-5, 5]`."""


class RewardsConfig(_Shaped):
    """How completions are scored."""

    functions: list[RewardFunctionConfig] = Field(
        default=[RewardFunctionConfig(function="correctness"), RewardFunctionConfig(function="format")], min_length=1
    )
    """Scores are multiplied by their weights and added; each is also logged by itself."""
    normalise: Normalising = "none"
    """The same for the sum: `std` divides rewards by their standard deviation over the whole run so far, `mean_std` takes off their mean
    as well."""
    clip: tuple[float, float] | None = None
    """Hold every completion's summed reward between these two, after `normalise`."""
    on_error: Literal["stop", "skip"] = "stop"
    """A function that raises or times out: stop the run, or leave the group out of the update and count it. It is never scored 0."""
    timeout_s: float | None = Field(default=60.0, gt=0)
    """Seconds that one call of one reward function may take. A plain function that is late is left behind in its thread, an `async` one
    is cancelled, an isolated one killed."""
    concurrent_calls: int = Field(default=16, ge=1)
    """Calls of `async` functions that run side by side."""
    processes: int = Field(default=2, ge=1)
    """Processes for functions with `isolate`, and so calls of these that run side by side."""
