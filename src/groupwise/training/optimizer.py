"""AdamW with fp32 master weights, a global gradient norm, and learning-rate schedules.

bf16 weights have 8 bits of precision: an update below about 1/256 of a weight is rounded away, and at learning rates near 1e-6 most
are. So the optimiser keeps fp32 masters, adds gradients up in fp32, steps there, and hands the weights a rounded copy.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.config.schema import OptimizerConfig

__all__ = ["MasterAdamW", "learning_rate_at"]

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
"""What AdamW keeps of a parameter."""


def learning_rate_at(config: OptimizerConfig, update: int, updates: int) -> float:
    """Learning rate of optimiser step ``update`` (from 0) of ``updates``: linear warmup, then the schedule."""
    if update < config.warmup_steps:
        return config.learning_rate * (update + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    done = (update - config.warmup_steps) / max(1, updates - config.warmup_steps)
    share = 1 - done if config.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * share)


class MasterAdamW:
    """Owns the masters, the fp32 gradients and AdamW's moments for ``parameters``.

    After each backward pass a parameter's gradient is moved into its fp32 sum and freed, so gradients of several micro-batches add
    up in fp32 whatever the weights' dtype. For fp32 weights, or with ``master_weights`` off, the weights are their own masters.
    """

    def __init__(self, parameters: list[tuple[str, nn.Parameter]], config: OptimizerConfig) -> None:
        self.config = config
        self.names = [name for name, p in parameters if p.requires_grad]
        self.parameters = [p for _, p in parameters if p.requires_grad]
        self._hooks: list[Any] = []
        self.masters: list[Tensor] = [self._master(p) for p in self.parameters]
        spared = [config.decay == "matrices" and p.dim() < 2 for p in self.parameters]
        groups: list[dict[str, Any]] = [
            {"params": [m for m, s in zip(self.masters, spared, strict=True) if not s]},
            {"params": [m for m, s in zip(self.masters, spared, strict=True) if s], "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW(
            [group for group in groups if group["params"]],
            lr=config.learning_rate, betas=config.betas, eps=config.epsilon, weight_decay=config.weight_decay, fused=True,
        )  # fmt: skip
        self._make_moments()

    def _make_moments(self) -> None:
        """Now instead of at the first step: what stays comes before what comes and goes, so that the heap has no holes between, and
        a device that is too small says so at once."""
        for master in self.masters:
            self.adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(master, memory_format=torch.preserve_format),
            }

    def _master(self, parameter: nn.Parameter) -> Tensor:
        if parameter.dtype == torch.float32 or not self.config.master_weights:
            return parameter
        master = parameter.detach().float()

        def collect(p: Tensor) -> None:
            assert p.grad is not None
            if master.grad is None:  # taken now, when the activations that led here are free again: not at the peak
                master.grad = p.grad.float()
            else:
                master.grad.add_(p.grad)
            p.grad = None

        self._hooks.append(parameter.register_post_accumulate_grad_hook(collect))
        return master

    @torch.no_grad()
    def step(self, learning_rate: float) -> tuple[float, bool]:
        """Clip to the global norm, update masters and weights, and clear gradients.

        Returns the norm before clipping, and whether the update was made: a gradient that is not finite is dropped.
        """
        grads = [m.grad for m in self.masters if m.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))  # type: ignore[arg-type]
        value = float(norm)
        finite = math.isfinite(value)
        if finite:
            limit = self.config.max_grad_norm
            if limit is not None and value > limit:
                torch._foreach_mul_(grads, limit / (value + 1e-6))
            for group in self.adamw.param_groups:
                group["lr"] = learning_rate
            self.adamw.step()
            self.publish()
        self.clear()
        return value, finite

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the weights, in place."""
        pairs = [(p, m) for p, m in zip(self.parameters, self.masters, strict=True) if p is not m]
        if pairs:
            torch._foreach_copy_([p for p, _ in pairs], [m for _, m in pairs])

    def clear(self) -> None:
        for master in self.masters:
            master.grad = None

    def close(self) -> None:
        """Let go of the parameters: another optimiser may take them over."""
        for hook in self._hooks:
            hook.remove()

    def state(self) -> dict[str, Tensor]:
        """Masters and moments by name, for a checkpoint; the tensors are not copies."""
        out: dict[str, Tensor] = {}
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            if parameter is not master:
                out[f"master.{name}"] = master
            for key, value in self.adamw.state[master].items():
                out[f"{key}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return out

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Restore what ``state`` gave, exactly. Weights that are their own masters are the model's to restore.

        Raises ValueError for the state of another model, before anything is changed.
        """
        self._check(state)
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            if parameter is not master:
                master.copy_(state[f"master.{name}"])
            for key in _MOMENTS:
                kept = self.adamw.state[master][key]
                kept.copy_(state[f"{key}.{name}"]) if f"{key}.{name}" in state else kept.zero_()
        self.publish()

    def _check(self, state: dict[str, Tensor]) -> None:
        wanted = {f"master.{n}": p for n, p, m in zip(self.names, self.parameters, self.masters, strict=True) if p is not m}
        if any(key.startswith("exp_avg.") for key in state):  # before the first update there are no moments yet
            wanted |= {f"{k}.{n}": p for n, p in zip(self.names, self.parameters, strict=True) for k in _MOMENTS}
        for key in sorted(wanted.keys() ^ state.keys()):
            raise ValueError(f"the optimiser's state {'lacks' if key in wanted else 'has an unknown'} {key}")
        for key, parameter in wanted.items():
            if not key.startswith("step.") and state[key].shape != parameter.shape:
                raise ValueError(f"{key} is {tuple(state[key].shape)}, but this model's is {tuple(parameter.shape)}")
