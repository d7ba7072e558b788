"""Episodes that two processes play between them are those that one plays."""

import json
import sys

import pytest

from groupwise.config.schema import RolloutConfig
from groupwise.engines.base import SamplingSettings
from groupwise.engines.wrappers import DealtEngine
from groupwise.errors import TrainingError
from groupwise.rollout import assign_prompts
from groupwise.types import Problem, Prompt
from tests.tiny import forking, tiny_config, write_tiny_llama


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


AGENT = """
import json, os, sys, urllib.request
messages = [{"role": "user", "content": json.load(sys.stdin)["prompt"]}]
headers = {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
for _ in range(2):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    with urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)) as answer:
        messages.append(json.load(answer)["choices"][0]["message"])
    messages.append({"role": "user", "content": "And?"})
print(json.dumps({"reward": sum(letter.islower() for letter in messages[-2]["content"])}))
"""


@pytest.mark.slow  # games and forks show the same of two processes
def test_agents_of_two_processes_play_as_those_of_one(train_in, talkative, sums, tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    config = tiny_config(
        talkative, sums, rollout={"environment": {"command": f"{sys.executable} {tmp_path / 'agent.py'}"}, "max_completion_tokens": 150},
        rewards={"functions": [{"function": "environment"}]}, output={"log_completions": 9},
    )  # fmt: skip
    (alone, one), (together, two) = train_in(1, "one", config), train_in(2, "two", config)
    first, second = recorded(one), recorded(two)
    assert sum(len(row["turns"]) > 1 for row in first) > 5, "the test needs episodes of several turns"
    assert [row["turns"] for row in second] == [row["turns"] for row in first]
    assert [row["reward"] for row in second] == [row["reward"] for row in first]
    for ours, theirs in zip(alone, together, strict=True):
        assert theirs.metrics["policy/loss"] == pytest.approx(ours.metrics["policy/loss"], rel=1e-4, abs=1e-6)


def test_two_processes_learn_from_forks_as_one_does(train_in, tmp_path, sums):
    shape = {"tie_word_embeddings": False, "max_position_embeddings": 512}
    model = forking(write_tiny_llama(tmp_path / "forking", stop_weight=60.0, **shape))
    played = {
        "environment": "tests.survival.game:Talk",
        "max_turns": 4,
        "max_completion_tokens": 400,
        "rewritten_history": "fork",
    }
    config = tiny_config(
        model, sums, rollout=played, rewards={"functions": [{"function": "environment"}]}, output={"log_completions": 9},
    )  # fmt: skip
    (alone, one), (together, two) = train_in(1, "one", config), train_in(2, "two", config)
    first, second = recorded(one), recorded(two)
    assert sum(turn["rewritten"] for row in first for turn in row["turns"]) > 5, "the test needs forks"
    assert [row["turns"] for row in second] == [row["turns"] for row in first]
    for ours, theirs in zip(alone, together, strict=True):
        for name in ("episodes/turns", "episodes/given_tokens", "reward/mean", "policy/loss", "optimizer/grad_norm"):
            assert theirs.metrics[name] == pytest.approx(ours.metrics[name], rel=1e-4, abs=1e-6), name


def test_processes_that_have_another_number_of_prompts_are_told(in_threads):
    def work(world):
        prompts = [Prompt(Problem(name, "?", "1"), "?", (5,)) for name in "pq"[: 2 - world.rank]]
        return DealtEngine(None, world).sample(prompts, 2, SamplingSettings(8), seed=0, scope="x")

    with pytest.raises(TrainingError, match=r"process 1 of 2 has another prompt (for problem q|in place 1) than process 0"):
        in_threads(2, work)


@pytest.mark.parametrize("way", ["a step's", "all"])
def test_prompts_that_a_process_renders_otherwise_are_refused(in_threads, way):
    """Of the same length, too: all would learn under their own what one has sampled."""

    def work(world):
        ids = [(5, 6), (7, 8 + world.rank)]
        prompts = [Prompt(Problem(name, "?", "1"), "?", of) for name, of in zip("pq", ids, strict=True)]
        if way == "all":
            return DealtEngine(None, world).sample(prompts, 2, SamplingSettings(8), seed=0, scope="x")
        return assign_prompts(prompts, RolloutConfig(), world)

    with pytest.raises(TrainingError, match=r"process 1 of 2 has another prompt for problem q than process 0, .* seed"):
        in_threads(2, work)
