"""A tiny random model of the Qwen2 architecture with a byte-level tokenizer and a chat template, as a Hugging Face folder."""

import json
import os

import pytest
from typer.testing import CliRunner

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("tiny-model")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer) + 6,  # as real models: a few rows more than the tokenizer has (it gains one when loaded)
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=True,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def judge(tiny_model, tmp_path_factory):
    """A random sequence classifier with the tiny model's tokenizer and template."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen2ForSequenceClassification

    folder = tmp_path_factory.mktemp("models") / "judge"
    config = AutoConfig.from_pretrained(tiny_model)
    config.num_labels, config.architectures = 1, None
    torch.manual_seed(1)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_model).save_pretrained(folder)
    return folder


@pytest.fixture
def problems(tmp_path):
    """A JSONL file of twelve easy sums."""
    path = tmp_path / "sums.jsonl"
    rows = [{"question": f"{a} + {a + 1} = ?", "answer": str(2 * a + 1)} for a in range(12)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def small(tiny_model, problems):
    """Overrides for a run that takes a second."""
    return [
        f"model.name={tiny_model}",
        "model.dtype=float32",
        "model.device=cpu",
        f"data.source={problems}",
        "data.holdout=4",
        "evaluation.problems=4",
        "rollout.max_completion_tokens=8",
        "rollout.prompts_per_step=2",
        "rollout.completions_per_prompt=2",
        "training.steps=2",
        "warm_start.steps=0",
        "beta=0",
    ]


@pytest.fixture
def groupwise(monkeypatch):
    """Run the command line in this process: ``groupwise("train", "quickstart")`` -> result with exit_code, stdout, stderr."""
    from groupwise.cli import app

    monkeypatch.delenv("GROUPWISE_DEBUG", raising=False)
    monkeypatch.setitem(os.environ, "COLUMNS", "100")

    def run(*words, **options):
        result = CliRunner().invoke(app, [str(word) for word in words], **options)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run
