"""Settings of how completions are scored."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from groupwise.config.section import Section

__all__ = ["Isolation", "Normalising", "RewardFunctionConfig", "RewardModelConfig", "RewardsConfig", "Scope"]

Scope = Literal["completion", "group", "batch"]
Normalising = Literal["none", "std", "mean_std"]
Isolation = Literal[False, "process", "sandbox"]


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


class RewardModelConfig(Section):
    """A reward model: any sequence classifier of transformers, which scores prompt and completion together."""

    name: str
    """A model folder, or a Hub name such as `Skywork/Skywork-Reward-V2-Qwen3-0.6B`: what `AutoModelForSequenceClassification` loads."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; set it to make a run repeatable."""
    label: str | int | None = None
    """Which of several labels is scored, by its name or number. A model with one output, as reward models have, needs none."""
    score: Literal["logit", "probability"] = "logit"
    """`logit`: the output itself; for one of several labels its log-odds, log(p / (1 - p)). `probability`: 1 / (1 + exp(-logit))."""
    form: Literal["auto", "conversation", "text", "pair", "as_prompt"] = "auto"
    """How prompt and completion are put: a `conversation` by the model's chat template, one `text`, or a `pair` of texts. `auto` takes
    the conversation where there is a template; `as_prompt` where the prompt is one."""
    show_system_prompt: bool = True
    """Show the reward model the system prompt too. Off for templates that refuse one, or where it is about the answer's form only."""
    special_tokens: bool = True
    """Let the tokenizer add its special tokens to texts and pairs. A chat template writes its own, and this changes nothing for it."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, such as `{enable_thinking: false}`."""
    max_input_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt and completion together; by default what the model was made for."""
    on_long: Literal["truncate", "error"] = "truncate"
    """Longer ones lose their beginning and are counted (`reward_model/truncated_<component>`), or stop the run."""
    batch_tokens: int = Field(default=16384, ge=1)
    """Most tokens in one forward pass, padding included. Lower it when memory runs out; scores do not depend on it."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Numbers of the weights; `auto` takes those of the checkpoint. A linear score head is computed in float32 either way."""
    device: str = "auto"
    """`auto` (CUDA if there is one), `cpu`, `cuda` or `cuda:1`."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. The command alone can grant it: a file that sets it is refused."""


class RewardFunctionConfig(_Shaped):
    """One reward function, or one reward model, and its weight."""

    function: str | None = None
    """A built-in name, `path/to/file.py:function`, or an import path `package.module:function`. This or `model` must be given."""
    model: RewardModelConfig | None = None
    """A reward model in place of a function: its name or folder, or a section with its settings."""
    weight: float = 1.0
    """Factor in the sum that becomes the completion's reward."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments passed to the function at every call."""
    scope: Scope | None = None
    """What one call sees: one `completion`, those of one problem (`group`), or those of the step (`batch`). Null takes what the
    function declares with `reward_scope`, else `group`."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds that one call may take; null takes `rewards.timeout_s`."""
    isolate: Isolation = False
    """Call it in a process of its own, which is killed at the time limit. `process`, or true, is for functions that may hang or crash.
    `sandbox` is for functions that run generated code: no network, no files but those it imports, no secrets, limits on processes and
    memory; Linux only. The function must be named by file or module."""
    normalise: Normalising = "none"
    """Before the weight: divide scores by their standard deviation over the run so far (`std`), or take off their mean as well
    (`mean_std`): for functions whose size is unknown, such as reward models."""
    clip: tuple[float, float] | None = None
    """Before the weight, and after `normalise`: hold every score between these two, such as `[-5, 5]`."""

    @field_validator("model", mode="before")
    @classmethod
    def name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("isolate", mode="before")
    @classmethod
    def true_is_a_process(cls, value: Any) -> Any:
        return "process" if value is True else value

    @model_validator(mode="after")
    def check_one_kind(self) -> RewardFunctionConfig:
        if (self.function is None) == (self.model is None):
            both = "both a function and a model" if self.function else "neither a function nor a model"
            raise ValueError(
                f"an entry of rewards.functions names {both}, but it must name one of the two: write function: or model:"
            )
        if self.model is not None and self.isolate:
            raise ValueError(
                f"rewards.functions isolates the model {self.model.name!r}, but only functions run in processes of their own: leave "
                "isolate out"
            )
        if self.model is not None and self.arguments:
            raise ValueError(
                f"rewards.functions gives arguments to the model {self.model.name!r}, but they are for functions: write settings in its "
                "model: section"
            )
        return self

    @property
    def called(self) -> str:
        """The function's name as the entry gives it, or the last part of the model's."""
        return self.model.name.rstrip("/").rpartition("/")[2] if self.model else (self.function or "").strip()


class RewardsConfig(_Shaped):
    """How completions are scored."""

    functions: list[RewardFunctionConfig] = Field(
        default=[RewardFunctionConfig(function="correctness"), RewardFunctionConfig(function="format")], min_length=1
    )
    """Scores are multiplied by their weights and added; each is also logged by itself."""
    normalise: Normalising = "none"
    """Normalise the summed reward, as `normalise` of an entry does its scores."""
    clip: tuple[float, float] | None = None
    """Hold every completion's summed reward between these two, after `normalise`."""
    on_error: Literal["stop", "skip"] = "stop"
    """A function that raises or times out: stop the run, or leave the group out and count it. It is never scored 0."""
    timeout_s: float | None = Field(default=60.0, gt=0)
    """Seconds that one call of a reward function may take. A late plain function is left in its thread, an `async` one cancelled, an
    isolated one killed."""
    concurrent_calls: int = Field(default=16, ge=1)
    """Calls of `async` functions that run side by side."""
    processes: int = Field(default=2, ge=1)
    """Processes for functions with `isolate`, and so calls of these that run side by side."""
