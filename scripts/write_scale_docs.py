"""Writes the table of docs/explanation/scale.md from the planner: `python scripts/write_scale_docs.py`; a test says when that is due.

The planner's own figures for one process, put together for N of them: what a step costs on many GPUs, and what it waits for. Learning is
divided by FSDP2. Sampling is done by groups of t GPUs that hold one copy of the weights between them, beside the divided state: the
built-in engine where t is 1, vLLM with tensor parallelism above.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from groupwise.config import build_config
from groupwise.planner import HARDWARE, KNOWN_SHAPES, Setup
from groupwise.planner.cost import decode_step_s, step_cost
from groupwise.planner.hardware import GPUS_OF_A_MACHINE, NETWORK_BYTES_PER_S, Hardware
from groupwise.planner.shape import ModelShape
from groupwise.planner.state import exchange_bytes, state

__all__ = ["PAGE", "Scaled", "Work", "render", "scaled"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "explanation" / "scale.md"
SIZES = ("7B", "32B", "72B")
GPUS = (8, 64, 512)
CARD = HARDWARE["h100"]
GIB = 2**30

_ROOM_FOR_PASSES = 0.2
"""Share of a GPU's memory that sampling leaves to what else comes and goes."""


@dataclass(frozen=True, slots=True)
class Work:
    """A step, and the network between machines."""

    prompts: int = 512
    completions: int = 16
    prompt_tokens: int = 256
    mean_tokens: int = 1024
    most_tokens: int = 4096
    pass_tokens: int = 16384
    concurrent: int = 256
    """Sequences of one copy of the weights at a time."""
    network_bytes_per_s: float = NETWORK_BYTES_PER_S
    """Of one GPU, to GPUs of other machines."""


@dataclass(frozen=True, slots=True)
class Scaled:
    """Seconds of one step on all GPUs, and bytes on each."""

    state_bytes: int
    """Weights, masters, moments, reference and gradients."""
    copy_gpus: int | None
    """t; None where no group of a machine's GPUs holds weights and cache beside the state."""
    sampling_s: float
    """All completions, by their mean length."""
    longest_s: float
    """The longest completion alone."""
    learning_s: float
    traffic_s: float
    handover_s: float
    """Weights to a sampler of its own."""

    @property
    def sampled_s(self) -> float:
        return max(self.sampling_s, self.longest_s)

    @property
    def learnt_s(self) -> float:
        """Traffic hides behind the passes as far as these last."""
        return max(self.learning_s, self.traffic_s)

    @property
    def step_s(self) -> float:
        return self.sampled_s + self.learnt_s + self.handover_s

    @property
    def ahead_s(self) -> float:
        """A step where the next batch is sampled while this one is learnt, by the same GPUs at the rates of each part (best case)."""
        return max(self.sampled_s, self.learnt_s) + self.handover_s

    @property
    def bottleneck(self) -> str:
        """The largest part of a step."""
        if self.copy_gpus is None:
            return "memory"
        parts = {
            "learning": self.learnt_s if self.traffic_s <= self.learning_s else 0.0,
            "network": self.learnt_s if self.traffic_s > self.learning_s else 0.0,
            "sampling, all": self.sampled_s if self.longest_s <= self.sampling_s else 0.0,
            "sampling, longest": self.sampled_s if self.longest_s > self.sampling_s else 0.0,
        }
        return max(parts, key=lambda name: parts[name])


