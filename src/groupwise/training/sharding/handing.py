"""Weights that one process has read and all shall have: handed out as they are divided, one module at a time.

Each process by itself would read the whole model into the machine's memory, eight times 15 GB for 7B on a node of eight.
"""

from __future__ import annotations

import torch
from torch import nn

from groupwise.distributed import World
from groupwise.errors import RankError
from groupwise.models.blocks import Blocks

__all__ = ["place", "read_by_one"]


def read_by_one(blocks: Blocks, world: World) -> bool:
    """For all at once: whether the first process alone has the numbers of ``blocks``, and the others shapes on the meta device.

    Raises RankError where the processes have not the same model: other shapes, or, where each has read it, other numbers.
    """
    mine = [(name, tuple(p.shape), str(p.dtype)) for name, p in blocks.named_parameters()]
    found = world.gather((mine, any(p.is_meta for p in blocks.parameters())))
    for rank, (theirs, _) in enumerate(found):
        if theirs != found[0][0]:
            raise RankError(
                f"the model of process {rank} has other tensors than that of process 0: let all find the same files under model.name",
                1,
            )
    if any(hollow for _, hollow in found):
        return True
    world.check_equal("the weights that were read", list(blocks.parameters()))
    return False


@torch.no_grad()
def place(module: nn.Module, device: torch.device, dtype: torch.dtype, world: World, from_first: bool) -> None:
    """Move the tensors of ``module``, without its children's, to ``device``, in ``dtype``. ``from_first``: those of the first process,
    for all at once; bit for bit what each would have read."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        whole = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.data.to(device)
        if from_first:
            world.spread(whole)
        if parameter.is_meta:
            setattr(module, name, nn.Parameter(whole.to(dtype), requires_grad=parameter.requires_grad))
        else:
            parameter.data = whole.to(dtype)
