"""Why did the model never learn to stop (pad = eos)?

    python -m experiments.stop_token

A mask that leaves out every token whose id is the pad id also leaves out the end of every completion, where pad and eos are one
token. The toy policy is trained by GRPO with and without its stop token in the loss; the real small model gets a short supervised
warm start with and without the end token.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from experiments.common import Experiment, describe, main, markdown_table
from experiments.real import workbench
from experiments.toy import ToyPolicy, backward, objective
from groupwise.config.schema import OptimizerConfig
from groupwise.engines.base import SamplingSettings
from groupwise.episodes import worked_episode
from groupwise.evaluation import evaluate
from groupwise.training.optimizer import MasterAdamW, learning_rate_at

__all__ = ["EXPERIMENT", "measure", "train_real", "train_toy"]

LIMITS = (48, 128)


def train_toy(train_stop: bool, *, steps: int, seed: int, rate: float = 0.03) -> dict[str, list[float]]:
    """Reward, share of completions that stop, and their length, by step. Only completions that stop are rewarded."""
    policy, chosen = ToyPolicy(seed), objective()
    adam = torch.optim.Adam(policy.parameters, lr=rate)
    curves: dict[str, list[float]] = {"reward": [], "stopped": [], "tokens": []}
    for _ in range(steps):
        batch = policy.sample(problems=16, group=8)
        adam.zero_grad()
        backward(policy, batch, chosen, train_stop=train_stop)
        adam.step()
        curves["reward"].append(float(batch.rewards_N.mean()))
        curves["stopped"].append(float(batch.stopped_N.float().mean()))
        curves["tokens"].append(float(batch.lengths_N.float().mean()))
    return curves


def train_real(train_stop: bool, *, steps: int, problems: int, settings: Sequence[str] = ()) -> list[dict[str, float]]:
    """A warm start of ``steps`` x 8 worked examples; then held-out problems, sampled up to each of ``LIMITS`` tokens."""
    bench = workbench([f"evaluation.problems={problems}", *settings])
    prompts, style, tokenizer = bench.prepared.train_prompts, bench.prepared.answer_style, bench.policy.tokenizer
    assert tokenizer.pad_token_id == tokenizer.eos_token_id, "the question is about models in which they are the same"
    rates = OptimizerConfig(
        learning_rate=bench.config.warm_start.learning_rate, schedule="linear", final_fraction=0.1, warmup_steps=min(3, steps)
    )
    optimizer = MasterAdamW(bench.scorer.named_parameters(), rates)
    for step in range(steps):
        targets = [worked_episode(prompts[8 * step + i], style, tokenizer, None)[0][1] for i in range(8)]  # type: ignore[arg-type]
        if not train_stop:
            targets = [[token for token in target if token != tokenizer.pad_token_id] for target in targets]
        batch = bench.scorer.prepare([(prompts[8 * step + i].token_ids, [target]) for i, target in enumerate(targets)])
        (-bench.scorer.logprobs(batch).mean()).backward()  # type: ignore[no-untyped-call]
        optimizer.step(learning_rate_at(rates, step, steps))
    found = []
    for limit in LIMITS:
        judged = evaluate(
            bench.engine, bench.prepared.held_out_prompts, stage="final", mode="sampled", settings=SamplingSettings(max_tokens=limit),
            style=style, seed=0,  # type: ignore[arg-type]
        )  # fmt: skip
        found.append({"limit": limit, "stopped": judged.stop_rate, "format": judged.format_rate, "tokens": judged.mean_tokens,
                      "strict": judged.strict_accuracy})  # fmt: skip
    return found


def measure(
    steps: int = 120, seeds: int = 3, real_steps: int = 12, problems: int = 48, settings: Sequence[str] = ()
) -> dict[str, Any]:
    toy = {}
    for name, train_stop in (("trained", True), ("masked", False)):
        runs = [train_toy(train_stop, steps=steps, seed=seed) for seed in range(seeds)]
        toy[name] = {
            key: [round(statistics.fmean(x), 5) for x in zip(*(run[key] for run in runs), strict=True)] for key in runs[0]
        }
    real = {name: train_real(train_stop, steps=real_steps, problems=problems, settings=settings)
            for name, train_stop in (("trained", True), ("masked", False))}  # fmt: skip
    return {"toy": toy, "seeds": seeds, "real": real, "problems": problems, "real_steps": real_steps}


NAMES = {"trained": "stop token trained", "masked": "masked by pad id"}


def draw(numbers: Mapping[str, Any], path: Path) -> None:
    from experiments.style import COLOURS, figure

    with figure(path, ["toy: completions that stop", "toy: reward", "SmolLM2-135M: completions that stop"], width=10) as axes:
        stopped, reward, real = axes
        for (key, name), colour in zip(NAMES.items(), COLOURS, strict=False):
            stopped.plot(numbers["toy"][key]["stopped"], label=name, color=colour)
            reward.plot(numbers["toy"][key]["reward"], color=colour)
        for axis in (stopped, reward):
            axis.set_xlabel("step")
            axis.set_ylim(0, 1.05)
        stopped.legend()
        for i, (key, colour) in enumerate(zip(NAMES, COLOURS, strict=False)):
            at = [j + 0.4 * i - 0.2 for j in range(len(LIMITS))]
            real.bar(at, [row["stopped"] for row in numbers["real"][key]], width=0.38, color=colour)
        real.set_xticks(range(len(LIMITS)), [f"{limit} tokens" for limit in LIMITS])
        real.set_ylim(0, 1.05)
        real.set_xlabel("limit")


def report(numbers: Mapping[str, Any]) -> str:
    toy_rows = []
    for key, c in numbers["toy"].items():
        stops = f"{c['stopped'][0]:.0%} to {c['stopped'][-1]:.0%}"
        toy_rows.append([NAMES[key], stops, f"{statistics.fmean(c['reward'][-10:]):.2f}", f"{c['tokens'][-1]:.1f}"])
    toy = markdown_table(["toy, GRPO", "stop, first and last step", "reward, last 10 steps", "tokens, last step"], toy_rows)
    rows = [
        [
            NAMES[key],
            str(row["limit"]),
            f"{row['stopped']:.0%}",
            f"{row['tokens']:.0f}",
            f"{row['format']:.0%}",
            f"{row['strict']:.0%}",
        ]
        for key, found in numbers["real"].items()
        for row in found
    ]
    real = markdown_table(
        ["SmolLM2-135M, warm start", "token limit", "stop", "tokens, mean", "in the format", "right (strict)"], rows
    )
    return (
        f"![Completions that stop, with the stop token trained and masked](../docs/figures/stop_token.svg)\n\n{toy}\n\n{real}\n\nToy: mean "
        f"of {numbers['seeds']} seeds. Real: {numbers['real_steps']} steps of 8 worked examples, then {numbers['problems']} held-out "
        f"problems at temperature 1. {describe(numbers)}"
    )


EXPERIMENT = Experiment("stop_token", measure, draw, report)

if __name__ == "__main__":
    main(EXPERIMENT)
