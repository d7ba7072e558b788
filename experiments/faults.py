"""Which of these would have moved 46.67% towards 90%? The faults and choices of the other questions, each alone, in real runs.

    python -m experiments.faults                        # every variant, seeds 0 1 2, then figure and table
    python -m experiments.faults --variants recipe rate-1e-6 --seeds 0
    python -m experiments.faults --redraw

The quickstart's task (with numbers up to 15), model and warm start, as for ``learning_curves``, and the same number of completions for
all. ``recipe`` is the quickstart without a fault; every other run differs from it in what its name says.
"""

from __future__ import annotations

from experiments.comparison import UP_TO_15, Comparison, compare
from experiments.runs import Variant

__all__ = ["COMPARISON", "VARIANTS"]

VARIANTS = {
    "recipe": (),
    "rate-1e-6": ("optimizer.learning_rate=1e-6",),
    "rate-1e-6-bf16-weights": ("optimizer.learning_rate=1e-6", "optimizer.precision=pure"),
    "bf16-weights": ("optimizer.precision=pure",),
    "a-quarter-of-the-steps": ("rollout.prompts_per_step=16", "training.steps=5", "evaluation.every=0"),
    "clip-0.1": ("optimizer.max_grad_norm=0.1",),
    "mu-3": ("algorithm.updates_per_batch=3",),
    "groups-of-2": ("rollout.completions_per_prompt=2", "rollout.prompts_per_step=16"),
    "24-tokens": ("rollout.max_completion_tokens=24", "evaluation.max_completion_tokens=48"),
    "beta-0.04": ("algorithm.kl.beta=0.04",),
}
"""Settings by the name of the run; all sample the same number of completions."""

COMPARISON = Comparison(
    "faults", __doc__ or "", {name: Variant(name, own) for name, own in VARIANTS.items()}, "variants", timed=False, settings=UP_TO_15,
)  # fmt: skip

if __name__ == "__main__":
    compare(COMPARISON)
