"""A script's own optimiser in the place of AdamW with masters, and the learning-rate schedules of transformers over either."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from groupwise.errors import ConfigError
from groupwise.trl.config import GRPOConfig

__all__ = ["GivenOptimizer", "make_scheduler"]


class GivenOptimizer:
    """The methods of ``MasterAdamW`` that the learner uses, over an optimiser that holds the model's own parameters."""

    loss_scale, can_recover, lost = 1.0, False, None

    def __init__(self, optimizer: torch.optim.Optimizer, model: Iterable[Tensor], max_grad_norm: float | None) -> None:
        """``model``: all its parameters. Those that the optimiser does not hold are frozen."""
        self.adamw, self.max_grad_norm = optimizer, max_grad_norm
        self.masters = [p for group in optimizer.param_groups for p in group["params"]]
        held = {id(p) for p in self.masters}
        known = set()
        for parameter in model:
            known.add(id(parameter))
            parameter.requires_grad_(parameter.requires_grad and id(parameter) in held)
        if not held & known:
            raise ConfigError("the optimiser in optimizers= holds none of the model's parameters: make it of model.parameters()")

    def gradients(self) -> list[Tensor | None]:
        """Of each of ``masters``."""
        return [p.grad for p in self.masters]

    def zero_gradient(self, index: int) -> Tensor:
        """A gradient of 0 for a master that has none."""
        gradient = torch.zeros_like(self.masters[index])
        self.masters[index].grad = gradient
        return gradient

    def step(self, learning_rate: float) -> tuple[float, bool]:
        """Clip and step; the rate is the scheduler's, which has set it already."""
        parameters = [p for p in self.masters if p.grad is not None]
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm or math.inf))
        if math.isfinite(norm):
            self.adamw.step()
        self.clear()
        return norm, math.isfinite(norm)

    def clear(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Tensor]:
        """``index.key`` -> tensor, of the optimiser's own state."""
        state = self.adamw.state_dict()["state"]
        return {f"{i}.{k}": torch.as_tensor(v).clone() for i, values in state.items() for k, v in values.items() if v is not None}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """What ``state`` gave; learning rates are the scheduler's to set."""
        by_index: dict[int, dict[str, Any]] = {}
        for key, value in state.items():
            index, _, name = key.partition(".")
            by_index.setdefault(int(index), {})[name] = value
        self.adamw.load_state_dict({"state": by_index, "param_groups": self.adamw.state_dict()["param_groups"]})


def make_scheduler(args: GRPOConfig, optimizer: torch.optim.Optimizer, updates: int) -> Any:
    """transformers' schedule of the name in ``lr_scheduler_type``."""
    from transformers import get_scheduler

    try:
        return get_scheduler(
            args.lr_scheduler_type,
            optimizer=optimizer,
            num_warmup_steps=args.get_warmup_steps(updates),
            num_training_steps=updates,
            scheduler_specific_kwargs=dict(args.lr_scheduler_kwargs or {}),
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lr_scheduler_type={args.lr_scheduler_type!r} with these arguments cannot be made: {error}") from error
