"""The examples that docs/how-to/rewards.md names run: here on tiny models, for a step or two."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "rewards"
FENCE = re.compile(r"^```(?:yaml|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILES = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".yaml"))


@pytest.fixture
def overrides(small, problems):
    """Settings that make an example a run of a second; its rewards and its algorithm stay as they are."""
    own = ("algorithm",)
    return [
        *(word for word in small if not word.startswith(own)),
        "prompt.system=none",
        "evaluation.every=0",
        "training.steps=1",
    ]


def test_the_page_names_every_example():
    page = (ROOT / "docs" / "how-to" / "rewards.md").read_text(encoding="utf-8")
    assert FILES == ["equations.py", "from_python.py", "mixed.yaml", "own_function.yaml", "reward_model.yaml"]
    assert [name for name in FILES if f"(../../examples/rewards/{name})" not in page] == []


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".yaml")])
def test_an_example_runs(name, groupwise, overrides, judge, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    entries = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))["rewards"]["functions"]
    judges = [i for i, entry in enumerate(entries) if isinstance(entry, dict) and "model" in entry]
    here = [f"rewards.functions[{i}].model.name={judge}" for i in judges]
    result = groupwise("train", EXAMPLES / name, *overrides, *here, "--run-folder", tmp_path / "run")
    assert result.exit_code == 0, result.output
    step = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    called = [entry if isinstance(entry, str) else entry.get("function", "judge").rpartition(":")[2] for entry in entries]
    assert {name.removeprefix("reward/") for name in step if name.startswith("reward/")} - {"mean", "std"} <= set(called)
    assert [row["components"].keys() for row in rows(tmp_path / "run")] == [dict.fromkeys(called).keys()] * 4


def rows(folder):
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]


def test_the_script_runs(overrides, judge, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["from_python.py", str(judge), *overrides, f"output.folder={tmp_path / 'run'}"])
    monkeypatch.syspath_prepend(str(EXAMPLES))
    runpy.run_path(str(EXAMPLES / "from_python.py"), run_name="__main__")
    assert str(tmp_path / "run") in capsys.readouterr().out
    found = rows(tmp_path / "run")
    assert all(set(row["components"]) == {"correctness", "true_equations", "asks_somebody", "lambda", "judge"} for row in found)
    assert all(row["components"]["lambda"] == -row["tokens"] / 100 for row in found)


def test_trying_a_judge_without_a_run(judge):
    """The page's function, as it stands there."""
    from groupwise import RewardModel

    space = {}
    exec(
        next(
            text
            for text in FENCE.findall((ROOT / "docs" / "how-to" / "rewards.md").read_text(encoding="utf-8"))
            if "def compare" in text
        ),
        space,
    )
    found = space["compare"](str(judge), "How are you?", "fine", "not so well")
    model = RewardModel(judge, max_input_tokens=1024)
    assert found == pytest.approx({a: model(["How are you?"], [a])[0] for a in ("fine", "not so well")}, abs=1e-4)


def test_true_equations(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from equations import true_equations

    texts = ["3 + 4 = 7", "3 x 4 = 13 and 3*4=12", "2 - 5 = -3", "no sums", "3 + 4 is 7"]
    assert true_equations(texts) == [1.0, 0.5, 1.0, None, None]
