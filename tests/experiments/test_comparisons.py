"""Comparisons of runs: they start alike, are kept when finished, and their figures and tables say what the numbers say."""

import json
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

import groupwise
from benchmarks import learning
from experiments import runs
from experiments.ahead import COMPARISON as AHEAD
from experiments.common import FIGURES, PAGE, describe, read_block, read_numbers
from experiments.comparison import (
    _without_place,
    beside,
    compare,
    difference,
    draw,
    held_out,
    newcombe_interval,
    pooled,
    report,
    welch_interval,
)
from experiments.faults import COMPARISON as FAULTS
from experiments.faults import VARIANTS as FAULT_SETTINGS
from experiments.learning_curves import COMPARISON as CURVES
from experiments.low_rates import COMPARISON as LOW_RATES
from experiments.puzzle import COMPARISON as PUZZLE
from experiments.puzzle_large import COMPARISON as PUZZLE_LARGE
from experiments.runs import Budget, Job, Variant, grpo_job, warm_start_job
from experiments.stop_habit import COMPARISON as STOP_HABIT
from groupwise import load_config
from groupwise.config import dump_config
from groupwise.config.presets import PRESETS
from groupwise.data.order import problems_for_step
from groupwise.errors import StoppedError

COMPARISONS = [CURVES, FAULTS, AHEAD, PUZZLE, PUZZLE_LARGE, STOP_HABIT, LOW_RATES]


def test_runs_share_a_start_are_kept_and_repeated_only_when_settings_or_recipe_change(tiny_runs, tmp_path, monkeypatch):
    call, carried_out, work = tiny_runs
    numbers = call([Variant("grpo", ("algorithm.preset=grpo",)), Variant("rloo", ("algorithm.preset=rloo",))])
    assert carried_out == ["warm-start-0", "grpo-0", "rloo-0"]
    assert numbers["failed"] == numbers["missing"] == []
    assert numbers["made"] == {name: {"accumulated": 1, "before": None} for name in ("grpo", "rloo")}
    assert Variant("other", accumulated=6, before="m:f").made == {"accumulated": 6, "before": "m:f"}
    both = [numbers["runs"][name]["0"] for name in ("grpo", "rloo")]
    assert both[0]["curves"]["reward/mean"][0] == both[1]["curves"]["reward/mean"][0], "the same model, problems and samples"
    assert all(len(run["curves"]["accuracy/strict"]) == 2 for run in both)
    assert [row["step"] for row in both[0]["evaluations"]] == [1, 2]
    assert numbers["starts"]["0"]["evaluations"][-1]["n"] == 4
    assert not list(work.glob("*.run")), "models of finished runs are not kept"

    carried_out.clear()
    again = call([Variant("grpo", ("algorithm.preset=grpo",)), Variant("rloo", ("algorithm.preset=rloo", "algorithm.kl=null"))])
    assert carried_out == ["rloo-0"]
    assert again["runs"]["grpo"] == numbers["runs"]["grpo"]

    carried_out.clear()
    monkeypatch.setattr(runs, "config_hash", lambda recipe: "of the recipe after a change")
    call([Variant("grpo", ("algorithm.preset=grpo",))])
    assert carried_out == ["warm-start-0", "grpo-0"]

    shown = {**again, "settings": []}
    draw(shown, tmp_path / "curves.svg")
    assert "<svg" in (tmp_path / "curves.svg").read_text(encoding="utf-8")
    assert "`rloo`" in report(shown, "x")


def made_up(right):
    """Numbers of one variant with three seeds; ``right[seed]`` of 100 held-out answers are right in the end."""
    run = {
        "curves": {"accuracy/strict": [0.25, 0.5], "optimizer/grad_norm": [0.5, 3.0, 4.0], "time/step_s": [2.0, 4.0]},
        "seconds": 6,
    }
    judged = {"step": 2, "n": 100, "format_rate": 1, "stop_rate": 1, "mean_tokens": 9}
    runs_by_seed = {str(s): {**run, "evaluations": [{**judged, "strict_accuracy": x / 100}]} for s, x in enumerate(right)}
    starts = {s: {"evaluations": [{**judged, "strict_accuracy": 0.2}]} for s in runs_by_seed}
    budget = {"steps": 2, "prompts_per_step": 4, "completions_per_prompt": 8, "problems": 100, "completions": 64}
    return {"runs": {"grpo": runs_by_seed}, "starts": starts, "variants": {"grpo": []}, "settings": [],
            "missing": ["rloo-2"], "failed": [], "seeds": [0, 1, 2],
            "budget": budget, "environment": {**runs.environment(), "date": "2026-01-01"}}  # fmt: skip


