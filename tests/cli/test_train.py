"""The whole pipeline in miniature through the command line."""

import json

import pytest
import yaml

from groupwise.config import load_config


def test_a_run_trains_and_leaves_a_folder_that_the_other_commands_take(groupwise, small, tmp_path):
    folder = tmp_path / "run"
    result = groupwise("train", "quickstart", *small, "--run-folder", folder, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["folder"] == str(folder)
    assert [row["stage"] for row in found["summary"]["evaluations"]] == ["base", "final"]
    assert found["summary"]["recipe"] == "quickstart"
    assert json.loads((folder / "summary.json").read_text(encoding="utf-8"))["evaluations"] == found["summary"]["evaluations"]
    assert load_config(folder / "config.yaml") == load_config("quickstart", small)
    assert len((folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 2

    judged = json.loads(groupwise("eval", folder, "evaluation.modes=[greedy]", "--json").stdout)["evaluations"]
    after = next(row for row in found["summary"]["greedy_evaluations"] if row["stage"] == "final")
    assert judged[0]["n"] == after["n"] == 4
    assert judged[0]["mean_tokens"] == after["mean_tokens"], "the saved model answers as the trained one did"

    answer = groupwise("generate", folder, "1 + 2 = ?", "--max-tokens", "4")
    assert answer.exit_code == 0, answer.output


def test_a_run_s_folder_is_named_after_the_recipe_whatever_dots_it_has(groupwise, small, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [*small, "training.steps=1", "evaluation.at_start=false", "evaluation.modes=[greedy]", "data.eval_split=null"]
    result = groupwise("train", "gsm8k-1.5b-24gb", *words, "warmup_steps=0")
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("gsm8k-1.5b-24gb-")


def test_a_used_run_folder_is_refused_before_anything_is_lost(groupwise, small, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work", encoding="utf-8")
    result = groupwise("train", "quickstart", *small, "--run-folder", folder)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "name another with --run-folder PATH" in result.stderr
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(("rank", "launched", "lines"), [("0", True, 1), ("1", True, 0), ("1", False, 1)])
def test_one_process_of_several_tells_that_there_is_nothing_to_resume(
    groupwise, small, tmp_path, monkeypatch, rank, launched, lines
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", "2")
    if launched:
        monkeypatch.setenv("GROUPWISE_LAUNCHER", "1")
    result = groupwise("train", "quickstart", *small, "--num-processes", "2", "--resume")
    assert result.exit_code == 2
    assert result.stderr.count("no run of quickstart was found") == lines


def test_a_config_file_of_one_s_own_runs(groupwise, small, tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(yaml.safe_dump(load_config("quickstart", small).model_dump(mode="json")), encoding="utf-8")
    folder = tmp_path / "run"
    result = groupwise("train", mine, "training.steps=1", "--run-folder", folder, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["summary"]["recipe"] == "mine"


def test_the_same_from_python_with_a_callback(small, tmp_path, capsys):
    from groupwise import load_config, train

    seen = []
    result = train(load_config("quickstart", small), run_folder=tmp_path / "run", on_step=seen.append)
    assert [report.step for report in seen] == [1, 2]
    assert result.folder == tmp_path / "run"
    assert result.summary["evaluations"]


@pytest.mark.parametrize("name", ["quickstart", "gsm8k-0.5b", "polaris-3b"])
def test_a_source_that_is_neither_recipe_nor_file_is_told_before_anything_is_imported(groupwise, name):
    result = groupwise("train", name + "x")
    assert result.exit_code == 2
    assert f"did you mean {name}?" in result.stderr


def test_generate_answers_as_long_as_the_run_trained_it_to(groupwise, small, tmp_path):
    folder = tmp_path / "run"
    assert groupwise("train", "quickstart", *small, "training.steps=0", "--run-folder", folder).exit_code == 0
    short = groupwise("generate", folder, "1 + 2 = ?", "--greedy").stdout
    assert short == groupwise("generate", folder, "1 + 2 = ?", "--greedy", "--max-tokens", "8").stdout
    assert short != groupwise("generate", folder, "1 + 2 = ?", "--greedy", "--max-tokens", "40").stdout
