"""AdamW with fp32 master weights, a global gradient norm, and learning-rate schedules; cheaper precisions; loss scaling for fp16 weights.

bf16 weights have 8 bits of precision: an update below about 1/256 of a weight is rounded away, and at learning rates near 1e-6 most
are. So by default the optimiser keeps fp32 masters, adds gradients up in fp32, steps there, and hands the weights a rounded copy. To
the nearest, the copy would stay behind: a move of a master by less than half a step of bf16 would not show. It is
dithered instead (``models.merging``), as adapters are, so that on average weights are their masters. ``optimizer.precision`` names what
costs less.
"""

from __future__ import annotations

import hashlib
import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from groupwise.config.schema import OptimizerConfig
from groupwise.errors import ConfigError
from groupwise.memory import DEVICE_WIDE
from groupwise.metrics import Mean
from groupwise.models.merging import round_dithered_
from groupwise.models.quiet import quieten_bitsandbytes

__all__ = [
    "PIECE", "LossScale", "MasterAdamW", "StochasticAdamW", "adds_up_itself", "eight_bit_adamw", "learning_rate_at",
    "round_stochastically_",
]  # fmt: skip

_START, _LEAST, _MOST = 2.0**16, 1.0, 2.0**24


@dataclass
class LossScale:
    """What the loss is multiplied by before the backward pass; the gradients' sums are divided by it again (Micikevicius et al., arXiv
    1710.03740). An overflow halves it and the update is left out; ``patience`` updates without one double it."""

    value: float = _START
    made_in_a_row: int = 0
    patience: int = 200

    @property
    def can_recover(self) -> bool:
        """Whether a smaller scale may still help against gradients that are not finite."""
        return self.value > _LEAST

    def update(self, finite: bool) -> None:
        """Adapt the scale after an attempt at an update."""
        self.made_in_a_row = self.made_in_a_row + 1 if finite else 0
        if not finite:
            self.value = max(_LEAST, self.value / 2)
        elif self.made_in_a_row == self.patience:
            self.value, self.made_in_a_row = min(_MOST, self.value * 2), 0


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


PIECE = 2**20
"""Numbers updated at a time on CPUs. Whole blocks of moments that share a scale, so that the result is that of a single call."""
_BLOCK = 256
"""Moments that share a scale in bitsandbytes' format."""


def eight_bit_adamw(groups: list[dict[str, Any]], **settings: Any) -> Any:
    """bitsandbytes' AdamW over fp32 masters, its moments there from the beginning. Tensors of fewer than 4,096 numbers keep fp32 moments.

    On GPUs an update is one kernel. On CPUs bitsandbytes makes five fp32 copies of the tensor that it updates, which is as much as 8-bit
    moments save where one tensor is a fifth of the model, as embeddings are: so it is handed ``PIECE`` numbers at a time there.

    Raises ConfigError where the package is missing or too old for this device.
    """
    quieten_bitsandbytes()
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as error:
        raise ConfigError(
            "optimizer.precision is masters-8bit, which needs the package bitsandbytes, and it is not installed: "
            "pip install 'groupwise[bitsandbytes]', or use optimizer.precision=masters"
        ) from error

    class PiecewiseAdamW(AdamW8bit):  # type: ignore[misc]
        def update_step(self, group: dict[str, Any], p: Tensor, gindex: int, pindex: int) -> None:
            kept = self.state[p]
            if p.device.type != "cpu" or kept["state1"].dtype != torch.uint8 or p.numel() <= PIECE or not p.is_contiguous():
                super().update_step(group, p, gindex, pindex)
                return
            for piece, state in _pieces(p, kept):
                self.state[piece] = state
                super().update_step(group, piece, gindex, pindex)
                del self.state[piece]
            kept["step"] += 1

    adamw = PiecewiseAdamW(groups, **settings)
    adamw.check_overrides()
    for group_place, group in enumerate(adamw.param_groups):
        for place, parameter in enumerate(group["params"]):
            adamw.init_state(group, parameter, group_place, place)
    return adamw


