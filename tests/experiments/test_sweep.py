"""The sweep over token budget, packing and processes, in miniature: one gradient everywhere, and a page that says what was measured."""

import re
import sys

import pytest

pytest.importorskip("matplotlib")

from experiments.common import PAGE, environment, read_block, read_numbers
from experiments.sweep import DTYPES, draw, measure, report
from tests.warm import python


@pytest.mark.slow
def test_no_setting_changes_the_gradient(tmp_path, tiny_folder, monkeypatch):
    monkeypatch.setattr("experiments.sweep.DTYPES", ("float32",))
    monkeypatch.setattr(sys, "executable", python())
    sizes = {"groups": 2, "completions": 3, "max_tokens": 6, "repeats": 1}
    numbers = measure(str(tiny_folder), (16, 4096), sizes, cores=1, work=tmp_path / "work")
    lines = numbers["curves"]["float32"]
    assert list(lines) == ["packed, 1 process", "packed, 2 processes", "padded rows, 1 process", "padded rows, 2 processes"]
    first = lines["packed, 1 process"]
    assert first[0]["passes"] > first[1]["passes"] == 1
    for points in lines.values():
        assert all(p["gradient_difference"] < 1e-5 and p["loss"] == pytest.approx(first[0]["loss"], abs=1e-6) for p in points)
        assert all(p["seconds"] > 0 and p["peak_gib"] > 0 for p in points)
    assert any(p["gradient_difference"] > 0 for points in lines.values() for p in points), "it was really compared"
    shown = numbers | {"environment": environment()}
    draw(shown, tmp_path / "sweep.svg")
    assert "<svg" in (tmp_path / "sweep.svg").read_text(encoding="utf-8")
    assert "in float32 the gradient differs by at most" in report(shown)


def test_the_page_shows_the_numbers_that_are_committed():
    block = read_block(PAGE, "sweep")
    numbers = read_numbers("sweep")
    assert block == report(numbers)
    for lines, most in zip((numbers["curves"][dtype] for dtype in DTYPES), (1e-4, 0.1), strict=True):
        assert all(p["gradient_difference"] < most for points in lines.values() for p in points)
    assert re.search(r"in float32 the gradient differs by at most", block)
