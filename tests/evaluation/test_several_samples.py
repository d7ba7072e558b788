"""Several samples of each problem: figures in closed form, records that can be judged again, and how a score says it was taken."""

import io
import json
import math
from dataclasses import replace

import pytest
from rich.console import Console
from rich.text import Text

from groupwise.config.schema import Config
from groupwise.data import algebra
from groupwise.engines.base import SamplingSettings
from groupwise.errors import DataError
from groupwise.evaluation import (
    build_summary,
    compare_models,
    evaluate,
    evaluate_stage,
    paired_comparison,
    rescore,
    write_records,
)
from groupwise.evaluation.figures import figures, first_samples
from groupwise.evaluation.judging import training_effect
from groupwise.evaluation.models import told_apart
from groupwise.evaluation.records import latex_right, make_record
from groupwise.metrics import wilson_interval
from groupwise.tracking.tables import comparison_lines, condition_line, condition_lines, judged_tables, legend, summary_lines
from groupwise.types import Completion, Problem, Prompt


def xml(answer):
    return f"<reasoning>\nadd\n</reasoning>\n<answer>\n{answer}\n</answer>"


class Scripted:
    """An engine whose samples of each problem are written out."""

    def __init__(self, said):
        self.said = said

    def sample(self, prompts, samples_per_prompt, settings, *, seed, scope, on_progress=None):
        return [
            tuple(Completion(text, (1, 2), (-1.0, -1.0), "stop") for text in self.said[prompt.problem.id][:samples_per_prompt])
            for prompt in prompts
        ]


SAID = {
    "a": [xml("12"), xml("12.0"), xml("5"), xml("6")],
    "b": [xml("5"), xml("5"), xml("12"), "The answer is 12."],
    "c": [xml("1"), "nothing", xml("2"), xml("3")],
}
PROMPTS = [Prompt(Problem(name, f"question {name}", "12"), f"<user>{name}", (1, 2)) for name in SAID]


def judged(said=SAID, samples=4, further=True, mode="sampled"):
    settings = SamplingSettings(max_tokens=100, temperature=0.8, greedy=mode == "greedy")
    asked = {"data": "sums", "prompt_format": "bare text without a system prompt", "shots": 0}
    how = {"stage": "eval", "mode": mode, "settings": settings, "style": "xml", "seed": 3}
    return evaluate(Scripted(said), PROMPTS, **how, samples=samples, further=further, asked=asked)


def test_figures_by_hand():
    result = judged()
    assert (result.n, result.samples, len(result.records)) == (3, 4, 12)
    assert result.strict_accuracy == pytest.approx((2 + 1 + 0) / 12)
    assert result.lenient_accuracy == pytest.approx((2 + 2 + 0) / 12)
    found = result.figures
    assert found["latex"][0] == pytest.approx(4 / 12)
    assert list(found["pass_at"]) == list(found["majority_at"]) == ["1", "2", "4"]
    assert found["pass_at"]["1"][0] == pytest.approx(result.strict_accuracy)
    assert found["pass_at"]["2"][0] == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6) + 0) / 3)
    assert found["pass_at"]["4"] == pytest.approx([2 / 3, *wilson_interval(2, 3)])
    # a: 12 and 12.0 are one answer and lead; b: two 5 against one 12 in its place; c: three wrong ones
    assert found["majority_at"]["4"][0] == pytest.approx(1 / 3)
    low, high = result.strict_interval
    assert low < 0.25 < high
    assert high - low > wilson_interval(3, 12)[1] - wilson_interval(3, 12)[0], "problems are the unit, not samples"


def test_greedy_asks_once():
    assert judged(mode="greedy").samples == 1
    assert "pass_at" not in judged(mode="greedy").figures


def test_the_further_verdicts_are_made_only_when_asked_for():
    assert "latex" not in judged(further=False).records[0]
    assert {"latex", "field_strict", "field_flexible"} <= judged().records[0].keys()


@pytest.mark.parametrize(
    ("text", "reference", "right"),
    [
        (xml("\\frac{1}{2}"), "0.5", True),
        ("So it is $\\frac{1}{2}$.", "\\frac12", True),
        ("Therefore $x = \\sqrt{8}$", "2\\sqrt{2}", True),
        ("\\boxed{3}, or rather 4", "4", False),
        (xml("3") + " but 4", "4", False),
        ("first 4, at last 5", "4", False),
        ("72 apples in all, that is 72", "72", True),
        ("", "72", False),
        ("The answer is 2^5", "5", False),
        ("It is not 5.", "5", False),
        ("The answer is 5 million.", "5", False),
        ("At 3:30", "30", False),
        ("$$ and so it is 0.5.", "\\frac{1}{2}", True),
    ],
)
def test_the_latex_verdict_compares_one_final_answer(text, reference, right):
    assert latex_right(text, reference, "xml") is right


