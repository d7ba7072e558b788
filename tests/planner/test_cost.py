"""What a step costs, by hand counts: operations, traffic, an hour's work, and the rates of this machine."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from groupwise.config import build_config, load_config
from groupwise.config.schema import EntropyConfig, KLConfig, ModelConfig, ValueConfig
from groupwise.errors import ConfigError
from groupwise.planner import HARDWARE, ModelShape, Setup, hardware, make_plan
from groupwise.planner.cost import decode_step_s, link_bytes_per_s, step_cost
from groupwise.planner.plan import plan_run, training_problems
from groupwise.planner.shape import find_shape
from groupwise.planner.state import exchange_bytes


def test_operations_are_those_of_a_hand_count():
    """One prompt of 3, two completions of 2 tokens: 3 + 2 rows, 4 predictions, 6 pairs in the prompt and 3 + 1 in each completion."""
    shape = ModelShape(8, 16, 2, 2, 1, 4, 10, True)
    rollout = {"prompts_per_step": 1, "completions_per_prompt": 2, "max_completion_tokens": 2}
    setup = Setup(build_config({"rollout": rollout, "algorithm": {"kl": None}}), shape, "cpu", prompt_tokens=3)
    matrices = 8 * (2 + 2) * 4 + 8 * 8 + 3 * 8 * 16
    forward = 2 * 2 * matrices * 5 + 2 * 8 * 10 * 4 + 4 * 14 * 2 * 8
    cost = step_cost(setup, HARDWARE["cpu"])
    assert cost.sampling_flops == forward
    assert cost.learning_flops == 3 * forward
    again = setup.changed(model__gradient_checkpointing=True, algorithm__kl=KLConfig(beta=0.1), algorithm__updates_per_batch=2)
    assert step_cost(again, HARDWARE["cpu"]).learning_flops == 2 * 4 * forward + forward
    critic = forward - 2 * 8 * 10 * 4  # without the output head
    valued = (again.changed(algorithm__value=ValueConfig(critic=name)) for name in ("shared", "copy"))
    shared, own = (step_cost(setup, HARDWARE["cpu"]) for setup in valued)
    assert shared.learning_flops == 2 * 4 * forward + 2 * forward, "its values are read from a pass of the policy"
    assert own.learning_flops == 2 * 4 * forward + forward + (1 + 2 * 4) * critic
    assert own.optimizer_s == 2 * shared.optimizer_s
    few = setup.changed(algorithm__entropy=EntropyConfig(top_share=0.2))
    assert step_cost(few, HARDWARE["cpu"]).learning_flops == 4 * forward, "entropies are known after a pass"


def test_layers_with_a_window_cost_what_lies_within_it():
    """One layer of two sees the last 2 positions: 1 + 2 + 2 of the prompt's three, and 2 of each completion's row."""
    rollout = {"prompts_per_step": 1, "completions_per_prompt": 2, "max_completion_tokens": 2}
    config = build_config({"rollout": rollout, "algorithm": {"kl": None}, "model": {"dtype": "bfloat16"}})
    full, windowed = (
        Setup(config, ModelShape(8, 16, 2, 2, 1, 4, 10, True, windows=windows), "cpu", prompt_tokens=3)
        for windows in ((), (None, 2))
    )
    flops = [step_cost(setup, HARDWARE["cpu"]).sampling_flops for setup in (full, windowed)]
    assert flops[0] - flops[1] == 4 * 8 * (14 - (5 + 2 * 2))
    by_module = [replace(setup, shape=replace(setup.shape, uncovered="other")) for setup in (full, windowed)]
    assert len({step_cost(setup, HARDWARE["cpu"]).sampling_flops for setup in by_module}) == 1, "a mask saves no work"


@pytest.mark.parametrize("length", [1, 3, 9])
def test_decoding_reads_no_further_than_the_window(length):
    """Where reading takes longest: a window of 4 over a prompt of 3 that two rows share, in one layer of two."""
    config = build_config({"rollout": {"completions_per_prompt": 2}, "model": {"dtype": "bfloat16"}})
    slow = replace(HARDWARE["cpu"], bytes_per_s=1.0, bandwidth_share=1.0)
    shape = ModelShape(8, 16, 2, 2, 1, 4, 10, True, windows=(None, 4))

    def read(shape, device="cpu", dtype="bfloat16"):
        typed = config.model_copy(update={"model": config.model.model_copy(update={"dtype": dtype})})
        return decode_step_s(Setup(typed, shape, device, prompt_tokens=3), slow, 2, length)

    own = min(length, 4)
    prompt = min(3, 4 - own)
    out_of_sight = (3 - prompt) + 2 * (length - own)
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        assert read(replace(shape, windows=()), dtype=dtype) - read(shape, dtype=dtype) == out_of_sight * shape.cached(size) / 2
    saved = read(replace(shape, windows=()), "cuda") - read(shape, "cuda")
    assert saved == pytest.approx(out_of_sight * shape.cached(2) / 2), "its kernels begin at the window"


def test_beyond_one_machine_the_network_s_rate_counts():
    config = load_config("gsm8k-7b-8gpu")

    def sent(processes, **more):
        made = make_plan(config, HARDWARE["a100-80gb"], world_size=processes, **more)
        return made, made.cost.communication_s * link_bytes_per_s(made.setup, made.hardware)

    (eight, one_machine), (sixteen, two) = sent(8), sent(16)
    assert link_bytes_per_s(eight.setup, eight.hardware) == 300e9
    assert link_bytes_per_s(sixteen.setup, sixteen.hardware) == 50e9
    assert one_machine == pytest.approx(exchange_bytes(eight.setup))
    assert two == pytest.approx(exchange_bytes(sixteen.setup))
    assert "50 GB/s" in " ".join(sixteen.assumptions)
    assert link_bytes_per_s(sent(2, gpus_per_node=1)[0].setup, HARDWARE["a100-80gb"]) == 50e9
    slow = make_plan(config, HARDWARE["rtx-4090"], world_size=16)
    assert link_bytes_per_s(slow.setup, slow.hardware) == HARDWARE["rtx-4090"].link_bytes_per_s, (
        "its bus is slower than the network"
    )


@pytest.mark.parametrize("sharding", ["none", "zero2", "zero3", "fsdp2"])
def test_what_a_step_sends_is_a_hand_count(sharding):
    """Of two processes each sends half of what is gathered or scattered. Two passes and three updates, and a reference."""
    shape = ModelShape(8, 16, 2, 2, 1, 4, 10, True)
    config = build_config(
        {
            "model": {"dtype": "bfloat16"},
            "rollout": {"prompts_per_step": 4, "completions_per_prompt": 2, "max_completion_tokens": 2},
            "training": {"sharding": sharding, "micro_batch_tokens": 10},
            "algorithm": {"kl": {"beta": 0.1}, "updates_per_batch": 3},
        }
    )
    setup = Setup(config, shape, "cuda", 2, prompt_tokens=3)
    assert setup.passes == 2
    weights, gradients = 2 * shape.parameters, 4 * shape.parameters
    an_update = {
        "none": 2 * gradients,  # scattered once, and gathered
        "zero2": 2 * gradients + weights,  # scattered in each of two passes
        "zero3": 2 * gradients + 4 * weights,  # gathered for each pass forward and backward
    }
    a_step = 3 * an_update[sharding.replace("fsdp2", "zero3")] + (3 * weights if sharding in ("zero3", "fsdp2") else 0)
    assert exchange_bytes(setup) == a_step / 2, "beside updates: the reference's two passes, and the gathering for sampling"
    card = HARDWARE["a100-80gb"]
    assert step_cost(setup, card).communication_s == pytest.approx(a_step / 2 / card.link_bytes_per_s)


def test_an_offloaded_update_crosses_the_bus_with_gradients_and_masters():
    """A gradient of 2 bytes for each pass one way and a master of 4 the other, at 20 GB/s; the optimiser's traffic, and that of
    adding gradients to an fp32 sum, is then the machine's memory's."""
    card, own = HARDWARE["a100-80gb"], HARDWARE["cpu"].bytes_per_s
    common = ["training.sharding=none", "algorithm.kl=null", "optimizer.precision=masters"]
    near, away = (
        make_plan(load_config("gsm8k-1.5b-8gpu", [*common, f"optimizer.offload={offload}"]), card).setup
        for offload in ("false", "true")
    )
    slower = step_cost(away, card).optimizer_s - step_cost(near, card).optimizer_s
    traffic, passes = (4 + 2 * 8 + 2 * 4 + 2) * near.trained, away.passes
    assert passes > 1
    crossing = (2 * passes + 4) * near.trained / 20e9 + (passes - 1) * (4 + 4 + 2) * near.trained / own
    assert slower == pytest.approx(crossing + traffic * (1 / own - 1 / (card.bytes_per_s * card.bandwidth_share)))
    shorter = away.config.training.micro_batch_tokens // 2
    near, more = (setup.changed(training__micro_batch_tokens=shorter) for setup in (near, away))
    assert more.passes > passes
    assert step_cost(more, card).step_s > step_cost(away, card).step_s
    assert step_cost(more, card).step_s - step_cost(near, card).step_s > slower


def test_an_hour_and_an_epoch_are_those_of_the_step():
    made = make_plan(load_config("polaris-3b"), HARDWARE["a100-40gb"])
    found = made.to_json()
    assert found["prompts_per_hour"] == pytest.approx(8 * 3600 / found["step"]["step_s"])
    assert found["completions_per_hour"] == pytest.approx(4 * found["prompts_per_hour"])
    assert found["epoch_hours"] == pytest.approx((53291 - 500) / found["prompts_per_hour"])
    assert found["epoch_steps"] == math.ceil((53291 - 500) / load_config("polaris-3b").rollout.prompts_per_step)
    counts = {"gsm8k-0.5b": 7473, "quickstart": 1000}
    assert {name: training_problems(load_config(name)) for name in counts} == counts
    assert training_problems(load_config("gsm8k-0.5b", ["data.limit=100"])) == 100
    assert training_problems(load_config("gsm8k-0.5b", ["data.source=mine.jsonl"])) is None
    assert training_problems(load_config("gsm8k-0.5b", ["data.source=GSM8K"])) == 7473
    assert training_problems(load_config("gsm8k-0.5b", ["data.split=test", "data.eval_split=null"])) is None, "another split"
    assert training_problems(load_config("polaris-3b", ["data.limit=1000"])) == 1000, "cut when some are held out already"
    assert training_problems(load_config(None, ["data.limit=50000"])) == 20_000, "the generator makes no more"


GPUS = [
    # what the driver says, MiB, which card of the table, and the data sheet's dense bf16 TFLOP/s
    ("NVIDIA A100-SXM4-40GB", 40960, "a100-40gb", 312),
    ("NVIDIA A100-SXM4-80GB", 81920, "a100-80gb", 312),
    ("NVIDIA A100 80GB PCIe", 81920, "a100-80gb", 312),
    ("NVIDIA L4", 23034, "l4", 121),
    ("NVIDIA L40S", 46068, "l40s", 362),
    ("NVIDIA L40", 46068, "l40", 181),
    ("NVIDIA A10", 23028, "a10", 125),
    ("NVIDIA A10G", 23028, "a10g", 70),
    ("NVIDIA GeForce RTX 4090", 24564, "rtx-4090", 165),
    ("NVIDIA GeForce RTX 5090", 32607, "rtx-5090", 209),
    ("NVIDIA RTX A6000", 49140, "rtx-a6000", 155),
    ("NVIDIA RTX 6000 Ada Generation", 49140, "rtx-6000-ada", 364),
    ("NVIDIA H100 80GB HBM3", 81559, "h100", 989),
    ("NVIDIA H100 PCIe", 81559, "h100-pcie", 756),
    ("NVIDIA H100 NVL", 95830, "h100-nvl", 835),
    ("NVIDIA H200", 143771, "h200", 989),
    ("NVIDIA B200", 183359, "b200", 2250),
    # not in the table: rates by memory, and never another card's memory
    ("NVIDIA GeForce RTX 4090 Laptop GPU", 16376, "a10g", 70),
    ("Quadro RTX 6000", 24576, "a10g", 70),
    ("NVIDIA A40", 46068, "rtx-a6000", 155),
]


@pytest.mark.parametrize(("label", "mebibytes", "name", "tflops"), GPUS, ids=[label for label, *_ in GPUS])
def test_a_card_is_known_by_its_whole_name_and_has_its_own_memory(label, mebibytes, name, tflops, monkeypatch):
    monkeypatch.setattr(hardware, "present_gpu", lambda index: (label, mebibytes * 2**20))
    found = hardware.choose_hardware("auto", None, None)
    assert (found.name, found.memory_bytes) == (name, mebibytes * 2**20)
    assert round(found.flops_per_s / 1e12) == tflops


def test_a_gpu_that_a_process_does_not_see_is_not_planned_for(monkeypatch):
    def answer(query, **rest):
        named = [word.removeprefix("--id=") for word in query if word.startswith("--id=")]
        return SimpleNamespace(stdout="".join(f"card {card}, 81559\n" for card in named or range(4)))

    monkeypatch.setattr(hardware.subprocess, "run", answer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    for visible, found, *index in (
        (None, "0"), ("", None), ("-1", None), ("3,1", "3"), ("GPU-8f6d", "GPU-8f6d"),
        (None, "1", 1), ("3, 1", "1", 1), ("3", None, 1), ("4", None),
    ):  # fmt: skip
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert hardware.present_gpu(*index) == (None if found is None else (f"card {found}", 81559 * 2**20))


def test_cards_that_differ_are_counted_as_cuda_counts_them(monkeypatch):
    """nvidia-smi goes by the bus and CUDA by speed: a plan for ``cuda:0`` was one for the slower card."""
    names = {"NVIDIA GeForce RTX 3060": 12288, "NVIDIA GeForce RTX 4090": 24564}
    by_bus = [(name, mebibytes * 2**20) for name, mebibytes in names.items()]
    by_speed = [SimpleNamespace(name=name, total_memory=size) for name, size in reversed(by_bus)]
    listed = "".join(f"{name}, {mebibytes}\n" for name, mebibytes in names.items())
    monkeypatch.setattr(hardware.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=listed))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", by_speed.__getitem__)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    assert [hardware.present_gpu(index) for index in (0, 1)] == by_bus[::-1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hardware.present_gpu(0) == by_bus[0], "without CUDA in PyTorch the driver's answer is all there is"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert [hardware.present_gpu(index) for index in (0, 1)] == by_bus


def test_a_gpu_without_memory_of_its_own_has_the_machine_s(monkeypatch):
    """As in a DGX Spark, for which a plan was one for its CPU."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(hardware, "total_memory_bytes", lambda: 119 * 2**30)
    monkeypatch.setattr(hardware.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout="NVIDIA GB10, [N/A]\n"))
    assert hardware.present_gpu() == ("NVIDIA GB10", 119 * 2**30)
    found = hardware.choose_hardware("auto", None, None)
    assert (found.name != "cpu", found.memory_bytes) == (True, 119 * 2**30)


