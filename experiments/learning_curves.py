"""How do the presets learn, given the same model, problems and number of completions?

    python -m experiments.learning_curves                      # every preset, seeds 0 1 2, then figure and table
    python -m experiments.learning_curves --presets grpo rloo --seeds 0 --steps 10
    python -m experiments.learning_curves --redraw             # figure and table again, from docs/figures/learning_curves.json

The quickstart's task (with numbers up to 15), model, warm start and learning rate; only the preset differs. Each seed has one warm start,
shared by all presets. Runs that are finished are kept in ``runs/comparisons`` and not repeated.
"""

from __future__ import annotations

from experiments.comparison import UP_TO_15, Comparison, compare
from experiments.runs import Variant
from groupwise.config.presets import PRESETS
from groupwise.config.schema import AlgorithmConfig

__all__ = ["COMPARISON", "preset"]


def preset(name: str) -> Variant:
    """The preset with its own KL: the recipe's ``kl`` would otherwise win over it."""
    kl = AlgorithmConfig(preset=name).kl  # type: ignore[arg-type]
    return Variant(name, (f"algorithm.preset={name}", "algorithm.kl=null" if kl is None else f"algorithm.kl.beta={kl.beta}"))


COMPARISON = Comparison(
    "learning_curves", __doc__ or "", {name: preset(name) for name in PRESETS}, "presets", timed=False, settings=UP_TO_15
)

if __name__ == "__main__":
    compare(COMPARISON)
