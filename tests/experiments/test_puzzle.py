"""The write-ups' puzzles from their own facts: variants differ in what their names say, and tables say what the numbers say."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from experiments import puzzle, puzzle_large, stop_habit
from experiments.comparison import started
from experiments.runs import grpo_job, warm_start_job
from groupwise import load_config
from groupwise.config.schema import RolloutConfig
from groupwise.data.prompts import worked_completion
from groupwise.data.sources import load_problems
from groupwise.engines import SampleRequest, SamplingSettings, make_engine
from groupwise.engines.builtin.engine import BuiltinEngine
from groupwise.models.load import load_policy
from groupwise.training import warm_start
from groupwise.types import Problem, Prompt
from tests.experiments.test_comparisons import made_up


def configs(comparison, settings=(), variants=()):
    """The configuration of every run of seed 0, by variant; of those that run where none is named, or of these."""
    given = [*comparison.settings, *settings]
    start = warm_start_job(0, comparison.budget, Path("work"), given, (), comparison.recipe, comparison.before)
    jobs = {v.name: grpo_job(v, 0, comparison.budget, Path("work"), given, start) for v in comparison.chosen(variants)}
    return start, {name: load_config(job.recipe, list(job.settings)) for name, job in jobs.items()}


def test_every_variant_samples_a_batch_for_each_step_and_differs_from_the_first_in_its_name_alone():
    _, found = configs(puzzle.COMPARISON)
    plain, steps = found["2x8"], puzzle.COMPARISON.budget.steps
    accumulated = found.pop("2x8-accumulated-6")
    assert accumulated.training.steps * accumulated.completions_per_step == steps * plain.completions_per_step
    assert accumulated.optimizer_steps * 6 == steps
    differing = {}
    for name, config in found.items():
        assert config.training.steps == steps, name
        here, there = config.model_dump(), plain.model_dump()
        differing[name] = {(s, key): here[s][key] for s in here for key in here[s] if here[s][key] != there[s][key]}
    assert differing == {
        "2x8": {},
        "7x12": {("rollout", "prompts_per_step"): 7, ("rollout", "completions_per_prompt"): 12},
        "2x12": {("rollout", "completions_per_prompt"): 12},
        "7x8": {("rollout", "prompts_per_step"): 7},
        "2x8-cut": {("rollout", "max_completion_tokens"): 60},
        "2x8-cut-44": {("rollout", "max_completion_tokens"): 44},
        "2x8-mu-3": {("algorithm", "updates_per_batch"): 3},
    }
    names = {name for _, *pair, _ in puzzle.FACTORS for name in pair}
    assert names == set(puzzle_large.COMPARISON.variants) >= set(puzzle.VARIANTS)
    with pytest.raises(SystemExit, match="there is no variant '2x9'"):
        puzzle.COMPARISON.chosen(["2x9"])


def test_the_settings_of_the_write_ups_are_those_of_the_tutorials_recipe():
    plain, tutorial = configs(puzzle.COMPARISON)[1]["2x8"], load_config("tutorial-1.5b")
    assert plain.completions_per_step == tutorial.completions_per_step
    assert plain.algorithm.beta == tutorial.algorithm.beta
    assert plain.algorithm.loss == tutorial.algorithm.loss
    assert plain.optimizer.max_grad_norm == tutorial.optimizer.max_grad_norm


def test_sums_need_as_many_lengths_and_none_is_in_both_splits(monkeypatch):
    monkeypatch.setattr(puzzle, "PROBLEMS", {"train": 30, "held_out": 5})
    train, held_out = puzzle.sums(), puzzle.held_out_sums()
    additions = [row["solution"].count("+") for row in train]
    assert additions == [1, 2, 3, 4] * 30
    assert len(held_out) == 20
    assert not {row["solution"] for row in train} & {row["solution"] for row in held_out}


@pytest.mark.slow
def test_the_limits_cut_what_the_docstring_says(embedded_model_folder):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(embedded_model_folder)
    by_additions = {}
    for problem in load_problems(configs(puzzle.COMPARISON)[1]["2x8"].data).train:
        ids = tokenizer(worked_completion(problem, "xml"), add_special_tokens=False)["input_ids"]
        by_additions.setdefault(problem.columns["solution"].count("+"), []).append(len(ids) + 1)
    lengths = [n for found in by_additions.values() for n in found]
    assert [round(sum(found) / len(found)) for _, found in sorted(by_additions.items())] == [32, 43, 55, 66]
    assert min(lengths) >= 29
    assert max(lengths) <= 69
    assert sum(n > 60 for n in lengths) / len(lengths) == pytest.approx(0.25, abs=0.01)
    assert min(by_additions[3]) > 44


def of(variants):
    """Numbers with ``right[seed]`` of 100 answers for each variant."""
    numbers = made_up(next(iter(variants.values())))
    numbers["runs"] = {name: made_up(right)["runs"]["grpo"] for name, right in variants.items()}
    return {**numbers, "variants": {name: [] for name in variants}, "equal": "steps"}


def test_a_factors_row_has_its_difference_and_its_share_of_the_gap():
    text = puzzle.explained(of({"2x8": [30, 40, 50], "7x12": [50, 60, 70], "2x8-cut": [30, 30, 45], "2x8-mu-3": [40, 40, 40]}))
    rows = {line.split(" (`")[0].strip("| "): [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()}
    everything = rows["all that differed"]
    # 2.306 of Student's t, times 8.29 points between seeds, times the root of 2 / 3: 15.6
    assert everything[1] == "+25.0 [+9.4, +40.6]"
    # alone: variances 100 and 75 of three runs each, so 3.92 degrees of freedom, 2.797 of Student's t, times the root of 175 / 3: 21.4
    assert everything[2] == "[+3.6, +46.4]"
    assert everything[3] == "+20.0, +30.0, +25.0"
    assert everything[4] == "+43.3 [+20.1, +61.0]"
    assert everything[5].startswith("58% [")
    # alone: variances 100 and 0, so 2 degrees of freedom, 4.303 times the root of 100 / 3: 24.8
    assert rows["one update of a batch in place of three"][1:5] == [
        "+0.0 [-15.6, +15.6]",
        "[-24.8, +24.8]",
        "-10.0, +0.0, +10.0",
        "+23.3 [-0.7, +44.0]",
    ]
    assert "an update each batch in place of each six" not in rows, "there is no such run"
    # the root of (43.3 - 20.1)^2 + 15.6^2 below, of (61.0 - 43.3)^2 + 15.6^2 above
    assert "Unexplained, if points carried over: +18.3 of 43.3 [-9.7, +41.9]" in text
    assert "standard deviation of 8.3 points (8 degrees of freedom; a variant's own is 0.0 to 10.0)" in text, (
        "variances 100, 100, 75 and 0 of three runs each"
    )
    alone = puzzle.explained(of({"2x8": [30], "7x12": [50]}))
    assert "+20.0 [+6.4, +32.6]" in alone, "Newcombe's, of the answers"
    assert "| +20.0 [+6.4, +32.6] | - |" in alone, "a run on each side has no deviation"
    assert "not known without" in alone
    assert "standard deviation" not in alone


def test_the_large_pair_is_an_adapter_on_gsm8k_without_a_warm_start():
    start, found = configs(puzzle_large.COMPARISON, ["model.name=/models/qwen", "data.folder=/data", "training.threads=2"])
    assert list(found) == ["2x8", "7x12"]
    assert start.keep_model is None, "the untrained model is judged and not kept"
    for config in found.values():
        assert config.model.name == "/models/qwen"
        assert config.model.lora is not None
        assert (config.data.source, config.data.eval_split, config.data.folder) == ("gsm8k", "test", "/data")
        assert config.warm_start.steps == 0
        assert config.training.steps == puzzle_large.COMPARISON.budget.steps
        assert 0 < config.output.checkpoint_every < config.training.steps
    assert [config.completions_per_step for config in found.values()] == [16, 84]


def test_what_16_completions_are_paid_for_is_all_that_two_large_variants_change():
    _, found = configs(puzzle_large.COMPARISON, ["model.name=/models/qwen"], ["2x8", "2x8-right-anywhere", "2x8-in-format"])
    plain, anywhere, in_format = (config.model_dump() for config in found.values())
    named = [(f.function, f.arguments) for f in found["2x8"].rewards.functions]
    assert [(f.function, f.arguments) for f in found["2x8-right-anywhere"].rewards.functions] == [
        *named,
        ("accuracy", {"lenient": True}),
    ]
    assert [(f.function, f.arguments) for f in found["2x8-in-format"].rewards.functions] == [("accuracy", {"in_format": True})]
    for other in (anywhere, in_format):
        assert {key for key in plain if plain[key] != other[key]} == {"rewards"}


def test_a_warm_start_without_the_end_lacks_that_token_alone(monkeypatch, tiny_folder):
    from transformers import AutoTokenizer

    monkeypatch.setattr(warm_start, "worked_episode", warm_start.worked_episode)  # put back after the test
    tokenizer, prompt = AutoTokenizer.from_pretrained(tiny_folder), Prompt(Problem("p", "1 + 1 = ?", "2"), "?", (7, 8))
    ((asked, whole, _),) = warm_start.worked_episode(prompt, "xml", tokenizer, None)
    stop_habit.without_end()
    ((asked_now, cut, learnt),) = warm_start.worked_episode(prompt, "xml", tokenizer, None)
    assert whole == [*cut, tokenizer.eos_token_id]
    assert (asked_now, learnt) == (asked, [True] * len(cut))


def test_a_stop_string_ends_completions_in_training_and_leaves_evaluations_alone(tiny_folder, monkeypatch):
    policy = load_policy(
        load_config("quickstart", [f"model.name={tiny_folder}", "model.dtype=float32", "warm_start.steps=0"]).model
    )
    engine = make_engine(policy, RolloutConfig())
    prompts = [Prompt(Problem("p", "?", "2"), "?", tuple(policy.tokenizer("Is it so?")["input_ids"]))]
    rollout = SampleRequest(prompts, 16, SamplingSettings(max_tokens=120), 0, "rollout/step=0")
    judged = replace(rollout, scope="evaluation/sampled")
    (whole,), (alone,) = engine.serve(rollout), engine.serve(judged)
    monkeypatch.setattr(stop_habit, "TAGS", ("e",))
    monkeypatch.setattr(BuiltinEngine, "serve", BuiltinEngine.serve)  # put back after the test
    stop_habit.stop_string()
    (ended,) = engine.serve(rollout)
    assert any("e" in one.text for one in ended)
    for one, other in zip(ended, whole, strict=True):
        assert other.token_ids[: len(one.token_ids)] == one.token_ids, "the same randomness"
        assert "e" not in one.text[:-1]
        assert one.finish_reason == ("stop" if "e" in other.text else other.finish_reason)
    assert engine.serve(judged) == [alone]


def test_habits_are_compared_before_and_after_each_from_its_own_start(tiny_runs, monkeypatch):
    monkeypatch.setattr(warm_start, "worked_episode", warm_start.worked_episode)
    monkeypatch.setattr(BuiltinEngine, "serve", BuiltinEngine.serve)
    call, carried_out, _ = tiny_runs
    rate = "optimizer.learning_rate=0.01"  # stale weights would show
    wanted = [
        replace(v, settings=(*(s for s in v.settings if "rewards" not in s), rate)) for v in stop_habit.COMPARISON.chosen([])
    ]
    numbers = call([v for v in wanted if v.name in ("concat", "concat-stop-string", "chat")], before=stop_habit.COMPARISON.before)
    assert len([name for name in carried_out if name.startswith("warm-start")]) == 2
    one, other = (numbers["runs"][name]["0"]["curves"] for name in ("concat", "concat-stop-string"))
    assert other["policy/sampler_mismatch"] == pytest.approx([0, 0], abs=1e-4), (
        "it samples with the weights as the first update left them"
    )
    assert other["reward/mean"] == one["reward/mean"], "the tag never comes, so that nothing is cut"
    shown = stop_habit.stops({**numbers, "settings": []})
    assert shown.count("`concat") == 2
    first = started(numbers, "chat", "0")["stop_rate"]
    assert f"| `chat` | {first:.0%} to " in shown


def test_rewards_of_the_cures_are_those_of_the_tutorials_way_and_one_more():
    rewards = {v.name: load_config("quickstart", list(v.settings)).rewards.functions for v in stop_habit.COMPARISON.chosen([])}
    plain = [entry.function for entry in rewards["concat"]]
    assert rewards["concat"] == load_config("tutorial-1.5b").rewards.functions
    more = {name: [entry.function for entry in entries][len(plain) :] for name, entries in rewards.items()}
    assert more == {
        "concat": [],
        "concat-exact-form": ["strict_xml"],
        "concat-overlong": ["overlong"],
        "concat-stop-string": [],
        "chat": [],
    }
