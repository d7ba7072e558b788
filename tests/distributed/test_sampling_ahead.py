"""Asynchronous rollouts in two processes: the run of one process, and resumed bit for bit, by two processes or by one."""

import json

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from groupwise import load_config
from groupwise.training.loop import train
from tests.distributed.test_processes import module_config  # noqa: F401
from tests.distributed.two_processes import launch_two, numbers, rows, weights
from tests.tiny import lower_case_share

SCRIPT = """
import sys
import torch
from pathlib import Path
from rich.console import Console
from groupwise import load_config
from groupwise.training.loop import train
from tests.tiny import lower_case_share
torch.set_num_threads(1)
folder = Path(sys.argv[2])
config = load_config(folder / "config.yaml")
go = {"rewards": {"letters": lower_case_share}, "console": Console(quiet=True)}
train(config, run_folder=folder / "whole", **go)
train(config, run_folder=folder / "resumed", resume_from=folder / "whole/checkpoints/step-3", **go)
"""


@pytest.mark.slow
def test_two_processes_sample_ahead_as_one(module_config, tmp_path):  # noqa: F811
    config = module_config.model_copy(update={"rollout": module_config.rollout.model_copy(update={"ahead": 2})})
    (tmp_path / "go.py").write_text(SCRIPT)
    assert launch_two(config, tmp_path, script=tmp_path / "go.py") == 0
    go = {"rewards": {"letters": lower_case_share}, "console": Console(quiet=True)}
    config = load_config(tmp_path / "config.yaml")
    one = train(config, run_folder=tmp_path / "one", **go).folder
    alone = train(config, run_folder=tmp_path / "alone", resume_from=tmp_path / "whole/checkpoints/step-3", **go).folder
    two, resumed = tmp_path / "whole", tmp_path / "resumed"
    said = ("problem", "sample", "completion", "policy_version", "reward")
    assert [[r[k] for k in said] for r in rows(one / "completions.jsonl")] == [
        [r[k] for k in said] for r in rows(two / "completions.jsonl")
    ]
    assert [row["rollout/staleness"] for row in numbers(two)] == [0, 1, 2, 2, 2]
    assert numbers(resumed) == numbers(two)[3:]
    assert all(torch.equal(w, weights(resumed)[name]) for name, w in weights(two).items())
    for name, w in weights(two).items():
        torch.testing.assert_close(weights(one)[name], w, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(weights(alone)[name], w, rtol=1e-4, atol=2e-5)
    held = load_file(two / "checkpoints/step-3/part-ahead.safetensors")
    assert {name.split(".")[0] for name in held} == {"batch"}, "what is under way is finished first"
    state = json.loads((two / "checkpoints/step-3/state.json").read_text())
    assert [len(row["places"]) for row in state["parts"]["ahead"]["batches"]] == [3, 3]
