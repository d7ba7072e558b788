"""Every setting of a run, with what it does and when to change it. The docstring under a field is its documentation.

Defaults are the recipe that was tested. Nothing here imports torch, so a config can be checked in milliseconds.
"""

from __future__ import annotations

import re
import shlex
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from groupwise.config.algorithm import AlgorithmConfig, CorrectionConfig, EntropyConfig, KLConfig
from groupwise.config.inert import INERT, without_effect
from groupwise.config.objective import ValueConfig
from groupwise.config.rewards import RewardFunctionConfig, RewardsConfig
from groupwise.config.section import Section, explained
from groupwise.importing import nearest
from groupwise.limits import VLLM_COLDEST, VLLM_HOTTEST

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


class LoraConfig(Section):
    """A low-rank adapter (arXiv 2106.09685), trained in place of the model's own weights. Needs the package peft."""

    rank: int = Field(default=16, ge=1)
    """Rank of the two factors. 1 to 32 carry what rewards teach."""
    alpha: int = Field(default=32, ge=1)
    """The adapter is scaled by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapter, in learning only. It is slower: leave it at 0 for GRPO."""
    target_modules: str | list[str] = "all-linear"
    """`all-linear`, names such as `[q_proj, v_proj]`, or a regular expression over full names."""

    @field_validator("target_modules")
    @classmethod
    def check_expression(cls, value: str | list[str]) -> str | list[str]:
        if not value:
            raise ValueError("names no projection: leave it out, or name some")
        try:
            re.compile(value if isinstance(value, str) else "")
        except re.error as error:
            raise ValueError(f"must be all-linear, names, or a regular expression ({error})") from None
        return value


class ModelConfig(Section):
    """Which policy is trained, and in which numbers."""

    name: str = "smollm2-135m-instruct"
    """The built-in `smollm2-135m-instruct`, a model folder, or a Hub name such as `Qwen/Qwen2.5-1.5B-Instruct`."""
    revision: str | None = None
    """Branch, tag or commit on the Hub. Folders and `smollm2-135m-instruct` have none."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Numbers of the weights that sample and compute. `auto` is bfloat16, but float32 on a CPU without instructions for it.
    float16, with a scaled loss, is for GPUs without bfloat16."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention kernels; `auto` takes the fastest exact one. `eager` and `flash_attention_2` (package flash-attn) act only in
    models computed by their own module."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: a third more compute, far less memory."""
    device: str = "auto"
    """`auto` (CUDA if there is one), `cpu`, `cuda` or `cuda:1`."""
    device_map: Literal["auto"] | None = None
    """For `eval`, `generate` and `serve`: lay the layers over all GPUs, the machine's memory and the disk (package accelerate)."""
    max_memory: dict[int | str, str] | None = None
    """The most that `device_map` lays on each device, such as `{0: 20GiB, cpu: 60GiB}`."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model or, for `eval` and `generate`, that a run's settings name: tools, environment, data
    function. The command alone can grant it, no file."""
    quantization: Literal["none", "4bit", "8bit"] = "none"
    """Bits of the frozen projections: 0.52 bytes a weight (QLoRA), or one. Needs `lora` and the package bitsandbytes. Not for
    mixtures of experts with transformers 5."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter, such as `{rank: 16, alpha: 32}`, at about ten times the learning rate (Schulman et al., "LoRA
    Without Regret", 2025). Null trains all weights."""

    @field_validator("max_memory")
    @classmethod
    def number_devices(cls, value: dict[int | str, str] | None) -> dict[int | str, str] | None:
        """A run's written settings have every key as text; a device is a number all the same."""
        if value is None:
            return None
        if not value:
            raise ValueError("no device is named, so nothing would be limited: leave it out")
        numbered = {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in value.items()}
        for device, size in numbered.items():
            if device not in ("cpu", "disk") and not (isinstance(device, int) and device >= 0):
                raise ValueError(f"{device!r} is no device: write a GPU's number, cpu or disk")
            if re.fullmatch(r"\d+(\.\d+)? ?[KMG]i?B", size) is None:  # accelerate takes a small b for bits
                raise ValueError(f"{size!r} for {device} is no size: write one such as 20GiB")
        return numbered


