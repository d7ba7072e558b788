"""Every sink gets everything; one that fails is named once and left out; the run goes on."""

import io
import json
import logging
import os
import re

import pytest
from rich.console import Console

from groupwise.config.schema import Config
from groupwise.tracking import METRICS, ConsoleTracker, JsonlTracker, RunFolder, Trackers, describe_metric, make_trackers
from groupwise.types import Completion, Group, Problem, Prompt


class Broken:
    """A sink whose every call fails, and that counts them."""

    def __init__(self):
        self.calls = 0

    def fail(self, *values):
        self.calls += 1
        raise RuntimeError("disk on fire")

    step = completions = evaluation = close = fail


def group(i=0):
    completions = (
        Completion("<answer>4</answer>", (5, 6, 2), (-0.1, -0.2, -0.3), "stop", 0, 9),
        Completion("who \u2028 knows\nthen", (5, 6), (-0.1, -0.2), "length", 1, 9),
    )
    prompt = Prompt(Problem(f"p{i}", "2 + 2?", "4"), "<user> 2 + 2?", (1, 2))
    return Group(prompt, completions, (2.0, 0.5), {"correctness": (2.0, None), "format": (0.0, 0.5)})


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_metrics_are_one_line_a_step_readable_at_once(tmp_path):
    folder = RunFolder(tmp_path)
    tracker = JsonlTracker(folder)
    tracker.step(1, {"reward/mean": 0.5, "policy/loss": float("nan")})
    first = lines(folder.metrics)  # before close: the line was flushed
    tracker.step(2, {"reward/mean": 1.0})
    tracker.close()
    assert {k: first[0][k] for k in ("step", "reward/mean", "policy/loss")} == {
        "step": 1,
        "reward/mean": 0.5,
        "policy/loss": None,
    }
    rows = lines(folder.metrics)
    assert [row["step"] for row in rows] == [1, 2]
    assert 0 <= rows[0]["time_s"] <= rows[1]["time_s"]


def test_the_clock_of_a_resumed_run_goes_on(tmp_path):
    folder = RunFolder(tmp_path)
    assert folder.elapsed_s() == 0
    folder.metrics.write_text('{"step": 1, "time_s": 50.0}\n{"step": 2, "time_s": 70.5}\n')
    JsonlTracker(folder).step(3, {})
    assert json.loads(folder.metrics.read_text().splitlines()[-1])["time_s"] >= 70.5


def test_completions_are_written_whole_with_their_scores(tmp_path):
    folder = RunFolder(tmp_path)
    tracker = JsonlTracker(folder, log_completions=2)
    tracker.completions(3, [group(0), group(1), group(2)], [[0.7, -0.7], [0.6, -0.6], [0.5, -0.5]])
    rows = lines(folder.completions)
    assert [(row["problem"], row["sample"], row["advantage"]) for row in rows] == [
        ("p0", 0, 0.7),
        ("p0", 1, -0.7),
        ("p1", 0, 0.6),
        ("p1", 1, -0.6),
    ]
    assert rows[1] == {
        "step": 3,
        "problem": "p0",
        "sample": 1,
        "prompt": "<user> 2 + 2?",
        "completion": "who \u2028 knows\nthen",
        "expected": "4",
        "reward": 0.5,
        "components": {"correctness": None, "format": 0.5},
        "advantage": -0.7,
        "finish_reason": "length",
        "tokens": 2,
        "policy_version": 9,
    }


def test_the_first_groups_are_written_token_by_token(tmp_path):
    folder = RunFolder(tmp_path)
    JsonlTracker(folder, log_completions=2, log_tokens=1).completions(3, [group(0), group(1)])
    rows = lines(folder.completions)
    assert [(row.get("token_ids"), row.get("logprobs")) for row in rows] == [
        ([5, 6, 2], [-0.1, -0.2, -0.3]),
        ([5, 6], [-0.1, -0.2]),
        (None, None),
        (None, None),
    ]


def test_no_completions_are_written_when_none_are_wanted(tmp_path):
    JsonlTracker(RunFolder(tmp_path), log_completions=0).completions(1, [group()])
    assert os.listdir(tmp_path) == []


