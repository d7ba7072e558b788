"""What does it change to round fp32 masters into bf16 weights by fixed thresholds, and not to the nearest?

    python -m experiments.dithering                      # every variant, seeds 0 1 2, then figure and tables
    python -m experiments.dithering --variants dithered nearest --seeds 0
    python -m experiments.dithering --redraw

The quickstart's task with numbers up to 15. All variants of a seed begin with one warm start, the same weights. Then the rounding is all
that differs, at the recipe's rate and at one of 2e-6, of which far less than half a step of bf16 is left after some steps.
"""

from __future__ import annotations

from experiments.comparison import UP_TO_15, Comparison, compare
from experiments.runs import Budget, Variant

__all__ = ["COMPARISON", "VARIANTS", "to_the_nearest"]


def to_the_nearest() -> None:
    """From now on this process's optimisers round masters to the nearest number that the weights' dtype has."""
    import torch

    from groupwise.training.optimizer import MasterAdamW

    @torch.no_grad()
    def publish(optimizer: MasterAdamW) -> None:
        for parameter, master in zip(optimizer.parameters, optimizer.masters, strict=True):
            parameter.copy_(master)

    MasterAdamW.publish = publish  # type: ignore[method-assign]


NEAREST = "experiments.dithering:to_the_nearest"
SLOW = ("optimizer.learning_rate=2e-6",)
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("dithered"),
        Variant("nearest", before=NEAREST),
        Variant("dithered-2e-6", SLOW),
        Variant("nearest-2e-6", SLOW, before=NEAREST),
    )
}
COMPARISON = Comparison(
    "dithering", __doc__ or "", VARIANTS, "variants", timed=False, equal="steps", work="dithering",
    shown={"stop in training": "completions/stop_rate"}, budget=Budget(steps=20, evaluate_every=10, problems=250),
    settings=(*UP_TO_15, "model.dtype=bfloat16"),
)  # fmt: skip

if __name__ == "__main__":
    compare(COMPARISON)
