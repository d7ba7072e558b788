"""What runs inside vLLM's worker processes: taking weights that lie in files, and looking whether the model holds them.

vLLM mixes `GroupwiseWorker` into its own worker class (``worker_extension_cls``). Nothing of vLLM is imported here: the methods use
what a worker has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["EXTENSION", "GroupwiseWorker"]

EXTENSION = "groupwise.engines.vllm.worker.GroupwiseWorker"


class GroupwiseWorker:
    """Methods that ``collective_rpc`` finds on every worker."""

    def groupwise_load(self, files: Sequence[str]) -> dict[str, int]:
        """Replace the model's weights by those of ``files`` (safetensors, names as in a checkpoint), and compare afterwards.

        vLLM's own reloading does the work: it fuses (q, k and v; gate and up), shards, and repacks for its kernels, into the memory
        that compiled graphs know. Returns how many of the model's parameters were ``compared`` with the files, bit for bit, and how
        many could not be (``repacked``, ``sharded``). Raises ValueError, naming it, for a parameter that no tensor filled, or that
        holds something else.
        """
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        loaded: set[str] = set()
        original = model.load_weights

        def noting(weights: Iterator[tuple[str, Tensor]]) -> set[str]:
            loaded.update(original(weights) or ())
            return loaded

        model.load_weights = noting
        try:
            self.reload_weights(weights_iterator=_read(files))  # type: ignore[attr-defined]
        finally:
            del model.load_weights
        missing = _missing(model, loaded, {name for name, _ in _read(files, empty=True)})
        if missing:
            raise ValueError(f"{len(missing)} tensors of vLLM's model were not among those sent, the first {missing[0]}")
        _pack_again(model)
        if self.parallel_config.world_size > 1:  # type: ignore[attr-defined]
            return {"compared": 0, "repacked": 0, "sharded": len(loaded)}
        return _compare(model, files)


def _read(files: Sequence[str], empty: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Name and tensor of everything in the files; with ``empty`` the names alone."""
    from safetensors import safe_open

    for file in files:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (the object is no mapping)
                yield name, torch.empty(0) if empty else tensors.get_tensor(name)


def _missing(model: nn.Module, loaded: set[str], sent: set[str]) -> list[str]:
    """Parameters that no tensor went into; of those fused from several, the parts that did not come."""
    missing = {name for name, _ in model.named_parameters()} - loaded
    for name in loaded:
        head, _, suffix = name.rpartition(".")
        parent, _, whole = head.rpartition(".")
        parts = {f"{parent}.{part}.{suffix}" for part in _fusions(model).get(whole, ())}
        if parts & sent:
            missing |= parts - sent
    return sorted(missing)


def _pack_again(model: nn.Module) -> None:
    """On CPUs vLLM 0.32 computes from packed copies of weights. The copy of an output head that shares its weight with the embedding
    is not renewed by reloading, which passes by layers without a tensor of their own: the old head would go on answering."""
    for layer in model.modules():
        weight = getattr(layer, "weight", None)
        if hasattr(layer, "cpu_linear") and isinstance(weight, Tensor) and weight.numel():
            layer.quant_method.process_weights_after_loading(layer)  # type: ignore[union-attr, operator]


@torch.no_grad()
def _compare(model: nn.Module, files: Sequence[str]) -> dict[str, int]:
    """Every parameter that is still in a checkpoint's form against what the files say of it."""
    parameters = dict(model.named_parameters())
    fused = {part: (whole, place) for whole, parts in _fusions(model).items() for place, part in enumerate(parts)}
    pieces: dict[str, dict[int, Tensor]] = {}
    for name, tensor in _read(files):
        part = next((p for p in name.split(".") if p in fused), None)
        whole, place = fused[part] if part else ("", 0)
        target = name if part is None or name in parameters else name.replace(f".{part}.", f".{whole}.")
        if target in parameters and parameters[target].numel():
            pieces.setdefault(target, {})[place] = tensor
    compared = 0
    for name, found in pieces.items():
        expected, parameter = torch.cat([piece for _, piece in sorted(found.items())]), parameters[name]
        if parameter.dtype not in _PLAIN or expected.shape[1:] != parameter.shape[1:] or len(expected) > len(parameter):
            continue  # quantised or transposed
        if not torch.equal(expected.to(parameter.device, parameter.dtype), parameter[: len(expected)]):  # below it is padding
            raise ValueError(f"after loading, vLLM's parameter {name} does not hold what was sent")
        compared += 1
    return {"compared": compared, "repacked": len(parameters) - compared, "sharded": 0}


_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


def _fusions(model: nn.Module) -> Mapping[str, Sequence[str]]:
    """vLLM's fused modules and the checkpoint's modules that they consist of, in order."""
    found: Any = getattr(model, "packed_modules_mapping", {})
    return found
