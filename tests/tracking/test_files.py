"""Files are replaced whole or not at all, and every line is JSON that any reader takes."""

import errno
import json
import os
import stat

import pytest

from groupwise.tracking.files import json_line, write_json, write_json_lines, write_text
from groupwise.tracking.secrets import hide_secrets


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
