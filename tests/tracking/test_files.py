"""Files are replaced whole or not at all, and every line is JSON that any reader takes."""

import errno
import json
import os
import stat

import pytest

from groupwise.config import load_config
from groupwise.data.named import is_prepared
from groupwise.data.sources import load_problems
from groupwise.errors import CheckpointError, DataError, ModelError
from groupwise.evaluation.records import read_records
from groupwise.models.folder import check_folder
from groupwise.planner import find_shape
from groupwise.tracking.files import json_line, write_json, write_json_lines, write_text
from groupwise.tracking.reading import read_run
from groupwise.tracking.run_folder import RunFolder, ending_of, last_step, steps_in_settings
from groupwise.tracking.text import hide_secrets
from groupwise.training.checkpoint_folder import read_state, verify_checkpoint


def test_a_failed_write_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    path = tmp_path / "summary.json"
    write_json(path, {"kept": 1})

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"kept": 2})
    assert json.loads(path.read_text()) == {"kept": 1}
    assert os.listdir(tmp_path) == ["summary.json"]


def test_content_is_on_disk_before_the_name_points_to_it(tmp_path, monkeypatch):
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("sync"), fsync(fd))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), replace(a, b))[1])
    write_text(tmp_path / "a.txt", "x")
    assert calls == ["sync", "rename", "sync"]


def test_files_get_the_usual_permissions(tmp_path):
    old = os.umask(0o022)
    try:
        write_text(tmp_path / "a.txt", "x")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a.txt").stat().st_mode) == 0o644


@pytest.mark.parametrize(
    "text", ["\u2028 and \u2029 and \x85", "lone \udc80 surrogate", 'quote " back \\ tab \t nul \x00', "emoji 👩‍👩‍👧 ünï"]
)
def test_any_text_survives_a_line(text):
    line = json_line({"text": text})
    assert len(line.decode("utf-8").splitlines()) == 1
    assert json.loads(line) == {"text": text}


def test_what_is_not_finite_is_null_at_any_depth():
    line = json_line({"a": float("nan"), "b": [float("inf"), {"c": -float("inf")}], "d": 1.5, "e": True})
    assert line == b'{"a": null, "b": [null, {"c": null}], "d": 1.5, "e": true}\n'


def test_array_scalars_become_numbers():
    numpy = pytest.importorskip("numpy")
    assert json.loads(json_line({"x": numpy.float32(0.5), "n": numpy.int64(3), "bad": numpy.float64("nan")})) == {
        "x": 0.5,
        "n": 3,
        "bad": None,
    }


def test_one_line_a_row(tmp_path):
    write_json_lines(tmp_path / "r.jsonl", [{"a": 1}, {"a": 2}])
    assert [json.loads(line) for line in (tmp_path / "r.jsonl").read_text().splitlines()] == [{"a": 1}, {"a": 2}]


def test_what_stands_in_secret_environment_variables_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_API_KEY", 'quo"ted\\ké-1234')
    monkeypatch.setenv("APP_TOKEN", "production")
    monkeypatch.setenv("SHORT_TOKEN", "a1")
    write_json(tmp_path / "a.json", {"prompt": ['use quo"ted\\ké-1234 in production, a1']})
    assert json.loads((tmp_path / "a.json").read_text()) == {"prompt": ["use <hidden> in production, a1"]}
    assert "api_key=abc" not in json_line({"prompt": ["see https://h/x?api_key=abc"]}).decode()
    assert hide_secrets({"any": 'quo"ted\\ké-1234'}) == {"any": "<hidden>"}


ENDLESS = "[" * 100_000
READERS = {
    "rows.jsonl": (DataError, lambda path: load_problems(load_config(None, [f"data.source={path}"]).data)),
    "rows.json": (DataError, lambda path: load_problems(load_config(None, [f"data.source={path}"]).data)),
    "records.jsonl": (DataError, read_records),
    "config.json": (ModelError, lambda path: check_folder(path.parent)),
    "./config.json": (ModelError, lambda path: find_shape(load_config(None, [f"model.name={path.parent}"]).model)),
    "manifest.json": (CheckpointError, lambda path: verify_checkpoint(path.parent)),
    "state.json": (CheckpointError, lambda path: read_state(path.parent)),
}


@pytest.mark.parametrize("name", READERS)
def test_json_nested_too_deeply_is_told_as_a_damaged_file(tmp_path, name):
    error, read = READERS[name]
    (tmp_path / name).write_text(ENDLESS)
    with pytest.raises(error) as told:
        read(tmp_path / name)
    assert name.removeprefix("./").partition(".")[0] in str(told.value) or str(tmp_path) in str(told.value)


def test_json_nested_too_deeply_is_left_out_of_a_run_s_folder(tmp_path):
    folder = RunFolder(tmp_path)
    folder.config.write_text("[" * 600)
    for path in (folder.environment, folder.metrics, folder.summary, tmp_path / "metadata.json"):
        path.write_text(ENDLESS + "\n")
    assert ending_of(folder) is None
    assert (last_step(folder.metrics), steps_in_settings(folder.config), is_prepared(str(tmp_path))) == (0, 0, False)
    run = read_run(tmp_path)
    assert run.config is None
    assert set(run.unreadable) == {"config.yaml", "environment.json", "metrics.jsonl", "summary.json"}


def test_a_run_whose_settings_are_a_bomb_of_aliases_is_read_at_once(tmp_path):
    bomb = "a0: &a0 [0, 0]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30))
    (tmp_path / "config.yaml").write_text(bomb)
    assert read_run(tmp_path).settings == {}
    (tmp_path / "config.yaml").write_text("a: &a {b: *a}\n")
    assert read_run(tmp_path).settings == {}
