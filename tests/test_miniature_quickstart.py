"""The quickstart as a newcomer runs it, through the command line and on the embedded model; only shorter."""

import json
import os
import subprocess

import pytest

from tests.warm import python

SHORTER = [
    "data.arithmetic.problems=300",
    "warm_start.steps=2",
    "warm_start.examples_per_step=2",
    "training.steps=2",
    "rollout.prompts_per_step=2",
    "rollout.completions_per_prompt=2",
    "rollout.max_completion_tokens=8",
    "evaluation.problems=4",
    "evaluation.max_completion_tokens=8",
    "rewards.functions=[{function: mine.py:place}]",
]
REWARD = """
def place(completions, **columns):
    return [float(index) for index, _ in enumerate(completions)]
"""
"""Two completions never have the same: in eight tokens nobody is right, and from equal rewards nothing is learnt."""


def groupwise(*words, cwd):
    """The command line in a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    return subprocess.run(
        [python(), "-m", "groupwise", *map(str, words)],
        cwd=cwd,
        env=environment,
        text=True,
        capture_output=True,
        timeout=600,
    )


@pytest.mark.slow
def test_train_eval_and_generate_on_the_embedded_model(embedded_model_folder, tmp_path):
    (tmp_path / "mine.py").write_text(REWARD)
    trained = groupwise("train", "quickstart", *SHORTER, "--run-folder", "run", cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr
    assert "Traceback" not in trained.stderr
    assert "final_model" in trained.stdout, "where everything lies is told at the end"

    summary = json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))
    assert [row["stage"] for row in summary["evaluations"]] == ["base", "warm_start", "final"]
    for row in summary["evaluations"]:
        assert row["n"] == 4
        assert all(0 <= row[name] <= 1 for name in ("strict_accuracy", "lenient_accuracy", "format_rate", "stop_rate"))
    assert summary["model"] == "smollm2-135m-instruct"
    assert summary["recipe"] == "quickstart"
    assert summary["seconds"] > 0
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["step"] for row in metrics] == [1, 2]
    assert all(row["policy/sampler_mismatch"] < 0.05 for row in metrics)
    assert all(row["optimizer/grad_norm"] > 0 for row in metrics)
    assert metrics[-1]["progress/policy_version"] == 2

    judged = groupwise(
        "eval", "run/final_model", "--json", "evaluation.problems=2", "evaluation.modes=[greedy]", "data.source=arithmetic",
        "data.arithmetic.problems=300", "rollout.max_completion_tokens=8", cwd=tmp_path,
    )  # fmt: skip
    assert judged.returncode == 0, judged.stderr
    assert json.loads(judged.stdout)["evaluations"][0]["n"] == 2

    said = groupwise("generate", "run/final_model", "What is 2 + 3?", "--max-tokens", "8", cwd=tmp_path)
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip()
