"""A few steps of a run beside its plan."""

import json
from types import SimpleNamespace

import pytest

from groupwise.cli.plan import _fullest
from groupwise.config import load_config
from groupwise.models.native.build import Kernels
from groupwise.planner.state import Item, Phase
from groupwise.training import setup
from groupwise.training.trial import trial_settings


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """An empty working folder, and an empty folder for temporary files; whatever is left in either is found."""
    place = tmp_path / "place"
    (place / "temporary").mkdir(parents=True)
    monkeypatch.chdir(place)
    monkeypatch.setattr("tempfile.tempdir", str(place / "temporary"))
    return place


def left_behind(place):
    return [path.name for path in place.rglob("*") if path.name != "temporary"]


def test_steps_are_measured_beside_the_plan_and_nothing_is_left(groupwise, small, nowhere):
    result = groupwise("bench", "quickstart", *small, "--steps", "3", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    measured, planned, sides = found["measured"], found["planned"], found["side_by_side"]
    assert measured["steps"] == 3
    assert measured["processes"] == planned["world_size"] == 1
    assert 7 < measured["completion_tokens"] <= 8, "noise hardly ever ends by itself, even where one token in 264 would end it"
    assert 0 < measured["sampling_s"] + measured["learning_s"] + measured["optimizer_s"] <= measured["step_s"]
    assert measured["learnt_tokens_per_s"] > 0, "groups of noise have something to learn from"
    memory = sides["peak memory, GiB"]
    assert memory["measured"] == measured["peak_bytes"] / 2**30
    steps = [phase["bytes"] for phase in planned["phases"] if phase["name"] != "evaluation"]  # a trial judges nothing
    assert memory["planned"] == max(steps) / 2**30
    assert memory["ratio"] == pytest.approx(memory["planned"] / memory["measured"])
    assert sides["communication, s"]["planned"] == 0
    assert sides["communication, s"]["ratio"] is None
    assert left_behind(nowhere) == []


def test_a_whole_run_is_measured_by_phase(groupwise, small, nowhere):
    whole = ("bench", "quickstart", *small, "warm_start.steps=1", "evaluation.problems=4", "--steps", "2", "--whole", "--json")
    result = groupwise(*whole)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    planned = {phase["name"]: phase["bytes"] for phase in found["planned"]["phases"]}
    peaks = found["measured"]["phase_bytes"]
    assert peaks.keys() == {"loading", "warm start", "checkpoint", "learning", "evaluation", "final model"}, (
        "sampled beside checkpoints"
    )
    assert max(peaks.values()) <= found["measured"]["peak_bytes"]
    assert len(found["measured"]["step_bytes"]) == 2
    memory = found["side_by_side"]["peak memory, GiB"]
    assert memory["planned"] == max(planned.values()) / 2**30
    assert found["side_by_side"]["- evaluation, GiB"]["planned"] == planned["evaluation"] / 2**30
    assert left_behind(nowhere) == []


def test_what_only_a_whole_trial_does_counts_in_the_peak_of_no_other():
    sizes = {"loading": 1, "learning": 2, "evaluation": 3, "final model": 4, "warm start": 5}
    planned = SimpleNamespace(phases=[Phase(name, (Item("part", size, ""),)) for name, size in sizes.items()])
    assert [_fullest(planned, whole).name for whole in (False, True)] == ["learning", "warm start"]


def test_a_trial_of_a_run_in_epochs_makes_the_steps_that_it_is_asked_for():
    training = load_config("quickstart", ["training.epochs=3", *trial_settings(2)]).training
    load_config("quickstart", ["rollout.engine=vllm", *trial_settings(2, by_vllm=True)])  # takes no temperature above 2
    assert (training.steps, training.epochs) == (2, None)


def test_the_plan_is_for_the_lengths_that_there_were(groupwise, small, nowhere):
    found = json.loads(groupwise("bench", "quickstart", *small, "--as-written", "--json").stdout)
    assert any(
        f"prompts of {found['measured']['prompt_tokens']} tokens (given)" in line for line in found["planned"]["assumptions"]
    )
    assert any(
        f"completions of {round(found['measured']['completion_tokens'])} tokens" in line
        for line in found["planned"]["assumptions"]
    )


def test_a_gpu_that_pytorch_cannot_use_is_told_and_not_planned_for(groupwise, small, nowhere, monkeypatch):
    def found():
        return "NVIDIA H100 80GB HBM3", 81559 * 2**20

    monkeypatch.setattr("groupwise.planner.hardware.present_gpu", found)
    monkeypatch.setattr("groupwise.training.setup.present_gpu", found)
    result = groupwise("bench", "quickstart", *small, "model.device=auto", "--steps", "1", "--json")
    assert json.loads(result.stdout)["planned"]["device"] == "cpu"
    assert "this machine has a GPU (NVIDIA H100 80GB HBM3), but this PyTorch" in " ".join(result.stderr.split())


def test_a_missing_compiler_is_told(groupwise, small, nowhere, monkeypatch):
    """Without native kernels a run on a CPU is slower, and nothing else would say why."""
    monkeypatch.setattr(
        "groupwise.training.setup.kernels", lambda: Kernels(None, "no C compiler found (cc, gcc or clang)", failed=True)
    )
    result = groupwise("bench", "quickstart", *small, "--steps", "1")
    assert "no C compiler found (cc, gcc or clang). PyTorch's operations take their place" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("said", "helps"), [("no C compiler found (cc, gcc or clang)", True), ("could not be compiled: No space left", False)]
)
def test_a_compiler_is_the_remedy_where_there_is_none(monkeypatch, said, helps):
    monkeypatch.setattr(setup, "kernels", lambda: Kernels(None, said, failed=True))
    note = setup._note_on_missing_kernels(load_config(None, {"model.device": "cpu"}))
    assert said in note
    assert ("apt install gcc" in note) is helps


def test_a_table_for_people(groupwise, small, nowhere):
    result = groupwise("bench", "quickstart", *small, "beta=0.04", "--steps", "1")
    assert result.exit_code == 0, result.output
    assert "planned / measured" in result.stdout
    assert "1 step, one process; prompts of at most" in result.stdout
    notes = result.stdout.partition("trial:")[0]
    assert "temperature" not in notes, "a trial has reasons of its own for it"


def test_a_recipe_s_schedule_and_services_do_not_stand_in_the_way(groupwise, small, nowhere):
    """Warm-up and outer iterations of a long run, a dashboard, checkpoints: none of it belongs to a trial."""
    long = [
        "training.steps=1000", "warmup_steps=100", "algorithm.kl.reference_updates=10", "beta=0.04", "evaluation.every=1",
        "output.checkpoint_every=1", "output.trackers=[wandb]", "warm_start.steps=5",
    ]  # fmt: skip
    result = groupwise("bench", "quickstart", *small, *long, "--steps", "2", "--json")
    assert result.exit_code == 0, result.output
    assert left_behind(nowhere) == []


def test_mistakes_are_told_before_any_work(groupwise, small):
    result = groupwise("bench", "quickstart", *small, "rollout.temprature=2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "temperature" in result.stderr
