"""What one call sees: a completion, a problem's completions, or the whole step's."""

from __future__ import annotations

import math
from functools import partial

import pytest

from groupwise.config.schema import RewardFunctionConfig, RewardsConfig
from groupwise.errors import RewardError
from groupwise.metrics import values
from groupwise.rewards import RewardSuite, reward_scope
from groupwise.types import Group, Problem, Prompt

from .conftest import make_completions


def spy(calls, score=1.0):
    def function(completions, answer, group_index, finish_reason):
        calls.append(([c[0]["content"] for c in completions], list(answer), list(group_index), list(finish_reason)))
        return [score] * len(completions)

    return function


def pairs(*groups):
    """Groups of texts, each the completions of a problem of its own."""
    out = []
    for i, texts in enumerate(groups):
        problem = Problem(f"p{i}", "?", str(i), {"difficulty": i} if i != 1 else {"difficulty": 1, "topic": "sums"})
        out.append((Prompt(problem, "?", (1,), ({"role": "user", "content": "?"},)), make_completions(*texts)))
    return out


def suite_of(function, scope=None, **settings):
    config = RewardsConfig(functions=[RewardFunctionConfig(function="f", scope=scope)], **settings)
    return RewardSuite.from_config(config, "xml", {"f": function})


@pytest.mark.parametrize(
    ("scope", "expected"),
    [
        (
            "completion",
            [([text], [str(g)], [g], [end]) for text, g, end in zip("abcd", (0, 0, 1, 1), ("length", "stop") * 2, strict=True)],
        ),
        ("group", [(["a", "b"], ["0"] * 2, [0, 0], ["length", "stop"]), (["c", "d"], ["1"] * 2, [1, 1], ["length", "stop"])]),
        ("batch", [(["a", "b", "c", "d"], ["0", "0", "1", "1"], [0, 0, 1, 1], ["length", "stop"] * 2)]),
    ],
)
def test_each_scope_sees_its_completions_in_order(scope, expected):
    calls = []
    suite = suite_of(spy(calls), scope)
    assert suite.sees_batches is (scope == "batch")
    groups = suite.score_all(pairs(["a", "b"], ["c", "d"])).groups
    assert calls == expected
    assert [group.rewards for group in groups] == [(1.0, 1.0), (1.0, 1.0)]


def test_a_batch_functions_scores_go_to_their_groups():
    def ranks(completions):
        return range(len(completions))

    groups = suite_of(ranks, "batch").score_all(pairs(["a", "b"], ["c"], ["d", "e", "f"])).groups
    assert [group.rewards for group in groups] == [(0.0, 1.0), (2.0,), (3.0, 4.0, 5.0)]


def test_a_function_declares_its_scope_and_the_config_wins():
    calls = []
    declared = reward_scope("batch")(spy(calls))
    suite_of(declared).score_all(pairs(["a"], ["b"]))
    assert len(calls) == 1
    suite_of(declared, "group").score_all(pairs(["a"], ["b"]))
    assert len(calls) == 3

    class Judge:
        reward_scope = "completion"

        def __call__(self, completions):
            return [float(len(completions))]

    assert suite_of(Judge()).score_all(pairs(["a", "b"])).groups[0].rewards == (1.0, 1.0)


class Whole:
    @reward_scope("batch")
    async def __call__(self, completions, factor=1.0):
        """How many there are."""
        return [factor * len(completions)] * len(completions)


@pytest.mark.parametrize("function", [Whole(), partial(Whole(), factor=1.0), partial(partial(Whole()), factor=1.0)])
def test_what_a_function_declares_is_seen_through_partials_and_on_its_call(function):
    suite = suite_of(function, concurrent_calls=3)
    assert [(row.called, row.summary) for row in suite.describe()] == [("batch", "How many there are.")]
    assert suite.notes() == [], "it is async"
    assert [group.rewards for group in suite.score_all(pairs(["a"], ["b"])).groups] == [(2.0,), (2.0,)]


def test_a_dry_run_says_what_one_call_sees():
    entries = [RewardFunctionConfig(function="accuracy", scope="completion", isolate=True), RewardFunctionConfig(function="f")]
    suite = RewardSuite.from_config(RewardsConfig(functions=entries), "xml", {"f": reward_scope("batch")(spy([]))})
    assert [row.called for row in suite.describe()] == ["completion, isolated", "batch"]


