"""A policy's weights on their way to the server: cut into parts, counted, sealed, and sent again where something came in between.

Tensors travel as in a checkpoint, an adapter merged into them, in parts of bounded size.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save
from torch import Tensor

from groupwise.engines.vllm.protocol import BeginAgain, Link, Refused, StaleWeights, Unreachable, check_server, digest_of
from groupwise.engines.vllm.transfer import Source, device_id, handles_to
from groupwise.errors import ConfigError, TrainingError
from groupwise.models.adapters import base_module, is_adapted, why_not_mergeable

if TYPE_CHECKING:
    from groupwise.models.load import Policy

__all__ = ["RetryLimit", "check_pushable", "named_weights", "packed_buckets", "push", "shares_device"]

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


@torch.no_grad()
def named_weights(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a checkpoint would hold, under its name there, where it lies. Tied ones come once, under the first name. An
    adapter is added up in fp32 and rounded once, layer by layer: no second copy of the model.
    """
    seen: set[int] = set()
    merged = dict(_merged_layers(model)) if is_adapted(model) else {}
    for name, tensor in base_module(model).state_dict().items():
        parts = name.split(".")
        if any(part.startswith("lora_") for part in parts):
            continue
        layer = name.partition(".base_layer.")[0]
        delta = merged.get(layer) if name.endswith(".base_layer.weight") else None
        if delta is not None:
            tensor = (tensor.float() + delta().float()).to(tensor.dtype)
        elif tensor.data_ptr() in seen:
            continue
        else:
            seen.add(tensor.data_ptr())
        yield name.replace(".base_layer.", "."), tensor.detach().contiguous()


def _merged_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """Adapted layers by name, each with what computes its scaled B A."""
    adapter = model.active_adapter
    for name, layer in base_module(model).named_modules():
        if hasattr(layer, "lora_A") and hasattr(layer, "base_layer"):
            yield name, lambda layer=layer: layer.get_delta_weight(adapter)


def packed_buckets(model: Any, limit: int) -> Iterator[tuple[bytes, str]]:
    """The weights as safetensors of about ``limit`` bytes each (a larger tensor travels alone), with the SHA-256 of each."""
    part: dict[str, Tensor] = {}
    for name, tensor in named_weights(model):
        if part and sum(t.nbytes for t in part.values()) + tensor.nbytes > limit:
            yield _packed(part)
            part = {}
        part[name] = tensor.to("cpu")
    if part:
        yield _packed(part)


def _packed(part: dict[str, Tensor]) -> tuple[bytes, str]:
    data = save(part)
    return data, hashlib.sha256(data).hexdigest()


def push(
    link: Link,
    policy: Policy,
    weights: str,
    version: int,
    *,
    take_hold: Callable[[], None],
    bucket_bytes: int,
    patience_s: float,
    in_place: bool = True,
) -> bool:
    """Have the policy's weights held there under the id ``weights``. The policy must stand still meanwhile: what is interrupted is sent
    again from its beginning, and what is held in the end is compared, by its digest, with what was sent last. ``take_hold`` of the server
    comes first each time, since one that was restarted does not know whose it is.

    Where vLLM computes on the policy's own device it reads the weights in place, unless not ``in_place``. Where that fails they are sent
    in parts, which is said. Returns whether they were read in place.

    Raises TrainingError where the server is away for longer than ``patience_s``, does not take them, or is not the one it was.
    """
    retries = RetryLimit(patience_s)
    while True:
        source = None
        try:
            found = check_server(link, policy.model.config, policy.name)  # it may have been restarted, with something else
            take_hold()
            held, sent = link.begin(weights), list[str]()
            if in_place and held is None:
                source, _kept = _in_place(link, policy.model, found)
            # Where another process of the run was quicker, and its weights were read in place, there is nothing to send.
            if source is None and held != digest_of(()):
                for index, (data, sha256) in enumerate(packed_buckets(policy.model, bucket_bytes)):
                    sent.append(sha256)
                    if held is None:
                        link.bucket(weights, index, data, sha256)
            told = {"weights": weights, "digest": held} if held is not None else link.commit(weights, version, sent, source)
        except (Unreachable, BeginAgain) as error:
            retries.wait(error, "the weights cannot be pushed")
            continue
        except Refused as refused:
            if source is None:
                raise _not_taken(link, refused) from refused
            sentence = f"vLLM at {link.where} does not read the weights in place ({refused}): they are sent to it from here on"
            logger.warning(sentence)
            in_place = False
            continue
        except (StaleWeights, ConfigError) as refused:
            raise _not_taken(link, refused) from refused
        if (told.get("weights"), told.get("digest")) != (weights, digest_of(sent)):
            raise TrainingError(
                f"vLLM at {link.where} says that it holds the weights {told.get('weights')} of digest {str(told.get('digest'))[:12]}, but "
                f"{weights} of {digest_of(sent)[:12]} were pushed: restart it, and continue with --resume"
            )
        return in_place


def _in_place(link: Link, model: Any, found: dict[str, Any]) -> tuple[Source | None, list[Tensor]]:
    """How vLLM can read the weights where they are, with what must live meanwhile; None where it cannot."""
    if link.in_process:
        if model.device.type == "cuda":
            torch.cuda.synchronize()  # vLLM's thread has a queue of its own
        return lambda: named_weights(model), []
    if shares_device(found, model.device):
        return handles_to(named_weights(model))
    return None, []


def shares_device(found: dict[str, Any], device: torch.device) -> bool:
    """Whether the server that said ``found`` computes on this GPU, and on no other."""
    return device.type == "cuda" and found.get("devices") == [device_id(device)]


def _not_taken(link: Link, refused: Exception) -> TrainingError:
    return TrainingError(f"vLLM at {link.where} does not take the weights: {refused}")


class RetryLimit:
    """How long a server may be away before a run gives up."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.since = seconds, time.monotonic()
        self.lost = False

    def renew(self) -> None:
        self.since = time.monotonic()

    def wait(self, error: Exception, what: str) -> None:
        """Wait for a moment; raises TrainingError when the server has been away for long enough."""
        self.lost = True
        if time.monotonic() - self.since >= self.seconds:
            raise TrainingError(
                f"{what}: {error}, for {self.seconds:.0f} s (rollout.vllm.patience_s); start the server again and continue with --resume"
            ) from error
        time.sleep(min(1.0, self.seconds / 10))
