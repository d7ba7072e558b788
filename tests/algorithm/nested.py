"""Batches as nested lists, ``[p][g][t]``, for tests that are easier to read so; the product has flat tensors."""

import torch

from groupwise.algorithm import AdvantageInputs, StepRewards
from groupwise.algorithm import advantages as product
from groupwise.algorithm import explained_variance as flat_explained_variance
from groupwise.algorithm import value_advantages as flat_value_advantages

__all__ = [
    "explained_variance",
    "flat",
    "inputs_of",
    "nest",
    "process_advantages",
    "step_rewards",
    "token_advantages",
    "value_advantages",
]


def flat(nested, dtype=torch.float64):
    return torch.tensor([float(x) for group in nested for tokens in group for x in tokens], dtype=dtype)


def nest(numbers_T, lengths):
    rest = iter(numbers_T.tolist())
    return [[[next(rest) for _ in range(n)] for n in group] for group in lengths]


def lengths_of(nested):
    return [[len(tokens) for tokens in group] for group in nested]


def lengths_N(lengths):
    return torch.tensor([n for group in lengths for n in group], dtype=torch.long)


def step_rewards(steps, lengths, weight=1.0):
    """``steps[p][g]`` is a list of (index of the last token, reward)."""
    starts = (lengths_N(lengths).cumsum(0) - lengths_N(lengths)).tolist()
    completions = [completion for group in steps for completion in group]
    rows = [(n, starts[n] + end, r) for n, completion in enumerate(completions) for end, r in completion]
    sequence, ends, rewards = ([row[k] for row in rows] for k in range(3))
    return StepRewards(
        torch.tensor(sequence, dtype=torch.long), torch.tensor(ends, dtype=torch.long), torch.tensor(rewards, dtype=torch.float64),
        torch.full((len(completions),), weight, dtype=torch.float64),
    )  # fmt: skip


def inputs_of(rewards, lengths=None, steps=None, penalties=None, values=None, functions=None):
    """``AdvantageInputs`` of one token per completion where nothing says how many there are."""
    lengths = lengths or (lengths_of(values or penalties) if values or penalties else [[1] * len(group) for group in rewards])
    return AdvantageInputs(
        rewards_N=torch.tensor([float(r) for group in rewards for r in group], dtype=torch.float64),
        group_N=torch.tensor([p for p, group in enumerate(rewards) for _ in group], dtype=torch.long),
        lengths_N=lengths_N(lengths),
        functions=functions or {},
        steps={} if steps is None else {"steps": step_rewards(steps, lengths)},
        penalties_T=None if penalties is None else flat(penalties),
        values_T=None if values is None else flat(values),
    )


def process_advantages(steps, lengths, baseline="group_mean", scale="group_std", epsilon=1e-4, discount=1.0):
    group_N = torch.tensor([p for p, group in enumerate(steps) for _ in group], dtype=torch.long)
    found = product.process_advantages(
        step_rewards(steps, lengths), group_N, lengths_N(lengths), baseline, scale, epsilon, discount
    )
    return nest(found, lengths)


def token_advantages(rewards, penalties, baseline="batch_mean", scale="batch_std", epsilon=1e-4):
    lengths = lengths_of(penalties)
    return nest(product.token_advantages(rewards, flat(penalties), lengths_N(lengths), baseline, scale, epsilon), lengths)


def value_advantages(rewards, values, penalties=None, **settings):
    lengths = lengths_of(values)
    rewards_N = torch.tensor([float(r) for group in rewards for r in group], dtype=torch.float64)
    rewards_T = None if penalties is None else -flat(penalties)
    found = flat_value_advantages(rewards_N, flat(values), lengths_N(lengths), rewards_T, **settings)
    return tuple(nest(numbers, lengths) for numbers in found)


def explained_variance(values, returns):
    return flat_explained_variance(flat(values), flat(returns))