@pytest.mark.parametrize("error", [FileNotFoundError("nvidia-smi"), hardware.subprocess.CalledProcessError(6, "nvidia-smi")])
def test_a_gpu_of_which_the_driver_says_nothing_is_asked_of_pytorch(error, monkeypatch):
    """A slice of a card (MIG), and a machine without nvidia-smi."""

    def fail(*_, **__):
        raise error

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-3c54,MIG-8f6d")
    monkeypatch.setattr(hardware.subprocess, "run", fail)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    slices = [SimpleNamespace(name=f"NVIDIA H100 80GB HBM3 MIG {n}g", total_memory=n * 10 * 2**30) for n in (1, 2)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", slices.__getitem__)
    assert [hardware.choose_hardware(name, None, None).memory_bytes for name in ("auto", "cuda:1")] == [10 * 2**30, 20 * 2**30]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert hardware.present_gpu(1) is None


def test_a_gpu_that_is_not_here_is_not_planned_for_as_a_cpu(monkeypatch):
    monkeypatch.setattr(hardware, "present_gpu", lambda index: None)
    for device in ("cuda", "cuda:1"):
        with pytest.raises(ConfigError, match=f"model.device is {device}, .* name --hardware or --gpu-memory"):
            hardware.choose_hardware(device, None, None)
        assert hardware.choose_hardware(device, "h100", None).name == "h100"
        assert hardware.choose_hardware(device, None, 24 * 2**30).memory_bytes == 24 * 2**30
    assert hardware.choose_hardware("auto", None, None).name == "cpu"


def test_the_gpu_that_is_measured_is_the_run_s(monkeypatch):
    asked = []
    monkeypatch.setattr("groupwise.planner.plan.measure", lambda device, *rest: asked.append(device) or HARDWARE["h100"])
    for device, named in (("cuda:1", None), ("auto", None), ("auto", "cpu")):
        plan_run(load_config("quickstart", [f"model.device={device}"]), hardware=named, measured=True)
    assert asked == ["cuda:1", "auto", "cpu"]


def test_this_machine_can_be_measured(monkeypatch):
    monkeypatch.setattr(hardware, "_fastest", lambda action, wait: action() is None or 0.25)
    found = hardware.measure("cpu", 64, 128)
    assert found.name == "cpu"
    assert found.flops_per_s == 2 * 1024 * 64 * 256 / 0.25
    assert found.bytes_per_s == 2 * 4 * 2**25 / 0.25
    assert str(torch.get_num_threads()) in found.source
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="there is none here"):
            hardware.measure("cuda")


