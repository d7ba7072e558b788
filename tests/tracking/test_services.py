"""TensorBoard, Weights & Biases and trackio get what they should, read back with the packages' own means; a service that fails, hangs
or is gone costs one warning and nothing else."""

import importlib.util
import json
import math
import struct
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from groupwise.config import load_config
from groupwise.errors import ConfigError
from groupwise.tracking import EVALUATION_METRICS, JsonlTracker, RunFolder, Trackers, describe_metric, make_trackers, services
from groupwise.tracking.numbers import evaluation_numbers, evaluation_step
from groupwise.tracking.services import BackgroundTracker, WandbTracker
from groupwise.training.setup import prepare
from tests.waiting import comes


class Judged:
    """An evaluation as far as sinks look at it."""

    mode = "greedy"
    records = ()

    def __init__(self, stage):
        self.stage = stage

    def to_summary(self):
        return {
            "stage": self.stage, "mode": "greedy", "strict_accuracy": 0.25, "lenient_accuracy": 0.5, "format_rate": 0.75, "stop_rate": 1.0,
            "mean_tokens": 33.0,
            "figures": {"pass_at": {"1": [0.25, 0.1, 0.4], "4": [0.5, 0.3, 0.7]}, "majority_at": {"4": [0.3, 0.2, 0.4]},
                        "success": [0.6, 0.5, 0.7], "episodes": dict.fromkeys(
                            ("turns", "calls", "invalid_calls", "failed_calls", "sampled_tokens", "given_tokens", "reward",
                             "environment_failed"), 0.1)},
        }  # fmt: skip


class Remembering:
    """A sink that fails from its call number ``fails_at`` on, and remembers what it was given. Evaluations wait until it is ``freed``."""

    def __init__(self, fails_at=math.inf):
        self.fails_at, self.seen, self.closed = fails_at, [], 0
        self.hangs, self.freed = threading.Event(), threading.Event()

    def step(self, step, metrics):
        if len(self.seen) + 1 >= self.fails_at:
            raise ConnectionError("service down")
        self.seen.append((step, dict(metrics)))

    def completions(self, step, groups, advantages=None, token_advantages=None): ...

    def evaluation(self, result):
        self.hangs.set()
        self.freed.wait(120)

    def close(self):
        self.closed += 1


def folder_with(tmp_path, *overrides, name="run"):
    config = load_config("quickstart", list(overrides))
    return config, RunFolder.create(config, tmp_path / name, "x", command=["x"])


def three_steps_and_a_verdict(config, folder, caplog):
    trackers = make_trackers(config, folder, None)
    for step in (1, 2, 3):
        trackers.step(step, {"reward/mean": step / 2, "policy/loss": math.nan})
    trackers.evaluation(Judged("final"))
    assert len(trackers.sinks) == 1 + len(set(config.output.trackers) - {"jsonl"}), caplog.text
    trackers.close()
    assert [r for r in caplog.records if r.name == "groupwise"] == []


def test_by_default_there_are_only_the_runs_own_files(tmp_path):
    config, folder = folder_with(tmp_path)
    assert [type(sink) for sink in make_trackers(config, folder, None).sinks] == [JsonlTracker]
    config, folder = folder_with(tmp_path, "output.trackers=[]", name="other")
    assert [type(sink) for sink in make_trackers(config, folder, None).sinks] == [JsonlTracker]


@pytest.mark.parametrize("name", sorted(services.SERVICES))
def test_a_package_that_is_not_there_is_told_before_the_run_with_its_extra(name, monkeypatch):
    config = load_config("quickstart", [f"output.trackers=[jsonl, {name}]"])
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted, *rest: None if wanted == name else found(wanted, *rest))
    with pytest.raises(ConfigError, match=rf"pip install 'groupwise\[{name}\]'"):
        prepare(config)


