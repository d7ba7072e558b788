"""Every setting of a run, with what it does and when to change it. The docstring under a field is its documentation.

Defaults are the recipe that was tested. Nothing here imports torch, so a config can be checked in milliseconds.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from groupwise.config.advantage import ValueConfig
from groupwise.config.algorithm import AlgorithmConfig, CorrectionConfig, EntropyConfig, KLConfig
from groupwise.config.model import LoraConfig, ModelConfig
from groupwise.config.rewards import RewardFunctionConfig, RewardsConfig
from groupwise.config.section import Section
from groupwise.errors import ConfigError
from groupwise.importing import nearest

__all__ = [
    "AlgorithmConfig",
    "ArithmeticConfig",
    "Config",
    "CorrectionConfig",
    "DataConfig",
    "EntropyConfig",
    "EvaluationConfig",
    "KLConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "OutputConfig",
    "PromptConfig",
    "RewardFunctionConfig",
    "RewardsConfig",
    "RolloutConfig",
    "TrainingConfig",
    "ValueConfig",
    "VllmConfig",
    "WarmStartConfig",
]


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
    """`arithmetic` (built-in generator), a known name (`gsm8k`, `svamp`, `math500`, `aime24`, `aime25`, `amc23`, `polaris`), a
    JSONL/JSON/CSV/Parquet file, a `save_to_disk` folder, or a Hub name."""
    folder: str | None = None
    """Folder in which the data sets known by name are looked for before the Hub; `GROUPWISE_DATA` in the environment does the same."""
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


class VllmConfig(Section):
    """vLLM as the sampling engine (`rollout.engine: vllm`)."""

    url: str | None = None
    """A server's address, such as `http://127.0.0.1:8300`, started by `python -m groupwise.engines.vllm MODEL`. Null: vLLM in the
    trainer's own process."""
    shared_folder: str | None = None
    """A folder that trainer and server both see (the server's `--shared-folder`): weights go there in place of through the connection."""
    bucket_mib: int = Field(default=256, ge=1, le=2048)
    """Weights travel in parts of about so many MiB."""
    patience_s: float = Field(default=300.0, gt=0)
    """Seconds that a server may be away before the run ends. One that comes back in time is sent the weights again."""
    gpu_memory_share: float = Field(default=0.3, gt=0, lt=1)
    """Without `url`: vLLM's share of the GPU, weights included."""
    cache_gib: float | None = Field(default=None, gt=0)
    """Without `url`: memory for keys and values, in place of what the share leaves. Set it on CPUs."""
    eager: bool = False
    """Without `url`: no compilation and no CUDA graphs: up in seconds, and slower."""


ENGINES = ("auto", "builtin", "transformers", "vllm")


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
    engine: str = "auto"
    """`builtin`: continuous batching over the trained weights (Llama, Qwen2, Qwen3, Mistral, Gemma 3). `transformers`: any causal model by
    its own module. `auto` takes the built-in one where the architecture allows. `vllm`: another program, which is sent the weights after
    every update; `algorithm.correction` is then `{level: token}` unless it is set. Or an engine of your own, such as
    `my_engine.py:MyEngine` or `package.module:MyEngine`."""
    vllm: VllmConfig = VllmConfig()
    """Settings of `engine: vllm`."""
    refill_rounds: int = Field(default=0, ge=0)
    """Dynamic sampling (DAPO): replace groups without variance by those of further problems, at most this many times a step;
    `groups/sampled` counts them."""
    ahead: int = Field(default=0, ge=0)
    """Asynchronous rollouts: sample the batch of the step so many steps later while one is learnt from, with a copy of the weights for
    each; `algorithm.stale_samples` corrects for their age. It pays where sampling and learning use different hardware."""
    max_concurrent_sequences: int = Field(default=256, ge=1)
    """Sequences decoded at once: bounds the KV cache. The samples do not depend on it."""

    @field_validator("engine")
    @classmethod
    def check_engine(cls, engine: str) -> str:
        place, colon, name = engine.rpartition(":")
        if engine not in ENGINES and not (colon and place and name.isidentifier()):
            raise ValueError(
                f"{engine!r} is no engine{nearest(engine, ENGINES)}: use one of {', '.join(ENGINES)}, or name a class of your own, such as "
                "my_engine.py:MyEngine"
            )
        return engine

    @property
    def engine_is_yours(self) -> bool:
        """Whether the engine is named by import path."""
        return self.engine not in ENGINES

    @property
    def engine_reads_the_policy(self) -> bool:
        """Whether it is one of groupwise's own engines that compute with the policy's very weights."""
        return self.engine in ("auto", "builtin", "transformers")


