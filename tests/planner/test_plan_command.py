"""What `groupwise plan` refuses, and what it hints at."""

import json

import pytest
from typer.testing import CliRunner

from groupwise.cli import app
from groupwise.cli.plan import _SHORT, _WHEN
from groupwise.planner.hardware import HARDWARE

ADAPTER = "model.lora={rank: 8}"


def plan(*words):
    result = CliRunner().invoke(app, ["plan", *words], env={"COLUMNS": "100"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def hints(*words):
    found = json.loads(plan(*words, "--json"))["hints"]
    assert all(f"hint: {one}" in plan(*words) for one in found)
    return found


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["training.sharding=zero2", ADAPTER], "sharding is zero2, which does not go with model.lora"),
        (
            ["training.sharding=fsdp2", ADAPTER, "model.quantization=4bit"],
            "sharding is fsdp2, which does not go with model.quantization=4bit",
        ),
    ],
)
def test_what_no_installation_could_run_is_not_planned(overrides, said):
    words = ["quickstart", "--hardware", "rtx-4090", *overrides]
    refused = CliRunner().invoke(app, ["plan", *words, "--world-size", "2"])
    assert refused.exit_code == 2, refused.output
    assert said in refused.stderr
    assert "fits" in plan(*words), "one process divides nothing"


@pytest.mark.parametrize("setting", ["model.quantization=4bit", "model.device_map=auto"])
def test_what_cannot_be_trained_is_not_planned(setting):
    refused = CliRunner().invoke(app, ["plan", "quickstart", "--hardware", "rtx-4090", setting])
    assert refused.exit_code == 2, refused.output
    assert f"{setting.partition('=')[0]} is {setting.partition('=')[2]}" in refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["rollout.max_completion_tokens=8192"],
            "rollout.max_completion_tokens is 8192, but the context of smollm2-135m-instruct is 8192",
        ),
        (["rollout.max_completion_tokens=10000000"], "lower it"),
        (
            ["rollout.engine=vllm", "rollout.vllm.max_model_tokens=8192", "rollout.max_completion_tokens=8192"],
            "but the context of",
        ),
        (["evaluation.max_completion_tokens=9000"], "evaluation.max_completion_tokens is 9000, but the context of"),
        (["--prompt-tokens", "8145"], "--prompt-tokens is 8145, but prompts may have at most 8144 tokens"),
        (
            ["--prompt-tokens", "101", "data.max_prompt_tokens=100"],
            "--prompt-tokens is 101, but prompts may have at most 100 tokens",
        ),
        (["--completion-tokens", "49"], "--completion-tokens is 49, but completions have at most 48 tokens"),
        (
            ["rollout.engine=vllm", "rollout.vllm.max_model_tokens=48"],
            "rollout.max_completion_tokens is 48, but vLLM takes 48 tokens of prompt and completion (rollout.vllm.max_model_tokens)",
        ),
    ],
)
def test_what_the_trainer_refuses_for_its_length_is_not_planned(words, said):
    """The quickstart's completions have at most 48 tokens."""
    refused = CliRunner().invoke(app, ["plan", "quickstart", "--hardware", "cpu", *words])
    assert refused.exit_code == 2, refused.output
    assert said in refused.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["polaris-3b-qlora"], "vllm, which is sent plain weights, but model.quantization is 4bit: use rollout.engine=auto"),
        (["gsm8k-0.5b", "--world-size", "2"], "which is for one process, but there are 2"),
        (["gsm8k-0.5b", "model.name=Qwen/Qwen2.5-7B"], "one sequence of 131072 tokens take 21.2 GiB: set it to 0.89 at least"),
        (["gsm8k-0.5b", "model.name=Qwen/Qwen2.5-7B", "rollout.vllm.max_model_tokens=2048"], "set it to 0.6 at least"),
    ],
)
def test_what_vllm_beside_the_trainer_cannot_do_is_not_planned(words, said):
    words = ["plan", *words, "--hardware", "rtx-4090", "rollout.engine=vllm"]
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2, refused.output
    assert said in refused.stderr
    if "share" in refused.stderr:
        enough = "rollout.vllm.gpu_memory_share=" + said.removesuffix(" at least").rpartition(" ")[2]
        assert CliRunner().invoke(app, [*words, enough]).exit_code == 1, "it does not fit beside the policy"


def test_any_phase_may_be_the_fullest():
    """With vLLM, which sleeps while the policy learns, an adapter's run is fullest as it loads."""
    found = plan("gsm8k-0.5b", "--hardware", "a100-80gb", "rollout.engine=vllm", "model.lora.rank=16")
    assert "on a100-80gb, while loading; the largest part is vLLM" in " ".join(found.split())
    words = ["quickstart", "--hardware", "rtx-4090", "beta=0.04", "training.offload_reference=true", "output.checkpoint_every=1"]
    small = ["training.micro_batch_tokens=64", "rollout.max_completion_tokens=8", "model.gradient_checkpointing=true"]
    made = json.loads(plan(*words, *small, "--json"))
    assert {phase["name"] for phase in made["phases"]} == _WHEN.keys() == _SHORT.keys()


def test_prompts_that_the_trainer_drops_are_not_planned():
    """A plan has no longer ones than the trainer keeps."""
    words = ["quickstart", "--hardware", "cpu", "rollout.max_completion_tokens=8000"]
    for more in (["data.max_prompt_tokens=1000"], ["--prompt-tokens", "1000", "data.on_long_prompt=drop"]):
        assert "assumed: prompts of 192 tokens (no longer one is trained on)" in plan(*words, *more)
    assert "prompts of 192 tokens (given)" in plan(*words, "--prompt-tokens", "192")
    assert "prompts of 192 tokens (no longer" in plan(*words), "a guess of 200"