def test_the_latex_verdict_looks_in_other_formats_places():
    assert latex_right(xml("\\frac{3}{4}"), "0.75", "boxed")
    assert latex_right("#### \\frac{3}{4}\nThat was hard, 100%.", "0.75", "xml")


def test_two_models_are_compared_problem_by_problem():
    better = {**SAID, "a": [xml("12")] * 4, "c": [xml("12"), *SAID["c"][1:]]}
    compared = paired_comparison(judged().records, judged(better).records)
    assert compared["test"] == "exact paired permutation test"
    assert (compared["better"], compared["worse"]) == (2, 0)
    assert compared["difference"] == pytest.approx(3 / 12)
    assert compared["p_value"] == pytest.approx(2 / 4)  # +2 and +1: of the 4 exchanges, two reach 3
    with pytest.raises(DataError, match="1 and 4 samples"):
        paired_comparison(judged(samples=1).records, judged().records)


def test_of_three_models_two_are_compared_with_the_first():
    models = [("base", [judged()]), ("same", [judged()]), ("other", [judged({name: [xml("12")] * 4 for name in SAID})])]
    same, other = compare_models(models)
    assert (same["before"], same["after"], same["p_value"]) == ("base", "same", 1.0)
    assert other["p_adjusted"] == pytest.approx(min(1.0, 2 * other["p_value"]))
    lines = list(comparison_lines([same, other]))
    assert lines[0].startswith("base -> same, sampled: +0.0 points")
    assert "3 of 3 problems better, 0 worse (exact paired permutation test, p = 0.25, 0.5 after Holm)" in lines[1]
    assert compare_models(models[:1]) == []


def test_other_data_are_not_compared():
    elsewhere = judged()
    for record in elsewhere.records:
        record["expected"] = "13"
    with pytest.raises(DataError, match="base and new cannot be compared"):
        compare_models([("base", [judged()]), ("new", [elsewhere])])
    unpaired = []
    (row,) = compare_models([("base", [judged()]), ("new", [elsewhere]), ("same", [judged()])], unpaired)
    assert (row["after"], row["p_adjusted"]) == ("same", 1.0), "the others are compared all the same"
    assert [str(one).partition(":")[0] for one in unpaired] == ["base and new cannot be compared (sampled)"]


def test_a_run_that_judges_others_in_the_end_has_no_effect_to_show():
    one = replace(judged(), stage="base")
    assert training_effect({"base": one, "final": replace(judged(), stage="final")}) is not None
    assert training_effect({"base": one, "final": replace(judged(samples=1), stage="final")}) is None


def test_a_model_of_two_files_is_named_with_its_file(tmp_path):
    files = {"a.jsonl": [("m", [judged()]), ("n", [judged()])], "b.jsonl": [("m", [judged()])], "c.jsonl": [("w", [judged()])]}
    found = told_apart(files, ["w"])
    assert [name for group in found.values() for name, _ in group] == ["m (a.jsonl)", "n", "m (b.jsonl)", "w (c.jsonl)"]
    write_records(path := tmp_path / "records.jsonl", found["a.jsonl"])
    again = rescore(path)
    write_records(path, told_apart({"x": again, "y": again}, [])["x"])
    assert [name for name, _ in rescore(path)] == ["m (a.jsonl) (x)", "n (x)"]


def test_two_evaluations_in_one_file_are_refused(tmp_path):
    write_records(path := tmp_path / "records.jsonl", [("m", [judged()])])
    path.write_bytes(2 * path.read_bytes())
    with pytest.raises(DataError, match=r"have sample 0 of problem a twice for m \(sampled\).*give each a file of its own"):
        rescore(path)


def test_each_problem_s_records_have_their_own_budget(tmp_path, monkeypatch):
    """What comparisons of earlier problems cost leaves no later one unchecked."""
    found = judged({**SAID, "a": [xml(r"\sqrt{144}")] * 4})
    write_records(path := tmp_path / "records.jsonl", [("model", [found])])
    monkeypatch.setattr(algebra, "_CHECKER", checker := algebra._Checker())  # which has no answer yet
    checker.left_s = 0.0
    (_, (again,)), *_ = rescore(path)
    assert {record["strict"] for record in again.records if record["problem"] == "a"} == {True}


