"""What ``completions.jsonl`` says of tokens is what was sampled and what was learnt from."""

import json
import math

import pytest

from groupwise.report import write_report
from groupwise.tracking.reading import read_run
from groupwise.training.loop import train


def rows_of(folder):
    return [json.loads(line) for line in (folder / "completions.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("preset", ["grpo", "reinforce++", "ppo"])
def test_the_first_groups_have_tokens_and_their_own_advantages_where_they_differ(preset, small_config, letters, quiet, tmp_path):
    config = small_config(algorithm={"preset": preset, "kl": {"beta": 0.05}}, output={"log_tokens": 1})
    reports = []
    folder = train(config, rewards=letters, console=quiet, run_folder=tmp_path / "run", on_step=reports.append).folder
    rows = [row for row in rows_of(folder) if row["step"] == 2]
    group = reports[-1].groups[0]
    for row, completion in zip(rows[:4], group.completions, strict=True):
        assert row["token_ids"] == list(completion.token_ids)
        assert row["logprobs"] == pytest.approx(completion.logprobs, abs=5e-4)
        if preset == "grpo":
            assert "token_advantages" not in row
            continue
        assert len(row["token_advantages"]) == row["tokens"]
        assert math.fsum(row["token_advantages"]) / row["tokens"] == pytest.approx(row["advantage"], rel=1e-2, abs=1e-3)
    assert all("token_ids" not in row for row in rows[4:])
    assert all(row["strict"] is False for row in rows), "a random model is wrong, and it is said without grading again"
    assert write_report([folder]).completions == len(read_run(folder).completions) == 24
