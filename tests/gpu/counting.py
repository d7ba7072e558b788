"""What a computation asks of a device, counted as PyTorch dispatches it: kernels, and waits of the host for an answer."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAITS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "unique2", "_unique2", "unique_dim", "bincount"}
_FREE = {"_unsafe_view", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "set_", "resize_"}


class Dispatched(TorchDispatchMode):
    """``launches`` and ``waits`` by operation, of what was dispatched while this was the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if "::" in name:  # a question about the tensor
            return func(*args, **(kwargs or {}))
        by_mask = name.startswith("index") and any(
            isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)
            for argument in args
            for index in (argument if isinstance(argument, (list, tuple)) else ())
        )
        counted = name == "repeat_interleave" and "Tensor" in func._overloadname
        if name in _WAITS or by_mask or counted:
            self.waits[name] += 1
        if name not in _FREE and not any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns):
            self.launches[name] += 1
        return func(*args, **(kwargs or {}))
