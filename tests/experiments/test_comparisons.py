"""Comparisons of runs: they start alike, are kept when finished, and their figures and tables say what the numbers say."""

import pytest

pytest.importorskip("matplotlib")

from experiments import runs
from experiments.ahead import COMPARISON as AHEAD
from experiments.common import FIGURES, PAGE, read_block, read_numbers
from experiments.comparison import compare, draw, held_out, pooled, report
from experiments.faults import COMPARISON as FAULTS
from experiments.faults import VARIANTS as FAULT_SETTINGS
from experiments.faults import variants as faults
from experiments.learning_curves import COMPARISON as CURVES
from experiments.learning_curves import presets
from experiments.runs import Budget, Variant, run_all
from groupwise import load_config
from groupwise.config.presets import PRESETS

COMPARISONS = [CURVES, FAULTS, AHEAD]


@pytest.fixture
def tiny_runs(tiny_folder, sums, tmp_path, monkeypatch):
    """``run_all`` over a random model, in this process; with the list of jobs that were carried out."""
    carried_out = []

    def here(job, threads):
        carried_out.append(job.name)
        runs.carry_out(job)
        return job.done

    monkeypatch.setattr(runs, "_process", here)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    settings = [f"data.source={sums}", "data.holdout=4", "prompt.system=none", "rollout.max_completion_tokens=4",
                "model.dtype=float32", "rewards.functions=[{function: length, arguments: {target: 3}}]"]  # fmt: skip
    budget = Budget(steps=2, prompts_per_step=2, completions_per_prompt=2, evaluate_every=1, problems=4)

    first = [f"model.name={tiny_folder}", "warm_start.steps=1", "warm_start.examples_per_step=2"]
    real = runs.warm_start_job
    monkeypatch.setattr(runs, "warm_start_job", lambda s, b, w, given=(): real(s, b, w, [*given, *first]))

    def call(variants):
        return run_all(variants, [0], budget, tmp_path / "work", jobs=1, settings=settings)

    return call, carried_out, tmp_path / "work"


def test_runs_share_a_start_are_kept_and_repeated_only_when_their_settings_change(tiny_runs, tmp_path):
    call, carried_out, work = tiny_runs
    numbers = call([Variant("grpo", ("algorithm.preset=grpo",)), Variant("rloo", ("algorithm.preset=rloo",))])
    assert carried_out == ["warm-start-0", "grpo-0", "rloo-0"]
    assert numbers["failed"] == numbers["missing"] == []
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
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[1:3] == ["20% (20% to 20%)", "40% (30% to 50%)"]
    assert cells[4:] == ["50%", "3", "67%", "3.0"], "the last step, median norm, two of three norms above 1, seconds"


def test_every_preset_keeps_its_own_beta_in_the_recipe():
    for variant in presets([]):
        config = load_config("quickstart", list(variant.settings))
        assert config.algorithm.preset == variant.name
        assert config.algorithm.beta == (PRESETS[variant.name].values["kl"] or {"beta": 0.0})["beta"]


def test_every_fault_has_the_budget_of_the_recipe_and_differs_from_it():
    plain = load_config("quickstart", [*Budget().settings()])
    for variant in faults([]):
        config = load_config("quickstart", [*Budget().settings(), *variant.settings])
        assert config.completions_per_step * config.training.steps == Budget().completions, variant.name
        assert (config == plain) == (variant.name == "recipe"), variant.name
    assert next(iter(FAULT_SETTINGS)) == "recipe"


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