def test_the_link_of_a_measured_card_is_its_own():
    names = ("NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce GTX 1080 Ti", "cpu")
    assert [hardware.link_of(name) for name in names] == [12e9, 450e9, 12e9, HARDWARE["cpu"].link_bytes_per_s]


def test_a_measured_cpu_is_planned_in_the_numbers_that_it_computes(monkeypatch):
    monkeypatch.setattr("groupwise.models.devices.computes_bf16", lambda: False)
    monkeypatch.setattr("groupwise.planner.plan.measure", lambda *asked: HARDWARE["cpu"])
    config = load_config("quickstart")
    assert plan_run(config, hardware="cpu", measured=True).setup.config.model.dtype == "float32"
    assert plan_run(config, hardware="cpu").setup.config.model.dtype == "auto", "a data sheet's is another machine"


def test_the_fastest_call_counts(monkeypatch):
    """By a clock that only the calls move. The first is not counted, and those in the time that is left are."""
    now, durations = [0], iter([0, 9, 3, 7, 1])
    monkeypatch.setattr(hardware, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def action():
        now[0] += next(durations)

    assert hardware._fastest(action, lambda: None, seconds=15) == 3
    assert next(durations) == 1, "there was no time for it"


def test_weights_of_8_bits_are_read_in_half_of_the_time():
    name = "Qwen/Qwen2.5-1.5B-Instruct"
    configs = [load_config("gsm8k-1.5b-cpu", [f"model.name={name}", *more]) for more in ([], ["rollout.quantization=8bit"])]
    setups = [Setup(config, find_shape(ModelConfig(name=name)), "cpu") for config in configs]
    plain, rounded = (decode_step_s(one, HARDWARE["cpu"], 1, 1) for one in setups)
    assert rounded == pytest.approx(plain / 2, rel=0.01)
    assert rounded > 0


def test_a_decode_step_has_a_floor_on_a_gpu_whatever_the_card():
    """1.5B at 256 rows of 256 tokens: 346 kernels; as fast as its arithmetic it would be 2.1 ms on an H200."""
    config = load_config("gsm8k-1.5b-8gpu", ["rollout.completions_per_prompt=8"])
    setup = Setup(config, find_shape(config.model), "cuda", prompt_tokens=256)
    floor = 4e-6 * (28 * 10 + 66)
    endless = replace(HARDWARE["h200"], bytes_per_s=1e18, flops_per_s=1e21)
    h200, fast = (decode_step_s(setup, card, 256, 256) for card in (HARDWARE["h200"], endless))
    assert 3.3e-3 < h200 < 3.7e-3, "what counting predicts"
    assert floor < fast < h200
    assert decode_step_s(replace(setup, device="cpu"), HARDWARE["cpu"], 256, 256) > 0.05
    by_vllm = Setup(
        config.model_copy(update={"rollout": config.rollout.model_copy(update={"engine": "vllm"})}), setup.shape, "cuda"
    )
    assert 20_000 < 256 / decode_step_s(by_vllm, HARDWARE["h200"], 256, 256) < 40_000