@pytest.mark.parametrize("way", ["fsdp2", "zero3"])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden_act": "gelu"}, "this model (activation 'gelu' is not one of silu, gelu_pytorch_tanh)"),
        ({"model_type": "olmo"}, "this model (architecture 'olmo' is not one of llama"),
        ({}, None),
    ],
)
def test_a_model_that_the_run_cannot_divide_is_not_planned_divided(tmp_path, tiny_mistral, way, changed, said):
    """As the run does."""
    written = tiny_mistral().config.to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**written, **changed}))
    words = ["plan", "quickstart", f"model.name={tmp_path}", "--hardware", "rtx-4090", f"training.sharding={way}", "--world-size"]
    assert CliRunner().invoke(app, [*words, "1"]).exit_code == 0, "one process divides nothing"
    two = CliRunner().invoke(app, [*words, "2"])
    assert two.exit_code == (2 if said else 0), two.output
    assert said is None or f"training.sharding is {way}, which does not go with" in two.stderr
    assert said is None or said in two.stderr


def test_what_only_lacks_a_package_here_is_planned(monkeypatch):
    monkeypatch.setattr("groupwise.distributed.sharding.find_spec", lambda name: None)
    monkeypatch.setattr("groupwise.training.sharding.fsdp2._torch_fits", lambda: False)
    for way in ("zero2", "zero3", "fsdp2"):
        assert "fits" in plan("quickstart", "--hardware", "rtx-4090", "--world-size", "2", f"training.sharding={way}")


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("gsm8k-7b-8gpu", "--world-size 8 --hardware a100-80gb"),
        ("gsm8k-1.5b-8gpu", "--world-size 8 --hardware a100-80gb"),
        ("length-0.5b-2gpu", "--world-size 2 --hardware rtx-4090"),
    ],
)
def test_a_recipe_for_several_devices_that_is_planned_for_one_says_how_to_plan_it(recipe, options, monkeypatch):
    monkeypatch.setattr("groupwise.planner.hardware.present_gpu", lambda index: None)
    monkeypatch.setattr("groupwise.models.devices.computes_bf16", lambda: True)  # without, this machine's plan is in float32
    size, card = options.split(" --hardware ")
    result = CliRunner().invoke(app, ["plan", recipe, "--json"])
    (hint,) = json.loads(result.stdout)["hints"]
    assert options in hint
    (named,) = json.loads(CliRunner().invoke(app, ["plan", recipe, "--json", "--hardware", card]).stdout)["hints"]
    assert size in named
    assert "--hardware" not in named, "that was said already"
    assert hints(recipe, *options.split()) == []


def test_sharding_of_ones_own_is_hinted_at_too_and_a_plan_for_one_device_is_left_alone():
    (hint,) = hints("quickstart", "training.sharding=zero2", "--hardware", "rtx-4090")
    assert "training.sharding is zero2" in hint
    assert "--world-size 8" in hint
    assert hints("quickstart", "--hardware", "cpu") == []


def test_a_size_of_memory_says_whose_rates_it_takes():
    (hint,) = hints("quickstart", "--gpu-memory", "24GiB")
    assert "the times are those of a10g;" in hint
    assert hint.endswith("another's rates: rtx-4090, a10, l4, rtx-3090")
    (roomy,) = hints("quickstart", "--gpu-memory", "100GiB")
    assert "those of h100-nvl;" in roomy
    assert all(name in roomy or name == "cpu" for name in HARDWARE)
    assert hints("quickstart", "--gpu-memory", "24GiB", "--hardware", "rtx-4090") == []


def test_gigabytes_of_a_card_are_of_another_kind():
    (binary, _) = hints("quickstart", "--gpu-memory", "24GB")
    assert "24GB is 22.4 GiB" in binary
    assert "say 24GiB" in binary
    assert len(hints("quickstart", "--gpu-memory", "23GB")) == 1, "no card is sold with 23"
    assert len(hints("quickstart", "--gpu-memory", "24GiB")) == 1


def test_what_can_be_copied_is_not_broken_on_a_narrow_terminal():
    words = ["gsm8k-7b-8gpu", "--gpu-memory", "24GiB", "--world-size", "8"]
    lines = plan(*words).splitlines()
    suggested = json.loads(plan(*words, "--json"))["suggestions"]
    assert max(len(" ".join(one["settings"])) for one in suggested) > 80
    for one in suggested:
        assert any(line.startswith("  ") and all(f"{name}=" in line for name in one["settings"]) for line in lines)


@pytest.mark.parametrize(
    "words", ["gsm8k-7b-8gpu --hardware cpu", "gsm8k-1.5b-24gb --gpu-memory 24GiB", "quickstart algorithm.kl.beta=0.04"]
)
def test_numbers_of_the_table_are_whole_on_a_terminal_of_80_columns(words):
    result = CliRunner().invoke(app, ["plan", *words.split()], env={"COLUMNS": "80"})
    grid = [line for line in result.stdout.splitlines() if line.startswith(" ") and line.strip()]
    (totals,) = [line.split()[1:] for line in grid if line.startswith(" all ")]
    phases = json.loads(plan(*words.split(), "--json"))["phases"]
    assert len(phases) > 6
    assert totals == [f"{phase['bytes'] / 2**30:.2f}" for phase in phases]
    assert all(len(line) <= 80 for line in grid if not line.startswith("  "))
