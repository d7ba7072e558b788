"""The page on own losses: its functions train a model, named by their places."""

import json
import re
from pathlib import Path

import pytest

from groupwise import train
from groupwise.errors import ConfigError
from groupwise.training.setup import prepare

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "own-loss.md"
BLOCK = re.compile(r"^```python\n# (my_\w+\.py)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture
def folder(tmp_path):
    for name, code in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        (tmp_path / name).write_text(code, encoding="utf-8")
    return tmp_path


def test_a_run_learns_by_the_functions_of_the_page(small_config, letters, quiet, folder):
    algorithm = {
        "loss": {"type": f"{folder / 'my_loss.py'}:loss", "settings": {"epsilon": 1e-6}},
        "advantage": {"type": f"{folder / 'my_advantage.py'}:ranks"},
        "kl": None,
        "updates_per_batch": 2,
    }
    config = small_config(algorithm=algorithm, optimizer={"learning_rate": 1e-2})
    result = train(config, rewards=letters, console=quiet, run_folder=folder / "run")
    rows = [json.loads(line) for line in (result.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(row["optimizer/grad_norm"] > 0 for row in rows)
    assert all(row["loss/outside"] == pytest.approx(row["policy/clip_share"]) for row in rows)
    assert all(row["policy/clip_share"] > 0.2 for row in rows), "nearly every token has moved by the second update"
    first = json.loads((result.folder / "completions.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert (2 * first["advantage"]).is_integer()


def test_what_is_wrong_is_said_before_any_weights_are_read(small_config, letters, folder):
    config = small_config(algorithm={"loss": {"type": f"{folder / 'my_loss.py'}:loss", "settings": {"epsilom": 0.2}}})
    with pytest.raises(ConfigError, match=r"did you mean 'epsilon'"):
        prepare(config, letters)


def test_a_run_learns_values_for_an_advantage_of_ones_own(small_config, letters, quiet, folder):
    path = folder / "with_values.py"
    path.write_text(
        "from groupwise.algorithm import AdvantageOutputs, needs\n"
        "@needs('values')\n"
        "def surprise(inputs):\n"
        "    rewards_T = inputs.rewards_N[inputs.sequence_T]\n"
        "    return AdvantageOutputs(advantages_T=rewards_T - inputs.values_T, returns_T=rewards_T)\n",
        encoding="utf-8",
    )
    algorithm = {"advantage": {"type": f"{path}:surprise"}, "value": {"learning_rate": 0.01}, "kl": None}
    config = small_config(algorithm=algorithm, training={"steps": 8})
    result = train(config, rewards=letters, console=quiet, run_folder=folder / "run")
    rows = [json.loads(line) for line in (result.folder / "completions.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows[0]["advantage"] == pytest.approx(rows[0]["reward"]), "values begin at 0"
    assert abs(rows[-1]["advantage"] - rows[-1]["reward"]) > 1e-3, "and learn"
