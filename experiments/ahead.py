"""What do samples that are some steps old cost in learning?

    python -m experiments.ahead                      # every variant, seeds 0 1 2, then figure and table
    python -m experiments.ahead --variants ahead-0 ahead-2 --seeds 0
    python -m experiments.ahead --redraw             # figure and table again, from docs/figures/ahead.json

The quickstart's task (with numbers up to 15), model, warm start and learning rate, with the batch of each step sampled so many steps
earlier. Times are kept with the other numbers, and mean something only where nothing else runs (``--jobs 1``).
"""

from __future__ import annotations

from experiments.comparison import UP_TO_15, Comparison, compare
from experiments.runs import Variant

__all__ = ["COMPARISON", "VARIANTS"]

VARIANTS = {
    "ahead-0": (),
    "ahead-1": ("rollout.ahead=1",),
    "ahead-2": ("rollout.ahead=2",),
    "ahead-4": ("rollout.ahead=4",),
    "ahead-4-behaviour": ("rollout.ahead=4", "algorithm.stale_samples=behaviour"),
    "ahead-4-uncorrected": ("rollout.ahead=4", "algorithm.stale_samples=uncorrected"),
}
"""Settings by the name of the run; all sample the same number of completions."""
SHOWN = {
    "staleness, updates": "rollout/staleness",
    "sampler mismatch, nats": "policy/sampler_mismatch",
    "correction cut": "policy/correction_cut",
    "clip share": "policy/clip_share",
}
COMPARISON = Comparison(
    "ahead", __doc__ or "", {name: Variant(name, own) for name, own in VARIANTS.items()}, "variants", timed=False, shown=SHOWN,
    settings=UP_TO_15,
)  # fmt: skip

if __name__ == "__main__":
    compare(COMPARISON)
