"""Held-out problems and lines of text divided among processes: the figures and answers of one."""

import io
import json
import subprocess
from types import SimpleNamespace

import pytest

from groupwise.chat import Speaker, answer_lines, answer_lines_together
from groupwise.config.schema import PromptConfig
from groupwise.engines.base import Engine, SamplingSettings
from groupwise.engines.wrappers import DealtEngine
from groupwise.types import Completion, Problem, Prompt
from tests.warm import python

LINES = ["one\n", "a longer question\n", "two?\n", "the last of them\n"]


class Counting:
    """An engine that answers a prompt with its length, and counts what it was asked."""

    def __init__(self):
        self.asked = 0

    def stream(self, prompt, settings, *, seed, on_text):
        self.asked += 1
        on_text(text := f"{len(prompt.text)} letters")
        return Completion(text, (1,), (0.0,), "stop")


def test_lines_are_answered_once_each_and_written_in_their_order(in_threads, tiny_folder):
    from transformers import AutoTokenizer

    def speaker():
        policy = SimpleNamespace(tokenizer=AutoTokenizer.from_pretrained(tiny_folder), context_length=200, name="counting")
        return Speaker(policy, Counting(), PromptConfig(), None, SamplingSettings(50), 0)

    def work(world):
        out, own = io.StringIO(), speaker()
        answer_lines_together(own, LINES, out, world)
        return out.getvalue(), own.engine.asked

    wanted = io.StringIO()
    answer_lines(speaker(), LINES, wanted)
    written = in_threads(3, work)
    assert [text for text, _ in written] == [wanted.getvalue(), "", ""]
    assert sum(asked for _, asked in written) == len(LINES)


def test_progress_is_that_of_all_processes(in_threads):
    """Process 0 has the long prompt, and process 1 the three short ones."""

    class Sampling(Engine):
        def serve(self, request, on_progress=None):
            on_progress(1, 6)
            said = [Completion("", (1,) * len(p.token_ids), (0.0,) * len(p.token_ids), "stop") for p in request.prompts]
            return [(one, one) for one in said]

        def refresh(self, policy_version):
            pass

    prompts = [Prompt(Problem(str(i), "?", "1"), "?", (1,) * tokens) for i, tokens in enumerate((100, 2, 2, 2))]

    def work(world):
        told = []
        DealtEngine(Sampling(), world).sample(
            prompts, 2, SamplingSettings(8), seed=0, scope="x", on_progress=lambda *now: told.append(now)
        )
        return told

    assert in_threads(2, work) == [[(4, 24), (8, 212)], [(1, 8), (8, 212)]]


@pytest.mark.slow
def test_two_processes_judge_as_one(tiny_folder, sums, tmp_path):
    """By the command line: one set of figures, and one line of records for each completion."""
    words = ["eval", str(tiny_folder), f"data.source={sums}", "data.holdout=5", "evaluation.problems=5", "model.device=cpu",
             "model.dtype=float32", "rollout.max_completion_tokens=6", "--json"]  # fmt: skip
    found = []
    for count in ("1", "2"):
        out = tmp_path / f"{count}.jsonl"
        command = [python(), "-m", "groupwise", *words, "--num-processes", count, "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        figures = [{k: v for k, v in one.items() if k != "seconds"} for one in json.loads(done.stdout)["evaluations"]]
        found.append((figures, out.read_text()))
    assert found[0] == found[1]


def test_processes_without_lines_to_divide_are_refused(monkeypatch):
    from typer.testing import CliRunner

    from groupwise.cli.app import app

    done = CliRunner().invoke(app, ["generate", "any", "a question", "--num-processes", "2"])
    assert "several processes divide lines of standard input" in done.output + str(done.exception)
