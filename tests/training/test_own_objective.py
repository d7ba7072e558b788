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
