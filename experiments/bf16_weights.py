"""What happens with bf16 weights at a learning rate of 1e-6: what share of the updates is rounded away?

    python -m experiments.bf16_weights

Gradients of real batches of the real small model; then AdamW replays them, tensor by tensor, once with bf16 weights and moments
alone and once with fp32 masters whose rounded copy is the weights, at several rates. The copy is rounded as groupwise does, by fixed
thresholds, and to the nearest. The gradients are those at the first weights, which at these rates hardly move in so few steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.common import Experiment, describe, main, markdown_table
from experiments.real import VARYING_REWARD, workbench
from groupwise.algorithm import Objective, policy_loss
from groupwise.models.merging import round_dithered_

__all__ = ["EXPERIMENT", "measure", "replay"]

RATES = (1e-6, 5e-6, 2e-5, 1e-4)


def replay(start: Tensor, gradients: Sequence[Tensor], rate: float) -> dict[str, list[float]]:
    """AdamW on one tensor, with bf16 weights alone and with an fp32 master. Sums over the tensor, a number per step:

    ``meant``: weights that AdamW in fp32 moved in this step; ``lost``: those of them whose bf16 weight stayed as it was, without
    masters; ``moved_plain`` and ``moved_masters`` (rounded to the nearest): weights that by now differ from the start; ``kept_plain``,
    ``kept_nearest`` and ``kept_dithered``: how much of the fp32 displacement the bf16 weights have (its projection), without masters and
    by either rounding of them, ``wanted``: the squared displacement itself.
    """
    plain = start.clone().requires_grad_()
    master = start.float().requires_grad_()
    settings = {"lr": rate, "betas": (0.9, 0.99), "weight_decay": 0.0}
    optimizers = [torch.optim.AdamW([tensor], **settings) for tensor in (plain, master)]  # type: ignore[arg-type]
    names = ("meant", "lost", "moved_plain", "moved_masters", "kept_plain", "kept_nearest", "kept_dithered", "wanted")
    found: dict[str, list[float]] = {name: [] for name in names}
    dithered = torch.empty_like(start)
    for gradient in gradients:
        before_plain, before_master = plain.detach().clone(), master.detach().clone()
        plain.grad, master.grad = gradient.to(plain.dtype), gradient.float()
        for optimizer in optimizers:
            optimizer.step()
        meant = master.detach() != before_master
        displacement = master.detach() - start.float()
        found["meant"].append(int(meant.sum()))
        found["lost"].append(int((meant & (plain.detach() == before_plain)).sum()))
        found["moved_plain"].append(int((plain.detach() != start).sum()))
        nearest = master.detach().to(start.dtype)
        round_dithered_(dithered, master.detach())
        found["moved_masters"].append(int((nearest != start).sum()))
        for name, weights in (("kept_plain", plain.detach()), ("kept_nearest", nearest), ("kept_dithered", dithered)):
            found[name].append(float(((weights.float() - start.float()) * displacement).sum(dtype=torch.float64)))
        found["wanted"].append(float(displacement.square().sum(dtype=torch.float64)))
    return found


def gradients_of_batches(steps: int, settings: Sequence[str]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """The model's bf16 weights, and for each the gradients of ``steps`` batches, clipped to a global norm of 1."""
    bench = workbench(["rollout.prompts_per_step=2", "rollout.max_completion_tokens=32", VARYING_REWARD, *settings])
    chosen = Objective.from_config(bench.config.algorithm)
    parameters = [p for _, p in bench.scorer.named_parameters()]
    by_tensor: list[list[Tensor]] = [[] for _ in parameters]
    for step in range(steps):
        batch = bench.pack(bench.groups(step))
        loss, _ = policy_loss(
            chosen, logprobs_T=bench.scorer.logprobs(batch.packed), sequence_T=batch.packed.sequence_T, weights_T=batch.weights_T,
            advantages_N=batch.advantages_N,
        )  # fmt: skip
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        for parameter, kept in zip(parameters, by_tensor, strict=True):
            assert parameter.grad is not None
            kept.append(parameter.grad)
            parameter.grad = None
    return [p.detach() for p in parameters], by_tensor


