"""Settings of the model: which one, in which numbers, whole or by an adapter."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from groupwise.config.section import Section

__all__ = ["LoraConfig", "ModelConfig"]


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


class ModelConfig(Section):
    """Which policy is trained, and in which numbers."""

    name: str = "smollm2-135m-instruct"
    """The built-in `smollm2-135m-instruct`, a model folder, or a Hub name such as `Qwen/Qwen2.5-1.5B-Instruct`."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Numbers of the weights that sample and compute. `auto` is bfloat16, but float32 on a CPU without instructions for it.
    float16, with a scaled loss, is for GPUs without bfloat16."""
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = "auto"
    """Attention kernels; `auto` takes the fastest exact one. `eager` and `flash_attention_2` (package flash-attn) act only in
    models computed by their own module, not in Llama, Qwen, Mistral and Gemma 3."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: a third more compute, far less memory."""
    device: str = "auto"
    """`auto` (CUDA if there is one), `cpu`, `cuda` or `cuda:1`."""
    device_map: Literal["auto"] | None = None
    """For `eval` and `generate`: lay the layers over all GPUs, then the machine's memory, then the disk (package accelerate)."""
    max_memory: dict[int | str, str] | None = None
    """The most that `device_map` lays on each device, such as `{0: 20GiB, cpu: 60GiB}`."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model. The command alone can grant it, no file."""
    quantization: Literal["none", "4bit", "8bit"] = "none"
    """Bits of the frozen projections: 0.52 bytes a weight (QLoRA), or one. Needs `lora` and the package bitsandbytes."""
    lora: LoraConfig | None = None
    """Train a low-rank adapter, such as `{rank: 16, alpha: 32}`, at about ten times the learning rate. Null trains all weights."""

    @field_validator("max_memory")
    @classmethod
    def number_devices(cls, value: dict[int | str, str] | None) -> dict[int | str, str] | None:
        """A run's written settings have every key as text; a device is a number all the same."""
        return value and {int(k) if isinstance(k, str) and k.isdecimal() else k: v for k, v in value.items()}
