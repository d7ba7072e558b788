"""Every setting of a run, with what it does and when to change it. The docstring under a field is its documentation.

Defaults are the recipe that was tested. Nothing here imports torch, so a config can be checked in milliseconds.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from groupwise.config.presets import PRESETS

__all__ = [
    "AlgorithmConfig",
    "ArithmeticConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OutputConfig",
    "PromptConfig",
    "RewardFunctionConfig",
    "RewardsConfig",
    "RolloutConfig",
    "TrainingConfig",
    "WarmStartConfig",
]


PresetName = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo", "reinforce++", "bnpo"]


class Section(BaseModel):
    """Common rules: unknown keys are refused, field docstrings are descriptions, values are checked on assignment too."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, validate_assignment=True)


class ModelConfig(Section):
    """Which policy is trained, and in which numbers."""

    name: str = "smollm2-135m-instruct"
    """The built-in `smollm2-135m-instruct`, a model folder, or a Hub name such as `Qwen/Qwen2.5-1.5B-Instruct`."""
    revision: str | None = None
    """Branch, tag or commit on the Hub; set it to make a run repeatable."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Numbers of the weights that sample and compute. bfloat16 is 2 to 5 times faster; master weights stay fp32 either way."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention kernels. `auto` takes the fastest that is installed and exact here."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: about a third more compute for far less memory. Sampling keeps its KV cache."""
    device: str = "auto"
    """`auto` (CUDA if there is one), `cpu`, `cuda` or `cuda:1`."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. Only for sources you trust."""


class ArithmeticConfig(Section):
    """The built-in generator of arithmetic word problems (`data.source: arithmetic`)."""

    largest_number: int = Field(default=50, ge=3, le=100_000)
    """Upper end of the numbers that appear in a problem: larger is harder."""
    operations: list[Literal["+", "-", "x"]] = Field(default=["+", "-", "x"], min_length=1)
    """Which operations problems are made of. Small models add better than they multiply, and subtract worst."""
    steps: int = Field(default=2, ge=1, le=4)
    """Operations that an answer takes: more is harder."""
    problems: int = Field(default=20_000, ge=1)
    """How many different training problems are generated."""


class DataConfig(Section):
    """Problems to learn from, and held-out problems to be judged by."""

    source: str = "arithmetic"
    """`arithmetic` (built-in generator), `gsm8k`, `polaris`, a JSONL/JSON/CSV/Parquet file, a `save_to_disk` folder, or a Hub name."""
    subset: str | None = None
    """The Hub data set's configuration, such as `main` for GSM8K."""
    split: str = "train"
    """Split of `source` that is trained on."""
    prompt_column: str | None = None
    """Column with the question; found among the usual names when not set."""
    answer_column: str | None = None
    """Column with the reference answer; found among the usual names when not set."""
    answer_format: Literal["auto", "gsm8k", "boxed", "xml", "plain"] = "auto"
    """How the reference answer stands in its column: after `####`, in `\\boxed{}`, in `<answer>`, or alone. `auto` looks."""
    limit: int | None = Field(default=None, ge=1)
    """Keep only this many training problems: for trying things small."""
    shuffle: bool = True
    """Visit problems in a new seeded order each epoch; off keeps the file's order."""
    eval_source: str | None = None
    """Where held-out problems come from; the training source when not set."""
    eval_split: str | None = None
    """Split of the held-out source. When neither this nor `eval_source` is set, `holdout` rows are kept out of training."""
    holdout: int = Field(default=200, ge=0)
    """Rows of `source` kept out of training for evaluation when no evaluation split is named."""
    split_seed: int = 0
    """Seed of that split. It is not the run's seed, so that runs with different seeds are judged by the same problems."""
    on_bad_answer: Literal["error", "drop"] = "error"
    """A row whose reference answer cannot be extracted: stop and name it, or drop it with a counted warning."""
    on_long_prompt: Literal["error", "drop"] = "error"
    """A prompt longer than `max_prompt_tokens` or than the context allows: stop and name it, or drop it with a counted warning."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest rendered prompt, in tokens; by default whatever the model's context leaves beside the completion."""
    arithmetic: ArithmeticConfig = ArithmeticConfig()
    """Settings of the built-in generator."""


