"""What do G and the completion length change?

    python -m experiments.group_size

How many groups vary, by formula; the noise of the toy's gradient at one number of completions in groups of several sizes, and with
completions of several lengths; and what a token limit does to completions of the real small model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.common import Experiment, describe, main, markdown_table
from experiments.real import workbench
from experiments.toy import STOP, ToyPolicy, backward, objective

__all__ = ["EXPERIMENT", "gradient_noise", "measure", "share_with_variance", "token_limits", "toy_of_length"]

COMPLETIONS = 128
SIZES = (2, 4, 8, 16, 32)
LENGTHS = (4, 8, 16, 32, 64)
LIMITS = (32, 64, 128, 256)


def share_with_variance(accuracy: float, size: int) -> float:
    """Groups of ``size`` in which some are right and some wrong, if each is right with probability ``accuracy``."""
    return 1 - accuracy**size - (1 - accuracy) ** size


def gradient_noise(policy: ToyPolicy, size: int, batches: int) -> float:
    """Noise divided by signal of the gradient of one batch of ``COMPLETIONS`` in groups of ``size``.

    Signal: the squared length of the expected gradient, from products of different batches (unbiased). Noise: the rest of a single
    gradient's mean square. The number is the square root of noise / signal; the batch it would take to bring it to 1 grows with
    its square.
    """
    total, squares = torch.zeros(sum(p.numel() for p in policy.parameters), dtype=torch.float64), 0.0
    for _ in range(batches):
        for parameter in policy.parameters:
            parameter.grad = None
        backward(policy, policy.sample(COMPLETIONS // size, size), objective())
        one = torch.cat([p.grad.flatten() for p in policy.parameters if p.grad is not None]).double()
        total += one
        squares += float(one.square().sum())
    signal = (float(total.square().sum()) - squares) / (batches * (batches - 1))
    return math.sqrt(max(0.0, squares / batches - signal) / signal) if signal > 0 else math.inf


def toy_of_length(length: int, seed: int = 0) -> ToyPolicy:
    """A toy whose completions all have ``length`` tokens: two that count, a stop at the end, and filler between."""
    policy = ToyPolicy(seed, length=length)
    with torch.no_grad():
        policy.bias[:, STOP] = -20.0
        policy.bias[-1, STOP] = 20.0
    return policy


def token_limits(problems: int, samples: int, settings: Sequence[str] = ()) -> list[dict[str, float]]:
    """Completions of the real model, sampled once and cut at each limit: how many are cut, and their mean length."""
    bench = workbench([f"rollout.prompts_per_step={problems}", f"rollout.completions_per_prompt={samples}",
                       f"rollout.max_completion_tokens={max(LIMITS)}", *settings])  # fmt: skip
    completions = [c.token_ids for group in bench.groups() for c in group.completions]
    found = []
    for limit in LIMITS:
        cut = sum(len(ids) > limit or (len(ids) == limit and ids[-1] not in bench.policy.end_token_ids) for ids in completions)
        n = len(completions)
        tokens = sum(min(limit, len(ids)) for ids in completions) / n
        found.append({"limit": limit, "n": n, "cut": cut / n, "tokens": tokens})
    return found


def measure(batches: int = 400, problems: int = 24, samples: int = 4, settings: Sequence[str] = ()) -> dict[str, Any]:
    policy = ToyPolicy(0)
    return {
        "batches": batches,
        "completions": COMPLETIONS,
        "by_size": {str(size): round(gradient_noise(policy, size, batches), 3) for size in SIZES},
        "by_length": {str(length): round(gradient_noise(toy_of_length(length), 8, batches), 3) for length in LENGTHS},
        "limits": token_limits(problems, samples, settings),
    }


def draw(numbers: Mapping[str, Any], path: Path) -> None:
    from experiments.style import figure

    titles = ["groups that vary", "gradient noise / signal, by G", "... by completion length"]
    with figure(path, titles, width=10) as (varying, size, length):
        accuracies = [i / 100 for i in range(101)]
        for g in SIZES:
            varying.plot(accuracies, [share_with_variance(p, g) for p in accuracies], label=f"G = {g}")
        varying.set_xlabel("probability of a right answer")
        varying.legend(ncols=2, loc="lower center")
        for axis, key, label in (
            (size, "by_size", "G (128 completions in all)"),
            (length, "by_length", "tokens (2 of them matter)"),
        ):
            axis.plot([int(x) for x in numbers[key]], list(numbers[key].values()), marker="o")
            axis.set_xscale("log", base=2)
            axis.set_xticks([int(x) for x in numbers[key]], list(numbers[key]))
            axis.set_ylim(bottom=0)
            axis.set_xlabel(label)


def report(numbers: Mapping[str, Any]) -> str:
    shares = markdown_table(
        ["right with probability", *(f"G = {g}" for g in SIZES)],
        [[f"{p:.0%}", *(f"{share_with_variance(p, g):.0%}" for g in SIZES)] for p in (0.01, 0.05, 0.2, 0.5, 0.9)],
    )
    sizes = ", ".join(f"{x:.2f} (G = {g})" for g, x in numbers["by_size"].items())
    lengths = ", ".join(f"{x:.2f} ({tokens} tokens)" for tokens, x in numbers["by_length"].items())
    limits = ", ".join(f"{x['cut']:.0%} at {x['limit']} tokens" for x in numbers["limits"])
    completions, batches = numbers["completions"], numbers["batches"]
    return (
        "![Groups that vary by accuracy; gradient noise by G and by length](../docs/figures/group_size.svg)\n\nShare of groups that vary, "
        f"1 - p^G - (1 - p)^G:\n\n{shares}\n\nToy, noise / signal of the gradient of {completions} completions, {batches} batches "
        f"each: {sizes}; with G = 8: {lengths}.\n\nReal, {numbers['limits'][0]['n']} completions of quickstart problems before any "
        f"training, cut: {limits}. {describe(numbers)}"
    )


EXPERIMENT = Experiment("group_size", measure, draw, report)

if __name__ == "__main__":
    main(EXPERIMENT)
