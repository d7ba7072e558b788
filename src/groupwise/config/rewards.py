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
    """A folder or Hub name that `AutoModelForSequenceClassification` loads."""
    revision: str | None = None
    """Branch, tag or commit on the Hub. Folders have none."""
    label: str | int | None = None
    """Which of several labels is scored, by name or number."""
    score: Literal["logit", "probability"] = "logit"
    """`logit`: the output, or a label's log-odds. `probability`: 1 / (1 + exp(-logit))."""
    form: Literal["auto", "conversation", "text", "pair", "as_prompt"] = "auto"
    """A `conversation` by the model's chat template, one `text`, or a `pair` of texts. `auto` takes the conversation where
    there is a template, `as_prompt` where the prompt is one."""
    show_system_prompt: bool = True
    """Show it the system prompt too. Off for templates that refuse one."""
    special_tokens: bool = True
    """Let the tokenizer add its special tokens to texts and pairs."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, such as `{enable_thinking: false}`."""
    max_input_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt and completion together; null takes the model's limit."""
    on_long: Literal["truncate", "error"] = "truncate"
    """Longer ones lose their beginning and are counted, or stop the run."""
    batch_tokens: int = Field(default=16384, ge=1)
    """Most tokens in one pass. Scores do not depend on it."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Numbers of the weights; `auto` takes the checkpoint's."""
    device: str = "auto"
    """`auto` (CUDA if there is one), `cpu`, `cuda` or `cuda:1`."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. The command alone can grant it, no file."""


class RewardFunctionConfig(_Shaped):
    """One reward function, or one reward model, and its weight."""

    function: str | None = None
    """A built-in name, `path/to/file.py:function`, or `package.module:function`."""
    model: RewardModelConfig | None = None
    """A reward model in place of a function: its name, or a section."""
    weight: float = 1.0
    """Factor in the sum that is the reward."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of every call."""
    scope: Scope | None = None
    """What one call sees: one `completion`, those of one problem, or those of the step. Null takes what the function declares,
    else `group`."""
    timeout_s: float | None = Field(default=None, gt=0)
    """Seconds that one call may take; null takes `rewards.timeout_s`, where that holds."""
    isolate: Isolation = False
    """Call it in a process of its own, which is killed at the time limit. `process` is for functions that may hang or crash;
    `sandbox`, on Linux, for those that run generated code."""
    normalise: Normalising = "none"
    """Before the weight: divide scores by their running standard deviation, or take off their mean as well."""
    clip: tuple[float, float] | None = None
    """After `normalise`: hold every score between these two."""

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
    """Their weighted scores are added."""
    normalise: Normalising = "none"
    """Normalise the summed reward."""
    clip: tuple[float, float] | None = None
    """After `normalise`: hold the summed reward between these two."""
    on_error: Literal["stop", "skip"] = "stop"
    """A function that raises or times out: stop the run, or leave the group out and count it."""
    timeout_s: float | None = Field(default=60.0, gt=0)
    """Seconds that one call of a function of your own, or of an isolated one, may take."""
    concurrent_calls: int = Field(default=16, ge=1)
    """Calls of `async` functions that run side by side."""
    processes: int = Field(default=2, ge=1)
    """Processes for functions with `isolate`."""
