"""Gradients that lie on the CPU (``optimizer.offload``) where the processes' group speaks for GPUs alone, as NCCL does.

The GPU is played by tensors that are marked as being there, and the group by one that knows only marked ones: two equal processes.
"""

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from groupwise.distributed import World
from groupwise.distributed.failures import LostTouch


class OneGPU(TorchFunctionMode):
    """What ``to`` puts on the device "cuda:3" is a copy, and known."""

    def __init__(self):
        super().__init__()
        self.there = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.to and args[1:] == (torch.device("cuda:3"),):
            self.there.append(args[0].clone())
            return self.there[-1]
        return function(*args, **(kwargs or {}))


@pytest.fixture
def gpu(monkeypatch):
    control = object()

    def all_reduce(tensor, group=None):
        if group is not control and all(tensor is not known for known in gpu.there):
            raise RuntimeError("No backend type associated with device type cpu")
        tensor *= 2

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    gpu = OneGPU()
    gpu.control = control
    with gpu:
        yield gpu


def test_the_group_that_is_played_here_refuses_tensors_on_the_cpu(gpu):
    with pytest.raises(LostTouch, match="device type cpu"):
        World(0, 2, control=gpu.control).all_reduce(torch.ones(3))


def test_gradients_on_the_cpu_travel_by_the_gpu_and_come_back(gpu):
    world = World(0, 2, control=gpu.control, device=torch.device("cuda:3"))
    gradients = [torch.arange(6.0).view(2, 3), None, torch.ones(4, dtype=torch.bfloat16)]
    world.sum_gradients(gradients, lambda index: pytest.fail("none has it"))
    assert gradients[0].tolist() == [[0, 2, 4], [6, 8, 10]]
    assert gradients[1] is None
    assert gradients[2].tolist() == [2, 2, 2, 2]
    assert [t.dtype for t in gpu.there] == [torch.float32], "one message, in fp32"


def test_a_sum_of_a_tensor_on_the_cpu_is_made_in_place(gpu):
    norm = torch.tensor(3.0)
    World(0, 2, control=gpu.control, device=torch.device("cuda:3")).all_reduce(norm)
    assert norm.item() == 6
