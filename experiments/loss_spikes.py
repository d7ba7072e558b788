"""Where do loss spikes of tens to hundreds come from?

    python -m experiments.loss_spikes

The k3 estimate of the KL as a function of how far policy and reference disagree about one token; batches drawn from a family of
two tokens, where everything is known exactly; what exp does in each number format; and the real small model's log-probabilities
rounded to bf16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.common import Experiment, describe, main, markdown_table
from experiments.real import workbench
from groupwise.algorithm.kl import kl_per_token

__all__ = ["EXPERIMENT", "measure", "naive_k3", "overflow", "rounding", "two_tokens"]

DIFFERENCES = (0.5, 1.0, 3.0, 5.0, 7.0, 10.0)
RARE = (0.1, 1e-2, 1e-3, 1e-4)
TOKENS = 512
"""Tokens of a batch in the family of two."""


def naive_k3(difference: torch.Tensor) -> torch.Tensor:
    """k3 as the formula is written, in the numbers it is given."""
    return difference.exp() - difference - 1


def two_tokens(rare: float, batches: int = 2000, seed: int = 0) -> dict[str, float]:
    """The reference gives two tokens 1/2 each; the policy has left it and gives one of them only ``rare``.

    The exact KL(policy || reference), and k3 averaged over batches of ``TOKENS`` tokens: drawn from the policy (``typical``: the
    median batch, ``worst``: the largest), and drawn before it moved, which is what later updates on the same batch see.
    """
    policy = torch.tensor([rare, 1 - rare], dtype=torch.float64).log()
    reference = torch.full((2,), math.log(0.5), dtype=torch.float64)
    k3 = kl_per_token(policy, reference, "k3")
    random = torch.Generator().manual_seed(seed)
    shares = torch.rand(batches, TOKENS, generator=random, dtype=torch.float64).lt(rare).double().mean(1)
    means = shares * k3[0] + (1 - shares) * k3[1]
    return {
        "kl": float((policy.exp() * (policy - reference)).sum()),
        "typical": float(means.median()),
        "worst": float(means.max()),
        "stale": float(k3.mean()),
        "one_token": float(k3[0]),
    }


def overflow() -> dict[str, float]:
    """The largest difference, to 0.01 nat, at which exp is still finite."""
    found = {}
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        grid = torch.arange(0, 10000) / 100
        finite = grid.to(dtype).exp().isfinite()
        found[str(dtype).removeprefix("torch.")] = float(grid[finite].max())
    return found


def rounding(settings: Sequence[str] = ()) -> dict[str, float]:
    """The real model's sampled log-probabilities against the same numbers rounded to bf16: a policy compared with itself."""
    bench = workbench(["rollout.max_completion_tokens=32", *settings])
    logprobs = torch.tensor([x for group in bench.groups() for c in group.completions for x in c.logprobs], dtype=torch.float64)
    difference = logprobs.to(torch.bfloat16).double() - logprobs
    return {
        "tokens": len(logprobs),
        "lowest_logprob": float(logprobs.min()),
        "largest_ratio_deviation": float((difference.exp() - 1).abs().max()),
        "mean_k3": float(naive_k3(difference).mean()),
        "k3_of_half_precision": float(_k3_in_bf16(logprobs)),
    }


def _k3_in_bf16(logprobs: torch.Tensor) -> torch.Tensor:
    """The largest error of k3 when everything is bf16, for a true difference of 0.01 nat at every token."""
    policy, reference = logprobs.to(torch.bfloat16), (logprobs + 0.01).to(torch.bfloat16)
    exact = naive_k3(torch.tensor(0.01, dtype=torch.float64))
    return (naive_k3(reference - policy).double() - exact).abs().max()


def measure(settings: Sequence[str] = (), batches: int = 2000) -> dict[str, Any]:
    far = torch.tensor([100.0], requires_grad=True)
    ours = kl_per_token(-far, torch.zeros(1), "k3")
    ours.sum().backward()  # type: ignore[no-untyped-call]
    assert far.grad is not None
    zero = torch.zeros(len(DIFFERENCES), dtype=torch.float64)
    differences = torch.tensor(DIFFERENCES, dtype=torch.float64)
    return {
        "estimates": {k: kl_per_token(-differences, zero, k).tolist() for k in ("k1", "k2", "k3")},
        "two_tokens": {f"{rare:g}": two_tokens(rare, batches) for rare in RARE},
        "overflow": overflow(),
        "at_100_nats": {"naive_is_finite": bool(naive_k3(torch.tensor(100.0)).isfinite()), "ours": float(ours.detach()),
                        "gradient_is_finite": bool(far.grad.isfinite())},
        "rounding": rounding(settings),
    }  # fmt: skip


def draw(numbers: Mapping[str, Any], path: Path) -> None:
    from experiments.style import figure

    with figure(path, ["one token: estimate of the KL", "a batch of 512 tokens, two-token family"]) as (token, batch):
        grid = torch.linspace(-8, 8, 81, dtype=torch.float64)
        for k in ("k1", "k2", "k3"):
            token.plot(grid.tolist(), kl_per_token(-grid, torch.zeros_like(grid), k).tolist(), label=k)
        token.set_yscale("symlog", linthresh=1)
        token.set_xlabel("log reference - log policy (nats)")
        token.legend()
        rare = [float(x) for x in numbers["two_tokens"]]
        found = list(numbers["two_tokens"].values())
        for key, label in (("kl", "exact KL(policy || reference)"), ("typical", "k3, median batch"), ("worst", "k3, worst of 2,000"),
                           ("stale", "k3, drawn before it moved")):  # fmt: skip
            batch.plot(rare, [max(x[key], 1e-3) for x in found], marker="o", label=label)
        batch.set_xscale("log")
        batch.set_yscale("log")
        batch.invert_xaxis()
        batch.set_xlabel("probability that the policy left the rare token (reference: 1/2)")
        batch.legend()


def report(numbers: Mapping[str, Any]) -> str:
    family = markdown_table(
        ["policy's probability of a token that the reference gives 1/2", "exact KL", "k3, median batch", "k3, worst of 2,000 batches",
         "k3 on tokens drawn before the policy moved", "k3 of that one token"],
        [[p, *(f"{x[key]:.3g}" for key in ("kl", "typical", "worst", "stale", "one_token"))] for p, x in numbers["two_tokens"].items()],
    )  # fmt: skip
    return (
        f"![k1, k2 and k3 of one token, and k3 of batches](../docs/figures/loss_spikes.svg)\n\n{family}\n\n"
        f"{_formats(numbers)} {describe(numbers)}"
    )


def _formats(numbers: Mapping[str, Any]) -> str:
    limits, bf16 = numbers["overflow"], numbers["rounding"]
    return (
        f"exp is finite up to {limits['float16']:.2f} nats in fp16, {limits['bfloat16']:.2f} in bf16, {limits['float32']:.2f} in "
        f"fp32. At 100 nats the formula as written is infinite in fp32; groupwise's is {numbers['at_100_nats']['ours']:.3g}, with a "
        f"finite gradient.\n\n{bf16['tokens']:,.0f} sampled tokens of SmolLM2-135M-Instruct, the lowest log-probability "
        f"{bf16['lowest_logprob']:.1f}: rounded to bf16, a policy differs from itself by a ratio of up to "
        f"{1 + bf16['largest_ratio_deviation']:.3f}; with everything in bf16, k3 of a true difference of 0.01 nat (0.00005) is off by "
        f"up to {bf16['k3_of_half_precision']:.2g}."
    )


EXPERIMENT = Experiment("loss_spikes", measure, draw, report)

if __name__ == "__main__":
    main(EXPERIMENT)
