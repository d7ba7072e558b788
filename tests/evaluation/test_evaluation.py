"""Evaluation's figures in closed form, from completions written by hand."""

import json
from math import comb
from pathlib import Path

import pytest

from groupwise.config.schema import Config
from groupwise.engines.base import SamplingSettings
from groupwise.errors import DataError
from groupwise.evaluation import (
    build_summary,
    evaluate,
    evaluate_stage,
    is_well_formed,
    mcnemar_p_value,
    paired_comparison,
    sampling_settings,
)
from groupwise.metrics import wilson_interval
from groupwise.tracking import JsonlTracker, RunFolder, Trackers
from groupwise.tracking.results import RunResult
from groupwise.types import Completion, Problem, Prompt


class Scripted:
    """An engine that gives each problem the completion written for it, and remembers how it was asked."""

    def __init__(self, said):
        self.said = said
        self.asked = []

    def sample(self, prompts, samples_per_prompt, settings, *, seed, scope, on_progress=None):
        self.asked.append((len(prompts), samples_per_prompt, settings, seed, scope))
        out = []
        for done, prompt in enumerate(prompts, 1):
            text, tokens, reason = self.said[prompt.problem.id]
            out.append((Completion(text, tuple(range(tokens)), (-1.0,) * tokens, reason),) * samples_per_prompt)
            if on_progress:
                on_progress(done, tokens)
        return out


def xml(answer):
    return f"<reasoning>\nadd\n</reasoning>\n<answer>\n{answer}\n</answer>"


SAID = {
    "right": (xml("1,234"), 10, "stop"),
    "right, chatty": ("Sure! " + xml("$1234.00"), 20, "stop"),
    "lenient only": ("The answer is 1234.", 30, "stop"),
    "wrong": (xml("77"), 40, "stop"),
    "cut": ("<reasoning>\nlet me", 100, "length"),
}


def prompts(names=tuple(SAID)):
    return [Prompt(Problem(name, f"question of {name}", "1234"), f"<user>{name}", (1, 2)) for name in names]


def judged(stage="base", mode="sampled", names=tuple(SAID), said=SAID):
    settings = SamplingSettings(max_tokens=100, temperature=0.8, greedy=mode == "greedy")
    return evaluate(Scripted(said), prompts(names), stage=stage, mode=mode, settings=settings, style="xml", seed=3)


def test_figures_in_closed_form():
    result = judged()
    assert result.n == 5
    assert result.strict_accuracy == 2 / 5
    assert result.lenient_accuracy == 3 / 5
    assert result.format_rate == 2 / 5  # right and wrong; chatty has text outside its blocks
    assert result.stop_rate == 4 / 5
    assert result.mean_tokens == 40.0
    assert result.strict_interval == wilson_interval(2, 5)
    assert result.lenient_interval == wilson_interval(3, 5)
    assert (result.temperature, result.max_tokens) == (0.8, 100)
    assert judged(mode="greedy").temperature == 0.0


def test_wilson_against_published_values():
    # R. G. Newcombe (1998), "Two-sided confidence intervals for the single proportion", table I, method 3.
    for successes, trials, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson_interval(successes, trials) == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("trials", range(1, 400, 7))
def test_wilson_reaches_0_and_1_exactly(trials):
    low, high = wilson_interval(0, trials)
    assert low == 0.0
    assert 0 < high < 1
    assert wilson_interval(trials, trials) == (pytest.approx(1 - high), 1.0)


def test_records_hold_the_whole_case():
    records = {record["problem"]: record for record in judged().records}
    assert list(records) == list(SAID)
    assert records["right, chatty"] == {
        "problem": "right, chatty",
        "sample": 0,
        "question": "question of right, chatty",
        "prompt": "<user>right, chatty",
        "expected": "1234",
        "extracted": "$1234.00",
        "strict": True,
        "lenient": True,
        "format": False,
        "finish_reason": "stop",
        "tokens": 20,
        "response": "Sure! " + xml("$1234.00"),
    }
    assert records["cut"]["extracted"] is None
    assert (records["lenient only"]["strict"], records["lenient only"]["lenient"]) == (False, True)


