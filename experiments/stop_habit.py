"""Why did the tutorial's model not learn to stop after ``</answer>``, and what teaches it?

    python -m experiments.stop_habit                        # every variant, seeds 0 1 2, then figure and tables
    python -m experiments.stop_habit --variants concat chat --seeds 0
    python -m experiments.stop_habit --redraw

The tutorial's mask keeps the end token, so that it is trained where it is sampled (a mask that drops it is ``stop_token``). But the prompt
has no chat template, and the rewards look at tags and answer alone: what follows ``</answer>`` is worth nothing and costs nothing.

Here the quickstart's model gets its warm start without the end token, so that it answers in the form and has no habit of ending. Then GRPO
goes on from there in ``concat`` as the tutorial has it, and in the other variants with one cure each. Held-out problems are sampled
without any cure but the prompt's: "stop" is what the policy does by itself.

How often a large model stops without any training, by the prompt's style, is the column "stopped" of ``experiments.prompts``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from experiments.common import markdown_table
from experiments.comparison import Comparison, compare, started
from experiments.runs import Budget, Variant
from groupwise.rewards.functions import TAGS

if TYPE_CHECKING:
    from groupwise.engines.base import Progress, SampleRequest
    from groupwise.types import Completion

__all__ = ["COMPARISON", "VARIANTS", "stop_string", "stops", "without_end"]


def without_end() -> None:
    """From now on this process's warm starts teach worked answers without the end token."""
    from groupwise.training import warm_start

    whole = warm_start.worked_episode

    def open_ended(*given: Any) -> Any:
        return [(prompt, ids[:-1], learnt[:-1]) for prompt, ids, learnt in whole(*given)]

    warm_start.worked_episode = open_ended  # type: ignore[assignment,misc]


def stop_string() -> None:
    """From now on this process's completions end with ``</answer>`` too while it trains. Evaluations are left alone."""
    from groupwise.engines.builtin.engine import BuiltinEngine

    whole = BuiltinEngine.serve

    def serve(engine: BuiltinEngine, request: SampleRequest, on_progress: Progress | None = None) -> list[tuple[Completion, ...]]:
        if not request.scope.startswith("rollout"):
            return whole(engine, request, on_progress)

        def goes_on(prompt: int, sample: int, token_ids: Sequence[int], logprobs: Sequence[float]) -> bool:
            return TAGS[-1] not in engine.decode_text(token_ids)

        groups = whole(engine, replace(request, watch=goes_on), on_progress)
        return [tuple(replace(c, finish_reason="stop") if TAGS[-1] in c.text else c for c in group) for group in groups]

    BuiltinEngine.serve = serve  # type: ignore[assignment,method-assign]


INDIFFERENT = "{function: correctness}, {function: format, arguments: {once: false}}"
"""What follows ``</answer>`` changes nothing."""
CONCAT = ("prompt.style=concat",)
PLAIN = f"rewards.functions=[{INDIFFERENT}]"
VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("concat", (PLAIN,), CONCAT),
        Variant("concat-exact-form", (f"rewards.functions=[{INDIFFERENT}, {{function: strict_xml}}]",), CONCAT),
        Variant("concat-overlong", (f"rewards.functions=[{INDIFFERENT}, {{function: overlong}}]",), CONCAT),
        Variant("concat-stop-string", (PLAIN,), CONCAT, before="experiments.stop_habit:stop_string"),
        Variant("chat", (PLAIN,), ("prompt.style=chat",)),
    )
}
"""The tutorial's way, and each cure alone."""


def stops(numbers: Mapping[str, Any]) -> str:
    """What held-out completions were like before and after GRPO, by variant: means over the seeds."""
    columns = {"stop": ("stop_rate", "{:.0%}"), "tokens": ("mean_tokens", "{:.0f}"), "in the form": ("format_rate", "{:.0%}"),
               "right (strict)": ("strict_accuracy", "{:.0%}")}  # fmt: skip
    rows = []
    for name, runs in numbers["runs"].items():
        pairs = [(started(numbers, name, seed), run["evaluations"][-1]) for seed, run in runs.items()]
        cells = [_before_and_after([(a[key], b[key]) for a, b in pairs], form) for key, form in columns.values()]
        rows.append([f"`{name}`", *cells])
    return (
        f"{markdown_table(['held out, before and after', *columns], rows)}\n\nMeans over the seeds; in brackets each seed's last."
    )


def _before_and_after(pairs: Sequence[tuple[float, float]], form: str) -> str:
    before, after = (sum(column) / len(pairs) for column in zip(*pairs, strict=True))
    each = f" ({', '.join(form.format(last) for _, last in pairs)})" if len(pairs) > 1 else ""
    return f"{form.format(before)} to {form.format(after)}{each}"


COMPARISON = Comparison(
    "stop_habit", __doc__ or "", VARIANTS, "variants", timed=False, shown={"stop in training": "completions/stop_rate"}, equal="steps",
    settings=("rollout.max_completion_tokens=64",), work="stop_habit", before="experiments.stop_habit:without_end", further=stops,
    budget=Budget(steps=20, prompts_per_step=4, completions_per_prompt=8, evaluate_every=10, problems=120),
)  # fmt: skip

if __name__ == "__main__":
    compare(COMPARISON)
