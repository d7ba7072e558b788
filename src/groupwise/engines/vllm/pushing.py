"""A policy's weights on their way to the server: cut into parts, counted, sealed, and sent again where something came in between.

Tensors travel as in a checkpoint, an adapter merged into them, in parts of bounded size.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor

from groupwise.engines.vllm.protocol import (
    BeginAgain,
    Link,
    Refused,
    StaleWeights,
    Unreachable,
    check_server,
    digest_of,
    owner_of,
)
from groupwise.engines.vllm.transfer import Adapter, Named, Offer, Source, device_id, handles_to
from groupwise.engines.vllm.wire import Wire, nccl_version
from groupwise.errors import ConfigError, TrainingError
from groupwise.models.adapters import base_module, is_adapted, why_not_mergeable
from groupwise.models.merging import is_adapted_layer, merged_weight

if TYPE_CHECKING:
    from groupwise.models.load import Policy

__all__ = [
    "RetryLimit",
    "Way",
    "check_pushable",
    "dtype_name",
    "named_weights",
    "packed_buckets",
    "push",
    "shares_device",
    "why_no_wire",
]

logger = logging.getLogger("groupwise")


def check_pushable(model: Any, name: str) -> None:
    """Raises ConfigError where the model's weights are not what a checkpoint would hold, so that vLLM could not take them."""
    reason = why_not_mergeable(model) if is_adapted(model) else None
    odd = next((n for n, p in base_module(model).named_parameters() if not p.dtype.is_floating_point), None)
    if reason is None and odd is not None:
        reason = f"{odd} is quantised"
    if reason is not None:
        raise ConfigError(
            f"rollout.engine is vllm, which is sent plain weights, but {name} has {reason}: use rollout.engine=auto"
        )


def dtype_name(model: Any) -> str:
    """As the setting ``model.dtype`` has it."""
    return str(model.dtype).removeprefix("torch.")


