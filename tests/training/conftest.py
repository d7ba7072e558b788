"""A tiny random Llama with a byte-level tokenizer as a folder, easy sums as a file, and runs over them that take a second."""

import json

import pytest
import torch
from rich.console import Console

from groupwise.config.schema import Config

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Pad and end are one token, as in SmolLM2. The weights are small, so that tokens are about equally likely."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny-llama")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def sums(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"question": f"{a} + {a + 1} = ?", "answer": str(2 * a + 1)} for a in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def small_config(tiny_folder, sums):
    """``small_config(algorithm={...})``: two steps of 3 prompts x 4 completions of up to 8 tokens, fp32 on the CPU."""
    base = {
        "model": {"name": str(tiny_folder), "dtype": "float32", "device": "cpu"},
        "data": {"source": str(sums), "holdout": 6},
        "prompt": {"system": "none"},
        "rewards": {"functions": [{"function": "letters"}]},
        "rollout": {"prompts_per_step": 3, "completions_per_prompt": 4, "max_completion_tokens": 8},
        "algorithm": {"beta": 0.0},
        "optimizer": {"learning_rate": 1e-3},
        "training": {"steps": 2},
        "evaluation": {"problems": 4, "modes": ["sampled"], "at_start": False},
    }

    def make(**sections):
        return Config(**{name: {**base.get(name, {}), **sections.get(name, {})} for name in {**base, **sections}})

    return make


@pytest.fixture
def letters():
    """A reward that always varies: the share of lower-case letters in a completion."""

    def share(completions, **columns):
        return [sum(c.islower() and c.isascii() for c in text) / max(1, len(text)) for text in map(_text, completions)]

    return {"letters": share}


def _text(completion):
    return completion if isinstance(completion, str) else completion[-1]["content"]


@pytest.fixture
def quiet():
    return Console(quiet=True)
