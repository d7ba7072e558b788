"""``groupwise doctor``: on a recipe, on runs going on and over, as text and as JSON, with exit codes for scripts."""

import importlib.util
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import groupwise
from groupwise.cli import app
from groupwise.doctor import RULES
from groupwise.errors import ConfigError

from .miniature_runs import Story, write_run

ROOT = Path(__file__).resolve().parents[2]


def doctor(*words):
    result = CliRunner().invoke(app, ["doctor", *map(str, words)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_healthy_run_exits_with_0_and_says_so(tmp_path):
    result = doctor(write_run(tmp_path / "run"))
    assert result.exit_code == 0
    assert "60 steps, finished" in result.stdout
    assert "No problem found" in result.stdout


def test_a_run_without_steps_is_not_called_healthy(tmp_path):
    folder = write_run(tmp_path / "run", Story(finished=False))
    for name in ("metrics.jsonl", "completions.jsonl"):
        (folder / name).unlink()
    result = doctor(folder)
    assert result.exit_code == 0
    assert "0 steps, not finished" in result.stdout
    assert "Nothing to judge yet: 0 steps." in result.stdout
    assert "No problem found" not in result.stdout
    assert json.loads(doctor(folder, "--json").stdout)["verdict"] == "Nothing to judge yet: 0 steps"


def test_an_ill_run_exits_with_1_and_shows_disease_meaning_remedy_and_example(tmp_path):
    story = Story(
        metrics=lambda step, p: {"policy/ratio_deviation": 0.3, "completions/stop_rate": 0.0, "completions/truncated": 1.0}
    )
    result = doctor(write_run(tmp_path / "run", story), "--examples", 2)
    assert result.exit_code == 1
    assert "CRITICAL  No completion ever ends by itself" in result.stdout
    for word in ("found ", "means ", "do "):
        assert f"\n  {word}" in result.stdout


def test_json_has_every_finding_whole(tmp_path):
    made = json.loads(doctor(write_run(tmp_path / "run", Story(version=lambda step: 0)), "--json").stdout)
    assert (made["steps"], made["verdict"]) == (60, "Problems found")
    (stale,) = [finding for finding in made["findings"] if finding["rule"] == "sampler-stale"]
    assert set(stale) == {"rule", "title", "severity", "summary", "meaning", "remedy", "steps", "numbers", "examples"}
    assert len(stale["examples"]) == 3


def test_a_run_that_is_still_writing_is_read_as_far_as_it_is(tmp_path):
    folder = write_run(tmp_path / "run", Story(finished=False))
    for name in ("metrics.jsonl", "completions.jsonl"):
        whole = (folder / name).read_bytes()
        (folder / name).write_bytes(whole[:-40])  # in the middle of the last line
    result = doctor(folder)
    assert result.exit_code == 0
    assert "59 steps, not finished" in result.stdout
    assert "could not be read" not in result.stdout


def test_lines_that_are_no_records_are_counted_and_left_out(tmp_path):
    folder = write_run(tmp_path / "run")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": "seven"}\n[1, 2]\n\xff\xfe\n{"step": 61, "reward/mean": 2.0}\n')
    result = doctor(folder)
    assert "3 of metrics.jsonl" in result.stdout
    assert "61 steps" in result.stdout


@pytest.mark.parametrize("what", ["nowhere", "empty"])
def test_what_is_no_run_is_refused_in_a_sentence(tmp_path, what):
    (tmp_path / "empty").mkdir()
    result = doctor(tmp_path / what)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_folder_of_a_recipe_s_name_hides_it_only_where_it_is_a_run(tmp_path, monkeypatch):
    def recipe_wanted(*given, **more):
        raise ConfigError("the recipe is looked at")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()
    with monkeypatch.context() as patch:
        for place in ("groupwise.config.load_config", "groupwise.api.prepare"):
            patch.setattr(place, recipe_wanted)
        assert "the recipe is looked at" in doctor("quickstart").stderr
        with pytest.raises(ConfigError, match="the recipe is looked at"):
            groupwise.diagnose("quickstart")
    write_run(tmp_path / "quickstart")
    assert "60 steps, finished" in doctor("quickstart").stdout
    assert not [finding for finding in groupwise.diagnose("quickstart") if finding.severity == "critical"]


def test_settings_cannot_be_changed_on_a_run_that_was(tmp_path):
    result = doctor(write_run(tmp_path / "run"), "training.steps=3")
    assert result.exit_code == 2
    assert "leave it out" in result.stderr


def test_text_of_a_model_cannot_act_on_the_terminal(tmp_path):
    story = Story(metrics=lambda step, p: {"completions/stop_rate": 0.0, "completions/truncated": 1.0})
    folder = write_run(tmp_path / "run", story)
    lines = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {"completion": "\x1b[2J[bold]gone", "problem": "\x1b]0;title\x07", "finish_reason": "length"}
    (folder / "completions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = doctor(folder).stdout
    assert "\\x1b[2J[bold]gone" in shown
    assert "\x1b]0" not in shown


@pytest.mark.slow
def test_the_quickstart_recipe_is_fit_to_run(embedded_model_folder):
    few = "data.arithmetic.problems=600"
    result = doctor("quickstart", few)
    assert result.exit_code == 0, result.stdout
    assert "No problem found" in result.stdout
    ill = doctor("quickstart", few, "rewards.functions=[boxed_format]")
    assert ill.exit_code == 1
    assert "does not tell right from wrong" in ill.stdout


def test_the_page_about_the_doctor_has_every_rule():
    spec = importlib.util.spec_from_file_location("write_doctor_docs", ROOT / "scripts" / "write_doctor_docs.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = script.PAGE.read_text(encoding="utf-8")
    assert page == script.render(page), "run python scripts/write_doctor_docs.py"
    assert all(f"- `{rule.name}` ({rule.severity}): " in page for rule in RULES)
