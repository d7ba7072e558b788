"""AdamW as DeepSpeed's ZeRO divides it: every process has fp32 masters and moments of its own stretch of the parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.config.schema import OptimizerConfig
from groupwise.distributed import World
from groupwise.distributed.failures import exchanging
from groupwise.distributed.shards import local
from groupwise.training.sharding.zero_engine import give_settings

__all__ = ["ZeroAdamW"]

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Stretch:
    """Where a part of a parameter, flattened, lies among the masters of this process."""

    first: int
    """In the parameter."""
    count: int
    masters: Tensor
    """A whole group's, flat, with the stretch from ``start`` on."""
    start: int

    def of(self, flat: Tensor) -> Tensor:
        """The stretch of something laid out as ``masters`` are."""
        return flat.narrow(0, self.start, self.count)


class ZeroAdamW:
    """The methods of ``MasterAdamW`` over DeepSpeed's optimiser. Its states have that one's names, so that checkpoints are the same.

    DeepSpeed adds gradients up in the backward passes, and lets go of them in ``step``.
    """

    loss_scale = 1.0
    can_recover = False
    lost = None

    def __init__(self, engine: Any, named: list[tuple[str, nn.Parameter]], config: OptimizerConfig, world: World) -> None:
        """Starts again, whatever ``engine`` did before: masters are the weights, moments 0."""
        self.engine, self.config, self.world = engine, config, world
        self.zero: Any = engine.optimizer
        self.named = [(name, p) for name, p in named if p.requires_grad]
        self.names_masters = self.named[0][1].dtype != torch.float32
        """As where one process has masters apart from its weights; checkpoints hold them then."""
        give_settings(self.zero.param_groups, config)
        self.zero.clip_grad = config.max_grad_norm or 0.0
        self.stretches = _stretches(self.zero, [p for _, p in self.named], world.rank)
        self._begin()

    @torch.no_grad()
    def _begin(self) -> None:
        for masters in {id(s.masters): s.masters for s in self.stretches if s is not None}.values():
            state = self.zero.optimizer.state[masters]
            state["step"] = torch.zeros((), dtype=torch.float32, device=masters.device)
            for name in _MOMENTS:
                if name in state:
                    state[name].zero_()
                else:
                    state[name] = torch.zeros_like(masters)
        for (_, parameter), stretch in zip(self.named, self.stretches, strict=True):
            if stretch is not None:
                weights = local(parameter).reshape(-1)
                first = 0 if hasattr(parameter, "ds_id") else stretch.first
                stretch.of(stretch.masters).copy_(weights.narrow(0, first, stretch.count))

    def step(self, rate: float) -> tuple[float, bool]:
        """As ``MasterAdamW.step``, for all processes at once."""
        for group in self.zero.param_groups:
            group["lr"] = rate
        with exchanging():
            self.engine.step()
        norm = float(self.zero._global_grad_norm)
        return norm, not self.zero.overflow and math.isfinite(norm)

    def gradients(self) -> list[Tensor | None]:
        """DeepSpeed's own affair."""
        return []

    def clear(self) -> None:
        """``step`` does it. A sweep cannot be begun again where passes speak to other processes."""

    def close(self) -> None:
        """The next one over the engine starts again."""

    @torch.no_grad()
    def state(self) -> dict[str, Tensor]:
        """For all at once: whole tensors on the first process's CPU, by name; nothing on the others."""
        found: dict[str, Tensor] = {}
        for (name, parameter), stretch in zip(self.named, self.stretches, strict=True):
            shape = getattr(parameter, "ds_shape", parameter.shape)
            for key in (*(["master"] if self.names_masters else []), *_MOMENTS):
                whole = torch.zeros(math.prod(shape), dtype=torch.float32, device=self.engine.device)
                if stretch is not None:
                    whole.narrow(0, stretch.first, stretch.count).copy_(stretch.of(self._flat(stretch, key)))
                self.world.add_up(whole)  # each number is one process's, and 0 in the others
                if self.world.is_first:
                    found[f"{key}.{name}"] = whole.view(shape).to("cpu", copy=True)
            if self.world.is_first:
                found[f"step.{name}"] = torch.tensor(self._steps())
        return found

    def _flat(self, stretch: _Stretch, key: str) -> Tensor:
        if key == "master":
            return stretch.masters
        flat: Tensor = self.zero.optimizer.state[stretch.masters][key]
        return flat

    def _steps(self) -> float:
        return max((float(self.zero.optimizer.state[s.masters]["step"]) for s in self.stretches if s is not None), default=0.0)

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave, or ``MasterAdamW.state`` in one process. The weights are the model's to restore.

        Raises ValueError for the state of another model or another precision, before anything is changed.
        """
        self._check(state)
        for (name, _), stretch in zip(self.named, self.stretches, strict=True):
            if stretch is None:
                continue
            for key in (*(["master"] if self.names_masters else []), *_MOMENTS):
                saved = state[f"{key}.{name}"].reshape(-1)
                stretch.of(self._flat(stretch, key)).copy_(saved.narrow(0, stretch.first, stretch.count))
            self.zero.optimizer.state[stretch.masters]["step"].fill_(float(state[f"step.{name}"]))

    def _check(self, state: Mapping[str, Tensor]) -> None:
        keys = (*(["master"] if self.names_masters else []), *_MOMENTS, "step")
        mine = {f"{key}.{name}" for name, _ in self.named for key in keys}
        for key in sorted(mine ^ state.keys()):
            raise ValueError(f"the optimiser's state {'lacks' if key in mine else 'has an unknown'} {key}")


def _stretches(zero: Any, parameters: list[nn.Parameter], rank: int) -> list[_Stretch | None]:
    """Of each parameter, what this process has the masters of; None for nothing."""
    if hasattr(zero, "fp32_partitioned_groups_flat"):
        return [_of_stage_3(zero, p, rank) for p in parameters]
    groups = {id(p): index for index, group in enumerate(zero.bit16_groups) for p in group}
    return [_of_stage_2(p, zero.single_partition_of_fp32_groups[groups[id(p)]]) for p in parameters]


def _of_stage_2(parameter: Any, masters: Tensor) -> _Stretch | None:
    mapping = parameter._hp_mapping
    if mapping is None:
        return None
    there = mapping.get_hp_fragment_address()
    return _Stretch(mapping.lp_fragment_address.start, there.numel, masters, there.start)


def _of_stage_3(zero: Any, parameter: Any, rank: int) -> _Stretch | None:
    group, start, size = zero.grad_position[parameter.ds_id]
    first = rank * size
    count = min(size, parameter.ds_numel - first)  # the last one is filled up
    return None if count <= 0 else _Stretch(first, count, zero.fp32_partitioned_groups_flat[group], start)
