"""A tiny random Llama with a byte-level tokenizer and a chat template, and prompts: scripts as people write them run in a second."""

import pytest
import torch

from tests.tiny import write_tiny_llama


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """Untied weights; every 13th sampled token or so ends the turn, so that some completions stop and some are cut."""
    shape = {"vocab_size": 258, "tie_word_embeddings": False, "initializer_range": 0.2}
    return write_tiny_llama(tmp_path_factory.mktemp("tiny-llama"), stop_weight=3.0, **shape)


@pytest.fixture
def load_tiny(tiny_folder):
    """``load_tiny()``: the tiny model as an object, in float32."""
    from transformers import AutoModelForCausalLM

    return lambda: AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@pytest.fixture(scope="session")
def prompts():
    from datasets import Dataset

    return Dataset.from_dict({"prompt": [f"{a} + {a} =" for a in range(12)], "answer": [2 * a for a in range(12)]})


@pytest.fixture(scope="session")
def chats():
    from datasets import Dataset

    return Dataset.from_dict(
        {"prompt": [[{"role": "user", "content": f"{a} + {a}?"}] for a in range(12)], "answer": list(range(12))}
    )


@pytest.fixture
def letters():
    """A reward that always varies: the share of lower-case letters."""

    def letters(completions, **kwargs):
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [sum(x.islower() and x.isascii() for x in text) / max(1, len(text)) + len(text) / 100 for text in texts]

    return letters


@pytest.fixture
def settings(tmp_path):
    """``settings(beta=0.1)``: arguments of a run that takes a second on the CPU, in float32."""

    def make(**changes):
        from groupwise.trl import GRPOConfig

        base = {
            "output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8,
            "max_steps": 2, "learning_rate": 1e-3, "logging_steps": 1, "use_cpu": True, "bf16": False, "disable_tqdm": True,
            "save_strategy": "no", "gradient_checkpointing": False,
        }  # fmt: skip
        return GRPOConfig(**{**base, **changes})

    return make
