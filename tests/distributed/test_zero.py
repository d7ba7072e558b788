"""DeepSpeed's ZeRO-2 and ZeRO-3 over two real processes: the numbers of one process. Skipped where deepspeed is not installed."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from transformers import GPT2Config, LlamaConfig

from groupwise.config.schema import Config
from groupwise.distributed import World
from groupwise.distributed.sharding import zero_of_launcher
from groupwise.errors import ConfigError
from groupwise.models.merging import dithered
from groupwise.training.loop import train
from groupwise.training.sharding.zero import Zero, ZeroAdamW, check_zero
from tests.distributed.run_ranks import letters
from tests.distributed.two_processes import (
    HERE,
    assert_same_bits,
    assert_same_run,
    launch_two,
    numbers,
    on_from_step_3,
    said,
    weights,
)

SECTIONS = {
    "output": {"checkpoint_every": 3, "log_completions": 100},
    "algorithm": {"kl": {"beta": 0.04}},
    "optimizer": {"learning_rate": 1e-3, "weight_decay": 0.1, "decay": "matrices", "max_grad_norm": 0.5},
    "warm_start": {"steps": 2, "examples_per_step": 3},
}
CASES = [("zero2", "float32"), ("zero3", "float32"), ("zero3", "bfloat16")]
needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the package deepspeed, an extra of groupwise")


@pytest.fixture(scope="module")
def one_process(tiny_folder, sums, tmp_path_factory):
    """``one_process(dtype)``: the config, and the folder of a run of it in this process, once each."""
    from tests.training import conftest

    made = {}

    def run(dtype):
        if dtype not in made:
            sections = SECTIONS | {"training": {"steps": 5, "micro_batch_tokens": 60}, "model": {"dtype": dtype}}
            config = conftest.small_config.__wrapped__(tiny_folder, sums)(**sections)
            folder = tmp_path_factory.mktemp("one")
            made[dtype] = (
                config,
                train(config, rewards={"letters": letters}, run_folder=folder, console=Console(quiet=True)).folder,
            )
        return made[dtype]

    return run


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def runs(request, one_process, tmp_path_factory):
    """The weights' dtype, the folder of one process, and that in which two left what run_ranks.py says."""
    name, dtype = request.param
    config, one = one_process(dtype)
    folder = tmp_path_factory.mktemp(name)
    launch_two(config.model_copy(update={"training": config.training.model_copy(update={"sharding": name})}), folder)
    return dtype, one, folder


@needs_deepspeed
@pytest.mark.slow
def test_two_processes_are_one(runs):
    """Completions token for token; losses, moments (which are sums of clipped gradients) and weights to fp32 rounding."""
    dtype, one, folder = runs
    two = folder / "whole"
    if dtype == "bfloat16":  # what is rounded otherwise soon draws another token
        assert said(one)[:12] == said(two)[:12]
        row, other = numbers(one)[0], numbers(two)[0]
        assert "optimizer/updates_lost" in row  # DeepSpeed's optimiser does not say it
        assert other == pytest.approx({name: row[name] for name in other}, rel=2e-2, abs=1e-3)
        for folder in (one, two):  # DeepSpeed rounds to the nearest by itself
            masters = load_file(folder / "checkpoints/step-3/optimizer.safetensors")
            written = load_file(folder / "checkpoints/step-3/model/model.safetensors")
            exact = masters["master.embedding"]
            assert torch.equal(written["model.embed_tokens.weight"], dithered(exact.clone(), torch.bfloat16))
            assert not torch.equal(exact, exact.bfloat16().float())
        return
    assert_same_run(one, two, without="optimizer/updates_lost")
    file = Path("checkpoints/step-3/optimizer.safetensors")
    state, other = load_file(one / file), load_file(two / file)
    assert state.keys() == other.keys()
    for name, values in state.items():
        torch.testing.assert_close(other[name], values, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}")


@needs_deepspeed
@pytest.mark.slow
def test_two_processes_carry_on_bit_for_bit(runs):
    assert_same_bits(runs[2])


@needs_deepspeed
@pytest.mark.slow
def test_one_process_carries_on_what_two_began(runs, one_process, tmp_path):
    """Their checkpoint is one as it would have written."""
    dtype, one, folder = runs
    path = on_from_step_3(one_process(dtype)[0], folder, tmp_path / "on")
    assert [row["step"] for row in numbers(path)] == [4, 5]
    if dtype == "float32":
        for name, values in weights(one).items():
            torch.testing.assert_close(weights(path)[name], values, rtol=1e-4, atol=2e-5)


@needs_deepspeed
@pytest.mark.slow
def test_a_process_that_fails_ends_both(runs):
    """The error is the failing one's, in both."""
    folder = runs[2]
    for rank in range(2):
        assert "out of luck" in (folder / f"error-{rank}.txt").read_text()


