"""Why did gradient accumulation "not act like a large batch", and even hurt?

    python -m experiments.accumulation

First the gradients of one batch, cut in four in several ways, against the gradient of the whole. Then training runs of the toy
policy on the same number of completions.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.common import Experiment, describe, main, markdown_table
from experiments.toy import Batch, ToyPolicy, backward, objective

__all__ = ["CUTS", "EXPERIMENT", "VARIANTS", "Variant", "gradient", "measure", "train"]

PARTS = 4
GROUP = 8
CUTS = {
    "weights of the whole batch (as here)": "token_mean",
    "each part's own mean, divided by the parts": "token_mean",
    "each part's own mean, not divided": "sequence_mean",
    "groups torn: advantages within each part": "sequence_mean",
}
"""Ways of cutting, with the aggregation in which each is compared with the whole batch."""


def gradient(policy: ToyPolicy, batch: Batch, cut: str) -> Tensor:
    """The gradient of ``batch``, flattened, when it is cut in four as ``CUTS`` names it."""
    for parameter in policy.parameters:
        parameter.grad = None
    chosen, size, names = objective(loss={"aggregation": CUTS[cut]}), len(batch.lengths_N) // PARTS, list(CUTS)
    for start in range(0, len(batch.lengths_N), size):
        part = batch.part(start, start + size, GROUP // PARTS if cut == names[3] else None)
        own = cut in names[1:3]
        backward(policy, part, chosen, counts=None if own else batch.counts(), factor=1 / PARTS if cut == names[1] else 1.0)
    return _flat(policy)


def whole(policy: ToyPolicy, batch: Batch, aggregation: str) -> Tensor:
    """The gradient of ``batch`` at once."""
    for parameter in policy.parameters:
        parameter.grad = None
    backward(policy, batch, objective(loss={"aggregation": aggregation}))
    return _flat(policy)


def _flat(policy: ToyPolicy) -> Tensor:
    return torch.cat([p.grad.flatten() for p in policy.parameters if p.grad is not None])


def compare_cuts(batches: int) -> dict[str, dict[str, float]]:
    """Length relative to the whole batch's gradient, and the angle to it in degrees; means over ``batches``."""
    found: dict[str, dict[str, float]] = {}
    for cut, aggregation in CUTS.items():
        lengths, angles = [], []
        for seed in range(batches):
            policy = ToyPolicy(seed)
            batch = policy.sample(problems=16, group=GROUP)
            one, other = whole(policy, batch, aggregation).double(), gradient(policy, batch, cut).double()
            lengths.append(float(other.norm() / one.norm()))
            angles.append(float(torch.rad2deg(2 * torch.atan2((other / other.norm() - one / one.norm()).norm(),
                                                               (other / other.norm() + one / one.norm()).norm()))))  # fmt: skip
        found[cut] = {"length": round(statistics.fmean(lengths), 4), "angle": round(statistics.fmean(angles), 3)}
    return found


@dataclass(frozen=True)
class Variant:
    """A way of spending the completions."""

    parts: int = 1
    """Batches of ``PART`` completions whose gradients are added before a step."""
    divided: bool = True
    mu: int = 1
    step_at_end: bool = False
    """One step after all ``mu`` passes, instead of one after each."""
    rate: float = 0.03
    clip: float | None = None
    optimizer: str = "adam"
    torn: bool = False
    """Groups of 8 torn into groups of 2, each with advantages of its own."""


PART_PROBLEMS = 4
PART = PART_PROBLEMS * GROUP
VARIANTS = {
    "a step every 32 completions": Variant(),
    "a step every 128 (4 x 32, divided)": Variant(parts=4),
    "  the same, rate x 2": Variant(parts=4, rate=0.06),
    "  the same, rate x 4": Variant(parts=4, rate=0.12),
    "  the same, not divided": Variant(parts=4, divided=False),
    "  the same, clipped at 0.1": Variant(parts=4, clip=0.1),
    "  the same, not divided, clipped at 0.1": Variant(parts=4, divided=False, clip=0.1),
    "  the same, groups of 8 torn into 2": Variant(parts=4, torn=True),
    "mu = 3, a step after each pass": Variant(parts=4, mu=3),
    "mu = 3, one step at the end": Variant(parts=4, mu=3, step_at_end=True),
    "SGD, 4 x 32, divided": Variant(parts=4, optimizer="sgd", rate=20.0),
    "SGD, 4 x 32, not divided": Variant(parts=4, optimizer="sgd", rate=20.0, divided=False),
    "SGD, 4 x 32, divided, clipped at 0.1": Variant(parts=4, optimizer="sgd", rate=20.0, clip=0.1),
}