def test_the_table_says_what_the_numbers_say():
    numbers = made_up([30, 40, 50])
    assert held_out(numbers, "grpo") == {0: [0.2, 0.2, 0.2], 64: [0.3, 0.4, 0.5]}
    share, (low, high), n = pooled(numbers, "grpo")
    assert (share, n) == (0.4, 300)
    assert low < 0.4 < high
    row = next(line for line in report(numbers, "x").splitlines() if line.startswith("| `grpo`"))
    assert "Not run: `rloo-2`." in report(numbers, "x")
    assert "takes all answers as independent; what a seed does comes on top" in report(numbers, "x")
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == ["20% (20% to 20%)", "40% (30% to 50%)"]
    assert cells[4:] == ["50%", "3", "67%", "3.0"], "the last step, median norm, two of three norms above 1, seconds"


@pytest.mark.parametrize(
    ("right", "n", "others", "others_n", "low", "high"),
    [
        (56, 70, 48, 80, 0.0524, 0.3339),
        (9, 10, 3, 10, 0.1705, 0.8090),
        (6, 7, 2, 7, 0.0582, 0.8062),
        (5, 56, 0, 29, -0.0381, 0.1926),
    ],
)
def test_newcombes_interval_is_that_of_his_paper(right, n, others, others_n, low, high):
    """R. G. Newcombe (1998), Statistics in Medicine 17, 873-890, table II, method 10."""
    assert newcombe_interval(right, n, others, others_n) == pytest.approx((low, high), abs=5e-5)
    assert newcombe_interval(others, others_n, right, n) == pytest.approx((-high, -low), abs=5e-5)


@pytest.mark.parametrize(
    ("ours", "theirs", "quantile", "wider"),
    [
        ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], 2.7764, 1.0),  # equal variances: 4 degrees of freedom
        ([1.0, 2.0, 3.0], [5.0, 5.0, 5.0], 4.3027, 1.0),  # all of the variance on one side: its 2
        ([0.0, 1.0], [0.0, 3.0], 8.3940, 1.1533),  # variances 0.5 and 4.5: 1.22 degrees of freedom, between 1 and 2
    ],
)
def test_welchs_interval_has_the_degrees_of_freedom_of_both_sides(ours, theirs, quantile, wider):
    low, high = welch_interval(ours, theirs)
    error = (sum(statistics.variance(side) / len(side) for side in (ours, theirs))) ** 0.5
    assert (low + high) / 2 == pytest.approx(statistics.fmean(ours) - statistics.fmean(theirs))
    assert high - low == pytest.approx(2 * quantile * error * wider, rel=2e-4), "on the straight line between whole degrees"
    assert welch_interval([1.0], theirs) is None, "one number has no variance"
    assert welch_interval([1.0, 1.0], [2.0, 2.0]) is None


def test_a_difference_is_of_the_seeds_that_both_have():
    numbers = made_up([30, 40, 50])
    numbers["runs"]["other"] = {s: made_up([20, 50])["runs"]["grpo"][s] for s in ("0", "1")}
    points, interval, by_seed = difference(numbers, "grpo", "other")
    assert points == pytest.approx(0.35 - 0.35)
    assert interval == newcombe_interval(70, 200, 70, 200)
    assert by_seed == pytest.approx([0.1, -0.1])
    assert difference(numbers, "grpo", "missing") is None


