from __future__ import annotations

import re
from collections import Counter

import pytest

from groupwise.config import load_config
from groupwise.config.schema import ArithmeticConfig
from groupwise.data.arithmetic import STORIES, generate
from groupwise.data.sources import load_problems
from groupwise.errors import DataError

FIRST_QUESTION = "In a hall stand 4 rows of 5 tables. Workers bring in 46. How many tables are in the hall now?"
STEP = re.compile(r"(\d+) ([+x-]) (\d+) = (\d+)\.")


@pytest.mark.parametrize(("largest", "steps"), [(10, 1), (50, 2), (99, 3), (1000, 4)])
def test_solutions_compute_the_answer_from_the_questions_numbers(largest: int, steps: int) -> None:
    for problem in generate(ArithmeticConfig(largest_number=largest, steps=steps), 400, seed=3, split="train"):
        worked = STEP.findall(problem.columns["solution"])
        assert len(worked) == steps == problem.columns["steps"]
        value = int(worked[0][0])
        numbers = [value]
        for left, sign, right, result in worked:
            assert int(left) == value
            value = {"+": value + int(right), "-": value - int(right), "x": value * int(right)}[sign]
            assert value == int(result) >= 1
            numbers.append(int(right))
        assert str(value) == problem.answer
        assert max(numbers) <= largest
        asked = [int(n) for n in re.findall(r"\d+", str(problem.question))]
        assert sorted(asked) == sorted(numbers)


def test_it_is_deterministic_and_a_longer_list_begins_with_the_shorter() -> None:
    config = ArithmeticConfig()
    some = generate(config, 200, seed=5, split="train")
    assert some == generate(config, 300, seed=5, split="train")[:200]
    assert some[0].question != generate(config, 1, seed=6, split="train")[0].question
    assert some[0].question == FIRST_QUESTION


def test_all_questions_and_ids_differ_and_no_held_out_sum_is_trained_on() -> None:
    config = ArithmeticConfig(largest_number=12, steps=1)
    train = generate(config, 3000, seed=0, split="train")
    held_out = generate(config, 500, seed=99, split="held_out")
    questions = [p.question for p in train + held_out]
    assert len(set(questions)) == len(questions)
    assert len({p.id for p in train + held_out}) == len(questions)
    assert not {p.columns["solution"] for p in train} & {p.columns["solution"] for p in held_out}


def test_stories_vary_and_guessing_is_hopeless() -> None:
    assert len(STORIES) >= 12
    problems = generate(ArithmeticConfig(), 4000, seed=0, split="train")
    answers = Counter(p.answer for p in problems)
    assert answers.most_common(1)[0][1] / len(problems) < 0.04
    signs = Counter(sign for p in problems for _, sign, _, _ in STEP.findall(p.columns["solution"]))
    assert min(signs.values()) / sum(signs.values()) > 0.15
    last_words = Counter(str(p.question).split(". ")[-1] for p in problems)
    assert len(last_words) > 30


def test_questions_are_short(qwen_tokenizer: object) -> None:
    problems = generate(ArithmeticConfig(), 500, seed=0, split="train")
    lengths = sorted(len(qwen_tokenizer(p.question)["input_ids"]) for p in problems)  # type: ignore[operator]
    assert lengths[250] <= 35
    assert lengths[-1] <= 50


def test_asking_for_more_than_there_are_says_so() -> None:
    with pytest.raises(DataError, match=r"largest_number 3 .* raise largest_number or ask for fewer"):
        generate(ArithmeticConfig(largest_number=3, steps=1), 100_000, seed=0, split="train")


def test_the_quickstart_learns_from_as_many_products_as_it_is_judged_by() -> None:
    problems = load_problems(load_config("quickstart").data)
    shares = [sum("*" in p.columns["expression"] for p in part) / len(part) for part in (problems.train, problems.held_out)]
    assert len(problems.held_out) == 250
    assert abs(shares[0] - shares[1]) < 0.03
    assert 0.4 < shares[0] < 0.6
