"""Why does the loss start at 0, and why may it rise while the reward rises?

    python -m experiments.loss_at_zero

The toy policy is trained by GRPO with three weights of the KL; the loss and the reward of every step are kept.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from experiments.common import Experiment, describe, main, markdown_table
from experiments.toy import ToyPolicy, backward, objective

__all__ = ["EXPERIMENT", "measure", "train"]

BETAS = (0.0, 0.04, 0.2)


def train(beta: float, *, steps: int, seed: int, rate: float = 0.03) -> dict[str, list[float]]:
    """Reward, loss and KL of each step of GRPO on the toy; the reference is the policy at the start."""
    policy = ToyPolicy(seed)
    reference = copy.deepcopy(policy)
    adam = torch.optim.Adam(policy.parameters, lr=rate)
    curves: dict[str, list[float]] = {"reward": [], "loss": [], "kl": []}
    for _ in range(steps):
        batch = policy.sample(problems=16, group=8)
        adam.zero_grad()
        found = backward(policy, batch, objective(kl={"beta": beta} if beta else None), reference=reference)
        adam.step()
        curves["reward"].append(float(batch.rewards_N.mean()))
        curves["loss"].append(found["loss"])
        curves["kl"].append(found["kl"])
    return curves


def measure(steps: int = 150, seeds: int = 5) -> dict[str, Any]:
    runs = {beta: [train(beta, steps=steps, seed=seed) for seed in range(seeds)] for beta in BETAS}
    return {
        "steps": steps,
        "seeds": seeds,
        "curves": {
            str(beta): {
                key: [round(statistics.fmean(x), 9) for x in zip(*(run[key] for run in found), strict=True)] for key in found[0]
            }
            for beta, found in runs.items()
        },
        "first_loss": {str(beta): max(abs(run["loss"][0]) for run in found) for beta, found in runs.items()},
        "largest_loss_without_kl": max(abs(x) for run in runs[0.0] for x in run["loss"]),
    }


def draw(numbers: Mapping[str, Any], path: Path) -> None:
    from experiments.style import figure

    with figure(path, ["reward", "loss"]) as (reward, loss):
        for beta, curves in numbers["curves"].items():
            reward.plot(curves["reward"], label=f"beta {float(beta):g}")
            loss.plot(curves["loss"])
        reward.legend()
        reward.set_xlabel("step")
        loss.set_xlabel("step")


def report(numbers: Mapping[str, Any]) -> str:
    rows = [
        [
            f"{float(beta):g}",
            f"{statistics.fmean(c['reward'][:5]):.2f} to {statistics.fmean(c['reward'][-5:]):.2f}",
            f"{numbers['first_loss'][beta]:.0e}",
            f"{statistics.fmean(c['loss'][-5:]):.1e}",
            f"{float(beta) * statistics.fmean(c['kl'][-5:]):.1e}",
        ]
        for beta, c in numbers["curves"].items()
    ]
    table = markdown_table(
        ["beta", "reward, first to last 5 steps", "loss at step 1", "loss, last 5 steps", "beta x KL, last 5"], rows
    )
    return (
        f"![Reward and loss by step](../docs/figures/loss_at_zero.svg)\n\n{table}\n\n"
        f"Means over {numbers['seeds']} seeds (the loss at step 1: the largest). Without a KL "
        f"the loss of no step was above {numbers['largest_loss_without_kl']:.0e}. {describe(numbers)}"
    )


EXPERIMENT = Experiment("loss_at_zero", measure, draw, report)

if __name__ == "__main__":
    main(EXPERIMENT)
