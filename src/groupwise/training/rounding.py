"""Stochastic rounding to bfloat16, and AdamW on bf16 weights that have no fp32 copy.

Nearest rounding drops every update below half the distance to the next number; stochastic rounding takes the next number with the
probability of how far the value lies towards it, so that the expectation is exact and small updates add up on average (Gupta et al., arXiv
1502.02551; for AdamW on bf16 weights, Zamirai et al., arXiv 2010.06192).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["StochasticAdamW", "round_stochastically_"]

_CHUNK = 2**22
"""Numbers stepped at a time: bounds the fp32 copies."""


def round_stochastically_(target: Tensor, value: Tensor, generator: torch.Generator) -> None:
    """Write fp32 ``value`` into bf16 ``target`` of the same shape, each number up or down so that its expectation is ``value``.

    A bf16 is the upper half of an fp32. Adding uniform bits below the cut and cutting carries over with exactly the probability of what
    is cut off. Values must be finite; one beyond the largest bf16 may become infinite, as with any rounding.
    """
    assert target.dtype == torch.bfloat16
    assert value.dtype == torch.float32
    noise = torch.randint(0, 2**16, value.shape, dtype=torch.int32, device=value.device, generator=generator)
    bits = value.contiguous().view(torch.int32) + noise
    target.copy_((bits & -(2**16)).view(torch.float32))


class StochasticAdamW:
    """AdamW (Loshchilov & Hutter, arXiv 1711.05101) on bf16 weights with bf16 moments, all three rounded stochastically.

    It computes in fp32, a chunk at a time. The random bits of a step are named by ``seed``, the parameter's place and the step, so that
    a resumed run draws the same ones. ``step`` takes the gradients, which are fp32 sums kept elsewhere.
    """

    def __init__(self, groups: Sequence[dict], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:  # type: ignore[type-arg]
        self.betas, self.eps, self.seed = betas, eps, 0
        self.param_groups = [{"lr": lr, "weight_decay": weight_decay, **group} for group in groups]
        self.parameters: list[Tensor] = [p for group in self.param_groups for p in group["params"]]
        self.state: dict[Tensor, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self, gradients: dict[Tensor, Tensor]) -> None:
        """One step of every parameter that has an fp32 gradient."""
        place = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter in gradients:
                    self._step_one(parameter, gradients[parameter], group["lr"], group["weight_decay"], place)
                place += 1

    def _step_one(self, parameter: Tensor, gradient: Tensor, rate: float, decay: float, place: int) -> None:
        state = self.state[parameter]
        state["step"] += 1
        count = int(state["step"])
        generator = torch.Generator(parameter.device).manual_seed(_number(self.seed, place, count))
        first, second = (1 - beta**count for beta in self.betas)
        flat = [x.view(-1) for x in (parameter, gradient, state["exp_avg"], state["exp_avg_sq"])]
        for weights, grads, means, squares in zip(*(x.split(_CHUNK) for x in flat), strict=True):
            weight, mean, square = weights.float(), means.float(), squares.float()
            mean.lerp_(grads, 1 - self.betas[0])
            square.lerp_(grads.square(), 1 - self.betas[1])
            weight.mul_(1 - rate * decay).addcdiv_(mean, (square / second).sqrt_().add_(self.eps), value=-rate / first)
            for kept, wanted in ((weights, weight), (means, mean), (squares, square)):
                round_stochastically_(kept, wanted, generator)


def _number(seed: int, place: int, step: int) -> int:
    name = hashlib.blake2b(f"rounding\x1f{seed}\x1f{place}\x1f{step}".encode(), digest_size=8).digest()
    return int.from_bytes(name, "little") >> 1
