"""The rows of MATH for a run: the levels asked for, and none of the problems that judge it."""

import json

import pytest

from experiments import math_levels


def test_levels_1_to_3_and_none_of_math_500(shared_data, monkeypatch):
    monkeypatch.setenv("GROUPWISE_DATA", str(shared_data))
    rows = math_levels.up_to_3()
    assert len(rows) == 564 + 1345 + 1584
    assert {row["difficulty"] for row in rows} == {1, 2, 3}
    lines = (shared_data / "competition-math" / "math500_test.jsonl").read_text(encoding="utf-8").splitlines()
    judged = {" ".join(json.loads(line)["problem"].split()) for line in lines}
    assert not judged & {" ".join(row["problem"].split()) for row in rows}


def test_a_folder_without_the_file_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("GROUPWISE_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="set GROUPWISE_DATA to the folder that has it"):
        math_levels.up_to_3()