def measure(steps: int = 6, settings: Sequence[str] = ()) -> dict[str, Any]:
    weights, by_tensor = gradients_of_batches(steps, settings)
    rates: dict[str, Any] = {}
    for rate in RATES:
        sums: dict[str, list[float]] = {}
        for start, gradients in zip(weights, by_tensor, strict=True):
            for key, values in replay(start, gradients, rate).items():
                sums[key] = [a + b for a, b in zip(sums.get(key, [0.0] * steps), values, strict=True)]
        trained = sums["meant"][-1]
        rates[_name(rate)] = {
            "rounded_away": round(sum(sums["lost"]) / sum(sums["meant"]), 5),
            "moved_plain": [round(x / trained, 5) for x in sums["moved_plain"]],
            "moved_masters": [round(x / trained, 5) for x in sums["moved_masters"]],
            **{name: round(sums[name][-1] / sums["wanted"][-1], 4) for name in ("kept_plain", "kept_nearest", "kept_dithered")},
        }
    sizes = torch.cat([w.flatten().abs().float() for w in weights])
    return {
        "steps": steps,
        "weights": len(sizes),
        "median_weight": round(float(sizes.median()), 6),
        "rates": rates,
    }


def _name(rate: float) -> str:
    return f"{rate:.0e}".replace("e-0", "e-")


def draw(numbers: Mapping[str, Any], path: Path) -> None:
    from experiments.style import COLOURS, figure

    with figure(path, ["single updates rounded away, without masters", "weights changed since the start"]) as (lost, moved):
        rates = list(numbers["rates"])
        lost.bar(rates, [100 * numbers["rates"][r]["rounded_away"] for r in rates], color=COLOURS[0], width=0.6)
        lost.set_ylabel("%")
        lost.set_ylim(0, 100)
        lost.set_xlabel("learning rate")
        steps = range(1, numbers["steps"] + 1)
        for rate, colour in zip(rates, COLOURS, strict=False):
            moved.plot(steps, [100 * x for x in numbers["rates"][rate]["moved_masters"]], color=colour, label=rate)
            moved.plot(steps, [100 * x for x in numbers["rates"][rate]["moved_plain"]], color=colour, linestyle="--")
        moved.set_xlabel("step (solid: fp32 masters; dashed: bf16 alone)")
        moved.set_ylabel("%")
        moved.legend(title="learning rate")


def report(numbers: Mapping[str, Any]) -> str:
    header = [
        "learning rate",
        "single updates rounded away",
        "weights changed, bf16 alone",
        "with fp32 masters",
        "displacement kept: bf16 alone",
        "masters to the nearest",
        "masters dithered",
    ]
    rows = [
        [
            rate,
            f"{x['rounded_away']:.1%}",
            f"{x['moved_plain'][-1]:.1%}",
            f"{x['moved_masters'][-1]:.1%}",
            *(f"{x[name]:.0%}" for name in ("kept_plain", "kept_nearest", "kept_dithered")),
        ]
        for rate, x in numbers["rates"].items()
    ]
    return (
        f"![Updates rounded away, and weights changed](../docs/figures/bf16_weights.svg)\n\n{markdown_table(header, rows)}\n\n"
        f"SmolLM2-135M-Instruct, {numbers['weights'] / 1e6:.0f} million weights, their median size {numbers['median_weight']:.3f}; "
        f"{numbers['steps']} steps of AdamW, 2 x 8 completions each. Displacement kept: the part of the fp32 displacement, by projection, "
        f"that bf16 weights have after the last step. Weights changed: of masters, rounded to the nearest. {describe(numbers)}"
    )


EXPERIMENT = Experiment("bf16_weights", measure, draw, report)

if __name__ == "__main__":
    main(EXPERIMENT)
