"""What a trainer and a sampling server say to each other. Plain Python: both environments import it.

    GET  /groupwise            who answers: protocol, versions, the model's shape, which weights it holds
    POST /groupwise/begin      {id}: an update begins
    POST /groupwise/bucket     ?id=&index=&sha256=: some tensors, as safetensors; or {file} in a folder that both see
    POST /groupwise/commit     {id, version, buckets}: load all, compare, forget what was cached under the old ones
    POST /groupwise/sample     {weights, settings, jobs, stream}: one JSON object a line, as completions end

Weights have an id, ``<owner>:<push>``: the trainer's own name for one state of one run's policy. Each sampling request names the id that
it wants, and is refused where the server holds another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from groupwise.engines.base import SamplingSettings

__all__ = [
    "PROTOCOL",
    "Broken",
    "Job",
    "Link",
    "Refused",
    "StaleWeights",
    "Unreachable",
    "owner_of",
    "settings_from",
    "settings_values",
    "shape_of",
]

PROTOCOL = 1

_SHAPE = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "tie_word_embeddings", "rms_norm_eps", "rope_theta",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Job:
    """One completion that is wanted: the tokens before it, and its seed."""

    prompt: tuple[int, ...]
    seed: int


class Refused(Exception):
    """The server understood, and will not; the message is for a person."""


class Broken(Refused):
    """What computes has broken down, and will not come back by itself. Over HTTP it is silence: whoever started the server may start it
    anew."""


class StaleWeights(Exception):
    """The weights that were asked for are not those held. ``held`` is the id of the latter, None where none were ever pushed."""

    def __init__(self, wanted: str, held: str | None) -> None:
        super().__init__(f"the weights {wanted} were asked for, but {held or 'none that were pushed'} are held")
        self.wanted, self.held = wanted, held


class Unreachable(Exception):
    """Nobody answers, or the connection broke off."""


class Link(Protocol):
    """The server, from the trainer's side: in the same process, or over HTTP. All calls raise the three exceptions above."""

    where: str

    def hello(self) -> dict[str, Any]: ...
    def begin(self, weights: str) -> bool: ...
    def bucket(self, weights: str, index: int, data: bytes, sha256: str) -> None: ...
    def commit(self, weights: str, version: int, buckets: int) -> dict[str, Any]: ...
    def sample(
        self, weights: str, settings: SamplingSettings, jobs: Sequence[Job], *, stop: Sequence[int], stream: bool
    ) -> Any: ...
    def close(self) -> None: ...


def owner_of(weights: str | None) -> str | None:
    """The run that pushed them."""
    return None if weights is None else weights.rpartition(":")[0]


def settings_values(settings: SamplingSettings) -> dict[str, Any]:
    return asdict(settings)


def settings_from(values: Mapping[str, Any]) -> SamplingSettings:
    """Raises Refused for a setting that this side does not know."""
    try:
        return SamplingSettings(**values)
    except TypeError as error:
        raise Refused(f"the sampling settings {sorted(values)} are not understood ({error})") from error


def shape_of(hf_config: Any) -> dict[str, Any]:
    """What tells two models' weights apart, of a Hugging Face config; absent values are left out."""
    text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
    found = {name: getattr(text, name, None) for name in _SHAPE}
    rope = getattr(text, "rope_parameters", None)
    if found["rope_theta"] is None and isinstance(rope, Mapping):
        found["rope_theta"] = rope.get("rope_theta")
    if found["head_dim"] is None and found["hidden_size"] and found["num_attention_heads"]:
        found["head_dim"] = found["hidden_size"] // found["num_attention_heads"]
    return {name: value for name, value in found.items() if isinstance(value, (bool, int, float, str))}
