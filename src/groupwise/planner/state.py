"""What a run holds from phase to phase: weights, reference, masters, moments, a critic of its own; and the gradients, which come and go.

Bytes on one device. Symbols as in ``plan.LEGEND``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from groupwise.config.schema import ModelConfig
from groupwise.errors import ModelError
from groupwise.planner.item import Item
from groupwise.planner.setup import Setup
from groupwise.planner.shape import ModelShape, find_shape
from groupwise.planner.sharding import Part, share, shared_formula

__all__ = ["critic_of", "gradients", "state"]

_MIB = 2**20
_PROCESS = {"cpu": 465 * _MIB, "cuda": 600 * _MIB}
"""Python, torch, transformers and the tokenizer: 405 MiB before any weights, and 60 more once everything has run once (measured with
a model of 3 million weights); on a GPU the driver's context and cuBLAS (assumed)."""
_BITSANDBYTES = 45 * _MIB
"""On the CPU; peft imports it too."""


def state(setup: Setup) -> list[Item]:
    """Everything that lives in every phase."""
    with_bitsandbytes = setup.device == "cpu" and (setup.adapted or setup.config.optimizer.precision == "masters-8bit")
    process = _PROCESS[setup.device] + (_BITSANDBYTES if with_bitsandbytes else 0)
    items = [
        Item("process", process, "Python and its libraries, on a GPU the driver's context"),
        _weights(setup),
        Item("reward models", setup.judges, "their weights, 2 bytes each or as their dtype says"),
        *_adapter(setup),
        *_optimiser(setup),
        *_reference(setup),
        *_vllm(setup),
        Item("samplers' weights", setup.copies * setup.weight_bytes * setup.shape.parameters, "s P for each step ahead"),
    ]
    critic = critic_of(setup)
    return items if critic is None else [*items, *_critic(critic)]


def gradients(setup: Setup) -> Item:
    """What has added up over the micro-batches."""
    if setup.offloaded:
        return Item("gradients", 0, "in the machine's memory")
    size = setup.weight_bytes if setup.config.optimizer.precision == "pure" and not setup.in_fp32 else 4
    return _shared(setup, "gradients", "gradients", size * setup.trained, f"{size} {_learning(setup)}")


def _uses_own_critic(setup: Setup) -> bool:
    """Whether PPO's value is learned by a second model."""
    value = setup.config.algorithm.value
    return value is not None and value.critic != "shared"


def critic_of(setup: Setup) -> Setup | None:
    """The critic as a run of its own shape; None without one. One whose config.json cannot be had counts as the policy's copy."""
    value = setup.config.algorithm.value
    if value is None or value.critic == "shared":
        return None
    name = value.critic
    shape = setup.shape if name == "copy" else _shape_of(name) or setup.shape
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


def _weights(setup: Setup) -> Item:
    if setup.sharding == "fsdp2" and _has_masters(setup):
        return Item("weights", 0, "the masters, rounded when they are gathered")
    return _shared(setup, "weights", "weights", setup.weights, _WEIGHTS[setup.quantised])


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


def _vllm(setup: Setup) -> list[Item]:
    """vLLM in the trainer's own process: its weights and its cache, or its share of a GPU, which is both."""
    settings, weights = setup.config.rollout.vllm, setup.weight_bytes * setup.shape.parameters
    if not setup.by_vllm or settings.url is not None:
        return []
    if settings.cache_gib is not None:
        return [Item("vLLM", weights + int(settings.cache_gib * 2**30), "s P + rollout.vllm.cache_gib")]
    taken = int(settings.gpu_memory_share * setup.device_bytes)
    return [Item("vLLM", max(weights, taken), "rollout.vllm.gpu_memory_share of the GPU, its s P of weights included")]


def _critic(critic: Setup) -> list[Item]:
    """Its weights and its optimiser; gradients belong to the phases in which there are some."""
    weights = _weights(critic).bytes + (4 * critic.trained if critic.adapted else 0)
    learnt = sum(item.bytes for item in _optimiser(critic))
    return [
        Item("critic's weights", weights, "s P of the critic (+ 4 A with an adapter)"),
        Item("critic's optimiser", learnt, "as the policy's: masters and moments"),
    ]