@torch.no_grad()
def named_weights(model: Any, base_alone: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a checkpoint would hold, under its name there, where it lies. Tied ones come once, under the first name. An
    adapter is added up in fp32 and dithered, layer by layer, as for learning; with ``base_alone`` it is left out.
    """
    seen: set[int] = set()
    merged = _adapted_layers(model) if is_adapted(model) and not base_alone else {}
    for name, tensor in base_module(model).state_dict().items():
        parts = name.split(".")
        if any(part.startswith("lora_") for part in parts):
            continue
        layer = name.partition(".base_layer.")[0]
        adapted = merged.get(layer) if name.endswith(".base_layer.weight") else None
        if adapted is not None:
            tensor = merged_weight(adapted)
        elif tensor.data_ptr() in seen:
            continue
        else:
            seen.add(tensor.data_ptr())
        yield name.replace(".base_layer.", "."), tensor.detach().contiguous()


def _adapted_layers(model: Any) -> dict[str, Any]:
    return {name: layer for name, layer in base_module(model).named_modules() if is_adapted_layer(layer)}


def adapter_alone(model: Any, found: dict[str, Any]) -> tuple[Adapter, Named] | None:
    """The adapter by itself, for a server that said ``found``; None where it wants merged weights, or this adapter is none for vLLM."""
    if not is_adapted(model) or not found.get("adapter_rank"):
        return None
    config, active = model.peft_config[model.active_adapter], model.active_adapter
    layers = _adapted_layers(model)
    if config.r > found["adapter_rank"] or config.rank_pattern or config.alpha_pattern or "lm_head" in layers:
        return None
    told = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": config.r, "lora_alpha": config.lora_alpha,
        "use_rslora": config.use_rslora, "target_modules": sorted({name.rpartition(".")[2] for name in layers}),
    }  # fmt: skip
    factors = {
        f"base_model.model.{name}.lora_{factor}.weight": getattr(layer, f"lora_{factor}")[active].weight.detach()
        for name, layer in layers.items()
        for factor in "AB"
    }
    return Adapter(told), lambda: iter(factors.items())


def packed_buckets(named: Iterable[tuple[str, Tensor]], limit: int) -> Iterator[tuple[bytes, str]]:
    """The weights as safetensors of about ``limit`` bytes each (a larger tensor travels alone), with the SHA-256 of each."""
    part: dict[str, Tensor] = {}
    for name, tensor in named:
        if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > limit:
            yield _packed(part)
            part = {}
        part[name] = tensor.to("cpu")
    if part:
        yield _packed(part)


def _packed(part: dict[str, Tensor]) -> tuple[bytes, str]:
    data = save(part)
    return data, hashlib.sha256(data).hexdigest()


@dataclass
class Way:
    """How weights reach vLLM, from one push to the next."""

    in_place: bool = True
    """Whether they are read in place, or broadcast, if they can be; not any more once that has failed."""
    wire: Wire | None = None
    start: str | None = None
    """Which start of the server it leads to, as that says: the workers of another are not in the wire's group."""
    room: int = 0
    """Tokens of prompt and completion together that the server takes."""
    adapters: bool = True
    """Whether an adapter is sent alone to a server that takes some."""
    told: bool = False
    """Whether it was said why files are sent to GPUs."""

    def close(self) -> None:
        if self.wire is not None:
            self.wire.close()
        self.wire = None


def push(
    link: Link,
    policy: Policy,
    weights: str,
    version: int,
    *,
    take_hold: Callable[[], None],
    bucket_bytes: int,
    patience_s: float,
    way: Way,
    heed: Callable[[], object] | None = None,
) -> None:
    """Have the policy's weights held there under the id ``weights``. The policy must stand still meanwhile: what is interrupted is sent
    again from its beginning, and what is held in the end is compared, by its digest, with what was sent last. ``take_hold`` of the server
    comes first each time, since one that was restarted does not know whose it is.

    Where vLLM computes on the policy's own device it reads the weights in place, and to other GPUs of the machine they are broadcast,
    unless not ``way.in_place``. Where that fails they are sent in parts, which is said. A server that takes adapters alone is sent the base
    once, and the adapter's factors from then on.

    Raises TrainingError where the server is away for longer than ``patience_s``, does not take them, or is not the one it was;
    and what ``heed`` raises, which is called while it is waited for.
    """
    retries = RetryLimit(patience_s, heed)
    model, base = policy.model, f"{owner_of(weights)}:base"
    while True:
        alone = None
        try:
            # It may have been restarted, with something else.
            found = check_server(link, model.config, policy.name, dtype_name(model))
            if found.get("start") != way.start:
                way.close()
                way.start = found.get("start")
            way.room = found["max_model_tokens"]
            take_hold()
            alone = adapter_alone(model, found) if way.adapters else None
            if alone is None:
                _hold(link, found, weights, version, lambda: named_weights(model), model.device, way, bucket_bytes)
                return
            if found.get("base") != base:
                _hold(link, found, base, version, lambda: named_weights(model, True), model.device, way, bucket_bytes)
            _hold(link, found, weights, version, alone[1], model.device, way, bucket_bytes, alone[0])
            return
        except (Unreachable, BeginAgain) as error:
            way.close()
            retries.wait(error, "the weights cannot be pushed")
        except _Declined as declined:
            way.close()
            way.in_place = False
            logger.warning(
                f"vLLM at {link.where} does not read the weights in place ({declined}): they are sent to it from here on"
            )
        except Refused as refused:
            if alone is None:
                raise _not_taken(link, refused) from refused
            way.adapters = False
            logger.warning(f"vLLM at {link.where} does not take the adapter alone ({refused}): it is merged from here on")
        except (StaleWeights, ConfigError) as refused:
            raise _not_taken(link, refused) from refused


class _Declined(Refused):
    """What was refused were weights that are read in place or broadcast; files may do."""


def _hold(
    link: Link, found: dict[str, Any], weights: str, version: int, named: Named, device: torch.device, way: Way, bucket_bytes: int,
    adapter: Adapter | None = None,
) -> None:  # fmt: skip
    """Have ``named`` held there under the id ``weights``: all of the model, or an adapter's factors.

    Raises TrainingError where something else is held then.
    """
    held, sent = link.begin(weights), list[str]()
    commit = _in_place(link, named, device, found, way) if way.in_place and held is None and adapter is None else None
    if commit is None and held != digest_of(()):  # else another process of the run was quicker, and its were read in place
        for index, (data, sha256) in enumerate(packed_buckets(named(), 2**40 if adapter else bucket_bytes)):
            sent.append(sha256)
            if held is None:
                link.bucket(weights, index, data, sha256)
    if held is not None:
        told = {"weights": weights, "digest": held}
    elif commit is None:
        told = link.commit(weights, version, sent, adapter)
    else:
        try:
            told = commit(weights, version)
        except Refused as refused:
            raise _Declined(str(refused)) from refused
    if (told.get("weights"), told.get("digest")) != (weights, digest_of(sent)):
        raise TrainingError(
            f"vLLM at {link.where} says that it holds the weights {told.get('weights')} of digest {str(told.get('digest'))[:12]}, but "
            f"{weights} of {digest_of(sent)[:12]} were pushed: restart it, and continue with --resume"
        )


Commit = Callable[[str, int], dict[str, Any]]
"""From the weights' id and version, what the server says when it holds them."""


def _in_place(link: Link, named: Named, device: torch.device, found: dict[str, Any], way: Way) -> Commit | None:
    """How vLLM gets the weights without files; None where it cannot. What has to live meanwhile lives as long as the result."""
    if link.in_process:
        if device.type == "cuda":
            torch.cuda.synchronize()  # vLLM's thread has a queue of its own
        return lambda weights, version: link.commit(weights, version, [], named)
    if shares_device(found, device):
        handles, kept = handles_to(named())
        return partial(_by_handles, link, handles, kept)
    if (reason := why_no_wire(link, found, device)) is None:
        way.wire = way.wire or Wire(device, len(found["devices"]))
        return partial(_by_wire, link, way.wire, named)
    if reason and not way.told:
        logger.warning(f"vLLM at {link.where} is sent the weights as files, which takes seconds: {reason}")
        way.told = True
    return None


def _by_handles(link: Link, handles: Source, kept: list[Tensor], weights: str, version: int) -> dict[str, Any]:
    return link.commit(weights, version, [], handles)


def _by_wire(link: Link, wire: Wire, named: Named, weights: str, version: int) -> dict[str, Any]:
    def commit(offer: Offer) -> dict[str, Any]:
        return link.commit(weights, version, [], offer)

    try:
        return wire.push(named, commit)
    except RuntimeError as error:
        raise Refused(f"the broadcast to its GPUs broke off: {' '.join(str(error).split())[:300]}") from error


def why_no_wire(link: Link, found: dict[str, Any], device: torch.device) -> str | None:
    """None where weights are broadcast from ``device`` to the workers of the server that said ``found``; else why they are not, which is
    nothing to be said ("") without GPUs on both sides."""
    workers = found.get("devices") or [""]
    if not all(workers):
        return ""
    if device.type != "cuda":
        return "they are gathered in the machine's memory (divided weights)" if torch.cuda.is_available() else ""
    if not link.on_this_machine:
        return "it is on another machine"
    if device_id(device) in workers or len(set(workers)) < len(workers):
        return "some of its GPUs are the trainer's, or have several workers"
    if found.get("nccl") != nccl_version():
        return f"NCCL is {found.get('nccl') or 'missing'} there and {nccl_version()} here: install the same torch on both sides"
    return None


def shares_device(found: dict[str, Any], device: torch.device) -> bool:
    """Whether the server that said ``found`` computes on this GPU, and on no other."""
    return device.type == "cuda" and found.get("devices") == [device_id(device)]


def _not_taken(link: Link, refused: Exception) -> TrainingError:
    return TrainingError(f"vLLM at {link.where} does not take the weights: {refused}")


class RetryLimit:
    """How long a server may be away before a run gives up."""

    def __init__(self, seconds: float, heed: Callable[[], object] | None = None) -> None:
        """``heed``: called before each wait; what it raises ends the waiting."""
        self.seconds, self.heed, self.lost = seconds, heed, False
        self._since: float | None = None
        """The first failure after which nothing has come."""

    def renew(self) -> None:
        """Something has come."""
        self._since = None

    def wait(self, error: Exception, what: str) -> None:
        """Wait for a moment; raises TrainingError when the server has been away for long enough."""
        self.lost, now = True, time.monotonic()
        self._since = now if self._since is None else self._since
        if now - self._since >= self.seconds:
            raise TrainingError(
                f"{what}: {error}, for {self.seconds:.0f} s (rollout.vllm.patience_s); start the server again and continue with --resume"
            ) from error
        if self.heed is not None:
            self.heed()
        time.sleep(min(1.0, self.seconds / 10))
