"""A whole run that trains an adapter: its checkpoints resume bit for bit, and its final model is an ordinary one."""

import pytest
import torch
from safetensors.torch import load_file
from test_checkpoint import completions_of, final_weights, metrics_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from groupwise.engines.builtin import fast_paths
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.engines.builtin.fast_paths import Choice, FastPath
from groupwise.errors import ConfigError
from groupwise.planner import Setup, find_shape
from groupwise.training import start as beginning
from groupwise.training.loop import train
from groupwise.training.optimizer import MasterAdamW

pytest.importorskip("peft")


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_run_of_an_adapter_in_two_parts_is_the_run_in_one(small_config, letters, quiet, tmp_path, dtype, tiny_folder):
    config = small_config(
        model={"lora": {"rank": 4, "alpha": 8}}, algorithm={"kl": {"beta": 0.1}, "updates_per_batch": 2}, training={"steps": 3},
        output={"checkpoint_every": 1, "keep_checkpoints": 3}, optimizer={"learning_rate": 1e-2},
    )  # fmt: skip
    config.model.dtype = dtype
    whole = train(config, rewards=letters, console=quiet, run_folder=tmp_path / "whole").folder
    resumed = train(
        config, rewards=letters, console=quiet, run_folder=tmp_path / "resumed", resume_from=whole / "checkpoints" / "step-1"
    ).folder
    assert metrics_of(resumed) == metrics_of(whole, first=1)
    assert completions_of(resumed, 2) == completions_of(whole, 2)
    one, other, base = final_weights(whole), final_weights(resumed), load_file(tiny_folder / "model.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in one)
    changed = {name for name in base if not torch.equal(base[name].to(one[name].dtype), one[name])}
    assert changed == {name for name in base if "proj" in name}, "the adapter is in the final weights, and nothing else is"
    assert (whole / "final_model" / "adapter" / "adapter_model.safetensors").is_file()


def test_a_reference_that_would_be_renewed_is_refused(small_config):
    with pytest.raises((ConfigError, ValueError), match="reference_updates"):
        small_config(model={"lora": {}}, algorithm={"kl": {"beta": 0.1, "reference_updates": 2}})


def test_the_seed_reaches_the_adapter(small_config, letters, quiet, tmp_path):
    def drawn(name, seed):
        config = small_config(model={"lora": {"rank": 4, "alpha": 8}}, training={"steps": 0, "seed": seed})
        folder = train(config, rewards=letters, console=quiet, run_folder=tmp_path / name).folder
        return load_file(folder / "final_model" / "adapter" / "adapter_model.safetensors")

    one, again, other = drawn("one", 1), drawn("again", 1), drawn("other", 2)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one if "lora_A" in name)


@pytest.mark.parametrize(
    ("engine", "exact"), [("auto", True), ("auto", False), ("transformers", True)], ids=["exact", "not in bf16", "by the module"]
)
def test_a_base_whose_file_holds_bf16_takes_16_bits_a_weight_in_fp32(engine, exact, small_config, letters, quiet, tmp_path):
    config = small_config(model={"lora": {"rank": 4, "alpha": 8}}, rollout={"engine": engine})
    model = AutoModelForCausalLM.from_pretrained(config.model.name, dtype=torch.bfloat16 if exact else torch.float32)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(config.model.name).save_pretrained(tmp_path / "model")
    config.model.name = str(tmp_path / "model")
    run = beginning.start(config, rewards=letters, console=quiet, run_folder=tmp_path / "run")
    weights = {n: p for n, p in run.policy.model.named_parameters() if n.endswith("proj.base_layer.weight")}
    narrow = exact and engine == "auto"
    assert {p.dtype for p in weights.values()} == {torch.bfloat16 if narrow else torch.float32}
    setup = Setup(config, find_shape(config.model), "cpu")
    assert setup.base_in_16_bits == narrow
    assert setup.weights == sum(p.nbytes for n, p in run.policy.model.named_parameters() if "lora" not in n)


def test_what_samples_goes_by_the_fast_paths_of_the_first_process(small_config, letters, quiet, tmp_path, monkeypatch):
    """Also where this process would find others: a resumed run's are those that it began with, whatever this machine's cache says."""
    taken: list[bool] = []
    path = FastPath("a path", lambda decoder: True, taken.append, ("a decode step",), 1e6)
    monkeypatch.setattr(fast_paths, "fast_paths", lambda: (path,))
    monkeypatch.setattr(fast_paths, "_known", {})
    monkeypatch.setenv("GROUPWISE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(beginning, "_fast_paths", lambda *where: [Choice("a path", False, True, "a clock said so", ())])
    config = small_config(model={"lora": {"rank": 4, "alpha": 8}})
    run = beginning.start(config, rewards=letters, console=quiet, run_folder=tmp_path / "run")
    assert isinstance(run.engine, BuiltinEngine)
    assert taken == [False]


def test_decay_of_matrices_spares_vectors():
    from groupwise.config.schema import OptimizerConfig

    def after(decay):
        named = [("matrix", torch.nn.Parameter(torch.ones(2, 2))), ("norm", torch.nn.Parameter(torch.ones(2)))]
        optimizer = MasterAdamW(named, OptimizerConfig(weight_decay=0.5, decay=decay, max_grad_norm=None))
        for _, parameter in named:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step(0.1)
        return [parameter.detach().flatten()[0].item() for _, parameter in named]

    assert after("all") == pytest.approx([0.95, 0.95])
    assert after("matrices") == pytest.approx([0.95, 1.0])
