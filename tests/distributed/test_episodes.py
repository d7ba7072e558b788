"""Episodes that two processes play between them are those that one plays."""

import json

import pytest

from tests.tiny import tiny_config, write_tiny_llama


@pytest.fixture(scope="module")
def talkative(tmp_path_factory):
    shape = {"tie_word_embeddings": False, "max_position_embeddings": 512}
    return write_tiny_llama(tmp_path_factory.mktemp("model") / "tiny", stop_weight=60.0, **shape)


def recorded(result):
    lines = (result.folder / "completions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("function", ["environment", "environment_turns"])
def test_episodes_of_two_processes_are_those_of_one(train_in, talkative, sums, function):
    config = tiny_config(
        talkative, sums, rollout={"environment": "tests.survival.game:Talk", "max_turns": 4, "max_completion_tokens": 150},
        rewards={"functions": [{"function": function}, {"function": "letters"}]}, output={"log_completions": 9},
    )  # fmt: skip
    (alone, one), (together, two) = train_in(1, "one", config), train_in(2, "two", config)
    first, second = recorded(one), recorded(two)
    assert sum(len(row["turns"]) > 1 for row in first) > 5, "the test needs episodes of several turns"
    assert [row["turns"] for row in second] == [row["turns"] for row in first]
    for ours, theirs in zip(alone, together, strict=True):
        for name in ("episodes/turns", "episodes/given_tokens", "reward/mean", "policy/loss", "optimizer/grad_norm"):
            assert theirs.metrics[name] == pytest.approx(ours.metrics[name], rel=1e-4, abs=1e-6), name
