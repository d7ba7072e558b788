"""Worked examples before the question."""

import json

import pytest

from groupwise.config.schema import Config
from groupwise.data.prompts import render, worked_completion
from groupwise.data.sources import load_held_out, load_problems, question_key
from groupwise.errors import DataError
from groupwise.evaluation.judging import choose_shots, with_shots


def config(shots, **data):
    settings = {"source": "arithmetic", "holdout": 6, "arithmetic": {"problems": 30}, **data}
    return Config.model_validate({"data": settings, "evaluation": {"shots": shots}})


def test_zero_shots_leave_problems_as_they_are():
    problems = load_held_out(config(0).data)
    assert with_shots(problems, config(0), "xml") == list(problems)


def test_the_same_examples_stand_before_every_question_and_none_is_judged():
    asked = config(3)
    problems = load_held_out(asked.data)
    shown = with_shots(problems, asked, "xml")
    shots = choose_shots(asked, problems)
    assert len(shots) == 3
    assert not {question_key(s) for s in shots} & {question_key(p) for p in problems}
    for before, after in zip(problems, shown, strict=True):
        assert [turn["role"] for turn in after.question] == ["user", "assistant"] * 3 + ["user"]
        assert after.question[-1]["content"] == before.question
        assert [t["content"] for t in after.question[0:6:2]] == [s.question for s in shots]
        assert [t["content"] for t in after.question[1:6:2]] == [worked_completion(s, "xml") for s in shots]
        assert (after.id, after.answer) == (before.id, before.answer)
    assert choose_shots(config(2), problems) == shots[:2], "fewer are the first of more"


def test_other_seeds_choose_others():
    problems = load_held_out(config(0).data)
    other = Config.model_validate({**config(3).model_dump(), "evaluation": {"shots": 3, "seed": 7}})
    assert choose_shots(other, problems) != choose_shots(config(3), problems)


def test_the_real_template_shows_them_as_turns(qwen_tokenizer):
    asked = config(1)
    problem = with_shots(load_held_out(asked.data)[:1], asked, "xml")[0]
    text = render(problem, qwen_tokenizer, asked.prompt, "Be brief.").text
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n")
    assert text.count("<|im_start|>assistant") == 2
    assert text.endswith("<|im_start|>assistant\n")
    assert "</answer><|im_end|>" in text


def test_a_system_turn_stays_first(tmp_path):
    path = tmp_path / "talk.jsonl"
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "2 + 2?"}]
    path.write_text(json.dumps({"prompt": talk, "answer": "4"}) + "\n")
    asked = config(1, eval_source=str(path))
    (shown,) = with_shots(load_held_out(asked.data), asked, "xml")
    assert [turn["role"] for turn in shown.question] == ["system", "user", "assistant", "user"]


def test_examples_bring_no_system_turns_into_the_conversation(tmp_path):
    path = tmp_path / "talk.jsonl"
    talks = [[{"role": "system", "content": "s"}, {"role": "user", "content": f"{a} + 2?"}] for a in range(9)]
    path.write_text("".join(json.dumps({"prompt": talk, "answer": str(a + 2)}) + "\n" for a, talk in enumerate(talks)))
    asked = config(2, source=str(path))
    for shown in with_shots(load_held_out(asked.data), asked, "xml"):
        assert [turn["role"] for turn in shown.question] == ["system", "user", "assistant", "user", "assistant", "user"]


def test_a_benchmark_without_a_training_split_takes_them_from_elsewhere(shared_data):
    folder = {"folder": str(shared_data), "eval_source": "aime24"}
    asked = config(2, source="aime24", **folder)
    with pytest.raises(DataError, match=r"no training problems to take worked examples from"):
        with_shots(load_held_out(asked.data), asked, "boxed")
    other = config(2, source="math500", split="test", **folder)
    shown = with_shots(load_held_out(other.data), other, "boxed")
    assert len(shown) == 30
    assert all("\\boxed{" in turn["content"] for turn in shown[0].question if turn["role"] == "assistant")


def test_examples_that_are_not_there_are_one_sentence(tmp_path):
    path = tmp_path / "few.jsonl"
    path.write_text("".join(json.dumps({"question": f"{a} + 1?", "answer": str(a + 1)}) + "\n" for a in range(4)))
    whole = config(2, source=str(path), eval_source=str(path))
    with pytest.raises(DataError, match=r"evaluation\.shots is 2, but there are no training problems"):
        with_shots(load_held_out(whole.data), whole, "xml")
    few = config(5, source=str(path), eval_source="arithmetic")
    assert len(load_problems(few.data).train) == 4
    with pytest.raises(DataError, match=r"only 4 training problems"):
        with_shots(load_held_out(few.data), few, "xml")