def test_a_conversation_is_shown_by_its_last_turn():
    problem = Problem("c", [{"role": "user", "content": "hi"}, {"role": "user", "content": "2 + 2?"}], "4")
    engine = Scripted({"c": ("4", 1, "stop")})
    settings = SamplingSettings(max_tokens=5)
    result = evaluate(engine, [Prompt(problem, "t", (1,))], stage="s", mode="sampled", settings=settings, style="xml", seed=0)
    assert result.records[0]["question"] == "2 + 2?"


def test_every_stage_draws_the_same_random_numbers():
    engine, config = Scripted(SAID), Config.model_validate({"evaluation": {"seed": 5}, "rollout": {"max_completion_tokens": 64}})
    for stage in ("base", "final"):
        evaluate_stage(engine, prompts(), stage=stage, config=config, style="xml")
    assert engine.asked[:2] == engine.asked[2:]
    sampled, greedy = engine.asked[:2]
    assert (sampled[0], sampled[1], sampled[3], sampled[4]) == (5, 1, 5, "evaluation/sampled")
    assert (greedy[2].greedy, greedy[4]) == (True, "evaluation/greedy")
    assert sampled[2] == SamplingSettings(max_tokens=64)


def test_evaluation_ignores_the_rollouts_nucleus():
    config = Config.model_validate(
        {"rollout": {"top_p": 0.5, "top_k": 5}, "evaluation": {"max_completion_tokens": 9, "temperature": 0.7}}
    )
    assert sampling_settings(config, "sampled") == SamplingSettings(max_tokens=9, temperature=0.7)


def test_progress_is_the_engines():
    seen = []
    settings = SamplingSettings(max_tokens=5)
    evaluate(
        Scripted(SAID),
        prompts(),
        stage="s",
        mode="sampled",
        settings=settings,
        style="xml",
        seed=0,
        on_progress=lambda *a: seen.append(a),
    )
    assert [done for done, _ in seen] == [1, 2, 3, 4, 5]


def test_nothing_to_judge_is_refused():
    with pytest.raises(DataError, match=r"0 held-out.*data\.holdout"):
        judged(names=())


@pytest.mark.parametrize(
    ("text", "style", "well"),
    [
        (xml("4"), "xml", True),
        ("\n" + xml("4") + "\n\n", "xml", True),
        (xml("4") + " Bye", "xml", False),
        (xml("4") + xml("4"), "xml", False),
        ("<answer>4</answer><reasoning>r</reasoning>", "xml", False),
        ("<reasoning>r</reasoning>and<answer>4</answer>", "xml", False),
        ("<answer>4</answer>", "xml", False),
        ("so \\boxed{4}.", "boxed", True),
        ("\\boxed{\\frac{1}{2}}", "boxed", True),
        ("\\boxed{4} \\boxed{4}", "boxed", False),
        ("\\boxed{4", "boxed", False),
        ("4", "boxed", False),
        ("2 + 2 = 4\n#### 4", "plain", True),
        ("####", "plain", False),
        ("#### 4 #### 4", "plain", False),
        ("4", "plain", False),
        ("<think>\n<answer>5</answer>?\n</think>\n\n" + xml("4"), "xml", True),
        ("<think>\n" + xml("4"), "xml", False),
    ],
)
def test_well_formed(text, style, well):
    assert is_well_formed(text, style) is well


def test_mcnemar_in_closed_form():
    assert mcnemar_p_value(0, 0) == 1.0
    assert mcnemar_p_value(5, 5) == 1.0
    assert mcnemar_p_value(0, 10) == 2 / 1024
    assert mcnemar_p_value(1, 9) == mcnemar_p_value(9, 1) == 2 * (1 + 10) / 1024
    assert mcnemar_p_value(4, 9) == pytest.approx(2 * sum(comb(13, i) for i in range(5)) / 8192)
    assert mcnemar_p_value(0, 2000) == 0.0 or mcnemar_p_value(0, 2000) < 1e-300  # beyond a float, and no overflow


