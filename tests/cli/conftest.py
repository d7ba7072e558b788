"""A tiny random model of the Qwen2 architecture with a byte-level tokenizer and a chat template, as a Hugging Face folder."""

import json
import os

import pytest
from typer.testing import CliRunner

from tests.tiny import write_tiny_qwen2


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    return write_tiny_qwen2(tmp_path_factory.mktemp("tiny-model"))


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
        "evaluation.modes=[sampled, greedy]",
        "rollout.max_completion_tokens=8",
        "rollout.prompts_per_step=2",
        "rollout.completions_per_prompt=2",
        "training.steps=2",
        "warm_start.steps=0",
        "algorithm.kl=null",
        "optimizer.schedule=constant",
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