class ArithmeticConfig(Section):
    """The built-in generator of arithmetic word problems (`data.source: arithmetic`)."""

    largest_number: int = Field(default=50, ge=3, le=100_000)
    """Largest number in a problem."""
    operations: list[Literal["+", "-", "x"]] = Field(default=["+", "-", "x"], min_length=1)
    """Operations of problems. Small models add best and subtract worst."""
    largest_factor: int = Field(default=5, ge=2, le=100_000)
    """Largest factor of x after a problem's first number."""
    steps: int = Field(default=2, ge=1, le=4)
    """Operations that an answer takes."""
    problems: int = Field(default=20_000, ge=1)
    """Training problems that are generated. All differ, so a long list has fewer of the operations that have fewer questions."""


class DataConfig(Section):
    """Problems to learn from, and held-out problems to be judged by."""

    _found_style: Literal["xml", "boxed"] | None = PrivateAttr(default=None)
    """Of a run that is asked: what it found `source` to have its answers in. The data may lie elsewhere by now."""
    source: str = "arithmetic"
    """`arithmetic` (built-in generator), a known name such as `gsm8k`, a file (JSONL, JSON, CSV, Parquet), a `save_to_disk`
    folder, a Hub name, or a Python function that returns rows, `my_rows.py:rows`."""
    folder: str | None = None
    """Folder of data sets known by name, read before the Hub; or `GROUPWISE_DATA` in the environment."""
    subset: str | None = None
    """The Hub data set's configuration, such as `main` for GSM8K."""
    split: str = "train"
    """Split of `source` that is trained on."""
    prompt_column: str | None = None
    """Column with the question; null looks for the usual names."""
    answer_column: str | None = None
    """Column with the reference answer; null looks for the usual names."""
    answer_format: Literal["auto", "gsm8k", "boxed", "xml", "plain"] = "auto"
    """Where the reference answer stands: after `####`, in `\\boxed{}`, in `<answer>`, or alone. `auto` looks."""
    limit: int | None = Field(default=None, ge=1)
    """Keep only this many training problems."""
    shuffle: bool = True
    """A new seeded order each epoch; off keeps the file's."""
    eval_source: str | None = None
    """Source of held-out problems; null takes `source`."""
    eval_split: str | None = None
    """Split of the held-out source. `holdout` acts with neither this nor `eval_source`, or with the generator."""
    holdout: int = Field(default=200, ge=0)
    """Rows of `source` kept out of training for evaluation."""
    split_seed: int = 0
    """Seed of that split: runs with other seeds are judged by the same problems."""
    on_bad_answer: Literal["error", "drop"] = "error"
    """A row without a readable reference answer: stop and name it, or drop and count it."""
    on_long_prompt: Literal["error", "drop"] = "error"
    """A prompt too long for `max_prompt_tokens` or the context: stop and name it, or drop and count it."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """Longest prompt, in tokens; null takes what the context leaves beside the completion."""
    arithmetic: ArithmeticConfig = ArithmeticConfig()
    """Settings of the built-in generator."""

    @property
    def generates_held_out(self) -> bool:
        """Whether the generator makes the held-out problems, ``holdout`` of them."""
        return (self.eval_source or self.source) == "arithmetic"

    @property
    def holds_out(self) -> bool:
        """Whether ``holdout`` says how many problems are held out, unless ``source`` is a prepared folder, which has its own."""
        return self.generates_held_out or (self.eval_source is None and self.eval_split is None)


class PromptConfig(Section):
    """How a question becomes the text that the policy continues."""

    style: Literal["chat", "plain", "concat"] = "chat"
    """`chat`: the model's own chat template. `plain`: `User: ...\\nAssistant: `. `concat`: system prompt and question, stripped,
    joined by a line break."""
    system: str = "auto"
    """`auto` (by data set), `xml` (<reasoning>/<answer>), `boxed` (\\boxed{}), `none`, or the text of a system prompt."""
    template_arguments: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of the chat template, such as `{enable_thinking: false}` for Qwen3, which then answers without its thoughts."""

    @field_validator("system")
    @classmethod
    def check_backslashes(cls, value: str) -> str:
        """In double quotes YAML and Python read the beginning of a LaTeX command as a control character. "\\n" and "\\t" may be meant."""
        if lost := re.search(r"([\a\b\f\r\v\x1b])([A-Za-z]+)", value):
            written = "\\" + "abfrve"["\a\b\f\r\v\x1b".index(lost[1])] + lost[2]
            raise ValueError(
                f"{lost[0]!r} is what {written} becomes in double quotes: put the text in single quotes, in Python in r'...'"
            )
        return value

    @field_validator("template_arguments")
    @classmethod
    def check_arguments(cls, value: dict[str, Any]) -> dict[str, Any]:
        if taken := sorted({"messages", "tools", "tokenize", "add_generation_prompt"} & value.keys()):
            raise ValueError(f"names {', '.join(taken)}, which the program itself gives the template: leave it out")
        return value


