"""Every recipe shipped runs: two real steps with its own settings on real rows, by a tiny random model of the same architecture.

Only what a small machine cannot do is changed: the weights, the length of completions, and how much is evaluated.
"""

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from groupwise import train
from groupwise.config import load_config
from groupwise.config.load import recipes
from groupwise.doctor import diagnose_prepared
from groupwise.training.setup import prepare

GSM8K = [
    "gsm8k-0.5b", "gsm8k-1.5b-24gb", "gsm8k-1.5b-8gpu", "gsm8k-1.5b-cpu", "gsm8k-7b-8gpu", "length-0.5b-2gpu",
    "tools-1.5b", "tutorial-1.5b",
]  # fmt: skip
LESS = {"rollout.max_completion_tokens": 3, "training.steps": 2, "evaluation.problems": 2, "model.device": "cpu"}


def varied(completion_ids, **columns):
    """Something for the groups to differ in: a random model is never right."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def shortened(tokenizer):
    """Qwen2.5's tokenizer, its template and special tokens included, with the first 4096 of its 151,643 pieces."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    said = json.loads(tokenizer.backend_tokenizer.to_str())
    model, first = said["model"], 4096
    model["vocab"] = {piece: number for piece, number in model["vocab"].items() if number < first}
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    model["merges"] = [pair for pair in pairs if {*pair, "".join(pair)} <= model["vocab"].keys()]
    for number, token in enumerate(sorted(said["added_tokens"], key=lambda token: token["id"]), first):
        token["id"] = number
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(said)), chat_template=tokenizer.chat_template, eos_token=tokenizer.eos_token,
        pad_token=tokenizer.pad_token,
    )  # fmt: skip


@pytest.fixture(scope="session")
def tiny_qwen_folder(qwen_tokenizer, tmp_path_factory):
    """``tiny_qwen_folder(tied)``: Qwen2.5, two layers deep and 16 wide; ``whole``: with its real vocabulary, which is most of the work."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    def make(tied: bool, whole: bool = False) -> Path:
        folder = tmp_path_factory.getbasetemp() / f"tiny-qwen-{'tied' if tied else 'untied'}-{'whole' if whole else 'short'}"
        if not folder.exists():
            tokenizer = qwen_tokenizer if whole else shortened(qwen_tokenizer)
            config = Qwen2Config(
                vocab_size=151936 if whole else 4224,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=32768,
                rms_norm_eps=1e-6,
                bos_token_id=tokenizer.convert_tokens_to_ids("<|endoftext|>"),
                eos_token_id=tokenizer.eos_token_id,
                tie_word_embeddings=tied,
            )
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def gsm8k(shared_data, tmp_path_factory):
    """The first real rows of the data set, by split."""

    def cut(split: str) -> Path:
        path = tmp_path_factory.getbasetemp() / f"gsm8k-{split}.jsonl"
        lines = (shared_data / "gsm8k" / f"{split}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        path.write_text("".join(lines[:600]), encoding="utf-8")
        return path

    return {split: cut(split) for split in ("train", "test")}


def run(name, changes, folder):
    """The recipe with ``changes``, and the steps' reports."""
    config = load_config(name, [f"{key}={'null' if value is None else value}" for key, value in {**LESS, **changes}.items()])
    assert not [f for f in diagnose_prepared(prepare(config)) if f.severity == "critical"], "the doctor sees nothing in its way"
    seen = []
    result = train(
        config, recipe=name, run_folder=folder, rewards={"varied": varied}, on_step=seen.append, console=Console(quiet=True)
    )
    return config, result, seen


