"""What does GRPO learn at low rates with fp32 masters rounded into bf16 weights by thresholds, and what with rounding to the nearest?

    python -m experiments.low_rates                  # every variant, seeds 0 1 2, then figure and table
    python -m experiments.low_rates --variants dithered-5e-6 nearest-5e-6 --seeds 0
    python -m experiments.low_rates --redraw         # figure and table again, from docs/figures/low_rates.json

The quickstart's task, model, warm start and batch, at a constant rate below its own. All runs of a seed begin with the same weights.
"""

from __future__ import annotations

from experiments.comparison import Comparison, compare
from experiments.runs import Budget, Variant

__all__ = ["COMPARISON", "VARIANTS"]

ROUNDED = {"dithered": None, "nearest": "experiments.dithering:to_the_nearest"}
"""How masters become weights, and what the run's process calls first for it."""
VARIANTS = {
    f"{how}-{rate}": Variant(f"{how}-{rate}", ("model.dtype=bfloat16", f"optimizer.learning_rate={rate}"), before=before)
    for rate in ("5e-6", "1e-6")
    for how, before in ROUNDED.items()
}
COMPARISON = Comparison(
    "low_rates", __doc__ or "", VARIANTS, "variants", timed=False, equal="steps", work="low_rates", jobs=1,
    settings=("optimizer.schedule=constant",),
    budget=Budget(steps=20, prompts_per_step=8, completions_per_prompt=8, evaluate_every=10, problems=250),
)  # fmt: skip

if __name__ == "__main__":
    compare(COMPARISON)