class PromptConfig(Section):
    """How a question becomes the text that the policy continues."""

    style: Literal["chat", "plain", "concat"] = "chat"
    """`chat`: the model's own chat template. `plain`: `User: ...\\nAssistant: `. `concat`: system prompt and question, joined."""
    system: str = "auto"
    """`auto` (by data set), `xml` (<reasoning>/<answer>), `boxed` (\\boxed{}), `none`, or the text of a system prompt."""


class RewardFunctionConfig(Section):
    """One reward function and its weight."""

    function: str
    """A built-in name, `path/to/file.py:function`, or an import path `package.module:function`."""
    weight: float = 1.0
    """Factor in the sum that becomes the completion's reward."""
    arguments: dict[str, Any] = {}
    """Keyword arguments passed to the function at every call."""


class RewardsConfig(Section):
    """How completions are scored."""

    functions: list[RewardFunctionConfig] = Field(
        default=[RewardFunctionConfig(function="correctness"), RewardFunctionConfig(function="format")], min_length=1
    )
    """Scores are multiplied by their weights and added; each is also logged by itself."""
    on_error: Literal["stop", "skip"] = "stop"
    """A function that raises or times out: stop the run, or leave the group out of the update and count it. It is never scored 0."""
    timeout_s: float | None = Field(default=60.0, gt=0)
    """Seconds that one call of one reward function may take."""


class RolloutConfig(Section):
    """How completions are sampled from the policy."""

    prompts_per_step: int = Field(default=8, ge=1)
    """Problems per step, over all processes together."""
    completions_per_prompt: int = Field(default=8, ge=2)
    """G, the size of a group. At least 2, since a completion is judged against the others of its group."""
    max_completion_tokens: int = Field(default=256, ge=1)
    """Longest completion, in tokens; one that reaches it is cut and counted as truncated."""
    temperature: float = Field(default=1.0, gt=0)
    """Softmax temperature of sampling, and of the log-probabilities that are trained. 1 is the policy itself."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample among the k likeliest tokens only. Off by default: then the distribution sampled is exactly the one scored."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. 1 by default: then the distribution sampled is exactly the one scored."""
    engine: Literal["auto", "builtin", "transformers"] = "auto"
    """`builtin`: continuous batching over the trained weights (Llama, Qwen2, Qwen3). `transformers`: any causal model by its own
    module. `auto` takes the built-in one where the architecture allows."""
    max_concurrent_sequences: int = Field(default=256, ge=1)
    """Sequences decoded at once: bounds the KV cache. The samples do not depend on it."""


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
    also spares them the KL pull, which saves their compute. Turn it off for eq. 3 to the letter."""
    updates_per_batch: int = Field(default=1, ge=1)
    """mu: optimiser steps on each batch of completions. Above 1 the later ones are off-policy, and clipping begins to act."""
    reference_updates: int = Field(default=1, ge=1)
    """I: outer iterations. The run is divided into this many; at the start of each the reference becomes the current policy."""
    advantage_epsilon: float = Field(default=1e-4, gt=0)
    """Added to the standard deviation before dividing by it, whichever `scale` names."""
    baseline: Literal["group_mean", "leave_one_out", "batch_mean", "none"] = "group_mean"
    """What a completion's reward is compared with: its group's mean, the mean of the others in its group (unbiased), the mean of
    the whole batch, or nothing."""
    scale: Literal["group_std", "batch_std", "none"] = "group_std"
    """What the difference is divided by. `group_std` lets an almost solved problem weigh as much as a hard one; `none` keeps the
    reward's own units; `batch_std` is in between and steadier with few completions per prompt."""
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

    @model_validator(mode="after")
    def follow_preset(self) -> AlgorithmConfig:
        """Fields that were not set follow the preset; written past validation, so that they still count as not set."""
        values = PRESETS[self.preset].values
        for name, info in type(self).model_fields.items():
            if name not in self.model_fields_set:
                self.__dict__[name] = values.get(name, info.default)
        return self

    @model_validator(mode="after")
    def check_surrogate(self) -> AlgorithmConfig:
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


