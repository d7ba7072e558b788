"""Whole runs with adapters: the same bit for bit after a resume, and a whole model from what they leave behind."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from groupwise.chat import load_to_ask, settings_to_ask
from groupwise.cli.app import app
from groupwise.config.schema import LoraConfig, ModelConfig
from groupwise.errors import ModelError
from groupwise.models.load import load_policy
from groupwise.training.loop import train
from tests.tiny import LOWERS

pytest.importorskip("peft")

KINDS = pytest.mark.parametrize("kind", ["none", *(pytest.param(bits, marks=pytest.mark.slow) for bits in ("4bit", "8bit"))])


@pytest.fixture
def go(small_config, letters, quiet, tmp_path):
    def run(name, kind, **more):
        if kind != "none":
            pytest.importorskip("bitsandbytes")
        output = {"checkpoint_every": 1, "keep_checkpoints": 9, **more.pop("output", {})}
        config = small_config(
            model={"lora": {"rank": 2, "alpha": 4}, "quantization": kind}, training={"steps": 3}, algorithm={"kl": {"beta": 0.05}},
            optimizer={"learning_rate": 1e-2}, output=output,
        )  # fmt: skip
        return train(config, rewards=letters, console=quiet, run_folder=tmp_path / name, **more).folder

    return run


def rows(folder):
    kept = ("step", "reward/mean", "policy/loss", "policy/kl", "optimizer/grad_norm", "policy/entropy")
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: row.get(key) for key in kept} for row in found]


@KINDS
def test_a_resumed_run_goes_on_bit_for_bit(go, kind):
    whole = go("whole", kind)
    resumed = go("resumed", kind, resume_from=whole / "checkpoints" / "step-1")
    assert rows(resumed) == rows(whole)[1:]
    for file in ("final_model/model.safetensors", "final_model/adapter/adapter_model.safetensors"):
        one, other = load_file(whole / file), load_file(resumed / file)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one), file
    assert rows(whole)[-1]["policy/kl"] > 0, "it moved away from the base"


@KINDS
def test_the_adapter_alone_is_written_if_asked_for_and_merged_later_to_the_same_weights(go, tmp_path, kind):
    whole, alone = go("whole", kind), go("alone", kind, output={"adapter_only": True})
    left = {p.relative_to(alone / "final_model").as_posix() for p in (alone / "final_model").rglob("*") if p.is_file()}
    assert "adapter/adapter_model.safetensors" in left
    assert not any(name.startswith("model") or name == "config.json" for name in left), left
    assert rows(go("on", kind, resume_from=alone / "checkpoints" / "step-2", output={"adapter_only": True})) == rows(whole)[2:]
    done = CliRunner().invoke(app, ["merge", str(alone), str(tmp_path / "merged")])
    assert done.exit_code == 0, done.output
    one, other = (load_file(f / "model.safetensors") for f in (whole / "final_model", tmp_path / "merged"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not hasattr(model.config, "quantization_config")


@KINDS
def test_a_checkpoint_is_the_adapter_and_its_optimiser(go, kind):
    """fp32 factors, and two moments of each; beside them what `state.json` and peft's config say."""
    checkpoint = go("run", kind) / "checkpoints" / "step-2"
    files = {p.relative_to(checkpoint).as_posix(): p for p in checkpoint.rglob("*") if p.is_file()}
    weights = {name: load_file(path) for name, path in files.items() if path.suffix == ".safetensors"}
    assert not weights.pop("reference.safetensors"), "the base is the reference"
    assert set(weights) == {"model/adapter/adapter_model.safetensors", "optimizer.safetensors"}
    learnt = sum(t.numel() for t in weights["model/adapter/adapter_model.safetensors"].values())
    assert sum(t.nbytes for t in weights["model/adapter/adapter_model.safetensors"].values()) == 4 * learnt
    steps = sum(t.nbytes for name, t in weights["optimizer.safetensors"].items() if name.startswith("step."))
    assert sum(t.nbytes for t in weights["optimizer.safetensors"].values()) == 8 * learnt + steps
    assert not any(name.endswith("config.json") and "adapter" not in name for name in files)


def test_commands_read_an_adapter_s_checkpoint_with_the_model_under_it(go, tmp_path):
    """`generate` says with the last checkpoint what it says with the run."""
    folder = go("run", "none", output={"adapter_only": True})
    for written in ([], ["model"]):
        checkpoint = str((folder / "checkpoints" / "step-3").joinpath(*written))
        assert CliRunner().invoke(app, ["merge", checkpoint, str(tmp_path / f"merged-{len(written)}")]).exit_code == 0
        said = [CliRunner().invoke(app, ["generate", model, "hello"]) for model in (checkpoint, str(folder))]
        assert [one.exit_code for one in said] == [0, 0], said[0].output
        assert said[0].stdout == said[1].stdout != ""


def test_the_tokenizer_beside_an_adapter_goes_with_it(tiny_folder, tmp_path):
    """TRL and others write one there, with the chat template of the conversations that it was trained on."""
    policy = load_policy(ModelConfig(name=str(tiny_folder), dtype="float32", device="cpu", lora=LoraConfig(rank=2)))
    policy.model.save_pretrained(tmp_path / "adapter")
    policy.tokenizer.chat_template = LOWERS
    policy.tokenizer.save_pretrained(tmp_path / "adapter")
    done = CliRunner().invoke(app, ["merge", str(tmp_path / "adapter"), str(tmp_path / "merged")])
    assert done.exit_code == 0, done.output
    asked = load_to_ask(settings_to_ask(str(tmp_path / "adapter"))[0])
    for tokenizer in (AutoTokenizer.from_pretrained(tmp_path / "merged"), asked.tokenizer):
        assert tokenizer.chat_template == LOWERS
    policy.tokenizer.add_tokens([f"new{n}" for n in range(9)])
    policy.tokenizer.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ModelError, match=r"the tokenizer of '.*adapter' knows .* but the model embeds only"):
        load_to_ask(settings_to_ask(str(tmp_path / "adapter"))[0])


def test_what_cannot_be_merged_or_read_is_one_sentence(go, tmp_path, monkeypatch):
    folder = go("alone", "none", output={"adapter_only": True})
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("groupwise.models.load.load_policy", lambda *_, **__: pytest.fail("weights are loaded first"))
    for words, sentence in (
        (["merge", str(tmp_path), str(tmp_path / "new")], "holds no adapter"),
        (["merge", str(folder), str(tmp_path)], "exists already"),
        (["merge", str(folder), "~/file"], "exists already"),
        (["merge", str(folder), str(tmp_path / "file" / "new")], "cannot be written (Not a directory: "),
        (["train", "quickstart", "--dry-run", f"model.name={folder / 'final_model'}"], "groupwise merge"),
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 2, done.output
        assert sentence in " ".join(done.output.split())
