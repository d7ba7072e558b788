"""Which of the differences between a reproduction of a GRPO tutorial and the tutorial moved 46.67% towards 90%?

    python -m experiments.puzzle                              # every variant, seeds 0 1 2, then figure and tables
    python -m experiments.puzzle --variants 2x8 7x12 --seeds 0
    python -m experiments.puzzle --redraw

A. Burkov's tutorial reports 27 of 30 problems right, a reproduction on one card 14 of 30. Both made 500 steps with an update after each;
prompts x completions were 7 x 12 against 2 x 8, and the token limit 400 against 256. The reproduction also tried three updates of each
batch (7 of 30), and one update for every six batches (12 of 30): its code adds up the gradients of six batches, which it samples with
the same weights, divides by nothing, and clips and steps once. That is one batch of six times the problems, but for the gradient's
length, which the clip at 0.1 and Adam take out (``runs.Variant.accumulated``).

Here every run makes the same number of *steps*, from the quickstart's model after its warm start, with the write-ups' KL, clip range and
gradient norm, and the quickstart's learning rate. Sums of one to four additions, as many of each, need answers of 29 to 69 tokens in
SmolLM2's tokens (means 32, 43, 55 and 66). The limit of 60 cuts those of four additions, a quarter; 96 cuts none that is worked like
the examples, only what rambles. The column "cut" says what share of the samples was: a quarter in the first ten steps, and hardly any
later, since a policy that has unlearnt to ramble answers more briefly than the examples. 44 leaves no room for the examples of three and
four additions. All are judged at 128 tokens, as the write-ups judged both alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from statistics import stdev
from typing import Any

from experiments.common import markdown_table
from experiments.comparison import (
    T_QUANTILES,
    Comparison,
    between_seeds,
    compare,
    difference,
    last_by_seed,
    newcombe_interval,
    welch_interval,
)
from experiments.runs import Budget, Variant
from groupwise.config.schema import ArithmeticConfig
from groupwise.data.arithmetic import Split, generate

__all__ = ["COMPARISON", "FACTORS", "VARIANTS", "explained", "held_out_sums", "sums"]

STEPS = (1, 2, 3, 4)
"""Additions of a problem; as many problems of each."""
PROBLEMS = {"train": 1000, "held_out": 60}
"""Of each number of additions."""


def sums() -> list[dict[str, Any]]:
    """Rows of training problems."""
    return list(_rows("train"))


def held_out_sums() -> list[dict[str, Any]]:
    """Rows of held-out problems, none of whose sums is a training problem's."""
    return list(_rows("held_out"))


def _rows(split: Split) -> Iterator[dict[str, Any]]:
    count = PROBLEMS[split]
    by_steps = [generate(ArithmeticConfig(operations=["+"], largest_number=15, steps=n), count, 0, split) for n in STEPS]
    for alike in zip(*by_steps, strict=True):
        for problem in alike:
            yield {"question": problem.question, "answer": problem.answer, "solution": problem.columns["solution"]}


def batch(prompts: int, completions: int) -> tuple[str, ...]:
    return (f"rollout.prompts_per_step={prompts}", f"rollout.completions_per_prompt={completions}")


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("2x8"),
        Variant("7x12", batch(7, 12)),
        Variant("2x12", batch(2, 12)),
        Variant("7x8", batch(7, 8)),
        Variant("2x8-cut", ("rollout.max_completion_tokens=60",)),
        Variant("2x8-cut-44", ("rollout.max_completion_tokens=44",)),
        Variant("2x8-mu-3", ("algorithm.updates_per_batch=3",)),
        Variant("2x8-accumulated-6", accumulated=6),
    )
}
"""All make the steps of the first; ``2x8-cut`` is nearest to the reproduction, ``7x12`` to the tutorial."""


REPORTED = 30
"""Problems by which each run of the write-ups was judged."""
FACTORS: tuple[tuple[str, str, str, tuple[int, int] | None], ...] = (
    ("all that differed", "7x12", "2x8-cut", (27, 14)),
    ("84 completions in place of 16", "7x12", "2x8", None),
    ("7 problems in place of 2, G = 8", "7x8", "2x8", None),
    ("7 problems in place of 2, G = 12", "7x12", "2x12", None),
    ("G 12 in place of 8, 2 problems", "2x12", "2x8", None),
    ("G 12 in place of 8, 7 problems", "7x12", "7x8", None),
    ("a limit of 96 tokens in place of 60", "2x8", "2x8-cut", None),
    ("a limit of 96 tokens in place of 44", "2x8", "2x8-cut-44", None),
    ("one update of a batch in place of three", "2x8", "2x8-mu-3", (14, 7)),
    ("an update each batch in place of each six", "2x8", "2x8-accumulated-6", (14, 12)),
    ("a point more for a right number anywhere", "2x8-right-anywhere", "2x8", None),
    ("points for a right answer in the exact form alone", "2x8-in-format", "2x8", None),
)
"""What is changed, the two variants that differ in it, and how many of 30 problems the write-ups report right for such a pair."""
GAP = (27 - 14) / REPORTED


