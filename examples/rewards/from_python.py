"""Rewards from Python, as in a notebook: functions, a lambda, an async function and a reward model in one list.

    python examples/rewards/from_python.py JUDGE [section.setting=value ...]

JUDGE is a reward model's folder or its name on the Hub.
"""

import asyncio
import sys

from equations import true_equations

from groupwise import RewardModel, load_config, train


async def asks_somebody(completions, **columns):
    """Stands for a judge over the network: all of a step's calls wait side by side."""
    await asyncio.sleep(0.01)
    return [float("=" in completion[-1]["content"]) for completion in completions]


judge, *overrides = sys.argv[1:]
config = load_config("quickstart", ["rewards.functions=[correctness, {function: true_equations, weight: 0.2}]", *overrides])
result = train(
    config,
    rewards=[
        true_equations,  # the config names it, and gives it a weight
        asks_somebody,  # the others count with weight 1
        lambda completion_ids, **columns: [-len(ids) / 100 for ids in completion_ids],
        RewardModel(judge, max_input_tokens=1024),
    ],
    on_step=lambda report: print(
        report.step, {name: value for name, value in report.metrics.items() if name.startswith("reward/")}
    ),
)
print(result.folder)
