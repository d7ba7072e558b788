"""The notebooks run: in `make test` on a tiny random model, in `make soak` as they are, on the embedded one."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest

from tests.tiny import write_tiny_llama

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
FAST = [
    "model.dtype=float32",
    "model.device=cpu",
    "prompt.system=none",
    "rollout.max_completion_tokens=8",
    "data.arithmetic.problems=50",
    "data.holdout=10",
]


def cells(path, kind="code"):
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


def execute(path, **parameters):
    """Every code cell in one name space, the parameters' replaced; returns what was printed and the names."""
    names, printed = {"__name__": "__main__"}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        for number, cell in enumerate(cells(path)):
            exec(compile("".join(cell["source"]), f"{path.name}, code cell {number}", "exec"), names)
            if "parameters" in cell["metadata"].get("tags", ()):
                assert parameters.keys() <= names.keys(), "a parameter that the notebook does not have"
                names.update(parameters)
    return printed.getvalue(), names


def test_all_are_there_and_the_table_names_them():
    assert [path.stem for path in NOTEBOOKS] == re.findall(
        r"^\| \[([\w-]+)\]\(", (FOLDER / "README.md").read_text(), re.MULTILINE
    )
    assert len(NOTEBOOKS) == 5


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_are_stripped_and_parameters_come_first(path):
    code = cells(path)
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert ["parameters" in cell["metadata"].get("tags", ()) for cell in code] == [True] + [False] * (len(code) - 1)
    for text in ("".join(cell["source"]) for cell in cells(path, "markdown")):
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert (path.parent / link).exists(), link


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_llama(tmp_path_factory.mktemp("tiny"), max_position_embeddings=1024)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_a_tiny_model(path, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed, names = execute(path, model=str(tiny), steps=1, extra=FAST)
    check(path, printed, names)


@pytest.mark.soak
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_as_it_is(path, embedded_model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check(path, *execute(path))


def check(path, printed, names):
    """What each notebook's text claims of what is printed."""
    if path.stem.startswith("01"):
        assert "sum of advantages: 0.0" in printed.replace("-0.0", "0.0")
        assert [*names["result"].evaluations["stage"]][:3] == ["base", "warm_start", "final"]
    elif path.stem.startswith("02"):
        scores = names["closeness"](completions=names["chats"], answer=["19"] * len(names["chats"]))
        assert scores[0] == scores[1] == scores[-1] == scores[-2] == 1.0 > scores[2] > scores[3] > scores[4] == 0.0
        assert all({"reward/closeness", "reward/format"} <= metrics.keys() for metrics in names["rows"])
    elif path.stem.startswith("03"):
        assert names["run"].last_step == names["steps"]
        assert names["page"].path.is_file()
        assert "exact McNemar test" in printed
    elif path.stem.startswith("05"):
        assert "Tools: price(item): Looks up the price of an item, in cents. calculator(expression)" in printed
        assert re.search(r"ended by \w+; \d+ of \d+ tokens learn", printed)
        assert "16 -> " in printed
        assert "-> Right. 1.0" in printed
        assert re.search(r"final: success \d+% \[\d+%, \d+%\], turns \d", printed)
    else:
        assert "GRPO, one number an answer: [0.87, -0.87, -0.87, 0.87]" in printed
        assert "a value that knows, lambda 0.0: right [0.0, 0.0, 0.5, 0.0]" in printed
        assert "a value that knows nothing, lambda 1.0: right [1.0, 1.0, 1.0, 1.0], wrong [0.0, 0.0, 0.0, 0.0]" in printed
        assert "the last one, whitened: right [0.97, 0.97, 0.97, 0.97], wrong [-0.97, -0.97, -0.97, -0.97]" in printed
        assert names["first"]["grpo"] == names["first"]["ppo"]
        assert len(set(names["by_token"])) > 1, "PPO's, token by token"
        assert any(name.startswith("value/") for name in names["runs"]["ppo"][1][-1].metrics)
