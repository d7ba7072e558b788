"""One run as the planner sees it: settings, shape and lengths, and the sizes of its batches that follow; reward models beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, TypeVar

from groupwise.batching import cut_batch
from groupwise.config.objective import OwnLoss
from groupwise.config.rewards import RewardModelConfig
from groupwise.config.schema import Config, ModelConfig
from groupwise.config.section import Section
from groupwise.errors import ModelError
from groupwise.planner.hardware import GPUS_OF_A_MACHINE
from groupwise.planner.shape import ModelShape, find_shape

__all__ = ["MicroBatchSize", "Setup", "judge_bytes", "unknown_judges"]


def judge_bytes(config: Config, device: str) -> int:
    """Weights of the reward models on the policy's device, a ``cuda`` or ``cpu``; of several processes, in the first. Those that
    `unknown_judges` names are left out.

    A classifier has the language model's layers and embedding, and a score head of one row per label in place of the output head.
    """
    return sum(
        _bytes_per_weight(model) * weights for model in _beside(config, device) if (weights := _weights(model)) is not None
    )


def unknown_judges(config: Config, device: str) -> list[str]:
    """Reward models there whose config.json cannot be had, or is not that of a Llama-like decoder."""
    return [model.name for model in _beside(config, device) if _weights(model) is None]


def _beside(config: Config, device: str) -> Iterator[RewardModelConfig]:
    """Reward models that share the policy's device."""
    named = config.model.device.removesuffix(":0")
    here = {"auto", device if named == "auto" else named}
    for entry in config.rewards.functions:
        if entry.model is not None and entry.model.device.removesuffix(":0") in here:
            yield entry.model


def _weights(model: RewardModelConfig) -> int | None:
    try:
        shape = find_shape(ModelConfig(name=model.name, revision=model.revision))
    except ModelError:
        return None
    return replace(shape, tied=True).parameters + shape.width


def _bytes_per_weight(model: RewardModelConfig) -> int:
    return 4 if model.dtype == "float32" else 2  # checkpoints are nearly all half precision where dtype is auto


SectionT = TypeVar("SectionT", bound=Section)

_TYPICAL_PROMPT = 200
"""Tokens of a prompt where nothing says otherwise: a grade-school word problem with a system prompt has 60 to 250."""
_TYPICAL_TOOL = 80
"""Tokens with which a prompt describes a tool: the calculator's JSON schema has 82 in SmolLM2's tokenizer."""
_FOUR_BIT = 0.5 + 1 / 64 + 4 / (64 * 256)
"""Bytes of a weight in NF4: 4 bits, an 8-bit scale for 64 of them, and an fp32 scale for 256 scales (arXiv 2305.14314, section 3)."""


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """Rows and tokens of one forward and backward pass."""

    groups: tuple[tuple[int, int], ...]
    """For each group in it: tokens of the prompt, completions."""
    completion: int
    """Tokens of each completion."""

    @property
    def rows(self) -> int:
        """R, packed inputs: a prompt once for its group, and a completion without its last token, which predicts nothing."""
        return sum(prompt + count * (self.completion - 1) for prompt, count in self.groups)

    @property
    def tokens(self) -> int:
        """T, predicted tokens."""
        return sum(count for _, count in self.groups) * self.completion

    @property
    def padded(self) -> int:
        """Inputs where every completion is computed with a prompt of its own (``models/module_scorer.py``)."""
        return sum(count for _, count in self.groups) * self.longest

    @property
    def longest(self) -> int:
        """Inputs of the longest sequence."""
        return max(prompt for prompt, _ in self.groups) + self.completion - 1


@lru_cache(maxsize=256)
def _cut(prompt: int, completion: int, group_size: int, groups: int, budget: int) -> list[MicroBatchSize]:
    """Micro-batches of groups that are all alike, cut by the trainer's own function. Kept: suggestions ask for the same ones often."""
    group: tuple[int, Sequence[int]] = (prompt, [completion] * group_size)
    parts = cut_batch([group] * groups, budget)
    return [MicroBatchSize(tuple((prompt, len(p.members)) for p in batch), completion) for batch in parts]


