"""What a run holds on one device: weights, reference, masters, moments, gradients and a critic of its own, whole or divided.

``zero2`` divides gradients, masters and moments (arXiv 1910.02054); ``zero3`` and ``fsdp2`` (arXiv 2304.11277) divide the weights too,
and the reference's, gather them layer by layer in the passes, and whole while sampling, where every token needs all of them. Of an adapter
on a base the base is divided alone, and while sampling its layers are there merged, and not as they are.

Bytes on one device. Symbols as in ``plan.LEGEND``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from groupwise.config.combinations import refuse_undividable, refuse_with_vllm
from groupwise.config.schema import ModelConfig
from groupwise.errors import ConfigError, ModelError
from groupwise.limits import GRADIENT_BUCKET, ZERO_BUCKET
from groupwise.planner.setup import Setup
from groupwise.planner.shape import ModelShape, find_shape

__all__ = [
    "Item", "Part", "Phase", "critic_of", "divided", "exchange_buffers", "exchange_bytes", "flat_gradient",
    "gathered_for_passes", "gathered_for_sampling", "gradients", "least_for_vllm", "refused", "scattered", "share",
    "shared_formula", "state",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Item:
    """Something that takes memory."""

    name: str
    bytes: int
    formula: str


@dataclass(frozen=True, slots=True)
class Phase:
    """What lives at the fullest moment of a phase, largest first."""

    name: str
    items: tuple[Item, ...]

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def cause(self) -> Item:
        """Its largest item."""
        return self.items[0]


Part = Literal["weights", "gradients", "optimiser"]


@dataclass(frozen=True, slots=True)
class _Mode:
    weights: bool
    gradients: bool = True
    optimiser: bool = True


_MODES = {"zero2": _Mode(weights=False), "zero3": _Mode(weights=True), "fsdp2": _Mode(weights=True)}


def divided(setup: Setup, part: Part) -> bool:
    """Whether each process holds only its share of ``part``."""
    mode = _MODES.get(setup.sharding)
    if setup.adapted and part != "weights":
        return False
    return mode is not None and bool(getattr(mode, part))


def share(setup: Setup, part: Part, total: int) -> int:
    """Bytes of ``total`` that fall to one process."""
    return -(-total // setup.world_size) if divided(setup, part) else total


def shared_formula(setup: Setup, part: Part, formula: str) -> str:
    return f"{formula} / n" if divided(setup, part) else formula


def gathered_for_passes(setup: Setup) -> list[Item]:
    """What is whole during a pass though it is divided between passes: one layer, in the message and out of it, and both ends."""
    if not divided(setup, "weights"):
        return []
    whole = setup.weight_bytes * (2 * _layer(setup) + _ends(setup))
    return [Item("gathered weights", whole, "s (2 layers + embedding and head)")]


def gathered_for_sampling(setup: Setup) -> list[Item]:
    """All weights, beside what is held of them, for an engine that reads them; with an adapter what is before and after the layers."""
    if not divided(setup, "weights"):
        return []
    if setup.adapted:
        return [Item("gathered weights", setup.weight_bytes * _ends(setup), "s (embedding and head), while sampling")]
    return [Item("gathered weights", setup.weights, "s P, while sampling")]


def scattered(setup: Setup, at_the_end: bool) -> list[Item]:
    """The message that adds a layer's gradient up over the processes, in fp32, and what is kept of it; at the end, both ends'."""
    if not divided(setup, "gradients"):
        return []
    if setup.sharding != "fsdp2":
        unit = max(ZERO_BUCKET, _ends(setup) if at_the_end else 0)
        return [Item("communication buffers", 4 * unit, "4 x the larger of 5 x 10^7 numbers and embedding and head")]
    unit = _ends(setup) if at_the_end else _layer(setup)
    return [
        Item("communication buffers", 4 * (unit + unit // setup.world_size), "4 (1 + 1/n) of a layer, or of embedding and head")
    ]


def flat_gradient(setup: Setup) -> list[Item]:
    """DeepSpeed's step makes one tensor of all gradients that fall to the process."""
    if setup.sharding not in ("zero2", "zero3") or not divided(setup, "gradients"):
        return []
    return [Item("flat gradient", 4 * -(-setup.trained // setup.world_size), "4 P / n, at the step")]


def refused(setup: Setup) -> bool:
    """Whether the trainer does not divide a run with these settings, or vLLM does not sample it."""
    try:
        refuse_with_vllm(setup.config.rollout, setup.world_size, setup.quantised)
        refuse_undividable(setup.config, setup.sharding, setup.shape.uncovered)
    except ConfigError:
        return True
    return False


def exchange_buffers(setup: Setup) -> list[Item]:
    """What processes that hold everything add their gradients up in: runs of them in fp32 (``distributed/world.py``)."""
    if setup.world_size == 1 or divided(setup, "gradients"):
        return []
    elements = min(setup.trained, max(GRADIENT_BUCKET, 0 if setup.adapted else setup.shape.head))
    return [Item("communication buffers", 4 * elements, "4 x the larger of 2^24 numbers and V D")]


def exchange_bytes(setup: Setup) -> float:
    """What one process sends in one step. A ring sends (n - 1) / n of what it gathers or scatters. Divided gradients are added up in every
    backward pass; weights are gathered once for sampling, and in the reference's passes, which a batch has once, whatever its updates."""
    ring = (setup.world_size - 1) / setup.world_size
    updates, passes, whole = setup.config.algorithm.updates_per_batch, setup.passes, float(setup.weights)
    gradients = 4.0 * setup.trained
    added_up = passes * gradients if divided(setup, "gradients") else 2 * gradients
    if not divided(setup, "weights"):
        published = setup.weight_bytes * setup.trained if divided(setup, "gradients") else 0
        return ring * updates * (added_up + published)
    reference = passes * whole if setup.needs_reference else 0.0  # also of a base, which is its adapter's reference
    return ring * (updates * (passes * 2 * whole + added_up) + reference + whole)


def _layer(setup: Setup) -> int:
    """Weights of one layer."""
    return (setup.shape.parameters - _ends(setup)) // setup.shape.layers


def _ends(setup: Setup) -> int:
    """Weights of the embedding, the final norm, and an output head of its own."""
    return (1 if setup.shape.tied else 2) * setup.shape.head + setup.shape.width


_MIB = 2**20
_PROCESS = {"cpu": 465 * _MIB, "cuda": 600 * _MIB}
"""Python, torch, transformers and the tokenizer: 405 MiB before any weights, and 60 more once everything has run once (measured with
a model of 3 million weights); on a GPU the driver's context and cuBLAS (assumed)."""
_BITSANDBYTES = 45 * _MIB
"""On the CPU; peft imports it too."""


def state(setup: Setup, learns: bool = False) -> list[Item]:
    """Everything that lives in every phase, ``learns``: in one of those from the first pass to the optimiser's step."""
    with_bitsandbytes = setup.device == "cpu" and (setup.adapted or setup.config.optimizer.precision == "masters-8bit")
    process = _PROCESS[setup.device] + (_BITSANDBYTES if with_bitsandbytes else 0)
    items = [
        Item("process", process, "Python and its libraries, on a GPU the driver's context"),
        _weights(setup),
        Item("reward models", setup.judges, "their weights, 2 bytes each or as their dtype says"),
        *_adapter(setup),
        *_optimiser(setup),
        *_reference(setup),
        *_vllm(setup, learns),
        _copies(setup),
    ]
    critic = critic_of(setup)
    return items if critic is None else [*items, *_critic(critic)]


def _copies(setup: Setup) -> Item:
    """Copies of the policy's weights, for sampling ahead; of an adapter's base only where it is divided. vLLM has its own."""
    adapter = setup.adapted and not divided(setup, "weights")
    each, formula = (4 * setup.trained, "4 A") if adapter else (setup.weight_bytes * setup.shape.parameters, "s P")
    return Item("samplers' weights", 0 if setup.by_vllm else setup.ahead * each, f"{formula} for each step ahead")


def gradients(setup: Setup) -> Item:
    """What has added up over the micro-batches."""
    if setup.offloaded:
        return Item("gradients", 0, "in the machine's memory")
    size = setup.weight_bytes if setup.config.optimizer.precision == "pure" and not setup.in_fp32 else 4
    return _shared(setup, "gradients", "gradients", size * setup.trained, f"{size} {_learning(setup)}")


def critic_of(setup: Setup) -> Setup | None:
    """The critic as a run of its own shape; None without one. One whose config.json cannot be had counts as the policy's copy."""
    value = setup.config.algorithm.value
    if value is None or value.critic == "shared":
        return None
    name = value.critic
    shape = setup.shape
    if name != "copy":  # a copy is stored as the policy's base is, any other as it computes
        shape = replace(_shape_of(name) or shape, file_dtype="float32")
    return replace(setup, shape=shape, untrained=0 if shape.tied or setup.adapted else shape.head)


@lru_cache(maxsize=8)
def _shape_of(name: str) -> ModelShape | None:
    try:
        return find_shape(ModelConfig(name=name))
    except ModelError:
        return None


def _shared(setup: Setup, part: Part, name: str, total: int, formula: str) -> Item:
    return Item(name, share(setup, part, total), shared_formula(setup, part, formula))


_WEIGHTS = {"none": "s P", "4bit": "0.516 L matrices + s (the rest)", "8bit": "L (matrices + 4 rows) + s (the rest)"}
_IN_16_BITS = "2 L matrices + s (the rest)"


def _weights(setup: Setup) -> Item:
    if setup.sharding == "fsdp2" and _has_masters(setup):
        return Item("weights", 0, "the masters, dithered when they are gathered")
    formula = _IN_16_BITS if setup.base_in_16_bits else _WEIGHTS[setup.quantised]
    return _shared(setup, "weights", "weights", setup.weights, formula)


def _learning(setup: Setup) -> str:
    return "A" if setup.adapted else "P"


def _adapter(setup: Setup) -> list[Item]:
    if not setup.adapted:
        return []
    return [Item("adapter", 4 * setup.trained, "4 A, A weights of the adapter")]


def _optimiser(setup: Setup) -> list[Item]:
    if setup.offloaded:
        return []
    masters = _shared(setup, "optimiser", "master weights", 4 * setup.trained, f"4 {_learning(setup)}")
    return [*([masters] if _has_masters(setup) else []), _moments(setup)]


def _has_masters(setup: Setup) -> bool:
    """Whether there are fp32 copies of what is trained: not of fp32 weights, as peft's adapters are too."""
    return not setup.in_fp32 and setup.config.optimizer.precision in ("masters", "masters-8bit")


def _moments(setup: Setup) -> Item:
    which = _learning(setup)
    if setup.config.optimizer.precision == "masters-8bit":
        return _shared(setup, "optimiser", "moments", int(2 * setup.trained * (1 + 4 / 256)), f"(2 {which} + one fp32 for 256)")
    m = 4 if setup.in_fp32 or setup.config.optimizer.precision == "masters" else setup.weight_bytes
    return _shared(setup, "optimiser", "moments", 2 * m * setup.trained, f"2 x {m} {which}")


def _reference(setup: Setup) -> list[Item]:
    if not setup.has_reference or setup.parked:
        return []
    average = _shared(setup, "weights", "reference average", 4 * setup.shape.parameters, "4 P")
    reference = _shared(setup, "weights", "reference", setup.weights, "s P")
    kl = setup.config.algorithm.kl
    return [reference, average] if kl is not None and kl.reference_mixing < 1 else [reference]


def least_for_vllm(setup: Setup) -> int:
    """Bytes without which vLLM in the trainer's process does not start: its weights, and the cache of its longest sequence."""
    shape, s = setup.shape, setup.weight_bytes
    longest = min(shape.context, setup.config.rollout.vllm.max_model_tokens or shape.context)
    seen = sum(layers * int(min(longest, window)) for window, layers in shape.layers_by_window.items())
    return s * shape.parameters + shape.cached(s) * seen // shape.layers


def _vllm(setup: Setup, learns: bool) -> list[Item]:
    """vLLM in the trainer's own process: its weights and its cache, or its share of a GPU, which is both; what is left of it where it
    sleeps while the policy ``learns``."""
    settings, weights = setup.config.rollout.vllm, setup.weight_bytes * setup.shape.parameters
    if not setup.by_vllm or settings.url is not None:
        return []
    if learns and setup.vllm_sleeps:
        return [Item("vLLM", _ASLEEP, "asleep: captured graphs and workspaces, an allowance")]
    if settings.cache_gib is not None:
        return [Item("vLLM", weights + int(settings.cache_gib * 2**30), "s P + rollout.vllm.cache_gib")]
    taken = max(least_for_vllm(setup), int(settings.gpu_memory_share * setup.device_bytes))
    return [Item("vLLM", taken, "rollout.vllm.gpu_memory_share of the GPU, its s P of weights included")]


_ASLEEP = 2 * 2**30
"""Assumed. vLLM's own tests of its sleep mode let small models keep 2 to 3 GiB, the driver's context included."""


def _critic(critic: Setup) -> list[Item]:
    """Its weights and its optimiser; gradients belong to the phases in which there are some."""
    weights = _weights(critic).bytes + (4 * critic.trained if critic.adapted else 0)
    learnt = sum(item.bytes for item in _optimiser(critic))
    return [
        Item("critic's weights", weights, "as the policy's weights (+ 4 A with an adapter)"),
        Item("critic's optimiser", learnt, "as the policy's: masters and moments"),
    ]
