"""An evaluation that is stopped goes on where it was, and comes to what it would have come to."""

import json
from dataclasses import replace

import pytest

from groupwise.engines.base import SamplingSettings
from groupwise.errors import DataError, TrainingError
from groupwise.evaluation import evaluate, write_records
from groupwise.evaluation.records import PartialRecords, refuse_to_lose
from groupwise.types import Completion, Problem, Prompt

PROMPTS = [Prompt(Problem(str(i), f"{i} + 1?", str(i + 1)), f"<user>{i} + 1?", (1, 2)) for i in range(7)]
SETTINGS = SamplingSettings(max_tokens=9)


class Adder:
    """Says i + 1 and, as its second sample, something wrong; breaks before the call number ``breaks``."""

    def __init__(self, breaks=99):
        self.breaks, self.asked = breaks, []

    def sample(self, prompts, samples_per_prompt, settings, *, seed, scope, on_progress=None):
        if len(self.asked) == self.breaks:
            raise KeyboardInterrupt
        self.asked.append([prompt.problem.id for prompt in prompts])
        on_progress(len(prompts) * samples_per_prompt, 3 * len(prompts) * samples_per_prompt)
        said = ("<answer>{}</answer>", "none \ud800 {}")
        return [
            tuple(
                Completion(one.format(int(p.problem.id) + 1), (1, 2, 3), (-1.0,) * 3, "stop") for one in said[:samples_per_prompt]
            )
            for p in prompts
        ]


def judge(engine, partial, samples=2, seed=3, progress=None, mode="sampled"):
    return evaluate(
        engine, PROMPTS, stage="eval", mode=mode, settings=SETTINGS, style="xml", seed=seed, samples=samples, further=True,
        asked={"data": "sums", "available": 7, "shots": 0}, partial=partial, on_progress=progress,
    )  # fmt: skip


def stopped(path):
    """Four of the seven problems are judged, in one part."""
    with pytest.raises(KeyboardInterrupt):
        judge(Adder(breaks=1), PartialRecords(path, [], rows=8).of("m"))


def test_the_parts_come_to_the_whole(tmp_path):
    whole = judge(Adder(), None)
    stopped(tmp_path / "p")
    engine, told = Adder(), []
    rest = judge(
        engine,
        PartialRecords(tmp_path / "p", PartialRecords.read(tmp_path / "p"), rows=4).of("m"),
        progress=lambda *n: told.append(n),
    )
    assert engine.asked == [["4", "5"], ["6"]]
    assert rest.records == whole.records
    assert rest.figures == whole.figures
    assert told == [(8, 0), (12, 12), (14, 18)], "what was there is finished, and was not sampled by this command"
    lines = PartialRecords.read(tmp_path / "p")
    assert [(line["problem"], line["sample"]) for line in lines] == [(str(i), s) for i in range(7) for s in (0, 1)]
    nothing_left = Adder()
    again = judge(nothing_left, PartialRecords(tmp_path / "p", lines, rows=4).of("m"))
    assert (nothing_left.asked, again.records) == ([], whole.records)


