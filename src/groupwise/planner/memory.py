"""Memory of a run by phase: which tensors live at the same time, how large each is, and why.

Every figure is an ``Item`` with its formula; a phase is the items that live together at its fullest moment. Bytes on one device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from groupwise.planner.activations import head_bytes, kept_bytes, kept_formula, passing_bytes, prefill_bytes
from groupwise.planner.setup import Setup

__all__ = ["Item", "Phase", "peak_phase", "phases"]

_MIB = 2**20
_PROCESS = {"cpu": 405 * _MIB, "cuda": 600 * _MIB}
"""Python, torch, transformers and the tokenizer before any weights (measured); on a GPU the driver's context and cuBLAS (assumed)."""
_PEFT = 45 * _MIB
_HOLES_NAME = "the allocator's holes"
_HOLES = {"cpu": 0.25, "cuda": 0.05}
"""What an allocator loses, as a share of what comes and goes: on CPU the holes in the C library's heap (measured: a sixth to a third,
docs/planning.md), on a GPU an allowance."""
_PREFILL_TOKENS = 4096
_ROOM = {"cpu": 32, "cuda": 256}
"""Of ``engines/builtin``."""


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


def phases(setup: Setup) -> list[Phase]:
    """Sampling, evaluation, reference, learning and the optimiser's step, in the steady state (the moments exist)."""
    passing = {"sampling": _sampling(setup, setup.prompts, setup.config.rollout.completions_per_prompt)}
    if setup.config.data.holdout or setup.config.data.eval_split or setup.config.data.eval_source:
        passing["evaluation"] = _sampling(setup, setup.config.evaluation.problems or 10**6, 1)
    if _parked(setup) and setup.config.algorithm.beta > 0 and not setup.adapted:
        passing["reference"] = _reference_pass(setup)
    passing |= {"learning": _learning(setup), "optimiser step": [_gradients(setup)]}
    found = [_phase(name, [*_state(setup), *items, _holes(setup, items)]) for name, items in passing.items()]
    return [p if p.name != "learning" else _with_aligned_blocks(setup, p) for p in found]


def peak_phase(found: Sequence[Phase]) -> Phase:
    return max(found, key=lambda phase: phase.bytes)


def _phase(name: str, items: list[Item]) -> Phase:
    return Phase(name, tuple(sorted((i for i in items if i.bytes), key=lambda item: -item.bytes)))


def _with_aligned_blocks(setup: Setup, learning: Phase) -> Phase:
    """On CPU with an adapter, what glibc loses of its forward pass instead of a share: freed fp32 blocks (a layer's two widest, and
    norms) that an aligned request of the same size does not fit into, which PyTorch's all are. Measured with glibc 2.36."""
    if setup.device != "cpu" or not setup.adapted or setup.weight_bytes == 4:
        return learning
    shape, rows = setup.shape, setup.largest.padded
    lost = shape.layers * rows * (8 * shape.feed_forward + 2 * shape.width)
    if setup.config.model.gradient_checkpointing:
        lost += lost * 2 // 5  # once more, less, where the backward pass computes layers again
    items = [i for i in learning.items if i.name != _HOLES_NAME]
    return _phase(learning.name, [*items, Item(_HOLES_NAME, lost, "L N (8F + 2D): glibc's aligned blocks")])


def _holes(setup: Setup, items: Sequence[Item]) -> Item:
    share = _HOLES[setup.device]
    return Item(_HOLES_NAME, int(share * sum(i.bytes for i in items)), f"{share:.0%} of what comes and goes")


def _has_masters(setup: Setup) -> bool:
    """Whether there are fp32 copies of what is trained: not of fp32 weights, as peft's adapters are too."""
    return not setup.in_fp32 and setup.config.optimizer.precision in ("masters", "masters-8bit")


def _state(setup: Setup) -> list[Item]:
    parameters, trained, s = setup.shape.parameters, setup.trained, setup.weight_bytes
    items = [
        Item("process", _PROCESS[setup.device] + (_PEFT if setup.adapted else 0), "what runs before any weights are loaded"),
        Item("weights", s * parameters, "s P"),
        Item("reward models", setup.judges, "their weights, 2 bytes each or as their dtype says"),
    ]
    if setup.adapted:
        items += [Item("adapter", 4 * trained, "4 A, A weights of the adapter"), *_merged_copy(setup)]
    if _has_masters(setup) and not _offloaded(setup):
        items.append(Item("master weights", 4 * trained, "4 P"))
    if not _offloaded(setup):
        items.append(_moments(setup))
    if setup.config.algorithm.beta > 0 and not setup.adapted and not _parked(setup):
        items.append(Item("reference", s * parameters, "s P"))
        if setup.config.algorithm.reference_mixing < 1:
            items.append(Item("reference average", 4 * parameters, "4 P"))
    return [*items, *_critic(setup)]