def test_records_can_be_judged_again(tmp_path):
    path = tmp_path / "deep" / "records.jsonl"
    original = [("m", [judged(), judged(mode="greedy")]), ("other", [judged()])]
    assert write_records(path, original) == 12 + 3 + 12
    again = rescore(path)
    assert [(model, [e.mode for e in found]) for model, found in again] == [("m", ["sampled", "greedy"]), ("other", ["sampled"])]
    for (_, before), (_, after) in zip(original, again, strict=True):
        assert [e.figures for e in after] == [e.figures for e in before]
        assert [condition_line(e.to_summary()) for e in after] == [condition_line(e.to_summary()) for e in before]
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["strict"] = row["lenient"] = not row["strict"]
        row["expected"] = "5"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert rescore(path)[0][1][0].strict_accuracy == pytest.approx(3 / 12), "verdicts are made from the response"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "are empty"),
        ("{", "line 1 is not JSON"),
        ('{"model": "m"}', "line 1 is no record of an evaluation .it lacks mode, style"),
        ("[1]", "is no record"),
    ],
)
def test_a_file_that_holds_something_else_is_refused(tmp_path, text, message):
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        rescore(path)
    with pytest.raises(DataError, match="cannot be read"):
        rescore(tmp_path / "nowhere.jsonl")


def test_a_score_says_how_it_was_taken():
    line = condition_line(judged().to_summary())
    assert line == (
        "temperature 0.8, 4 samples of each of 3 problems from sums; bare text without a system prompt, answer in <answer>, "
        "0 shots; at most 100 tokens; seed 3"
    )
    greedy = condition_line(judged(mode="greedy").to_summary())
    assert greedy.startswith("greedy (temperature 0), 1 sample of each of 3 problems from sums;")
    unrecorded = condition_line({**judged().to_summary(), "temperature": None})
    assert unrecorded.startswith("an unrecorded temperature, 4 samples of each of 3 problems from sums;")
    rows = [("m", judged().to_summary()), ("n", judged().to_summary()), ("n", judged(mode="greedy").to_summary())]
    both, one = condition_lines(rows)
    assert both == f"Asked: {line}."
    assert one == f"Asked (n): {greedy}."


def test_a_run_s_summary_says_it_too():
    config = Config.model_validate({"evaluation": {"samples": 2, "modes": ["sampled"]}, "prompt": {"system": "none"}})
    results = evaluate_stage(Scripted(SAID), PROMPTS, stage="final", config=config, style="xml")
    line = next(line for line in summary_lines(build_summary(results, 1.0, config)) if line.startswith("Asked"))
    assert "2 samples of each of 3 problems from arithmetic (generated, held out)" in line
    assert "the model's chat template without a system prompt" in line
    assert "at most 256 tokens; seed 1234" in line


def test_the_tables_hold_the_figures_in_80_columns():
    models = [f"runs/{name}/final_model" for name in ("base", "a-run-of-a-rather-long-name-2026", "new", "newer")]
    rows = [(model, e.to_summary()) for model in models for e in (judged(), judged(mode="greedy"))]
    console = Console(width=80, file=io.StringIO())
    tables = list(judged_tables(rows, Text))
    for table in tables:
        console.print(table)
    shown = console.file.getvalue()
    assert len(tables) == 4, "two modes, and a fourth model begins another table"
    assert "…" not in shown
    assert "long-name-2026" in shown
    assert shown.count("66.7% [20.8, 93.9]") == 4, "pass@4 of every model"
    assert "majority@4" in shown
    assert "final_model" not in shown
    assert "field:" not in shown, "the field's rules are GSM8K's"
    for _, row in rows:
        row["conditions"]["data"] = "gsm8k:test"
    assert "lm-evaluation-harness" in legend(rows)


def test_figures_of_records_without_further_verdicts():
    found = figures([{"problem": "p", "strict": True, "lenient": True, "format": True, "finish_reason": "stop", "tokens": 3}])
    assert found["strict"][0] == 1.0
    assert "latex" not in found
    assert not math.isnan(found["mean_tokens"])


