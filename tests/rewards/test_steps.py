"""Rewards of steps: which token ends a step, with the real tokenizer; what becomes of them in a group; what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from groupwise.config.schema import RewardFunctionConfig, RewardsConfig
from groupwise.errors import RewardError
from groupwise.metrics import values
from groupwise.rewards import RewardSuite, StepRewards
from groupwise.rewards.scores import to_token_steps
from groupwise.types import Completion, StepScores, Turn

from .conftest import make_prompt


def decoder(tokenizer):
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def tokenised(tokenizer, text, end=True):
    ids = tuple(tokenizer(text)["input_ids"]) + ((tokenizer.eos_token_id,) if end else ())
    return Completion(text, ids, (-0.5,) * len(ids), "stop" if end else "length")


TEXT = "Step 1: 48 / 2 = 24.\nStep 2: naïve Σ 数学 🧮🇩🇪 ok.\n\nThe answer is 72."


def slow_index(tokenizer, completion, characters):
    """The first token with which the wanted characters stand there for good."""
    wanted = completion.text[:characters]
    for index in range(len(completion.token_ids)):
        if decoder(tokenizer)(completion.token_ids[: index + 1])[:characters] == wanted:
            return index
    raise AssertionError


def test_every_character_belongs_to_the_token_that_completes_it(qwen_tokenizer):
    completion = tokenised(qwen_tokenizer, TEXT)
    ends = list(range(1, len(TEXT)))
    placed = to_token_steps(StepRewards([1.0] * len(ends), ends), completion, decoder(qwen_tokenizer))
    assert [index for index, _ in placed] == [slow_index(qwen_tokenizer, completion, end) for end in ends]
    assert [index for index, _ in placed] == sorted(index for index, _ in placed)
    emoji = TEXT.index("🧮") + 1
    split = completion.token_ids[: placed[emoji - 1][0]]
    assert "�" in decoder(qwen_tokenizer)(split) or not decoder(qwen_tokenizer)(split).endswith("🧮")


@pytest.mark.parametrize("end", [True, False])
def test_a_step_that_ends_with_the_text_takes_the_stop_token_along(qwen_tokenizer, end):
    completion = tokenised(qwen_tokenizer, TEXT, end)
    assert to_token_steps(StepRewards([0.5], [len(TEXT)]), completion, decoder(qwen_tokenizer)) == [
        (len(completion.token_ids) - 1, 0.5)
    ]


def test_tokens_are_counted_from_1_as_characters_are(qwen_tokenizer):
    completion = tokenised(qwen_tokenizer, TEXT)
    assert to_token_steps(StepRewards([1.0, 2.0], [1, len(completion.token_ids)], "tokens"), completion, None) == [
        (0, 1.0), (len(completion.token_ids) - 1, 2.0)
    ]  # fmt: skip


def test_steps_in_characters_are_refused_where_tools_results_stand_between_turns():
    """No message says where its turn begins in the text of the whole episode."""
    turns = (Turn("assistant", "<call>", 2), Turn("tool", "1", 1), Turn("assistant", "2+2=4 yes", 3))
    completion = Completion("<call>12+2=4 yes", (1, 2, 3, 4, 5, 6), (0.0,) * 6, "stop", turns=turns)
    assert "give them in tokens" in to_token_steps(StepRewards([1.0], [5]), completion, lambda ids: "")
    assert to_token_steps(StepRewards([1.0], [5], "tokens"), completion, None) == [(4, 1.0)]


# --- in a suite ---------------------------------------------------------------------------------------------------------


def make(count):
    """``count`` completions of 5 characters and 6 tokens, a character each and a stop token."""
    return [Completion("abcde", (*range(97, 102), 0), (-0.5,) * 6, "stop", i) for i in range(count)]


def suite_of(functions, entries=None, **settings):
    listed = [RewardFunctionConfig(function=name, **(entries or {}).get(name, {})) for name in functions]
    suite = RewardSuite.from_config(RewardsConfig(functions=listed, **settings), "xml", functions)
    suite.decode = lambda ids: "".join(chr(i) for i in ids if i)
    return suite


def process(completions):
    return [[(2, 1.0), (5, 0.0)], [(3, 0.5)], []][: len(completions)]


def test_steps_become_sums_for_the_record_and_stay_steps_for_learning():
    group = suite_of({"p": process}, {"p": {"weight": 2.0}}).score(make_prompt(), make(3))
    assert group.process == {"p": StepScores(2.0, (((1, 1.0), (5, 0.0)), ((2, 0.5),), ()))}
    assert group.components == {"p": (1.0, 0.5, 0.0)}
    assert (group.rewards, group.outcomes) == ((2.0, 1.0, 0.0), (0.0, 0.0, 0.0))
    assert group.has_variance


def test_steps_stand_beside_outcomes():
    functions = {"p": process, "right": lambda completions: [1.0, 0.0, 4.0]}
    group = suite_of(functions, {"right": {"weight": 0.5}}, clip=(-1.0, 1.0)).score(make_prompt(), make(3))
    assert group.outcomes == (0.5, 0.0, 1.0)  # the clip of the sum is for outcomes
    assert group.rewards == (1.5, 0.5, 1.0)


def test_variance_is_that_of_steps_not_of_their_sums():
    def same_sums(completions):
        return [[(1, 1.0), (5, 0.0)], [(1, 0.0), (5, 1.0)]]

    def same_steps(completions):
        return [[(1, 1.0), (5, 1.0)], [(5, 1.0)]]

    assert suite_of({"f": same_sums}).score(make_prompt(), make(2)).has_variance
    assert not suite_of({"f": same_steps}).score(make_prompt(), make(2)).has_variance
    watched = suite_of({"f": same_sums, "g": lambda completions: [1.0, 1.0]}, {"f": {"weight": 0.0}})
    group = watched.score(make_prompt(), make(2))
    assert (group.has_variance, group.process, group.components["f"]) == (False, {}, (1.0, 1.0))


def test_a_number_among_steps_is_one_step_at_the_end():
    group = suite_of({"f": lambda completions: [[(2, 1.0)], 0.25, None]}).score
    with pytest.raises(RewardError, match="no reward function applies to completion 2"):
        group(make_prompt(), make(3))
    mixed = suite_of({"f": lambda completions: [[(2, 1.0)], 0.25]}).score(make_prompt(), make(2))
    assert mixed.process["f"].steps == (((1, 1.0),), ((5, 0.25),))


def test_each_steps_reward_is_normalised_and_clipped():
    suite = suite_of({"p": process}, {"p": {"normalise": "mean_std", "clip": (-0.9, 0.9)}})
    scoring = suite.score_all([(make_prompt(), make(3))])
    rewards = np.array([1.0, 0.0, 0.5])
    expected = np.clip((rewards - 0.5) / np.std(rewards, ddof=1), -0.9, 0.9)
    first, second, third = scoring.groups[0].process["p"].steps
    np.testing.assert_allclose([r for _, r in (*first, *second, *third)], expected)
    logged = values(scoring.metrics)
    assert (logged["steps/count_p"], logged["steps/reward_p"], logged["shaping/clipped_p"]) == (1.0, 0.5, 2 / 3)


def test_steps_may_be_numbers_of_numpy_and_torch():
    scores = [StepRewards(torch.tensor([1.0, 0.5]), torch.tensor([2, 5])), [(np.int64(3), np.bool_(True))]]
    group = suite_of({"p": lambda completions: scores}).score(make_prompt(), make(2))
    assert group.process["p"].steps == (((1, 1.0), (5, 0.5)), ((2, 1.0),))


@pytest.mark.parametrize(
    ("score", "said"),
    [
        (
            [(0, 1.0)],
            r"returned a step that ends after 0 characters, but the completion has 5, for completion 0; steps end within",
        ),
        ([(6, 1.0)], "a step that ends after 6 characters, but the completion has 5"),
        (StepRewards([1.0], [7], "tokens"), "a step that ends after 7 tokens, but the completion has 6"),
        (StepRewards([1.0, 2.0], [3]), "2 step rewards with 1 ends"),
        (StepRewards([1.0], [3], "words"), "steps in the unit 'words'"),
        ([(2, float("inf"))], "a step reward of inf instead of a finite number"),
        ([(2, "1")], "a step reward of '1' instead of a finite number"),
        ([(2, np.ma.masked)], "a step reward of None instead of a finite number"),
        ([(2, np.float16("inf"))], r"a step reward of .*inf.* instead of a finite number of at most 1e\+12"),
        ([(2, 10**400)], "a step reward of 1000.* instead of a finite number"),
        ([(2, 10**5000)], "a step reward of <int, whose repr raises ValueError> instead of a finite number"),
        ([(10**5000, 1.0)], "a step that ends after <int, whose repr raises ValueError> characters, but the completion has 5"),
        (StepRewards(0.5, 3), "steps of 0.5 and 3 instead of two lists"),
        ([(2.5, 1.0)], r"a step that ends at 2.5 instead of a whole number of characters"),
    ],
)
def test_steps_that_make_no_sense(score, said):
    with pytest.raises(RewardError, match=f"reward 'f' on problem 'gsm8k:train:0' .*{said}"):
        suite_of({"f": lambda completions: [score]}).score(make_prompt(), make(1))
    failure = suite_of({"f": lambda completions: [score]}, on_error="skip").score(make_prompt(), make(1))
    assert failure.kind == "bad_step"


def test_without_a_tokenizer_characters_cannot_be_counted():
    suite = suite_of({"p": process})
    suite.decode = None
    with pytest.raises(RewardError, match="there is no tokenizer to count tokens with: give them in tokens"):
        suite.score(make_prompt(), make(2))


def test_an_isolated_function_may_return_steps(reward_file):
    path = reward_file(
        "from groupwise.rewards import StepRewards\ndef f(completions):\n    return [StepRewards([1.0], [2], 'tokens'), [(5, 2.0)]]\n"
    )
    entry = RewardFunctionConfig(function=f"{path}:f", isolate=True)
    suite = RewardSuite.from_config(RewardsConfig(functions=[entry], processes=1), "xml")
    assert suite.score(make_prompt(), make(2)).process["f"].steps == (((1, 1.0),), ((5, 2.0),))
    suite.close()
