"""Weights as vLLM's worker reads them: out of files, as the trainer's own tensors, as handles to memory of another process, or over a wire.

Files always work. Tensors are handed over as they are where vLLM computes in the trainer's process. To a server on the trainer's GPU go
handles, which are a few hundred bytes for each tensor: the worker opens them, and reads the trainer's memory in place (CUDA IPC). To one on
other GPUs of the machine they are broadcast (``wire.py``).

Handles are pickled by torch.multiprocessing, on a GPU and on a CPU alike. Unpickled are the functions that open memory, and nothing else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Adapter", "Named", "Offer", "Source", "device_id", "handles_to", "open_handles", "read"]

Named = Callable[[], Iterable[tuple[str, Tensor]]]
"""Name and tensor of everything; each call begins again."""
Offer = dict[str, Any]
"""What a worker has to know to join the trainer's group (`wire.Wire`); plain values."""


@dataclass(frozen=True)
class Adapter:
    """An adapter alone, over weights that vLLM holds: peft's own files."""

    config: dict[str, Any]
    """What ``adapter_config.json`` says."""
    files: Sequence[str] = ()
    """Safetensors of its factors."""


Source = Sequence[str] | bytes | Offer | Named | Adapter
"""Safetensors files, handles (`handles_to`), an offer, tensors of this process, or an adapter alone."""

_OPENING = {
    "torch.multiprocessing.reductions": (
        "rebuild_cuda_tensor", "rebuild_storage_filename", "rebuild_tensor", "rebuild_typed_storage",
    ),
    "torch.storage": ("TypedStorage", "UntypedStorage"),
    "torch": ("Size", "Tensor", "bfloat16", "float16", "float32"),
}  # fmt: skip
_DEVICE_ARGUMENT = 6
"""Place of the card's index among the arguments of ``rebuild_cuda_tensor``."""


def device_id(device: torch.device) -> str:
    """What tells this GPU from every other, in whatever process and under whatever index; empty for what is none."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def handles_to(named: Iterable[tuple[str, Tensor]]) -> tuple[bytes, list[Tensor]]:
    """Handles to tensors of this process, and the tensors, which must live until the other process has read them.

    What is in the works on the GPU is finished first: the other process knows nothing of this one's queue. A tensor on the CPU moves
    into shared memory by this.
    """
    from multiprocessing.reduction import ForkingPickler

    import torch.multiprocessing  # registers how tensors are pickled

    kept = [(name, tensor.detach()) for name, tensor in named]
    if any(tensor.is_cuda for _, tensor in kept):
        torch.cuda.synchronize()
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")  # the other is no child of this process, and inherits nothing
    try:
        return bytes(ForkingPickler.dumps(kept)), [tensor for _, tensor in kept]
    finally:
        torch.multiprocessing.set_sharing_strategy(before)


def read(source: Sequence[str] | Named) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything in the source."""
    return iter(source()) if callable(source) else _read_files(source)


def _read_files(files: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (the object is no mapping)
                yield name, tensors.get_tensor(name)


def open_handles(handles: bytes) -> list[tuple[str, Tensor]]:
    """What they lead to. Raises ValueError for handles that are none, or lead nowhere."""
    try:
        found: list[tuple[str, Tensor]] = _Opening(io.BytesIO(handles)).load()
    except (pickle.UnpicklingError, EOFError, RuntimeError, TypeError) as error:
        raise ValueError(f"the trainer's memory cannot be opened ({' '.join(str(error).split())[:300]})") from error
    return found


class _Opening(pickle.Unpickler):
    """Knows how memory is opened, and no other name."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _OPENING.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} opens no memory")
        found = super().find_class(module, name)
        return _on_this_card(found) if name == "rebuild_cuda_tensor" else found


def _on_this_card(rebuild: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same card may have another index in the process that opens."""

    def here(*arguments: Any) -> Tensor:
        before, after = arguments[:_DEVICE_ARGUMENT], arguments[_DEVICE_ARGUMENT + 1 :]
        return rebuild(*before, torch.cuda.current_device(), *after)

    return here