@pytest.mark.parametrize("cut", [1, 40, 400])
def test_a_problem_with_half_its_samples_is_judged_again(tmp_path, cut):
    """A stop while a line was written leaves a part of it, and of that problem one sample or none; and it may happen twice."""
    stopped(tmp_path / "p")
    whole = judge(Adder(), None)
    for breaks in (1, 99):
        (tmp_path / "p").write_bytes((tmp_path / "p").read_bytes()[:-cut])
        found = PartialRecords.read(tmp_path / "p")
        assert [line["problem"] for line in found] == [str(i // 2) for i in range(len(found))]
        assert len(found) % 2 == 0
        engine = Adder(breaks)
        partial = PartialRecords(tmp_path / "p", found, rows=2).of("m")
        if breaks == 1:
            with pytest.raises(KeyboardInterrupt):
                judge(engine, partial)
        else:
            assert judge(engine, partial).records == whole.records
        assert engine.asked[0] == [str(len(found) // 2)]
    assert len(PartialRecords.read(tmp_path / "p")) == 14


def no_room(*args):
    raise OSError(28, "No space left on device")


def test_a_disk_that_fills_is_one_sentence_and_what_was_judged_before_is_kept(tmp_path, monkeypatch):
    stopped(tmp_path / "p")
    before = (tmp_path / "p").read_bytes()
    partial = PartialRecords(tmp_path / "p", PartialRecords.read(tmp_path / "p"), rows=2).of("m")
    with monkeypatch.context() as patch:
        patch.setattr("groupwise.evaluation.records.os.fsync", no_room)
        told = (
            r"/p' cannot be written \(No space left on device\): free space .* go on with --resume, which keeps what was written"
        )
        with pytest.raises(TrainingError, match=told):
            judge(Adder(), partial)
        with pytest.raises(TrainingError, match=told):
            PartialRecords(tmp_path / "p", PartialRecords.read(tmp_path / "p"), rows=2)
    assert (tmp_path / "p").read_bytes().startswith(before)
    whole = judge(Adder(), PartialRecords(tmp_path / "p", PartialRecords.read(tmp_path / "p"), rows=2).of("m"))
    assert whole.records == judge(Adder(), None).records


@pytest.mark.parametrize(
    ("left", "remedy"), [(True, r"--resume, since .* is in '.*/all\.jsonl\.partial'"), (False, "write them again")]
)
def test_records_that_the_disk_does_not_take_leave_those_that_were_there(tmp_path, monkeypatch, left, remedy):
    out = tmp_path / "all.jsonl"
    out.write_text("earlier")
    if left:
        stopped(tmp_path / "all.jsonl.partial")
    monkeypatch.setattr("groupwise.durable.os.fsync", no_room)
    with pytest.raises(TrainingError, match=rf"all\.jsonl' cannot be written \(No space left on device\): free space .*{remedy}"):
        write_records(out, [("m", [judge(Adder(), None)])])
    assert out.read_text() == "earlier"


def test_parts_grow_to_four_times_the_first(tmp_path):
    partial, prompts = PartialRecords(tmp_path / "p", [], rows=4), PROMPTS * 3
    parts = list(partial.parts(prompts, 2))
    assert [len(part) for part in parts] == [2, 4, 8, 7]
    assert [prompt for part in parts for prompt in part] == prompts
    assert list(partial.parts([], 2)) == []


def test_a_part_is_what_the_processes_sample_at_once_in_each_mode(tmp_path):
    partial = PartialRecords(tmp_path / "p", [], rows=16, processes=2)
    assert [len(next(partial.parts(PROMPTS * 10, samples))) for samples in (1, 4, 64)] == [32, 8, 2]
    for mode, first in (("sampled", 2), ("greedy", 4)):
        judge(engine := Adder(), PartialRecords(tmp_path / mode, [], rows=4).of("m"), mode=mode)
        assert len(engine.asked[0]) == first


def test_what_the_command_would_lose_is_refused(tmp_path):
    stopped(tmp_path / "p.jsonl.partial")
    found = PartialRecords.read(tmp_path / "p.jsonl.partial")
    refuse_to_lose(tmp_path / "p.jsonl", found, {("m", "sampled"), ("n", "sampled")})
    for asked in ({("n", "sampled")}, {("m", "greedy")}):
        with pytest.raises(DataError, match=r"p.jsonl' has sampled completions of m, which this command does not judge"):
            refuse_to_lose(tmp_path / "p.jsonl", found, asked)


def test_what_was_hidden_in_a_record_is_no_other_problem(tmp_path, monkeypatch):
    """GSM8K's "basic manicure" was, and its test split could not be resumed."""
    monkeypatch.setattr(f"{__name__}.PROMPTS", [replace(PROMPTS[0], text="mail hf_" + "Ab1" * 10), *PROMPTS[1:]])
    stopped(tmp_path / "p")
    assert "mail <hidden>" in (tmp_path / "p").read_text()
    engine = Adder()
    judge(engine, PartialRecords(tmp_path / "p", PartialRecords.read(tmp_path / "p"), rows=14).of("m"))
    assert engine.asked == [["4", "5", "6"]]


def test_models_have_records_of_their_own(tmp_path):
    stopped(tmp_path / "p")
    engine = Adder()
    judge(engine, PartialRecords(tmp_path / "p", PartialRecords.read(tmp_path / "p"), rows=14).of("another"))
    assert engine.asked == [[str(i) for i in range(7)]]


def test_what_another_evaluation_left_is_refused(tmp_path):
    stopped(tmp_path / "p")
    found = PartialRecords.read(tmp_path / "p")
    with pytest.raises(DataError, match="with other seed than now"):
        judge(Adder(), PartialRecords(tmp_path / "p", found, rows=4).of("m"), seed=4)
    with pytest.raises(DataError, match="with other samples than now"):
        judge(Adder(), PartialRecords(tmp_path / "p", found, rows=4).of("m"), samples=1)
    others = [{**line, "prompt": "<user>Please: " + line["prompt"]} for line in found]
    with pytest.raises(DataError, match="with other problems than now"):
        judge(Adder(), PartialRecords(tmp_path / "p", others, rows=4).of("m"))
    with pytest.raises(DataError, match="with other problems than now"):
        judge(Adder(), PartialRecords(tmp_path / "p", [*found, *found, *found], rows=4).of("m"))


def test_a_process_that_does_not_write_knows_what_was_judged(tmp_path):
    stopped(tmp_path / "p")
    found = PartialRecords.read(tmp_path / "p")
    before = (tmp_path / "p").read_bytes()
    second = judge(Adder(), PartialRecords(tmp_path / "p", found, rows=4, writes=False).of("m"))
    assert (second.n, (tmp_path / "p").read_bytes()) == (7, before)


def test_a_file_of_something_else_is_refused(tmp_path):
    (tmp_path / "p").write_text(json.dumps({"step": 1}) + "\n")
    with pytest.raises(DataError, match="p line 1 is no record"):
        PartialRecords.read(tmp_path / "p")
    assert PartialRecords.read(tmp_path / "nothing") == []
