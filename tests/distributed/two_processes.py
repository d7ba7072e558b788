"""Two real processes over gloo, and what a run of theirs is compared by with that of one."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from safetensors.torch import load_file

from groupwise.config.schema import Config
from groupwise.distributed.launch import launch
from groupwise.training.loop import train
from tests.distributed.run_ranks import letters
from tests.distributed.test_same_curve import CLOCKS
from tests.warm import python

__all__ = [
    "assert_same_bits", "assert_same_numbers", "assert_same_run", "launch_two", "numbers", "on_from_step_3", "rows", "said", "weights",
]  # fmt: skip

HERE = Path(__file__).parent


def launch_two(
    config: Config, folder: Path, *arguments: Path | str, script: Path = HERE / "run_ranks.py", program: str | None = None
) -> int:
    """The exit code of ``script CONFIG.yaml ARGUMENTS``, by itself ``run_ranks.py CONFIG.yaml FOLDER``, in two processes at once.

    ``program``: the Python that runs them, by itself the warm one.
    """
    (folder / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [program or python(), str(script), str(folder / "config.yaml"), *map(str, arguments or [folder])]
    return launch(command, 2, environment)


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def numbers(folder: Path) -> list[dict[str, Any]]:
    """A run's metrics, step by step, without times."""
    return [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in rows(folder / "metrics.jsonl")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "final_model" / "model.safetensors")


def said(folder: Path) -> list[list[Any]]:
    """A run's completions: of which problem, their tokens, and what they were worth."""
    names = ("problem", "sample", "completion", "tokens", "reward")
    return [[row[name] for name in names] for row in rows(folder / "completions.jsonl")]


def assert_same_run(one: Path, two: Path, *, without: str = "") -> None:
    """Completions token for token; metrics (but ``without``) and the last weights to fp32 rounding."""
    assert said(one) == said(two)
    assert_same_numbers(numbers(one), numbers(two), without)
    for name, values in weights(one).items():
        torch.testing.assert_close(
            weights(two)[name], values, rtol=1e-4, atol=2e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same_numbers(one: list[dict[str, Any]], two: list[dict[str, Any]], without: str = "") -> None:
    for row, other in zip(one, two, strict=True):
        assert other == pytest.approx({name: row[name] for name in row if name != without}, rel=1e-4, abs=2e-6)


def assert_same_bits(folder: Path) -> None:
    """What ``run_ranks.py`` resumed with from its checkpoint is what it had gone through before."""
    assert numbers(folder / "resumed") == numbers(folder / "whole")[3:]
    whole, resumed = weights(folder / "whole"), weights(folder / "resumed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def on_from_step_3(config: Config, folder: Path, target: Path) -> Path:
    """One process resumes from the checkpoint that ``run_ranks.py`` left; its folder."""
    return train(
        config, rewards={"letters": letters}, run_folder=target, console=Console(quiet=True),
        resume_from=folder / "whole/checkpoints/step-3",
    ).folder  # fmt: skip
