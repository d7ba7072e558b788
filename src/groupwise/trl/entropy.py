"""TRL's entropy settings: ``top_entropy_quantile``, ``entropy_coef`` and its adaptive control, sweep by sweep as TRL counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from groupwise.metrics import Metric, Sum
from groupwise.training.learner import Learner, MicroBatch
from groupwise.training.microbatches import mask_below

__all__ = ["EntropyControl"]


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

    def sweep(self, learner: Learner, sweep: Sequence[MicroBatch], first_pass: bool, scale: float) -> dict[str, Metric]:
        """Forward and backward of a sweep, divided by one number; ``detail/entropy_bonus`` is what the bonus took off its loss."""
        if not self.acts:
            return learner.accumulate(sweep, first=first_pass, scale=scale) or {}
        self._prepare(learner, sweep)
        found = learner.accumulate(sweep, first=first_pass, scale=scale) or {}
        if self.has_bonus:
            mean = found["detail/weighted_entropy"].value
            found["detail/entropy_bonus"] = Sum((learner.entropy_bonus or 0.0) * scale * mean)
            if torch.is_grad_enabled():
                views = [m.view for m in sweep]
                tokens = sum(float(len(v.weights_T) if v.mask_T is None else v.mask_T.sum()) for v in views)
                self._entropy, self._tokens = self._entropy + mean * tokens, self._tokens + tokens
        return found

    def numbers(self, found: Mapping[str, Metric], sweeps: int, *, evaluating: bool = False) -> dict[str, float]:
        """What TRL logs with an entropy bonus: the loss without it, and the coefficient after the optimiser step."""
        if not self.has_bonus:
            return {}
        shared_out = sweeps if self.args.loss_type in ("dapo", "cispo") else 1
        loss = found["policy/loss"].value if "policy/loss" in found else 0.0
        return {"policy_loss": loss / shared_out} | ({} if evaluating else {"entropy_coef": self.coef})

    def _prepare(self, learner: Learner, sweep: Sequence[MicroBatch]) -> None:
        """Before a sweep's passes: which of its tokens count, by the policy as it is now, and with what weight in the bonus.

        The mask is that of "Beyond the 80/20 rule" (arXiv 2506.01939); the bonus is the mean over the tokens that count, whatever the
        loss type is.
        """
        learner.entropy_bonus = self.applied
        if self.args.top_entropy_quantile < 1:
            entropies = learner.entropies(sweep)
            threshold = torch.quantile(torch.cat(entropies), 1 - self.args.top_entropy_quantile)
            mask_below(sweep, entropies, threshold)
        if self.has_bonus:
            views = [m.view for m in sweep]
            counted = [torch.ones_like(v.weights_T) if v.mask_T is None else v.mask_T for v in views]
            tokens = max(1.0, sum(float(c.sum()) for c in counted))
            for micro_batch, counts_T in zip(sweep, counted, strict=True):
                micro_batch.note(entropy_weights_T=counts_T / tokens)

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
