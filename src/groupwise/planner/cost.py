"""Arithmetic and time of a step: how much work the products are, how many bytes decoding reads, and what a device makes of it.

Two operations to a multiplication and addition, as in PaLM's model FLOPs (arXiv 2204.02311, appendix B). What is counted is the work
that this trainer does: a prompt once for its group, no padding, the output head at predicted tokens only. Prompts are supposed to have
nothing in common.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from groupwise.planner.hardware import HARDWARE, NETWORK_BYTES_PER_S, Hardware
from groupwise.planner.setup import Setup
from groupwise.planner.state import critic_of, exchange_bytes, share

__all__ = ["DECODE_LAUNCHES", "DECODE_OPERATIONS", "StepCost", "cost_formulas", "decode_step_s", "link_bytes_per_s", "step_cost"]


@dataclass(frozen=True, slots=True)
class StepCost:
    """One step of one process: operations, and seconds by part."""

    sampling_flops: float
    learning_flops: float
    """Forward and backward passes over every update, a critic's too, what is computed again for memory's sake, and passes without
    gradients."""
    sampling_s: float
    learning_s: float
    optimizer_s: float
    communication_s: float

    overlapped: bool = False
    """Whether the next batch is sampled while this one is learnt, each on a part of the machine that the other does not need."""

    @property
    def step_s(self) -> float:
        after = self.learning_s + self.optimizer_s + self.communication_s
        return max(self.sampling_s, after) if self.overlapped else self.sampling_s + after

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "step_s": self.step_s}


def step_cost(setup: Setup, hardware: Hardware) -> StepCost:
    """The cost of one step at the expected length of completions, every group learnt from."""
    bandwidth = hardware.bytes_per_s * hardware.bandwidth_share
    forward = _forward_flops(setup)
    learners = [(setup, forward, _scored(setup))]
    if (critic := critic_of(setup)) is not None:
        learners.append((critic, _forward_flops(critic, head=False), 1))
    learning = sum(_learning_flops(*one) for one in learners)
    merging = sum(_merging_s(one, bandwidth, scored) for one, _, scored in learners)
    update = sum(_update_s(one, bandwidth) for one, *_ in learners)
    return StepCost(
        sampling_flops=forward,
        learning_flops=learning,
        sampling_s=_sampling_s(setup, hardware),
        learning_s=learning / _arithmetic(setup, hardware) + merging,
        optimizer_s=update * setup.config.algorithm.updates_per_batch + _reference_transfer_s(setup),
        overlapped=setup.ahead > 0,
        communication_s=exchange_bytes(setup) / link_bytes_per_s(setup, hardware),
    )


def link_bytes_per_s(setup: Setup, hardware: Hardware) -> float:
    """Bandwidth of the slowest link between two processes: within a machine, or over the network where there are several."""
    link = hardware.link_bytes_per_s
    return link if setup.world_size <= setup.gpus_per_node else min(link, NETWORK_BYTES_PER_S)


def _forward_flops(setup: Setup, head: bool = True) -> float:
    """2 L matrices R + 2 V D T + 4 L H E pairs, over the whole step. Layers with a window have fewer pairs.

    ``head``: whether the output head is computed."""
    shape, n, c, p = setup.shape, setup.prompts, setup.mean_completion, setup.prompt
    g = setup.config.rollout.completions_per_prompt
    if setup.packed:
        rows, pairs = n * (p + g * (c - 1)), 0.0
        for window, layers in shape.layers_by_window.items():
            pairs += layers * n * ((1 - g) * _seen(p, window) + g * _seen(p + c - 1, window))
    else:  # by a library that masks what lies outside of a window, and computes it
        rows = n * g * (p + c - 1)
        pairs = shape.layers * n * g * _seen(p + c - 1)
    predicted = 2.0 * shape.head * n * g * c if head else 0.0
    return 2.0 * shape.layers * shape.layer_matrices * rows + 4.0 * pairs * shape.attended + predicted


def _seen(length: int, window: float = inf) -> float:
    """Positions that the tokens of a sequence see, each itself included, added up."""
    within = min(length, window)
    return within * (within + 1) / 2 + (length - within) * within


def _scored(setup: Setup) -> int:
    """Passes of a step without gradients: the reference's, and the policy's for values that read its states, or entropies."""
    value, entropy = setup.config.algorithm.value, setup.config.algorithm.entropy
    shared, chosen = value is not None and value.critic == "shared", entropy is not None and entropy.top_share < 1
    return setup.needs_reference + (shared or chosen)


def _learning_flops(setup: Setup, forward: float, scored: int) -> float:
    """A backward pass is two forward passes; one where the base is frozen, whose weights need no gradient. ``scored``: passes
    without gradients."""
    passes = (2.0 if setup.adapted else 3.0) + (1.0 if setup.config.model.gradient_checkpointing else 0.0)
    return (setup.config.algorithm.updates_per_batch * passes + scored) * forward


def decode_step_s(setup: Setup, hardware: Hardware, rows: int, length: float, devices: int = 1) -> float:
    """Seconds of one decode step of ``rows`` sequences that have ``length`` tokens of their own: it reads all weights once and the
    rows' cache, or computes, whichever takes longer. A base of few bits that is not merged is unpacked for each step. ``devices``: as
    many divide both among them. Layers with a window read no further. On a GPU what lies between its kernels comes on top: of the
    way by Triton's, which is taken where they agree with the operations."""
    shape, s = setup.shape, setup.weight_bytes
    weights = shape.layers * shape.layer_matrices + shape.head
    groups = max(1, rows // setup.config.rollout.completions_per_prompt)
    unpacked = 2 * s * shape.layers * shape.layer_matrices if setup.quantised != "none" and not setup.by_builtin else 0
    in_8_bits = setup.device == "cpu" and setup.config.rollout.quantization == "8bit"
    read, seen = float((1 if in_8_bits else s) * weights + unpacked), 0.0
    for window, layers in shape.layers_by_window.items():
        own = min(length, window)
        prompt = min(setup.prompt, window - own)
        read += shape.cached(s) * layers / shape.layers * (groups * prompt + rows * own)
        seen += layers * (prompt + own)
    computed = 2.0 * weights * rows + 4.0 * shape.attended * rows * seen
    work = max(read / (hardware.bytes_per_s * hardware.bandwidth_share), computed / _arithmetic(setup, hardware)) / devices
    return work + _between_s(setup, rows)


DECODE_LAUNCHES, DECODE_OPERATIONS = (10, 66), (30, 68)
"""Kernels of a decode step of the built-in engine on a GPU, in each layer and once for all, with Triton's and by PyTorch's operations
alone: both are counted in the tests."""
_KERNEL_S = 4e-6
"""A kernel of a captured graph that moves next to nothing, with the gap before it. Assumed; 2 to 5 microseconds are reported."""
_VLLM_ROW_S, _MODULE_STEP_S = 20e-6, 25e-3
"""What a step of other engines takes on a GPU beside its arithmetic and traffic: vLLM's scheduler and sampler on the host, for each row
(20 to 40 thousand tokens/s are reported for 256 sequences of a model of 1.5B), and transformers' modules, which launch every kernel by
Python (4 to 10 thousand)."""


def _between_s(setup: Setup, rows: int) -> float:
    """Seconds of a decode step in which a GPU neither computes nor reads much: its floor, whatever the card."""
    if setup.device == "cpu":
        return 0.0
    if not setup.by_builtin:
        return _VLLM_ROW_S * rows if setup.by_vllm else _MODULE_STEP_S
    each, once = DECODE_LAUNCHES
    return _KERNEL_S * (setup.shape.layers * each + once)


def _arithmetic(setup: Setup, hardware: Hardware) -> float:
    """Operations a second that are reached."""
    reached = hardware.flops_per_s * hardware.arithmetic_share
    if setup.weight_bytes == 4 and hardware.fp32_flops_per_s is not None:
        reached = hardware.fp32_flops_per_s * hardware.arithmetic_share
    elif setup.weight_bytes == 4:
        reached /= 2 if setup.device == "cpu" else 8  # fp32 products (tensor cores of GPUs: TF32, off by default)
    return reached


def _sampling_s(setup: Setup, hardware: Hardware) -> float:
    """Prefill, then one decode step a token, for as many rounds as it takes."""
    shape, c = setup.shape, setup.mean_completion
    total = setup.prompts * setup.config.rollout.completions_per_prompt
    rows = min(total, setup.config.rollout.max_concurrent_sequences)
    prefill = 2.0 * shape.layers * shape.layer_matrices * setup.prompts * setup.prompt
    return prefill / _arithmetic(setup, hardware) + c * -(-total // rows) * decode_step_s(setup, hardware, rows, c / 2)


_MERGING_BYTES = 28
"""Read and written to merge one weight with what an adapter adds to it, and to round it (``models/merging.py``)."""


def _merging_s(setup: Setup, bandwidth: float, scored: int) -> float:
    """Seconds to merge base and adapter, which is done again for each forward pass, each recomputed one, and each backward pass."""
    if not (setup.adapted and setup.packed):
        return 0.0
    times = 3 if setup.config.model.gradient_checkpointing else 2
    made = setup.passes * (setup.config.algorithm.updates_per_batch * times + scored)
    return made * _MERGING_BYTES * setup.shape.layers * setup.shape.layer_matrices / bandwidth


_BUS_BYTES_PER_S = 20e9
"""Between a GPU and the machine's memory: most of PCIe 4.0 x16."""


def _update_s(setup: Setup, bandwidth: float) -> float:
    """Seconds of an update. In the machine's own memory where the optimiser is offloaded: gradients cross the bus after each pass,
    and are added up in fp32; masters cross it the other way once, to be rounded there."""
    if not (setup.device == "cuda" and setup.config.optimizer.offload):
        return _optimizer_bytes(setup) / bandwidth
    s, passes = setup.weight_bytes, setup.passes
    crossing = (s * passes + 4) * setup.trained / _BUS_BYTES_PER_S
    adding = (passes - 1) * (4 + 4 + s) * setup.trained  # the first pass's gradients become the sum
    return crossing + (adding + _optimizer_bytes(setup)) / HARDWARE["cpu"].bytes_per_s


def _reference_transfer_s(setup: Setup) -> float:
    parked = setup.device == "cuda" and setup.config.training.offload_reference and setup.needs_reference
    return setup.weights / _BUS_BYTES_PER_S if parked and not setup.adapted else 0.0


def _optimizer_bytes(setup: Setup) -> float:
    """Reads and writes of gradient, moments and masters, and the write of the weights."""
    precision = "fp32" if setup.in_fp32 else setup.config.optimizer.precision
    gradient, moments, masters, weights = {
        "fp32": (4, 8, 4, 0), "masters": (4, 8, 4, 2), "masters-8bit": (4, 2, 4, 2), "stochastic": (4, 4, 2, 0), "pure": (2, 4, 2, 0)
    }[precision]  # fmt: skip
    return share(setup, "optimiser", setup.trained * (gradient + 2 * moments + 2 * masters + weights))


def cost_formulas(setup: Setup, hardware: Hardware) -> list[tuple[str, str, str]]:
    """What the time is made of: name, value, formula."""
    cost, bandwidth = step_cost(setup, hardware), hardware.bytes_per_s * hardware.bandwidth_share
    rollout = setup.config.rollout
    rows = min(setup.prompts * rollout.completions_per_prompt, rollout.max_concurrent_sequences)
    step = decode_step_s(setup, hardware, rows, setup.mean_completion / 2)
    passes = cost.learning_flops / max(1.0, cost.sampling_flops)
    merging = " + 28 bytes a weight and merging" if _merging_s(setup, bandwidth, 0) else ""
    floor = f", and {1e3 * between:.2f} ms between kernels" if (between := _between_s(setup, rows)) else ""
    rows_of = [
        ("arithmetic", f"{_arithmetic(setup, hardware) / 1e12:,.1f} TFLOP/s", f"{hardware.arithmetic_share:.0%} of {hardware.name}'s"),
        ("bandwidth", f"{bandwidth / 1e9:,.0f} GB/s", f"{hardware.bandwidth_share:.0%} of {hardware.name}'s"),
        ("one forward pass", f"{cost.sampling_flops / 1e12:,.1f} TFLOP", "2 L matrices rows + 2 V D predictions + 4 L H E pairs"),
        ("learning's passes", f"{cost.learning_flops / 1e12:,.1f} TFLOP", f"{passes:.3g} forward passes (a backward pass is 2)"),
        ("a decode step", f"{1e3 * step:,.2f} ms", f"the larger of reading weights and cache, and computing {rows} rows" + floor),
        ("sampling", f"{cost.sampling_s:,.2f} s", "prefill / arithmetic + tokens x rounds x decode step"),
        ("learning", f"{cost.learning_s:,.2f} s", f"TFLOP / arithmetic{merging}"),
        ("optimiser", f"{cost.optimizer_s:,.2f} s", "reads and writes of gradient, moments, masters and weights / bandwidth"),
    ]  # fmt: skip
    if setup.world_size > 1:
        link = link_bytes_per_s(setup, hardware) / 1e9
        sent = exchange_bytes(setup) / 2**30
        rows_of.append(("communication", f"{cost.communication_s:,.2f} s", f"{sent:,.1f} GiB a step at {link:,.0f} GB/s"))
    return rows_of