def scaled(shape: ModelShape, gpus: int, hardware: Hardware, work: Work | None = None) -> Scaled:
    """One step of ``work`` on ``gpus`` devices, trained whole with a reference and checkpointing."""
    work = work or Work()
    setup = _scaled_setup(shape, gpus, work)
    cost = step_cost(setup, hardware)
    held = sum(i.bytes for i in state(setup) if i.name != "process") + 4 * shape.parameters // gpus
    t = _copy_gpus(setup, hardware, held, gpus, work)
    link = hardware.link_bytes_per_s if gpus <= GPUS_OF_A_MACHINE else work.network_bytes_per_s
    found = Scaled(held, t, 0.0, 0.0, cost.learning_s, exchange_bytes(setup) / link, 0.0)
    if t is None:
        return found
    rows = _rows(gpus, t, work)
    rounds = -(-work.prompts * work.completions * t // (gpus * rows))
    prefill = (
        2.0
        * shape.layers
        * shape.layer_matrices
        * setup.prompts
        * setup.prompt
        / (hardware.flops_per_s * hardware.arithmetic_share)
    )
    return Scaled(
        held, t,
        sampling_s=prefill + rounds * work.mean_tokens * decode_step_s(setup, hardware, rows, work.mean_tokens / 2, t),
        longest_s=work.most_tokens * decode_step_s(setup, hardware, 1, work.most_tokens / 2, t),
        learning_s=cost.learning_s,
        traffic_s=found.traffic_s,
        handover_s=0.0 if t == 1 else setup.weights / link,
    )  # fmt: skip


def _scaled_setup(shape: ModelShape, gpus: int, work: Work) -> Setup:
    config = build_config(
        {
            "model": {"gradient_checkpointing": True},
            "rollout": {
                "prompts_per_step": work.prompts,
                "completions_per_prompt": work.completions,
                "max_completion_tokens": work.most_tokens,
                "max_concurrent_sequences": work.concurrent,
            },
            "algorithm": {"kl": {"beta": 0.001}},
            "training": {"sharding": "fsdp2", "micro_batch_tokens": work.pass_tokens},
        }
    )
    return Setup(config, shape, "cuda", gpus, work.prompt_tokens, work.mean_tokens)


def _rows(gpus: int, t: int, work: Work) -> int:
    """Sequences at a time for each copy of the weights."""
    return max(1, min(work.concurrent, work.prompts * work.completions * t // gpus))


def _copy_gpus(setup: Setup, hardware: Hardware, held: int, gpus: int, work: Work) -> int | None:
    """The smallest t, a power of two, whose GPUs hold weights and cache between them beside what each holds of the state."""
    free = hardware.memory_bytes * (1 - _ROOM_FOR_PASSES) - held
    t = 1
    while t <= min(gpus, GPUS_OF_A_MACHINE):
        rows = _rows(gpus, t, work)
        positions = rows / work.completions * work.prompt_tokens + rows * work.mean_tokens
        if setup.weights + positions * setup.shape.cached(setup.weight_bytes) <= t * free:
            return t
        t *= 2
    return None


def render(page: str) -> str:
    """The page with its table written again, between its marks."""
    before, _, rest = page.partition("<!-- steps -->")
    after = rest.partition("<!-- /steps -->")[2]
    return f"{before}<!-- steps -->\n\n{_steps()}\n\n<!-- /steps -->{after}"


def _steps() -> str:
    rows = [
        "| model | GPUs | state, GiB a GPU | t | sampling, all | sampling, longest | learning | traffic | a step, in turn | ahead | "
        "what it waits for |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for size in SIZES:
        for gpus in GPUS:
            found = scaled(KNOWN_SHAPES[f"Qwen/Qwen2.5-{size}"], gpus, CARD, Work())
            held = f"{found.state_bytes / GIB:.3g}"
            if found.copy_gpus is None:
                rows.append(f"| {size} | {gpus} | {held} | - | | | {_s(found.learning_s)} | {_s(found.traffic_s)} | | | memory |")
                continue
            times = (found.sampling_s, found.longest_s, found.learning_s, found.traffic_s, found.step_s, found.ahead_s)
            rows.append(f"| {size} | {gpus} | {held} | {found.copy_gpus} | {' | '.join(map(_s, times))} | {found.bottleneck} |")
    return "\n".join(rows)


def _s(seconds: float) -> str:
    return f"{seconds:.0f}"


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