class VllmConfig(Section):
    """vLLM as the sampling engine (`rollout.engine: vllm`)."""

    url: str | None = None
    """A server's address, such as `http://127.0.0.1:8300`. Null: vLLM in the trainer's own process."""
    shared_folder: str | None = None
    """A folder that trainer and server both see (the server's `--shared-folder`), for the weights."""
    bucket_mib: int = Field(default=256, ge=1, le=2048)
    """Size of the parts in which weights travel."""
    patience_s: float = Field(default=300.0, gt=0)
    """Seconds that a server may be away before the run ends."""
    gpu_memory_share: float = Field(default=0.3, gt=0, lt=1)
    """Without `url`: vLLM's share of the GPU, weights included."""
    cache_gib: float | None = Field(default=None, gt=0)
    """Without `url`: memory for keys and values. Set it on CPUs."""
    max_model_tokens: int | None = Field(default=None, ge=2)
    """Without `url`: tokens of the longest prompt and completion together. vLLM needs room for one so long. Null: the model's context."""
    eager: bool = False
    """Without `url`: no compilation; up in seconds, and slower."""
    sleep_mode: bool = True
    """Without `url`, on a GPU: vLLM hands its memory back while the policy learns (not with `ahead`). `false` where a model comes out of
    vLLM's sleep mode damaged, which ends the run after a push."""


ENGINES = ("auto", "builtin", "transformers", "vllm")