def test_a_failing_sink_is_named_once_and_the_others_go_on(tmp_path, caplog):
    broken, folder = Broken(), RunFolder(tmp_path)
    trackers = Trackers([broken, JsonlTracker(folder)])
    with caplog.at_level(logging.WARNING, logger="groupwise"):
        for step in (1, 2, 3):
            trackers.step(step, {"reward/mean": 1.0})
        trackers.completions(3, [group()])
        trackers.close()
    assert [record.message for record in caplog.records] == [
        f"Broken failed (RuntimeError: disk on fire): the run goes on without it; {folder.metrics} has every number"
    ]
    assert broken.calls == 2  # the step, and the attempt to close it
    assert len(lines(folder.metrics)) == 3


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_does_not_end_the_run(tmp_path, caplog):
    folder = RunFolder(tmp_path)
    folder.metrics.symlink_to("/dev/full")
    trackers = Trackers([JsonlTracker(folder)])
    trackers.step(1, {"reward/mean": 1.0})
    trackers.step(2, {"reward/mean": 1.0})
    assert caplog.text.count("No space left") == 1
    assert "wait in memory" in caplog.text
    trackers.close()
    assert caplog.text.count("goes on without it") == 1


class BrokenTerminal(ConsoleTracker):
    def __init__(self, fails_at):
        super().__init__(Console(file=io.StringIO(), force_terminal=True))
        self.fails_at = fails_at

    def begin_phase(self, name, total, unit="", begun_at=0):
        if self.fails_at == "begin":
            raise OSError("gone")
        return super().begin_phase(name, total, unit, begun_at)

    def end_phase(self, phase, completed):
        if self.fails_at == "end":
            raise OSError("gone")
        super().end_phase(phase, completed)

    def phase_changed(self, phase):
        if self.fails_at == "advance":
            raise OSError("gone")


@pytest.mark.parametrize("fails_at", ["begin", "advance", "end"])
def test_a_terminal_that_goes_away_takes_no_phase_with_it(fails_at, caplog):
    console = BrokenTerminal(fails_at)
    trackers = Trackers([console])
    with trackers.phase("GRPO", 3) as bar:
        for _ in range(3):
            bar.advance(1, loss=1.0)
    assert bar.done == 3
    assert trackers.sinks == []
    assert console.display.live is None
    assert caplog.text.count("goes on without it") == 1


def test_an_error_of_the_run_itself_passes_through():
    trackers = Trackers([BrokenTerminal("nowhere")])
    with pytest.raises(ValueError, match="mine"), trackers.phase("GRPO", 3):
        raise ValueError("mine")
    assert len(trackers.sinks) == 1


def test_without_sinks_everything_is_quiet():
    trackers = make_trackers(Config(), None, None)
    with trackers.phase("GRPO", 3) as bar:
        bar.advance(2)
        trackers.step(1, {})
    trackers.show_summary({})
    trackers.close()
    assert bar.done == 2


def test_settings_reach_the_sinks(tmp_path):
    config = Config.model_validate({"output": {"log_completions": 9, "log_tokens": 3}, "evaluation": {"show": 5}})
    jsonl, console = make_trackers(config, RunFolder(tmp_path), Console()).sinks
    assert (jsonl.log_completions, jsonl.log_tokens, console.show) == (9, 3, 5)


def test_every_metric_has_a_unit_and_a_sentence():
    for name, (unit, meaning) in METRICS.items():
        assert re.fullmatch(r"[a-z_]+/[a-z_<>]+", name)
        assert unit
        assert meaning.endswith(".")
    assert describe_metric("reward/my_function") == METRICS["reward/<component>"]
    assert describe_metric("updates/clip_share_12") == METRICS["updates/clip_share_<k>"]
    assert describe_metric("updates/clip_share_x") is None
    assert describe_metric("reward/mean") == METRICS["reward/mean"]
    assert describe_metric("policy/unheard_of") is None


def test_a_full_disk_loses_no_record(tmp_path, monkeypatch, caplog):
    """The third write fails in the middle of a line, later ones at once, until there is room again."""
    tracker, write, tries = JsonlTracker(RunFolder(tmp_path)), os.write, []

    def full(descriptor, content):
        tries.append(content)
        if len(tries) == 3:
            return write(descriptor, content[:7])
        if 3 < len(tries) < 7:
            raise OSError(28, "No space left on device")
        return write(descriptor, content)

    monkeypatch.setattr("groupwise.tracking.files.os.write", full)
    for step in range(1, 8):
        tracker.step(step, {"reward/mean": 0.5})
    tracker.close()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
    assert [record.message.count("No space left") for record in caplog.records] == [1, 0]


def test_a_disk_that_stays_full_is_said_to_have_lost_records(tmp_path, monkeypatch, caplog):
    def full(descriptor, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("groupwise.tracking.files.os.write", full)
    trackers = Trackers([JsonlTracker(RunFolder(tmp_path))])
    trackers.step(1, {})
    trackers.step(2, {})
    trackers.close()
    assert [record.message.split(" ")[0] for record in caplog.records] == ["records", "JsonlTracker"]