class OptimizerConfig(Section):
    """AdamW, and the numbers it steps on."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak learning rate. 1e-6 to 5e-6 for 0.5B to 7B models; small models and short runs stand 1e-5 and more."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warmup: stay, or fall to `final_fraction` of the peak over the run's steps, those without an update included."""
    warmup_steps: int | float = Field(default=0, ge=0)
    """Optimiser steps over which the rate rises linearly from 0; below 1 a share of the run's, as in 0.1. A batch that has nothing to
    teach makes none."""
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
    precision: Literal["masters", "masters-8bit", "stochastic", "pure"] = "masters"
    """What the optimiser steps on where weights are not float32; bytes a weight with gradients. `masters`: fp32 copies and moments, 18.
    `masters-8bit`: 8-bit moments (package bitsandbytes), 12. `stochastic`: the bf16 weights, rounded stochastically, 10. `pure`: bf16
    throughout, 8; most updates at rates near 1e-6 are rounded away."""
    offload: bool = False
    """Keep masters, moments and fp32 gradients in the machine's memory and step there: 16 bytes a weight less on the GPU. Without
    effect on CPUs."""
    decay: Literal["all", "matrices"] = "all"
    """What `weight_decay` acts on; `matrices` spares norms and biases."""

    @field_validator("warmup_steps")
    @classmethod
    def count_whole_steps(cls, value: float) -> float:
        if value > 1 and value != int(value):
            raise ValueError("must be a number of steps, or below 1 a share of the run's")
        return value if value < 1 else int(value)


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
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the training problems, in place of `steps`, which are counted from them once the problems are read."""
    seed: int = 0
    """Seed of everything random in the run: problem order, sampling, warm start."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Most tokens in one forward and backward pass. Only memory and speed depend on it: the gradient does not."""
    sharding: Literal["auto", "none", "fsdp2", "zero2", "zero3"] = "auto"
    """With several processes: what is divided. `none`: nothing. `fsdp2` (PyTorch) and `zero3` (DeepSpeed): weights, reference, masters,
    moments, gradients; with `model.lora` the frozen weights. `zero2`: masters, moments, gradients. `auto` follows `accelerate launch`,
    else `none`."""
    process_timeout_s: float = Field(default=1800.0, gt=0)
    """With several processes: seconds that one waits for the others. More than the longest sampling of a step."""
    offload_reference: bool = False
    """Keep the reference in the machine's memory and bring it to the GPU for its pass of each step. Without effect on CPUs."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads. By default the cores of this process, less those that other programs keep busy, looked at twice a second."""
    deterministic: bool = False
    """The same bits in each run on the same machine: PyTorch's deterministic kernels on GPUs, slower, and a fixed number of threads on
    CPUs. An operation that has no such kernel ends the run with its name."""


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
    samples: int = Field(default=1, ge=1)
    """Completions per problem in the `sampled` mode. Above 1 there are also pass@k, majority@k and intervals clustered by problem."""
    shots: int = Field(default=0, ge=0)
    """Worked examples from the training problems that stand before each question, the same ones for all."""
    seed: int = 1234
    """Seed of sampled evaluation, the same at every stage so that stages are compared on equal terms."""


