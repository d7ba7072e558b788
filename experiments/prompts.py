"""Which system prompt makes a model that was not trained for it answer in <reasoning> and <answer> tags?

    python -m experiments.prompts                                # the embedded model on the generator's problems
    python -m experiments.prompts --model FOLDER --data gsm8k:train ...   # another model, on GSM8K
    python -m experiments.prompts ... --name "1.5B, concat" --wordings tutorial -- prompt.style=concat   # without a chat template
    python -m experiments.prompts --redraw

Every wording is judged on the same problems with greedy samples. Wordings are chosen on training problems, so that a test split stays
unseen. A wording that is measured is kept in ``docs/figures/prompts.json`` under the model's ``--name`` and is not measured again: other
settings want another name. The column "stopped" says how the prompt's style bears on stopping.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import groupwise
from experiments.common import FIGURES, Experiment, describe, environment, markdown_table, publish, read_numbers
from groupwise.config import build_config
from groupwise.evaluation.models import data_overrides

__all__ = ["EXPERIMENT", "WORDINGS", "draw", "judge", "measure", "report"]

WORDINGS = {
    "short": "Reason in <reasoning></reasoning>, then put only the final answer in <answer></answer>.",
    "tutorial": "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>",
    "filled": "Respond in the following format:\n<reasoning>\nyour reasoning, step by step\n</reasoning>\n<answer>\nthe final answer "
    "alone\n</answer>",
    "two steps": "First write your reasoning between <reasoning> and </reasoning>. Then write only the final answer between <answer> and "
    "</answer>.",
    "example": "Reply in the form of this example:\n<reasoning>\nThere are 2 bags of 3 apples, so 2 * 3 = 6.\n</reasoning>\n<answer>\n6\n"
    "</answer>",
}  # fmt: skip
KEPT = (
    "n",
    "strict_accuracy",
    "strict_interval",
    "lenient_accuracy",
    "lenient_interval",
    "format_rate",
    "stop_rate",
    "mean_tokens",
)


def judge(model: str, data: str, wording: str, settings: Sequence[str]) -> dict[str, Any]:
    """What ``groupwise.evaluate`` finds with one wording, greedy."""
    own = {"prompt": {"system": WORDINGS[wording]}, "evaluation": {"modes": ["greedy"]}}
    config = build_config(own, [*data_overrides(data), *settings])
    (found,) = groupwise.evaluate(model, data, config.model_dump(exclude_unset=True))
    summary = found.to_summary()
    return {name: summary[name] for name in KEPT}


def draw(numbers: Mapping[str, Any], path: Path) -> None:
    from experiments.style import figure

    with figure(path, list(numbers["models"]), width=3.3 * len(numbers["models"])) as axes:
        for axis, rows in zip(axes, numbers["models"].values(), strict=True):
            for shift, key in enumerate(("format_rate", "strict_accuracy", "lenient_accuracy")):
                places = [i + 0.25 * shift for i in range(len(rows))]
                axis.barh(places, [row[key] for row in rows.values()], height=0.25, label=key.replace("_", " "))
            axis.set_yticks([i + 0.25 for i in range(len(rows))], list(rows))
            axis.invert_yaxis()
            axis.set_xlim(0, 1)
        axes[0].legend()


def report(numbers: Mapping[str, Any]) -> str:
    parts = []
    for model, rows in numbers["models"].items():
        first = next(iter(rows.values()))
        table = markdown_table(
            ["wording", "format", "strict", "lenient", "stopped", "tokens"],
            [
                [
                    name, f"{row['format_rate']:.1%}", _share(row, "strict"), _share(row, "lenient"), f"{row['stop_rate']:.1%}",
                    f"{row['mean_tokens']:.0f}",
                ]
                for name, row in rows.items()
            ],
        )  # fmt: skip
        measured = " ".join(dict.fromkeys(map(describe, rows.values())))
        parts.append(f"{model}, {first['n']} problems, greedy:\n\n{table}\n\n{measured}")
    return "![Format, strict and lenient accuracy by wording](../docs/figures/prompts.svg)\n\n" + "\n\n".join(
        [*parts, "Wordings are in `experiments/prompts.py`."]
    )


def _share(row: Mapping[str, Any], name: str) -> str:
    low, high = row[f"{name}_interval"]
    return f"{row[f'{name}_accuracy']:.1%} ({low:.1%} to {high:.1%})"


def measure(
    model: str = "smollm2-135m-instruct",
    data: str = "arithmetic",
    settings: Sequence[str] = (),
    name: str | None = None,
    before: Mapping[str, Any] | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda numbers: None,
    wordings: Sequence[str] = tuple(WORDINGS),
) -> dict[str, Any]:
    """Judge every one of ``wordings`` that ``before`` does not have for this model; ``keep`` is called with all numbers after each."""
    numbers: dict[str, Any] = {"models": {}, **(before or {})}
    rows = numbers["models"].setdefault(name or Path(model).name, {})
    begun = environment()
    for wording in wordings:
        if wording not in rows:
            rows[wording] = {**judge(model, data, wording, settings), "environment": begun}
            keep(numbers)
    return numbers


EXPERIMENT = Experiment("prompts", measure, draw, report)


def main() -> None:
    options = argparse.ArgumentParser(prog="python -m experiments.prompts")
    options.add_argument("--model", default="smollm2-135m-instruct")
    options.add_argument("--name", help="how tables call the model (its folder's name)")
    options.add_argument("--data", default="arithmetic")
    options.add_argument(
        "--wordings", nargs="+", default=list(WORDINGS), choices=WORDINGS, metavar="WORDING", help="by default all"
    )
    options.add_argument("--out", type=Path, default=FIGURES)
    options.add_argument("--redraw", action="store_true", help="make figure and table from the JSON file that is there already")
    options.add_argument("settings", nargs="*", default=[], help="such as data.folder=FOLDER evaluation.problems=200")
    chosen = options.parse_args()
    kept = chosen.out / f"{EXPERIMENT.name}.json"
    before = read_numbers(EXPERIMENT.name, chosen.out) if kept.exists() or chosen.redraw else None
    if chosen.redraw:
        publish(EXPERIMENT, before or {}, chosen.out)
        return
    measure(
        chosen.model, chosen.data, chosen.settings, chosen.name, before,
        lambda numbers: publish(EXPERIMENT, numbers, chosen.out), chosen.wordings,
    )  # fmt: skip


if __name__ == "__main__":
    main()