def records(*right):
    return [{"problem": str(i), "strict": bool(value)} for i, value in enumerate(right)]


def test_pairs_are_counted_by_what_became_of_them():
    compared = paired_comparison(records(0, 0, 0, 1, 1, 0), records(1, 1, 0, 1, 0, 1))
    low, high = compared.pop("difference_interval")
    assert low < 1 / 3 < high
    assert compared == {
        "n": 6,
        "samples": 1,
        "difference": 2 / 6,
        "fixed": 3,
        "broken": 1,
        "both_right": 1,
        "both_wrong": 1,
        "p_value": 2 * (1 + 4) / 16,
        "test": "exact McNemar test",
    }


def test_different_problems_are_not_compared():
    with pytest.raises(DataError, match="same ones in the same order"):
        paired_comparison(records(0, 1), list(reversed(records(0, 1))))


def test_the_summary_has_each_stage_once_in_the_headline_mode():
    nothing = dict.fromkeys(SAID, ("?", 5, "stop"))
    everything = {name: (xml("1234"), 5, "stop") for name in SAID}
    evaluations = [
        judged("base", "sampled", said=nothing),
        judged("base", "greedy", said=nothing),
        judged("warm_start", "sampled"),
        judged("warm_start", "greedy"),
        judged("step-10", "sampled"),
        judged("final", "sampled", said=everything),
        judged("final", "greedy", said=everything),
    ]
    summary = json.loads(
        json.dumps(build_summary(evaluations, 61.23456, Config(), style="xml", folder="runs/a", extra={"steps": 3}))
    )
    assert [row["stage"] for row in summary["evaluations"]] == ["base", "warm_start", "final"]
    assert {row["mode"] for row in summary["evaluations"]} == {"sampled"}
    assert [row["strict_accuracy"] for row in summary["evaluations"]] == [0.0, 0.4, 1.0]
    assert {"stage", "n", "strict_accuracy", "lenient_accuracy", "format_rate", "stop_rate"} <= summary["evaluations"][0].keys()
    assert [row["stage"] for row in summary["greedy_evaluations"]] == ["base", "warm_start", "final"]
    assert [row["stage"] for row in summary["training_evaluations"]] == ["step-10"]
    frame = RunResult(Path("runs/a"), summary).evaluations
    assert [*zip(frame["stage"], frame["mode"], strict=True)] == [(one.stage, one.mode) for one in evaluations]
    counted = {"n": 5, "samples": 1, "fixed": 3, "broken": 0, "both_right": 2, "both_wrong": 0, "p_value": 0.25}
    assert {"before": "warm_start", "after": "final", **counted}.items() <= summary["comparison"].items()
    assert (summary["seconds"], summary["steps"], summary["format"], summary["folder"]) == (61.235, 3, "xml", "runs/a")


def test_a_greedy_headline_and_a_run_without_warm_start():
    config = Config.model_validate({"evaluation": {"modes": ["greedy"]}})
    summary = build_summary([judged("base", "greedy"), judged("final", "greedy")], 1.0, config)
    assert [row["mode"] for row in summary["evaluations"]] == ["greedy", "greedy"]
    assert summary["sampled_evaluations"] == []
    assert (summary["comparison"]["before"], summary["comparison"]["p_value"]) == ("base", 1.0)
    assert build_summary([], 1.0, config)["comparison"] is None


def test_records_reach_the_runs_folder(tmp_path):
    folder = RunFolder(tmp_path)
    results = evaluate_stage(
        Scripted(SAID), prompts(), stage="warm_start", config=Config(), style="xml", trackers=Trackers([JsonlTracker(folder)])
    )
    assert [result.mode for result in results] == ["sampled", "greedy"]
    rows = [json.loads(line) for line in (tmp_path / "evaluations" / "warm_start-sampled.jsonl").read_text().splitlines()]
    assert tuple(rows) == results[0].records