class RolloutConfig(Section):
    """How completions are sampled from the policy."""

    prompts_per_step: int = Field(default=8, ge=1)
    """Problems per step, over all processes together."""
    completions_per_prompt: int = Field(default=8, ge=2)
    """G, the size of a group. At least 2, since a completion is judged against the others of its group."""
    max_completion_tokens: int = Field(default=256, ge=1)
    """Longest completion, in tokens; one that reaches it is cut."""
    temperature: float = Field(default=1.0, ge=1e-6)
    """Temperature of sampling, and of the log-probabilities that are trained."""
    top_k: int | None = Field(default=None, ge=1)
    """Sample among the k likeliest tokens only. Null samples the distribution that is scored."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling. 1 samples the distribution that is scored."""
    engine: str = "auto"
    """`builtin`: continuous batching over the trained weights (Llama, Qwen2, Qwen3, Mistral, Gemma 3). `transformers`: any
    causal model by its own module. `auto`: the built-in one where the architecture allows. `vllm`: another program, which is
    sent the weights. Or your own: `my_engine.py:MyEngine`."""
    vllm: VllmConfig = VllmConfig()
    """Settings of `engine: vllm`."""
    refill_rounds: int = Field(default=0, ge=0)
    """Dynamic sampling (DAPO): replace groups without variance, at most this many times a step."""
    ahead: int = Field(default=0, ge=0)
    """Sample so many steps ahead while one is learnt from, with a copy of the weights for each."""
    max_concurrent_sequences: int = Field(default=256, ge=1)
    """Sequences decoded at once. It bounds the KV cache; samples change by rounding alone."""
    quantization: Literal["none", "8bit"] = "none"
    """`8bit`: sample with weights rounded to 8 bits, by the built-in engine on CPUs. Tokens come 1.1 to 2.8 times as fast (in
    bfloat16 where the processor has AMX or AVX512-BF16, in float32 with AVX2 or VNNI), from a policy that differs a little, for
    which `algorithm.correction` weighs them. Learning and evaluation keep the weights as they are. Not on a base of
    `model.quantization=8bit`."""
    tools: list[str] = Field(default=[])
    """What the policy may call in the middle of a completion: `calculator`, `python` (in a sandbox), or typed functions of your own,
    `my_tools.py:search`. Their results count in `max_completion_tokens` and are not trained."""
    environment: str | dict[str, str] | None = None
    """A class whose instances play an episode each, as in TRL: `my_game.py:Guess`. Several by name, which a problem's column
    `environment` chooses from: `{guess: my_game.py:Guess}`. Or a program that asks for each turn at a base URL, as agents do:
    `{command: python my_agent.py}`. `rewards.functions` has `environment` for what it gives."""
    max_turns: int = Field(default=4, ge=2)
    """With `tools` or an `environment`: turns of the policy, the answer included."""
    call_format: Literal["auto", "tags", "hermes", "llama3", "json"] = "auto"
    """How calls are written. `hermes`: JSON in `<tool_call>` (Qwen). `llama3`: bare JSON. `json`: one object as the whole turn, bare or
    fenced (Qwen2.5-Coder). `tags`: `<call>name(arguments)</call>`. `auto` follows the chat template, and is never `json`."""
    tool_timeout_s: float = Field(default=10.0, gt=0)
    """Seconds that a call may take; then the policy is told so. An environment's step that takes longer ends the episode, and so does an
    agent that neither asks nor ends."""
    concurrent_tool_calls: int = Field(default=16, ge=1)
    """Episodes in which calls are made side by side."""
    rewritten_history: Literal["refuse", "append", "fork"] = "refuse"
    """For chat templates that rewrite earlier turns, such as dropping their thinking. `refuse`: stop at the start. `append`: the policy
    sees its turns as it sampled them. `fork`: it goes on from the history as the template writes it, which counts in
    `max_completion_tokens`; the parts of the episode are samples of their own, with one advantage. Take it too where an agent's command
    shortens its history."""

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

    @model_validator(mode="after")
    def check_quantization(self) -> RolloutConfig:
        if self.quantization != "none" and self.engine not in ("auto", "builtin"):
            raise ValueError(
                f"quantization is {self.quantization}, but engine is {self.engine}, and the built-in engine alone samples with weights "
                "of 8 bits: leave quantization out, or set engine to auto"
            )
        return self

    @model_validator(mode="after")
    def check_tools(self) -> RolloutConfig:
        inert = ("max_turns", "call_format", "tool_timeout_s", "concurrent_tool_calls", "rewritten_history")
        for name in () if self.has_episodes else inert:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but without tools and environment it would do nothing: set one of them, or leave "
                    "it out"
                )
        return self

    @model_validator(mode="after")
    def check_command(self) -> RolloutConfig:
        if not isinstance(self.environment, dict) or "command" not in self.environment:
            return self
        if len(self.environment) > 1:
            raise ValueError(
                "environment has a command and other names, but an agent's command plays all problems: keep one of them"
            )
        if self.tools:
            raise ValueError("an agent brings its own tools with its requests: leave tools out, or environment's command")
        if not self.command:
            raise ValueError("environment's command is empty: give one, such as python my_agent.py")
        return self

    @property
    def command(self) -> list[str] | None:
        """The words of the agent's command; None where no agent plays. Raises ValueError for quotes that do not end."""
        if not isinstance(self.environment, dict) or "command" not in self.environment:
            return None
        return shlex.split(self.environment["command"])

    @property
    def engine_is_external(self) -> bool:
        """Whether vLLM or an engine of one's own samples: what needs further code, and may open this process's memory."""
        return self.engine == "vllm" or ":" in self.engine

    @property
    def has_episodes(self) -> bool:
        """Whether completions have several turns."""
        return bool(self.tools) or self.environment is not None

    @property
    def engine_is_yours(self) -> bool:
        """Whether the engine is named by import path."""
        return self.engine not in ENGINES

    @property
    def engine_reads_the_policy(self) -> bool:
        """Whether it is one of groupwise's own engines, and computes with the policy's very weights."""
        return self.engine in ("auto", "builtin", "transformers") and self.quantization == "none"


class OptimizerConfig(Section):
    """AdamW, and the numbers it steps on."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Peak rate: 1e-6 to 5e-6 for 0.5B to 7B models; small models stand 1e-5 and more."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warmup: stay, or fall to `final_fraction` of the peak by the run's end."""
    warmup_steps: int | float = Field(default=0, ge=0)
    """Optimiser steps over which the rate rises linearly from 0; below 1 a share of the run's, as in 0.1."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """Where `linear` and `cosine` end, as a share of the peak."""
    betas: tuple[float, float] = (0.9, 0.99)
    """AdamW's averages of gradient and squared gradient."""
    epsilon: float = Field(default=1e-8, gt=0)
    """AdamW's denominator term."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Largest global norm of the gradient; null switches clipping off."""
    precision: Literal["masters", "masters-8bit", "stochastic", "pure"] = "masters"
    """What the optimiser steps on where weights are not float32, with bytes a weight. `masters`: fp32 copies and moments, 18; weights
    are rounded from them so that on average nothing is lost. `masters-8bit`: the same with 8-bit moments (package bitsandbytes),
    12. `stochastic`: bf16 weights, rounded stochastically, 10. `pure`: bf16, 8; loses most updates at rates near 1e-6."""
    offload: bool = False
    """Keep masters, moments and fp32 gradients in the machine's memory: 16 bytes a weight less on the GPU."""
    decay: Literal["all", "matrices"] = "all"
    """What `weight_decay` acts on: `matrices` spares norms and biases."""

    @field_validator("betas")
    @classmethod
    def check_averages(cls, value: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in value):
            raise ValueError("must be two numbers of 0 and more and below 1")
        return value

    @field_validator("warmup_steps")
    @classmethod
    def count_whole_steps(cls, value: float) -> float:
        if value > 1 and value != int(value):
            raise ValueError("must be a number of steps, or below 1 a share of the run's")
        return value if value < 1 else int(value)


