"""Errors by which a GPU says that its memory ran out: the allocator's own, and those of libraries that take memory by themselves."""

import pytest
import torch

from groupwise.engines.wrappers import RowLimit
from groupwise.training.microbatches import PassBudget

SHORT = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
]
OTHER = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("NCCL error: unhandled cuda error\nncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 2 'out of memory'"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
    MemoryError(),
]  # fmt: skip


def failing_first(error):
    errors = [error]

    def action():
        if errors:
            raise errors.pop()
        return "done"

    return action


def attempts(action):
    rows, budget = RowLimit(8), PassBudget(64)
    rows.tell = lambda sentence: None
    return [
        lambda: rows.attempt(action(), lambda: 8),
        lambda: budget.attempt(action(), lambda: 64, lambda: None),
    ]


@pytest.mark.parametrize("error", SHORT, ids=str)
def test_less_is_tried_at_once(error):
    assert [attempt() for attempt in attempts(lambda: failing_first(error))] == ["done", "done"]


@pytest.mark.parametrize("error", OTHER, ids=repr)
def test_what_less_work_does_not_help_against_is_raised(error):
    for attempt in attempts(lambda: failing_first(error)):
        with pytest.raises(type(error)) as caught:
            attempt()
        assert caught.value is error