class OptimizerConfig(Section):
    """AdamW with fp32 master weights."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate. 1e-6 to 5e-6 for 0.5B to 7B models; small models and short runs stand 1e-5 and more."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warmup: stay, or fall to `final_fraction` of the peak over the run."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimiser steps over which the rate rises linearly from 0."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Where `linear` and `cosine` end, as a share of the peak."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's averaging of gradient and squared gradient."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's denominator term."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global norm; null switches clipping off."""
    master_weights: bool = True
    """Keep fp32 copies of bf16 weights in the optimiser. Without them most updates at rates near 1e-6 are rounded away."""


class WarmStartConfig(Section):
    """A few supervised steps on worked examples before GRPO: for small models that do not know the answer format yet."""

    steps: int = Field(default=0, ge=0)
    """Supervised steps; 0 skips the warm start."""
    examples_per_step: int = Field(default=16, ge=1)
    """Worked examples in each supervised step."""
    learning_rate: float = Field(default=2e-5, gt=0)
    """Learning rate of the warm start, with its own optimiser state."""


class TrainingConfig(Section):
    """Length, seeds, and how the batch is cut for the machine."""

    steps: int = Field(default=100, ge=0)
    """Batches of completions that are sampled and learnt from."""
    seed: int = 0
    """Seed of everything random in the run: problem order, sampling, warm start."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Most tokens in one forward and backward pass. Only memory and speed depend on it: the gradient does not."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; by default as many as there are cores for this process."""


class EvaluationConfig(Section):
    """Judging the policy on held-out problems, before, during and after training."""

    problems: int | None = Field(default=200, ge=1)
    """How many held-out problems; null takes all of them."""
    modes: list[Literal["sampled", "greedy"]] = Field(default=["sampled", "greedy"], min_length=1)
    """`sampled` draws at `temperature`, `greedy` takes the likeliest token; the first is the headline figure."""
    temperature: float = Field(default=1.0, gt=0)
    """Temperature of the `sampled` mode."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Token limit in evaluation; by default the rollout's."""
    every: int = Field(default=0, ge=0)
    """Evaluate every so many steps, besides before and after; 0 only before and after."""
    at_start: bool = True
    """Evaluate the untrained model (and the warm-started one)."""
    show: int = Field(default=2, ge=0)
    """Examples printed in the terminal after each evaluation; all are in the run's folder."""
    seed: int = 1234
    """Seed of sampled evaluation, the same at every stage so that stages are compared on equal terms."""


class OutputConfig(Section):
    """Where a run is written and what is kept."""

    folder: str | None = None
    """The run's folder; by default `runs/<recipe>-<date>-<time>`."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Write a checkpoint every so many steps; 0 writes only the final model."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Older checkpoints beyond this many are removed."""
    log_completions: int = Field(default=4, ge=0)
    """Groups per step whose completions and scores are written to `completions.jsonl`."""


class Config(Section):
    """One run, whole. Sections are in the order in which things happen."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    prompt: PromptConfig = PromptConfig()
    rewards: RewardsConfig = RewardsConfig()
    rollout: RolloutConfig = RolloutConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    warm_start: WarmStartConfig = WarmStartConfig()
    training: TrainingConfig = TrainingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    output: OutputConfig = OutputConfig()

    @model_validator(mode="after")
    def check_combinations(self) -> Config:
        if self.optimizer.warmup_steps > max(1, self.optimizer_steps):
            raise ValueError(
                f"optimizer.warmup_steps is {self.optimizer.warmup_steps}, but the run has only {self.optimizer_steps} optimiser "
                "steps (training.steps x algorithm.updates_per_batch): the peak rate would never be reached; lower it"
            )
        if self.algorithm.reference_updates > max(1, self.training.steps):
            raise ValueError(
                f"algorithm.reference_updates is {self.algorithm.reference_updates}, more than training.steps "
                f"({self.training.steps}): an outer iteration needs at least one step"
            )
        return self

    @property
    def completions_per_step(self) -> int:
        """The whole batch: prompts x G, over all processes."""
        return self.rollout.prompts_per_step * self.rollout.completions_per_prompt

    @property
    def optimizer_steps(self) -> int:
        return self.training.steps * self.algorithm.updates_per_batch