@pytest.mark.parametrize("name", sorted(services.SERVICES))
def test_a_folder_of_that_name_is_no_package(name, tmp_path, monkeypatch):
    """A service's own folder of runs in the working directory, where Python finds a namespace."""
    config = load_config("quickstart", [f"output.trackers=[{name}]"])
    (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    assert importlib.util.find_spec(name) is not None
    with pytest.raises(ConfigError, match=rf"the package {name} is not installed: pip install 'groupwise\[{name}\]'"):
        services.check_trackers(config)


def test_every_service_is_an_extra_of_the_package():
    import tomllib
    from pathlib import Path

    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    assert {name: extras[name][0].partition(">=")[0] for name in services.SERVICES} == {name: name for name in services.SERVICES}


def test_a_service_that_cannot_start_is_done_without(tmp_path, monkeypatch, caplog):
    def refuses(config, folder, done):
        raise ConnectionError("no route to host")

    config, folder = folder_with(tmp_path, "output.trackers=[wandb]")
    monkeypatch.setitem(services.SERVICES, "wandb", refuses)
    monkeypatch.setattr(services, "check_trackers", lambda config: None)
    trackers = make_trackers(config, folder, None)
    assert [type(sink) for sink in trackers.sinks] == [JsonlTracker]
    assert caplog.text.count("no route to host") == 1
    trackers.close()


def test_a_service_gone_in_mid_run_is_named_once_and_loses_nothing(tmp_path, caplog):
    sink, folder = Remembering(fails_at=3), RunFolder(tmp_path)
    aside = BackgroundTracker(sink, "wandb")
    trackers = Trackers([aside, JsonlTracker(folder)])
    for step in range(1, 6):
        trackers.step(step, {"reward/mean": 1.0})
        if step == 3:
            aside.thread.join(120)
    trackers.close()
    assert [step for step, _ in sink.seen] == [1, 2]
    assert sink.closed == 1
    assert [r.message for r in caplog.records] == [
        f"wandb failed (ConnectionError: service down): the run goes on without it; {folder.metrics} has every number"
    ]
    assert [json.loads(line)["step"] for line in folder.metrics.read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_a_service_that_fails_at_the_very_end_is_named_too(caplog):
    trackers = Trackers([BackgroundTracker(Remembering(fails_at=1), "trackio")])
    trackers.step(1, {})
    trackers.close()
    assert "trackio failed (ConnectionError: service down)" in caplog.text


def test_a_slow_service_holds_no_step_up_and_gets_everything():
    """It takes nothing until all ten steps are done."""
    sink = Remembering()
    trackers = Trackers([BackgroundTracker(sink, "wandb", close_limit_s=120)])
    trackers.evaluation(Judged("base"))
    for step in range(10):
        trackers.step(step, {"reward/mean": step})
    assert sink.seen == []
    sink.freed.set()
    trackers.close()
    assert sink.seen == [(step, {"reward/mean": step}) for step in range(10)]


def test_a_service_that_hangs_is_given_up_and_not_waited_for(caplog, monkeypatch):
    sink = Remembering()
    aside = BackgroundTracker(sink, "wandb", call_limit_s=0.05)
    monkeypatch.setattr(aside.thread, "join", lambda *limit: pytest.fail("waited for"))
    trackers = Trackers([aside])
    trackers.evaluation(Judged("base"))
    assert sink.hangs.wait(120)
    time.sleep(0.1)
    for step in (1, 2):
        trackers.step(step, {})
    trackers.close()
    assert [r.message for r in caplog.records] == [
        "wandb failed (TimeoutError: it has not answered for 0.05 s): the run goes on without it"
    ]
    sink.freed.set()


def test_a_service_that_hangs_at_the_end_is_waited_for_as_long_as_said(caplog):
    sink = Remembering()
    trackers = Trackers([BackgroundTracker(sink, "wandb", close_limit_s=0.1)])
    trackers.evaluation(Judged("base"))
    trackers.close()
    assert "it had not taken everything after 0.1 s" in caplog.text
    sink.freed.set()


def test_evaluations_have_a_step_and_names_that_the_table_knows():
    assert [evaluation_step(stage, 60) for stage in ("base", "warm_start", "step-20", "final")] == [0, 0, 20, 60]
    numbers = evaluation_numbers(Judged("final").to_summary())
    assert {name.replace("greedy", "<mode>").replace("_at_4", "_at_<k>") for name in numbers} == set(EVALUATION_METRICS)
    assert numbers["evaluation/greedy_pass_at_4"] == 0.5
    assert numbers["evaluation/greedy_majority_at_4"] == 0.3
    assert all(describe_metric(name) for name in numbers)


def test_the_page_about_following_a_run_has_every_evaluation_metric():
    from pathlib import Path

    page = (Path(__file__).resolve().parents[2] / "docs" / "how-to" / "following.md").read_text(encoding="utf-8")
    assert "`evaluation/<mode>_<figure>`" in page
    shares, others = page.split("- shares of held-out problems:")[1].split("\n\n")[0].split(";\n- ")
    for name, (unit, _) in EVALUATION_METRICS.items():
        assert f"`{name.removeprefix('evaluation/<mode>_')}`" in (shares if unit == "share" else others)
    assert all(f"| `{name}` |" in page for name in services.SERVICES)


def test_tensorboard_reads_its_file_back(tmp_path, caplog):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config, folder = folder_with(tmp_path, "output.trackers=[jsonl, tensorboard]")
    three_steps_and_a_verdict(config, folder, caplog)
    again = make_trackers(config, folder, None, done=1)  # resumed after step 1: what came later is done again
    again.step(2, {"reward/mean": 7.0})
    again.close()
    read = EventAccumulator(str(folder.path / "tensorboard"))
    read.Reload()
    assert [(event.step, event.value) for event in read.Scalars("reward/mean")] == [(1, 0.5), (2, 7.0)]
    assert "policy/loss" not in read.Tags()["scalars"]


def test_weights_and_biases_writes_without_a_network(tmp_path, caplog, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    config, folder = folder_with(tmp_path, "output.trackers=[jsonl, wandb]", "output.offline=true")
    three_steps_and_a_verdict(config, folder, caplog)
    (path,) = folder.path.glob("wandb/offline-run-*/*.wandb")
    assert comes(lambda: "exit" in [r.WhichOneof("record_type") for r in wandb_records(path.read_bytes())])  # by its own process
    records = list(wandb_records(path.read_bytes()))
    (run,) = [r.run for r in records if r.WhichOneof("record_type") == "run"]
    assert (run.project, run.run_id, run.display_name) == ("mine", folder.tracking_id, "run")
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in r.history.item}
        for r in records
        if r.WhichOneof("record_type") == "history"
    ]
    assert [(row["step"], row["reward/mean"]) for row in rows[:3]] == [(1, 0.5), (2, 1.0), (3, 1.5)]
    assert rows[3]["evaluation/greedy_strict"] == 0.25
    assert rows[3]["step"] == 3


def wandb_records(content):
    """The protocol buffers of a ``.wandb`` file: after 7 bytes, blocks of 32 KiB with records of checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    block, at, parts = 32768, 7, b""
    while at + 7 <= len(content):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", content[at : at + 7])
        if at + 7 + length > len(content):  # it is being written
            return
        parts, at = parts + content[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part of one
            record = Record()
            record.ParseFromString(parts)
            yield record
            parts = b""


def test_without_a_login_wandb_is_refused_before_the_run(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    config, folder = folder_with(tmp_path, "output.trackers=[wandb]")

    def refuses(**words):
        raise wandb.errors.UsageError("api_key not configured (no-tty)")

    monkeypatch.setattr(wandb, "init", refuses)
    with pytest.raises(ConfigError, match=r"api_key not configured.*wandb login.*output\.offline"):
        make_trackers(config, folder, None)


def stand_in_for_wandb(monkeypatch):
    """Returns what its ``init`` is given."""
    begun = []
    run = SimpleNamespace(define_metric=lambda *_, **__: None)
    errors = SimpleNamespace(UsageError=KeyError)
    package = SimpleNamespace(Settings=dict, errors=errors, init=lambda **given: (begun.append(given), run)[1])
    monkeypatch.setitem(sys.modules, "wandb", package)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return begun


def test_a_run_of_wandb_that_the_caller_has_is_neither_taken_nor_finished(tmp_path, monkeypatch):
    config, folder = folder_with(tmp_path, "output.trackers=[wandb]")
    begun = stand_in_for_wandb(monkeypatch)
    WandbTracker(config, folder, 0)
    assert [given["settings"]["reinit"] for given in begun] == ["create_new"]


@pytest.mark.parametrize("how", ["setting", "environment", "online"])
def test_parts_of_a_run_that_is_resumed_offline_are_sent_as_runs_of_one_group(tmp_path, monkeypatch, how):
    """By one id, `wandb sync` would replace each by the next."""
    offline = ["output.offline=true"] if how == "setting" else []
    config, folder = folder_with(tmp_path, "output.trackers=[wandb]", *offline)
    begun = stand_in_for_wandb(monkeypatch)
    if how == "environment":
        monkeypatch.setenv("WANDB_MODE", "offline")
    for done in (0, 20):
        WandbTracker(config, folder, done)
    one = folder.tracking_id
    ids, groups, resumes = ([given[name] for given in begun] for name in ("id", "group", "resume"))
    if how == "online":
        assert (ids, groups, resumes) == ([one, one], [None, None], ["allow", "allow"])
    else:
        assert (ids, groups, resumes) == ([one, f"{one}-from-20"], [one, one], [None, None])


def test_wandb_logs_into_a_run_of_its_own_beside_the_caller_s(tmp_path, caplog, monkeypatch):
    wandb = pytest.importorskip("wandb")
    own = wandb.init(mode="offline", dir=str(tmp_path), settings=wandb.Settings(silent=True, console="off"))
    config, folder = folder_with(tmp_path, "output.trackers=[jsonl, wandb]", "output.offline=true")
    three_steps_and_a_verdict(config, folder, caplog)
    assert wandb.run is own
    own.log({"mine": 1.0})
    own.finish()
    for path, steps in ((tmp_path, [None]), (folder.path, [1, 2, 3, 3])):
        (file,) = path.glob("wandb/offline-run-*/*.wandb")
        assert comes(lambda file=file: "exit" in [r.WhichOneof("record_type") for r in wandb_records(file.read_bytes())])
        rows = [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in r.history.item}
            for r in wandb_records(file.read_bytes())
            if r.WhichOneof("record_type") == "history"
        ]
        assert [row.get("step") for row in rows] == steps


def test_trackio_has_the_rows_in_its_data_base(tmp_path, caplog, monkeypatch, capsys):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    for module in (utils, importlib.import_module("trackio.sqlite_storage")):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio", raising=False)
    config, folder = folder_with(tmp_path, "output.trackers=[jsonl, trackio]", "output.project=mine")
    three_steps_and_a_verdict(config, folder, caplog)
    rows = SQLiteStorage.get_logs("mine", f"run-{folder.tracking_id}")
    assert [(row["step"], row.get("reward/mean")) for row in rows] == [(1, 0.5), (2, 1.0), (3, 1.5), (3, None)]
    assert rows[3]["evaluation/greedy_tokens"] == 33.0
    said = capsys.readouterr()
    assert said.out == "", "standard output belongs to --json"
    assert "trackio" in said.err
    assert "\x1b" not in said.err, "a log wants no colours"