def check(config, result, seen):
    """Two full batches were sampled, scored by the recipe's own rewards, and learnt from."""
    assert [report.step for report in seen] == [1, 2]
    functions = {entry.called.rpartition(":")[2] for entry in config.rewards.functions}
    for report in seen:
        assert len(report.groups) == config.rollout.prompts_per_step
        assert {len(group.completions) for group in report.groups} == {config.rollout.completions_per_prompt}
        assert {f"reward/{name}" for name in functions} <= report.metrics.keys()
        assert report.metrics["optimizer/grad_norm"] > 0
        assert report.metrics["optimizer/dropped_updates"] == 0
        if config.samples_are_the_policys:
            assert report.metrics["policy/sampler_mismatch"] < 0.02, "bf16 rounding"
        assert ("policy/kl" in report.metrics) == (config.algorithm.beta > 0)
    assert seen[0].metrics.get("policy/kl", 0) == 0
    assert seen[-1].metrics["progress/policy_version"] == 2 * config.algorithm.updates_per_batch
    summary = json.loads((result.folder / "summary.json").read_text(encoding="utf-8"))
    assert [row["stage"] for row in summary["evaluations"]][-1] == "final"
    assert (result.folder / "final_model" / "model.safetensors").is_file()


def test_every_recipe_is_here():
    assert {recipe.name for recipe in recipes()} == {
        *GSM8K,
        "polaris-3b",
        "polaris-3b-qlora",
        "quickstart",
        "quickstart-game",
        "quickstart-tools",
    }


SLOW = {"gsm8k-0.5b", "gsm8k-7b-8gpu", "gsm8k-1.5b-24gb", "tools-1.5b"}
"""The real vocabulary of 151,936; batches of 256 prompts; one that takes twice the time of the others, which hold the same in small."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in GSM8K])
def test_a_gsm8k_recipe_runs_on_real_rows(name, tiny_qwen_folder, gsm8k, tmp_path):
    changes = {
        "model.name": tiny_qwen_folder(tied="7b" not in name, whole=name == "gsm8k-0.5b"),
        "data.source": gsm8k["train"],
        "data.eval_source": gsm8k["test"],
        "data.eval_split": None,
    }
    config, result, seen = run(name, changes, tmp_path / "run")
    check(config, result, seen)
    group = seen[0].groups[0]
    begins = "Respond in the following format:\n<reasoning>" if name == "tutorial-1.5b" else "<|im_start|>system\n"
    assert group.prompt.text.startswith(begins)
    assert ("<reasoning>" in group.prompt.text) is (name != "length-0.5b-2gpu")
    assert group.prompt.problem.question in group.prompt.text
    assert group.prompt.problem.answer.lstrip("-").isdigit()
    assert ('"name": "calculator"' in group.prompt.text) is (name == "tools-1.5b"), "the chat template describes the tool"


@pytest.mark.parametrize("name", [pytest.param("polaris-3b", marks=pytest.mark.slow), "polaris-3b-qlora"])
def test_a_polaris_recipe_runs_on_competition_rows(name, tiny_qwen_folder, shared_data, tmp_path):
    if "qlora" in name:
        pytest.importorskip("bitsandbytes")
    changes = {
        "model.name": tiny_qwen_folder(tied=True),
        "data.source": shared_data / "competition-math" / "train_math.json",
        "data.limit": 600,
        "data.holdout": 20,
        "optimizer.warmup_steps": 1,
    }
    config, result, seen = run(name, changes, tmp_path / "run")
    check(config, result, seen)
    assert "\\boxed{" in seen[0].groups[0].prompt.text
    assert result.summary["format"] == "boxed"


@pytest.mark.parametrize("name", ["quickstart", "quickstart-tools", "quickstart-game"])
def test_a_quickstart_recipe_runs(name, tiny_qwen_folder, tmp_path):
    """On the generator's problems, its warm start included."""
    changes = {
        "model.name": tiny_qwen_folder(tied=True),
        "data.arithmetic.problems": 600,
        "warm_start.steps": 2,
        "warm_start.examples_per_step": 2,
    }
    config, result, seen = run(name, changes, tmp_path / "run")
    check(config, result, seen)
    assert [row["stage"] for row in result.summary["evaluations"]] == ["base", "warm_start", "final"]
