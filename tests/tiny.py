"""Tiny random models with a byte-level tokenizer, easy sums, and settings of runs over them that take a second."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from groupwise.config.schema import Config

__all__ = [
    "LOWERS",
    "final_weights",
    "forking",
    "lower_case_share",
    "metrics_of",
    "rows",
    "tiny_config",
    "write_sums",
    "write_tiny_llama",
    "write_tiny_mixture",
    "write_tiny_qwen2",
    "write_tiny_tokenizer",
]

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

LOWERS = TEMPLATE.replace(
    "{{ m['content'] }}",
    "{% if m['role'] == 'assistant' and not loop.last %}{{ m['content'] | lower }}{% else %}{{ m['content'] }}{% endif %}",
)
"""Writes what the policy said in small letters, once it is answered: turns of random models with capitals are rewritten."""


def write_tiny_tokenizer(folder: Path) -> Any:
    """A byte-level tokenizer with a chat template. Pad and end are one token, as in SmolLM2."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_tiny_llama(folder: Path, *, stop_weight: float = 1.0, **shape: Any) -> Path:
    """The weights are small, so that tokens are about equally likely; ``stop_weight`` multiplies those of the end token in an untied
    output head. ``shape`` changes single values of the configuration."""
    from transformers import LlamaConfig

    tiny = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 264,
            "max_position_embeddings": 256, "bos_token_id": None}  # fmt: skip
    return _write_tiny(LlamaConfig, folder, stop_weight, **{**tiny, **shape})


def forking(folder: Path) -> Path:
    """The model of ``folder``, with the template ``LOWERS`` from now on."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = LOWERS
    tokenizer.save_pretrained(folder)
    return folder


def write_tiny_qwen2(folder: Path, **shape: Any) -> Path:
    """The same in the Qwen2 architecture; as in real models, a few rows more than the tokenizer has (it gains one when loaded)."""
    from transformers import Qwen2Config

    tiny = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 264,
            "max_position_embeddings": 512}  # fmt: skip
    return _write_tiny(Qwen2Config, folder, 1.0, **{**tiny, **shape})


def write_tiny_mixture(folder: Path, **shape: Any) -> Path:
    """A mixture of four experts, of which two compute a token. transformers 5 holds them as one tensor and writes them one by one."""
    from transformers import Qwen3MoeConfig

    tiny = {"hidden_size": 16, "intermediate_size": 32, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 264, "max_position_embeddings": 256,
            "initializer_range": 0.2}  # fmt: skip
    return _write_tiny(Qwen3MoeConfig, folder, 1.0, **{**tiny, **shape})


def _write_tiny(kind: Any, folder: Path, stop_weight: float, **shape: Any) -> Path:
    from transformers import AutoModelForCausalLM

    tokenizer = write_tiny_tokenizer(folder)
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = kind(**{"num_hidden_layers": 2, "tie_word_embeddings": True, **ends, **shape})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        if stop_weight != 1:
            model.lm_head.weight[tokenizer.eos_token_id] *= stop_weight
        model.save_pretrained(folder)
    return folder


def write_sums(path: Path) -> Path:
    rows = [{"question": f"{a} + {a + 1} = ?", "answer": str(2 * a + 1)} for a in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def tiny_config(model: Path, data: Path, /, **sections: dict[str, Any]) -> Config:
    """Two steps of 3 prompts x 4 completions of up to 8 tokens, fp32 on the CPU; ``sections`` change single settings."""
    base: dict[str, dict[str, Any]] = {
        "model": {"name": str(model), "dtype": "float32", "device": "cpu"},
        "data": {"source": str(data), "holdout": 6},
        "prompt": {"system": "none"},
        "rewards": {"functions": [{"function": "letters"}]},
        "rollout": {"prompts_per_step": 3, "completions_per_prompt": 4, "max_completion_tokens": 8},
        "algorithm": {"kl": None},
        "optimizer": {"learning_rate": 1e-3},
        "training": {} if "epochs" in sections.get("training", {}) else {"steps": 2},
        "evaluation": {"problems": 4, "modes": ["sampled"], "at_start": False},
    }
    return Config(**{name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}})


def lower_case_share(completions: list[Any], **columns: Any) -> list[float]:
    """A reward that always varies: the share of lower-case letters in a completion."""
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [sum(x.islower() and x.isascii() for x in text) / max(1, len(text)) for text in texts]


def rows(folder: Path, name: str = "metrics") -> list[dict[str, Any]]:
    """What a run wrote into ``metrics.jsonl`` or ``completions.jsonl``."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def metrics_of(folder: Path, first: int = 0) -> list[dict[str, Any]]:
    """A run's metrics from row ``first`` on, without times and memory."""
    return [{k: v for k, v in row.items() if not k.startswith(("time", "speed", "memory"))} for row in rows(folder)[first:]]


def final_weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final_model" / "model.safetensors")
