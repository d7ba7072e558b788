"""TRL's entropy settings: ``top_entropy_quantile``, ``entropy_coef`` and its adaptive control, sweep by sweep as TRL counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from groupwise.metrics import Mean, Metric
from groupwise.training.learner import Learner
from groupwise.training.window import Window

__all__ = ["EntropyControl", "Part"]


@dataclass
class Part:
    """Some sweeps of a generation that are learnt from together."""

    window: Window
    """This process's completions of them that have something to teach."""
    unit_N: Tensor
    """Which of the sweeps' units each of them belongs to, on the CPU."""
    units: int
    units_per_sweep: int
    skipped_tokens: int
    """Tokens that count of completions without an advantage, which are not computed; of all processes."""


class EntropyControl:
    """Masks of low-entropy tokens, and the coefficient of the entropy bonus as it is now."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.coef = float(args.entropy_coef)
        self.last_entropy = float("inf")
        """Nats per token, of the last optimiser step's tokens."""
        self._entropy, self._tokens = 0.0, 0.0

    @property
    def has_bonus(self) -> bool:
        return self.args.entropy_coef != 0 or self.args.use_adaptive_entropy

    @property
    def acts(self) -> bool:
        """Whether every token matters, with an advantage or without, and every sweep by itself."""
        return self.has_bonus or self.args.top_entropy_quantile < 1

    @property
    def applied(self) -> float | None:
        """What the learner is to take off the loss now. Adaptively, only where the last step's entropy was at the target or below."""
        if not self.has_bonus:
            return None
        return 0.0 if self.args.use_adaptive_entropy and self.last_entropy > self.args.entropy_target else self.coef

    def prepare(self, learner: Learner, part: Part) -> None:
        """For all processes at once, before the passes: which tokens count by the policy as it is now, and their weights in the bonus.

        The mask is that of "Beyond the 80/20 rule" (arXiv 2506.01939), of each sweep by itself; the bonus is the mean over a unit's tokens
        that count, whatever the loss type is, and the mean of those over the units of a sweep.
        """
        learner.entropy_bonus = self.applied
        if not self.acts:
            return
        batch, world = part.window.batch, learner.world
        unit_T = part.unit_N.to(batch.weights_T.device)[batch.sequence_T]
        counts_T = torch.ones_like(batch.weights_T)
        if self.args.top_entropy_quantile < 1:
            entropies_T = learner.entropies(part.window)
            for sweep in range(part.units // part.units_per_sweep):
                chosen_T = unit_T // part.units_per_sweep == sweep
                everywhere = torch.cat(world.gather(entropies_T[chosen_T].float().cpu()))
                if len(everywhere):
                    threshold = float(torch.quantile(everywhere, 1 - self.args.top_entropy_quantile))
                    counts_T[chosen_T] = (entropies_T[chosen_T] >= threshold).float()
        batch.mask_T = counts_T
        if self.has_bonus:
            own_U = torch.zeros(part.units).index_add_(0, unit_T.cpu(), counts_T.cpu())
            tokens_U = world.assemble(own_U, torch.arange(part.units), part.units).clamp(min=1)
            batch.entropy_weights_T = counts_T * (1 / (tokens_U * part.units_per_sweep)).to(counts_T)[unit_T]

    def count(self, found: Mapping[str, Metric]) -> None:
        """Take down what an optimiser step's passes measured."""
        kept = found.get("detail/entropy_kept")
        if isinstance(kept, Mean):
            self._entropy, self._tokens = kept.total, kept.count

    def numbers(self, found: Mapping[str, Metric], sweeps: int, *, evaluating: bool = False) -> dict[str, float]:
        """What TRL logs with an entropy bonus: the loss without it, and the coefficient after the optimiser step."""
        if not self.has_bonus:
            return {}
        by_token = self.args.loss_type in ("dapo", "cispo", "vespo") or ":" in self.args.loss_type
        shared_out = sweeps if by_token else 1
        loss = found["policy/loss"].value if "policy/loss" in found else 0.0
        return {"policy_loss": loss / shared_out} | ({} if evaluating else {"entropy_coef": self.coef})

    def step(self) -> None:
        """After an optimiser step: the coefficient moves towards the target entropy (Skywork-OR1, arXiv 2505.22312)."""
        args = self.args
        if args.use_adaptive_entropy:
            self.last_entropy = self._entropy / max(1.0, self._tokens)
            move = args.entropy_coef_delta if self.last_entropy <= args.entropy_target else -args.entropy_coef_delta
            self.coef = min(self.coef + move, args.entropy_coef_max) if move > 0 else max(self.coef + move, args.entropy_coef_min)
        self._entropy, self._tokens = 0.0, 0.0

    def state_dict(self) -> dict[str, float]:
        return {"entropy_coef": self.coef, "last_world_entropy": self.last_entropy}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef, self.last_entropy = float(state["entropy_coef"]), float(state["last_world_entropy"])