class OutputConfig(Section):
    """Where a run is written and what is kept."""

    folder: str | None = None
    """The run's folder; by default `runs/<recipe>-<date>-<time>`."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Write a checkpoint every so many steps; 0 writes only the final model."""
    checkpoint_in_background: bool = True
    """Sample the next batch while a thread writes the state; learning waits for it."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Older checkpoints beyond this many are removed."""
    adapter_only: bool = False
    """With `model.lora`: write the final model as the adapter alone. `groupwise merge` makes a whole model of it later."""
    keep_best: bool = False
    """Keep also the checkpoint with the highest strict accuracy, of those written at a step with an evaluation."""
    log_completions: int = Field(default=4, ge=0)
    """Groups per step whose completions and scores are written to `completions.jsonl`."""
    log_tokens: int = Field(default=1, ge=0)
    """Of these, groups whose tokens and log-probabilities are written too, for the report. About 13 bytes a token."""
    trackers: list[Literal["jsonl", "tensorboard", "wandb", "trackio"]] = Field(default=["jsonl"])
    """Where each step's numbers go besides the terminal and the run's own files (`jsonl`). The others are extras: `pip install
    'groupwise[wandb]'`."""
    project: str | None = Field(default=None, min_length=1)
    """The project that the run belongs to in wandb and trackio, where the run has its folder's name; by default the environment's
    WANDB_PROJECT for wandb, else `groupwise`."""
    offline: bool = False
    """Talk to no service: wandb writes into the run's folder, and `wandb sync` sends it later."""


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

    def __init__(self, **sections: Any) -> None:
        """Raises ConfigError, with the nearest name for a setting that does not exist."""
        try:
            super().__init__(**sections)
        except ValidationError as failure:
            from groupwise.config.problems import explain_failure

            raise ConfigError(explain_failure(failure)) from failure

    @model_validator(mode="after")
    def check_combinations(self) -> Config:
        if self.training.epochs is None and self.optimizer.warmup_steps > max(1, self.optimizer_steps):
            raise ValueError(
                f"optimizer.warmup_steps is {self.optimizer.warmup_steps}, but the run has only {self.optimizer_steps} optimiser "
                "steps (training.steps x algorithm.updates_per_batch): the peak rate would never be reached; lower it"
            )
        if self.model.dtype == "float16" and self.optimizer.precision in ("stochastic", "pure") and not self.model.lora:
            raise ValueError(
                f"optimizer.precision is {self.optimizer.precision}, but float16 weights cannot hold small updates: use "
                "optimizer.precision=masters, or model.dtype=bfloat16"
            )
        if self.optimizer.offload and self.optimizer.precision in ("stochastic", "pure"):
            raise ValueError(
                f"optimizer.offload keeps masters in the machine's memory, but with optimizer.precision={self.optimizer.precision} there "
                "are none: use optimizer.precision=masters or masters-8bit"
            )
        if self.model.dtype == "float16" and self.algorithm.needs_values:
            raise ValueError(
                "model.dtype is float16, whose loss is scaled, but algorithm.advantage.type is gae, which learns a value, whose loss is "
                "not: use bfloat16"
            )
        return self

    @model_validator(mode="after")
    def check_reference(self) -> Config:
        kl = self.algorithm.kl
        if kl is None:
            return self
        if kl.reference_every and self.model.lora:
            raise ValueError(
                f"algorithm.kl.reference_every is {kl.reference_every}, but with model.lora the reference is the model without its "
                "adapter, which cannot be renewed: leave reference_every out"
            )
        if kl.reference_updates > 1 and self.model.lora:
            raise ValueError(
                f"algorithm.kl.reference_updates is {kl.reference_updates}, but with model.lora the reference is the model without its "
                "adapter, which cannot be renewed: set reference_updates to 1"
            )
        if kl.reference_updates > max(1, self.training.steps):
            raise ValueError(
                f"algorithm.kl.reference_updates is {kl.reference_updates}, more than training.steps ({self.training.steps}): an outer "
                "iteration needs at least one step"
            )
        return self

    @model_validator(mode="after")
    def check_ahead(self) -> Config:
        ahead, algorithm = self.rollout.ahead, self.algorithm
        if ahead > 1 and self.rollout.engine == "vllm":
            raise ValueError(
                f"rollout.ahead is {ahead}, but vLLM holds one state of the weights (rollout.engine): set ahead to 1, or engine to auto"
            )
        if ahead and algorithm.stale_samples == "behaviour" and algorithm.loss.type == "reinforce":
            raise ValueError(
                f"rollout.ahead is {ahead} and algorithm.stale_samples is behaviour, but algorithm.loss.type is reinforce, which has no "
                "ratio to the sampler: set stale_samples to decoupled, or loss.type to clip"
            )
        return self

    @property
    def clips_against_the_sampler(self) -> bool:
        """Whether the ratio is to the sampler's log-probabilities, rather than to those of the weights before a batch's first update."""
        return self.rollout.ahead > 0 and self.algorithm.stale_samples == "behaviour"

    @property
    def samples_are_the_policys(self) -> bool:
        """Whether the sampler's log-probabilities are the policy's own, up to rounding: the same weights, and nothing cut off."""
        rollout = self.rollout
        return rollout.engine_reads_the_policy and rollout.ahead == 0 and rollout.top_k is None and rollout.top_p >= 1

    @property
    def correction_level(self) -> str:
        """What is weighted by pi_old / pi_sampler: ``token``, ``sequence`` or ``none``. Stale samples are, unless the config objects."""
        chosen = "none" if self.algorithm.correction is None else self.algorithm.correction.level
        if self.rollout.ahead == 0 or self.algorithm.stale_samples == "uncorrected":
            return chosen
        if self.algorithm.stale_samples == "behaviour":
            return "none"
        return "token" if chosen == "none" else chosen

    @model_validator(mode="after")
    def follow_engine(self) -> Config:
        """Another program's numbers are corrected for, unless something else was said; written past validation, as not set."""
        if "correction" not in self.algorithm.model_fields_set:
            correction = None if self.rollout.engine_reads_the_policy else CorrectionConfig()
            self.__dict__["algorithm"] = self.algorithm.model_copy(update={"correction": correction})
            self.algorithm.model_fields_set.discard("correction")
        return self

    @property
    def completions_per_step(self) -> int:
        """The whole batch: prompts x G, over all processes."""
        return self.rollout.prompts_per_step * self.rollout.completions_per_prompt

    @property
    def optimizer_steps(self) -> int:
        return self.training.steps * self.algorithm.updates_per_batch
