"""Where a model's weights lie, and in which numbers: ``dtype: auto``, and models on several devices by accelerate's ``device_map``.

A model with a device map is computed by its own module: accelerate's hooks bring what each layer reads to where the layer is, and layers
that are on the disk or in the machine's memory to a GPU when their turn comes.
"""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from groupwise.config.schema import ModelConfig
from groupwise.errors import ModelError

__all__ = [
    "check_device_map",
    "computes_bf16",
    "device_map_arguments",
    "has_device_map",
    "input_device",
    "product_gives_fp32",
    "remove_with",
    "wait_for",
    "with_dtype",
]


def computes_bf16() -> bool:
    """Whether this CPU has instructions for bfloat16 that PyTorch's library uses: AVX-512 or AVX-NE-CONVERT on x86, BF16 on Arm."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


@cache
def product_gives_fp32(product: Callable[..., torch.Tensor], device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``product`` (``torch.mm`` or ``torch.bmm``) can give fp32 from ``dtype`` on ``device``. Not every PyTorch can, so a small one
    is tried and compared."""
    if device.type == "cpu" or dtype == torch.float32:
        return False
    numbers = torch.linspace(-1, 1, 512, device=device).view(2, 16, 16).to(dtype)
    numbers = numbers if product is not torch.mm else numbers[0]
    try:
        return torch.allclose(
            product(numbers, numbers, out_dtype=torch.float32), product(numbers.float(), numbers.float()), atol=1e-5
        )
    except (TypeError, RuntimeError):
        return False


def with_dtype(config: ModelConfig) -> ModelConfig:
    """The settings with ``dtype`` named: ``auto`` becomes float32 on a CPU that has no instructions for bfloat16, else bfloat16.

    Without them PyTorch converts every number on its way into a product, which takes several times as long as float32.
    """
    if config.dtype != "auto":
        return config
    on_cpu = config.device == "cpu" or (config.device == "auto" and not torch.cuda.is_available())
    return config.model_copy(update={"dtype": "float32" if on_cpu and not computes_bf16() else "bfloat16"})


def check_device_map(config: ModelConfig) -> None:
    """Raise ModelError where ``model.device_map`` asks for a package that is missing."""
    if config.device_map is not None and importlib.util.find_spec("accelerate") is None:
        raise ModelError(
            f"model.device_map is {config.device_map}, which needs the package accelerate, and it is not installed: "
            "pip install 'groupwise[distributed]', or leave it out"
        )


def device_map_arguments(config: ModelConfig) -> dict[str, Any]:
    """What to ask ``from_pretrained`` for; ``offload_folder`` is a new folder for what goes to the disk."""
    folder = tempfile.mkdtemp(prefix="groupwise-offload-")
    limits = {"max_memory": dict(config.max_memory)} if config.max_memory else {}
    return {"device_map": config.device_map, "offload_folder": folder, **limits}


def remove_with(model: Any, folder: str) -> None:
    """Let ``folder`` go when ``model`` does, or when the process ends; at once where nothing was put there."""
    if any(Path(folder).iterdir()):
        weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    else:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(device: torch.device) -> None:
    """Return when ``device`` has done what this thread has launched there: a clock that is read before shows the launches alone.

    Its stream alone is waited for, not the whole device: another thread may be capturing a graph.
    """
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def has_device_map(model: Any) -> bool:
    """Whether ``model`` lies on several devices, or partly on the disk."""
    places = getattr(model, "hf_device_map", None) or {}
    return len({str(place) for place in places.values()}) > 1 or "disk" in places.values()


def input_device(model: Any) -> torch.device:
    """Where ``model`` takes its inputs and leaves its logits: its own device, or the first GPU of its device map."""
    if not has_device_map(model):
        return model.device  # type: ignore[no-any-return]
    computing = [place for place in model.hf_device_map.values() if place not in ("cpu", "disk")]
    return (
        torch.device("cuda", computing[0])
        if computing and isinstance(computing[0], int)
        else torch.device(computing[0] if computing else "cpu")
    )