@dataclass(frozen=True)
class Setup:
    """Settings, and what they do not say: the model's shape, the device, and how long prompts and completions are."""

    config: Config
    shape: ModelShape
    device: Literal["cpu", "cuda"] = "cuda"
    world_size: int = 1
    prompt_tokens: int = 0
    """Longest prompt; 0 takes ``data.max_prompt_tokens``, or a typical length."""
    mean_completion_tokens: int = 0
    """Expected length, for time only; 0 takes the limit. Memory is planned for completions that all reach the limit."""
    device_bytes: int = 0
    """The device's whole memory, of which an engine may take a share; 0 where nobody has said."""
    gpus_per_node: int = GPUS_OF_A_MACHINE
    """Processes of one machine at most; what goes to others crosses the network."""
    untrained: int = 0
    """Weights of the model that never learn, of one that is trained whole: a critic's output head."""

    def changed(self, **changes: Any) -> Setup:
        """A copy with some settings changed, named ``section__field`` or ``section__section__field``."""
        config = self.config
        for name, value in changes.items():
            config = _changed(config, name.split("__"), value)
        return replace(self, config=config)

    @property
    def processes_here(self) -> int:
        """Processes on one machine."""
        return min(self.world_size, self.gpus_per_node)

    @property
    def prompt(self) -> int:
        """Tokens of the longest prompt that is trained on: it leaves room for a completion in the model's context."""
        asked = self.asked_prompt
        return max(1, min(asked, self.config.data.max_prompt_tokens or asked, self.shape.context - self.completion))

    @property
    def asked_prompt(self) -> int:
        """Tokens of the longest prompt as it is given or guessed, whether or not there is room for it."""
        guessed = _TYPICAL_PROMPT + _TYPICAL_TOOL * len(self.config.rollout.tools)
        return self.prompt_tokens or self.config.data.max_prompt_tokens or guessed

    @property
    def completion(self) -> int:
        return self.config.rollout.max_completion_tokens

    @property
    def mean_completion(self) -> int:
        return self.mean_completion_tokens or self.completion

    @property
    def prompts(self) -> int:
        """Prompts that one process has in a step."""
        return -(-self.config.rollout.prompts_per_step // self.world_size)

    @property
    def adapted(self) -> bool:
        return self.config.model.lora is not None

    @property
    def packed(self) -> bool:
        """Whether the lean decoder computes the passes; otherwise the model's own module, over padded rows."""
        lora = self.config.model.lora
        if not self.shape.lean or lora is None:
            return self.shape.lean
        targets = () if isinstance(lora.target_modules, str) else lora.target_modules
        return lora.dropout == 0 and not any(name.endswith(("embed_tokens", "lm_head")) for name in targets)

    @property
    def by_vllm(self) -> bool:
        """Whether another program samples, with weights and a cache of its own."""
        return self.config.rollout.engine == "vllm"

    @property
    def vllm_sleeps(self) -> bool:
        """Whether vLLM, on the policy's own GPU, hands its memory back between sampling and the next weights."""
        rollout = self.config.rollout
        return (
            self.by_vllm and rollout.vllm.url is None and self.device == "cuda" and rollout.vllm.sleep_mode and not rollout.ahead
        )

    @property
    def by_builtin(self) -> bool:
        """Whether the built-in engine samples, which computes a prompt once for its group; otherwise the model's own module, or vLLM."""
        return self.shape.lean and self.config.rollout.engine in ("auto", "builtin")

    @property
    def merged_bytes(self) -> int:
        """Bytes of the merged weights that the built-in sampler reads in place of a base and its adapter."""
        if not (self.adapted and self.by_builtin):
            return 0
        return self.weight_bytes * self.shape.layers * self.shape.layer_matrices

    @property
    def in_fp32(self) -> bool:
        """Whether what learns is fp32 anyway: fp32 weights, or an adapter, which peft keeps in fp32."""
        return self.adapted or self.weight_bytes == 4

    @property
    def weight_bytes(self) -> int:
        """s, bytes of a weight."""
        return (
            4 if self.config.model.dtype == "float32" else 2
        )  # auto is planned as bfloat16; with_dtype settles it for this machine

    @property
    def trained(self) -> int:
        """Weights that learn."""
        lora = self.config.model.lora
        if lora is None:
            return self.shape.parameters - self.untrained
        return self.shape.adapter(lora.rank, lora.target_modules)

    @property
    def base_in_16_bits(self) -> bool:
        """Whether the matrices of a base that computes in fp32 are stored as the bf16 that its files hold."""
        return (
            self.adapted and self.packed and self.by_builtin and self.device == "cpu" and self.sharding == "none"
            and self.weight_bytes == 4 and self.quantised == "none" and self.shape.file_dtype == "bfloat16"
        )  # fmt: skip

    @property
    def quantised(self) -> str:
        """How the base's matrices are held: ``none``, ``8bit`` or ``4bit``."""
        return self.config.model.quantization

    @property
    def weights(self) -> int:
        """Bytes of all weights, the adapter's not counted. Of a base in fewer bits those are the layers' matrices; the rest is not."""
        matrices = self.shape.layers * self.shape.layer_matrices
        rest = self.weight_bytes * (self.shape.parameters - matrices)
        if self.quantised == "4bit":
            return int(matrices * _FOUR_BIT) + rest
        if self.quantised == "8bit":
            return matrices + 4 * self.shape.layers * self.shape.matrix_rows + rest
        return (2 if self.base_in_16_bits else self.weight_bytes) * matrices + rest

    @property
    def sharding(self) -> str:
        """What is divided over the processes: ``none``, ``zero2``, ``zero3`` or ``fsdp2``."""
        chosen = self.config.training.sharding
        return chosen if self.world_size > 1 and chosen != "auto" else "none"

    @property
    def ahead(self) -> int:
        """Steps that sampling may be ahead of learning, whose weights are kept."""
        return self.config.rollout.ahead

    @property
    def learns_entropy(self) -> bool:
        """Whether entropies have a gradient: for a bonus, or in a loss of the user's that may ask for them."""
        entropy = self.config.algorithm.entropy
        return (entropy is not None and entropy.bonus != 0) or isinstance(self.config.algorithm.loss, OwnLoss)

    @cached_property
    def needs_reference(self) -> bool:
        """Whether a reference makes passes: for the KL, or for a loss of the user's that asks for one."""
        loss = self.config.algorithm.loss
        return self.config.algorithm.needs_reference or (isinstance(loss, OwnLoss) and loss.needs_reference)

    @property
    def has_reference(self) -> bool:
        """Whether a second model is kept as the reference: an adapter's is its base."""
        return self.needs_reference and not self.adapted

    @property
    def offloaded(self) -> bool:
        """Whether masters, moments and gradients lie in the machine's memory."""
        return self.device == "cuda" and self.config.optimizer.offload

    @property
    def parked(self) -> bool:
        """Whether the reference comes to the device for its pass alone."""
        return self.device == "cuda" and self.config.training.offload_reference

    @cached_property
    def judges(self) -> int:
        """Bytes of the reward models' weights on this device."""
        return judge_bytes(self.config, self.device)

    @cached_property
    def micro_batches(self) -> list[MicroBatchSize]:
        """The step's micro-batches, were all completions as long as allowed; cut by the trainer's own function."""
        return self._cut(self.completion)

    @cached_property
    def passes(self) -> int:
        """Micro-batches of a step at the expected length."""
        return len(self._cut(self.mean_completion))

    def _cut(self, completion: int) -> list[MicroBatchSize]:
        rollout = self.config.rollout
        return _cut(
            self.prompt, completion, rollout.completions_per_prompt, self.prompts, self.config.training.micro_batch_tokens
        )

    @cached_property
    def largest(self) -> MicroBatchSize:
        """The micro-batch with the most inputs: of completions at the limit, or that all end at five to seven eighths of it, of which more
        fit into the budget. On an H200 micro-batches of ragged completions had a quarter more than those of completions at the limit."""
        lengths = (self.completion, *(max(1, self.completion * eighths // 8) for eighths in (5, 6, 7)))
        batches = [batch for length in lengths for batch in self._cut(length)]
        return max(batches, key=lambda batch: batch.rows if self.packed else batch.padded)


def _changed(section: SectionT, path: list[str], value: Any) -> SectionT:
    """A copy with the value at ``path`` replaced, which is not checked."""
    name, *rest = path
    return section.model_copy(update={name: _changed(getattr(section, name), rest, value) if rest else value})
