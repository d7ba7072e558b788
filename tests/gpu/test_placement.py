"""Where tensors lie: by fake ones on a CUDA device, whose operations refuse those of the CPU."""

from types import SimpleNamespace

import pytest
import torch

from groupwise.config import build_config
from groupwise.engines.builtin.cache import Cache
from groupwise.models import adapters, devices
from groupwise.models.layer import copy_filled
from groupwise.models.saving import Made
from groupwise.training import setup
from groupwise.training.critic import Critic
from groupwise.training.optimizer import MasterAdamW
from groupwise.training.reference import Reference


def test_operations_on_two_devices_are_refused(fake_cuda, cuda):
    """What the other tests here rest on."""
    with pytest.raises(RuntimeError, match=r"on the same device|two different devices"):
        torch.ones(2, device=cuda) + torch.ones(2)


def test_a_resumed_value_head_has_its_moments_beside_it(fake_cuda, cuda):
    """A checkpoint's tensors are on the CPU. On CUDA the first step after ``--resume`` failed."""
    config = build_config({"algorithm": {"preset": "ppo"}}).algorithm

    def stepped():
        critic = Critic(8, config, cuda)
        for parameter in critic.parameters:
            parameter.grad = torch.ones_like(parameter)
        return critic

    before, after = stepped(), stepped()
    before.adamw.step()
    after.load_state({name: tensor.detach().to("cpu") for name, tensor in before.state().items()})
    after.adamw.step()
    kept = after.adamw.state[after.weight]
    assert (kept["exp_avg"].device, kept["exp_avg_sq"].device, kept["step"].device) == (cuda, cuda, torch.device("cpu"))


def test_a_whole_copy_of_an_adapted_model_is_on_the_cpu_with_its_adapter(fake_cuda, cuda):
    """The factors lie where they learn. A kernel of the CPU merged them with the gathered base, and ended the process."""
    layer = torch.nn.Linear(32, 16, bias=False, device=cuda)
    layer.lora = torch.nn.Parameter(torch.ones(4, 32, device=cuda))
    layer.register_buffer("table", torch.ones(3, device=cuda))
    whole = copy_filled(layer, {"down": [layer.weight]}, {"down": torch.ones(16, 32)})
    assert {tensor.device.type for tensor in (*whole.parameters(), *whole.buffers())} == {"cpu"}
    assert (whole.lora.requires_grad, whole.weight.requires_grad) == (True, False)
    assert layer.lora.device == cuda


def test_a_model_that_is_merged_at_once_is_made_on_the_cpu(fake_cuda, cuda, monkeypatch):
    """A GPU that a base in 4 bits fills has no room for whole weights: a run on 24 GB ended there, after its last step."""
    plain = torch.nn.Linear(3, 2, device="meta")
    plain.tie_weights = lambda: None
    weight = Made(torch.Size((2, 3)), torch.float32, lambda: torch.ones(2, 3, device=cuda))
    monkeypatch.setattr(adapters, "merged_state", lambda model: (plain, {"weight": weight, "bias": torch.ones(2, device=cuda)}))
    assert {parameter.device.type for parameter in adapters.merged(plain).parameters()} == {"cpu"}


def test_one_stream_is_waited_for_and_nothing_on_a_cpu(monkeypatch):
    """A wait for the whole device would break a graph that another thread captures."""
    asked = []
    stream = SimpleNamespace(synchronize=lambda: asked.append("stream"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: pytest.fail("the whole device was waited for"))
    devices.wait_for(torch.device("cuda"))
    devices.wait_for(torch.device("cpu"))
    assert asked == ["stream"]


@pytest.mark.parametrize(
    ("native", "dtype", "told"),
    [(False, "auto", True), (False, "bfloat16", True), (False, "float16", False), (True, "auto", False)],
)
def test_a_gpu_that_emulates_bf16_is_told_of(native, dtype, told, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: native or including_emulation)
    note = setup._note_on_emulated_bf16(build_config({"model": {"dtype": dtype}}))
    assert ("model.dtype=float16" in (note or "")) == told


def test_a_cpu_has_no_note_on_a_gpu():
    assert setup._note_on_emulated_bf16(build_config({"model": {"device": "cpu", "dtype": "bfloat16"}})) is None


@pytest.mark.parametrize(("prompt", "completion"), [(1, 1), (9, 511), (255, 256), (300, 2000)])
def test_tables_on_a_gpu_are_aligned(prompt, completion, fake_cuda, cuda):
    """Scores over them are rows of so many numbers: at odd lengths no fast product takes them."""

    def cache(device):
        return Cache(
            layers=1, kv_heads=2, head_width=16, groups=2, prompt_tokens=prompt, rows=3, completion_tokens=completion,
            dtype=torch.bfloat16, device=device,
        )  # fmt: skip

    on_gpu, on_cpu = cache(cuda), cache(torch.device("cpu"))
    for filled in (1, min(257, completion), completion):
        on_gpu.reserve(filled, 3)
        on_cpu.reserve(filled, 3)
        assert on_gpu.prompt_room % 16 == on_gpu.room % 16 == 0
        assert on_gpu.own[0][0].shape[2] == on_gpu.room >= filled
        assert filled <= on_gpu.fillable <= completion, "nobody goes beyond the positions that are known"
        assert on_cpu.fillable == on_cpu.room <= completion
        assert on_cpu.prompt_room == prompt


def test_masters_outside_of_the_gpu_are_pinned_and_copied_without_waiting(fake_cuda, cuda, monkeypatch):
    """From pageable memory each update would wait for the bus, at a fraction of its rate."""
    pinned, moved = [], []
    to = torch.Tensor.to

    def noting(self, *where, **how):
        if "non_blocking" in how:
            moved.append((str(where[0]), how["non_blocking"]))
        return to(self, *where, **how)

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append((self.device.type, self.shape)) or self)
    weights = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16, device=cuda))
    optimizer = MasterAdamW([("w", weights)], build_config({"optimizer": {"offload": True}}).optimizer)
    monkeypatch.setattr(torch.Tensor, "to", noting)
    optimizer.publish()
    assert pinned == [("cpu", (3, 2))]
    assert moved == [(str(weights.device), True)]


def test_a_parked_reference_lies_in_pinned_memory(monkeypatch):
    """From pageable memory a copy to a GPU is a wait, at a fraction of the bus's rate."""
    weights = torch.nn.Linear(3, 2, device="cpu")
    scorer = SimpleNamespace(
        device=torch.device("cuda"), module=weights, named_parameters=lambda: list(weights.named_parameters())
    )
    pinned, moved = [], []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self.shape) or self)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, device, **how: moved.append((device.type, how["non_blocking"])) or self)
    reference = Reference(scorer, offload=True, copied=lambda policy: policy)
    with reference.present():
        pass
    assert pinned == [(2, 3), (2,)]
    assert moved == [("cuda", True)] * 2
