"""The learned value of PPO: a linear head on the state in which each token is chosen.

Axes: T tokens, D model width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from groupwise.config.algorithm import AlgorithmConfig

__all__ = ["Critic"]


class Critic:
    """``V(state) = w . hidden + b`` in fp32, with an optimiser of its own. It starts at 0, where advantages are the returns.

    The hidden state is the policy's own, after the final norm: no second network is kept. ``value_trains_trunk`` says whether the
    value's error also reaches the policy's layers.
    """

    def __init__(self, width: int, config: AlgorithmConfig, device: torch.device) -> None:
        self.config = config
        self.weight = nn.Parameter(torch.zeros(width, device=device))
        self.bias = nn.Parameter(torch.zeros((), device=device))
        self.adamw = torch.optim.AdamW([self.weight, self.bias], lr=config.value_learning_rate, weight_decay=0.0)

    def values(self, hidden_T: Tensor) -> Tensor:
        """``[T]`` in fp32, in units of reward, from ``hidden_T`` ``[T, D]``."""
        if not self.config.value_trains_trunk:
            hidden_T = hidden_T.detach()
        return hidden_T.float() @ self.weight + self.bias

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [self.weight, self.bias]

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.parameters]

    def zero_gradient(self, index: int) -> Tensor:
        """A gradient of 0 for a parameter that has none: other processes may have one."""
        parameter = self.parameters[index]
        parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    def step(self, made: bool) -> None:
        """Take the step if the policy's was made; a gradient that is not finite is dropped either way."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if made and gradients and math.isfinite(float(sum(g.abs().sum() for g in gradients))):
            self.adamw.step()
        self.adamw.zero_grad()

    def state(self) -> dict[str, Tensor]:
        """Weights and moments by name, for a checkpoint."""
        out = {"weight": self.weight.data, "bias": self.bias.data}
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            out |= {f"{key}.{name}": value for key, value in self.adamw.state[parameter].items()}
        return out

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what ``state`` gave. Raises KeyError or ValueError for the state of something else."""
        if state["weight"].shape != self.weight.shape:
            raise ValueError(f"the value head has {len(state['weight'])} inputs, but this model's states have {len(self.weight)}")
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            parameter.copy_(state[name])
            moments = {
                key: state[f"{key}.{name}"].clone() for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in state
            }
            self.adamw.state[parameter].update(moments)
