"""Wordings of the system prompt: each is judged once, as it stands, and a stop loses none that is judged."""

import json

import pytest

pytest.importorskip("matplotlib")

from experiments import prompts
from experiments.common import PAGE, read_block, read_numbers
from groupwise.data.prompts import SYSTEM_PROMPTS

ROW = {
    "n": 4, "strict_accuracy": 0.25, "strict_interval": [0.0, 0.7], "lenient_accuracy": 0.5, "lenient_interval": [0.1, 0.9],
    "format_rate": 0.5, "stop_rate": 1.0, "mean_tokens": 12.0,
}  # fmt: skip


def test_a_wording_is_asked_as_it_stands(tiny_folder, sums, monkeypatch):
    asked = []
    evaluate = prompts.groupwise.evaluate

    def watched(model, data, overrides):
        asked.append(overrides["prompt"]["system"])
        return evaluate(model, data, overrides)

    monkeypatch.setattr(prompts.groupwise, "evaluate", watched)
    settings = ["evaluation.problems=4", "evaluation.max_completion_tokens=3", "data.holdout=4", "evaluation.show=0"]
    row = prompts.judge(str(tiny_folder), str(sums), "tutorial", settings)
    assert asked == [prompts.WORDINGS["tutorial"]]
    assert row["n"] == 4
    assert row.keys() == set(prompts.KEPT)


def test_a_data_set_by_name_is_read_from_a_folder(tiny_folder, tmp_path):
    (tmp_path / "gsm8k").mkdir()
    rows = [json.dumps({"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"}) for i in range(4)]
    (tmp_path / "gsm8k" / "test.jsonl").write_text("\n".join(rows), encoding="utf-8")
    settings = [f"data.folder={tmp_path}", "evaluation.problems=3", "evaluation.max_completion_tokens=3", "evaluation.show=0"]
    assert prompts.judge(str(tiny_folder), "gsm8k:test", "tutorial", settings)["n"] == 3


def test_what_is_judged_is_kept_and_not_judged_again(monkeypatch, tmp_path):
    judged = []

    def judge(model, data, wording, settings):
        judged.append((model, wording))
        if wording == "filled":
            raise KeyboardInterrupt
        return ROW

    monkeypatch.setattr(prompts, "judge", judge)
    words = ["prompts", "--model", "folder/model", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(KeyboardInterrupt):
        prompts.main()
    assert list(read_numbers("prompts", tmp_path)["models"]["model"]) == ["short", "tutorial"]
    monkeypatch.setattr(prompts, "judge", lambda model, data, wording, settings: judged.append((model, wording)) or ROW)
    prompts.main()
    assert [wording for _, wording in judged] == ["short", "tutorial", "filled", *list(prompts.WORDINGS)[2:]]
    assert "tutorial | 50.0% | 25.0% (0.0% to 70.0%)" in prompts.report(read_numbers("prompts", tmp_path))
    assert (tmp_path / "prompts.svg").read_bytes().count(b"<text") > len(prompts.WORDINGS)


def test_one_wording_can_be_asked_in_another_style_under_a_name_of_its_own(monkeypatch, tmp_path):
    judged = []
    monkeypatch.setattr(prompts, "judge", lambda model, data, wording, settings: judged.append((wording, settings)) or ROW)
    words = ["prompts", "--wordings", "tutorial", "--name", "m, concat", "--out", str(tmp_path), "prompt.style=concat"]
    monkeypatch.setattr("sys.argv", words)
    prompts.main()
    assert judged == [("tutorial", ["prompt.style=concat"])]
    assert list(read_numbers("prompts", tmp_path)["models"]) == ["m, concat"]


def test_the_page_is_what_was_measured_and_the_default_is_what_won():
    numbers = read_numbers(prompts.EXPERIMENT.name)
    assert read_block(PAGE, prompts.EXPERIMENT.name).strip() == prompts.report(numbers).strip()
    rows = numbers["models"]["Qwen2.5-Coder-1.5B-Instruct"]
    assert rows.keys() == prompts.WORDINGS.keys()
    best = max(rows, key=lambda wording: rows[wording]["strict_accuracy"])
    assert prompts.WORDINGS[best] == SYSTEM_PROMPTS["xml"]