class WarmStartConfig(Section):
    """Supervised steps on worked examples before GRPO, for models that do not know the answer format yet."""

    steps: int = Field(default=0, ge=0)
    """Supervised steps."""
    examples_per_step: int = Field(default=16, ge=1)
    """Worked examples in each step."""
    learning_rate: float = Field(default=2e-5, gt=0)
    """Learning rate of the warm start."""


class TrainingConfig(Section):
    """Length, seeds, and how the batch is cut for the machine."""

    steps: int = Field(default=100, ge=0)
    """Batches that are sampled and learnt from."""
    epochs: float | None = Field(default=None, gt=0)
    """Passes over the training problems, in place of `steps`, which are counted from them."""
    seed: int = 0
    """Seed of all that is random in the run."""
    micro_batch_tokens: int = Field(default=8192, ge=1)
    """Most tokens in one pass. Memory and speed depend on it, the gradient but for rounding does not."""
    sharding: Literal["auto", "none", "fsdp2", "zero2", "zero3"] = "auto"
    """What several processes divide. `fsdp2` (PyTorch) and `zero3` (DeepSpeed): weights, reference and optimiser state.
    `zero2`: the last alone. `auto` follows `accelerate launch`, else `none`."""
    process_timeout_s: float = Field(default=1800.0, gt=0)
    """Seconds that a process waits for the others: more than the longest sampling of a step, and than writing a checkpoint."""
    offload_reference: bool = False
    """Keep the reference in the machine's memory and bring it to the GPU for its pass."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads. Null takes the cores that other programs leave free; a fixed number repeats a float32 run bit for bit."""
    deterministic: bool = False
    """The same bits in each run on the same machine, by slower kernels on GPUs and a fixed number of threads on CPUs. Tools are awaited,
    however slow they are."""


class EvaluationConfig(Section):
    """Judging the policy on held-out problems, before, during and after training."""

    problems: int | None = Field(default=200, ge=1)
    """Held-out problems; null takes all."""
    modes: list[Literal["sampled", "greedy"]] = Field(default=["sampled", "greedy"], min_length=1)
    """`sampled` draws, `greedy` takes the likeliest token; the first is the headline figure."""
    temperature: float = Field(default=1.0, ge=1e-6)
    """Temperature of the `sampled` mode."""
    max_completion_tokens: int | None = Field(default=None, ge=1)
    """Token limit; null takes the rollout's."""
    every: int = Field(default=0, ge=0)
    """Evaluate every so many steps too; 0 only before and after."""
    at_start: bool = True
    """Evaluate the untrained and the warm-started model."""
    show: int = Field(default=2, ge=0)
    """Examples printed after each evaluation."""
    samples: int = Field(default=1, ge=1)
    """Completions per problem in the `sampled` mode; above 1 also pass@k and majority@k."""
    shots: int = Field(default=0, ge=0)
    """Worked examples before each question, the same for all."""
    seed: int = 1234
    """Seed of sampled evaluation, the same at every stage."""