def test_runs_of_other_seeds_and_variants_are_kept_beside_new_ones():
    same = {"recipe": "quickstart", "equal": "steps", "start_of": {}}
    kept, found = {**made_up([30, 40]), **same}, {**made_up([0, 0, 50]), **same}
    kept |= {"seeds": [0, 1], "variants": {"grpo": [], "old": ["a=1"], "changed": ["b=1"]}, "missing": ["old-1"]}
    kept["runs"] |= {"old": {"0": kept["runs"]["grpo"]["0"]}, "changed": kept["runs"]["grpo"]}
    found |= {"seeds": [2], "variants": {"grpo": [], "changed": ["b=2"]}, "missing": []}
    two = found["runs"]["grpo"]["2"]
    found["runs"] = {"grpo": {"2": two}, "changed": {"2": two}}
    both = beside(kept, found)
    assert both["seeds"] == [0, 1, 2]
    assert {name: list(runs) for name, runs in both["runs"].items()} == {"grpo": ["0", "1", "2"], "old": ["0"], "changed": ["2"]}
    assert both["runs"]["grpo"]["2"] == two
    assert both["runs"]["grpo"]["1"] == kept["runs"]["grpo"]["1"]
    assert both["missing"] == ["changed-0", "old-1", "changed-1"], "nobody asked for the old one with seed 2"
    assert set(both["starts"]) == {"0", "1", "2"}
    place = {"code": {"revision": "1234567890"}, "processor": "P", "torch": "2.13.0"}
    first, second, third = ({"environment": {"date": f"2026-11-0{day}", **place}} for day in (1, 2, 3))
    later = beside({**kept, **first}, {**found, **second})
    last = beside(later, {**found, **third, "seeds": [3], "runs": {"grpo": {"3": two}}})
    assert [one["date"] for one in last["earlier"]] == ["2026-11-02", "2026-11-01"]
    assert (
        describe(last)
        == "Measured " + "; some of it ".join(f"2026-11-0{n}, revision 1234567, P, torch 2.13.0" for n in (3, 2, 1)) + "."
    )
    assert beside(last, {**found, **third})["earlier"] == last["earlier"], "one place is told once"
    again = {**found, "runs": {"grpo": {"1": two}}, "seeds": [1]}
    assert beside(kept, again)["runs"]["grpo"]["1"] == two, "a seed that runs again takes the old one's place"
    with pytest.raises(SystemExit, match="the runs that are there had settings"):
        beside(kept, {**found, "settings": ["c=1"]})
    elsewhere = {"0": {"evaluations": [{"strict_accuracy": 0.9, "n": 100}]}}
    with pytest.raises(SystemExit, match="the runs of seed 0 that are there began with another warm start"):
        beside(kept, {**found, "starts": elsewhere})
    own = {**kept, "start_of": {"changed": "-own", "old": "-own"}, "starts": {**kept["starts"], "0-own": kept["starts"]["0"]}}
    assert beside(own, found)["start_of"] == {"old": "-own"}, "a variant that ran again begins where it says itself"


def test_runs_that_were_made_otherwise_are_not_kept_beside():
    """By other sums of batches, or by what no setting says. A file of earlier versions does not say it, and its runs are kept."""
    same = {"recipe": "quickstart", "equal": "steps", "start_of": {}, "missing": []}
    kept, found = ({**made_up([30, 40]), **same, "made": {"grpo": {"accumulated": 1, "before": None}}} for _ in range(2))
    found |= {"seeds": [1], "runs": {"grpo": {"1": found["runs"]["grpo"]["1"]}}}
    assert list(beside(kept, found)["runs"]["grpo"]) == ["0", "1"]
    for otherwise in ({"accumulated": 6, "before": None}, {"accumulated": 1, "before": "m:f"}):
        both = beside(kept, {**found, "made": {"grpo": otherwise}})
        assert (list(both["runs"]["grpo"]), both["missing"], both["made"]) == (["1"], ["grpo-0"], {"grpo": otherwise})
    earlier = {name: of for name, of in kept.items() if name != "made"}
    assert list(beside(earlier, found)["runs"]["grpo"]) == ["0", "1"]
    other = {**kept, "variants": {"old": []}, "runs": {"old": kept["runs"]["grpo"]}, "made": {"old": {"accumulated": 6}}}
    assert beside(other, found)["made"] == {"old": {"accumulated": 6}, **found["made"]}
    with pytest.raises(SystemExit, match="the runs that are there had before m:f, these have None"):
        beside({**kept, "before": "m:f"}, {**found, "before": None})
    assert beside(kept, {**found, "before": "m:f"})["before"] == "m:f", "a file of earlier versions does not say it"


def test_runs_of_a_recipe_that_has_changed_are_not_kept_beside(tmp_path, monkeypatch):
    """Budget, settings and the recipe's name are the same."""
    recipe, numbers = tmp_path / "own.yaml", {**made_up([30]), "start_of": {}}
    monkeypatch.setattr("experiments.comparison.run_all", lambda *given, **_: {**numbers, "budget": given[2].to_json()})

    def call(warm_start_steps, *options):
        recipe.write_text(dump_config(load_config("quickstart", [f"warm_start.steps={warm_start_steps}"])))
        compare(replace(FAULTS, recipe=str(recipe)), ["--out", str(tmp_path), *options])

    call(12)
    call(12, "--beside")
    with pytest.raises(SystemExit, match="the runs that are there had another recipe of this name: run all of them again"):
        call(6, "--beside")
    earlier = read_numbers("faults", tmp_path)
    del earlier["config"]
    (tmp_path / "faults.json").write_text(json.dumps(earlier))
    with pytest.raises(SystemExit, match="the runs that are there do not say what their recipe was"):
        call(12, "--beside")


