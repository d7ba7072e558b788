"""Built-in rewards against values worked out by hand."""

from __future__ import annotations

import doctest
import importlib
import threading

import pytest

from groupwise.errors import RewardError
from groupwise.rewards import builtin_rewards
from groupwise.rewards.functions import (
    accuracy,
    boxed_format,
    correctness,
    correctness_and_format,
    format,
    keyword,
    length,
    repetition_penalty,
    soft_xml,
    strict_xml,
    xml_count,
)

FULL = "<reasoning>r</reasoning><answer>{}</answer>"

COMBINED = [
    # completion, correctness, format
    (FULL.format("72"), 2.0, 0.8),
    (FULL.format("72.0"), 1.5, 0.8),
    (FULL.format("$72"), 1.5, 0.8),
    (FULL.format("71"), 0.0, 0.8),
    (FULL.format("..."), 0.0, 0.8),
    ("<answer>72</answer>", 2.0, 0.4),
    ("<reasoning>r</reasoning><answer>72", 0.0, 0.6),  # the closing tag is missing: no answer
    ("<answer>71</answer> no, <answer>72</answer>", 2.0, 0.0),  # the last block counts; no tag stands exactly once
    ("<answer>72</answer> no, <answer>71</answer>", 0.0, 0.0),
    ("<answer>72</answer> no, <answer>71", 2.0, 0.2),
    ("the answer is 72", 0.0, 0.0),
    ("", 0.0, 0.0),
    ("<reasoning><reasoning>r</reasoning><answer>72</answer>", 2.0, 0.6),
    ("<reasoning><answer>72</answer></reasoning>", 2.0, 0.4),  # an answer inside the reasoning is none after it
    ("<answer><reasoning>r</reasoning>72</answer>", 0.0, 0.4),
    ("<reasoning>r<answer></reasoning>72</answer>", 0.0, 0.4),
    ("<answer>72</answer><reasoning>r</reasoning>", 2.0, 0.8),
]


@pytest.mark.parametrize(("text", "right", "tags"), COMBINED)
@pytest.mark.parametrize("chat", [False, True])
def test_correctness_format_and_their_sum(text, right, tags, chat):
    completions = [[{"role": "assistant", "content": text}]] if chat else [text]
    assert correctness(completions, ["72"]) == [right]
    assert format(completions) == [tags]
    assert correctness_and_format(completions, ["72"]) == [pytest.approx(right + tags, abs=1e-12)]
    assert accuracy(completions, ["72"]) == [float(right > 0)]


def test_without_once_a_tag_counts_wherever_and_however_often_it_stands():
    whole = FULL.format("72")
    assert format([whole, whole + " and so on </answer>", "<answer>2", ""], once=False) == [0.8, 0.8, 0.2, 0.0]


def test_each_completion_has_its_own_reference_and_style():
    texts = [r"so \boxed{5}", r"so \boxed{5}", "<answer>5</answer>"]
    assert correctness(texts, ["5", "6", "5"], ["boxed", "boxed", "xml"]) == [2.0, 0.0, 2.0]
    assert correctness(texts, ["5", "5", "5"]) == [0.0, 0.0, 2.0]


def test_accuracy_in_format_wants_the_whole_form_of_each_completions_style():
    whole = FULL.format("72")
    texts = [whole, f"{whole}\n", f"So: {whole}", f"{whole} Bye.", "<answer>72</answer>", FULL.format("71")]
    assert accuracy(texts, ["72"] * 6) == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0]
    assert accuracy(texts, ["72"] * 6, in_format=True) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert accuracy([r"\boxed{5}", r"\boxed{4} \boxed{5}"], ["5", "5"], ["boxed", "boxed"], in_format=True) == [1.0, 0.0]
    assert accuracy(["so\n#### 5", "#### 4\n#### 5"], ["5", "5"], ["plain", "plain"], in_format=True) == [1.0, 0.0]


@pytest.mark.parametrize(
    "thoughts", ["<think>\nSo <reasoning>..., \\boxed{3}? #### 3\n</think>\n\n", "Tags? <answer>\n</think>\n\n"]
)
def test_the_form_is_that_of_what_follows_the_thoughts(thoughts):
    """Of Qwen3, and of models whose chat template has written ``<think>``."""
    lines, box = "<reasoning>\nr\n</reasoning>\n<answer>\n4\n</answer>", r"so \boxed{4}"
    assert accuracy([thoughts + lines], ["4"], in_format=True) == [1.0]
    assert accuracy([thoughts + box, thoughts + "#### 4"], ["4"] * 2, ["boxed", "plain"], in_format=True) == [1.0, 1.0]
    texts = [thoughts + lines, thoughts + f"So: {lines}", thoughts + lines + " Bye."]
    assert (format(texts), format(texts, once=False)) == ([0.8] * 3, [0.8] * 3)
    assert (strict_xml(texts), soft_xml(texts)) == ([0.5, 0.0, 0.0], [0.5] * 3)
    assert xml_count(texts[:1]) == [0.5]
    assert boxed_format([thoughts + box, thoughts + box * 2]) == [0.5, 0.0]
    assert format([thoughts]) == [0.0]