class OutputConfig(Section):
    """Where a run is written and what is kept."""

    folder: str | None = None
    """The run's folder; by default `runs/<recipe>-<date>-<time>`."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 writes only the final model."""
    checkpoint_in_background: bool = True
    """Sample the next batch while a thread writes; on GPUs, learn from it too."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Checkpoints kept."""
    adapter_only: bool = False
    """With `model.lora`: write the adapter alone, for `groupwise merge`."""
    keep_best: bool = False
    """Keep also the checkpoint with the highest strict accuracy (where an environment judges, its success rate), of those at a step with an
    evaluation."""
    log_completions: int = Field(default=4, ge=0)
    """Groups per step in `completions.jsonl`."""
    log_tokens: int = Field(default=1, ge=0)
    """How many of these groups have tokens and log-probabilities too, for the report. About 13 bytes a token."""
    trackers: list[Literal["jsonl", "tensorboard", "wandb", "trackio"]] = Field(default=["jsonl"])
    """Where numbers go besides the terminal and the run's folder (`jsonl`). Extras: `pip install 'groupwise[wandb]'`."""
    project: str | None = Field(default=None, min_length=1)
    """The run's project in wandb and trackio; by default the environment's WANDB_PROJECT for wandb, else `groupwise`."""
    offline: bool = False
    """wandb writes into the run's folder, for `wandb sync`."""


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
            raise explained(failure) from failure

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
                f"model.dtype is float16, whose loss is scaled, but algorithm.advantage.type is {self.algorithm.advantage.type}, with a "
                "learned value, whose loss is not: use bfloat16"
            )
        shaped: list[RewardsConfig | RewardFunctionConfig] = [
            self.rewards,
            *(one for one in self.rewards.functions if one.weight),
        ]
        from_0 = self.rewards.clip is not None and self.rewards.clip[0] >= 0
        centred = any(one.normalise == "mean_std" and (one.clip is None or one.clip[0] < 0) for one in shaped)
        if self.algorithm.advantage.type == "maxrl" and centred and not from_0:
            raise ValueError(
                "rewards are normalised by mean_std, which makes the lower ones negative, but algorithm.advantage.type is maxrl, which "
                "divides by their mean: normalise by std, or clip them from 0 on"
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
        if self.training.epochs is None and kl.reference_updates > max(1, self.training.steps):
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
        if self.rollout.engine == "vllm":
            judged = [("evaluation.temperature", self.evaluation.temperature)] * ("sampled" in self.evaluation.modes)
            for name, temperature in [("rollout.temperature", self.rollout.temperature), *judged]:
                if not VLLM_COLDEST <= temperature <= VLLM_HOTTEST:
                    raise ValueError(
                        f"{name} is {temperature:g}, but vLLM samples at {VLLM_COLDEST:g} in place of lower temperatures, and "
                        f"takes none above {VLLM_HOTTEST:g} (rollout.engine): set it to one between them, or engine to auto"
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
    def weighs_nothing(self) -> bool:
        """Whether ``stale_samples`` leaves ``correction`` nothing to do: the sampler is in the ratio, or of no account."""
        return self.rollout.ahead > 0 and self.algorithm.stale_samples != "decoupled"

    @property
    def samples_are_the_policys(self) -> bool:
        """Whether the sampler's log-probabilities are the policy's own, up to rounding: the same weights, and nothing cut off."""
        rollout = self.rollout
        return rollout.engine_reads_the_policy and rollout.ahead == 0 and rollout.top_k is None and rollout.top_p >= 1

    @property
    def correction_level(self) -> str:
        """What is weighted by pi_old / pi_sampler: ``token``, ``sequence`` or ``none``. Stale samples are, unless the config objects."""
        if self.weighs_nothing:
            return "none"
        unset = "token" if self.rollout.ahead else "none"
        return unset if self.algorithm.correction is None else self.algorithm.correction.level

    @model_validator(mode="after")
    def follow_engine(self) -> Config:
        """Another program's numbers are corrected for, and rounded weights', unless something else was said; written past validation, as
        not set."""
        if "correction" not in self.algorithm.model_fields_set:
            needless = self.rollout.engine_reads_the_policy or self.weighs_nothing
            correction = None if needless else CorrectionConfig()
            self.__dict__["algorithm"] = self.algorithm.model_copy(update={"correction": correction})
            self.algorithm.model_fields_set.discard("correction")
        return self

    @model_validator(mode="after")
    def refuse_inert(self) -> Config:
        if inert := without_effect(self):
            first, *others = inert.values()
            more = f" ({len(others)} more {'do' if len(others) > 1 else 'does'} nothing too)" if others else ""
            raise PydanticCustomError(INERT, "{sentence}", {"sentence": first + more, "paths": list(inert)})
        return self

    @property
    def completions_per_step(self) -> int:
        """The whole batch: prompts x G, over all processes."""
        return self.rollout.prompts_per_step * self.rollout.completions_per_prompt

    @property
    def optimizer_steps(self) -> int:
        return self.training.steps * self.algorithm.updates_per_batch
