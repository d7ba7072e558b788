"""DAPO's soft overlong punishment against its equation, and where the limit comes from."""

from __future__ import annotations

import pytest

from groupwise.config.schema import RewardFunctionConfig, RewardsConfig
from groupwise.errors import RewardError
from groupwise.rewards import RewardSuite, builtin_rewards

from .conftest import make_completions, make_prompt


def slow_overlong(length, longest, cache):
    """arXiv 2503.14476, eq. 13, case by case."""
    if length <= longest - cache:
        return 0.0
    if length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize(("longest", "cache"), [(20480, 4096), (20480, None), (256, 64), (10, 10), (3, None)])
def test_overlong_is_dapos_equation_13(longest, cache):
    zone = cache or max(1, longest // 5)
    lengths = [1, longest - zone - 1, longest - zone, longest - zone + 1, longest - zone // 2, longest - 1, longest, longest + 5]
    lengths = [length for length in lengths if length > 0]
    ids = [range(length) for length in lengths]
    scores = builtin_rewards()["overlong"](["x"] * len(ids), ids, longest, cache)
    assert scores == pytest.approx([slow_overlong(length, longest, zone) for length in lengths])


def test_overlong_takes_the_runs_limit_and_refuses_a_zone_that_does_not_suit_it():
    def suite(limit, **arguments):
        entry = RewardFunctionConfig(function="overlong", arguments=arguments)
        return RewardSuite.from_config(RewardsConfig(functions=[entry]), "xml", max_completion_tokens=limit)

    group = suite(6, cache_tokens=4).score(make_prompt(), make_completions("a", "b", "c"))  # 5, 6 and 7 tokens
    assert group.rewards == (-0.75, -1.0, -1.0)
    assert suite(4096, cache_tokens=1000).names == ("overlong",)
    with pytest.raises(RewardError, match="overlong's cache_tokens is 1000, but it must be from 1 to the limit of 512 tokens"):
        suite(512, cache_tokens=1000)
    with pytest.raises(RewardError, match="'overlong' needs 'max_completion_tokens'"):
        suite(None).require_columns(make_prompt().problem)