def test_what_cannot_stand_beside_is_said_before_any_run(tmp_path, monkeypatch):
    def run_all(*_, **__):
        raise AssertionError("a run was started")

    monkeypatch.setattr("experiments.comparison.run_all", run_all)
    shutil.copy(FIGURES / "faults.json", tmp_path)
    with pytest.raises(SystemExit, match="--beside: the runs that are there had budget"):
        compare(FAULTS, ["--beside", "--steps", "7", "--out", str(tmp_path), "--work", str(tmp_path / "work")])


def test_runs_of_equal_steps_are_drawn_by_steps_however_many_batches_make_an_update():
    numbers = {**made_up([30, 40, 50]), "equal": "steps"}
    numbers["budget"] |= {"steps": 60, "completions": 960}
    run = numbers["runs"]["grpo"]["0"]
    run["curves"] = {**run["curves"], "accuracy/strict": [0.2] * 10}
    run["evaluations"] = [{**run["evaluations"][0], "step": 5}, {**run["evaluations"][0], "step": 10}]
    numbers["runs"] = {"grpo": {"0": run}}
    assert list(held_out(numbers, "grpo")) == [0, 30, 60]
    assert "held out, 30 steps" in report(numbers, "x")
    assert "completions in all" not in report(numbers, "x")


def test_every_preset_keeps_its_own_beta_in_the_recipe():
    for variant in CURVES.chosen([]):
        config = load_config("quickstart", list(variant.settings))
        assert config.algorithm.preset == variant.name
        assert config.algorithm.beta == (PRESETS[variant.name].values["kl"] or {"beta": 0.0})["beta"]


def test_every_fault_has_the_budget_of_the_recipe_and_differs_from_it():
    plain = load_config("quickstart", [*Budget().settings()])
    for variant in FAULTS.chosen([]):
        config = load_config("quickstart", [*Budget().settings(), *variant.settings])
        assert config.completions_per_step * config.training.steps == Budget().completions, variant.name
        assert (config == plain) == (variant.name == "recipe"), variant.name
    assert next(iter(FAULT_SETTINGS)) == "recipe"


def test_accumulated_batches_are_the_first_ones_and_steps_must_divide():
    budget = Budget(steps=12, prompts_per_step=2, completions_per_prompt=8, evaluate_every=6)
    six = budget.accumulated(6)
    assert six.completions == budget.completions
    assert (six.steps, six.evaluate_every) == (2, 1)
    one_by_one = [i for step in range(6) for i in problems_for_step(40, budget.prompts_per_step, step, seed=0)]
    assert problems_for_step(40, six.prompts_per_step, 0, seed=0) == one_by_one
    with pytest.raises(SystemExit, match="12 steps with an evaluation every 6 do not divide into updates of 5 batches"):
        budget.accumulated(5)


def test_variants_that_ask_differently_start_from_warm_starts_of_their_own(tiny_runs):
    call, carried_out, work = tiny_runs
    numbers = call(
        [Variant("concat", (), ("prompt.style=concat",)), Variant("chat", (), ("prompt.style=chat",)), Variant("again")]
    )
    starts = ["warm-start-0-prompt.style-concat", "warm-start-0-prompt.style-chat", "warm-start-0"]
    assert carried_out == [*starts, "concat-0", "chat-0", "again-0"]
    assert list(numbers["starts"]) == ["0-prompt.style-concat", "0-prompt.style-chat", "0"]
    assert all(len(held_out(numbers, name)[0]) == 1 for name in ("concat", "chat", "again"))
    made = {name: (work / f"{name}.model" / "model.safetensors").read_bytes() for name in starts}
    assert made[starts[0]] != made[starts[1]] == made[starts[2]], "chat is what the recipe says anyway"