def test_an_unknown_scope_is_refused():
    with pytest.raises(RewardError, match="reward_scope is given 'step', but it must be one of completion, group, batch"):
        reward_scope("step")

    def function(completions):
        return [0.0]

    function.reward_scope = "all"
    with pytest.raises(RewardError, match="'f' declares reward_scope 'all', but it must be one of"):
        suite_of(function)


def test_a_column_that_only_some_problems_have_is_none_for_the_others():
    seen = {}

    def function(completions, **columns):
        seen.update(columns)
        return [0.0] * len(completions)

    suite_of(function, "batch").score_all(pairs(["a"], ["b", "c"]))
    assert (seen["difficulty"], seen["topic"]) == ([0, 1, 1], [None, "sums", "sums"])
    with pytest.raises(RewardError, match="needs 'topic', but the data has no such column"):
        suite_of(lambda completions, topic: [0.0] * 3, "batch").score_all(pairs(["a"], ["b", "c"]))


def test_a_batch_function_that_raises_fails_every_group():
    def broken(completions):
        raise ValueError("no judge today")

    with pytest.raises(RewardError, match="reward 'f' on the batch of 3 completions raised ValueError: no judge today"):
        suite_of(broken, "batch").score_all(pairs(["a"], ["b", "c"]))
    scoring = suite_of(broken, "batch", on_error="skip").score_all(pairs(["a"], ["b", "c"]))
    assert (scoring.groups, [f.problem_id for f in scoring.failures]) == ([], ["p0", "p1"])
    assert values(scoring.metrics) == {"calls/failed_f": 1, "answers/unchecked": 0}


def test_a_score_that_is_no_number_fails_its_own_group_only():
    def one_bad(completions):
        return [1.0, 2.0, math.nan, 3.0]

    scoring = suite_of(one_bad, "batch", on_error="skip").score_all(pairs(["a", "b"], ["c", "d"]))
    assert [group.rewards for group in scoring.groups] == [(1.0, 2.0)]
    assert [(f.problem_id, f.kind) for f in scoring.failures] == [("p1", "not_a_number")]
    assert "reward 'f' on problem 'p1' returned nan for completion 0" in scoring.failures[0].message
    with pytest.raises(RewardError, match="reward 'f' on problem 'p1' returned nan for completion 0"):
        suite_of(one_bad, "batch").score_all(pairs(["a", "b"], ["c", "d"]))


@pytest.mark.parametrize("scope", ["completion", "group", "batch"])
def test_a_wrong_length_stops_in_every_scope(scope):
    with pytest.raises(RewardError, match=r"reward 'f' on .* returned 7 scores for \d completions?"):
        suite_of(lambda completions: [0.0] * 7, scope, on_error="skip").score_all(pairs(["a", "b"], ["c"]))


def test_a_completion_that_fails_takes_its_group_along_and_is_named():
    def picky(completions):
        if completions[0][0]["content"] == "bad":
            raise ValueError("bad")
        return [1.0]

    scoring = suite_of(picky, "completion", on_error="skip").score_all(pairs(["a", "bad", "bad"], ["c"]))
    assert [group.prompt.problem.id for group in scoring.groups] == ["p1"]
    assert [f.message.split(" raised")[0] for f in scoring.failures] == ["reward 'f' on completion 1 of problem 'p0'"]


def test_scopes_mix_in_one_sum():
    calls = []
    functions = {"one": spy(calls, 1.0), "all": spy(calls, 10.0), "each": spy(calls, 100.0)}
    entries = [
        RewardFunctionConfig(function=name, scope=scope)
        for name, scope in zip(functions, ("completion", "batch", "group"), strict=True)
    ]
    suite = RewardSuite.from_config(RewardsConfig(functions=entries), "xml", functions)
    groups = suite.score_all(pairs(["a", "b"], ["c"])).groups
    assert [group.rewards for group in groups] == [(111.0, 111.0), (111.0,)]
    assert groups[0].components == {"one": (1.0, 1.0), "all": (10.0, 10.0), "each": (100.0, 100.0)}
    assert len(calls) == 3 + 1 + 2
    assert isinstance(suite.score(*pairs(["a"])[0]), Group)
