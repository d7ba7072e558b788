"""A GPU that is not there: tensors without memory on a CUDA device, whose operations refuse the CPU's.

A PyTorch without CUDA lets fake tensors have that device, but some of their methods ask for the real driver: here they are made of
operations that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, Qwen2Config

from groupwise.engines.builtin import decode
from groupwise.models import attention, ops
from groupwise.models.decoder import Decoder
from tests.conftest import TINY

CUDA = torch.device("cuda:0")


def _copy(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    torch._foreach_copy_([self], [source.expand(self.shape)])
    return self


def _contiguous(self: Tensor, memory_format: torch.memory_format = torch.contiguous_format) -> Tensor:
    return self if self.is_contiguous(memory_format=memory_format) else self.clone(memory_format=memory_format)


def _norm(x: Tensor, shape: list[int], weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """One operation, as a PyTorch with CUDA has it; others compose it of several."""
    return torch.ops.aten.mul.Tensor(x, weight), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


def _viewed(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None]]:
    """What all but the tensors among ``index`` select, and these."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if any(part is Ellipsis for part in parts):
        at = next(i for i, part in enumerate(parts) if part is Ellipsis)
        missing = tensor.dim() - sum(part is not None for part in parts) + 1
        parts[at : at + 1] = [slice(None)] * missing
    place, by_tensors = 0, []
    for part in parts:
        if isinstance(part, int):
            tensor = torch.ops.aten.select.int(tensor, place, part)
            continue
        if part is None:
            tensor = tensor.unsqueeze(place)
        elif isinstance(part, slice) and part != slice(None):
            tensor = torch.ops.aten.slice.Tensor(tensor, place, part.start, part.stop, part.step or 1)
        by_tensors.append(part if isinstance(part, Tensor) else None)
        place += 1
    return tensor, by_tensors


def _get(self: Tensor, index: Any) -> Tensor:
    tensor, by_tensors = _viewed(self, index)
    return tensor if all(one is None for one in by_tensors) else torch.ops.aten.index.Tensor(tensor, by_tensors)


def _set(self: Tensor, index: Any, value: Any) -> None:
    tensor, by_tensors = _viewed(self, index)
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=self.dtype, device=self.device)
    if all(one is None for one in by_tensors):
        _copy(tensor, value)
    else:
        torch.ops.aten.index_put_.default(tensor, by_tensors, value)


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """While it lasts, every new tensor is without memory, and one on ``cuda:0`` takes part in no operation with one on the CPU."""
    monkeypatch.setattr(ops, "_by_library", True)  # as where the self-check has found nothing wrong
    monkeypatch.setattr(ops, "_by_kernels", False)  # Triton's kernels need memory, and are there where a GPU is
    monkeypatch.setattr(decode, "_KERNELS_ON", frozenset())
    monkeypatch.setattr(torch.ops.aten, "_fused_rms_norm", _norm)
    monkeypatch.setattr(attention, "_by_flash", False)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    for name, method in {"copy_": _copy, "contiguous": _contiguous, "__getitem__": _get, "__setitem__": _set}.items():
        monkeypatch.setattr(Tensor, name, method)
    with FakeTensorMode(allow_non_fake_inputs=False) as mode:
        yield mode


@pytest.fixture
def cuda() -> torch.device:
    return CUDA


@pytest.fixture
def fake_decoder(fake_cuda: FakeTensorMode, cuda: torch.device) -> Callable[..., Decoder]:
    """``fake_decoder(**config)``: a Qwen2 in bf16 on the GPU that is not there."""

    def make(**config: Any) -> Decoder:
        with cuda:
            settings = Qwen2Config(**{**TINY, "tie_word_embeddings": True, **config})
            return Decoder(AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16))

    return make