def test_a_run_whose_start_failed_is_not_tried(tiny_runs, monkeypatch):
    """It would fail on a model that is not there, and its log would be about that."""
    call, carried_out, _ = tiny_runs
    here = runs._process
    monkeypatch.setattr(runs, "_process", lambda job, threads: "concat" not in job.name and here(job, threads))
    numbers = call([Variant("concat-asked", (), ("prompt.style=concat",)), Variant("again")])
    assert carried_out == ["warm-start-0", "again-0"]
    assert numbers["failed"] == ["warm-start-0-prompt.style-concat"]
    assert numbers["missing"] == ["concat-asked-0"]


def test_a_run_may_be_judged_before_its_first_step(tiny_runs):
    call, *_ = tiny_runs
    found = call([Variant("judged", ("evaluation.at_start=true",))])["runs"]["judged"]["0"]
    assert [row["step"] for row in found["evaluations"]] == [0, 1, 2]


def test_a_run_with_checkpoints_goes_on_where_it_was_stopped(tiny_runs, monkeypatch):
    call, _, work = tiny_runs
    whole = call([Variant("whole")])["runs"]["whole"]["0"]
    real, resumed = groupwise.train, []

    def stopped(config, **given):
        def stop(report):
            if report.step == 2:
                raise KeyboardInterrupt

        return real(config, **given, on_step=stop)

    parts = [Variant("parts", ("output.checkpoint_every=1", "output.checkpoint_in_background=false"))]
    monkeypatch.setattr(groupwise, "train", stopped)
    with pytest.raises((KeyboardInterrupt, StoppedError)):
        call(parts)
    monkeypatch.setattr(groupwise, "train", lambda config, **given: resumed.append(given["resume"]) or real(config, **given))
    found = call(parts)["runs"]["parts"]["0"]
    assert resumed == [True]
    assert found["curves"]["optimizer/grad_norm"] == whole["curves"]["optimizer/grad_norm"]
    assert found["curves"]["reward/mean"] == whole["curves"]["reward/mean"]
    assert [row["step"] for row in found["evaluations"]] == [1, 2]
    assert not [*work.glob("*.run"), *work.glob("*.begun")]


def test_runs_of_recipes_that_are_paid_otherwise_now_keep_the_rewards_that_those_on_the_pages_had():
    def rewards(job):
        return [one.function for one in load_config(job.recipe, list(job.settings)).rewards.functions]

    def jobs(recipe, *settings):
        start = warm_start_job(0, Budget(), Path("work"), settings, (), recipe)
        return start, grpo_job(Variant("plain"), 0, Budget(), Path("work"), settings, start)

    assert rewards(Job("", (), "")) == ["accuracy"], "the recipe's own"
    assert [one.function for one in load_config("gsm8k-1.5b-cpu").rewards.functions] == ["accuracy"]
    for recipe in ("quickstart", "gsm8k-1.5b-cpu"):
        assert [rewards(job) for job in jobs(recipe, "optimizer.warmup_steps=0")] == [["correctness", "format"]] * 2
    assert [rewards(job) for job in jobs("quickstart", "rewards.functions=[accuracy]")] == [["accuracy"]] * 2
    assert [rewards(job) for job in jobs("length-0.5b-2gpu")] == [["length"]] * 2
    for given in ([], ["--recipe", "gsm8k-1.5b-cpu"]):
        learnt = learning._config(learning.options().parse_args(given))
        assert [one.function for one in learnt.rewards.functions] == ["correctness", "format"]


def test_unknown_presets_are_refused():
    with pytest.raises(SystemExit, match="there is no preset 'grop'"):
        compare(CURVES, ["--presets", "grop"])
    with pytest.raises(SystemExit, match="there is no variant 'rate'"):
        compare(FAULTS, ["--variants", "rate"])


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda c: c.name)
def test_pages_show_the_numbers_that_are_committed(comparison):
    block = read_block(PAGE, comparison.name)
    if not (FIGURES / f"{comparison.name}.json").exists():
        assert block == "", "a table without its numbers"
        return
    numbers = read_numbers(comparison.name)
    assert block == comparison.experiment.report(numbers)
    assert set(numbers["failed"]) <= set(numbers["missing"])


def test_places_of_this_machine_are_not_written_into_results(tmp_path):
    kept = ["training.seed=0", "model.name=smollm2-135m-instruct", "algorithm.kl={beta: 0.04}", "data.folder=data"]
    assert [_without_place(setting) for setting in [*kept, f"model.name={tmp_path}"]] == [*kept, "model.name=FOLDER"]
