"""Why is the ratio always 1 with mu = 1, and what does mu = 3 do?

    python -m experiments.ratio

One batch of the real small model is learnt from several times, and the ratio of every token is looked at before each update; and
the toy policy is trained with several mu on the same number of completions.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.common import Experiment, describe, main, markdown_table
from experiments.real import VARYING_REWARD, workbench
from experiments.toy import ToyPolicy, backward, objective
from groupwise.algorithm import Objective, policy_loss

__all__ = ["EXPERIMENT", "measure", "ratios_by_update", "reward_by_step"]

SETTINGS = (("bfloat16", 1e-6), ("bfloat16", 2e-5), ("float32", 1e-6), ("float32", 2e-5))
"""Numbers of the model and learning rate."""
MUS = (1, 3, 8)
SHARES = (0.01, 0.25, 0.5, 0.75, 0.99)


def ratios_by_update(rate: float, updates: int, settings: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Before each of ``updates`` on one batch: quantiles of the ratio to the policy before the first, and the share clipped."""
    bench = workbench(["rollout.prompts_per_step=2", "rollout.max_completion_tokens=32", VARYING_REWARD, *settings])
    batch = bench.pack(bench.groups())
    chosen, optimizer, old_logprobs_T = Objective.from_config(bench.config.algorithm), bench.optimizer(), None
    found = []
    for _ in range(updates):
        logprobs_T = bench.scorer.logprobs(batch.packed)
        old_logprobs_T = logprobs_T.detach() if old_logprobs_T is None else old_logprobs_T
        loss, numbers = policy_loss(
            chosen, logprobs_T=logprobs_T, old_logprobs_T=old_logprobs_T, sequence_T=batch.packed.sequence_T, weights_T=batch.weights_T,
            advantages_N=batch.advantages_N,
        )  # fmt: skip
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step(rate)
        ratio_T = (logprobs_T.detach() - old_logprobs_T).exp()
        clipped = numbers["clip_low"].total + numbers["clip_high"].total  # type: ignore[union-attr]
        found.append(
            {
                "quantiles": [round(x, 6) for x in torch.quantile(ratio_T, torch.tensor(SHARES)).tolist()],
                "deviation": round(float((ratio_T - 1).abs().max()), 6),
                "clipped": round(clipped / len(ratio_T), 6),
            }
        )
    return found


def reward_by_step(mu: int, *, steps: int, seed: int, rate: float = 0.03) -> list[float]:
    """Rewards of the toy's batches when each is learnt from ``mu`` times."""
    policy = ToyPolicy(seed)
    adam = torch.optim.Adam(policy.parameters, lr=rate)
    rewards = []
    for _ in range(steps):
        batch = policy.sample(problems=16, group=8)
        rewards.append(float(batch.rewards_N.mean()))
        for update in range(mu):
            adam.zero_grad()
            backward(policy, batch, objective(), first=update == 0)
            adam.step()
    return rewards


def measure(updates: int = 4, steps: int = 120, seeds: int = 3, settings: Sequence[str] = ()) -> dict[str, Any]:
    real, toy = {}, {}
    for dtype, rate in SETTINGS:
        name = f"{dtype}, {rate:.0e}".replace("e-0", "e-")
        real[name] = ratios_by_update(rate, updates, [f"model.dtype={dtype}", *settings])
    for mu in MUS:
        runs = [reward_by_step(mu, steps=steps, seed=seed) for seed in range(seeds)]
        toy[str(mu)] = [round(statistics.fmean(x), 5) for x in zip(*runs, strict=True)]
    return {"shares": list(SHARES), "real": real, "seeds": seeds, "toy": toy}


def draw(numbers: Mapping[str, Any], path: Path) -> None:
    from experiments.style import COLOURS, figure

    with figure(path, ["ratio by update, SmolLM2-135M: 1st to 99th percentile", "toy: reward by step"]) as (ratio, reward):
        for (setting, found), colour in zip(numbers["real"].items(), COLOURS, strict=False):
            updates = range(1, len(found) + 1)
            ratio.plot(updates, [x["quantiles"][0] for x in found], color=colour, label=setting)
            ratio.plot(updates, [x["quantiles"][-1] for x in found], color=colour)
        for bound in (0.8, 1.2):
            ratio.axhline(bound, linestyle="--", linewidth=1, color="#808080")
        ratio.set_yscale("log")
        ratio.set_yticks([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"])
        ratio.minorticks_off()
        ratio.set_xticks(updates)
        ratio.set_xlabel("update on the same batch (dashed: clip range)")
        ratio.legend(loc="upper left")
        for mu, curve in numbers["toy"].items():
            reward.plot(_smooth(curve), label=f"mu = {mu}")
        reward.set_xlabel("step (128 completions each)")
        reward.legend()


def _smooth(curve: Sequence[float], width: int = 5) -> list[float]:
    return [statistics.fmean(curve[max(0, i - width + 1) : i + 1]) for i in range(len(curve))]


def report(numbers: Mapping[str, Any]) -> str:
    last = len(next(iter(numbers["real"].values())))
    header = ["numbers, learning rate", "ratio at update 1", "update 2, 1st to 99th percentile", f"update {last}",
              f"largest, update {last}", f"tokens clipped, update {last}"]  # fmt: skip
    rows = [
        [setting, f"1 (deviation {found[0]['deviation']:g})", _range(found[1]), _range(found[-1]), f"{1 + found[-1]['deviation']:.2f}",
         f"{found[-1]['clipped']:.1%}"]
        for setting, found in numbers["real"].items()
    ]  # fmt: skip
    toy = markdown_table(
        ["toy, mu", "reward after a third of the steps", "at the end"],
        [[mu, f"{_level(c, len(c) // 3):.2f}", f"{_level(c, len(c)):.2f}"] for mu, c in numbers["toy"].items()],
    )
    return (
        f"![The ratio by update, and the toy's reward by step](../docs/figures/ratio.svg)\n\n{markdown_table(header, rows)}\n\n{toy}\n\n"
        "Upper table: one batch of 2 x 8 completions of SmolLM2-135M-Instruct, scored by length; masters are fp32 in all rows. "
        "Largest: 1 plus the largest deviation. Lower: mean of "
        f"{numbers['seeds']} seeds, last ten steps before the point. {describe(numbers)}"
    )


def _range(found: Mapping[str, Any]) -> str:
    return f"{found['quantiles'][0]:.2f} to {found['quantiles'][-1]:.2f}"


def _level(curve: Sequence[float], until: int) -> float:
    return statistics.fmean(curve[max(0, until - 10) : until])


EXPERIMENT = Experiment("ratio", measure, draw, report)

if __name__ == "__main__":
    main(EXPERIMENT)