@needs_deepspeed
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["zero2", "zero3"])
def test_an_update_without_a_finite_gradient_is_left_out(name, dtype, small_config, tmp_path):
    """By all processes, where a pass of one of them went wrong; the next update is made."""
    training = {"steps": 3, "micro_batch_tokens": 60, "sharding": name}
    config = small_config(training=training, model={"dtype": dtype}, optimizer={"max_grad_norm": 0.5})
    assert launch_two(config, tmp_path, tmp_path, script=HERE / "run_not_finite.py") == 0
    steps = numbers(tmp_path / "run")
    assert [step["optimizer/dropped_updates"] for step in steps] == [0, 1, 0]
    assert [step["progress/policy_version"] for step in steps] == [1, 1, 2]
    assert json.loads((tmp_path / "same.json").read_text())
    assert all(weight.isfinite().all() for weight in weights(tmp_path / "run").values())


LAUNCHED = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}


@needs_deepspeed
def test_the_launchers_stage_is_taken():
    assert zero_of_launcher({}) is None
    assert zero_of_launcher(LAUNCHED) == "zero3"
    assert zero_of_launcher({"ACCELERATE_USE_DEEPSPEED": "true"}) == "zero2"  # Accelerate's own default


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "1", "ZeRO stage 1"),
        ("ACCELERATE_DEEPSPEED_CONFIG_FILE", "ds.json", "deepspeed_config_file"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu", "offload_optimizer_device"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "nvme", "offload_param_device"),
        ("ACCELERATE_GRADIENT_CLIPPING", "1.0", "optimizer.max_grad_norm"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "training.micro_batch_tokens"),
    ],
)
def test_what_is_not_taken_from_the_launcher_is_refused(variable, value, said):
    with pytest.raises(ConfigError, match=said):
        zero_of_launcher(LAUNCHED | {variable: value})


def test_without_deepspeed_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("groupwise.distributed.sharding.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"groupwise\[deepspeed\]"):
        zero_of_launcher(LAUNCHED)
    with pytest.raises(ConfigError, match=r"groupwise\[deepspeed\]"):
        check_zero(Config(), LlamaConfig(), "zero2")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"optimizer": {"precision": "stochastic"}}, "optimizer.precision=stochastic"),
        ({"optimizer": {"offload": True}}, "optimizer.offload"),
        ({"model": {"dtype": "float16"}}, "model.dtype=float16"),
        ({"model": {"lora": {"rank": 4}, "quantization": "8bit"}}, "model.quantization=8bit"),
        ({"algorithm": {"advantage": {"type": "gae", "whiten": False}}}, "algorithm.advantage.type=gae"),
        ({"rollout": {"engine": "transformers"}}, "rollout.engine=transformers"),
    ],
)
def test_what_zero_does_not_go_with_is_refused(sections, said, monkeypatch):
    monkeypatch.setattr("groupwise.distributed.sharding.find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=said):
        check_zero(Config(**sections), LlamaConfig(), "zero3")
    check_zero(Config(), LlamaConfig(), "zero3")
    adapted = Config(model={"lora": {"rank": 4}})
    check_zero(adapted, LlamaConfig(), "zero3")
    with pytest.raises(ConfigError, match=r"zero2, which does not go with model\.lora"):
        check_zero(adapted, LlamaConfig(), "zero2")
    with pytest.raises(ConfigError, match="architecture 'gpt2'"):
        check_zero(Config(), GPT2Config(), "zero3")


def test_a_checkpoint_copies_the_reference_and_not_the_optimiser_once_more():
    """The optimiser's state, 12 bytes a weight, comes as a copy; stage 2's reference is the one in use."""
    pieces = {"master.down": torch.ones(3), "exp_avg.down": torch.ones(3), "down": torch.ones(3)}
    whole = Zero.whole_state(SimpleNamespace(stage=2, world=World(), _shapes=lambda: {"down": torch.Size([3])}), pieces)
    assert {name for name, tensor in whole.items() if tensor.data_ptr() == pieces[name].data_ptr()} == {
        "master.down",
        "exp_avg.down",
    }
    assert all(torch.equal(whole[name], piece) for name, piece in pieces.items())


def test_a_checkpoint_counts_steps_exactly_whatever_the_default_dtype():
    """bf16 holds whole numbers up to 256."""
    inner = SimpleNamespace(state={0: {"step": torch.tensor(257.0)}})
    optimizer = SimpleNamespace(named=[("weight", None)], _keys=(), world=World(), zero=SimpleNamespace(optimizer=inner))
    torch.set_default_dtype(torch.bfloat16)
    try:
        saved = ZeroAdamW.state(optimizer)
    finally:
        torch.set_default_dtype(torch.float32)
    assert saved["step.weight"] == 257