def explained(numbers: Mapping[str, Any]) -> str:
    """A row a factor: the difference here, seed by seed, what the write-ups report, and the share of their gap that the points here are.

    The intervals are of means over seeds, from the standard deviation between runs that differ in their seed alone (Student's t with its
    degrees of freedom), so they hold what chance does to a run. Beside them stand those from the two variants' own runs (Welch's t),
    which suppose nothing of the other variants. Where no variant has two seeds they are of all answers, which leaves chance out.
    """
    rows = [row for factor in FACTORS if (row := _factor(numbers, *factor))]
    table = markdown_table(
        ["", "held out, points", "by these two alone", "seed by seed", "reported, points", "of 43.3 points"], rows
    )
    everything = _difference(numbers, *FACTORS[0][1:3])
    if everything is None:
        left = "What remains unexplained is not known without `7x12` and `2x8-cut`."
    else:
        (points, (low, high), _), (least, most) = everything, newcombe_interval(27, REPORTED, 14, REPORTED)
        rest, below, above = GAP - points, math.hypot(GAP - least, high - points), math.hypot(most - GAP, points - low)
        left = (
            f"Unexplained, if points carried over: {_points(rest)} of 43.3 [{_points(rest - below)}, {_points(rest + above)}], with what "
            f"chance does to the reported gap: that between 14 and 27 of 30 is anything from {_points(least)} to {_points(most)} points."
        )
    how = "of the answers alone (Newcombe 1998, method 10), without what chance does to a run"
    if chance := between_seeds(numbers):
        deviation, degrees = chance
        each = [100 * stdev(last) for name in numbers["runs"] if len(last := last_by_seed(numbers, name)) > 1]
        how = (
            f"of means over seeds (Student's t), supposing that seeds move all variants alike: runs that differ in their seed alone have a "
            f"standard deviation of {100 * deviation:.1f} points ({degrees} degrees of freedom; a variant's own is {min(each):.1f} to "
            f"{max(each):.1f}); by these two alone, Welch's t"
        )
    return (
        f"{table}\n\nDifferences of the last held-out accuracies, with 95% intervals {how}. Reported: of {REPORTED} problems each, "
        f"intervals by Newcombe's method. The last column supposes that a point here is a point there. {left}"
    )


def _difference(numbers: Mapping[str, Any], one: str, other: str) -> tuple[float, tuple[float, float], list[float]] | None:
    """``difference``, but with the interval of means over seeds where the runs tell what a seed does."""
    found = difference(numbers, one, other)
    chance = between_seeds(numbers)
    if found is None or chance is None:
        return found
    points, _, by_seed = found
    deviation, degrees = chance
    half = T_QUANTILES[min(degrees, len(T_QUANTILES)) - 1] * deviation * math.sqrt(2 / len(by_seed))
    return points, (points - half, points + half), by_seed


def _factor(numbers: Mapping[str, Any], title: str, one: str, other: str, reported: tuple[int, int] | None) -> list[str] | None:
    found = _difference(numbers, one, other)
    if found is None:
        return None
    points, (low, high), by_seed = found
    theirs = "-"
    if reported is not None:
        right, others = reported
        theirs = f"{_points((right - others) / REPORTED)} {_interval(newcombe_interval(right, REPORTED, others, REPORTED))}"
    runs = numbers["runs"]
    both = [seed for seed in runs[one] if seed in runs[other]]
    last = ([runs[name][seed]["evaluations"][-1]["strict_accuracy"] for seed in both] for name in (one, other))
    alone = "-" if (ends := welch_interval(*last)) is None else _interval(ends)
    share = f"{points / GAP:.0%} [{low / GAP:.0%}, {high / GAP:.0%}]"
    seeds = ", ".join(_points(x) for x in by_seed)
    return [f"{title} (`{one}`, `{other}`)", f"{_points(points)} {_interval((low, high))}", alone, seeds, theirs, share]


def _points(share: float) -> str:
    return f"{100 * share:+.1f}"


def _interval(ends: tuple[float, float]) -> str:
    return f"[{_points(ends[0])}, {_points(ends[1])}]"


SETTINGS = (
    "data.source=experiments.puzzle:sums",
    "data.eval_source=experiments.puzzle:held_out_sums",
    "rollout.max_completion_tokens=96",
    "evaluation.max_completion_tokens=128",
    "algorithm.kl={beta: 0.04}",
    "algorithm.loss={epsilon: 0.1}",
    "optimizer.max_grad_norm=0.1",
)
COMPARISON = Comparison(
    "puzzle", __doc__ or "", VARIANTS, "variants", timed=False, shown={"cut": "completions/truncated"}, settings=SETTINGS,
    budget=Budget(steps=60, prompts_per_step=2, completions_per_prompt=8, evaluate_every=30, problems=240), equal="steps", work="puzzle",
    further=explained,
)  # fmt: skip

if __name__ == "__main__":
    compare(COMPARISON)
