"""Models of published shapes with random weights, and prompts and completions of given lengths for them.

Speed and memory depend on shapes, not on what the weights say, so no download is needed.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config

from groupwise.models.load import Policy
from groupwise.types import Completion, Group, Problem, Prompt

__all__ = ["SHAPES", "llama_shape", "random_groups", "random_policy", "random_prompts"]


def _qwen2(width: int, feed_forward: int, layers: int, heads: int, kv_heads: int, vocabulary: int, tied: bool) -> Qwen2Config:
    return Qwen2Config(
        hidden_size=width, intermediate_size=feed_forward, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=vocabulary, tie_word_embeddings=tied, max_position_embeddings=32768,
        rms_norm_eps=1e-6, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip


SHAPES: dict[str, Qwen2Config] = {
    "0.5b": _qwen2(896, 4864, 24, 14, 2, 151936, tied=True),
    "1.5b": _qwen2(1536, 8960, 28, 12, 2, 151936, tied=True),
    "7b": _qwen2(3584, 18944, 28, 28, 4, 152064, tied=False),
    "tiny": _qwen2(64, 128, 2, 4, 2, 512, tied=True),
}
"""Those of Qwen2.5, and a tiny one for trying things."""


def llama_shape(width: int, layers: int, vocabulary: int) -> LlamaConfig:
    """SmolLM2's proportions at another width: heads of 64, three query heads to a key-value head."""
    heads = width // 64
    return LlamaConfig(
        hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 3), vocab_size=vocabulary, tie_word_embeddings=True, max_position_embeddings=8192,
        bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip


class NoText:
    """Stands in for a tokenizer where tokens mean nothing."""

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return ""


def random_policy(config: PretrainedConfig, device: str, dtype: torch.dtype = torch.bfloat16) -> Policy:
    """A policy of this shape that never stops by itself: it has no end token, so every completion has the length asked for."""
    torch.manual_seed(0)
    if torch.device(device).type == "cuda" and torch.device(device).index is not None:
        torch.cuda.set_device(device)  # as where a policy is loaded
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return Policy(model.eval(), NoText(), (), config.max_position_embeddings, "random weights")


def random_prompts(count: int, tokens: int, vocabulary: int, seed: int | str = 0) -> list[Prompt]:
    """Prompts of exactly ``tokens`` random ids each; those of another ``seed`` are other problems."""
    source = random.Random(seed)
    return [
        Prompt(Problem(f"random-{seed}-{i}", "", ""), "", tuple(source.randrange(2, vocabulary) for _ in range(tokens)))
        for i in range(count)
    ]


def random_groups(
    prompts: Sequence[Prompt], completions: int, shortest: int, longest: int, vocabulary: int, seed: int = 1
) -> list[Group]:
    """Groups of random completions, their lengths uniform from ``shortest`` to ``longest``, with rewards that differ."""
    source = random.Random(seed)
    groups = []
    for prompt in prompts:
        members = []
        for sample in range(completions):
            ids = tuple(source.randrange(2, vocabulary) for _ in range(source.randint(shortest, longest)))
            members.append(Completion("", ids, (-1.0,) * len(ids), "stop", sample))
        groups.append(Group(prompt, tuple(members), tuple(float(i % 2) for i in range(completions))))
    return groups