def train(variant: Variant, *, completions: int, seed: int) -> dict[str, Any]:
    """Mean reward by 512 completions, and how many steps were made and clipped."""
    policy, chosen = ToyPolicy(seed), objective()
    make = torch.optim.Adam if variant.optimizer == "adam" else torch.optim.SGD
    optimizer: torch.optim.Optimizer = make(policy.parameters, lr=variant.rate)
    rewards: list[float] = []
    steps = clipped = 0
    for _ in range(completions // (PART * variant.parts)):
        batches = [policy.sample(PART_PROBLEMS, GROUP) for _ in range(variant.parts)]
        rewards += [float(batch.rewards_N.mean()) for batch in batches]
        if variant.torn:
            batches = [batch.part(0, PART, GROUP // PARTS) for batch in batches]
        for update in range(variant.mu):
            for batch in batches:
                backward(policy, batch, chosen, factor=1 / variant.parts if variant.divided else 1.0, first=update == 0)
            if not variant.step_at_end or update == variant.mu - 1:
                if variant.clip is not None:
                    clipped += float(torch.nn.utils.clip_grad_norm_(policy.parameters, variant.clip)) > variant.clip
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
    block = 512 // PART
    return {
        "steps": steps,
        "clipped": clipped / steps,
        "reward": [round(statistics.fmean(rewards[i : i + block]), 4) for i in range(0, len(rewards), block)],
    }


def measure(batches: int = 20, completions: int = 16384, seeds: int = 3) -> dict[str, Any]:
    runs = {name: [train(v, completions=completions, seed=s) for s in range(seeds)] for name, v in VARIANTS.items()}
    return {"cuts": compare_cuts(batches), "batches": batches, "completions": completions, "seeds": seeds, "runs": runs}


def final(runs: list[dict[str, Any]]) -> list[float]:
    """Mean reward of each run's last quarter."""
    return [statistics.fmean(run["reward"][-max(1, len(run["reward"]) // 4) :]) for run in runs]


SHOWN = (0, 1, 2, 7, 8, 9, 11)
"""Variants in the figure."""


def draw(numbers: Mapping[str, Any], path: Path) -> None:
    from experiments.style import figure

    with figure(path, ["toy: mean reward over three seeds"], width=8, height=4) as (axis,):
        names = list(numbers["runs"])
        for name in (names[i] for i in SHOWN):
            curves = [run["reward"] for run in numbers["runs"][name]]
            mean = [statistics.fmean(column) for column in zip(*curves, strict=True)]
            label = name.strip().replace("the same,", "every 128,")
            axis.plot([512 * (i + 1) for i in range(len(mean))], mean, label=label, linestyle="--" if "one step" in name else "-")
        axis.set_xlabel("completions sampled")
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))


def report(numbers: Mapping[str, Any]) -> str:
    cuts = markdown_table(
        ["a batch of 128 completions in four parts", "length of the gradient, whole = 1", "angle to it"],
        [[name, f"{x['length']:.2f}", f"{x['angle']:.1f}°"] for name, x in numbers["cuts"].items()],
    )
    rows = []
    for name, runs in numbers["runs"].items():
        ends = final(runs)
        clip = VARIANTS[name].clip
        rows.append(
            [
                name.replace("  the same", "... the same"),
                f"{runs[0]['steps']}",
                f"{statistics.fmean(ends):.2f} ({min(ends):.2f} to {max(ends):.2f})",
                "-" if clip is None else f"{statistics.fmean(run['clipped'] for run in runs):.0%}",
            ]
        )
    trained = markdown_table(["trained on the same completions", "steps", "reward, last quarter", "steps clipped"], rows)
    return (
        f"![Reward by completions sampled](../docs/figures/accumulation.svg)\n\n{cuts}\n\nMeans over {numbers['batches']} batches."
        f"\n\n{trained}\n\n"
        f"{numbers['completions']:,} completions each; mean of {numbers['seeds']} seeds, with the smallest and the largest. "
        f"{describe(numbers)}"
    )


EXPERIMENT = Experiment("accumulation", measure, draw, report)

if __name__ == "__main__":
    main(EXPERIMENT)
