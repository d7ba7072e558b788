"""The two decisive runs of ``puzzle`` on a model of 1.5B: 16 completions a step against 84, by an adapter, on GSM8K.

    python -m experiments.puzzle_large --set model.name=MODEL data.folder=DATA

``model.name``: the model's folder. ``data.folder``: where ``gsm8k/train.jsonl`` and ``test.jsonl`` are; without it the Hub is asked. The
recipe is ``gsm8k-1.5b-cpu``, which has no warm start, with the rewards that it had before, ``correctness`` and ``format``. A run that was
stopped goes on from its newest checkpoint, of every second step.

Two further variants change what 16 completions are paid for, by name: ``2x8-right-anywhere`` gives one more point for a right number
wherever it stands, so that reasoning pays before the form is learnt; ``2x8-in-format`` pays for a right answer in the exact form alone.
"""

from __future__ import annotations

from dataclasses import replace

from experiments.comparison import compare
from experiments.puzzle import COMPARISON as SMALL
from experiments.runs import Budget, Variant

PAID = (
    Variant("2x8-right-anywhere", ("rewards.functions=[correctness, format, {function: accuracy, arguments: {lenient: true}}]",)),
    Variant("2x8-in-format", ("rewards.functions=[{function: accuracy, arguments: {in_format: true}}]",)),
)
COMPARISON = replace(
    SMALL, name="puzzle_large", description=__doc__ or "", recipe="gsm8k-1.5b-cpu", work="puzzle_large", usual=("2x8", "7x12"),
    variants={**SMALL.variants, **{variant.name: variant for variant in PAID}},
    jobs=1, settings=("optimizer.warmup_steps=0.1", "output.checkpoint_every=2", "output.keep_best=false"),
    budget=Budget(steps=8, prompts_per_step=2, completions_per_prompt=8, evaluate_every=4, problems=96),
)  # fmt: skip

if __name__ == "__main__":
    compare(COMPARISON)