def test_what_could_not_be_checked_is_left_out_and_counted_and_never_wrong(monkeypatch, caplog):
    from groupwise.data import algebra

    monkeypatch.setattr(algebra, "_CHECKER", algebra._Checker())
    monkeypatch.setattr(algebra._Checker, "_ask_once", lambda *_: "timeout")
    said = {**SAID, "a": [xml("12"), xml("12"), xml("x + 10"), xml("12")], "c": [xml("x + 10")] * 4}
    found = judged(said)
    verdicts = {(r["problem"], r["sample"]): r["strict"] for r in found.records}
    assert verdicts["a", 2] is None
    assert verdicts["c", 0] is None
    assert verdicts["b", 0] is False
    assert found.figures["unchecked"] == 5
    assert found.n == 2, "of c nothing is known"
    assert found.strict_accuracy == pytest.approx((1.0 + 0.25) / 2)
    assert found.figures["latex"][0] == pytest.approx((1.0 + 0.5) / 2)
    assert "5 of 12 completions are left out of the eval figures" in caplog.text
    compared = paired_comparison(found.records, found.records)
    assert compared["n"] == 1, "only b is known of both"
    console = Console(file=io.StringIO(), width=100)
    for table in judged_tables([("m", found.to_summary())], Text):
        console.print(table)
    assert "not checked, left out" in console.file.getvalue()
    again = rescore_one(found.records[2])
    assert again["strict"] is None
    assert "no verdict" in again["unchecked"]
    monkeypatch.undo()
    assert rescore_one(found.records[2])["strict"] is False
    assert "unchecked" not in rescore_one(found.records[2])


def test_unchecked_samples_of_one_problem_leave_those_of_the_others():
    def record(problem, strict, response):
        return {"problem": problem, "strict": strict, "lenient": strict, "latex": strict, "format": True, "finish_reason": "stop",
                "tokens": 3, "response": response, "extracted": response, "answer": "1"}  # fmt: skip

    records = [record("a", i < 2, str(i)) for i in range(8)]
    records += [record("b", None if i else True, "1") for i in range(8)]
    found = figures(records)
    assert (found["n"], found["samples"], found["unchecked"]) == (2, 8, 7)
    assert list(found["pass_at"]) == ["1", "2", "4", "8"]
    assert found["pass_at"]["1"][0] == pytest.approx((2 / 8 + 1) / 2)
    assert found["pass_at"]["2"][0] == pytest.approx(1 - math.comb(6, 2) / math.comb(8, 2)), "of b one sample is known"
    before, after = ([record("a", was, ""), record("b", then, "")] for was, then in ((True, True), (False, None)))
    assert first_samples(before, after) == [(True, False)]
    for one in before:
        one["expected"] = "1"
    assert first_samples(before, after) == [], "a problem with another reference answer is another one"


def rescore_one(record):
    from groupwise.evaluation.records import judge_again

    return judge_again({**record, "style": "xml"})


def test_any_of_several_reference_answers_counts_and_all_are_shown():
    problem = Problem("p", "q", "2/3", also=("0.667",))
    record = make_record(Prompt(problem, "q", (1,)), Completion(xml("0.667"), (1, 2), (-1.0, -1.0), "stop"), "xml")
    assert record["strict"]
    assert record["lenient"]
    assert record["expected"] == "2/3 or 0.667"
    assert record["accepted"] == ["2/3", "0.667"]
    assert rescore_one(record)["strict"]
    assert rescore_one(record)["latex"]
    assert not rescore_one({**record, "response": xml("0.66")})["strict"]


def test_a_report_leaves_out_what_could_not_be_checked(tmp_path):
    from collections import Counter

    from groupwise.report.payload import evaluation_row, verdict
    from groupwise.tracking.reading import read_evaluations

    rows = [
        {"problem": "a", "strict": None, "lenient": None, "unchecked": "math-verify gave no verdict", "response": "x"},
        {"problem": "b", "strict": False, "lenient": None, "unchecked": "math-verify gave no verdict", "response": "y"},
        {"problem": "c", "strict": True, "lenient": True, "response": "z"},
    ]
    (tmp_path / "before-greedy.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = read_evaluations(tmp_path, Counter())
    assert [(record["problem"], record["strict"]) for record in found.records] == [("b", False), ("c", True)]
    assert [record["lenient"] for record in found.records] == [None, True]
    row = evaluation_row(found)
    assert (row["strict"][0], row["lenient"][0]) == (0.5, 1.0)
    assert evaluation_row(replace(found, records=found.records[:1]))["lenient"] == [0.0, *wilson_interval(0, 1)]
    assert [verdict(record, "strict") for record in found.records] == ["w", "r"]
    assert verdict({"success": None}, "success") == "-"


def test_an_episode_that_nobody_judged_is_graded_by_the_policy_s_last_turn():
    from groupwise.tracking.reading import completion_record

    turns = [
        {"role": "assistant", "text": "<call>", "tokens": 2}, {"role": "tool", "text": "<answer>7</answer>", "tokens": 5},
        {"role": "assistant", "text": "no idea", "tokens": 3},
    ]  # fmt: skip
    row = {"completion": "<call><answer>7</answer>no idea", "expected": "7", "strict": None, "turns": turns}
    assert completion_record(1, row, {}, "xml", may_grade=True).strict is False
    assert completion_record(1, {**row, "turns": None}, {}, "xml", may_grade=True).strict is True
