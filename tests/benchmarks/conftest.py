"""A model folder so small that whole benchmarks run on it in seconds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}<e>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@pytest.fixture
def tiny_folder(tiny_llama: Callable[..., Any], tmp_path: Path) -> Path:
    """A random two-layer Llama over bytes, with a chat template, as a Hugging Face folder."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<e>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<e>", pad_token="<e>")
    fast.chat_template = TEMPLATE
    folder = tmp_path / "tiny"
    fast.save_pretrained(folder)
    model = tiny_llama(
        vocab_size=len(fast), tie_word_embeddings=True, max_position_embeddings=2048, bos_token_id=256, eos_token_id=257,
        pad_token_id=257,
    )  # fmt: skip
    model.save_pretrained(folder)
    return folder