def _critic(setup: Setup) -> list[Item]:
    """A second model for PPO's value, taken to have the policy's shape: weights, masters, moments, and gradients, which live while it and
    the policy learn."""
    algorithm, trained, s = setup.config.algorithm, setup.trained, setup.weight_bytes
    if algorithm.baseline != "value" or algorithm.critic == "shared":
        return []
    masters = 4 * trained if _has_masters(setup) else 0
    own = 4 * trained if setup.adapted else 0
    learnt = masters + _moments(setup).bytes + _gradients(setup).bytes
    return [
        Item("critic's weights", s * setup.shape.parameters + own, "s P (+ 4 A with an adapter)"),
        Item("critic's optimiser", learnt, "as the policy's: masters, moments, gradients"),
    ]


def _offloaded(setup: Setup) -> bool:
    return setup.device == "cuda" and setup.config.optimizer.offload


def _parked(setup: Setup) -> bool:
    return setup.device == "cuda" and setup.config.training.offload_reference


def _reference_pass(setup: Setup) -> list[Item]:
    """Of a reference that comes for its pass alone: its weights, one layer, and the head."""
    batch = setup.largest
    return [
        Item("reference", setup.weight_bytes * setup.shape.parameters, "s P, while it is used"),
        Item("one layer's forward pass", prefill_bytes(setup, batch.rows), "R s (3D + 3(H+2K)E + HE + 3F) + 4 R D"),
        Item("logits tiles", head_bytes(setup, batch), "4 tile x 4096 + T (s slice + D (2s + 4))"),
    ]


def _moments(setup: Setup) -> Item:
    which = "A" if setup.adapted else "P"
    if setup.config.optimizer.precision == "masters-8bit":
        return Item("moments", int(2 * setup.trained * (1 + 4 / 256)), f"2 {which} + one fp32 for 256")
    m = 4 if setup.in_fp32 or setup.config.optimizer.precision == "masters" else setup.weight_bytes
    return Item("moments", 2 * m * setup.trained, f"2 x {m} {which}")


def _merged_copy(setup: Setup) -> list[Item]:
    """The sampler's copy of the base, with the adapter merged in."""
    if not setup.shape.lean or setup.config.rollout.engine == "transformers":
        return []
    return [Item("merged weights", setup.weight_bytes * setup.shape.parameters, "s P, the sampler's copy")]


def _gradients(setup: Setup) -> Item:
    m = setup.weight_bytes if setup.config.optimizer.precision == "pure" and not setup.in_fp32 else 4
    if _offloaded(setup):
        return Item("gradients", 0, "in the machine's memory")
    return Item("gradients", m * setup.trained, f"{m} {'A' if setup.adapted else 'P'}")


def _sampling(setup: Setup, prompts: int, samples: int) -> list[Item]:
    shape, s = setup.shape, setup.weight_bytes
    rows = min(setup.config.rollout.max_concurrent_sequences, prompts * samples)
    groups = min(prompts, rows)
    per_position = 2 * shape.layers * shape.kv_heads * shape.head_width * s
    room = _grown_room(setup)
    own = rows * room * per_position
    growing = 2 * own // (2 * shape.layers) if room > _ROOM[setup.device] else 0
    items = [
        Item("KV cache", groups * setup.prompt * per_position + own + growing, "2 L K E s (groups x prompt + rows x completion)"),
        Item("logits", rows * shape.vocabulary * (s + 4), "rows V (s + 4)"),
        Item("prefill", prefill_bytes(setup, min(_PREFILL_TOKENS, groups * setup.prompt)), "one layer over 4,096 prompt tokens"),
    ]
    if setup.device == "cpu" and s == 2 and shape.lean:
        copied = s * (shape.layers * shape.layer_matrices + shape.head)
        items.append(Item("rearranged weights", copied, "s (L matrices + V D), while sampling"))
    return items


def _grown_room(setup: Setup) -> int:
    """Completion positions in the cache at the end: it grows by blocks up to the limit."""
    least, limit = _ROOM[setup.device], max(1, setup.completion - 1)
    room = min(least, limit)
    while room < limit:
        room = min(limit, room + max(least, room // 8 // least * least))
    return room


def _learning(setup: Setup) -> list[Item]:
    """The fuller of two moments: the output head's backward pass, when all layers' activations are there; and the end, when all
    gradients are. From the second micro-batch on the fp32 gradients are there from the beginning."""
    shape, s, batch = setup.shape, setup.weight_bytes, setup.largest
    gradients = _gradients(setup)
    head_gradient = 0 if setup.adapted else s * shape.head
    several = len(setup.micro_batches) > 1
    early = [
        *([gradients] if several else []),
        Item("activations", kept_bytes(setup, batch), kept_formula(setup)),
        Item("logits tiles", head_bytes(setup, batch), "4 tile x 4096 + T (s slice + D (2s + 4))"),
        Item("head's gradient", head_gradient, "s V D"),
    ]
    layer = [
        *([gradients] if several else []),
        Item("activations", kept_bytes(setup, batch), kept_formula(setup)),
        Item("one layer's backward pass", passing_bytes(setup, batch), "R s (D + 6F) + 2 s F D"),
        Item("head's gradient", head_gradient, "s V D"),
    ]
    late = [
        gradients,
        Item("head's gradient", 3 * head_gradient if shape.tied else head_gradient, "3 s V D (head, embedding, their sum)"),
    ]
    return max((early, layer, late), key=lambda items: sum(item.bytes for item in items))