def _pieces(p: Tensor, kept: dict[str, Any]) -> Iterator[tuple[Tensor, dict[str, Any]]]:
    """Runs of ``p`` with their gradients, and the moments and scales that belong to each: views, in which an update is an update of all."""
    assert p.grad is not None
    weights, grads = p.detach().view(-1), p.grad.contiguous().view(-1)
    for start in range(0, p.numel(), PIECE):
        run = slice(start, start + PIECE)
        scales = slice(start // _BLOCK, -(-(start + PIECE) // _BLOCK))
        own = {name: kept[name].view(-1)[run] for name in ("state1", "state2")}
        own |= {name: kept[name][scales] for name in ("absmax1", "absmax2")}
        piece = weights[run]
        piece.grad = grads[run]
        yield piece, {**kept, **own}


_TABLES = ("qmap1", "qmap2")
"""The states of 8-bit moments that say what their codes stand for, the same for every run."""
_WATCHED = 2**14
"""Numbers of each tensor that are looked at for updates lost."""


def learning_rate_at(config: OptimizerConfig, place: int, places: int, made: int | None = None) -> float:
    """Learning rate at ``place`` (from 0) of the run's ``places`` for updates: linear warmup, then the schedule.

    ``made``: updates that were made before it, which the warmup goes by; fewer than ``place`` where some batches had nothing to teach.
    Their places count for the schedule, which ends with the run.
    """
    warmup = config.warmup_steps if config.warmup_steps >= 1 else round(config.warmup_steps * places)
    done = max(0, place - warmup) / max(1, places - warmup)
    share = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[config.schedule]
    warm = min(1.0, ((place if made is None else made) + 1) / warmup) if warmup else 1.0
    return config.learning_rate * min(warm, config.final_fraction + (1 - config.final_fraction) * share)


class MasterAdamW:
    """Owns the masters, the fp32 gradients and AdamW's moments for ``parameters``.

    After each backward pass a parameter's gradient is moved into its fp32 sum and freed, so gradients of several micro-batches add
    up in fp32 whatever the weights' dtype. fp32 weights are their own masters, and so are all with ``precision`` ``stochastic``
    (whose gradients still add up in fp32) and ``pure`` (whose do not). For fp16 weights the caller multiplies the loss by
    ``loss_scale`` before each backward pass.
    """

    def __init__(
        self,
        parameters: list[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        home: torch.device | None = None,
        half: bool | None = None,
    ) -> None:
        """``home``: where masters, moments and gradients live, beside the weights; by default the CPU for weights on a GPU if
        ``config.offload``, else the weights' own place. ``half``: whether the backward pass computes in fp16, which needs a scaled loss;
        by default where ``parameters`` are. An adapter's are fp32 whatever lies beneath it."""
        self.config = config
        if home is None and config.offload and any(p.device.type != "cpu" for _, p in parameters):
            home = torch.device("cpu")
        self.home = home
        self.names = [name for name, p in parameters if p.requires_grad]
        self.parameters = [p for _, p in parameters if p.requires_grad]
        half = any(p.dtype == torch.float16 for _, p in parameters) if half is None else half
        self._scale = LossScale() if half else None
        self._hooks: list[Any] = []
        weakref.finalize(self, _remove, self._hooks).atexit = False  # the parameters may live on, and learn by another optimiser
        self._sums: dict[Tensor, Tensor] = {}
        self.lost: Mean | None = None
        """Share of the last step's updates that were rounded away; None without a gradient, or where it is stochastic."""
        self.masters: list[Tensor] = [self._master(place, p) for place, p in enumerate(self.parameters)]
        self.adamw = self._make_adamw()

    @property
    def loss_scale(self) -> float:
        return 1.0 if self._scale is None else self._scale.value

    @property
    def can_recover(self) -> bool:
        """Whether a dropped update is the loss scale's search for its place, and no sign of trouble."""
        return self._scale is not None and self._scale.can_recover

    def seed_noise(self, seed: int) -> None:
        """Seed what stochastic rounding draws from now on; without it nothing here is random."""
        if isinstance(self.adamw, StochasticAdamW):
            self.adamw.seed = seed

    def gradient(self, master: Tensor) -> Tensor | None:
        """What has added up for one of ``masters``: in fp32 unless ``precision`` is ``pure``."""
        return self._sums.get(master, master.grad)

    def gradients(self) -> list[Tensor | None]:
        """What has added up for each of ``masters``."""
        return [self.gradient(master) for master in self.masters]

    def zero_gradient(self, index: int) -> Tensor:
        """A gradient of 0 for a master that has none: other processes may have one."""
        master, parameter = self.masters[index], self.parameters[index]
        if master is parameter and adds_up_itself(parameter, self.config):
            parameter.grad = torch.zeros_like(parameter)
            return parameter.grad
        self._sums[master] = torch.zeros_like(master, dtype=torch.float32)
        if master is not parameter:
            master.grad = self._sums[master]
        return self._sums[master]

    def _make_adamw(self) -> Any:
        config = self.config
        # DoRA's magnitudes are vectors of a matrix, and no norms or biases.
        matrices = [p.dim() >= 2 or "lora_magnitude_vector" in n for n, p in zip(self.names, self.parameters, strict=True)]
        spared = [config.decay == "matrices" and not matrix for matrix in matrices]
        groups: list[dict[str, Any]] = [
            {"params": [m for m, s in zip(self.masters, spared, strict=True) if not s]},
            {"params": [m for m, s in zip(self.masters, spared, strict=True) if s], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        settings: dict[str, Any] = {
            "lr": config.learning_rate, "betas": config.betas, "eps": config.epsilon, "weight_decay": config.weight_decay,
        }  # fmt: skip
        if config.precision == "masters-8bit":
            return eight_bit_adamw(groups, **settings)
        # StochasticAdamW is for bf16 weights; fp32 ones (an adapter's, say) lose nothing
        stochastic = config.precision == "stochastic" and any(m.dtype == torch.bfloat16 for m in self.masters)
        adamw: Any = StochasticAdamW(groups, **settings) if stochastic else torch.optim.AdamW(groups, fused=True, **settings)
        # Now instead of at the first step: what stays comes before what comes and goes, so that the heap does not fragment, and a
        # device that is too small says so at once.
        for master in self.masters:
            adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device="cpu" if stochastic else master.device),
                "exp_avg": torch.zeros_like(master, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(master, memory_format=torch.preserve_format),
            }
        return adamw

    def _master(self, place: int, parameter: nn.Parameter) -> Tensor:
        if self.home is None and adds_up_itself(parameter, self.config):
            return parameter
        stochastic = self.config.precision == "stochastic"
        master = parameter if stochastic else parameter.detach().to(self.home or parameter.device, torch.float32, copy=True)
        if parameter.device.type == "cuda" and master.device.type == "cpu":
            master = master.pin_memory()  # weights are copied from it after every update, and nobody waits for that

        # A parameter keeps its hooks, and torch's collector does not look into them: by a strong reference neither would be freed.
        own = weakref.ref(self)

        def collect(p: Tensor) -> None:
            optimizer = own()
            if optimizer is not None:
                optimizer._collect(p, optimizer.masters[place])

        self._hooks.append(parameter.register_post_accumulate_grad_hook(collect))
        return master

    def _collect(self, parameter: Tensor, master: Tensor) -> None:
        """Move a parameter's gradient into its fp32 sum."""
        assert parameter.grad is not None
        grad, parameter.grad = parameter.grad, None
        total = self._sums.get(master)
        if total is None:  # taken now, when the activations that led here are free again: not at the peak
            self._sums[master] = grad.to(master.device, torch.float32)
        else:
            total.add_(grad.to(master.device))
        if self.config.precision != "stochastic":
            master.grad = self._sums[master]

    @torch.no_grad()
    def step(self, learning_rate: float | None) -> tuple[float, bool]:
        """Clip to the global norm, update masters and weights, and clear gradients. Without a rate each group has its own.

        Returns the norm before clipping, and whether the update was made: a gradient that is not finite is dropped.
        """
        gradients = {m: g for m in self.masters if (g := self.gradient(m)) is not None}
        grads = list(gradients.values())
        if self._scale is not None:
            torch._foreach_mul_(grads, 1 / self._scale.value)
        value = float(self.norm(grads))
        finite = math.isfinite(value)
        if self._scale is not None:
            self._scale.update(finite)
        if finite:
            limit = self.config.max_grad_norm
            if limit is not None and value > limit:
                torch._foreach_mul_(grads, limit / (value + 1e-6))
            self._update(gradients, learning_rate)
        self.clear()
        return value, finite

    def norm(self, gradients: list[Tensor]) -> Tensor:
        """The Euclidean norm over all of them."""
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))  # type: ignore[arg-type]

    def _update(self, gradients: dict[Tensor, Tensor], learning_rate: float | None) -> None:
        for group in self.adamw.param_groups if learning_rate is not None else ():
            group["lr"] = learning_rate
        before = {master: _sample(master).clone() for master in gradients}
        if isinstance(self.adamw, StochasticAdamW):
            self.adamw.step(gradients)
        else:
            # bitsandbytes waits for the whole device after each tensor, and that would break a graph which a sampling thread captures.
            with DEVICE_WIDE if self.config.precision == "masters-8bit" else nullcontext():
                self.adamw.step()
        # A single update that stochastic rounding loses is not lost on average.
        self.lost = None if isinstance(self.adamw, StochasticAdamW) else _lost(before, gradients)
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the weights, in place: by fixed thresholds, so that on average nothing of an update is lost."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter is not master:
                # From pinned masters this returns before it is done. They change again after a gradient has come, which comes after it.
                round_dithered_(parameter, master)

    @torch.no_grad()
    def take_up(self) -> None:
        """Weights that somebody else wrote since they were published last go into their masters. Not for rows of divided weights."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter is not master:
                round_dithered_(published := torch.empty_like(parameter), master)
                written = parameter != published
                if written.any():
                    master.copy_(torch.where(written, parameter.float(), master.to(parameter.device)))

    def clear(self) -> None:
        self._sums.clear()
        for master in self.masters:
            master.grad = None

    def close(self) -> None:
        """Let go of the parameters: another optimiser may take them over."""
        _remove(self._hooks)

    def state(self) -> dict[str, Tensor]:
        """Masters, moments and loss scale by name, for a checkpoint; the tensors are not copies.

        fp32 weights have the bits of their masters, which are left out wherever those are: ``optimizer.offload`` may change.
        """
        out: dict[str, Tensor] = {}
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            if parameter is not master and parameter.dtype != torch.float32:
                out[f"master.{name}"] = master
            for key, value in self.adamw.state[master].items():
                if key not in _TABLES:
                    out[f"{key}.{name}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        if self._scale is not None:
            out["loss_scale"] = torch.tensor([self._scale.value, self._scale.made_in_a_row], dtype=torch.float64)
        return out

    @torch.no_grad()
    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore what ``state`` gave, exactly. Weights that have the bits of their masters are the model's to restore.

        Raises ValueError for the state of another model or another precision, before anything is changed.
        """
        self._check(state)
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            if parameter is not master:
                master.copy_(state.get(f"master.{name}", parameter))
            kept = self.adamw.state[master]
            for key in [k for k in kept if k not in _TABLES]:
                saved = state.get(f"{key}.{name}")
                if isinstance(kept[key], Tensor):
                    kept[key].zero_() if saved is None else kept[key].copy_(saved)
                else:
                    kept[key] = 0 if saved is None else int(saved)
        if self._scale is not None and "loss_scale" in state:
            value, in_a_row = state["loss_scale"].tolist()
            self._scale.value, self._scale.made_in_a_row = value, int(in_a_row)
        self.publish()

    def _check(self, state: Mapping[str, Tensor]) -> None:
        mine = self.state()
        if all(key.startswith("master.") for key in state):  # one from before the first update may lack moments
            mine = {key: value for key, value in mine.items() if key.startswith("master.")}
        if "loss_scale" not in state:  # of a version that did not scale the loss of an adapter over fp16 weights
            mine.pop("loss_scale", None)
        of_fp32 = {f"master.{n}" for n, p in zip(self.names, self.parameters, strict=True) if p.dtype == torch.float32}
        of_fp32 -= mine.keys()  # earlier versions wrote them
        for key in sorted((mine.keys() ^ state.keys()) - of_fp32):
            raise ValueError(f"the optimiser's state {'lacks' if key in mine else 'has an unknown'} {key}")
        for key, value in mine.items():
            if state[key].shape != value.shape:
                raise ValueError(f"{key} is {tuple(state[key].shape)}, but this model's is {tuple(value.shape)}")


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()


def adds_up_itself(parameter: nn.Parameter, config: OptimizerConfig) -> bool:
    """Whether torch's own sum of gradients will do."""
    return parameter.dtype == torch.float32 or config.precision == "pure"


def _sample(tensor: Tensor) -> Tensor:
    """Some of its numbers, evenly spaced: a view."""
    return tensor.detach().view(-1)[:: max(1, -(-tensor.numel() // _WATCHED))]


def _lost(before: dict[Tensor, Tensor], gradients: dict[Tensor, Tensor]) -> Mean | None:
    """The share of the sampled numbers with a gradient that did not change."""
    lost, wanted = [], []
    for master, old in before.items():
        moving = _sample(gradients[master]) != 0
        wanted.append(moving.sum())
        lost.append((moving & (_sample(master) == old)).sum())
    if not wanted:
        return None
    counts = torch.stack([torch.stack(lost).sum(), torch.stack(wanted).sum()]).tolist()
    return Mean(*map(float, counts)) if counts[1] else None