def test_thoughts_that_never_end_are_in_no_form_and_thoughts_within_it_are_a_part():
    whole = FULL.format("4")
    for text in (f"<think>{whole}", f"\n<think>so {whole} \\boxed{{4}}"):
        assert format([text]) == strict_xml([text]) == soft_xml([text]) == boxed_format([text]) == [0.0]
    texts = [f"<reasoning><think>r</think>r</reasoning><answer>4</answer>{end}" for end in ("", "</think>")]
    assert strict_xml(texts) == [0.5, 0.0]


def test_an_answer_that_may_stand_anywhere_needs_no_format():
    with pytest.raises(RewardError, match="lenient and in_format"):
        accuracy([], [], lenient=True, in_format=True)


def test_lenient_accuracy_takes_an_unformatted_number():
    texts = ["the answer is 72", "the answer is 71"]
    assert accuracy(texts, ["72", "72"]) == [0.0, 0.0]
    assert accuracy(texts, ["72", "72"], lenient=True) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "strict", "soft"),
    [
        ("<reasoning>\nr\n</reasoning>\n<answer>\n7\n</answer>\n", 1, 1),
        (FULL.format("7"), 1, 1),
        ("Sure! " + FULL.format("7"), 0, 1),
        (FULL.format("7") + " Bye.", 0, 1),
        ("<reasoning>r</reasoning> so <answer>7</answer>", 0, 1),
        ("<answer>7</answer><reasoning>r</reasoning>", 0, 0),
        ("<reasoning>r<answer>7</answer></reasoning>", 0, 0),
        (FULL.format(" "), 0, 0),
        (FULL.format("..."), 0, 0),
        ("<reasoning>...</reasoning><answer>7</answer>", 0, 0),
        (FULL.format("7") * 2, 0, 0),
        ("<reasoning>r</reasoning><answer>7", 0, 0),
    ],
)
def test_xml_layout(text, strict, soft):
    assert strict_xml([text]) == [0.5 * strict]
    assert soft_xml([text], score=2.0) == [2.0 * soft]


def test_many_half_open_tags_take_no_time():
    assert soft_xml(["<reasoning>" * 20_000 + "<answer>" * 20_000]) == [0.0]


@pytest.mark.parametrize(
    ("text", "points"),
    [
        (r"\boxed{7}", 0.5),
        (r"\boxed{\frac{1}{2}}", 0.5),
        (r"\boxed{7", 0.0),
        (r"\boxed{}", 0.0),
        (r"\boxed{...}", 0.0),
        (r"\boxed{1} or \boxed{2}", 0.0),
        ("7", 0.0),
    ],
)
def test_boxed_format(text, points):
    assert boxed_format([text]) == [points]


def test_length_falls_linearly_and_is_bounded():
    texts = ["", "a" * 5, "a" * 10, "a" * 15, "a" * 20, "a" * 500]
    assert length(texts, target=10) == [-1.0, -0.5, 0.0, -0.5, -1.0, -1.0]
    assert length(texts[:2], completion_ids=[[1] * 10, [1] * 9], target=10, unit="tokens") == [0.0, pytest.approx(-0.1)]
    with pytest.raises(RewardError, match="counts tokens only where completion_ids"):
        length(["a"], unit="tokens")


def test_length_in_tokens_of_an_episode_is_that_of_the_policy_s_last_turn():
    episode = [{"role": role, "tokens": tokens} for role, tokens in (("assistant", 3), ("tool", 50), ("assistant", 7))]
    assert length(["a"] * 2, completion_ids=[[1] * 60, [1] * 7], turns=[episode, []], target=7, unit="tokens") == [0.0, 0.0]


def test_length_in_words_that_stops_paying_is_the_tutorials_reward_less_1():
    texts = ["", "three words\nhere", " ".join(["a"] * 25), " ".join(["a"] * 100), " ".join(["a"] * 900)]
    tutorials = [min(len(text.split()) / 100, 1.0) for text in texts]
    assert length(texts, target=100, unit="words", penalise_longer=False) == pytest.approx([score - 1 for score in tutorials])
    assert length(texts, target=100, unit="words")[-1] == -1.0
    assert length(["a", "a b c"], target=2, unit="words", penalise_longer=False, bounded=False) == [-1.0, 0.0]


def test_length_as_a_plain_distance_is_the_one_of_short_summaries():
    """The first example of many GRPO pages rewards summaries of TL;DR posts for being close to 20 characters."""
    texts = ["", "a" * 19, "a" * 20, "a" * 21, "a" * 500]
    assert length(texts, target=20, bounded=False) == [-abs(20 - len(text)) for text in texts] == [-20, -1, 0, -1, -480]
    assert length(["a"], completion_ids=[[1] * 7], target=5, unit="tokens", bounded=False) == [-2.0]
    assert length(["abcdefg"] * 2, target=7)[0] == 0.0


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: length(["a"], target=0), "length's target is 0, but it must be at least 1"),
        (lambda: length(["a"], unit="lines"), "length's unit is 'lines', but it must be 'characters', 'words' or 'tokens'"),
        (lambda: xml_count(["a"], trailing_penalty=-0.1), "trailing_penalty -0.1, but neither may be below 0"),
        (lambda: repetition_penalty(["a"], ngram=0), "must be at least 1 and 0"),
        (lambda: keyword(["a"], words=[" "]), "keyword needs words to look for"),
    ],
)
def test_bad_arguments_are_refused(call, said):
    with pytest.raises(RewardError, match=said):
        call()


def test_examples_in_docstrings():
    found = doctest.testmod(importlib.import_module("groupwise.rewards.functions"))
    assert found.attempted > 0
    assert found.failed == 0


def test_keyword_counts_whole_words_once():
    texts = ["So, therefore 3", "thereforeX", "THEREFORE because because", ""]
    assert keyword(texts, words=["therefore", "because"]) == [0.5, 0.0, 1.0, 0.0]
    assert keyword(texts, words="therefore", case_sensitive=True) == [1.0, 0.0, 0.0, 0.0]


def test_keyword_takes_off_the_share_of_words_to_avoid():
    texts = ["True, and no error", "an error, an error", "so it is", "nothing"]
    assert keyword(texts, words=["true"], avoid=["error", "wrong"]) == [0.5, -0.5, 0.0, 0.0]
    assert keyword(texts, avoid="Error") == [-1.0, -1.0, 0.0, 0.0]
    assert keyword(texts, avoid="Error", case_sensitive=True) == [0.0] * 4


def test_repetition_penalty_is_the_share_of_repeated_ngrams():
    # "a b a b a b": trigrams aba bab aba bab, of which 2 in 4 are repeats.
    assert repetition_penalty(["a b a b a b", "a b c d", "a b", ""]) == [-0.5, 0.0, 0.0, 0.0]
    assert repetition_penalty(["x x x x x"], ngram=1, strength=2.0) == [pytest.approx(-2.0 * 4 / 5)]


def test_every_builtin_is_documented_and_callable_as_other_trainers_do():
    for name, function in builtin_rewards().items():
        assert function.__name__ == name
        assert len((function.__doc__ or "").partition("\n")[0]) > 30
        extra = {"keyword": {"words": ["a"]}, "overlong": {"max_completion_tokens": 8}}.get(name, {})
        scores = function(prompts=["p"], completions=["c"], answer=["1"], completion_ids=[[1]], trainer_state=None, **extra)
        assert len(scores) == 1


def test_mathematical_equivalence_off_the_main_thread():
    results: list[list[float]] = []
    texts = [r"\boxed{\frac{\sqrt{2}}{2}}", r"\boxed{\sqrt{3}}"]

    def work() -> None:
        results.append(correctness(texts, [r"\frac{1}{\sqrt{2}}"] * 2, ["boxed"] * 2))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=90)
    assert results == [[1.5, 0.0], [1.5, 0.0]]


def test_the_strict_forms_and_tags_on_lines_pay_no_answer_inside_the_reasoning():
    nested = ["<reasoning>\n<answer>\n72\n</answer>\n</reasoning>\n"]
    assert strict_xml(nested) == soft_xml(nested) == [0.0]
    assert xml_count(nested) == [pytest.approx(2 * 0.125 - 0.001 * len("</reasoning>"))]


def test_any_of_several_reference_answers_will_do():
    texts = [FULL.format(one) for one in ("2/3", "0.667", "0.6670", "0.66")]
    told = {"answer": ["2/3"] * 4, "accepted_answers": [("2/3", "0.667")] * 4}
    assert correctness(texts, **told) == [2.0, 2.0, 1.5, 0.0]
    assert accuracy(texts, **told) == [1.0, 1.0, 1.0, 0.0]
    assert accuracy(["so it is 0.667"], answer=["2/3"], accepted_answers=[("2/3", "0.667")], lenient=True) == [1.0]
    assert correctness_and_format(texts, **told) == pytest.approx([2.8, 2.8, 2.3, 0.8])
